"""What a data set must be, checked once when it is made."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleetfit.data._encoded import Encoded
from fleetfit.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from fleetfit.data.dataset import Data

SPLITS = ("train", "validation", "test")
NOT_SCORED = -100
"""A next token that is none: padding."""
MOST_CLASSES = 1 << 20
"""That are inferred from the largest label of a file; a model has so many outputs."""
_KINDS_OF_X = (torch.uint8, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_samples(data: "Data") -> None:
    x, y = data.x, data.y
    given: tuple[tuple[str, object], ...] = (("x", x), ("y", y))
    for name, value in given:
        if not isinstance(value, Tensor | Encoded if name == "x" else Tensor):
            raise DataError(f"{data.name}: {name} must be a tensor, got {type(value).__name__}.")
    if x.dtype not in _KINDS_OF_X:
        raise DataError(f"{data.name}: x must be uint8 (images), float or int64 (tokens), got {x.dtype}.")
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise DataError(
            f"{data.name}: x and y must have one entry per sample, got shapes {list(x.shape)} and {list(y.shape)}."
        )
    if data.vocabulary:
        _check_tokens(data)
    groups = data.groups
    if groups is not None:
        if groups.dtype != torch.int64 or groups.shape != (len(x),):
            raise DataError(f"{data.name}: groups must be int64 [{len(x)}], got {groups.dtype} {list(groups.shape)}.")
        if len(groups) and int(groups.min()) < 0:
            raise DataError(f"{data.name}: groups must not be negative, got {int(groups.min())}.")


def _check_tokens(data: "Data") -> None:
    x = data.x
    if not isinstance(x, Tensor) or x.dtype != torch.int64 or x.ndim != 2:
        raise DataError(f"{data.name}: tokens must be int64 [N, L], got {x.dtype} {list(x.shape)}.")
    if len(x) and (int(x.min()) < 0 or int(x.max()) >= data.vocabulary):
        raise DataError(
            f"{data.name}: tokens must lie in 0..{data.vocabulary - 1}, got {int(x.min())}..{int(x.max())}."
        )


def check_labels(data: "Data") -> None:
    if data.classes < 1:
        raise DataError(f"{data.name}: classes must be at least 1, got {data.classes}.")
    if data.class_names and len(data.class_names) != data.classes:
        raise DataError(f"{data.name} has {data.classes} classes but {len(data.class_names)} class names.")
    check = {"classification": _check_classes, "next_token": _check_next, "regression": _check_targets,
             "multi_label": _check_many}.get(data.task)  # fmt: skip
    if check is not None:
        check(data)


def _check_classes(data: "Data") -> None:
    y = data.y
    if y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(f"{data.name}: labels must be int64 [{len(y)}], got {y.dtype} {list(y.shape)}.")
    if len(y) and (int(y.min()) < 0 or int(y.max()) >= data.classes):
        row = int(((y < 0) | (y >= data.classes)).nonzero()[0])
        raise DataError(
            f"{data.name}: labels must lie in 0..{data.classes - 1}, but sample {row} has label {int(y[row])}."
        )


def _check_next(data: "Data") -> None:
    x, y = data.x, data.y
    if y.dtype != torch.int64 or x.dtype != torch.int64 or x.ndim != 2 or y.shape != x.shape:
        raise DataError(
            f"{data.name}: next-token data are int64 tokens x [N, L] and y [N, L], the token that follows each; got "
            f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}."
        )
    scored = y[y != NOT_SCORED]
    if len(scored) and (int(scored.min()) < 0 or int(scored.max()) >= data.classes):
        raise DataError(f"{data.name}: the next token must lie in 0..{data.classes - 1}, or be {NOT_SCORED} where "
                        f"there is none; got {int(scored.min())}..{int(scored.max())}.")  # fmt: skip


def _check_targets(data: "Data") -> None:
    y = data.y
    if not y.is_floating_point() or y.ndim != 2 or y.shape[1] != data.classes:
        raise DataError(
            f"{data.name}: targets of a regression must be floats [{len(y)}, {data.classes}] (classes is their "
            f"number), got {y.dtype} {list(y.shape)}."
        )
    if not bool(torch.isfinite(y).all()):
        raise DataError(f"{data.name}: a target is not finite.")


def _check_many(data: "Data") -> None:
    y = data.y
    if y.ndim != 2 or y.shape[1] != data.classes or not bool(((y == 0) | (y == 1)).all()):
        raise DataError(
            f"{data.name}: multi-label targets must be 0 or 1 in [{len(y)}, {data.classes}], got {y.dtype} "
            f"{list(y.shape)}."
        )


def normalisation(data: "Data") -> tuple[Tensor | None, Tensor | None]:
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


def checked_splits(data: "Data", splits: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
