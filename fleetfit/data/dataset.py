"""A labeled data set, in memory or on disk, and a client's share of it."""

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data.augment import check_augmentation, select_samples
from fleetfit.data.image_reader import EncodedImages
from fleetfit.data.splits import SPLITS
from fleetfit.errors import DataError, did_you_mean
from fleetfit.factories import call_factory
from fleetfit.seeds import make_torch_rng

NOT_SCORED = -100
"""Label of a position that is not scored, such as padding."""
MAX_CLASSES = 1 << 20
"""Limit for the number of classes inferred from the largest label of a file; a model has one output for each."""
_SAMPLE_TYPES = (torch.uint8, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HELD_OUT = 0.1
_POOL, _EXAMPLES = 16, 4  # training samples that are looked at, and that are chosen
_PACKED_APART = ("x", "y", "splits")
_NOT_PACKED = ("file_names", "exact_targets", "labeled_rows")


@dataclass(frozen=True)
class Facts:
    """Key figures of a data set, as in a paper's data table; None if they depend on the folder.

    Attributes:
        train: Number of training samples, those held out for validation included.
        test: Number of test samples.
        classes: Number of classes.
        resolution: Height and width, "32x32".
        source: Authors and origin.
    """

    train: int | None = None
    test: int | None = None
    classes: int | None = None
    resolution: str = "any"
    source: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """One labeled data set, or one client's share of it.

    Attributes:
        name: Its name in messages and reports.
        x: All samples: uint8 images [N, C, H, W], or your own floats or int64 tokens [N, ...]; may be memory-mapped.
            Images that do not fit into memory may stay encoded on disk (`fleetfit.data.Encoded`).
        y: Labels. Classification: int64 [N] in 0..classes-1. Next token: int64 [N, L], -100 where nothing is scored.
            Regression: floats [N, classes]. Multi-label: 0 or 1, [N, classes]. A task of your own: any tensor [N, ...].
        splits: "train", "validation", "test" -> int64 indices into x, on the host; a missing split is empty.
        classes: Number of classes; of tokens to predict, of regression targets, of labels.
        groups: The natural group (writer, speaker, role) of each sample, int64 [N]; None if the set has none.
        class_names: One name per class, or ().
        mean: Per channel, or one for all, subtracted after uint8 is scaled to [0, 1]; () leaves it there.
        std: Per channel, or one for all, divided by after that.
        channels_last: Whether the channels of mean and std are the last dimension, as in series [N, time, channels];
            else they are the second one.
        augment: Augmentation of training batches, a name in `augment.AUGMENTATIONS` or "resized-crop", or None.
        task: "classification", "next_token", "regression" or "multi_label".
        vocabulary: Above 0: x holds tokens in 0..vocabulary-1.
        padding: The token that fills short samples; each batch is cut to its longest sample. -1: none.
        resize: Height and width to which images are resized, batch by batch, after augmentation.
        tokenizer: The tokenizer's file, `tokenizer.json`; "" if there is none.
        columns: The encoding of a table's columns, the text of `columns.json`; "" for other data.
        targets: Mean and standard deviation of the targets of a regression, [classes] each; (): those of the training
            samples.
        labeled: Whether y holds labels; without them there are predictions but no scores.
        notes: Sentences on how the files were read, which a run prints.
        file_names: The file of each sample, bytes [N], for predictions; None if samples are not files. Workers do not
            get them.
        exact_targets: Targets of a regression with more digits than y has, float64 [N, classes], for predictions; None:
            y has all. Workers do not get them.
        labeled_rows: Indices of the samples with labels where only some have one, int64, for scores; then `labeled`
            is False. Workers do not get them.
    """

    name: str
    x: Tensor | EncodedImages
    y: Tensor
    splits: Mapping[str, Tensor]
    classes: int
    groups: Tensor | None = None
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels_last: bool = False
    augment: str | None = None
    task: str = "classification"
    vocabulary: int = 0
    padding: int = -1
    resize: tuple[int, int] | None = None
    tokenizer: str = ""
    columns: str = ""
    targets: tuple[tuple[float, ...], ...] = ()
    labeled: bool = True
    notes: tuple[str, ...] = ()
    file_names: NDArray[np.bytes_] | None = None
    exact_targets: NDArray[np.float64] | None = None
    labeled_rows: Tensor | None = None
    _scale: Tensor | None = field(init=False, default=None)
    _shift: Tensor | None = field(init=False, default=None)
    _targets: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check all fields once, so that `batch` does not have to.

        Raises:
            DataError: A shape, a dtype, a label or an index is wrong.
        """
        _check_samples(self)
        _check_labels(self)
        if self.augment is not None:
            check_augmentation(self.augment, self.x)
        scale, shift = _compute_normalization(self)
        object.__setattr__(self, "_scale", scale)
        object.__setattr__(self, "_shift", shift)
        object.__setattr__(self, "splits", _check_splits(self, self.splits))
        if self.task == "regression":
            object.__setattr__(self, "_targets", self._compute_target_scale())

    def _compute_target_scale(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the targets, each [classes]: `targets`, or of the training samples."""
        if self.targets:
            mean, std = (torch.tensor(values, device=self.y.device) for values in self.targets)
            return mean, std
        y = self.y[self.splits["train"].to(self.y.device)].double()
        if len(y) < 2:
            return torch.zeros(self.classes, device=y.device), torch.ones(self.classes, device=y.device)
        std = y.std(0, correction=0)
        return y.mean(0).float(), torch.where(std > 0, std, 1).float()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of a model's input, without the batch."""
        shape = tuple(self.x.shape[1:])
        return shape if self.resize is None else (*shape[:-2], *self.resize)

    @property
    def channels(self) -> int:
        """The channels of a sample, or its first dimension where none are last."""
        return (*self.sample_shape, 1)[-2 if self.channels_last else 0]

    @property
    def target_scale(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a regression's training targets: prediction * std + mean has their unit.

        Raises:
            DataError: The task is not a regression.
        """
        if self._targets is None:
            raise DataError(
                f"{self.name}: only a regression has scaled targets, but the task is {self.task}.", key="task"
            )
        return self._targets

    def __repr__(self) -> str:
        """Return name, shape and split sizes; never the tensors."""
        sizes = ", ".join(f"{name} {len(indices)}" for name, indices in self.splits.items())
        return f"Data({self.name!r}, x {list(self.x.shape)} {self.x.dtype}, {self.classes} classes, {sizes})"

    def split(self, name: str) -> Tensor:
        """Return the indices of a split, int64 on the host.

        Raises:
            DataError: The name is unknown.
        """
        if name not in self.splits:
            raise DataError(
                f'{self.name} has no split "{name}". The splits are {", ".join(SPLITS)}.{did_you_mean(name, SPLITS)}',
                key="split",
            )
        return self.splits[name]

    def batch(self, indices: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return samples and labels, ready for a model.

        uint8 becomes (x / 255 - mean) / std. Multiplication and addition are separate on purpose: the rounding of a
        fused step would depend on a sample's place in the batch.

        Args:
            indices: int64 [B] into x.
            rng: For a training batch, the host generator of the augmentation. None: no augmentation.

        Returns:
            x, float32 [B, ...] (int64 stays int64), and y [B, ...], both on the device of the data. Targets of a
            regression have mean 0 and variance 1 over the training split.
        """
        y = self.labels(indices.to(self.x.device, non_blocking=True))
        x = self.stored(indices, rng)
        if x.dtype == torch.int64:
            return (x, y) if self.padding < 0 else _trim_padding(x, y, self.padding, self.task)
        x = x.to(torch.float32)
        if self._scale is not None:
            x.mul_(self._scale)
        if self._shift is not None:
            x.add_(self._shift)
        if self.resize is not None:
            x = F.interpolate(x, self.resize, mode="bilinear", antialias=False, align_corners=False)
        return x, y

    def stored(self, indices: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Return samples as stored, [B, ...]: uint8 images, floats or tokens; with `rng`, augmented."""
        if not isinstance(self.x, EncodedImages):
            indices = indices.to(self.x.device, non_blocking=True)
        return select_samples(self.x, indices, self.augment, rng)

    @property
    def normalization(self) -> tuple[Tensor | None, Tensor | None]:
        """Scale and shift of stored samples, x * scale + shift, for [B, C, ...]; None without normalization."""
        return self._scale, self._shift

    def labels(self, indices: Tensor) -> Tensor:
        """Return the labels of samples as `batch` does [B, ...], on the device of the data."""
        indices = indices.to(self.y.device)
        y = self.y.index_select(0, indices)
        if self._targets is not None:
            mean, std = self._targets
            return (y.to(torch.float32) - mean) / std
        return y.to(torch.float32) if self.task == "multi_label" else y

    def share(self, splits: Mapping[str, Tensor]) -> "Data":
        """Return a client's view: the same tensors, other splits. Nothing is copied.

        Raises:
            DataError: An index is wrong.
        """
        view = copy.copy(self)
        object.__setattr__(view, "splits", _check_splits(self, splits))
        return view

    def to(self, device: torch.device | str) -> "Data":
        """Return the data with all tensors on a device; the splits stay on the host."""
        moved = copy.copy(self)
        for name in ("x", "y", "groups", "_scale", "_shift"):
            tensor = getattr(self, name)
            object.__setattr__(moved, name, None if tensor is None else tensor.to(device))
        if self._targets is not None:
            object.__setattr__(moved, "_targets", tuple(tensor.to(device) for tensor in self._targets))
        return moved


@dataclass(frozen=True, eq=False, repr=False)
class DataInMemory:
    """Samples or a table in memory, in place of a name in `[data]`. The keys of the section apply to them.

    Attributes:
        label: What they are, for messages.
        make: Returns the data set. Its parameters are the keys, except those of `values`.
        values: Arguments of `make`.
    """

    label: str
    make: Callable[..., Data]
    values: Mapping[str, Any]
    _data: dict[str, Data] = field(init=False, default_factory=dict)

    def __repr__(self) -> str:
        """Return what they are; never the values."""
        return f"DataInMemory({self.label})"

    def load(self, settings: Mapping[str, Any], where: str = "[data]") -> Data:
        """Return the data set for the keys of a section. The last one is kept.

        Raises:
            FleetFitError: A key is unknown or wrong, or the values do not fit.
        """
        key = json.dumps(settings, sort_keys=True, default=repr)
        if key not in self._data:
            self._data.clear()
            self._data[key] = call_factory(self.make, self.label, where, settings, **self.values)
        return self._data[key]


@dataclass(frozen=True, eq=False, repr=False)
class AbsentData(Data):
    """The facts of data that cannot be read: shape, classes, means. There are no samples.

    Attributes:
        reason: Why they cannot be read, as a sentence.
    """

    reason: str = ""

    def split(self, name: str) -> Tensor:
        """Refuse to return samples.

        Raises:
            DataError: Always.
        """
        raise self.make_error()

    def make_error(self) -> DataError:
        """Return the error for a use that needs samples."""
        return DataError(
            f"{self.reason} This needs samples: the training data (in Python ff.load(folder, data=...)), or others: "
            "--data PATH, or data=... in Python.",
            key="data",
        )


def choose_samples(data: Data) -> Tensor | None:
    """Return two to four training samples as a model gets them [N, ...]; None where there are none.

    They are the same for the same data. Those with the most different numbers come first; a single one comes twice.
    """
    if isinstance(data, AbsentData):
        return None
    train = data.split("train")
    rows = train[torch.randperm(len(train), generator=make_torch_rng("samples"))[:_POOL]]
    if not len(rows):
        return None
    x = data.stored(rows) if data.vocabulary else data.batch(rows)[0]  # a batch of texts is cut to its longest
    x = torch.unique(x.cpu(), dim=0)
    order = sorted(range(len(x)), key=lambda i: -len(x[i].unique()))[:_EXAMPLES]
    return x[order if len(order) > 1 else order * 2]


def _trim_padding(x: Tensor, y: Tensor, padding: int, task: str) -> tuple[Tensor, Tensor]:
    """Cut off the columns in which every sample of a batch is padded, except the first; also of a label per token."""
    columns = (x != padding).any(0).nonzero()
    length = int(columns[-1]) + 1 if len(columns) else 1
    is_per_token = y.ndim == 2 and y.shape[1] == x.shape[1] and task not in ("multi_label", "regression")
    return x[:, :length], y[:, :length] if is_per_token else y


def drop_labels(data: Data, seed: int = 0) -> Data:
    """Return the training and validation samples of a data set with 0 in place of every label.

    Without validation samples, a tenth of the training samples is held out at random.

    Args:
        data: A data set of any task.
        seed: Seed of the draw.

    Raises:
        DataError: There are no training samples.
    """
    train, validation = data.split("train"), data.split("validation")
    if not len(train):
        raise DataError(f"{data.name} has no training samples, so the server cannot train on it.", key="data.server")
    if not len(validation):
        order = train[torch.randperm(len(train), generator=make_torch_rng(seed, "held out"))]
        count = int(len(train) * _HELD_OUT)
        train, validation = order[count:].sort().values, order[:count].sort().values
    return dataclasses.replace(
        data,
        y=torch.zeros((), dtype=torch.int64).expand(len(data.x)),
        splits={"train": train, "validation": validation},
        classes=1,
        class_names=(),
        groups=None,
        task="classification",
    )


# ---- checks of a new data set ----------------------------------------------------------------------------------------


def _error(data: Data, key: str, expected: str, value: Any = None) -> DataError:
    """Return an error on a field, with the type and the shape of its tensor."""
    got = "" if value is None else f", got {value.dtype} {list(value.shape)}"
    return DataError(f"{data.name}: {key} must be {expected}{got}.", key=key)


def _check_range(data: Data, key: str, values: Tensor, limit: int, expected: str = "") -> None:
    """Refuse whole numbers of a field that are not in 0..limit-1."""
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= limit):
        place = tuple(((values < 0) | (values >= limit)).nonzero()[0].tolist())
        raise _error(data, key, f"in 0..{limit - 1}{expected}, but sample {place[0]} has {int(values[place])}")


def _check_samples(data: Data) -> None:
    x, y, groups = data.x, data.y, data.groups
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor | EncodedImages if name == "x" else Tensor):
            raise _error(data, name, f"a tensor, got {type(value).__name__}")
    if x.dtype not in _SAMPLE_TYPES:
        raise _error(data, "x", "uint8 (images), float or int64 (tokens)", x)
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise _error(data, "y", f"one entry per sample of x {list(x.shape)}", y)
    if data.vocabulary:
        if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.ndim != 2:
            raise _error(data, "x", "tokens, int64 [N, L]", x)
        _check_range(data, "x", x, data.vocabulary)
    if groups is not None:
        if groups.dtype != torch.int64 or groups.shape != (len(x),):
            raise _error(data, "groups", f"int64 [{len(x)}]", groups)
        if len(groups) and int(groups.min()) < 0:
            raise _error(data, "groups", f"at least 0, got {int(groups.min())}")


def _check_labels(data: Data) -> None:
    x, y, classes = data.x, data.y, data.classes
    if classes < 1:
        raise _error(data, "classes", f"at least 1, got {classes}")
    if data.class_names and len(data.class_names) != classes:
        raise _error(data, "class_names", f"{classes}, one per class, got {len(data.class_names)}")
    if data.task == "classification":
        if y.dtype != torch.int64 or y.ndim != 1:
            raise _error(data, "y", f"labels, int64 [{len(y)}]", y)
        _check_range(data, "y", y, classes)
    elif data.task == "next_token":
        if y.dtype != torch.int64 or x.dtype != torch.int64 or x.ndim != 2 or y.shape != x.shape:
            expected = f"the token that follows each of x, both int64 [N, L]; x is {x.dtype} {list(x.shape)}"
            raise _error(data, "y", expected, y)
        not_scored = f", or {NOT_SCORED} where nothing is scored"
        _check_range(data, "y", y.where(y != NOT_SCORED, 0), classes, not_scored)
    elif data.task == "regression":
        _check_targets(data)
    elif data.task == "multi_label" and (y.ndim != 2 or y.shape[1] != classes or not bool(((y == 0) | (y == 1)).all())):
        raise _error(data, "y", f"0 or 1 in [{len(y)}, {classes}]", y)


def _check_targets(data: Data) -> None:
    y, count = data.y, data.classes
    if not y.is_floating_point() or y.ndim != 2 or y.shape[1] != count:
        raise _error(data, "y", f"floats [{len(y)}, {count}] (classes is the number of targets)", y)
    if not bool(torch.isfinite(y).all()):
        row, column = (~torch.isfinite(y)).nonzero()[0].tolist()
        place = f"sample {row}, column {column}, has {y[row, column].item()}. Leave the sample out"
        raise _error(data, "y", f"finite, but {place}")
    if data.targets and [len(values) for values in data.targets] != [count] * 2:
        raise _error(data, "targets", f"{count} means and as many standard deviations")


def _compute_normalization(data: Data) -> tuple[Tensor | None, Tensor | None]:
    """Return scale and shift, to broadcast over [B, C, ...]: x * scale + shift = (x / 255 - mean) / std."""
    x, mean, std = data.x, tuple(data.mean), tuple(data.std)
    if len(mean) != len(std):
        raise _error(data, "mean", f"as long as std, got {len(mean)} and {len(std)} values")
    if not mean:
        return (torch.tensor(1 / 255).to(x.device), None) if x.dtype == torch.uint8 else (None, None)
    if x.dtype == torch.int64:
        raise _error(data, "mean", "empty, as std: tokens cannot be normalized")
    axis = -1 if data.channels_last else 1
    channels = x.shape[axis] if x.ndim > 1 else 1
    if len(mean) not in (1, channels):
        raise _error(data, "mean", f"1 or {channels} values (one per channel), as std, got {len(mean)}")
    if min(std) <= 0:
        raise _error(data, "std", f"positive, got {std}")
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    shape = [1] * x.ndim
    shape[axis if x.ndim > 1 else 0] = -1
    scale = torch.tensor([1 / (unit * s) for s in std]).view(shape)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(shape)
    return scale.to(x.device), shift.to(x.device)


def _check_splits(data: Data, splits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check splits against the samples; return all three on the host."""
    for name in splits:
        if name not in SPLITS:
            raise DataError(
                f'{data.name}: unknown split "{name}"; the splits are {", ".join(SPLITS)}.{did_you_mean(name, SPLITS)}',
                key="splits",
            )
    total = len(data.x)
    is_used = torch.zeros(total, dtype=torch.bool)
    all_splits = {}
    for name in SPLITS:
        indices = splits.get(name, torch.empty(0, dtype=torch.int64)).cpu()
        if indices.dtype != torch.int64 or indices.ndim != 1:
            raise _error(data, "splits", f'int64 indices [n]; "{name}" is not', indices)
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= total):
            got = f'"{name}" has {int(indices.min())}..{int(indices.max())}'
            raise _error(data, "splits", f"indices of the {total} samples, but {got}")
        repeated = is_used[indices]
        if bool(repeated.any()):
            index = int(indices[repeated][0])
            raise DataError(f'{data.name}: sample {index} of split "{name}" is also in an earlier split.', key="splits")
        is_used[indices] = True
        all_splits[name] = indices
    return all_splits


# ---- transfer to worker processes, which share the samples -----------------------------------------------------------


def pack_data(data: Data) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a data set as a payload of plain values and small tensors, and its large arrays: samples and labels.

    The samples of encoded images are the index of their files.
    """
    names = [field.name for field in dataclasses.fields(data) if field.init]
    fields = {name: getattr(data, name) for name in names if name not in (*_PACKED_APART, *_NOT_PACKED)}
    encoded, x = data.x.to_payload() if isinstance(data.x, EncodedImages) else (None, data.x.cpu().numpy())
    return {"fields": fields, "splits": dict(data.splits), "encoded": encoded}, {"x": x, "y": data.y.cpu().numpy()}


def unpack_data(payload: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Data:
    """Return the data set of `pack_data`; it shares the arrays' memory."""
    encoded = payload["encoded"]
    x = EncodedImages.from_payload(encoded, arrays["x"]) if encoded else torch.from_numpy(arrays["x"])
    return Data(x=x, y=torch.from_numpy(arrays["y"]), splits=payload["splits"], **payload["fields"])


def save_data(data: Data, folder: Path) -> dict[str, Any]:
    """Write the arrays of a data set to files in a folder; return the rest as a payload."""
    payload, arrays = pack_data(data)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return payload


def load_data(payload: Mapping[str, Any], folder: Path) -> Data:
    """Return the data set of `save_data`, its arrays memory-mapped."""
    return unpack_data(payload, {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in ("x", "y")})
