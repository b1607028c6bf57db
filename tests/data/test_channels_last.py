"""Arrays with channels last are recognised by their shape, or refused where nobody can tell; NumPy moves the axis."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises

import fleetfit as ff
from fleetfit.data.files.arrays import arrays, find_sample_shape, is_channels_last, wrap_arrays
from fleetfit.errors import DataError

RNG = np.random.default_rng(0)
LAST = [
    ((32, 32, 3), "uint8"), ((28, 28, 1), "uint8"), ((28, 28, 1), "float32"), ((64, 64, 4), "float32"),
    ((120, 160, 3), "float32"), ((8, 8, 1), "float64"), ((5, 7, 3), "uint8"), ((16, 32, 32, 3), "uint8"),
    ((4, 4, 3), "float32"),
]  # fmt: skip
FIRST = [
    ((3, 32, 32), "uint8"), ((1, 28, 28), "float32"), ((1, 128, 3), "float32"), ((3, 32, 1), "float32"),
    ((9, 128, 1), "float32"), ((6, 50, 3), "float32"), ((22, 20, 20), "float32"), ((3, 16, 32, 32), "uint8"),
    ((2, 3, 3), "uint8"), ((3, 4, 4), "float32"), ((32, 32), "uint8"), ((128, 3), "float32"), ((7,), "float32"),
    ((32, 32, 7), "float32"),
]  # fmt: skip
AMBIGUOUS = [(3, 32, 3), (4, 32, 3), (3, 3, 3), (3, 8, 4)]


def samples(shape: tuple[int, ...], dtype: str, count: int = 20) -> np.ndarray:
    return (RNG.random((count, *shape)) * 255).astype(dtype)


@pytest.mark.parametrize(("shape", "dtype"), LAST)
def test_they_are_moved_and_a_note_says_so(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    x, y = samples(shape, dtype), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    wanted = np.moveaxis(x, -1, 1)
    for data in (arrays(str(tmp_path / "a.npz")), wrap_arrays(x, y), wrap_arrays(torch.from_numpy(x), y)):
        assert np.array_equal(data.stored(torch.arange(20)).numpy(), wanted)
        assert any("channels" in note and "channels_last = false" in note for note in data.notes)
    assert find_sample_shape(str(tmp_path / "a.npz")) == wanted.shape[1:]
    for kept in (arrays(str(tmp_path / "a.npz"), channels_last=False), wrap_arrays(x, y, channels_last=False)):
        assert kept.sample_shape == shape and not kept.notes


@pytest.mark.parametrize(("shape", "dtype"), FIRST)
def test_others_stay_as_they_are(shape: tuple[int, ...], dtype: str) -> None:
    x = samples(shape, dtype)
    data = wrap_arrays(x, np.arange(20) % 2)
    assert np.array_equal(data.x.numpy().reshape(x.shape), x)  # type: ignore[union-attr]
    doubtful = shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4) and len(shape) > 2
    assert [note for note in data.notes if "channels_last = true" in note] == list(data.notes)
    assert len(data.notes) == doubtful


@pytest.mark.parametrize("shape", AMBIGUOUS)
def test_where_nobody_can_tell_the_key_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x, y = samples(shape, "float32"), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    for read in (lambda: arrays(str(tmp_path / "a.npz")), lambda: wrap_arrays(x, y)):
        with raises(DataError, key="channels_last"):
            read()
    told = arrays(str(tmp_path / "a.npz"), channels_last=True)
    assert np.array_equal(told.x.numpy(), np.moveaxis(x, -1, 1))  # type: ignore[union-attr]
    assert arrays(str(tmp_path / "a.npz"), channels_last=False).sample_shape == shape


def test_tokens_have_no_channels() -> None:
    assert not is_channels_last(samples((40,), "int64"), "x")


QUICK: dict[str, Any] = {"rounds": 1, "local": {"max_steps": 1}, "fleet": {"tolerance": 0.4}}


def test_a_run_from_python_says_what_was_understood(tmp_path: Path) -> None:
    x, y = samples((16, 16, 3), "uint8", 80), np.arange(80) % 2
    run = ff.run(data=(x, y), out=tmp_path / "run", **QUICK)
    assert run.assembly.data.sample_shape == (3, 16, 16)
    assert any("16x16 pixels" in note and "3 channels" in note for note in run.notes) and any(
        "last dimension" in note for note in run.notes
    )
    columns = [run.evaluate(data=(given, y))["static"] for given in (x, np.moveaxis(x, -1, 1))]
    assert columns[0] == columns[1] and columns[0]["samples"] == 80
    again = ff.load(run.folder, data=(x, y))
    assert again.assembly.data.sample_shape == (3, 16, 16)


def test_python_takes_the_key_too(tmp_path: Path) -> None:
    x, y = samples((3, 16, 3), "float32", 80), np.arange(80) % 2
    run = ff.run(data={"name": (x, y), "channels_last": True}, out=tmp_path / "run", **QUICK)
    assert run.assembly.data.sample_shape == (3, 3, 16)
    with raises(DataError, key="channels_last"):
        ff.run(data=(x, y), out=tmp_path / "other", **QUICK)


@pytest.mark.parametrize("kind", ["float32", "float64"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_one_hot_labels_are_said_to_be_a_regression(kind: str, classes: int) -> None:
    data = wrap_arrays(samples((5,), "float32"), np.eye(classes, dtype=kind)[np.arange(20) % classes])
    assert data.task == "regression" and any("one-hot" in note and "argmax" in note for note in data.notes)
    fractions = wrap_arrays(samples((5,), "float32"), RNG.random((20, classes)))
    assert fractions.task == "regression" and not fractions.notes


@pytest.mark.parametrize("kind", ["int64", "uint8", "bool", "float32"])
def test_one_hot_labels_that_cannot_be_learned_name_the_remedy(tmp_path: Path, kind: str) -> None:
    y = np.eye(3)[np.arange(20) % 3].astype(kind)
    np.savez(tmp_path / "a.npz", x=samples((5,), "float32"), y=y)
    with raises(DataError, "argmax(1)", key="y"):
        arrays(str(tmp_path / "a.npz"))
    if kind != "float32":
        with raises(DataError, "argmax(1)", key="y"):
            wrap_arrays(samples((5,), "float32"), y)
