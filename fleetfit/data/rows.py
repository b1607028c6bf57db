"""Rows: the labeled samples of any source, with splits and groups; each becomes a `Data` in the same way."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fleetfit.data.dataset import Data
from fleetfit.data.image_reader import EncodedImages
from fleetfit.data.splits import fill_missing_splits
from fleetfit.errors import DataError


@dataclass(frozen=True, eq=False)
class Rows:
    """Labeled samples, one split after the other.

    Attributes:
        x: The samples: an array [N, ...], encoded images, or what reads them; None: only their files are known.
        y: int64 [N]; None: new samples without labels.
        sizes: Split -> number of samples, in their order; only the splits that exist.
        classes: Number of classes.
        class_names: One per class, or ().
        groups: int64 [N], or None.
        notes: Sentences on how they were read.
        folder: The folder of the files.
        file_names: The file of each sample, relative to `folder`, bytes [N]; None if samples are not files.
    """

    x: Any
    y: Any
    sizes: dict[str, int]
    classes: int
    class_names: tuple[str, ...] = ()
    groups: NDArray[np.int64] | None = None
    notes: tuple[str, ...] = ()
    folder: Path = Path()
    file_names: NDArray[np.bytes_] | None = None

    @property
    def paths(self) -> list[Path]:
        """The file of each sample."""
        return [self.folder / os.fsdecode(name) for name in (() if self.file_names is None else self.file_names)]

    @property
    def strata(self) -> NDArray[np.int64]:
        """What samples are held out in proportion to, int64 [N]: groups, else classes, else nothing."""
        if self.groups is not None:
            return self.groups
        y = np.asarray(self.y)
        is_class = y.ndim == 1 and y.dtype.kind == "i" and (y >= 0).all()
        return y if is_class else np.zeros(len(y), dtype=np.int64)

    def divide(
        self, name: str, validation: float, test: float, seed: int, samples: int | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """Return the rows of each split. Missing splits are held out of each group, or of each class.

        Args:
            name: Name of the data set, for messages.
            validation: Share of the training samples to hold out, if there is no validation set.
            test: Share to hold out as the test set, if there is only a training set.
            seed: Seed of the draws.
            samples: Number of training samples to draw, in proportion for each class; None: all.

        Raises:
            DataError: A share, the seed or the number of samples is out of range.
        """
        return fill_missing_splits(self.sizes, self.strata, validation, test, seed, name, samples, self.y)

    def make_data(
        self,
        name: str,
        x: Any,
        splits: Mapping[str, NDArray[np.int64]],
        augment: str | None = None,
        resize: int | None = None,
        **facts: Any,
    ) -> Data:
        """Return the samples as a data set.

        Args:
            name: Its name.
            x: The samples, an array or encoded images.
            splits: The rows of each split.
            augment: Augmentation of training batches; None or "none": nothing.
            resize: Side in pixels to which batches are resized; None: no resizing.
            **facts: Further fields of `Data`.

        Raises:
            DataError: Labels or fields do not fit the samples, or `resize` is out of range.
        """
        if resize is not None and resize < 1:
            raise DataError(f"{name}: resize must be at least 1 pixel, got {resize}.", key="resize")
        empty = [split for split, size in self.sizes.items() if not size and split != "train"]
        return Data(
            name=name,
            x=torch.from_numpy(x) if isinstance(x, np.ndarray) else x,
            y=torch.from_numpy(self.y) if isinstance(self.y, np.ndarray) else self.y,
            splits={split: torch.from_numpy(rows) for split, rows in splits.items()},
            classes=self.classes,
            groups=None if self.groups is None else torch.from_numpy(self.groups),
            class_names=self.class_names,
            notes=(*self.notes, *(f"{name}: the {s} set has no samples, so it counts as missing." for s in empty)),
            augment=None if augment == "none" else augment,
            resize=None if resize is None else (resize, resize),
            **facts,
        )


FITTED = ("task", "classes", "class_names", "mean", "std", "channels_last", "vocabulary", "padding", "resize",
          "columns", "tokenizer")  # fmt: skip
"""The fields of `Data` that other samples have as the training data, beside the scale of targets."""


def make_new_data(
    facts: Data,
    name: str,
    x: NDArray[Any] | torch.Tensor | EncodedImages,
    y: NDArray[Any] | torch.Tensor | None,
    halves: bool = False,
    splits: Mapping[str, NDArray[np.int64]] | None = None,
    labeled_rows: torch.Tensor | None = None,
    **more: Any,
) -> Data:
    """Return samples for a trained model.

    Args:
        facts: The training data, or their facts.
        name: Name of the samples.
        x: The samples, as those of the training data.
        y: Their labels, as those of the training data; None: without labels.
        halves: Whether one half of the samples is for validation; else all are for testing.
        splits: The rows of each split, in place of these.
        labeled_rows: The rows with labels, if only some have one.
        **more: Further fields of `Data`, or other facts.

    Raises:
        DataError: The samples do not fit the facts.
    """
    if splits is None:
        rows = np.arange(len(x))
        splits = {"validation": rows[::2], "test": rows[1::2]} if halves else {"test": rows}
    labels = torch.zeros(len(x), *facts.y.shape[1:], dtype=facts.y.dtype) if y is None else y
    return Data(
        name=name,
        x=torch.from_numpy(x) if isinstance(x, np.ndarray) else x,
        y=torch.from_numpy(labels) if isinstance(labels, np.ndarray) else labels,
        splits={split: torch.from_numpy(rows) for split, rows in splits.items()},
        labeled=y is not None and labeled_rows is None,
        labeled_rows=labeled_rows,
        **{**{field: getattr(facts, field) for field in (*FITTED, "targets")}, **more},
    )


def number_classes(trained: Data) -> dict[str, int]:
    """Return the number of each class by its name, and by the number itself if no class is called a number."""
    numbers = {str(number): number for number in range(trained.classes)}
    names = {name: number for number, name in enumerate(trained.class_names)}
    return names if any(name.isdecimal() for name in names) else names | numbers
