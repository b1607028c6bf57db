"""Data sets in arrays for any task: an `.npz` file of numpy.savez, or a folder of `.npy` files.

Use it for sensor readings and features (see `widar` for an example). Arrays are memory-mapped. Compressed arrays
(`numpy.savez_compressed`) and arrays in several parts are written once to the cache and mapped from there.
"""

import decimal
import logging
import math
import numbers
import shutil
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit import files
from fleetfit.data import cache
from fleetfit.data.cache import load_folder
from fleetfit.data.dataset import MAX_CLASSES, Data, Facts
from fleetfit.data.files.folders import list_sample_files, resolve_folder
from fleetfit.data.rows import Rows, make_new_data, number_classes
from fleetfit.data.splits import BY_NAME, find_splits
from fleetfit.errors import DataError, FleetFitError, check_range, did_you_mean, format_cause, truncate
from fleetfit.factories import declare_unused
from fleetfit.machine import free_memory

FACTS = Facts(source="a file of NumPy arrays")

Task = Literal["classification", "regression", "multi_label", "next_token"]
ChannelsLast = bool | Literal["move"] | None
_ROWS = 4096  # rows in memory at a time
_SHOWN = 10  # classes in a sentence
_MAX_CLASSES = 50  # whole numbers of a float type are classes up to this number of distinct values
_CANCELED = 1e-6  # of the mean square: a smaller variance is computed around the mean
_FAR = 1e5  # times the deviation: of a mean so far from 0, float32 keeps fewer than two digits of the samples
_LOG = logging.getLogger("fleetfit")
Array = NDArray[Any]


@declare_unused(
    "classes", when=lambda values: values["task"] == "regression", reason='task = "regression" has no classes'
)
@declare_unused(
    "padding",
    when=lambda values: not values["vocabulary"] and values["task"] != "next_token",
    reason="with vocabulary = 0, x has no tokens",
)
def arrays(
    file: str,
    x: str = "x",
    y: str = "y",
    groups: str | None = None,
    task: Task = "classification",
    classes: int | None = None,
    vocabulary: int = 0,
    padding: int = -1,
    channels_last: ChannelsLast = None,
    standardize: bool = False,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    augment: str | None = None,
    resize: int | None = None,
) -> Data:
    """Return a data set whose samples are the rows of arrays, named after the file.

    Without an array `x`, the splits are `x_train`, `x_test` (and `x_validation` or `x_val`), and likewise for labels
    and groups. Samples of uint8 and float16, 32 or 64 and tokens of int64 are memory-mapped. Others are converted in
    memory, tokens to int64 and numbers to float32. Whole numbers are tokens with a vocabulary or the task next_token.
    Images of one channel, uint8 [N, H, W], become [N, 1, H, W].

    Args:
        file: An .npz file, or a folder of .npy files. A relative path that does not exist is looked up in
            FLEETFIT_DATA.
        x: Name of the samples, [N, ...].
        y: Name of the labels. Classification: whole numbers or text [N]. Regression: numbers [N] or [N, targets].
            Multi-label: 0 or 1, [N, labels]. Next token: whole numbers [N, L], -100 where nothing is scored.
        groups: Name of the natural group of each sample, whole numbers or text [N]; None: no groups.
        task: The task.
        classes: Number of classes, or of tokens to predict; None: the largest label plus one, or for next tokens the
            vocabulary. For text labels and multi-label it must equal the number in the data.
        vocabulary: Above 0: x holds tokens in 0..vocabulary-1.
        padding: The token that fills short samples; -1: none.
        channels_last: Whether x is [N, ..., C]; None: detected from its shape, such as [N, 32, 32, 3], with a note.
            Images become [N, C, ...]; series [N, time, C] stay as they are, and "move" makes them [N, C, time].
        standardize: Whether to compute mean and std from the training samples, per channel.
        mean: Per channel, or one for all; of uint8 scaled to [0, 1]. Not together with `standardize`.
        std: Per channel, or one for all. Not together with `standardize`.
        validation: Share of the training samples to hold out, if the arrays have no validation split.
        test: Share of the samples for testing, if the arrays have no test split. Both are shares of each group, of each
            class, or of all.
        seed: Seed of held out samples.
        augment: Augmentation of training batches of images, such as "crop-flip"; None: none.
        resize: Side in pixels to which batches of images are resized; None: no resizing.

    Raises:
        DataError: An array is missing or does not fit the task, or a parameter is out of range.
    """
    if standardize and (mean or std):
        raise DataError(
            f"standardize = true computes mean and std from the training samples, but {'mean' if mean else 'std'} is "
            "set, too. Leave one of them out. If data.path detected the data set, set standardize = false.",
            key="standardize",
        )
    if classes is not None and classes < 1:
        raise DataError(
            f"classes must be at least 1, got {classes}. Leave it out to detect the classes from the labels.",
            key="classes",
        )
    path = resolve_folder(file)
    store, name = Arrays(path), path.resolve().stem
    parts = _find_parts(store, x)
    samples, labels = store.concatenate(list(parts.values())), _concatenate_parts(store, y, parts)
    if not samples.size:
        raise store.error(x, f"must have at least one element per sample, got the shape {list(samples.shape)}.")
    if len(labels) != len(samples):
        raise store.error(y, f'has {len(labels)} labels, but "{x}" has {len(samples)} samples.')
    if task == "regression" and (place := find_not_finite(labels)):
        raise store.error(y, f"is not finite in {place}. Leave these samples out.")
    group = None
    if groups is not None:
        group = _encode_values(_concatenate_parts(store, groups, parts), f'{path}: "{groups}"', "groups")[0]
    gaps = {split: f'"{part}" is not finite in {place}' for split, part in parts.items()
            if (place := find_not_finite(store.load(part)))}  # fmt: skip
    notes = [f"{name}: {gap}. {'Training diverges' if split == 'train' else 'What they score means nothing'}, unless "
             "the model fills the gaps." for split, gap in gaps.items()]  # fmt: skip
    usual = vocabulary if task == "next_token" else None
    target, count, names = _convert_labels(labels, task, classes or usual)
    if classes not in (None, count) and task != "regression":
        detail = f"are {count} different texts" if names else f"have {count} columns"
        raise store.error(y, f"has labels that {detail}, but classes = {classes}. Leave classes out.", "classes")
    rows = Rows(samples, target, {split: len(store.load(part)) for split, part in parts.items()}, count, names, group)
    return _make_data(
        name, f'{name}: "{x}"', rows, labels, notes, f"{path}: {'; '.join(gaps.values())}", task=task,
        vocabulary=vocabulary, padding=padding, channels_last=channels_last, standardize=standardize, mean=mean,
        std=std, validation=validation, test=test, seed=seed, augment=augment, resize=resize,
    )  # fmt: skip


def wrap_arrays(
    x: Any, y: Any, test_set: tuple[Any, Any] | None = None, begun_with: Sequence[int] = (),
    notes: Sequence[str] = (), groups: Any = None, task: Task | None = None, vocabulary: int = 0, padding: int = -1,
    channels_last: ChannelsLast = None, standardize: bool | None = None, validation: float = 0.1, test: float = 0.2,
    seed: int = 0, augment: str | None = None,
) -> Data:  # fmt: skip
    """Wrap samples and labels in memory (arrays, tensors or lists of numbers) as a data set.

    Samples are x [N, ...], labels y [N], or targets [N, targets]. `test_set` has test samples and labels (None: a share
    of x), `begun_with` the shape of a sample in the resumed run (if x has that shape, its channels come first), `notes`
    are sentences on how they were read, and `groups` has the group of each sample of x [N]. The other arguments are
    those of `arrays`, except:

    - task, None: text and whole numbers as labels are classes; a matrix of the whole numbers 0 and 1 has several labels
      per sample; other labels are a regression.
    - standardize, None: rows and series of numbers [N, D] and [N, C, L] are, except uint8.

    Raises:
        DataError: Samples and labels do not match, or the place of the channels is ambiguous.
    """
    check_range("vocabulary", vocabulary, 0, closed=True)
    parts = {"train": (x, y)} | ({} if test_set is None else {"test": test_set})
    samples = {split: as_array(pair[0], "x") for split, pair in parts.items()}
    labels = {split: as_array(pair[1], "y") for split, pair in parts.items()}
    for split, array in samples.items():
        shapes = list(array.shape), list(labels[split].shape)
        if array.ndim < 2 or len(array) != len(labels[split]):
            raise _error("x must be [N, ...] and y must have one label per sample, got {} and {}.".format(*shapes), "y")
        if array.shape[1:] != samples["train"].shape[1:]:
            raise _error("test and training samples have different shapes.", "x")
        if (array.dtype == np.uint8) != (samples["train"].dtype == np.uint8):  # 0..255, and numbers as they are
            raise _error(f"training samples are {samples['train'].dtype}, and test samples {array.dtype}.", "x")
        for name, values in (("x", array), ("y", labels[split])):
            if place := find_not_finite(values):
                name_of_split = f"{name}{'_test' * (split == 'test')}"
                raise _error(f"{name_of_split} is not finite in {place}. Remove these samples, or {_FILL}", name)
    whole, answers = (np.concatenate([*arrays.values()]) for arrays in (samples, labels))
    has_task = task is not None
    task, answers = _choose_task(answers, task)
    if not (has_task or task != "regression" or answers.ndim > 1 or (answers != np.floor(answers)).any()):
        reason = f"has more than {_MAX_CLASSES} different whole numbers, so it is learned as a regression. For classes"
        notes = (*notes, f'data=(x, y): y {reason} set "task": "classification" beside "name": (x, y).')
    tokens = vocabulary > 0 or task == "next_token"
    if channels_last is None and whole.shape[1:] == tuple(begun_with):
        channels_last = False
    if standardize is None:
        standardize = not tokens and whole.dtype != np.uint8 and whole.ndim in (2, 3)
    target, count, names = _convert_labels(answers, task, (vocabulary or None) if task == "next_token" else None, True)
    group = None if groups is None else _encode_values(as_array(groups, "groups"), "groups", "groups")[0]
    if group is not None and len(group) != len(whole):
        split = ", and a test set has none: pass all samples as one x and y" if test_set else ""
        raise _error(f"groups must have one value for each sample, got {len(group)} for {len(whole)}{split}.", "groups")
    rows = Rows(whole, target, {split: len(array) for split, array in samples.items()}, count, names, group)
    return _make_data(
        "own-data", "data=(x, y): x", rows, answers, notes, "", task=task, vocabulary=vocabulary, padding=padding,
        channels_last=channels_last, standardize=standardize, validation=validation, test=test, seed=seed,
        augment=augment,
    )  # fmt: skip


def _make_data(
    name: str, what: str, rows: Rows, labels: NDArray[Any], notes: Sequence[str], gaps: str, *, task: Task,
    vocabulary: int, padding: int, channels_last: ChannelsLast, standardize: bool, validation: float, test: float,
    seed: int, augment: str | None, mean: tuple[float, ...] = (), std: tuple[float, ...] = (),
    resize: int | None = None,
) -> Data:  # fmt: skip
    """Return a data set of arrays, its channels in their place and standardized.

    `rows` has samples as they are and labels for the task, `labels` those as they are. `what` names the samples in
    messages; `gaps` tells which are not finite, and so cannot be standardized.
    """
    tokens = bool(vocabulary) or task == "next_token"
    layout = _find_layout(rows.x, what, False if tokens else channels_last, standardize)
    x = _convert_samples(rows.x, tokens, layout.moves)
    splits = rows.divide(name, validation, test, seed)
    if standardize:
        mean, std = _compute_statistics(x, splits["train"], gaps, layout.channels_last)
        notes = (*notes, *_describe_far_means(what, mean, std))
    exact = _keep_digits(labels, rows.y) if task == "regression" else None
    notes = (*notes, *layout.notes, *(_describe_binary_targets(name, labels) if task == "regression" else ()))
    return replace(rows, notes=notes).make_data(
        name, x, splits, mean=mean, std=std, channels_last=layout.channels_last, task=task, vocabulary=vocabulary,
        padding=padding, augment=augment, resize=resize, exact_targets=exact,
    )  # fmt: skip


def _describe_far_means(what: str, mean: Sequence[float], std: Sequence[float]) -> list[str]:
    """Describe the first channel whose mean is so far from 0 that float32 loses its samples; constants have std 1."""
    far = next(
        ((i, m, s) for i, (m, s) in enumerate(zip(mean, std, strict=True)) if abs(m) > _FAR * s and s != 1), None
    )
    if far is None:
        return []
    channel, m, s = far
    return [
        f"{what}: channel {channel} has mean {m:g} and standard deviation {s:g}, of which a model's 32 bits keep few "
        "digits. Subtract a constant from it, for training and for predictions."
    ]


_FILL = "fill the gaps. Only tables (data.path or data=frame) may have gaps."


def _error(reason: str, key: str, row: int | None = None) -> DataError:
    """Return an error on samples or labels in memory."""
    return DataError(f"data=(x, y): {reason}", key=key, row=row)


def _describe_binary_targets(name: str, y: NDArray[Any]) -> list[str]:
    if not _is_binary(y):
        return []
    start = f"{name}: y {list(y.shape)} is learned as a regression of {y.shape[1]} numbers, but"
    if _is_one_hot(y):
        return [f"{start} each row has a single 1, like one-hot labels. For classes, take y.argmax(1) as y."]
    return [f'{start} has only 0 and 1. For several labels per sample, set task = "multi_label".']


def _choose_task(answers: NDArray[Any], task: Task | None) -> tuple[Task, NDArray[Any]]:
    """Return the task, by the labels if it is None, and the labels; those of classes as whole numbers."""
    answers = answers[:, 0] if answers.ndim == 2 and answers.shape[1] == 1 else answers
    has_fractions = answers.dtype.kind == "f" and bool((answers != np.floor(answers)).any())
    if task is None:
        is_few = answers.ndim == 1 and not has_fractions and len(np.unique(answers)) <= _MAX_CLASSES
        is_classes = answers.dtype.kind != "f" or is_few
        task = "classification" if is_classes else "regression"
        task = "multi_label" if has_several_labels(answers) else task
    if task != "regression" and answers.dtype.kind == "f" and not has_fractions:
        answers = answers.astype(np.int64)
    return task, answers


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Convert rows of numbers or text to an array.

    Args:
        values: An array, a tensor, a list, a Series or a DataFrame.
        name: "x", which must have numbers, or "y".

    Raises:
        DataError: The values are of another kind, or a row has no value.
    """
    or_text = " or text" if name == "y" else ""
    try:
        array = to_array(values)
        array = _convert_objects(array, name) if array.dtype.kind == "O" and array.size else array
    except DataError:
        raise
    except Exception as error:  # arrays of other libraries may raise any error
        reason = f"cannot be converted to an array: {format_cause(error).rstrip('.!')}. Pass numbers{or_text}, with the"
        raise _error(f"{name} {reason} same shape for each sample.", name) from None
    if array.dtype.kind not in "biufU" or (name == "x" and array.dtype.kind == "U"):
        remedy = "For a table with numbers and categories, pass data=frame, a DataFrame that includes the label."
        if array.dtype.kind == "c":
            remedy = "Pass real and imaginary parts as two channels: np.stack([x.real, x.imag], 1)."
        raise _error(f"{name} must have numbers{or_text}, got {array.dtype}. {remedy}", name)
    return array


def is_sparse(values: Any) -> bool:
    """Return whether values are a sparse matrix or array of SciPy."""
    return hasattr(values, "toarray") and hasattr(values, "nnz")


def to_array(values: Any) -> NDArray[Any]:
    """Return values of any library as an array: sparse ones dense, missing ones of a masked array as NaN.

    Raises:
        DataError: A sparse matrix is larger than the free memory.
        Exception: They cannot be converted.
    """
    if isinstance(values, list | tuple) and values and all(isinstance(value, Tensor) for value in values):
        values = torch.stack([value.detach() for value in values])
    if isinstance(values, Tensor):
        values = values.detach().to_dense().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    if is_sparse(values):
        needs, free = math.prod(values.shape) * values.dtype.itemsize, free_memory(torch.device("cpu"))
        if needs > free:
            reason = f"takes {needs / 1e9:,.0f} GB as an array, but {free / 1e9:,.0f} GB are free. Keep fewer columns"
            raise _error(f"a sparse matrix {list(values.shape)} {reason}, such as by sklearn's TruncatedSVD.", "x")
        values = values.toarray()
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        values = np.where(np.ma.getmaskarray(values), np.nan, np.ma.getdata(values))
    array = np.asarray(values)
    if array.dtype.kind in "ST":
        return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else np.array(array.tolist(), str)
    return array


def _convert_objects(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Convert Python objects, such as those of nullable columns of pandas, to numbers or text."""
    values = array.ravel().tolist()
    if any(hasattr(value, "__len__") and not isinstance(value, str | bytes) for value in values):
        return np.stack([to_array(value) for value in values]).reshape(*array.shape, *to_array(values[0]).shape)
    missing = [
        i for i, value in enumerate(values) if value is None or type(value).__name__ == "NAType" or value != value
    ]
    if missing and array.ndim <= 2:
        row = missing[0] // max(1, array[0].size if array.ndim > 1 else 1)
        raise _error(f"{name} has no value in sample {row}. Remove such samples, or {_FILL}", name, row)
    if name == "y" and all(type(value).__name__ in ("str", "Interval", "Period") for value in values):
        return array.astype(str)
    if all(isinstance(value, bool | np.bool_) for value in values):
        return array.astype(bool)
    if all(isinstance(value, numbers.Real | decimal.Decimal) for value in values):
        whole = all(isinstance(value, numbers.Integral) for value in values)
        return array.astype(np.int64 if whole else np.float64)
    return array


def prepare_array_file(path: Path, facts: Data, settings: Mapping[str, Any], halves: bool = False) -> Data | None:
    """Return the arrays of an .npz file or a folder of .npy files, or one .npy file (see `transform.KINDS`).

    If they have a test set, only that is read. A single array has the samples, whatever its name. Without the array of
    labels, the data have none.
    """
    x, y = (str(settings.get(key, key)) for key in ("x", "y"))
    suffix = path.suffix.lower()
    if (path.is_dir() and not list_sample_files(path, "*.npy")) or (path.is_file() and suffix not in (".npy", ".npz")):
        return None
    store = Arrays(path.parent if path.is_file() and suffix == ".npy" else path)
    if store.path != path or len(store.names) == 1:
        only = path.stem if store.path != path else store.names[0]
        return prepare_arrays(store.load(only), None, facts, path.resolve().stem, halves)
    parts = {} if x in store else {split: f"{x}_{name}" for name, split in BY_NAME.items() if f"{x}_{name}" in store}
    parts = parts or _find_parts(store, x)
    split = next(split for split in ("test", "validation", "train") if split in parts)
    alias = parts[split][len(x) :]
    labels = store.load(f"{y}{alias}") if f"{y}{alias}" in store else None
    return prepare_arrays(store.load(parts[split]), labels, facts, path.resolve().stem, halves)


def prepare_arrays(x: Any, y: Any, facts: Data, name: str = "own-data", halves: bool = False) -> Data:
    """Return samples and labels in memory for a trained model: with its means, its classes, the unit of its targets.

    Args:
        x: Samples [N, ...], arrays, tensors or lists of numbers.
        y: Labels [N], or targets [N, targets]; None: without labels.
        facts: The training data, or their facts.
        name: Name of the samples.
        halves: Whether one half is for validation.

    Raises:
        DataError: They are of another kind, or a label is not a class of the training data.
    """
    array = as_array(x, "x")
    shape = tuple(facts.x.shape[1:])
    moves = array.ndim > 2 and array.shape[1:] != shape and (array.shape[-1], *array.shape[1:-1]) == shape
    samples = _convert_samples(array, facts.x.dtype == torch.int64, moves)
    if facts.resize is None and tuple(samples.shape[1:]) != shape:
        expected = ", ".join(["N", *map(str, shape)])
        hint = ": one sample is x[None]" * (array.shape == shape)
        raise _error(f"x has the shape {list(array.shape)}, and the run takes [{expected}]{hint}.", "x")
    if samples.dtype.is_floating_point != facts.x.dtype.is_floating_point:
        ours, theirs = (str(dtype).removeprefix("torch.") for dtype in (facts.x.dtype, samples.dtype))
        reason = f"x has {theirs}, but the run was trained on {ours}. Pass samples as for training"
        raise _error(f"{reason}; run.model(level) takes prepared ones.", "x")
    if position := find_not_finite(array):
        _LOG.warning("data=(x, y): x is not finite in %s. Scores on these samples are meaningless.", position)
    target, exact = None, None
    if y is not None:
        labels = as_array(y, "y")
        target = _encode_labels_like(labels, len(samples), facts)
        exact = _keep_digits(labels, target) if facts.task == "regression" else None
    return make_new_data(facts, name, samples, target, halves, exact_targets=exact)


def _encode_labels_like(labels: NDArray[Any], count: int, run_data: Data) -> Tensor:
    """Return the labels of samples as the run's data has them."""
    if count != len(labels):
        raise _error(f"x has {count} samples, but y has {len(labels)} labels.", "y")
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    kind = labels.dtype.kind
    if run_data.task == "regression" and kind == "U":
        raise _error(f"y has text, but the run was trained on {run_data.classes} numbers per sample.", "y")
    if run_data.task == "regression":
        return torch.from_numpy(labels.reshape(len(labels), -1).astype(np.float32))
    if run_data.task != "classification":
        return _convert_labels(labels, run_data.task, run_data.classes)[0]
    is_whole = kind == "b" or (kind == "f" and bool((labels == np.floor(labels)).all()))
    texts = (labels.astype(np.int64) if is_whole else labels).astype(str)
    numbers = number_classes(run_data)
    unknown = sorted({str(text) for text in np.unique(texts)} - numbers.keys())
    if labels.ndim != 1 or unknown:
        got = ", ".join(map(truncate, unknown[:_SHOWN])) or f"labels of shape {labels.shape}"
        classes = ", ".join(map(truncate, [*(run_data.class_names or numbers)][:_SHOWN]))
        raise _error(f"y has {got}, and the run was trained on the classes {classes}.", "y")
    return torch.tensor([numbers[str(text)] for text in texts])


_CHANNELS = (1, 3, 4)  # gray, RGB, RGBA
_FEW, _MANY = 4, 16  # pixels: a side has more than the first number, and a dimension of the second is certainly a side
_CLEAR = 2  # times as many steps as channels


@dataclass(frozen=True)
class _ChannelLayout:
    """Where the channels of samples are."""

    moves: bool = False  # the last dimension has the channels and is moved to the front
    channels_last: bool = False  # mean and std are those of the last dimension, which stays there
    notes: tuple[str, ...] = ()


def _find_layout(x: NDArray[Any], what: str, channels_last: ChannelsLast, standardize: bool) -> _ChannelLayout:
    """Return where the channels of samples are, if the user (`channels_last`) does not tell.

    Series [N, time, channels] and [N, channels, time] stay as they are; the smaller of two clearly different dimensions
    has the channels. It matters only where they are standardized.
    """
    if x.ndim != 3 or x.dtype == np.uint8:
        last = is_channels_last(x, what) if channels_last is None else bool(channels_last)
        return _ChannelLayout(
            moves=last, notes=tuple(_describe_channels(what, x, last)) if channels_last is None else ()
        )
    if channels_last == "move" or not standardize:
        return _ChannelLayout(moves=channels_last == "move", channels_last=channels_last is True)
    first, second = x.shape[1:]
    if channels_last is None and 1 not in (first, second) and max(first, second) < _CLEAR * min(first, second):
        raise DataError(
            f"{what} {list(x.shape)} may be series [N, time, channels] or [N, channels, time], or gray images. Set "
            'channels_last = true or false in [data], or in Python data={"name": (x, y), "channels_last": True}. Give '
            "gray images a dimension for their channel: x[:, None].",
            key="channels_last",
        )
    last = second < first if channels_last is None else channels_last
    channels, steps = (second, first) if last else (first, second)
    if channels == 1:
        return _ChannelLayout(channels_last=last)
    place, other = ("last dimension", "false") if last else ("second dimension", "true")
    note = (
        f"{what} {list(x.shape)} is taken as series of {steps} steps with {channels} channels ({place}), each of "
        f"which is standardized. Set channels_last = {other} if that is wrong."
    )
    return _ChannelLayout(channels_last=last, notes=(note,))


def is_channels_last(x: NDArray[Any], what: str) -> bool:
    """Return whether samples [N, ..., C] have their channels last, by their shape.

    Args:
        x: Samples, [N, ...].
        what: Name of the samples in messages.

    Raises:
        DataError: Both the first and the last dimension of a sample may be its channels.
    """
    shape = x.shape[1:]
    if len(shape) not in (3, 4) or shape[-1] not in _CHANNELS:
        return False
    first, last = shape[-2:], shape[-3:-1]  # height and width, if channels are first or last
    if shape[0] in _CHANNELS[1:]:
        if (first[0] == first[1]) != (last[0] == last[1]):
            return last[0] == last[1]
        if shape[-1] == 1:
            return False
        raise DataError(
            f"{what} {list(x.shape)} may have its channels first or last. Set channels_last = true or false in [data], "
            'or in Python data={"name": (x, y), "channels_last": True}.',
            key="channels_last",
        )
    sides = min(shape[:-1]) > _FEW
    pixels = x.dtype == np.uint8
    return sides and (last[0] == last[1] or pixels or (min(last) >= _MANY and shape[-1] > 1))


def _describe_channels(what: str, x: NDArray[Any], last: bool) -> list[str]:
    """Describe the detected place of the channels, unless they certainly come first."""
    shape = x.shape[1:]
    sides, start = "x".join(map(str, shape[:-1] if last else shape[1:])), f"{what} {list(x.shape)} is taken as"
    if last:
        return [
            f"{start} {sides} with {shape[-1]} channels (last dimension). Set channels_last = false if that is wrong."
        ]
    if len(shape) in (3, 4) and shape[-1] in _CHANNELS and shape[0] not in _CHANNELS:
        return [f"{start} {shape[0]} channels of {sides}. Set channels_last = true if the channels come last."]
    return []


def find_not_finite(x: NDArray[Any]) -> str:
    """Describe NaN or infinite samples: which sample, which column, how many; "" if all are finite.

    Args:
        x: Samples or targets, [N, ...].
    """
    if x.dtype.kind != "f":
        return ""
    first, count = "", 0
    for start in range(0, len(x), _ROWS):
        wrong = ~np.isfinite(x[start : start + _ROWS])
        if not wrong.any():
            continue
        rows = wrong.reshape(len(wrong), -1).any(1)
        if not first:
            row = int(rows.argmax())
            index = [int(at[0]) for at in np.nonzero(wrong[row])] if x.ndim > 1 else []
            column = f", column {index[0]}" if len(index) == 1 else f", at {index}" if index else ""
            first = f"sample {start + row}{column} ({x[(start + row, *index)]})"
        count += int(rows.sum())
    return f"{first}; samples: {count} of {len(x)}" if first else ""


def _is_one_hot(y: NDArray[Any]) -> bool:
    return _is_binary(y) and bool((y.sum(1) == 1).all())


def _is_binary(y: NDArray[Any]) -> bool:
    return y.ndim == 2 and y.shape[1] > 1 and bool(np.isin(y, (0, 1)).all())


def has_several_labels(y: NDArray[Any]) -> bool:
    """Return whether labels are whole numbers 0 and 1, [N, labels], and not one-hot."""
    return y.dtype.kind in "biu" and _is_binary(y) and not _is_one_hot(y)


def find_sample_shape(file: str, x: str = "x", channels_last: ChannelsLast = None) -> tuple[int, ...]:
    """Return the shape of one sample in a file of arrays, as `arrays` returns it.

    Raises:
        DataError: The arrays are missing.
    """
    store = Arrays(resolve_folder(file))
    some = store.load(next(iter(_find_parts(store, x).values())))[:1]
    return tuple(_convert_samples(some, False, _find_layout(some, x, channels_last, False).moves).shape[1:])


def _find_parts(store: "Arrays", name: str) -> dict[str, str]:
    """Return split -> array; a single array is "train"."""
    if name in store:
        return {"train": name}
    parts = find_splits(lambda alias: f"{name}_{alias}" if f"{name}_{alias}" in store else "")
    if not parts:
        store.load(name)  # raises an error with the names of the arrays
    return parts


def _concatenate_parts(store: "Arrays", name: str, parts: Mapping[str, str]) -> NDArray[Any]:
    """Return labels or groups in the order of the samples."""
    if name in store:
        return store.load(name)
    label_parts = _find_parts(store, name)
    if list(label_parts) != list(parts):
        raise store.error(name, f"has the parts {', '.join(label_parts)}, but the samples have {', '.join(parts)}.")
    return np.concatenate([store.load(part) for part in label_parts.values()])


def _convert_samples(array: NDArray[Any], tokens: bool, channels_last: bool) -> Tensor:
    """Convert samples to the types of `Data`: pixels to uint8, tokens to int64, other numbers to floats."""
    if array.ndim < 1 or array.dtype.kind not in "biuf":
        raise DataError(f"samples must be numbers [N, ...], got {array.dtype} {list(array.shape)}.", key="x")
    usual = (array.dtype.kind == "f" and array.dtype.itemsize <= 8) or array.dtype == np.uint8
    if tokens:
        array = _convert_whole(array, "tokens")
    elif not usual or not array.dtype.isnative:
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array is read-only, such as a mapped file, and is only read
        x = torch.from_numpy(np.ascontiguousarray(array))
    if channels_last:
        if x.ndim < 3:
            raise DataError(f"channels_last needs samples [N, ..., C], got {list(x.shape)}.", key="channels_last")
        return x.movedim(-1, 1)
    return x.unsqueeze(1) if x.dtype == torch.uint8 and x.ndim == 3 else x


def _convert_labels(
    array: NDArray[Any], task: str, classes: int | None, by_value: bool = False
) -> tuple[Tensor, int, tuple[str, ...]]:
    """Convert labels for the task; return them with the number of classes and the names of classes or ().

    `by_value`: the distinct whole numbers are the classes; else all numbers up to the largest are.
    """
    kind = array.dtype.kind
    if task == "classification" and kind in "biuf" and _is_binary(array):
        one_hot = _is_one_hot(array)
        advice = 'For several labels per sample, set task = "multi_label".'
        advice = "For one-hot labels pass the class of each sample, y.argmax(1)." if one_hot else advice
        reason = f"labels of a classification must be [N], got {list(array.shape)} of 0 and 1. {advice}"
        raise DataError(reason, key="y" if one_hot else "task")
    if task == "classification" and (kind == "U" or (by_value and kind in "iub")):
        codes, names = _encode_values(array.astype(np.int64) if kind == "b" else array, "the labels")
        is_range = kind != "U" and names == tuple(map(str, range(len(names))))
        return torch.from_numpy(codes), len(names), () if is_range else names
    if array.dtype.kind not in "biuf" or (task in ("classification", "next_token") and array.dtype.kind == "f"):
        raise DataError(f"labels of a {task} task cannot be {array.dtype}.", key="y")
    if not array.size:
        raise DataError(f"the labels are empty: {list(array.shape)}.", key="y")
    if task in ("classification", "next_token"):
        whole = torch.from_numpy(_convert_whole(array, "labels"))
        if classes is None and int(whole.max()) >= MAX_CLASSES:
            row = int(whole.flatten().argmax()) // max(1, whole[0].numel())
            raise DataError(
                f"sample {row} has label {int(whole.max())}, which would make {int(whole.max()) + 1:,} classes; there "
                f"may be {MAX_CLASSES:,}. Number the classes from 0, or give classes = ...",
                key="y",
            )
        return whole, classes or int(whole.max()) + 1, ()
    with np.errstate(over="ignore", invalid="ignore"):
        y = torch.from_numpy(array.astype(np.float32) if task == "regression" else _convert_whole(array, "labels"))
    y = y.unsqueeze(1) if task == "regression" and y.ndim == 1 else y
    return y, y.shape[-1], ()


def _keep_digits(values: NDArray[Any], targets: Tensor) -> NDArray[np.float64] | None:
    """Return the targets of a regression as float64 [N, targets] if float32 rounds them."""
    exact = values.reshape(targets.shape).astype(np.float64)
    return None if values.dtype == np.float32 or bool((exact == targets.numpy()).all()) else exact


def _convert_whole(array: NDArray[Any], what: str) -> NDArray[np.int64]:
    """Return whole numbers as int64; refuse others, and those that are too large."""
    with np.errstate(invalid="ignore"):
        whole: NDArray[np.int64] = array.astype(np.int64, copy=False)
        same = array.dtype.kind in "bi" or bool(
            (whole == array).all() and (array.dtype.kind == "f" or (whole >= 0).all())
        )
    if not same:
        raise DataError(
            f"{what} must be whole numbers of at most 63 bits, got {array.dtype} with other numbers.",
            key="x" if what == "tokens" else "y",
        )
    return whole


def _encode_values(values: NDArray[Any], what: str, key: str = "y") -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(f"{what} must be whole numbers or text [N], got {values.dtype} {list(values.shape)}.", key=key)
    names, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), tuple(str(name) for name in names)


def _compute_statistics(
    x: Tensor, train: NDArray[np.int64], gaps: str = "", channels_last: bool = False
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over the training samples; the deviation of constants is 1."""
    if not len(train) or x.dtype == torch.int64:
        raise DataError("standardize needs training samples of numbers, not tokens. Leave it out.", key="standardize")
    axis = -1 if channels_last else min(1, x.ndim - 1)
    channels = x.shape[axis] if x.ndim > 1 else 1

    def sum_powers(shift: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return the means of x - shift and of its square, per channel."""
        total, squares = torch.zeros(2, channels, dtype=torch.float64)
        count = 0
        for start in range(0, len(train), _ROWS):
            some = x[torch.from_numpy(train[start : start + _ROWS])].double()
            some = some.movedim(axis, min(1, x.ndim - 1)).reshape(len(some), channels, -1) / (
                255 if x.dtype == torch.uint8 else 1
            )
            some = some if isinstance(shift, float) else some - shift[:, None]
            total += some.sum((0, 2))
            squares += some.square().sum((0, 2))
            count += len(some) * some.shape[2]
        return total / count, squares / count

    mean, squares = sum_powers(0.0)
    if not bool(torch.isfinite(mean).all()):
        raise DataError(f"{gaps}. standardize needs finite samples. Remove these, or fill the gaps.", key="standardize")
    variance = (squares - mean.square()).clamp(min=0)
    is_canceled = variance < _CANCELED * squares  # the difference has lost digits
    if bool(is_canceled.any()):
        shifted, squares = sum_powers(mean)
        variance = torch.where(is_canceled, squares - shifted.square(), variance)
    std = variance.clamp(min=0).sqrt()
    is_constant = std <= 1e-12 + 1e-13 * mean.abs()
    return tuple(mean.tolist()), tuple(torch.where(is_constant, 1, std).tolist())


# ---- the arrays of one file or folder, by name -----------------------------------------------------------------------


class Arrays:
    """The arrays of one file or folder, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_dir():
            self.names = [file.stem for file in list_sample_files(path, "*.npy")]
        elif path.is_file():
            files.check_file(path, DataError)
            try:
                with zipfile.ZipFile(path) as archive:
                    members = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
            except Exception as error:  # a damaged archive may raise any error
                raise DataError(f"{path} cannot be read as an .npz file: {error}.", path=path) from None
            self.names = sorted(
                name for name in members if name and not any(part in name for part in ("/", "\\", "\0"))
            )
            if len(set(self.names)) != len(self.names):
                raise DataError(f"{path} has two arrays of the same name. Rename one.", path=path)
        else:
            files.check_file(path, DataError)  # raises an error for other files
        if not self.names:
            raise DataError(f"{path} has no arrays.", path=path)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def error(self, name: str, reason: str, key: str | None = None) -> DataError:
        """Return an error on an array."""
        return DataError(f'{self.path}: array "{name}" {reason}', path=self.path, column=name, key=key)

    def load(self, name: str) -> Array:
        """Load an array, mapped copy-on-write: it is writable, and the file does not change.

        Raises:
            DataError: The array is missing, has Python objects, or cannot be read.
        """
        if name not in self.names:
            hint = did_you_mean(name, self.names)
            raise self.error(name, f"does not exist. The file has {', '.join(self.names)}.{hint}")
        try:
            array = _map_file(self.path, name) if self.path.is_dir() else self._unpack(name)
        except FleetFitError:
            raise
        except Exception as error:  # a damaged header or archive may raise any error
            raise self.error(name, f"cannot be read: {format_cause(error)}") from error
        if not array.ndim:
            raise self.error(name, "is a single value. It must have one per sample.")
        return array

    def concatenate(self, names: Sequence[str]) -> Array:
        """Concatenate arrays, through the cache if there are several."""
        parts = [self.load(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            shapes = ", ".join(
                f"{name} {part.dtype} {list(part.shape)}" for name, part in zip(names, parts, strict=True)
            )
            raise DataError(f"{self.path}: {shapes} cannot be concatenated.", path=self.path)

        def build(target: Path) -> None:
            shape = (sum(map(len, parts)), *parts[0].shape[1:])
            whole = np.lib.format.open_memmap(target / "whole.npy", "w+", parts[0].dtype, shape)
            at = 0
            for part in parts:
                for start in range(0, len(part), _ROWS):
                    some = part[start : start + _ROWS]
                    whole[at : at + len(some)] = some
                    at += len(some)
            whole.flush()

        return load_folder(self._make_key([*names]), build, lambda target: np.load(target / "whole.npy", mmap_mode="c"))

    def _make_key(self, parameters: Sequence[str]) -> str:
        stamps = [self.path / f"{name}.npy" for name in parameters] if self.path.is_dir() else [self.path]
        return cache.make_key(self.path.stem, stamps, ["arrays", *parameters])

    def _unpack(self, name: str) -> Array:
        """Map an array of the archive, which is unpacked into the cache once."""

        def build(target: Path) -> None:
            with zipfile.ZipFile(self.path) as archive:
                member = archive.getinfo(f"{name}.npy")
                if member.file_size > shutil.disk_usage(target).free:
                    reason = f"unpacks to {member.file_size:,} bytes, which do not fit into {target.parent}."
                    raise self.error(name, reason)
                archive.extract(member, target)

        return load_folder(self._make_key([name]), build, lambda target: _map_file(target, name))


def _map_file(folder: Path, name: str) -> Array:
    path = folder / f"{name}.npy"
    files.check_file(path, DataError)
    try:
        with np.errstate(over="raise"):
            array: Array = np.lib.format.open_memmap(path, "c")
    except FloatingPointError:
        raise ValueError("its header claims more than any file has") from None
    return array
