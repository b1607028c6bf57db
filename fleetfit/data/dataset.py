"""A labelled data set that lies in memory, and one client's share of it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data.augment import augmented, check_augmentation
from fleetfit.errors import DataError, did_you_mean

SPLITS = ("train", "validation", "test")
_KINDS_OF_X = (torch.uint8, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64)
_HOLD_OUT = 0x401D  # keeps this use of a seed apart from every other


@dataclass(frozen=True)
class Facts:
    """What a data set is, as in the data table of a paper; None means that it depends on the folder.

    Attributes:
        train: Number of training samples, those held out for validation included.
        test: Number of test samples.
        classes: Number of classes.
        resolution: Height and width, "32x32".
        source: Who made it and where it comes from.
    """

    train: int | None
    test: int | None
    classes: int | None
    resolution: str
    source: str


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """One labelled data set, or one client's share of it.

    Attributes:
        name: What it is called in messages and reports.
        x: All samples: uint8 images [N, C, H, W], or your own floats or int64 tokens [N, ...]; may be memory-mapped.
        y: Labels, int64 [N] in 0..classes-1. A task other than classification may have any tensor [N, ...].
        splits: "train", "validation", "test" -> int64 indices into x, on the host; a missing split is empty.
        classes: Number of classes.
        groups: The natural group (writer, speaker, role) of each sample, int64 [N]; None if the set has none.
        class_names: One name per class, or ().
        mean: Per channel, or one for all, subtracted after uint8 is scaled to [0, 1]; () leaves it there.
        std: Per channel, or one for all, divided by after that.
        augment: What training batches go through, a name in `augment.AUGMENTATIONS`, or None.
        task: What is learned; labels are checked for "classification" only.
    """

    name: str
    x: Tensor
    y: Tensor
    splits: Mapping[str, Tensor]
    classes: int
    groups: Tensor | None = None
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: str | None = None
    task: str = "classification"
    _scale: Tensor | None = field(init=False, default=None)
    _shift: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check everything once, so that `batch` need not.

        Raises:
            DataError: A shape, a dtype, a label or an index does not fit.
        """
        _check_samples(self)
        _check_labels(self)
        if self.augment is not None:
            check_augmentation(self.augment, self.x)
        scale, shift = _normalisation(self)
        object.__setattr__(self, "_scale", scale)
        object.__setattr__(self, "_shift", shift)
        object.__setattr__(self, "splits", _checked_splits(self, self.splits))

    def __repr__(self) -> str:
        """Return name, shape and split sizes; never the tensors."""
        sizes = ", ".join(f"{name} {len(indices)}" for name, indices in self.splits.items())
        return f"Data({self.name!r}, x {list(self.x.shape)} {self.x.dtype}, {self.classes} classes, {sizes})"

    def split(self, name: str) -> Tensor:
        """Return the indices of a split, int64 on the host.

        Raises:
            DataError: There is no split of that name.
        """
        if name not in self.splits:
            known = ", ".join(SPLITS)
            raise DataError(f'{self.name} has no split "{name}"; it has {known}.{did_you_mean(name, SPLITS)}')
        return self.splits[name]

    def batch(self, indices: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return samples and labels, ready for a model.

        uint8 becomes (x / 255 - mean) / std. Multiplication and addition are two steps on purpose: fused, their
        rounding would depend on a sample's place in the batch.

        Args:
            indices: int64 [B] into x.
            rng: Given for a training batch: the host generator that augmentation draws from. None: no augmentation.

        Returns:
            x, float32 [B, ...] (int64 stays int64), and y [B, ...], both on the device of the data.
        """
        x = self.x
        if indices.device != x.device:
            indices = indices.to(x.device)
        y = self.y.index_select(0, indices)
        x = x.index_select(0, indices)
        if rng is not None and self.augment is not None:
            x = augmented(x, self.augment, rng)
        if x.dtype == torch.int64:
            return x, y
        x = x.to(torch.float32)
        if self._scale is not None:
            x.mul_(self._scale)
        if self._shift is not None:
            x.add_(self._shift)
        return x, y

    def share(self, splits: Mapping[str, Tensor]) -> "Data":
        """Return a client's view: the same tensors, other splits. Nothing is copied.

        Raises:
            DataError: An index does not fit.
        """
        view = copy.copy(self)
        object.__setattr__(view, "splits", _checked_splits(self, splits))
        return view

    def to(self, device: torch.device | str) -> "Data":
        """Return the data with all tensors on a device; the splits stay on the host."""
        moved = copy.copy(self)
        for name in ("x", "y", "groups", "_scale", "_shift"):
            tensor = getattr(self, name)
            object.__setattr__(moved, name, None if tensor is None else tensor.to(device))
        return moved


def hold_out(
    indices: NDArray[np.int64], strata: NDArray[np.int64], fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random into those kept and those held out, with the same share of every stratum.

    A stratum of n samples gives up floor(fraction * n) or one more, those with the largest remainders first, so that
    round(fraction * len(indices)) are held out in all.

    Args:
        indices: The samples to divide, [n].
        strata: What must stay in proportion (the label, the writer), of each of them, [n], not negative.
        fraction: How many are held out, 0 <= fraction < 1.
        seed: Not negative; the same seed gives the same division.

    Returns:
        The kept and the held out indices, each in ascending order.

    Raises:
        DataError: The fraction or the seed is out of range.
    """
    if not 0 <= fraction < 1:
        raise DataError(f"a fraction of the data to hold out must be at least 0 and below 1, got {fraction}.")
    rng = generator(seed, _HOLD_OUT)
    order = rng.permutation(len(indices))
    order = order[np.argsort(strata[order], kind="stable")]
    sizes = np.bincount(strata) if len(strata) else np.zeros(0, dtype=np.int64)
    exact = sizes * fraction
    quota = np.floor(exact + 1e-9).astype(np.int64)
    extra = round(fraction * len(indices)) - int(quota.sum())
    if extra > 0:
        quota[np.argsort(quota - exact, kind="stable")[:extra]] += 1
    starts = np.cumsum(sizes) - sizes
    rank = np.arange(len(indices)) - np.repeat(starts, sizes)
    held = rank < np.repeat(quota, sizes)
    return np.sort(indices[order[~held]]), np.sort(indices[order[held]])


def generator(seed: int, purpose: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose of a seed.

    Raises:
        DataError: The seed is no whole number or is negative.
    """
    given: object = seed
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise DataError(f"a seed must be a whole number of at least 0, got {seed!r}.")
    return np.random.default_rng([seed, purpose])


def _check_samples(data: Data) -> None:
    x, y = data.x, data.y
    given: tuple[tuple[str, object], ...] = (("x", x), ("y", y))
    for name, value in given:
        if not isinstance(value, Tensor):
            raise DataError(f"{data.name}: {name} must be a tensor, got {type(value).__name__}.")
    if x.dtype not in _KINDS_OF_X:
        raise DataError(f"{data.name}: x must be uint8 (images), float or int64 (tokens), got {x.dtype}.")
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise DataError(
            f"{data.name}: x and y must have one entry per sample, got shapes {list(x.shape)} and {list(y.shape)}."
        )
    groups = data.groups
    if groups is not None:
        if groups.dtype != torch.int64 or groups.shape != (len(x),):
            raise DataError(f"{data.name}: groups must be int64 [{len(x)}], got {groups.dtype} {list(groups.shape)}.")
        if len(groups) and int(groups.min()) < 0:
            raise DataError(f"{data.name}: groups must not be negative, got {int(groups.min())}.")


def _check_labels(data: Data) -> None:
    if data.classes < 1:
        raise DataError(f"{data.name}: classes must be at least 1, got {data.classes}.")
    if data.class_names and len(data.class_names) != data.classes:
        raise DataError(f"{data.name} has {data.classes} classes but {len(data.class_names)} class names.")
    y = data.y
    if data.task != "classification":
        return
    if y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(f"{data.name}: labels must be int64 [{len(y)}], got {y.dtype} {list(y.shape)}.")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= data.classes):
        row = int(((y < 0) | (y >= data.classes)).nonzero()[0])
        raise DataError(
            f"{data.name}: labels must lie in 0..{data.classes - 1}, but sample {row} has label {int(y[row])}."
        )


def _normalisation(data: Data) -> tuple[Tensor | None, Tensor | None]:
    """Return scale and shift, shaped to broadcast over [B, C, ...]: x * scale + shift = (x / 255 - mean) / std."""
    x, mean, std = data.x, tuple(data.mean), tuple(data.std)
    if len(mean) != len(std):
        raise DataError(f"{data.name}: mean and std must have the same length, got {len(mean)} and {len(std)}.")
    if not mean:
        return (torch.tensor(1 / 255).to(x.device), None) if x.dtype == torch.uint8 else (None, None)
    if x.dtype == torch.int64:
        raise DataError(f"{data.name}: int64 tokens cannot be normalised; leave mean and std empty.")
    channels = x.shape[1] if x.ndim > 1 else 1
    if len(mean) not in (1, channels):
        raise DataError(f"{data.name}: mean and std need 1 or {channels} values (one per channel), got {len(mean)}.")
    if min(std) <= 0:
        raise DataError(f"{data.name}: std must be positive, got {std}.")
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    shape = (1, -1) + (1,) * (x.ndim - 2)
    scale = torch.tensor([1 / (unit * s) for s in std]).view(shape)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).view(shape)
    return scale.to(x.device), shift.to(x.device)


def _checked_splits(data: Data, splits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all three splits on the host, or say which index is wrong."""
    for name in splits:
        if name not in SPLITS:
            raise DataError(
                f'{data.name}: "{name}" is no split; the splits are {", ".join(SPLITS)}.{did_you_mean(name, SPLITS)}'
            )
    total = len(data.x)
    taken = torch.zeros(total, dtype=torch.bool)
    checked = {}
    for name in SPLITS:
        indices = splits.get(name, torch.empty(0, dtype=torch.int64)).cpu()
        if indices.dtype != torch.int64 or indices.ndim != 1:
            raise DataError(
                f'{data.name}: split "{name}" must be int64 indices [n], got {indices.dtype} {list(indices.shape)}.'
            )
        if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= total):
            raise DataError(
                f'{data.name}: split "{name}" holds indices {int(indices.min())}..{int(indices.max())}, '
                f"but there are {total} samples."
            )
        seen = taken[indices]
        if bool(seen.any()):
            index = int(indices[seen][0])
            raise DataError(f'{data.name}: sample {index} of split "{name}" is in an earlier split too; none may be.')
        taken[indices] = True
        checked[name] = indices
    return checked
