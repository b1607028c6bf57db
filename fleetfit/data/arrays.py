"""Any data set in arrays: `.npz` files as numpy.savez writes them, for every task.

For sensor readings, tables, features and whatever else is no image file; see `widar` for an example.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data._checks import MOST_CLASSES, SPLITS
from fleetfit.data._hold_out import completed
from fleetfit.data._npz import Arrays
from fleetfit.data._pictures import set_folder
from fleetfit.data.dataset import Data, Facts
from fleetfit.errors import DataError

FACTS = Facts(train=None, test=None, classes=None, resolution="any", source="a file of NumPy arrays")

Task = Literal["classification", "regression", "multi_label", "next_token"]
_ALIASES = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}
_ROWS = 4096  # rows in memory at a time


def arrays(
    file: str,
    x: str = "x",
    y: str = "y",
    groups: str | None = None,
    task: Task = "classification",
    classes: int | None = None,
    vocabulary: int = 0,
    padding: int = -1,
    channels_last: bool = False,
    standardise: bool = False,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    augment: str | None = None,
    resize: int | None = None,
) -> Data:
    """Return a data set whose samples are the rows of arrays, named after the file.

    Where there is no array `x` but `x_train`, `x_test` (and `x_validation` or `x_val`), these are the splits, and
    likewise for labels and groups. Samples are memory-mapped where they are uint8, int64 or float16, 32 or 64; other
    numbers are converted in memory, to int64 where there is a vocabulary and to float32 where not. Images of one
    channel, uint8 [N, H, W], become [N, 1, H, W].

    Args:
        file: An .npz file, or a folder of .npy files; a relative path that does not exist is sought in FLEETFIT_DATA.
        x: Name of the samples, [N, ...].
        y: Name of the labels. Classification: whole numbers or text [N]. Regression: numbers [N] or [N, targets].
            Multi-label: 0 or 1, [N, labels]. Next token: whole numbers [N, L], -100 where nothing is scored.
        groups: Name of the natural group of each sample, whole numbers or text [N]; None: no groups.
        task: What is learned.
        classes: Number of classes, or of tokens to predict; None: the largest label and one, or the vocabulary.
        vocabulary: Above 0: x holds tokens in 0..vocabulary-1.
        padding: The token that fills short samples; -1: there is none.
        channels_last: Whether x is [N, ..., C] and is to become [N, C, ...].
        standardise: Whether mean and std are those of the training samples, for each channel (the second dimension).
        mean: Per channel, or one for all; of uint8 scaled to [0, 1].
        std: Per channel, or one for all.
        validation: Share of the training samples that is held out, where the arrays do not say.
        test: Share of the samples that is the test set, where the arrays do not say; both are shares of each group, or
            of each class, or of all.
        seed: Of what is held out.
        augment: What training batches of images go through, such as "crop-flip"; None: nothing.
        resize: Side in pixels to which batches of images are brought; None: they stay as they are.

    Raises:
        DataError: An array is missing or does not fit the task, or a parameter is out of range.
    """
    path = set_folder(file)
    found = Arrays(path)
    name = path.resolve().stem
    parts = _parts(found, x)
    samples = _samples(found.joined(list(parts.values())), vocabulary, channels_last)
    labels = _joined(found, y, parts)
    if not samples.numel():
        raise DataError(f'{path}: "{x}" has no samples, or empty ones: {list(samples.shape)}.')
    if len(labels) != len(samples):
        raise DataError(f'{path}: "{x}" has {len(samples)} samples but "{y}" has {len(labels)}.')
    target, count, names = _labels(labels, task, classes or vocabulary or None)
    group = None if groups is None else _numbered(_joined(found, groups, parts), f'{path}: "{groups}"')[0]
    sizes = {split: len(found.one(part)) for split, part in parts.items()}
    strata = _strata(group, target, task, len(samples))
    splits = completed(sizes, strata, validation, test, seed)
    if standardise:
        mean, std = _statistics(samples, splits["train"])
    return Data(
        name=name,
        x=samples,
        y=target,
        splits={split: torch.from_numpy(indices) for split, indices in splits.items()},
        classes=count,
        groups=None if group is None else torch.from_numpy(group),
        class_names=names,
        mean=mean,
        std=std,
        augment=augment,
        task=task,
        vocabulary=vocabulary,
        padding=padding,
        resize=None if resize is None else (resize, resize),
    )


def _parts(found: Arrays, name: str) -> dict[str, str]:
    """Return split -> array; one array alone is "train"."""
    if name in found:
        return {"train": name}
    parts = {}
    for split in SPLITS:
        part = next((f"{name}_{alias}" for alias in _ALIASES[split] if f"{name}_{alias}" in found), None)
        if part is not None:
            parts[split] = part
    if "train" not in parts:
        found.one(name)  # says what there is
    return parts


def _joined(found: Arrays, name: str, parts: Mapping[str, str]) -> NDArray[Any]:
    """Return labels or groups, in the order of the samples."""
    if name in found:
        return found.one(name)
    own = _parts(found, name)
    if list(own) != list(parts):
        raise DataError(f'{found.path}: "{name}" has the parts {", ".join(own)}, the samples {", ".join(parts)}.')
    return np.concatenate([found.one(part) for part in own.values()])


def _samples(found: NDArray[Any], vocabulary: int, channels_last: bool) -> Tensor:
    if found.ndim < 1 or found.dtype.kind not in "biuf":
        raise DataError(f"samples must be numbers [N, ...], got {found.dtype} {list(found.shape)}.")
    usual = (found.dtype.kind == "f" and found.dtype.itemsize <= 8) or found.dtype in (np.uint8, np.int64)
    if vocabulary:
        found = _whole(found, "tokens")
    elif not usual or not found.dtype.isnative:
        with np.errstate(over="ignore"):
            found = found.astype(np.float32)
    x = torch.from_numpy(np.ascontiguousarray(found) if not found.flags.c_contiguous else found)
    if channels_last:
        if x.ndim < 3:
            raise DataError(f"channels_last needs samples [N, ..., C], got {list(x.shape)}.")
        return x.movedim(-1, 1)
    return x.unsqueeze(1) if x.dtype == torch.uint8 and x.ndim == 3 else x


def _labels(found: NDArray[Any], task: str, classes: int | None) -> tuple[Tensor, int, tuple[str, ...]]:
    """Return labels as the task needs them, the number of classes and their names or ()."""
    if task == "classification" and found.dtype.kind == "U":
        places, names = _numbered(found, "the labels")
        return torch.from_numpy(places), len(names), names
    if found.dtype.kind not in "biuf" or (task in ("classification", "next_token") and found.dtype.kind == "f"):
        raise DataError(f"labels of a {task} task cannot be {found.dtype}.")
    if not found.size:
        raise DataError(f"the labels are empty: {list(found.shape)}.")
    if task in ("classification", "next_token"):
        whole = torch.from_numpy(_whole(found, "labels"))
        if classes is None and int(whole.max()) >= MOST_CLASSES:
            row = int(whole.flatten().argmax()) // max(1, whole[0].numel())
            raise DataError(
                f"sample {row} has label {int(whole.max())}, which would make {int(whole.max()) + 1:,} classes; there "
                f"may be {MOST_CLASSES:,}. Number the classes from 0, or give classes = ..."
            )
        return whole, classes or int(whole.max()) + 1, ()
    with np.errstate(over="ignore", invalid="ignore"):
        y = torch.from_numpy(found.astype(np.float32) if task == "regression" else _whole(found, "labels"))
    y = y.unsqueeze(1) if task == "regression" and y.ndim == 1 else y
    return y, y.shape[-1], ()


def _whole(found: NDArray[Any], what: str) -> NDArray[np.int64]:
    """Return whole numbers as int64.

    Raises:
        DataError: One of them is not whole, or too large.
    """
    with np.errstate(invalid="ignore"):
        whole: NDArray[np.int64] = found.astype(np.int64, copy=False)
        same = found.dtype.kind in "bi" or bool(
            (whole == found).all() and (found.dtype.kind == "f" or (whole >= 0).all())
        )
    if not same:
        raise DataError(f"{what} must be whole numbers of at most 63 bits, got {found.dtype} with others among them.")
    return whole


def _numbered(values: NDArray[Any], what: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(f"{what} must be whole numbers or text [N], got {values.dtype} {list(values.shape)}.")
    names, places = np.unique(values, return_inverse=True)
    return places.astype(np.int64), tuple(str(name) for name in names)


def _strata(groups: NDArray[np.int64] | None, y: Tensor, task: str, rows: int) -> NDArray[np.int64]:
    """Return what stays in proportion when samples are held out: groups, or classes, or nothing."""
    if groups is not None:
        return groups
    if task == "classification" and y.ndim == 1 and len(y) and int(y.min()) >= 0:
        classes: NDArray[np.int64] = y.numpy()
        return classes
    return np.zeros(rows, dtype=np.int64)


def _statistics(x: Tensor, train: NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over the training samples; where all are alike, 1."""
    if not len(train) or x.dtype == torch.int64:
        raise DataError("standardise needs training samples that are no tokens.")
    channels = x.shape[1] if x.ndim > 1 else 1
    total, squares = torch.zeros(2, channels, dtype=torch.float64)
    count = 0
    for start in range(0, len(train), _ROWS):
        some = x[torch.from_numpy(train[start : start + _ROWS])].double()
        some = some.reshape(len(some), channels, -1) / (255 if x.dtype == torch.uint8 else 1)
        total += some.sum((0, 2))
        squares += some.square().sum((0, 2))
        count += len(some) * some.shape[2]
    mean = total / count
    if not bool(torch.isfinite(mean).all()):
        raise DataError("standardise needs samples that are finite; a training sample is not.")
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return tuple(mean.tolist()), tuple(torch.where(std > 1e-12, std, 1).tolist())
