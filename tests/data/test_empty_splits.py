"""A split that is there without samples counts as one that is not there: some are held out, and a note says so."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import raises

import fleetfit as ff
from fleetfit.data import Data
from fleetfit.data.files.arrays import arrays, wrap_arrays
from fleetfit.data.files.images import images
from fleetfit.data.files.table import table
from fleetfit.data.files.text import text
from fleetfit.errors import DataError


def sizes(data: Data) -> tuple[int, ...]:
    return tuple(len(data.split(split)) for split in ("train", "validation", "test"))


@pytest.mark.parametrize("empty", [("test",), ("validation",), ("test", "validation")])
def test_images_in_parquet_files(
    tmp_path: Path, write: Callable[..., Path], picture: Callable[..., bytes], empty: tuple[str, ...]
) -> None:
    content = [picture(np.full((8, 8), i, np.uint8)) for i in range(40)]
    write(tmp_path / "set" / "train.parquet", content, [i % 2 for i in range(40)])
    for split in empty:
        write(tmp_path / "set" / f"{split}.parquet", [], np.zeros(0, np.int64))
    data = images(str(tmp_path / "set"), test=0.25, validation=0.1)
    assert sizes(data) == (27, 3, 10) and len(data.notes) == len(empty)
    assert all(f" {split} " in " ".join(data.notes) for split in empty)
    assert sizes(images(str(tmp_path / "set"), test=0.0, validation=0.1)) == (36, 4, 0)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_arrays(tmp_path: Path, dtype: str) -> None:
    x, y = np.ones((40, 3), dtype), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:0], y_test=y[:0])
    data = arrays(str(tmp_path / "a.npz"))
    assert sizes(data) == (29, 3, 8) and "no samples" in data.notes[0]
    dataset = wrap_arrays(x, y, test_set=(x[:0], y[:0]))
    assert sizes(dataset) == (29, 3, 8) and "no samples" in dataset.notes[0]
    full = ff.run(
        {"data": {"path": str(tmp_path / "a.npz")}, "rounds": 1, "fleet": {"tolerance": 0.4}}, out=tmp_path / "r"
    )
    assert full.accuracy("local") >= 0 and any("no samples" in note for note in full.notes)


def test_texts_and_tables(tmp_path: Path) -> None:
    for kind, row in (("t", "words {} here,{}\n"), ("c", "{},{}\n")):
        (tmp_path / kind).mkdir()
        rows = "".join(row.format(i, "xy"[i % 2]) for i in range(40))
        (tmp_path / kind / "train.csv").write_text("text,label\n" + rows)
        (tmp_path / kind / "test.csv").write_text("text,label\n")
    assert sizes(text(str(tmp_path / "t"), test=0.25))[2] == 10
    with raises(DataError, path="test.csv"):
        table(str(tmp_path / "c"))
