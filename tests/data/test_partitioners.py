"""Divisions of others: partitioners of flwr-datasets, a function of one's own; regressions by tenths of the target."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support import raises

from fleetfit.data import Data, partition
from fleetfit.data.partition import get_labels
from fleetfit.errors import ConfigError, DataError, MissingExtra


def make_data(task: str = "classification", rows: int = 400) -> Data:
    rng = torch.Generator().manual_seed(0)
    order = torch.randperm(rows, generator=rng)
    splits = {
        "train": order[: rows // 2],
        "validation": order[rows // 2 : rows * 3 // 4],
        "test": order[rows * 3 // 4 :],
    }
    y = torch.randint(4, (rows,), generator=rng) if task == "classification" else torch.randn(rows, 1, generator=rng)
    groups = torch.arange(rows) % 5
    return Data(
        "made", torch.randn(rows, 3, generator=rng), y, splits, y.shape[-1] if y.ndim > 1 else 4, groups, task=task
    )


def check_whole(data: Data, parts: object) -> None:
    for split, indices in data.splits.items():
        assigned = torch.cat([part[split] for part in parts])  # type: ignore[attr-defined]
        assert sorted(assigned.tolist()) == sorted(indices.tolist())


def test_a_partitioner_of_flwr_datasets_divides_as_it_does_alone() -> None:
    pytest.importorskip("flwr_datasets")
    from datasets import Dataset
    from flwr_datasets.partitioner import PathologicalPartitioner

    data = make_data()
    name = "flwr_datasets.partitioner:PathologicalPartitioner"
    parts = partition(data, name, 4, 3, num_classes_per_partition=2)
    check_whole(data, parts)
    train = data.split("train")
    alone = PathologicalPartitioner(num_partitions=4, partition_by="label", num_classes_per_partition=2, seed=3)
    alone.dataset = Dataset.from_dict({"label": data.y[train].tolist(), "row": train.tolist()})
    for client, part in enumerate(parts):
        assert sorted(alone.load_partition(client)["row"]) == part["train"].tolist()
        assert len(set(data.y[part["train"]].tolist())) <= 2
        assert set(data.y[part["test"]].tolist()) <= set(data.y[part["train"]].tolist())


def test_natural_ids_and_what_is_wrong() -> None:
    pytest.importorskip("flwr_datasets")
    data, place = make_data(), "flwr_datasets.partitioner"
    parts = partition(data, f"{place}:NaturalIdPartitioner", None, 0)
    assert len(parts) == 5 and all(len(set(data.groups[p["train"]].tolist())) == 1 for p in parts)  # type: ignore[index]
    with raises(DataError, '"alhpa"', '"alpha"', key="alhpa"):
        partition(data, f"{place}:DirichletPartitioner", 4, 0, alhpa=1.0)
    with raises(DataError, key="kind"):
        partition(data, f"{place}:DirichletPartitioner", 4, 0)
    with raises(ConfigError, '"DirichletPartitoner"'):
        partition(data, f"{place}:DirichletPartitoner", 4, 0)


def test_without_flwr_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with raises(MissingExtra, extra="partitioners"):
        partition(make_data(), "flwr_datasets.partitioner:IidPartitioner", 4, 0)


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\ndef halves(data, clients, rng, share: float = 0.5):\n"
        "    return (np.arange(len(data.split('train'))) >= share * len(data.split('train'))).astype(int)\n"
        "def wrong(data, clients, rng):\n    return [0]\n"
    )
    parts = partition(make_data(), f"{file}:halves", None, 0, share=0.25)
    assert [len(part["train"]) for part in parts] == [50, 150]
    check_whole(make_data(), parts)
    with raises(DataError, key="kind"):
        partition(make_data(), f"{file}:wrong", 2, 0)
    with raises(ConfigError, '"shar"'):
        partition(make_data(), f"{file}:halves", 2, 0, shar=1)


def test_a_regression_is_divided_by_tenths_of_its_target() -> None:
    data = make_data("regression")
    tenths = get_labels(data, "train", "dirichlet")
    assert np.bincount(tenths).tolist() == [20] * 10
    y = data.y[data.split("train"), 0].numpy()
    assert all(y[tenths == i].max() <= y[tenths == i + 1].min() for i in range(9))
    parts = partition(data, "dirichlet", 4, 0, alpha=0.1)
    check_whole(data, parts)
    spread = [float(data.y[part["train"]].std()) for part in parts]
    assert min(spread) < float(data.y.std())
