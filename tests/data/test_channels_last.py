"""Arrays with channels last are recognized by their shape, or refused where nobody can tell; NumPy moves the axis."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support import raises
from torch import nn

import fleetfit as ff
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.config.assemble.run import assemble
from fleetfit.core.nodes import parse_node_description
from fleetfit.data import Data
from fleetfit.data.files.arrays import arrays, find_sample_shape, is_channels_last, wrap_arrays
from fleetfit.errors import DataError
from fleetfit.fleet.protocol import describe_data

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
    moved = np.moveaxis(x, -1, 1)
    for data in (arrays(str(tmp_path / "a.npz")), wrap_arrays(x, y), wrap_arrays(torch.from_numpy(x), y)):
        assert np.array_equal(data.stored(torch.arange(20)).numpy(), moved)
        assert any("channels" in note and "channels_last = false" in note for note in data.notes)
    assert find_sample_shape(str(tmp_path / "a.npz")) == moved.shape[1:]
    for unmoved in (arrays(str(tmp_path / "a.npz"), channels_last=False), wrap_arrays(x, y, channels_last=False)):
        assert unmoved.sample_shape == shape and not unmoved.notes


@pytest.mark.parametrize(("shape", "dtype"), FIRST)
def test_others_stay_as_they_are(shape: tuple[int, ...], dtype: str) -> None:
    x = samples(shape, dtype)
    data = wrap_arrays(x, np.arange(20) % 2)
    assert np.array_equal(data.x.numpy().reshape(x.shape), x)  # type: ignore[union-attr]
    doubtful = shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4) and len(shape) > 2
    if len(shape) == 2 and dtype != "uint8":  # a series
        assert not data.notes or data.channels_last
        return
    assert [note for note in data.notes if "channels_last = true" in note] == list(data.notes)
    assert len(data.notes) == doubtful


@pytest.mark.parametrize("shape", AMBIGUOUS)
def test_where_nobody_can_tell_the_key_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x, y = samples(shape, "float32"), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    for read in (lambda: arrays(str(tmp_path / "a.npz")), lambda: wrap_arrays(x, y)):
        with raises(DataError, key="channels_last"):
            read()
    data = arrays(str(tmp_path / "a.npz"), channels_last=True)
    assert np.array_equal(data.x.numpy(), np.moveaxis(x, -1, 1))  # type: ignore[union-attr]
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
    columns = [run.evaluate(data=(inputs, y))["static"] for inputs in (x, np.moveaxis(x, -1, 1))]
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


# ---- series ----------------------------------------------------------------------------------------------------------


def series(steps: int, channels: int, last: bool, count: int = 60) -> np.ndarray:
    """Return series whose channels have scales from 0.01 to 1000, in either orientation."""
    x = RNG.normal(size=(count, steps, channels)) * np.logspace(-2, 3, channels) + np.arange(channels)
    return (x if last else x.swapaxes(1, 2)).astype(np.float32)


def check_standardized(data: ff.Data, x: np.ndarray, last: bool) -> None:
    """Compare batches with NumPy's standardization of each channel over the training samples; x has its orientation."""
    axes = (0, 1) if last else (0, 2)
    train = x[data.split("train").numpy()].astype(np.float64)
    expected = (x - train.mean(axes, keepdims=True)) / train.std(axes, keepdims=True)
    batch = data.batch(torch.arange(len(x)))[0]
    assert batch.shape == x.shape and np.allclose(batch.numpy(), expected, rtol=1e-4, atol=1e-4)


SERIES = [(24, 3, True), (24, 3, False), (128, 9, True), (7, 40, True), (50, 1, True), (50, 1, False), (16, 8, True)]


@pytest.mark.parametrize(("steps", "channels", "last"), SERIES)
def test_each_channel_of_a_series_is_standardized(tmp_path: Path, steps: int, channels: int, last: bool) -> None:
    x, y = series(steps, channels, last), np.arange(60) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    layout = {} if steps >= 2 * channels else {"channels_last": last}
    for data in (wrap_arrays(x, y, **layout), arrays(str(tmp_path / "a.npz"), standardize=True, **layout)):
        check_standardized(data, x, last)
        assert len([note for note in data.notes if "channels_last" in note]) == (channels > 1)
    detected = build_data(load_experiment(data={"path": str(tmp_path / "a.npz"), **layout}).data)
    check_standardized(detected, x, last)


@pytest.mark.parametrize(("steps", "channels"), [(20, 20), (30, 24), (12, 14)])
def test_series_of_similar_sizes_need_the_key(tmp_path: Path, steps: int, channels: int) -> None:
    x, y = series(steps, channels, True), np.arange(60) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    for read in (lambda: arrays(str(tmp_path / "a.npz"), standardize=True), lambda: wrap_arrays(x, y)):
        with raises(DataError, key="channels_last"):
            read()
    for last in (True, False):
        check_standardized(build_data(load_experiment(data={"name": (x, y), "channels_last": last}).data), x, last)
    assert not wrap_arrays(x, y, standardize=False).mean and not arrays(str(tmp_path / "a.npz")).mean
    moved = arrays(str(tmp_path / "a.npz"), channels_last="move", standardize=True)
    check_standardized(moved, x.swapaxes(1, 2), False)
    assert find_sample_shape(str(tmp_path / "a.npz"), channels_last="move") == (channels, steps)


@pytest.mark.parametrize(("net", "last"), [
    (nn.LSTM(24, 8, batch_first=True), True), (nn.Sequential(nn.Conv1d(24, 8, 3)), True),
    (nn.Sequential(nn.Conv1d(30, 8, 3)), False), (nn.GRU(30, 4), False), (nn.Sequential(nn.Linear(24, 24)), None),
])  # fmt: skip
def test_the_layer_of_a_module_tells_the_channels(tmp_path: Path, net: nn.Module, last: bool | None) -> None:
    """Samples of 30 by 24: a layer of 24 channels means the last dimension, whatever the module does before it."""
    x, y = series(30, 24, True), np.arange(60) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    for data in ((x, y), {"path": str(tmp_path / "a.npz")}):
        if last is None:
            with raises(DataError, key="channels_last"):
                build_data(load_experiment(data=data, model=net).data)
            continue
        section = load_experiment(data=data, model=net).data
        assert section.settings["channels_last"] is last
        check_standardized(build_data(section), x, last)


class Reader(nn.Module):
    """An LSTM of series [N, time, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 12, batch_first=True), nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.lstm(x)[0]
        result: torch.Tensor = self.head(states[:, -1])
        return result


def test_a_run_on_series_predicts_on_others_as_it_was_trained(tmp_path: Path) -> None:
    x, y = series(20, 3, True), np.arange(60) % 2
    run = ff.run(model=Reader(), data=(x, y), out=tmp_path / "run", **QUICK)
    data = run.assembly.data
    assert isinstance(data, ff.Data)
    check_standardized(data, x, True)
    again = ff.load(tmp_path / "run", model=Reader(), data=(x, y))
    assert isinstance(again.assembly.data, ff.Data) and again.assembly.data.mean == data.mean
    np.savez(tmp_path / "new.npz", x=x[:6] * 2, y=y[:6])
    alone = ff.load(tmp_path / "run", model=Reader())
    expected = run.evaluate(data=(x[:6] * 2, y[:6]))["static"]["full"]
    assert alone.evaluate(data=tmp_path / "new.npz")["static"]["full"] == expected


class Recurrent(nn.Module):
    """An LSTM of the number of channels that it is given, over the samples [N, time, channels]."""

    channels: ClassVar[list[int]] = []

    def __init__(self, channels: int, classes: int, last: bool = True) -> None:
        super().__init__()
        self.channels.append(channels)
        self.last = last
        self.rnn, self.head = nn.LSTM(channels, 8, batch_first=True), nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.rnn(x if self.last else x.transpose(1, 2))[0][:, -1])
        return out


@pytest.mark.parametrize(
    ("shape", "settings", "last", "channels"),
    [((24, 5), {}, True, 5), ((3, 17), {}, False, 3), ((6, 7), {"channels_last": True}, True, 7),
     ((9, 4), {"channels_last": False}, False, 9), ((24, 5), {"channels_last": "move"}, False, 5)],
)  # fmt: skip
@pytest.mark.parametrize("source", ["path", "memory"])
def test_a_class_gets_the_channels_of_series(
    shape: tuple[int, int], settings: dict[str, Any], last: bool, channels: int, source: str, tmp_path: Path
) -> None:
    x, y = samples(shape, "float32", 130), np.arange(130) % 2
    np.savez(tmp_path / "series.npz", x=x, y=y)
    data = {"path": str(tmp_path / "series.npz")} if source == "path" else {"name": (x, y)}
    Recurrent.channels.clear()
    table = {"data": {**data, **settings}, "model": {"name": Recurrent, "last": last}, "method": "heterofl"}
    facts = assemble(load_experiment(table)).data
    assert {*Recurrent.channels} == {channels} == {facts.channels}
    assert isinstance(facts, Data)
    node = {"name": "a", "facts": describe_data(facts), "examples": {"train": 3}, "budget": None, "tolerance": 0.1}
    assert parse_node_description(node).facts.channels == channels
