"""Sounds of a user's own: spectrograms against NumPy, folders, tables, lengths, rates, and new sounds."""

import csv
import math
import os
import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from support import Expected, raises, run_verb

import fleetfit as ff
from fleetfit.api.inference import load_samples
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.data import Data
from fleetfit.data.files import sounds as module
from fleetfit.errors import ConfigError, DataError, MissingExtra

RATE = 8000
DEVICES, CLASSES, EACH = ("mic-a", "mic-b", "mic-c"), ("high", "low"), 10
Row = tuple[str, str, int]
"""Device, class and frequency of a tone."""
ROWS: list[Row] = [(device, kind, (2400 if kind == "high" else 400) + 40 * i + 400 * d)
                   for d, device in enumerate(DEVICES) for kind in CLASSES for i in range(EACH)]  # fmt: skip


def make_tone(frequency: float, rate: int = RATE, seconds: float = 0.2) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


def write_wave(path: Path, samples: np.ndarray, rate: int = RATE, width: int = 2) -> None:
    """Write samples within -1..1, [n] or [n, channels], as integers of some bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = np.rint(samples * (2 ** (8 * width - 1) - 1)).astype("<i8") + (128 if width == 1 else 0)
    with wave.open(str(path), "wb") as file:
        file.setparams((1 if samples.ndim == 1 else samples.shape[1], width, rate, 0, "NONE", ""))
        file.writeframes(np.ascontiguousarray(steps).view(np.uint8).reshape(-1, 8)[:, :width].tobytes())


def compute_spectrogram(samples: np.ndarray, rate: int, mels: int = 64, hop: int = 0) -> np.ndarray:
    """Return decibels in steps of 120 / 255, [mels, frames]: windows of 25 ms every 10 ms, triangles on HTK mel."""
    window, hop = round(0.025 * rate), hop or round(0.01 * rate)
    hertz = 700 * (10 ** (2595 * math.log10(1 + rate / 1400) * np.arange(mels + 2) / (mels + 1) / 2595) - 1)
    size = 2 ** math.ceil(math.log2(max(window, 2 * rate / hertz[2])))
    hann = np.zeros(size)
    hann[(size - window) // 2 :][:window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    padded = np.pad(samples, size // 2)
    starts = range(0, len(samples) + 1, hop)
    power = np.stack([np.abs(np.fft.rfft(padded[i : i + size] * hann)) ** 2 for i in starts], axis=1)
    power *= 4 / (size * (hann**2).sum())
    bins = np.arange(size // 2 + 1) * rate / size
    bands = [np.interp(bins, hertz[m : m + 3], [0, 1, 0]) for m in range(mels)]
    return np.clip((10 * np.log10(np.maximum(bands @ power, 1e-12)) + 120) * 255 / 120, 0, 255)


def load(path: Path, **keys: Any) -> tuple[Data, str]:
    """Return the data at a path, and the default kind of their partition."""
    experiment = load_experiment({"data": {"path": str(path), **keys}})
    assert experiment.data.name == "sounds"
    return build_data(experiment.data), experiment.data.partition.kind


def check_rows(data: Data, rows: Sequence[Row] = ROWS) -> None:
    """Compare the spectrogram of each sample with that of the tone of its class and device."""
    assert data.groups is not None
    devices = sorted({device for device, _, _ in rows})
    expected = {(devices.index(device), kind, np.rint(compute_spectrogram(make_tone(frequency), RATE))[:, 10].argmax())
                for device, kind, frequency in rows}  # fmt: skip
    pictures = data.x.numpy()  # type: ignore[union-attr]
    sounds = {(group, data.class_names[y], picture[0, :, 10].argmax())
              for group, y, picture in zip(data.groups.tolist(), data.y.tolist(), pictures, strict=True)}  # fmt: skip
    assert len(data.y) == len(rows) and sounds == expected


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050])
def test_a_spectrogram_is_that_of_numpy(rate: int, tmp_path: Path) -> None:
    """Two channels are averaged, and the rate of the sounds is kept."""
    rng = np.random.default_rng(rate)
    clips = [rng.uniform(-0.8, 0.8, (round(0.3 * rate), 2)) for _ in range(6)]
    for number, clip in enumerate(clips):
        write_wave(tmp_path / "noise" / "ab"[number % 2] / f"{number}.WAV", clip, rate)
    data, _ = load(tmp_path / "noise")
    hop = round(0.01 * rate)
    length = round(len(clips[0]) / hop) * hop
    for name, number in zip(torch.as_tensor(data.x), (0, 2, 4, 1, 3, 5), strict=True):
        mono = np.rint(clips[number] * 32767).mean(1) / 32768
        expected = compute_spectrogram(np.pad(mono, (0, hop))[:length], rate)
        assert name.shape == (1, *expected.shape) and np.abs(name[0].numpy() - expected).max() < 0.52


@pytest.mark.parametrize("splits", [("",), ("train", "test"), ("train", "dev", "test")])
def test_folders_of_devices(splits: Sequence[str], tmp_path: Path) -> None:
    for number, (device, kind, frequency) in enumerate(ROWS):
        path = tmp_path / "hall" / splits[number % len(splits)] / device / kind / f"{frequency}.wav"
        write_wave(path, make_tone(frequency))
    data, partition = load(tmp_path / "hall")
    check_rows(data)
    assert partition == "natural" and len(data.split("test")) == (20 if splits[-1] and len(splits) == 3 else
                                                                  30 if splits[-1] else 12)  # fmt: skip


def test_folders_of_classes_are_no_devices(tmp_path: Path) -> None:
    for _, kind, frequency in ROWS:
        write_wave(tmp_path / "hall" / kind / f"{frequency}.wav", make_tone(frequency))
    data, partition = load(tmp_path / "hall")
    assert data.groups is None and partition == "dirichlet" and data.class_names == CLASSES


@pytest.mark.parametrize("form", ["folder", "csv", "tsv", "splits", "other names", "stems"])
def test_a_table_of_file_label_and_device(form: str, tmp_path: Path) -> None:
    names = ["clip", "what", "room"] if form == "other names" else ["file", "label", "device"]
    cells = []
    for device, kind, frequency in ROWS:
        write_wave(tmp_path / "flat" / "clips" / f"{device}_{frequency}.wav", make_tone(frequency))
        cells.append((f"{device}_{frequency}" + (".wav" if form != "stems" else ""), kind, device))
    frame, root = pandas.DataFrame(cells, columns=names), tmp_path / "flat"
    if form == "splits":
        frame[::2].to_csv(root / "train.csv", index=False)
        frame[1::2].to_csv(root / "test.csv", index=False)
    else:
        frame.to_csv(root / f"i.{'tsv' if form == 'tsv' else 'csv'}", index=False, sep="\t" if form == "tsv" else ",")
    keys = {"label": "what", "groups": "room"} if form == "other names" else {}
    data, partition = load(root / f"i.{form}" if form in ("csv", "tsv") else root, **keys)
    check_rows(data)
    assert partition == "natural" and (form != "splits" or len(data.split("test")) == 30)


@pytest.mark.parametrize(("seconds", "length"), [(None, 0.3), (0.1, 0.1), (0.52, 0.52)])
def test_sounds_get_one_length(seconds: float | None, length: float, tmp_path: Path) -> None:
    """The most common length, or that of the key. What is added is silence, and a note counts what is changed."""
    lengths = [0.3, 0.3, 0.3, 0.2, 0.2, 0.5, 0.6, 0.9, 0.3, 0.1]
    for number, own in enumerate(lengths):
        write_wave(tmp_path / "x" / "train" / "ab"[number % 2] / f"{number}.wav", make_tone(1000, seconds=own))
        write_wave(tmp_path / "x" / "test" / "ab"[number % 2] / f"{number}.wav", make_tone(1000, seconds=1.0))
    data, _ = load(tmp_path / "x", **({} if seconds is None else {"seconds": seconds}))
    assert data.x.shape == (20, 1, 64, 1 + round(length * 100))
    shorter, longer = sum(own < length for own in lengths), sum(own > length for own in lengths)
    assert any(f" {shorter} are" in note and f" {longer} cut" in note for note in data.notes)
    order = [*lengths[::2], *lengths[1::2]]
    for own, picture in zip(order, data.x[:10, 0].numpy(), strict=True):  # type: ignore[index]
        loud = int((picture.max(0) > 0).sum())
        assert abs(loud - min(own, length) * 100) <= 3


@pytest.mark.parametrize(("rate", "target"), [(44_100, 16_000), (8000, 16_000), (48_000, 8000), (11_025, 22_050)])
def test_resampled_tones_are_the_tones(rate: int, target: int) -> None:
    """By arithmetic: a sine at another rate, away from its ends; one that does not fit is gone."""
    for frequency in (250.0, 1000.0, 3100.0):
        sound = make_tone(frequency, rate, 1.0).astype(np.float32)
        expected = make_tone(frequency, target, 1.0)
        result = module.resample(sound, rate, target)
        assert result.shape == expected.shape
        assert np.abs(result - expected)[target // 10 : -target // 10].max() < 3e-3
    if target < rate:
        above = module.resample(make_tone(0.6 * target, rate, 1.0).astype(np.float32), rate, target)
        assert np.abs(above[target // 10 : -target // 10]).max() < 3e-3


def test_the_most_common_rate_is_that_of_all(tmp_path: Path) -> None:
    for number, rate in enumerate([22_050] * 6 + [44_100] * 4 + [16_000]):
        write_wave(tmp_path / "x" / "ab"[number % 2] / f"{number:02}.wav", make_tone(2000, rate, 0.4), rate)
    experiment = load_experiment({"data": {"path": str(tmp_path / "x")}})
    assert experiment.data.settings["sample_rate"] == 22_050
    data = build_data(experiment.data)
    assert all(any(text in note for note in data.notes) for text in ("4 of 44100", "1 of 16000"))
    loudest = data.x[:, 0, :, 20].argmax(1)  # type: ignore[index]
    assert loudest.unique().numel() == 1
    assert load(tmp_path / "x", sample_rate=16_000)[0].x.shape[-1] == 41


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_plain_waves_need_no_extra(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pictures as soundfile's, of any number of bytes and channels."""
    pytest.importorskip("soundfile")
    rng = np.random.default_rng(width)
    for number in range(6):
        write_wave(tmp_path / "x" / "ab"[number % 2] / f"{number}.wav", rng.uniform(-1, 1, (2400, 2)), width=width)
    expected = torch.as_tensor(load(tmp_path / "x")[0].x).clone()
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "other"))
    assert torch.equal(torch.as_tensor(load(tmp_path / "x")[0].x), expected)


@pytest.mark.parametrize(("suffix", "subtype"), [("flac", "PCM_16"), ("ogg", "VORBIS"), ("wav", "FLOAT")])
def test_other_formats_need_the_extra(
    suffix: str, subtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soundfile = pytest.importorskip("soundfile")
    for number in range(6):
        path = tmp_path / "x" / "ab"[number % 2] / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, make_tone(1500, seconds=0.5), RATE, subtype=subtype)
    picture = torch.as_tensor(load(tmp_path / "x")[0].x)[0, 0, :, 25]
    assert picture.argmax() == compute_spectrogram(make_tone(1500, seconds=0.5), RATE)[:, 25].argmax()
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with raises(MissingExtra, extra="audio"):
        load(tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"content": b"RIFF nothing"}, Expected(path="3.wav")),
        ({"content": b""}, Expected(path="3.wav")),
        ({"samples": np.zeros(0)}, Expected(path="3.wav")),
        ({"sample_rate": 0}, Expected(0, key="sample_rate")),
        ({"seconds": -1.0}, Expected(-1.0, key="seconds")),
        ({"window_ms": 0.0}, Expected(key="n_mels")),
        ({"hop_ms": 0.0}, Expected(key="n_mels")),
        ({"groups": "device"}, Expected(key="groups")),
    ],
)
def test_wrong_updates_are_named(change: dict[str, Any], expected: Expected, tmp_path: Path) -> None:
    for number in range(6):
        write_wave(tmp_path / "x" / "ab"[number % 2] / f"{number}.wav", make_tone(500))
    if "content" in change:
        (tmp_path / "x" / "b" / "3.wav").write_bytes(change["content"])
    if "samples" in change:
        write_wave(tmp_path / "x" / "b" / "3.wav", change["samples"])
    keys = {key: value for key, value in change.items() if key not in ("content", "samples")}
    with raises(DataError, expected):
        load(tmp_path / "x", **keys)


def test_sounds_without_labels_are_refused(tmp_path: Path) -> None:
    write_wave(tmp_path / "x" / "a.wav", make_tone(500))
    with raises(DataError, path=tmp_path / "x"):
        load_experiment({"data": {"path": str(tmp_path / "x")}})
    with raises(DataError, path=tmp_path / "x"):
        build_data(load_experiment({"data": {"name": "sounds", "folder": str(tmp_path / "x")}}).data)


# ---- new sounds ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    folder = tmp_path_factory.mktemp("sounds")
    cells = []
    for device, kind, frequency in ROWS:
        write_wave(folder / "hall" / f"{device}_{frequency}.wav", make_tone(frequency))
        cells.append((f"{device}_{frequency}.wav", kind, device))
    pandas.DataFrame(cells, columns=["file", "label", "device"]).to_csv(folder / "hall" / "index.csv", index=False)
    data = {"path": str(folder / "hall"), "n_mels": 24, "hop_ms": 12.5}
    return ff.run(data=data, rounds=2, local={"epochs": 3}, out=folder / "run", progress=False)


@pytest.mark.parametrize("form", ["flat", "one file", "table", "table of a folder", "classes", "devices"])
def test_new_sounds_are_read_like_the_training_sounds(form: str, trained: ff.Run, tmp_path: Path) -> None:
    """Sounds of another rate and length give the pictures that NumPy makes of the tones in the training form."""
    assert len(trained.assembly.federation.clients) == len(DEVICES)
    rows = [("dawn", "high", 2600), ("dusk", "low", 500), ("dusk", "high", 3000)][: 1 if form == "one file" else 3]
    folders = {"classes": "{1}", "devices": "{0}/{1}"}.get(form, "")
    names = [f"{folders.format(*row)}/{row[0]}{row[2]}.wav".lstrip("/") for row in rows]
    for name, row in zip(names, rows, strict=True):
        write_wave(tmp_path / "new" / name, make_tone(row[2], 16_000, 0.4), 16_000)
    if form.startswith("table"):
        cells = [(name, row[1]) for name, row in zip(names, rows, strict=True)]
        pandas.DataFrame(cells, columns=["file", "label"]).to_csv(tmp_path / "new" / "more.csv", index=False)
    path = {"table": tmp_path / "new" / "more.csv", "one file": tmp_path / "new" / names[0]}.get(form, tmp_path / "new")
    run_verb("predict", trained.folder, "--data", path, "--out", tmp_path / "p.csv", code=0)
    with (tmp_path / "p.csv").open() as file:
        predictions = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert set(predictions) == {Path(name).name for name in names}
    data = load_samples(trained, str(path))
    assert data.file_names is not None
    pictures = {
        Path(os.fsdecode(name)).name: x[0].numpy()
        for name, x in zip(data.file_names, torch.as_tensor(data.x), strict=True)
    }
    for name, row in zip(names, rows, strict=True):
        expected = compute_spectrogram(make_tone(row[2]), RATE, mels=24, hop=100)[:, 2:-2]
        difference = np.abs(pictures[Path(name).name][:, 2:-2] - expected)[expected > 160]
        assert pictures[Path(name).name].shape == (24, 17) and len(difference) > 10 and difference.max() < 2
    if form in ("flat", "one file"):
        assert "label" not in predictions[names[0]]
        with raises(ConfigError, key="data"):
            trained.evaluate(data=path)
        return
    assert [predictions[Path(name).name]["label"] for name in names] == [row[1] for row in rows]
    assert trained.evaluate(data=path)["static"]["samples"] == 3


def test_sounds_of_parquet_files_are_those_of_the_folder(trained: ff.Run, tmp_path: Path) -> None:
    """In a column of any name, as bytes or as the structure of Hugging Face, in one file or in several."""
    for number, frequency in enumerate((500, 2600, 3000)):
        write_wave(tmp_path / "new" / f"{number}.wav", make_tone(frequency, 16_000, 0.4), 16_000)
    contents = [path.read_bytes() for path in sorted((tmp_path / "new").iterdir())]
    structures = [{"bytes": content, "path": None} for content in contents]
    labels = ["low", "high", "high"]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for part in (0, 1):
        rows = slice(2 * part, 2 * part + 2)
        table = pandas.DataFrame({"number": range(3), "audio": structures})[rows]
        table.to_parquet(tmp_path / "hub" / "data" / f"test-0000{part}-of-00002.parquet", index=False)
    for name, columns in {"audio": {"audio": structures}, "other": {"clip": contents, "length": [1, 2, 3]},
                          "labeled": {"audio": structures, "label": labels}}.items():  # fmt: skip
        pandas.DataFrame(columns).to_parquet(tmp_path / f"{name}.parquet", index=False)
    expected = trained.predict(tmp_path / "new")
    for name in ("audio.parquet", "other.parquet", "labeled.parquet", "hub"):
        result = trained.predict(tmp_path / name)
        np.testing.assert_allclose(result.probabilities, expected.probabilities, atol=1e-6, err_msg=name)
        assert result.truth == (labels if name == "labeled.parquet" else None)
    run_verb("predict", trained.folder, "--data", tmp_path / "audio.parquet", "--out", tmp_path / "p.csv", code=0)
    assert pandas.read_csv(tmp_path / "p.csv")["prediction"].tolist() == expected.labels
    pandas.DataFrame({"audio": [*contents[:2], b"no sound"]}).to_parquet(tmp_path / "damaged.parquet", index=False)
    pandas.DataFrame({"audio": [1.0, 2.0]}).to_parquet(tmp_path / "numbers.parquet", index=False)
    for name in ("damaged", "numbers"):
        with raises(DataError, path=tmp_path / f"{name}.parquet"):
            trained.predict(tmp_path / f"{name}.parquet")
