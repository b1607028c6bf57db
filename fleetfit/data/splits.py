"""The splits of a data set: names, and holding out samples at random in proportion to labels or groups."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import DataError

SPLITS = ("train", "validation", "test")
ALIASES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""Accepted names of the file, folder or array of a split."""
BY_NAME = {alias: split for split, aliases in ALIASES.items() for alias in aliases}
"""Split of each accepted name."""
Part = TypeVar("Part")
_HOLD_OUT = 0x401D  # separates this use of a seed from all others


def find_splits(find: Callable[[str], Part | None]) -> dict[str, Part]:
    """Return the part of each split, "train" first; {} without one for training.

    Args:
        find: Returns the part of a name in `ALIASES`, such as its files; nothing or an empty part: there is none.
    """
    parts = {split: part for split, names in ALIASES.items() if (part := next(filter(None, map(find, names)), None))}
    return parts if "train" in parts else {}


def hold_out(
    indices: NDArray[np.int64], strata: NDArray[np.int64], fraction: float, seed: int, key: str = "validation"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random into those that stay and those held out, with the same share of every stratum.

    A stratum of n samples gives up floor(fraction * n) or one more, those with the largest remainders first, so that
    round(fraction * len(indices)) are held out in all.

    Args:
        indices: The samples to divide, [n].
        strata: The label or group of each of them, [n], not negative.
        fraction: Fraction to hold out, 0 <= fraction < 1.
        seed: Not negative; the same seed gives the same division.
        key: The parameter that the fraction comes from.

    Returns:
        The remaining and the held out indices, each in ascending order.

    Raises:
        DataError: The fraction or the seed is out of range.
    """
    if not 0 <= fraction < 1:
        raise DataError(
            f"{key}, the fraction of the data to hold out, must be at least 0 and below 1, got {fraction}.", key=key
        )
    rng = make_data_rng(seed, _HOLD_OUT)
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
    is_held_out = rank < np.repeat(quota, sizes)
    return np.sort(indices[order[~is_held_out]]), np.sort(indices[order[is_held_out]])


def fill_missing_splits(
    sizes: Mapping[str, int],
    strata: NDArray[np.int64],
    validation: float,
    test: float,
    seed: int,
    name: str = "",
    samples: int | None = None,
    labels: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[np.int64]]:
    """Return the indices of each split, in ascending order. A missing split is held out of the training samples.

    Without a test file but with a validation file, the validation file is the test set, as usual with ImageNet.
    A split without samples counts as missing.

    Args:
        sizes: Split -> number of samples, in the order of the samples; "train" must be there.
        strata: The label or group of each sample, [n], to hold out in proportion.
        validation: Share of the training samples to hold out, if there is no validation file.
        test: Share to hold out as the test set, if there is only a train file.
        seed: Seed of the draws.
        name: Name of the data set, for messages.
        samples: Number of training samples to draw, those held out for validation included; None: all.
        labels: The labels in proportion to which they are drawn, [n]; None: the strata.

    Raises:
        DataError: A share, the seed or the number of samples is out of range.
    """
    splits: dict[str, NDArray[np.int64]] = {}
    start = 0
    for split, size in sizes.items():
        if size or split == "train":
            splits[split] = np.arange(start, start + size)
        start += size
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
    for split, share in (("test", test), ("validation", validation)):
        if split == "validation" and samples is not None:
            train = splits["train"]
            if not 1 <= samples <= len(train):
                raise DataError(
                    f"{name}: samples must be in 1..{len(train)}, the training samples; got {samples}.", key="samples"
                )
            drawn_by = (strata if labels is None else labels)[train]
            splits["train"] = hold_out(train, drawn_by, 1 - samples / len(train), seed)[0]
        if split not in splits:
            train = splits["train"]
            splits["train"], splits[split] = hold_out(train, strata[train], share, seed, split)
    return splits


def make_data_rng(seed: int, purpose: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose of a seed.

    Raises:
        DataError: The seed is not a whole number of at least 0.
    """
    value: object = seed
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise DataError(f"a seed must be a whole number of at least 0, got {seed!r}.", key="seed")
    return np.random.default_rng([seed, purpose])
