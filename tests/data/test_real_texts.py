"""The real sets of texts, where they are: FLEETFIT_DATA, or ../shared/data beside the repository."""

import os
from pathlib import Path

import pytest
import torch

from fleetfit.data import partition
from fleetfit.data.sets.shakespeare import FACTS as SHAKESPEARE, shakespeare
from fleetfit.data.sets.short_texts import FACTS, ag_news, sst2

ROOT = Path(os.environ.get("FLEETFIT_DATA") or Path(__file__).parents[2].parent / "shared" / "data")

parquet = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("tokenizers")


def there(name: str) -> Path:
    folder = ROOT / name
    if not (folder / "train.parquet").is_file():
        pytest.skip(f"no {name}: set FLEETFIT_DATA to the folder that holds {name}/train.parquet")
    return folder


def sliced(name: str, target: Path, rows: int = 400) -> Path:
    """Copy the first rows of each file, metadata included."""
    target.mkdir()
    for path in there(name).glob("*.parquet"):
        parquet.write_table(parquet.read_table(path).slice(0, rows), target / path.name)
    return target


def test_first_texts_of_sst2(tmp_path: Path) -> None:
    """The first labels of the official order, as published."""
    data = sst2(str(sliced("sst2", tmp_path / "sst2")), vocabulary=500)
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [400, 400, 400]
    assert data.class_names[int(data.y[2])] == "positive"  # "she never lets her character become a caricature ..."
    assert data.class_names[int(data.y[data.split("test")[0]])] == "negative"  # "no movement , no yuks , ..."
    x, y = data.batch(data.split("test")[:1])
    assert x.dtype == torch.int64 and x.shape[1] < 64 and int(x.max()) < data.vocabulary <= 500 and len(y) == 1


def test_facts_are_true() -> None:
    rows = {
        split: parquet.ParquetFile(there("sst2") / f"{split}.parquet").metadata.num_rows for split in ("train", "test")
    }
    assert (rows["train"], rows["test"]) == (FACTS["sst2"].train, FACTS["sst2"].test)
    assert parquet.ParquetFile(there("ag_news") / "test.parquet").metadata.num_rows == FACTS["ag_news"].test


def test_ag_news_is_partial_where_it_is(tmp_path: Path) -> None:
    data = ag_news(str(sliced("ag_news", tmp_path / "ag_news")), vocabulary=500, samples=100)
    assert data.name == "ag_news-partial-400-of-120000" and data.classes == 4
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [90, 10, 400]


def test_roles_are_a_natural_partition() -> None:
    data = shakespeare(str(there("shakespeare")))
    assert data.classes == SHAKESPEARE.classes and data.x.shape[1] == 80
    assert int((data.x == 1).sum()) == 0, "every character is a known one"
    parts = partition(data, "natural", None, 0)
    assert len(parts) == 1005 and data.groups is not None
    assert all(len(part["train"]) and len(part["test"]) for part in parts)
    assert torch.equal(data.groups[parts[7]["test"]].unique(), torch.tensor([7]))
