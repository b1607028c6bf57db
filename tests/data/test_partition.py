"""How clients get their data: nothing twice, nothing lost, labels and groups where they belong."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from support import Expected, raises

from fleetfit.data import Data, class_counts, count_samples, partition
from fleetfit.data.partition import apportion, round_to_sum
from fleetfit.errors import DataError

SPLITS = ("train", "validation", "test")


def make_data(
    labels: list[int] | torch.Tensor, sizes: tuple[int, int, int], groups: torch.Tensor | None = None, **changes: Any
) -> Data:
    """Return a set whose splits are taken from a shuffled order, so that no index says which split it is in."""
    y = torch.as_tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(9))
    splits = dict(zip(SPLITS, order.split([*sizes, len(y) - sum(sizes)]), strict=False))
    fields = {"name": "made", "x": torch.zeros(len(y), 1), "y": y, "splits": splits, "classes": 5, "groups": groups}
    return Data(**(fields | changes))


def make_balanced_data(train: int = 600, classes: int = 5) -> Data:
    total = train + train // 2
    return make_data(torch.arange(total) % classes, (train, train // 4, train // 4), classes=classes)


@st.composite
def data_sets(draw: st.DrawFn) -> Data:
    total = draw(st.integers(8, 160))
    labels = draw(st.lists(st.integers(0, 4), min_size=total, max_size=total))
    train = draw(st.integers(4, total))
    validation = draw(st.integers(0, total - train))
    groups = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=total, max_size=total)))
    return make_data(labels, (train, validation, total - train - validation), groups * 2)


def assert_valid(data: Data, parts: list[dict[str, torch.Tensor]]) -> None:
    for split in SPLITS:
        given_out = torch.cat([part[split] for part in parts])
        assert given_out.dtype == torch.int64
        assert len(given_out.unique()) == len(given_out), "an index was given twice"
        assert set(given_out.tolist()) <= set(data.split(split).tolist())
        for part in parts:
            assert part[split].tolist() == sorted(part[split].tolist())


def check_all_samples_are_used(data: Data, parts: list[dict[str, torch.Tensor]]) -> None:
    """All training samples, and all others of a class that is in the training data."""
    classes = data.y[data.split("train")].unique()
    for split in SPLITS:
        mine = data.split(split)
        expected = mine[torch.isin(data.y[mine], classes)]
        assert sorted(torch.cat([part[split] for part in parts]).tolist()) == sorted(expected.tolist())


def assert_follows(data: Data, parts: list[dict[str, torch.Tensor]]) -> None:
    """Class c of the test data is divided like class c of the training data, to within two samples."""
    train = class_counts(data, parts).double()
    for split in SPLITS[1:]:
        counts = class_counts(data, parts, split).double()
        expected = train * (counts.sum(0) / train.sum(0).clamp(min=1))
        assert (counts - expected).abs().max() < 3
        assert (counts[train == 0] == 0).all()


@settings(deadline=None, max_examples=60)
@given(
    data=data_sets(),
    kind=st.sampled_from(
        [
            ("iid", {}),
            ("dirichlet", {"alpha": 0.3, "min_samples": 0}),
            ("dirichlet", {"alpha": 5.0, "min_samples": 0, "balance": False}),
            ("dirichlet", {"alpha": 1e-4, "min_samples": 0}),
            ("shards", {"shards_per_client": 1}),
        ]
    ),
    clients=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_every_kind_divides(data: Data, kind: tuple[str, dict[str, Any]], clients: int, seed: int) -> None:
    parts = partition(data, kind[0], clients, seed, **kind[1])
    assert len(parts) == clients
    assert_valid(data, parts)
    check_all_samples_are_used(data, parts)
    assert_follows(data, parts)
    again = partition(data, kind[0], clients, seed, **kind[1])
    assert all(torch.equal(a[s], b[s]) for a, b in zip(parts, again, strict=True) for s in SPLITS)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards"])
def test_seed_decides_and_nothing_else(kind: str) -> None:
    data = make_balanced_data()
    np.random.seed(0)  # noqa: NPY002 - the legacy global state must not matter
    torch.manual_seed(0)
    first = partition(data, kind, 10, 1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert all(torch.equal(a["train"], b["train"]) for a, b in zip(first, partition(data, kind, 10, 1), strict=True))
    other = partition(data, kind, 10, 2)
    assert not all(torch.equal(a["train"], b["train"]) for a, b in zip(first, other, strict=True))


def test_iid_sizes_and_labels() -> None:
    data = make_balanced_data(1000)
    parts = partition(data, "iid", 7, 0)
    sizes = [len(part["train"]) for part in parts]
    assert sorted(set(sizes)) == [142, 143]
    counts = class_counts(data, parts)
    assert counts.min() > 10 and counts.max() < 50  # 28.6 on average


@settings(deadline=None, max_examples=30)
@given(alpha=st.sampled_from([0.5, 1.0, 100.0]), clients=st.integers(2, 20), seed=st.integers(0, 1000))
def test_dirichlet_minimum(alpha: float, clients: int, seed: int) -> None:
    data = make_balanced_data()
    minimum = 300 // clients // 2
    parts = partition(data, "dirichlet", clients, seed, alpha=alpha, min_samples=minimum)
    assert min(len(part["train"]) for part in parts) >= minimum


def test_dirichlet_default_minimum_is_ten() -> None:
    for seed in range(20):
        assert min(len(p["train"]) for p in partition(make_balanced_data(), "dirichlet", 20, seed, alpha=0.5)) >= 10
    assert min(len(p["train"]) for p in partition(make_balanced_data(40), "dirichlet", 20, 0)) >= 1


def test_dirichlet_shares_have_the_right_moments() -> None:
    """Without mask and minimum, a client's share of a class is Beta(a, (K-1)a).

    With K = 5 and a = 1 its mean is 1/5 and its variance (1 * 4) / (5^2 * 6) = 0.02667; with a = 100 it is
    (100 * 400) / (500^2 * 501) = 0.000319.
    """
    data = make_balanced_data(10_000)
    for alpha, variance in ((1.0, 0.02667), (100.0, 0.000319)):
        options = {"alpha": alpha, "min_samples": 0, "balance": False}
        counts = [class_counts(data, partition(data, "dirichlet", 5, seed, **options)) for seed in range(120)]
        shares = torch.stack(counts).double()
        shares = shares / shares.sum(1, keepdim=True)
        assert float(shares.mean((0, 2)).std()) < 0.02  # no client is favored
        assert float(shares.var()) == pytest.approx(variance, rel=0.15)


def test_dirichlet_rounding_favors_no_client() -> None:
    """One sample of each class for every two clients: rounding down would always leave the first with nothing."""
    data = make_data(torch.arange(1000) % 50, (1000, 0, 0), classes=50)
    options = {"alpha": 1e6, "min_samples": 0, "balance": False}
    sizes = torch.stack([class_counts(data, partition(data, "dirichlet", 40, s, **options)).sum(1) for s in range(40)])
    assert sizes.double().mean(0).min() > 22 and sizes.double().mean(0).max() < 28  # 25 on average


def test_balance_mask_evens_sizes_out() -> None:
    data = make_balanced_data(5000, classes=10)
    spread = {}
    for balance in (True, False):
        parts = [partition(data, "dirichlet", 20, s, min_samples=0, alpha=0.3, balance=balance) for s in range(10)]
        spread[balance] = np.mean([np.std([len(c["train"]) for c in clients]) for clients in parts])
    assert spread[True] < 0.9 * spread[False]


def test_balance_mask_treats_classes_alike() -> None:
    """Clients fill up, so the classes drawn last lie with few of them: no class may always be among those."""
    data = make_balanced_data(2000, classes=10)
    options = {"alpha": 1.0, "min_samples": 0}
    counts = torch.stack([class_counts(data, partition(data, "dirichlet", 20, s, **options)) for s in range(60)])
    holders = (counts > 0).sum(1).double().mean(0)
    assert holders.max() - holders.min() < 2.0


def test_small_alpha_means_few_classes() -> None:
    data = make_balanced_data(5000, classes=10)

    def largest_share(alpha: float) -> float:
        counts = class_counts(data, partition(data, "dirichlet", 20, 0, alpha=alpha, min_samples=1)).double()
        return float((counts.max(1).values / counts.sum(1)).mean())

    assert largest_share(0.1) > 0.6 > largest_share(1.0) > 0.2 > largest_share(1000.0)


def test_shards_give_few_labels() -> None:
    """500 samples a class, 20 clients x 2 shards of 125: a shard lies in one class, so a client has at most two."""
    data = make_data(torch.arange(7500) % 10, (5000, 1250, 1250), classes=10)
    y = data.y[data.split("train")]
    parts = partition(data, "shards", 20, 0)
    counts = class_counts(data, parts)
    assert (counts.sum(1) == 250).all()
    aligned = make_data(torch.arange(5000) % 10, (5000, 0, 0), classes=10)
    assert ((class_counts(aligned, partition(aligned, "shards", 20, 0)) > 0).sum(1) <= 2).all()
    assert torch.equal(counts.sum(0), torch.bincount(y))
    assert ((counts > 0).sum(1) <= 4).all()
    assert not torch.equal(class_counts(data, partition(data, "shards", 20, 1)), counts)


def test_test_data_have_the_clients_own_proportions() -> None:
    data = make_balanced_data(8000)
    parts = partition(data, "dirichlet", 10, 3, alpha=0.5)
    train, test = class_counts(data, parts).double(), class_counts(data, parts, "test").double()
    distance = (train / train.sum(1, keepdim=True) - test / test.sum(1, keepdim=True)).abs().sum(1) / 2
    assert distance.max() < 0.05
    other = (train / train.sum(1, keepdim=True) - (test / test.sum(1, keepdim=True)).roll(1, 0)).abs().sum(1) / 2
    assert other.min() > 0.1  # so the bound says something


@settings(deadline=None)
@given(
    counts=st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_apportioned_is_near_the_exact_share(counts: list[list[int]], sizes: list[int], seed: int) -> None:
    have, total = np.array(counts), np.array(sizes)
    shares = apportion(have, total, np.random.default_rng(seed))
    assert (shares >= 0).all() and (shares[have == 0] == 0).all()
    present = have.sum(0) > 0
    assert (shares.sum(0) == np.where(present, total, 0)).all()
    exact = have * np.where(present, total, 0) / np.maximum(have.sum(0), 1)
    assert np.abs(shares - exact).max() < 3
    assert np.abs((shares - exact).sum(1)).max() < 3


def test_rounding_leaves_no_small_client_without_data() -> None:
    """50 classes with 2 samples each over 20 clients, the largest 20 times the smallest.

    Client k's exact total is 100 (k + 1) / 210: 0.5 to 9.5. Rounded class by class, the two largest would get all.
    """
    have = np.repeat(np.arange(1, 21)[:, None], 50, axis=1)
    shares = apportion(have, np.full(50, 2), np.random.default_rng(0))
    assert np.abs(shares.sum(1) - 100 * np.arange(1, 21) / 210).max() < 1.5


@given(wish=st.lists(st.floats(-3, 20), min_size=1, max_size=10), total=st.integers(0, 60))
def test_whole_numbers_add_up(wish: list[float], total: int) -> None:
    given_out = round_to_sum(np.array(wish), total)
    assert given_out.sum() == total and (given_out >= 0).all()


def make_grouped_data() -> Data:
    """Groups 0, 2, 4 with 30, 20, 10 samples, and group 6 with test samples only."""
    groups = torch.tensor([0] * 30 + [2] * 20 + [4] * 10 + [6] * 5)
    splits = {"train": torch.arange(0, 60, 2), "validation": torch.arange(1, 60, 4), "test": torch.arange(3, 65, 4)}
    splits["test"] = torch.cat([splits["test"][splits["test"] < 60], torch.arange(60, 65)])
    return Data("grouped", torch.zeros(65, 1), torch.arange(65) % 5, splits, 5, groups=groups)


def test_natural_gives_each_group_to_one_client() -> None:
    data = make_grouped_data()
    parts = partition(data, "natural", None, 0)
    assert_valid(data, parts)
    assert data.groups is not None
    for part, group in zip(parts, (0, 2, 4), strict=True):
        for split in SPLITS:
            mine = data.split(split)
            assert part[split].tolist() == mine[data.groups[mine] == group].tolist()


def test_natural_with_fewer_clients() -> None:
    data = make_grouped_data()
    chosen = {tuple(p["train"].tolist()) for seed in range(20) for p in partition(data, "natural", 1, seed)}
    assert len(chosen) == 3
    for seed in range(20):
        parts = partition(data, "natural", 2, seed, fewer="merge")
        assert_valid(data, parts)
        assert sum(len(p["train"]) for p in parts) == 30
        assert data.groups is not None
        owners = [set(data.groups[p["train"]].tolist()) for p in parts]
        assert not owners[0] & owners[1]
        assert sorted(len(groups) for groups in owners) == [1, 2]


def test_natural_merges_nothing_when_there_are_enough_clients() -> None:
    for few, many in zip(
        partition(make_grouped_data(), "natural", 3, 0, fewer="merge"),
        partition(make_grouped_data(), "natural", None, 0),
        strict=True,
    ):
        assert few["train"].tolist() == many["train"].tolist()


def test_natural_leaves_small_groups_out() -> None:
    parts = partition(make_grouped_data(), "natural", None, 0, min_samples=6)
    assert [len(p["train"]) for p in parts] == [15, 10]


def test_tasks_without_classes_are_iid_or_natural() -> None:
    data = make_data([0] * 40, (20, 10, 10), torch.arange(40) % 4, task="their_own")
    parts = partition(data, "iid", 4, 0)
    assert_valid(data, parts)
    assert [[len(p[s]) for s in SPLITS] for p in parts] == [[5, 3, 3], [5, 3, 3], [5, 2, 2], [5, 2, 2]]
    assert len(partition(data, "natural", None, 0)) == 4
    with raises(DataError, "their_own", key="kind"):
        partition(data, "dirichlet", 4, 0)


def test_shares_can_be_divided_again() -> None:
    data = make_balanced_data()
    half = data.share(partition(data, "iid", 2, 0)[0])
    parts = partition(half, "dirichlet", 5, 0)
    assert_valid(half, parts)
    check_all_samples_are_used(half, parts)


def test_class_counts_by_loop() -> None:
    data = make_balanced_data(60)
    parts = partition(data, "iid", 3, 0)
    counts = class_counts(data, parts, "test")
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[sum(int(data.y[i]) == c for i in p["test"]) for c in range(5)] for p in parts]


@pytest.mark.parametrize(
    ("kind", "clients", "parameters", "expected"),
    [
        ("dirichlett", 4, {}, Expected('"dirichlett"', '"dirichlet"', key="kind")),
        ("dirichlet", 4, {"alfa": 1}, Expected('"alfa"', '"alpha"', key="alfa")),
        ("iid", 4, {"alpha": 1}, Expected('"iid"', '"alpha"', key="alpha")),
        ("iid", 0, {}, Expected(1, 0, key="clients")),
        ("iid", 2.5, {}, Expected(2.5, key="clients")),
        ("iid", None, {}, Expected(1, key="clients")),
        ("shards", True, {}, Expected(1, key="clients")),
        ("dirichlet", 601, {}, Expected(601, 600, key="clients")),
        ("dirichlet", 4, {"alpha": 0}, Expected(0, key="alpha")),
        ("dirichlet", 4, {"alpha": float("nan")}, Expected(0, key="alpha")),
        ("dirichlet", 4, {"alpha": float("inf")}, Expected(0, key="alpha")),
        ("dirichlet", 4, {"min_samples": 151}, Expected(0, 150.0, key="min_samples")),
        ("dirichlet", 4, {"min_samples": -1}, Expected(-1, key="min_samples")),
        (
            "dirichlet",
            50,
            {"alpha": 0.01, "min_samples": 10, "max_redraws": 3},
            Expected(4, 10, 0.01, key="min_samples"),
        ),
        ("shards", 301, {}, Expected(301, 2, 600, key="shards_per_client")),
        ("shards", 3, {"shards_per_client": 0}, Expected(1, key="shards_per_client")),
        ("natural", None, {}, Expected(key="kind")),
    ],
)
def test_says_what_is_wrong(kind: str, clients: Any, parameters: dict[str, Any], expected: Expected) -> None:
    with raises(DataError, expected):
        partition(make_balanced_data(), kind, clients, 0, **parameters)


def test_natural_says_what_is_wrong() -> None:
    with raises(DataError, "1..3", 4, key="clients"):
        partition(make_grouped_data(), "natural", 4, 0)
    with raises(DataError, '"choose"', '"merge"', key="fewer"):
        partition(make_grouped_data(), "natural", 2, 0, fewer="drop")
    with raises(DataError, key="seed"):
        partition(make_grouped_data(), "natural", 2, -1)


def test_what_clients_have_is_one_tensor_and_reads_as_a_list() -> None:
    """So that a million clients cost no more than their samples."""
    data = make_balanced_data()
    parts = partition(data, "dirichlet", 7, 0, alpha=0.5)
    listed = [dict(part) for part in parts]
    assert len(parts) == len(listed) == 7
    for split in ("train", "validation", "test"):
        assert (
            count_samples(parts, split).tolist()
            == count_samples(listed, split).tolist()
            == [len(p[split]) for p in listed]
        )
        assert {part[split].untyped_storage().data_ptr() for part in listed} == {
            parts.indices[split].untyped_storage().data_ptr()
        }
    assert all(torch.equal(parts[-1]["train"], each["train"]) for each in (parts[6], parts[5:][1], listed[6]))
    with pytest.raises(IndexError):
        parts[7]
