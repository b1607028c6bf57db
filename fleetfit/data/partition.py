"""How a data set is divided among clients.

`iid`, `dirichlet` (Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", 2020, and after
it ScaleFL, section 4.2), `shards` (McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", 2017, section 3) and `natural` (by writer, speaker or role). Each kind first divides the training
data. A client's validation and test data then follow: each class is divided among the clients in proportion to how
many training samples of that class they have, so that a client's label distribution is the same in all of its splits,
and everything is used.

Differs from the papers: the code published with ScaleFL draws in groups of ten clients and redraws until the smallest
client has half the mean; here all clients are drawn at once, and the smallest has ten samples by default (as in the
code published with AdaptiveFL). The balance mask of both codes is kept and can be turned off. Classes are visited in
random order, because the mask treats late classes unlike early ones, and cuts are rounded at random, because rounding
down always would short-change the first client. Clients stay in the order drawn; AdaptiveFL's code sorts them by size.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit import names
from fleetfit.data.dataset import Data
from fleetfit.data.splits import SPLITS, generator
from fleetfit.errors import DataError, did_you_mean, import_optional
from fleetfit.factories import call_factory

Ints = NDArray[np.int64]
Part = dict[str, Tensor]
_TENTHS = 10  # parts of a regression's targets that stand for labels
_PARTITION = 0x9A27  # keeps this use of a seed apart from every other


class Parts(Sequence[Part]):
    """Each client's indices of each split, held as one tensor for each: clients cost no more than their samples.

    Attributes:
        indices: By split those of all clients, one client's after the other's, int64.
        ends: By split where each client's end among them, int64 [clients].
    """

    def __init__(self, indices: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> None:
        """Take the tensors."""
        self.indices, self.ends = dict(indices), dict(ends)
        self._ends = {split: found.numpy() for split, found in ends.items()}

    def __len__(self) -> int:
        return len(self._ends["train"])

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        place = range(len(self))[client]  # which refuses what is beyond
        return {split: found[self._start(split, place) : self._ends[split][place]]
                for split, found in self.indices.items()}  # fmt: skip

    def _start(self, split: str, client: int) -> int:
        return int(self._ends[split][client - 1]) if client else 0

    def sizes(self, split: str) -> Ints:
        """Return how many samples each client has in a split."""
        return np.diff(self._ends[split], prepend=0)


def sizes_of(parts: Sequence[Mapping[str, Tensor]], split: str = "train") -> Ints:
    """Return how many samples each client has in a split, [clients]."""
    return parts.sizes(split) if isinstance(parts, Parts) else np.array([len(part[split]) for part in parts])


def find_unassigned(data: Data, parts: Sequence[Mapping[str, Tensor]], split: str) -> Tensor:
    """Return the samples of a split that no client has, int64, ascending."""
    shares = [parts.indices[split]] if isinstance(parts, Parts) else [part[split] for part in parts]
    rest = torch.zeros(len(data.x), dtype=torch.bool)
    rest[data.split(split)] = True
    rest[torch.cat(shares)] = False
    return rest.nonzero()[:, 0]


def partition(data: Data, kind: str, clients: int | None, seed: int, **parameters: object) -> Parts:
    """Divide each split of a data set among clients.

    Args:
        data: What is divided.
        kind: "iid", "dirichlet", "shards" or "natural"; or "package.module:name" or "file.py:name" of a function
            `(data, clients, rng, **parameters)` that returns the client of each training sample, or of a partitioner
            class of flwr-datasets, such as "flwr_datasets.partitioner:PathologicalPartitioner".
        clients: How many; None is for "natural" and kinds of others: one for each group, or as these have it.
        seed: Not negative; the same seed gives the same division.
        **parameters: Those of the kind's function, such as alpha for "dirichlet".

    Returns:
        For each client, split -> its indices into `data.x`, int64, ascending. No index is given twice.

    Raises:
        DataError: An unknown kind or parameter, or a division that is not possible.
    """
    if ":" in kind:
        return _by_others(data, kind, clients, seed, parameters)
    if kind not in KINDS:
        raise DataError(
            f'"{kind}" is not a kind of partition; choose one of {", ".join(KINDS)}.{did_you_mean(kind, KINDS)}',
            key="kind",
        )
    known = list(inspect.signature(KINDS[kind]).parameters)[3:]
    for name in parameters:
        if name not in known:
            takes = ", ".join(known) or "nothing"
            raise DataError(
                f'partition "{kind}" has no "{name}"; it takes {takes}.{did_you_mean(name, known)}', key=name
            )
    return KINDS[kind](data, clients, generator(seed, _PARTITION), **parameters)


def iid(data: Data, clients: int, rng: np.random.Generator) -> Parts:
    """Give each client an equal share, drawn at random.

    Args:
        data: What is divided; a task without class labels is divided evenly in every split.
        clients: How many, at most one for each training sample.
        rng: The source of randomness.

    Raises:
        DataError: `clients` is out of range.
    """
    train = data.split("train").numpy()
    _check_clients(data, clients)
    owner = rng.permutation(len(train)) % clients
    if data.task == "classification":
        return with_followers(data, owner, clients, rng)
    owners = {"train": owner}
    for split in SPLITS[1:]:
        owners[split] = rng.permutation(len(data.split(split))) % clients
    return collected(data, owners, clients)


def dirichlet(
    data: Data,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 1.0,
    minimum: int | None = None,
    balance: bool = True,
    max_redraws: int = 1000,
) -> Parts:
    """Give each client its own distribution over labels; of a regression over tenths of the (first) target.

    For each class, in random order, shares p ~ Dirichlet(alpha, ..., alpha) over the K clients are drawn, and the n
    samples of the class, in random order, are cut at floor(n * (p_1 + ... + p_k) + u) with u uniform in [0, 1). With
    `balance`, a client that already has the mean number of samples gets p_k = 0 before p is scaled to sum to one, which
    brings sizes nearer to each other. All is drawn again until every client has `minimum` training samples.

    Args:
        data: What is divided.
        clients: How many.
        rng: The source of randomness.
        alpha: Above 0; small: few classes per client, large: all alike.
        minimum: Least number of training samples of a client; None: 10, or half the mean if that is less.
        balance: Whether clients that have the mean already get no more.
        max_redraws: How often all is drawn again before giving up.

    Raises:
        DataError: A parameter is out of range, or no draw gave every client enough.
    """
    labels = labels_of(data, "train", "dirichlet")
    _check_clients(data, clients)
    mean = len(labels) / clients
    least = min(10, max(1, int(mean / 2))) if minimum is None else minimum
    if not 0 < alpha < np.inf:
        raise DataError(f"alpha must be a number above 0, got {alpha}.", key="alpha")
    if not 0 <= least <= mean:
        raise DataError(
            f"minimum must lie between 0 and the mean number of samples, {mean:.1f} ({len(labels)} over {clients} "
            f"clients), got {least}.",
            key="minimum",
        )
    sizes = np.bincount(labels, minlength=_kinds_of_labels(data))
    for _ in range(1 + max_redraws):
        counts = dirichlet_counts(sizes, clients, alpha, balance, rng)
        if counts.sum(1).min() >= least:
            return with_followers(data, dealt(labels, counts, rng), clients, rng)
    raise DataError(
        f"{1 + max_redraws} draws gave no division in which each of {clients} clients has {least} training samples "
        f"(the smallest of the last draw has {counts.sum(1).min()}): raise alpha (now {alpha}), lower minimum or have "
        "fewer clients.",
        key="minimum",
    )


def shards(data: Data, clients: int, rng: np.random.Generator, per_client: int = 2) -> Parts:
    """Sort the training samples by label, cut them into equal shards and give each client some at random.

    Args:
        data: What is divided.
        clients: How many.
        rng: The source of randomness.
        per_client: Shards for each client, at least 1; few mean few labels.

    Raises:
        DataError: There are fewer samples than shards.
    """
    labels = labels_of(data, "train", "shards")
    _check_clients(data, clients)
    total = clients * per_client
    if per_client < 1 or total > len(labels):
        raise DataError(
            f"per_client must be at least 1 and leave a sample for each shard; got {clients} clients x {per_client} "
            f"shards of {len(labels)} samples.",
            key="per_client",
        )
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    client_of_shard = rng.permutation(total) % clients
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = client_of_shard[np.arange(len(labels)) * total // len(labels)]
    return with_followers(data, owner, clients, rng)


def natural(
    data: Data,
    clients: int | None,
    rng: np.random.Generator,
    fewer: Literal["choose", "merge"] = "choose",
    minimum: int = 1,
) -> Parts:
    """Make each natural group (writer, speaker, role) a client, in ascending order of the groups.

    A group's validation and test samples go to its client; those of a group without a client are not used.

    Args:
        data: What is divided; it must have groups.
        clients: How many; None: one for each group.
        rng: The source of randomness.
        fewer: With fewer clients than groups: "choose" that many groups at random and leave the rest out, or "merge"
            groups, dealt at random, so that each client has as many, give or take one.
        minimum: Groups with fewer training samples are left out.

    Raises:
        DataError: There are no groups, or fewer than clients.
    """
    if data.groups is None:
        raise DataError(
            f"{data.name} has no natural groups; choose another kind of partition or load it with groups.", key="kind"
        )
    if fewer not in ("choose", "merge"):
        raise DataError(f'fewer must be "choose" or "merge", got {fewer!r}.', key="fewer")
    groups = data.groups.cpu().numpy()
    found, sizes = np.unique(groups[data.split("train").numpy()], return_counts=True)
    found = found[sizes >= minimum]
    count = len(found) if clients is None else clients
    if not 1 <= count <= len(found):
        raise DataError(
            f"{data.name} has {len(found)} natural groups with at least {minimum} training samples, so clients must "
            f"be in 1..{len(found)}; got {count}.",
            key="clients",
        )
    client_of = np.full(int(groups.max(initial=0)) + 1, -1)
    if fewer == "choose":
        client_of[np.sort(rng.choice(found, count, replace=False))] = np.arange(count)
    else:
        client_of[found] = np.arange(count) if count == len(found) else rng.permutation(len(found)) % count
    return collected(data, {split: client_of[groups[data.split(split).numpy()]] for split in SPLITS}, count)


def class_counts(data: Data, parts: Sequence[Part], split: str = "train") -> Tensor:
    """Return how many samples of each class each client has in a split, int64 [clients, classes]."""
    y = data.y.cpu()
    return torch.stack([torch.bincount(y[part[split]], minlength=data.classes) for part in parts])


KINDS: dict[str, Callable[..., Parts]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "natural": natural,
}


def _check_clients(data: Data, clients: object) -> None:
    samples = len(data.split("train"))
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise DataError(f"clients must be a whole number of at least 1, got {clients!r}.", key="clients")
    if clients > samples:
        raise DataError(
            f"{clients} clients are more than the {samples} training samples of {data.name}.", key="clients"
        )


# ---- divisions of others ---------------------------------------------------------------------------------------------

_FLOWER = "flwr_datasets"


def _by_others(data: Data, kind: str, clients: int | None, seed: int, parameters: Mapping[str, object]) -> Parts:
    """Divide as a function of anybody's says, or a partitioner of flwr-datasets."""
    if kind.partition(":")[0].partition(".")[0] == _FLOWER:
        import_optional(_FLOWER, "partitioners", "Dividing data as flwr-datasets does")
    found = names.resolve("data", kind)
    if inspect.isclass(found):
        owner, count = _by_flower(found, data, kind, clients, seed, dict(parameters))
    else:
        where, rng = "[data] partition", generator(seed, _PARTITION)
        given = call_factory(found, kind, where, parameters, data=data, clients=clients, rng=rng)
        owner = np.asarray(given)
        if owner.shape != data.split("train").shape or owner.dtype.kind not in "iu":
            raise DataError(
                f'partition "{kind}" must return the client of each training sample, whole numbers '
                f"[{len(data.split('train'))}] (-1: no client), got {owner.dtype} {list(owner.shape)}.",
                key="kind",
            )
        owner = owner.astype(np.int64)
        count = max(int(owner.max(initial=-1)) + 1, clients or 1)
    empty = np.flatnonzero(np.bincount(owner[owner >= 0], minlength=count) == 0)
    if len(empty) or int(owner.min(initial=0)) < -1:
        raise DataError(
            f'partition "{kind}" leaves client {empty[0] if len(empty) else int(owner.min())} no samples.', key="kind"
        )
    if data.task in ("classification", "regression"):
        return with_followers(data, owner, count, generator(seed, _PARTITION))
    rng = generator(seed, _PARTITION)
    others = {split: rng.permutation(len(data.split(split))) % count for split in SPLITS[1:]}
    return collected(data, {"train": owner, **others}, count)


def _by_flower(
    kind: type, data: Data, name: str, clients: int | None, seed: int, settings: dict[str, Any]
) -> tuple[Ints, int]:
    """Return the client of each training sample, -1 for nobody's, and how many clients there are.

    The partitioner sees a data set with the columns `label` and, where there are groups, `group`.
    """
    takes = inspect.signature(kind).parameters
    usual = {
        "num_partitions": clients,
        "partition_by": "group" if "Natural" in kind.__name__ else "label",
        "seed": seed,
    }
    unknown = [key for key in settings if key not in takes]
    if unknown:
        raise DataError(f'partition "{name}" has no "{unknown[0]}"; it takes {", ".join(takes)}.'
                        f"{did_you_mean(unknown[0], takes)}", key=unknown[0])  # fmt: skip
    settings = {key: value for key, value in usual.items() if key in takes and value is not None} | settings
    train = data.split("train").numpy()
    rows: dict[str, Any] = {"place": np.arange(len(train))}
    if data.task in ("classification", "regression"):
        rows["label"] = data.y[:, 0].numpy()[train] if data.task == "regression" else labels_of(data, "train", name)
    if data.groups is not None:
        rows["group"] = data.groups.cpu().numpy()[train]
    library = import_optional("datasets", "partitioners", "Dividing data as flwr-datasets does")
    try:
        partitioner = kind(**settings)
        partitioner.dataset = library.Dataset.from_dict(rows)
        count = int(partitioner.num_partitions)
        owner = np.full(len(train), -1, dtype=np.int64)
        for client in range(count):
            owner[np.asarray(partitioner.load_partition(client)["place"], dtype=np.int64)] = client
    except Exception as error:  # whatever a class of others comes across
        raise DataError(f'partition "{name}" {names.describe_failure(error)}.', key="kind") from error
    return owner, count


# ---- counts per class and client, and samples dealt out by them ------------------------------------------------------


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


def with_followers(data: Data, owner: Ints, clients: int, rng: np.random.Generator) -> Parts:
    """Divide validation and test data so that they follow the labels of each client's training data."""
    train = labels_of(data, "train", "")
    classes, mine = _kinds_of_labels(data), owner >= 0
    counts = np.bincount(owner[mine] * classes + train[mine], minlength=clients * classes).reshape(clients, classes)
    owners = {"train": owner}
    for split in SPLITS[1:]:
        labels = labels_of(data, split, "")
        sizes = np.bincount(labels, minlength=classes)
        owners[split] = dealt(labels, apportioned(counts, sizes, rng), rng)
    return collected(data, owners, clients)


def collected(data: Data, owners: dict[str, Ints], clients: int) -> Parts:
    """Return each client's indices of each split from the client of each sample (-1: no client)."""
    found, ends = dict[str, Tensor](), dict[str, Tensor]()
    for split, owner in owners.items():
        indices = data.split(split).numpy()
        order = np.lexsort((indices, owner))
        order = order[owner[order] >= 0]
        found[split] = torch.from_numpy(indices[order])
        ends[split] = torch.from_numpy(np.cumsum(np.bincount(owner[order], minlength=clients)))
    return Parts(found, ends)


def _kinds_of_labels(data: Data) -> int:
    return _TENTHS if data.task == "regression" else data.classes


def labels_of(data: Data, split: str, kind: str) -> Ints:
    """Return the labels of a split, of a regression tenths of the target; others cannot be divided by them."""
    if data.task == "regression":
        target = data.y[:, 0].cpu().numpy()
        edges = np.quantile(target[data.split("train").numpy()], np.arange(1, _TENTHS) / _TENTHS)
        tenths: Ints = np.searchsorted(edges, target[data.split(split).numpy()], side="right").astype(np.int64)
        return tenths
    if data.task != "classification":
        raise DataError(
            f'partition "{kind}" goes by class labels, but {data.name} is {data.task}; use iid or natural.', key="kind"
        )
    labels: Ints = data.y.cpu().numpy()[data.split(split).numpy()]
    return labels
