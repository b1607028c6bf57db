"""Passages of text by group become next-token data."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fleetfit.data._checks import SPLITS
from fleetfit.data._windows import PADDING, Ints, Score, Vocabulary, windows
from fleetfit.data.dataset import Data
from fleetfit.errors import DataError


@dataclass(frozen=True)
class Passages:
    """What one group (a role, a file) has said, in order; no window reaches from one passage into the next.

    Attributes:
        train: For training and, at the end, validation.
        test: For testing.
    """

    train: Sequence[str]
    test: Sequence[str]


def last_share(count: int, share: float, name: str) -> int:
    """Return how many of so many lines, characters or windows a share at the end is, rounded down.

    Raises:
        DataError: The share is out of range.
    """
    if not 0 <= share < 1:
        raise DataError(f"{name}: a share that is held out must be at least 0 and below 1, got {share}.")
    return int(count * share + 1e-9)


def next_tokens(
    name: str, groups: Sequence[Passages], vocabulary: Vocabulary, length: int, score: Score, validation: float
) -> Data:
    """Return windows of tokens with what follows each token; see `windows`.

    Args:
        name: What the data are called.
        groups: What each group has said; its place in this order is the group's number.
        vocabulary: What a token is.
        length: Tokens of a window.
        score: Which positions are scored.
        validation: Share of a group's training windows, the last ones, that is held out, rounded down.

    Raises:
        DataError: There is not a single training window, or a share is out of range.
    """
    parts: dict[str, list[Ints]] = {"x": [], "y": [], "split": [], "group": []}
    for number, passages in enumerate(groups):
        for place, texts in (("train", passages.train), ("test", passages.test)):
            pairs = [windows(tokens, length, score) for tokens in vocabulary.encoded(texts)]
            rows = sum(len(x) for x, _ in pairs)
            where = np.full(rows, SPLITS.index(place))
            if place == "train":
                where[rows - last_share(rows, validation, name) :] = SPLITS.index("validation")
            parts["x"] += [x for x, _ in pairs]
            parts["y"] += [y for _, y in pairs]
            parts["split"].append(where)
            parts["group"].append(np.full(rows, number))
    of = np.concatenate([np.empty(0, dtype=np.int64), *parts["split"]])
    if not (of == 0).any():
        raise DataError(f"{name}: there is no text to train on; a passage needs two {vocabulary.level} at least.")
    return Data(
        name=name,
        x=torch.from_numpy(np.concatenate(parts["x"])),
        y=torch.from_numpy(np.concatenate(parts["y"])),
        splits={split: torch.from_numpy(np.flatnonzero(of == i)) for i, split in enumerate(SPLITS)},
        classes=len(vocabulary),
        groups=torch.from_numpy(np.concatenate(parts["group"])),
        task="next_token",
        vocabulary=len(vocabulary),
        padding=PADDING,
    )
