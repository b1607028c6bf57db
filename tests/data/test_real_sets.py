"""The real data sets, where they are: FLEETFIT_DATA, or ../shared/data beside the repository."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleetfit.data import Data, class_counts, partition
from fleetfit.data.dataset import Facts
from fleetfit.data.files.images import images
from fleetfit.data.sets.images import FACTS, cifar10, cifar100, mnist

ROOT = Path(os.environ.get("FLEETFIT_DATA") or Path(__file__).parents[2].parent / "shared" / "data")

pytest.importorskip("pyarrow")
pytest.importorskip("PIL")


def there(name: str) -> Path:
    folder = ROOT / name
    if not (folder / "train.parquet").is_file():
        pytest.skip(f"no {name}: set FLEETFIT_DATA to the folder that holds {name}/train.parquet")
    return folder


def sliced(name: str, target: Path, rows: int = 300) -> Path:
    """Copy the first rows of each file, metadata included."""
    import pyarrow.parquet as parquet

    target.mkdir()
    for path in there(name).glob("*.parquet"):
        batch = next(parquet.ParquetFile(path).iter_batches(batch_size=rows))
        with parquet.ParquetWriter(target / path.name, batch.schema) as writer:
            writer.write_batch(batch)
    return target


@pytest.mark.parametrize(
    ("load", "name", "names", "start"),
    [
        (cifar10, "cifar10", ("airplane", "automobile"), [6, 9, 9, 4, 1]),
        (cifar100, "cifar100", ("apple", "aquarium_fish"), [19, 29, 0, 11, 1]),
        (mnist, "mnist", ("0", "1"), [5, 0, 4, 1, 9]),
    ],
)
def test_first_rows(
    load: Callable[..., Data], name: str, names: tuple[str, str], start: list[int], tmp_path: Path
) -> None:
    """The first labels of the official order, as published."""
    data = load(str(sliced(name, tmp_path / name)), validation=0.1)
    assert data.y[:5].tolist() == start
    assert data.class_names[:2] == names
    x, _ = data.batch(torch.arange(300))
    assert abs(float(x.mean())) < 0.4 and 0.7 < float(x.std()) < 1.3


def test_writers_are_a_natural_partition() -> None:
    data = images(str(there("femnist_digits")), groups="writer_id")
    assert data.x.shape == (18_504, 1, 28, 28) and data.classes == 10
    assert data.groups is not None and int(data.groups.max()) == 189
    parts = partition(data, "natural", 180, 0)
    assert len(parts) == 180
    for part in parts[:20]:
        writers = torch.cat([data.groups[part[split]] for split in ("train", "validation", "test")])
        assert len(writers.unique()) == 1
    assert len(partition(data, "natural", None, 0)) == 190


def test_photographs_at_another_size(tmp_path: Path) -> None:
    data = images(str(sliced("tiny_imagenet_small", tmp_path / "photographs")), size=32, validation=0.1)
    assert data.x.shape == (600, 3, 32, 32) and data.classes == 200
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [270, 30, 300]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "name", "facts"),
    [
        (cifar10, "cifar10", FACTS["cifar10"]),
        (cifar100, "cifar100", FACTS["cifar100"]),
        (mnist, "mnist", FACTS["mnist"]),
    ],
)
def test_whole_sets(load: Callable[..., Data], name: str, facts: Facts) -> None:
    data = load(str(there(name)))
    assert len(data.split("train")) + len(data.split("validation")) == facts.train
    assert len(data.split("test")) == facts.test
    assert facts.train is not None and len(data.split("validation")) == facts.train // 10
    if name.startswith("cifar"):
        assert (torch.bincount(data.y) == 60_000 // data.classes).all()
    parts = partition(data, "dirichlet", 100, 0, alpha=1.0)
    assert int(class_counts(data, parts).sum()) == len(data.split("train"))
