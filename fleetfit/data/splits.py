"""The splits of a data set, and the validation and test samples that are held out at random, in proportion."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import DataError

SPLITS = ("train", "validation", "test")
ALIASES = {"train": ("train",), "validation": ("validation", "valid", "val"), "test": ("test",)}
"""What the file, the folder or the array of a split may be called."""
_HOLD_OUT = 0x401D  # keeps this use of a seed apart from every other


def hold_out(
    indices: NDArray[np.int64], strata: NDArray[np.int64], fraction: float, seed: int, key: str = "validation"
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random into those kept and those held out, with the same share of every stratum.

    A stratum of n samples gives up floor(fraction * n) or one more, those with the largest remainders first, so that
    round(fraction * len(indices)) are held out in all.

    Args:
        indices: The samples to divide, [n].
        strata: What must stay in proportion (the label, the writer), of each of them, [n], not negative.
        fraction: How many are held out, 0 <= fraction < 1.
        seed: Not negative; the same seed gives the same division.
        key: The parameter that the fraction comes from.

    Returns:
        The kept and the held out indices, each in ascending order.

    Raises:
        DataError: The fraction or the seed is out of range.
    """
    if not 0 <= fraction < 1:
        raise DataError(
            f"{key}, the fraction of the data to hold out, must be at least 0 and below 1, got {fraction}.", key=key
        )
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


def drawn(
    name: str, indices: NDArray[np.int64], labels: NDArray[np.int64], samples: int, seed: int
) -> NDArray[np.int64]:
    """Return so many of the training samples, drawn in proportion for every label, in ascending order.

    Raises:
        DataError: There are not so many.
    """
    if not 1 <= samples <= len(indices):
        raise DataError(
            f"{name}: samples must be in 1..{len(indices)}, the training samples; got {samples}.", key="samples"
        )
    return hold_out(indices, labels, 1 - samples / len(indices), seed)[0]


def completed(
    sizes: Mapping[str, int], strata: NDArray[np.int64], validation: float, test: float, seed: int
) -> dict[str, NDArray[np.int64]]:
    """Return the indices of every split; what has no file of its own is held out of the training samples.

    Without a test file but with a validation file, the validation file is the test set, as is the habit with ImageNet.
    A split without samples counts as one that is not there.

    Args:
        sizes: split -> number of samples, in the order of the samples; "train" must be there.
        strata: What must stay in proportion, of each sample, [n].
        validation: Share of the training samples that is held out, if there is no validation file.
        test: Share that is held out as the test set, if there is only a train file.
        seed: Of what is held out.

    Raises:
        DataError: A share or the seed is out of range.
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
        if split not in splits:
            rest = splits["train"]
            splits["train"], splits[split] = hold_out(rest, strata[rest], share, seed, split)
    return splits


def notes_on_empty(name: str, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return a note for each split that is there and has no samples, so that `completed` holds some out."""
    empty = [split for split, size in sizes.items() if not size and split != "train"]
    return tuple(f"{name}: the {split} set has no samples, so it counts as one that is not there." for split in empty)


def generator(seed: int, purpose: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose of a seed.

    Raises:
        DataError: The seed is no whole number or is negative.
    """
    given: object = seed
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise DataError(f"a seed must be a whole number of at least 0, got {seed!r}.", key="seed")
    return np.random.default_rng([seed, purpose])
