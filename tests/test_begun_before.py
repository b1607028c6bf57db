"""Runs that earlier versions began go on with the pixels with which they began.

`data/begun_before` holds runs of two rounds that were stopped after the first, by the version before images were turned
by their EXIF orientation and arrays with channels last were recognised, and before a rule chose the memory format.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import fleetfit as ff
from fleetfit.config import load_experiment, to_table
from fleetfit.config.records import restore_records
from fleetfit.data import Data

BEGUN = Path(__file__).parent / "data" / "begun_before"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data, with a copy of the runs beside it."""
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(BEGUN, tmp_path / "runs")
    (tmp_path / "data").mkdir()
    return tmp_path


def test_photos_stay_as_they_are_stored(place: Path) -> None:
    """Every second photo is stored upside down, with a tag that says so."""
    image = pytest.importorskip("PIL.Image")
    stored = []
    for label in "ab":
        folder = place / "data" / "photos" / label
        folder.mkdir(parents=True)
        for i in range(12):
            pixels, tag = np.zeros((8, 8, 3), np.uint8), image.Exif()
            pixels[slice(0, 4) if label == "a" else slice(4, 8)] = 255
            if i % 2:
                tag[0x112], pixels = 3, pixels[::-1, ::-1]
            image.fromarray(np.ascontiguousarray(pixels)).save(folder / f"{i}.png", exif=tag)
        stored += [np.asarray(image.open(file)).transpose(2, 0, 1) for file in sorted(folder.iterdir())]
    for run in (ff.load(place / "runs" / "photos"), ff.resume(place / "runs" / "photos")):
        data = run.assembly.data
        assert isinstance(data, Data) and np.array_equal(data.stored(torch.arange(24)).numpy(), np.stack(stored))
    assert run.finished
    again = ff.run(run.experiment, out=place / "again")  # the same settings, spelt out
    assert "exif_orientation = false" in (again.folder / "config.toml").read_text()


def maps() -> tuple[np.ndarray, np.ndarray]:
    """Sixty maps [8, 8, 3] that were taken as 8 channels of 8x3."""
    return np.random.default_rng(0).integers(0, 255, (60, 8, 8, 3), dtype=np.uint8), np.arange(60) % 2


def test_arrays_keep_their_first_dimension_as_channels(place: Path) -> None:
    x, y = maps()
    np.savez(place / "data" / "maps.npz", x=x, y=y)
    for run in (ff.load(place / "runs" / "maps"), ff.resume(place / "runs" / "maps")):
        data = run.assembly.data
        assert isinstance(data, Data) and np.array_equal(data.stored(torch.arange(60)).numpy(), x)
    assert run.finished


def test_arrays_in_memory_keep_theirs_too(place: Path) -> None:
    given = maps()
    for run in (ff.load(place / "runs" / "pairs", data=given), ff.resume(place / "runs" / "pairs", data=given)):
        data = run.assembly.data
        assert isinstance(data, Data) and np.array_equal(data.stored(torch.arange(60)).numpy(), given[0])
    assert run.finished


@pytest.mark.parametrize("recorded", [False, True])
def test_a_comparison_on_arrays_goes_on(recorded: bool) -> None:
    """Folders of before have the key that is left open now; what they say holds."""
    given = {"data": {"name": "arrays", "file": "a.npz"}}
    there = load_experiment({"data": {**given["data"], "channels_last": recorded}})
    assert to_table(restore_records(load_experiment(given), there)) == to_table(there)
    other = load_experiment({"data": {**given["data"], "channels_last": not recorded}})
    assert to_table(restore_records(other, there)) == to_table(other)


def test_convolutions_keep_the_plain_memory_format(place: Path) -> None:
    """A new run of the same file computes in the format that its levels' shapes choose."""
    for run in (ff.load(place / "runs" / "digits"), ff.resume(place / "runs" / "digits")):
        assert run.experiment.engine.memory_format == "contiguous"
        assert run.assembly.federation.problem.computed == ()
    assert run.finished
    table = to_table(run.experiment)
    del table["engine"]["memory_format"]
    new = ff.run(table, out=place / "new")
    assert new.experiment.engine.memory_format == "rule-1"
    assert new.assembly.federation.problem.computed


def test_a_comparison_keeps_the_memory_format_of_its_rows(place: Path) -> None:
    begun = ff.load(place / "runs" / "digits").experiment
    table = to_table(begun)
    del table["engine"]["memory_format"]
    assert restore_records(load_experiment(table), begun).engine.memory_format == "contiguous"
