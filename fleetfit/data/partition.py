"""Partition a data set among clients.

`iid`, `dirichlet` (Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", 2020, and after
it ScaleFL, section 4.2), `shards` (McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data", 2017, section 3) and `natural` (by writer, speaker or role). Each kind first divides the training
data. Then each class of the validation and test data is divided in proportion to the clients' training samples of that
class. So a client has the same label distribution in all splits, and all samples are used.

Differs from the papers: the code published with ScaleFL draws in groups of ten clients and redraws until the smallest
client has half the mean; here all clients are drawn at once, and the smallest has ten samples by default (as in the
code published with AdaptiveFL). The balance mask of both codes is kept and can be turned off. Classes are visited in
random order, because the mask treats late classes unlike early ones, and cuts are rounded at random, because rounding
down always would short-change the first client. Clients stay in the order drawn; AdaptiveFL's code sorts them by size.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit import names
from fleetfit.data.dataset import Data
from fleetfit.data.splits import SPLITS, make_data_rng
from fleetfit.errors import DataError, did_you_mean, import_optional
from fleetfit.factories import call_factory

Ints = NDArray[np.int64]
Part = dict[str, Tensor]
_TENTHS = 10  # bins of a regression's targets that serve as labels
_PARTITION = 0x9A27  # separates this use of a seed from all others


class Parts(Sequence[Part]):
    """Each client's indices of each split, in one tensor per split, to save memory with many clients.

    Attributes:
        indices: Split -> the indices of all clients, client by client, int64.
        ends: Split -> the end of each client's indices, int64 [clients].
    """

    def __init__(self, indices: Mapping[str, Tensor], ends: Mapping[str, Tensor]) -> None:
        self.indices, self.ends = dict(indices), dict(ends)
        self._ends = {split: tensor.numpy() for split, tensor in ends.items()}

    def __len__(self) -> int:
        return len(self._ends["train"])

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        number = range(len(self))[client]  # raises IndexError
        part = {}
        for split, indices in self.indices.items():
            ends = self._ends[split]
            part[split] = indices[ends[number - 1] if number else 0 : ends[number]]
        return part

    def sizes(self, split: str) -> Ints:
        """Return each client's number of samples in a split, [clients]."""
        return np.diff(self._ends[split], prepend=0)


def count_samples(parts: Sequence[Mapping[str, Tensor]], split: str = "train") -> Ints:
    """Return each client's number of samples in a split, [clients]."""
    return parts.sizes(split) if isinstance(parts, Parts) else np.array([len(part[split]) for part in parts])


def find_unassigned(data: Data, parts: Sequence[Mapping[str, Tensor]], split: str) -> Tensor:
    """Return the samples of a split without a client, int64, ascending."""
    assigned = [parts.indices[split]] if isinstance(parts, Parts) else [part[split] for part in parts]
    is_unassigned = torch.zeros(len(data.x), dtype=torch.bool)
    is_unassigned[data.split(split)] = True
    is_unassigned[torch.cat(assigned)] = False
    return is_unassigned.nonzero()[:, 0]


def partition(data: Data, kind: str, clients: int | None, seed: int, **parameters: object) -> Parts:
    """Divide each split of a data set among clients.

    Args:
        data: The data set.
        kind: "iid", "dirichlet", "shards" or "natural"; or "package.module:name" or "file.py:name" of a function
            `(data, clients, rng, **parameters)` that returns the client of each training sample, or of a partitioner
            class of flwr-datasets, such as "flwr_datasets.partitioner:PathologicalPartitioner".
        clients: Number of clients. None, for "natural" and plug-ins: one for each group, or as the plug-in decides.
        seed: Not negative; the same seed gives the same division.
        **parameters: Those of the kind's function, such as alpha for "dirichlet".

    Returns:
        For each client, split -> its indices into `data.x`, int64, ascending. Each index occurs at most once.

    Raises:
        DataError: The kind or a parameter is unknown, or the division is impossible.
    """
    if ":" in kind:
        return _partition_by_plugin(data, kind, clients, seed, parameters)
    kinds = names.list_names("partitions")
    if kind not in kinds:
        raise DataError(
            f'"{kind}" is not a kind of partition. Choose one of {", ".join(kinds)}.{did_you_mean(kind, kinds)}',
            key="kind",
        )
    function = names.resolve("partitions", kind)
    _check_parameters(kind, parameters, list(inspect.signature(function).parameters)[3:])
    result: Parts = function(data, clients, make_data_rng(seed, _PARTITION), **parameters)
    return result


def _check_parameters(kind: str, parameters: Collection[str], accepted: Collection[str]) -> None:
    for name in parameters:
        if name not in accepted:
            hint = did_you_mean(name, accepted)
            keys = ", ".join(accepted) or "no parameters"
            raise DataError(f'partition "{kind}" has no parameter "{name}"; it takes {keys}.{hint}', key=name)


def iid(data: Data, clients: int, rng: np.random.Generator) -> Parts:
    """Give each client an equal share, drawn at random.

    Args:
        data: The data set; a task without class labels is divided evenly in every split.
        clients: Number of clients, at most one for each training sample.
        rng: The source of randomness.

    Raises:
        DataError: `clients` is out of range.
    """
    train = data.split("train").numpy()
    _check_clients(data, clients)
    owner = rng.permutation(len(train)) % clients
    if data.task == "classification":
        return divide_held_out(data, owner, clients, rng)
    owners = {"train": owner}
    for split in SPLITS[1:]:
        owners[split] = rng.permutation(len(data.split(split))) % clients
    return group_by_client(data, owners, clients)


def dirichlet(
    data: Data,
    clients: int,
    rng: np.random.Generator,
    alpha: float = 1.0,
    min_samples: int | None = None,
    balance: bool = True,
    max_redraws: int = 1000,
) -> Parts:
    """Give each client its own distribution over labels; of a regression over tenths of the (first) target.

    For each class, in random order, shares p ~ Dirichlet(alpha, ..., alpha) over the K clients are drawn, and the n
    samples of the class, in random order, are cut at floor(n * (p_1 + ... + p_k) + u) with u uniform in [0, 1). With
    `balance`, a client that already has the mean number of samples gets p_k = 0 before p is scaled to sum to one, which
    brings sizes nearer to each other. The draw is repeated until every client has `min_samples` training samples.

    Args:
        data: The data set.
        clients: Number of clients.
        rng: The source of randomness.
        alpha: Above 0; small: few classes per client, large: the same distribution for all.
        min_samples: Least number of training samples of a client; None: 10, or half the mean if that is less.
        balance: Whether clients that have the mean already get no more.
        max_redraws: Maximal number of further draws.

    Raises:
        DataError: A parameter is out of range, or no draw gave every client enough samples.
    """
    labels = get_labels(data, "train", "dirichlet")
    _check_clients(data, clients)
    mean = len(labels) / clients
    least = min(10, max(1, int(mean / 2))) if min_samples is None else min_samples
    if not 0 < alpha < np.inf:
        raise DataError(f"alpha must be a number above 0, got {alpha}.", key="alpha")
    if not 0 <= least <= mean:
        raise DataError(
            f"min_samples must be between 0 and the mean number of samples, {mean:.1f} ({len(labels)} over {clients} "
            f"clients), got {least}.",
            key="min_samples",
        )
    sizes = np.bincount(labels, minlength=_count_labels(data))
    for _ in range(1 + max_redraws):
        counts = draw_dirichlet_counts(sizes, clients, alpha, balance, rng)
        if counts.sum(1).min() >= least:
            return divide_held_out(data, assign_samples(labels, counts, rng), clients, rng)
    raise DataError(
        f"{1 + max_redraws} draws gave no division in which each of {clients} clients has {least} training samples "
        f"(the smallest of the last draw has {counts.sum(1).min()}). Raise alpha (now {alpha}), lower min_samples "
        "or use fewer clients.",
        key="min_samples",
    )


def shards(data: Data, clients: int, rng: np.random.Generator, shards_per_client: int = 2) -> Parts:
    """Sort the training samples by label, cut them into equal shards and give each client some at random.

    Args:
        data: The data set.
        clients: Number of clients.
        rng: The source of randomness.
        shards_per_client: Shards for each client, at least 1; few shards give few labels.

    Raises:
        DataError: There are fewer samples than shards.
    """
    labels = get_labels(data, "train", "shards")
    _check_clients(data, clients)
    total = clients * shards_per_client
    if shards_per_client < 1 or total > len(labels):
        raise DataError(
            f"shards_per_client must be at least 1, with at least one sample per shard; got {clients} clients x "
            f"{shards_per_client} shards of {len(labels)} samples.",
            key="shards_per_client",
        )
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    client_of_shard = rng.permutation(total) % clients
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = client_of_shard[np.arange(len(labels)) * total // len(labels)]
    return divide_held_out(data, owner, clients, rng)


def natural(
    data: Data,
    clients: int | None,
    rng: np.random.Generator,
    fewer: Literal["choose", "merge"] = "choose",
    min_samples: int = 1,
) -> Parts:
    """Make each natural group (writer, speaker, role) a client, in ascending order of the groups.

    A group's validation and test samples go to its client; those of a group without a client are not used.

    Args:
        data: The data set; it must have groups.
        clients: Number of clients; None: one for each group.
        rng: The source of randomness.
        fewer: With fewer clients than groups: "choose" groups at random and leave the rest out, or "merge" groups at
            random, so that the numbers of groups differ by at most one.
        min_samples: Groups with fewer training samples are left out.

    Raises:
        DataError: There are no groups, or more clients than groups.
    """
    if data.groups is None:
        raise DataError(
            f"{data.name} has no natural groups. Choose another kind of partition, or load the data with groups.",
            key="kind",
        )
    if fewer not in ("choose", "merge"):
        raise DataError(f'fewer must be "choose" or "merge", got {fewer!r}.', key="fewer")
    groups = data.groups.cpu().numpy()
    candidates, sizes = np.unique(groups[data.split("train").numpy()], return_counts=True)
    candidates = candidates[sizes >= min_samples]
    count = len(candidates) if clients is None else clients
    if not 1 <= count <= len(candidates):
        raise DataError(
            f"{data.name} has {len(candidates)} natural groups with at least {min_samples} training samples, so "
            f"clients must be in 1..{len(candidates)}; got {count}.",
            key="clients",
        )
    group_owner = np.full(int(groups.max(initial=0)) + 1, -1)
    if fewer == "choose":
        group_owner[np.sort(rng.choice(candidates, count, replace=False))] = np.arange(count)
    elif count == len(candidates):
        group_owner[candidates] = np.arange(count)
    else:
        group_owner[candidates] = rng.permutation(len(candidates)) % count
    return group_by_client(data, {split: group_owner[groups[data.split(split).numpy()]] for split in SPLITS}, count)


def class_counts(data: Data, parts: Sequence[Part], split: str = "train") -> Tensor:
    """Return each client's number of samples of each class in a split, int64 [clients, classes]."""
    y = data.y.cpu()
    return torch.stack([torch.bincount(y[part[split]], minlength=data.classes) for part in parts])


def _check_clients(data: Data, clients: object) -> None:
    samples = len(data.split("train"))
    if isinstance(clients, bool) or not isinstance(clients, int) or clients < 1:
        raise DataError(f"clients must be a whole number of at least 1, got {clients!r}.", key="clients")
    if clients > samples:
        raise DataError(
            f"{clients} clients are more than the {samples} training samples of {data.name}. Use fewer clients.",
            key="clients",
        )


# ---- partition plug-ins ----------------------------------------------------------------------------------------------

_FLOWER = "flwr_datasets"


def _partition_by_plugin(
    data: Data, kind: str, clients: int | None, seed: int, parameters: Mapping[str, object]
) -> Parts:
    """Partition with a user's function or a partitioner class of flwr-datasets."""
    if kind.partition(":")[0].partition(".")[0] == _FLOWER:
        import_optional(_FLOWER, "partitioners", "Dividing data as flwr-datasets does")
    plugin = names.resolve("partitions", kind)
    if inspect.isclass(plugin):
        owner, count = _run_flower_partitioner(plugin, data, kind, clients, seed, dict(parameters))
    else:
        rng = make_data_rng(seed, _PARTITION)
        result = call_factory(plugin, kind, "[data] partition", parameters, data=data, clients=clients, rng=rng)
        owner = np.asarray(result)
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
        client = empty[0] if len(empty) else int(owner.min())
        raise DataError(f'partition "{kind}" gives client {client} no samples.', key="kind")
    rng = make_data_rng(seed, _PARTITION)
    if data.task in ("classification", "regression"):
        return divide_held_out(data, owner, count, rng)
    owners = {split: rng.permutation(len(data.split(split))) % count for split in SPLITS[1:]}
    return group_by_client(data, {"train": owner, **owners}, count)


def _run_flower_partitioner(
    partitioner_class: type, data: Data, kind: str, clients: int | None, seed: int, settings: dict[str, Any]
) -> tuple[Ints, int]:
    """Return the client of each training sample, -1 for none, and the number of clients.

    The partitioner sees a data set with the columns `label` and, if there are groups, `group`.
    """
    accepted = inspect.signature(partitioner_class).parameters
    _check_parameters(kind, settings, accepted)
    defaults = {
        "num_partitions": clients,
        "partition_by": "group" if "Natural" in partitioner_class.__name__ else "label",
        "seed": seed,
    }
    settings = {key: value for key, value in defaults.items() if key in accepted and value is not None} | settings
    train = data.split("train").numpy()
    columns: dict[str, Any] = {"row": np.arange(len(train))}
    if data.task in ("classification", "regression"):
        columns["label"] = data.y[:, 0].numpy()[train] if data.task == "regression" else get_labels(data, "train", kind)
    if data.groups is not None:
        columns["group"] = data.groups.cpu().numpy()[train]
    datasets = import_optional("datasets", "partitioners", "Dividing data as flwr-datasets does")
    try:
        partitioner = partitioner_class(**settings)
        partitioner.dataset = datasets.Dataset.from_dict(columns)
        count = int(partitioner.num_partitions)
        owner = np.full(len(train), -1, dtype=np.int64)
        for client in range(count):
            owner[np.asarray(partitioner.load_partition(client)["row"], dtype=np.int64)] = client
    except Exception as error:  # a user's class may raise any error
        raise DataError(f'partition "{kind}" {names.describe_failure(error)}.', key="kind") from error
    return owner, count


# ---- counts per class and client -------------------------------------------------------------------------------------


def draw_dirichlet_counts(sizes: Ints, clients: int, alpha: float, balance: bool, rng: np.random.Generator) -> Ints:
    """Draw each client's number of samples of each class once, [K, C]."""
    counts = np.zeros((clients, len(sizes)), dtype=np.int64)
    mean = sizes.sum() / clients
    totals = np.zeros(clients, dtype=np.int64)
    for c in rng.permutation(np.flatnonzero(sizes)):
        p = rng.dirichlet(np.full(clients, alpha))
        if balance:
            p = np.where(totals < mean, p, 0.0)
            if p.sum() == 0:  # with a tiny alpha, clients that are already full may have all of it
                p = (totals < mean).astype(np.float64)
        ends = np.cumsum(p)
        cuts = np.floor(ends / ends[-1] * sizes[c] + rng.random()).astype(np.int64)
        counts[:, c] = np.diff(cuts, prepend=0)
        totals += counts[:, c]
    return counts


def assign_samples(labels: Ints, counts: Ints, rng: np.random.Generator) -> Ints:
    """Assign samples to clients at random with `counts` [K, C]; return the client of each, -1 if unassigned."""
    clients, classes = counts.shape
    surplus = np.bincount(labels, minlength=classes) - counts.sum(0)
    table = np.vstack([counts, surplus])
    owners = np.append(np.arange(clients), -1)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    owner = np.empty(len(labels), dtype=np.int64)
    owner[order] = np.repeat(np.tile(owners, classes), table.T.ravel())
    return owner


def apportion(counts: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Divide sizes[c] samples of each class in proportion to counts[:, c], in whole samples, [K, C].

    Rounding each class separately could leave a small client without samples. So a client's rounding error is carried
    over to the next class, which keeps its total right.
    """
    result = np.zeros_like(counts)
    carry = rng.random(len(counts)) - 0.5
    for c in rng.permutation(np.flatnonzero((counts.sum(0) > 0) & (sizes > 0))):
        clients = np.flatnonzero(counts[:, c])
        exact = counts[clients, c] * (sizes[c] / counts[:, c].sum()) + carry[clients]
        result[clients, c] = round_to_sum(exact, int(sizes[c]))
        carry[clients] = exact - result[clients, c]
    return result


def round_to_sum(values: NDArray[np.float64], total: int) -> Ints:
    """Round values to whole numbers of at least 0 that add up to a total."""
    rounded = np.maximum(np.floor(values), 0).astype(np.int64)
    while (missing := total - int(rounded.sum())) != 0:
        if missing > 0:
            rounded[np.argsort(rounded - values, kind="stable")[:missing]] += 1
        else:
            positive = np.flatnonzero(rounded)
            rounded[positive[np.argsort((values - rounded)[positive], kind="stable")[:-missing]]] -= 1
    return rounded


def divide_held_out(data: Data, owner: Ints, clients: int, rng: np.random.Generator) -> Parts:
    """Divide validation and test data in proportion to the labels of each client's training data.

    Args:
        data: The data set.
        owner: The client of each training sample, -1 for none.
        clients: Number of clients.
        rng: The source of randomness.
    """
    labels, classes, is_owned = get_labels(data, "train", ""), _count_labels(data), owner >= 0
    cells = owner[is_owned] * classes + labels[is_owned]
    counts = np.bincount(cells, minlength=clients * classes).reshape(clients, classes)
    owners = {"train": owner}
    for split in SPLITS[1:]:
        labels = get_labels(data, split, "")
        sizes = np.bincount(labels, minlength=classes)
        owners[split] = assign_samples(labels, apportion(counts, sizes, rng), rng)
    return group_by_client(data, owners, clients)


def group_by_client(data: Data, owners: dict[str, Ints], clients: int) -> Parts:
    """Return each client's indices of each split, given the client of each sample (-1: no client)."""
    sorted_indices, ends = dict[str, Tensor](), dict[str, Tensor]()
    for split, owner in owners.items():
        indices = data.split(split).numpy()
        order = np.lexsort((indices, owner))
        order = order[owner[order] >= 0]
        sorted_indices[split] = torch.from_numpy(indices[order])
        ends[split] = torch.from_numpy(np.cumsum(np.bincount(owner[order], minlength=clients)))
    return Parts(sorted_indices, ends)


def _count_labels(data: Data) -> int:
    return _TENTHS if data.task == "regression" else data.classes


def get_labels(data: Data, split: str, kind: str) -> Ints:
    """Return the labels of a split; for a regression the bin of each target among tenths of the training targets.

    Raises:
        DataError: The task has no such labels.
    """
    if data.task == "regression":
        target = data.y[:, 0].cpu().numpy()
        edges = np.quantile(target[data.split("train").numpy()], np.arange(1, _TENTHS) / _TENTHS)
        tenths: Ints = np.searchsorted(edges, target[data.split(split).numpy()], side="right").astype(np.int64)
        return tenths
    if data.task != "classification":
        raise DataError(
            f'partition "{kind}" needs class labels, but the task of {data.name} is {data.task}. Use iid or natural.',
            key="kind",
        )
    labels: Ints = data.y.cpu().numpy()[data.split(split).numpy()]
    return labels
