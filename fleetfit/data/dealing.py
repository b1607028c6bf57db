"""The arithmetic of a partition: counts per class and client, and samples dealt out by them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data._checks import SPLITS
from fleetfit.data.dataset import Data
from fleetfit.errors import DataError

Ints = NDArray[np.int64]
Part = dict[str, Tensor]


def dirichlet_counts(sizes: Ints, clients: int, alpha: float, balance: bool, rng: np.random.Generator) -> Ints:
    """Draw once how many samples of each class each client gets, [K, C]."""
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    mean = sizes.sum() / clients
    have = np.zeros(clients, dtype=np.int64)
    for c in rng.permutation(np.flatnonzero(sizes)):
        p = rng.dirichlet(np.full(clients, alpha))
        if balance:
            p = np.where(have < mean, p, 0.0)
            if p.sum() == 0:  # with a tiny alpha all of it may have fallen to full clients
                p = (have < mean).astype(np.float64)
        ends = np.cumsum(p)
        cuts = np.floor(ends / ends[-1] * sizes[c] + rng.random()).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0)
        have += counts[:, c]
    return counts


def dealt(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Return a client for each sample, at random but with `counts` [K, C]; -1 where a class has more samples."""
    clients, classes = counts.shape
    over = np.bincount(labels, minlength=classes) - counts.sum(0)
    table = np.vstack([counts, over])
    owners = np.append(np.arange(clients), -1)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = np.repeat(np.tile(owners, classes), table.T.ravel())
    return owner


def apportioned(counts: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Divide sizes[c] samples of each class in proportion to counts[:, c], in whole samples, [K, C].

    Rounding each class on its own would leave small clients with nothing in every class. So what a client has lost or
    gained by rounding is carried over to the next class, and its total stays right too.
    """
    result = np.zeros_like(counts)
    carry = rng.random(len(counts)) - 0.5
    for c in rng.permutation(np.flatnonzero((counts.sum(0) > 0) & (sizes > 0))):
        able = np.flatnonzero(counts[:, c])
        wish = counts[able, c] * (sizes[c] / counts[:, c].sum()) + carry[able]
        result[able, c] = whole(wish, int(sizes[c]))
        carry[able] = wish - result[able, c]
    return result


def whole(wish: NDArray[np.float64], total: int) -> Ints:
    """Return whole numbers, not negative, that sum to a total and are near what is wished for."""
    given = np.maximum(np.floor(wish), 0).astype(np.int64)
    while (left := total - int(given.sum())) != 0:
        if left > 0:
            given[np.argsort(given - wish, kind="stable")[:left]] += 1
        else:
            some = np.flatnonzero(given)
            given[some[np.argsort((wish - given)[some], kind="stable")[:-left]]] -= 1
    return given


def with_followers(data: Data, owner: Ints, clients: int, rng: np.random.Generator) -> list[Part]:
    """Divide validation and test data so that they follow the labels of each client's training data."""
    train = labels_of(data, "train", "")
    counts = np.bincount(owner * data.classes + train, minlength=clients * data.classes).reshape(clients, data.classes)
    owners = {"train": owner}
    for split in SPLITS[1:]:
        labels = labels_of(data, split, "")
        sizes = np.bincount(labels, minlength=data.classes)
        owners[split] = dealt(labels, apportioned(counts, sizes, rng), rng)
    return collected(data, owners, clients)


def collected(data: Data, owners: dict[str, Ints], clients: int) -> list[Part]:
    """Return each client's indices of each split from the client of each sample (-1: nobody's)."""
    parts: list[Part] = [{} for _ in range(clients)]
    for split, owner in owners.items():
        indices = data.split(split).numpy()
        order = np.lexsort((indices, owner))
        order = order[owner[order] >= 0]
        ends = np.cumsum(np.bincount(owner[order], minlength=clients))
        for part, mine in zip(parts, np.split(indices[order], ends[:-1]), strict=True):
            part[split] = torch.from_numpy(mine)
    return parts


def labels_of(data: Data, split: str, kind: str) -> Ints:
    """Return the labels of a split; a task without classes cannot be divided by them."""
    if data.task != "classification":
        raise DataError(f'partition "{kind}" goes by class labels, but {data.name} is {data.task}; use iid or natural.')
    labels: Ints = data.y.cpu().numpy()[data.split(split).numpy()]
    return labels
