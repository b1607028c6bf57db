"""A labelled data set that lies in memory or on disk, and one client's share of it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from fleetfit.data._checks import SPLITS, check_labels, check_samples, checked_splits, normalisation
from fleetfit.data._encoded import Encoded
from fleetfit.data.augment import check_augmentation, picked
from fleetfit.errors import DataError, did_you_mean


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
            Images that do not fit may stay encoded on disk (`fleetfit.data.Encoded`).
        y: Labels. Classification: int64 [N] in 0..classes-1. Next token: int64 [N, L], -100 where nothing is scored.
            Regression: floats [N, classes]. Multi-label: 0 or 1, [N, classes]. A task of your own: any tensor [N, ...].
        splits: "train", "validation", "test" -> int64 indices into x, on the host; a missing split is empty.
        classes: Number of classes; of tokens to predict, of regression targets, of labels.
        groups: The natural group (writer, speaker, role) of each sample, int64 [N]; None if the set has none.
        class_names: One name per class, or ().
        mean: Per channel, or one for all, subtracted after uint8 is scaled to [0, 1]; () leaves it there.
        std: Per channel, or one for all, divided by after that.
        augment: What training batches go through, a name in `augment.AUGMENTATIONS` or "resized-crop", or None.
        task: What is learned: "classification", "next_token", "regression" or "multi_label".
        vocabulary: Above 0: x holds tokens in 0..vocabulary-1.
        padding: The token that fills short samples; each batch is cut to its longest sample. -1: there is none.
        resize: Height and width that images are brought to, batch by batch, after augmentation.
        tokenizer: The file that says what the tokens of texts are, `tokenizer.json`; "" where there is none.
    """

    name: str
    x: Tensor | Encoded
    y: Tensor
    splits: Mapping[str, Tensor]
    classes: int
    groups: Tensor | None = None
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: str | None = None
    task: str = "classification"
    vocabulary: int = 0
    padding: int = -1
    resize: tuple[int, int] | None = None
    tokenizer: str = ""
    _scale: Tensor | None = field(init=False, default=None)
    _shift: Tensor | None = field(init=False, default=None)
    _targets: tuple[Tensor, Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check everything once, so that `batch` need not.

        Raises:
            DataError: A shape, a dtype, a label or an index does not fit.
        """
        check_samples(self)
        check_labels(self)
        if self.augment is not None:
            check_augmentation(self.augment, self.x)
        scale, shift = normalisation(self)
        object.__setattr__(self, "_scale", scale)
        object.__setattr__(self, "_shift", shift)
        object.__setattr__(self, "splits", checked_splits(self, self.splits))
        if self.task == "regression":
            object.__setattr__(self, "_targets", self._standard_targets())

    def _standard_targets(self) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the training targets, each [classes]."""
        y = self.y[self.splits["train"].to(self.y.device)].double()
        if len(y) < 2:
            return torch.zeros(self.classes, device=y.device), torch.ones(self.classes, device=y.device)
        std = y.std(0, correction=0)
        return y.mean(0).float(), torch.where(std > 0, std, 1).float()

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample as a model gets it, without the batch."""
        shape = tuple(self.x.shape[1:])
        return shape if self.resize is None else (*shape[:-2], *self.resize)

    @property
    def target_scale(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the training targets of a regression: prediction * std + mean has their unit.

        Raises:
            DataError: The task is another one.
        """
        if self._targets is None:
            raise DataError(f"{self.name}: only a regression has scaled targets; the task is {self.task}.")
        return self._targets

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
            x, float32 [B, ...] (int64 stays int64), and y [B, ...], both on the device of the data. Targets of a
            regression have mean 0 and variance 1 over the training split.
        """
        y = self.labels(indices.to(self.x.device))
        x = self.stored(indices, rng)
        if x.dtype == torch.int64:
            return (x, y) if self.padding < 0 else _without_tail(x, y, self.padding)
        x = x.to(torch.float32)
        if self._scale is not None:
            x.mul_(self._scale)
        if self._shift is not None:
            x.add_(self._shift)
        if self.resize is not None:
            x = F.interpolate(x, self.resize, mode="bilinear", antialias=False, align_corners=False)
        return x, y

    def stored(self, indices: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Return samples as they are stored, [B, ...]: uint8 images, floats or tokens; with `rng`, augmented."""
        placed = indices if isinstance(self.x, Encoded) else indices.to(self.x.device)
        return picked(self.x, placed, self.augment, rng)

    @property
    def normalisation(self) -> tuple[Tensor | None, Tensor | None]:
        """What stored samples are multiplied by, and what is added then, to broadcast over [B, C, ...]; or None."""
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
            DataError: An index does not fit.
        """
        view = copy.copy(self)
        object.__setattr__(view, "splits", checked_splits(self, splits))
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


def _without_tail(x: Tensor, y: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Cut off the columns in which every sample of a batch is padded; at least one column stays."""
    used = (x != padding).any(0).nonzero()
    length = int(used[-1]) + 1 if len(used) else 1
    return x[:, :length], y[:, :length] if y.ndim == 2 and y.shape[1] == x.shape[1] else y
