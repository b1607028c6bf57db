"""AG News with as many training texts of each class."""

from pathlib import Path

import pytest
import torch

from experiments.balanced import ag_news
from fleetfit.errors import DataError

pytest.importorskip("pyarrow")
pytest.importorskip("tokenizers")


def write(folder: Path, split: str, counts: list[int]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    texts = [f"text {number} of class {label}" for number, label in enumerate(labels)]
    pq.write_table(pa.table({"text": texts, "label": labels}), folder / f"{split}.parquet")


def test_each_class_has_as_many_training_texts(tmp_path: Path) -> None:
    write(tmp_path, "train", [10, 12, 14, 20])
    write(tmp_path, "test", [3, 3, 3, 3])
    data = ag_news(folder=str(tmp_path), length=8, samples=32, validation=0.25)
    counts = {split: torch.bincount(data.y[data.split(split)]).tolist() for split in ("train", "validation", "test")}
    assert counts == {"train": [6] * 4, "validation": [2] * 4, "test": [3] * 4}
    again = ag_news(folder=str(tmp_path), length=8, samples=32, validation=0.25, seed=1)
    assert not torch.equal(data.split("train"), again.split("train"))
    with pytest.raises(DataError) as caught:
        ag_news(folder=str(tmp_path), length=8, samples=48, validation=0.25)
    assert caught.value.key == "samples"
