"""Rows of another table, and samples in memory, as what a run's model was trained on: nothing is fitted to them."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data.dataset import Data
from fleetfit.data.files import columns
from fleetfit.data.files.arrays import array_of, find_not_finite, samples_of
from fleetfit.data.files.cells import TableRows
from fleetfit.data.files.columns import Columns
from fleetfit.data.files.folders import convert_saved_dataset
from fleetfit.data.files.table import data_of, rows_of, sheets_of, strata_of
from fleetfit.data.splits import fill_missing_splits, hold_out
from fleetfit.errors import DataError, truncate

_MOST_NAMED = 10
_SAY = logging.getLogger("fleetfit")


def like(path: Path, text: str, halves: bool = False) -> Data:
    """Return the rows of another table as the numbers that a model was trained on; none of them are for training.

    Args:
        path: A file or a folder, as of `table`; what has no split of its own is for testing.
        text: The `columns.json` of the model.
        halves: Whether one half of it is for validation.

    Raises:
        DataError: As `table`; or a column is missing, or a label is no class that the model knows.
        MissingExtra: It is a Parquet file, and pyarrow is not installed.
    """
    known = columns.of_text(text, "columns.json")
    sheets = sheets_of(convert_saved_dataset(path), None, True, known.missing)
    whole = columns.joined(sheets)
    x, y, notes = _encoded_as(known, whole)
    rows = torch.arange(whole.rows)
    if len(sheets) > 1:
        sizes = {split: sheet.rows for split, sheet in sheets.items()}
        given = fill_missing_splits(sizes, np.zeros(whole.rows, dtype=np.int64), 0.0, 0.0, 0)
        splits = {split: torch.from_numpy(indices) for split, indices in given.items()}
    elif halves:
        kept, held = hold_out(rows.numpy(), strata_of(known, y, None, whole.rows), 0.5, 0)
        splits = {"validation": torch.from_numpy(kept), "test": torch.from_numpy(held)}
    else:
        splits = {"test": rows}
    return data_of(path.resolve().stem, x, y, splits, known, None, notes)


def frame_alike(frame: Any, text: str) -> Data:
    """Return a DataFrame's rows as the numbers that a model was trained on.

    Args:
        frame: A DataFrame of pandas, or whatever else has `columns` and gives each by its name.
        text: The `columns.json` of the model.

    Raises:
        DataError: A column is missing, or a label is no class that the model knows.
    """
    known = columns.of_text(text, "columns.json")
    rows = rows_of(frame)
    x, y, notes = _encoded_as(known, rows)
    return data_of("table", x, y, {"test": torch.arange(len(frame))}, known, None, notes)


def arrays_alike(x: Any, y: Any, ours: Data) -> Data:
    """Return samples and labels as those of a run's data: by its means, with its classes or in the unit of its targets.

    Args:
        x: Samples [N, ...], arrays, tensors or lists of numbers.
        y: Labels [N], or targets [N, targets].
        ours: The run's data, of classes or numbers.

    Raises:
        DataError: They are of another kind, or a label is no class of the run's.
    """
    if ours.task not in ("classification", "regression"):
        raise DataError(
            f"data=(x, y) are samples with a class or numbers each; the run is {ours.task}. Name a path.", key="data"
        )
    given, labels = array_of(x, "x"), array_of(y, "y")
    wanted = tuple(ours.x.shape[1:])
    moved = given.ndim > 3 and given.shape[1:] != wanted and (given.shape[-1], *given.shape[1:-1]) == wanted
    samples = samples_of(given, tokens=False, channels_last=moved)
    if len(samples) != len(labels):
        raise DataError(f"data=(x, y): x has {len(samples)} samples, y has {len(labels)} labels.", key="y")
    if ours.resize is None and tuple(samples.shape[1:]) != wanted:
        raise DataError(f"data=(x, y): x is {list(samples.shape)}; the run's samples are {list(wanted)} each.", key="x")
    kinds = {one.dtype.is_floating_point for one in (samples, ours.x)}
    if len(kinds) > 1:
        raise DataError(
            f"data=(x, y): x holds {str(samples.dtype).removeprefix('torch.')} and the run was trained on "
            f"{str(ours.x.dtype).removeprefix('torch.')}; they must be of one kind.",
            key="x",
        )
    if place := find_not_finite(given):
        _SAY.warning("data=(x, y): x is not finite in %s. What these samples score means nothing.", place)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    return Data(
        "own-data", samples, _targets(labels, ours) if ours.task == "regression" else _classes(labels, ours),
        {"test": torch.arange(len(samples))}, ours.classes, class_names=ours.class_names, mean=ours.mean, std=ours.std,
        task=ours.task, resize=ours.resize,
        targets=tuple(tuple(m.tolist()) for m in ours.target_scale) if ours.task == "regression" else (),
    )  # fmt: skip


def _targets(labels: NDArray[Any], ours: Data) -> Tensor:
    if labels.dtype.kind == "U":
        raise DataError(
            f"data=(x, y): y holds text, and the run was trained on numbers, {ours.classes} for a sample.", key="y"
        )
    return torch.from_numpy(labels.reshape(len(labels), -1).astype(np.float32))


def _classes(labels: NDArray[Any], ours: Data) -> Tensor:
    names = ours.class_names or tuple(map(str, range(ours.classes)))
    if labels.dtype.kind == "f" and (labels == np.floor(labels)).all():
        labels = labels.astype(np.int64)
    texts = labels.astype(np.int64).astype(str) if labels.dtype.kind == "b" else labels.astype(str)
    place = {name: i for i, name in enumerate(names)}
    strange = sorted({str(text) for text in np.unique(texts)} - place.keys())
    if labels.ndim != 1 or strange:
        raise DataError(
            f"data=(x, y): y has "
            f"{', '.join(map(truncate, strange[:_MOST_NAMED])) or f'labels of shape {labels.shape}'}, "
            f"and the run was trained on the classes {', '.join(map(truncate, names[:_MOST_NAMED]))}.",
            key="y",
        )
    return torch.tensor([place[str(text)] for text in texts])


def _encoded_as(
    known: Columns, rows: TableRows
) -> tuple[NDArray[np.float32], NDArray[np.generic] | None, tuple[str, ...]]:
    """Return rows as the numbers that a model was trained on, their labels if all have one, and what to say of them."""
    x, notes = known.encoded(rows)
    y = columns.labels_of(rows, known)
    lacking = 0 if y is None else int(_unlabelled(y).sum())
    if lacking:
        notes.append(f"{lacking} of {rows.rows} rows have no label, so nothing is measured.")
    return x, None if lacking else y, tuple(notes)


def _unlabelled(y: NDArray[np.generic]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isnan(y[:, 0]) if y.ndim == 2 else y < 0  # type: ignore[operator]
    return found
