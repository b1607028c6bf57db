"""Speech Commands: mel bands against a formula by hand, pictures against sums, layouts, speakers."""

import io
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises

from fleetfit.data import partition
from fleetfit.data.files import sounds
from fleetfit.data.files.sounds import Spectrogram
from fleetfit.data.sets.speech_commands import speech_commands
from fleetfit.errors import DataError, MissingExtra

soundfile = pytest.importorskip("soundfile")
RATE = 16_000
FORM = Spectrogram(RATE, RATE, 64, 400, 160)
REAL = Path(os.environ.get("FLEETFIT_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def tone(frequency: float, amplitude: float = 1.0, samples: int = RATE) -> np.ndarray:
    return (amplitude * np.sin(2 * np.pi * frequency * np.arange(samples) / RATE)).astype(np.float32)


def encode_wave(wave: np.ndarray, form: str = "WAV", rate: int = RATE) -> bytes:
    content = io.BytesIO()
    soundfile.write(content, np.rint(wave * 32767).astype(np.int16), rate, format=form, subtype="PCM_16")
    return content.getvalue()


# ---- bands and pictures -------------------------------------------------


def test_mel_scale_at_known_places() -> None:
    """2595 log10(1 + f / 700): 0 at 0 Hz, 2595 log10(2) = 781.17 at 700 Hz, and 1000 Hz has 999.99 by design."""
    assert sounds.hertz_to_mel(0) == 0
    assert sounds.hertz_to_mel(700) == pytest.approx(781.1728, abs=1e-3)
    assert sounds.hertz_to_mel(1000) == pytest.approx(999.9856, abs=1e-3)
    for frequency in (3.0, 440.0, 8000.0):
        assert sounds.mel_to_hertz(sounds.hertz_to_mel(frequency)) == pytest.approx(frequency)


@pytest.mark.parametrize("mels", [10, 40, 64, 80])
def test_bands_by_hand(mels: int) -> None:
    """Each weight from the two straight lines of its triangle, in plain Python."""
    form = Spectrogram(RATE, RATE, mels, 400, 160)
    filters = form.filters()
    assert filters.shape == (mels, form.bins // 2 + 1)
    top = 2595 * math.log10(1 + 8000 / 700)
    edges = [700 * (10 ** (top * i / (mels + 1) / 2595) - 1) for i in range(mels + 2)]
    for m in range(mels):
        for k in range(0, form.bins // 2 + 1, 3):
            f = k * RATE / form.bins
            expected = 0.0
            if edges[m] < f <= edges[m + 1]:
                expected = (f - edges[m]) / (edges[m + 1] - edges[m])
            elif edges[m + 1] < f < edges[m + 2]:
                expected = (edges[m + 2] - f) / (edges[m + 2] - edges[m + 1])
            assert float(filters[m, k]) == pytest.approx(expected, abs=1e-6)
    inside = slice(math.ceil(edges[1] / RATE * form.bins), math.floor(edges[-2] / RATE * form.bins))
    assert torch.allclose(filters[:, inside].sum(0), torch.ones(1))  # half overlapping triangles add up to 1
    assert (filters > 0).any(1).all()  # no band without a bin


def test_spectrogram_by_sums() -> None:
    """One frame from the definition: window, discrete Fourier transform, bands, decibels, 255 steps of 120 dB."""
    form = Spectrogram(RATE, RATE, 8, 400, 160)
    rng = np.random.default_rng(0)
    wave = (0.3 * rng.standard_normal(RATE)).astype(np.float32)
    picture = form.transform(torch.from_numpy(wave)[None])[0, 0]
    assert picture.shape == (8, 101) and picture.dtype == torch.uint8
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    padded = np.concatenate([np.zeros(200), wave, np.zeros(200)])
    for frame in (0, 37, 100):
        part = padded[160 * frame : 160 * frame + 400] * window
        angle = -2j * np.pi * np.outer(np.arange(form.bins // 2 + 1), np.arange(400)) / form.bins
        power = np.abs(np.exp(angle) @ part) ** 2 * 4 / (form.bins * (window**2).sum())
        decibel = 10 * np.log10(form.filters().numpy() @ power)
        expected = np.clip((decibel + 120) / 120 * 255, 0, 255)
        assert np.abs(picture[:, frame].numpy() - expected).max() <= 0.51


def test_a_tone_is_where_and_as_loud_as_it_should_be() -> None:
    """A sine of amplitude a at the middle of a band: 20 log10(a) dB there, but for what leaks into its neighbors."""
    middle = sounds.mel_to_hertz(sounds.hertz_to_mel(RATE / 2) * 41 / 65)  # band 40
    for amplitude in (1.0, 0.1):
        column = FORM.transform(torch.from_numpy(tone(middle, amplitude))[None])[0, 0, :, 50].float()
        assert int(column.argmax()) == 40
        decibel = float(column[40]) / 255 * 120 - 120
        assert 20 * math.log10(amplitude) - 1.5 < decibel < 20 * math.log10(amplitude) + 0.3
    assert FORM.transform(torch.zeros(1, RATE)).unique().tolist() == [0]


def test_sounds_are_padded_cut_and_mixed_to_one_channel() -> None:
    short, long = tone(500, 0.5, RATE // 2), tone(500, 0.5, 2 * RATE)
    stereo = np.stack([tone(500, 0.5), tone(500, 0.5)], 1)
    target = np.full((4, 1, 64, 101), 9, dtype=np.uint8)
    sounds = [*map(encode_wave, (short, long, stereo)), encode_wave(long, "FLAC")]
    FORM.read_into(target, [((lambda content=content: content), "there") for content in sounds])
    assert (target[0, 0, :, 53:] == 0).all() and (target[0, 0, :, :40] == target[1, 0, :, :40]).all()
    assert (target[1] == target[2]).all() and (target[1] == target[3]).all() and (target[1, 0, :, 60] > 0).any()


def test_too_many_bands_are_refused() -> None:
    with raises(DataError, key="n_mels"):
        Spectrogram(RATE, RATE, 2000, 400, 160)
    for sizes in ((0, 400, 160), (8, 0, 160), (8, 400, 0), (8, RATE + 1, 160)):
        with raises(DataError, key="n_mels"):
            Spectrogram(RATE, RATE, *sizes)


# ---- layouts -------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The layout of the archive: 3 words, 4 speakers with 2 sounds of each word; speaker c to validate, d to test."""
    place = tmp_path / "speech_commands"
    frequencies = iter(range(200, 7000, 100))
    for word in ("yes", "bed", "cat"):
        (place / word).mkdir(parents=True)
        for speaker in "dbca":
            for i in range(2):
                wave = tone(next(frequencies), 0.3, RATE if i else RATE // 2)
                suffix = "flac" if speaker == "b" else "wav"
                (place / word / f"{speaker}0_nohash_{i}.{suffix}").write_bytes(encode_wave(wave, suffix.upper()))
    (place / "_background_noise_").mkdir()
    (place / "_background_noise_" / "hum.wav").write_bytes(encode_wave(tone(50, 0.1, 3 * RATE)))
    lists = {split: [f"{w}/{s}_nohash_{i}.wav" for w in ("yes", "bed", "cat") for i in range(2)]
             for split, s in (("validation_list", "c0"), ("testing_list", "d0"))}  # fmt: skip
    for name, lines in lists.items():
        (place / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (place / "README.md").write_text("as in the archive")
    return place


def test_the_archive_s_layout(folder: Path) -> None:
    data = speech_commands(str(folder))
    assert data.x.shape == (24, 1, 64, 101) and data.x.dtype == torch.uint8
    assert data.class_names == ("bed", "cat", "yes") and data.classes == 3
    assert [len(data.split(s)) for s in ("train", "validation", "test")] == [12, 6, 6]
    assert data.groups is not None
    for split, speakers in (("train", {0, 1}), ("validation", {2}), ("test", {3})):
        assert set(data.groups[data.split(split)].tolist()) == speakers
    assert torch.bincount(data.y[data.split("train")]).tolist() == [4, 4, 4]
    expected = np.zeros((1, 1, 64, 101), dtype=np.uint8)
    content = (folder / "yes" / "a0_nohash_1.wav").read_bytes()
    FORM.read_into(expected, [(lambda: content, "there")])
    assert (data.x.numpy() == expected).all((1, 2, 3)).sum() == 1
    row = int((data.x.numpy() == expected).all((1, 2, 3)).argmax())
    assert data.y[row] == 2 and data.groups[row] == 0
    assert len(partition(data, "natural", None, 0)) == 2


def test_every_speaker_can_be_tested_on_its_own(folder: Path) -> None:
    data = speech_commands(str(folder), division="speakers", test=1 / 3, validation=0.25)
    assert data.groups is not None
    for split, share in (("test", 2), ("validation", 1), ("train", 3)):
        assert torch.bincount(data.groups[data.split(split)]).tolist() == [share] * 4
    assert [len(part["test"]) for part in partition(data, "natural", None, 0)] == [2] * 4


def test_sizes_of_spectrograms(folder: Path) -> None:
    data = speech_commands(str(folder), n_mels=20, window_ms=30.0, hop_ms=20.0, resize=32, augment="crop")
    assert data.x.shape == (24, 1, 20, 51) and data.sample_shape == (1, 32, 32)
    assert data.batch(torch.arange(3), torch.Generator().manual_seed(0))[0].shape == (3, 1, 32, 32)


def test_spectrograms_are_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = speech_commands(str(folder)).x
    with monkeypatch.context() as patch:
        patch.setattr(Spectrogram, "read_into", None)
        assert torch.equal(speech_commands(str(folder)).x, first)
    (folder / "bed" / "a0_nohash_0.wav").write_bytes(encode_wave(tone(3000)))
    assert not torch.equal(speech_commands(str(folder)).x, first)


def write_parquet(folder: Path, target: Path, write: Callable[..., Path]) -> Path:
    """The same sounds as Hugging Face has them, with the class of silence that has no speaker."""
    names = ["bed", "cat", "yes", "_silence_"]
    for split, speakers in (("train", "ab"), ("validation", "c"), ("test", "d")):
        rows: list[tuple[bytes | None, int, str | None]] = [
            (path.read_bytes(), names.index(path.parent.name), path.name[:2])
            for path in sorted(folder.glob("[a-z]*/*_nohash_*")) if path.name[0] in speakers
        ]  # fmt: skip
        rows.insert(1, (b"noise of another length", 3, None))
        content, labels, who = (list(column) for column in zip(*rows, strict=True))
        write(target / f"{split}.parquet", content, labels, image="audio", names=names, speaker_id=who)
    return target


def test_parquet_has_the_same_sounds(folder: Path, tmp_path: Path, write: Callable[..., Path]) -> None:
    pytest.importorskip("pyarrow")
    pair = [speech_commands(str(place)) for place in (folder, write_parquet(folder, tmp_path / "p", write))]
    assert torch.equal(pair[0].x, pair[1].x) and torch.equal(pair[0].y, pair[1].y)
    assert pair[0].class_names == pair[1].class_names
    assert pair[0].groups is not None and pair[1].groups is not None
    assert pair[0].groups.tolist() == pair[1].groups.tolist()
    for split in ("train", "validation", "test"):
        assert torch.equal(pair[0].split(split), pair[1].split(split))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"RIFF nothing", Expected(path="a0_nohash_0.wav")),
        (encode_wave(tone(500), rate=8000), Expected(8000, 16000, path="a0_nohash_0.wav")),
    ],
)
def test_a_bad_sound_is_named(folder: Path, content: bytes, expected: Expected) -> None:
    (folder / "bed" / "a0_nohash_0.wav").write_bytes(content)
    with raises(DataError, expected):
        speech_commands(str(folder))
    assert list(Path(os.environ["FLEETFIT_CACHE"]).iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"division": "own"}, Expected(key="division")),
        ({"resize": 0}, Expected(1, key="resize")),
        ({"n_mels": 0}, Expected(key="n_mels")),
    ],
)
def test_wrong_parameters(folder: Path, options: dict[str, Any], expected: Expected) -> None:
    with raises(DataError, expected):
        speech_commands(str(folder), **options)


def test_missing_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with raises(MissingExtra, extra="audio"):
        speech_commands(str(folder))


def test_missing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    with raises(DataError, "speech_commands", "hub = true", key="hub"):
        speech_commands()
    monkeypatch.setenv("FLEETFIT_DATA", str(tmp_path))
    assert len(speech_commands().x) == 24
    assert len(speech_commands("speech_commands").x) == 24


def test_three_words_of_179_speakers() -> None:
    pytest.importorskip("pyarrow")
    if not (REAL / "speech_commands_small" / "train.parquet").is_file():
        pytest.skip("no speech_commands_small: set FLEETFIT_DATA to the folder that holds it")
    data = speech_commands(str(REAL / "speech_commands_small"))
    assert data.x.shape == (652, 1, 64, 101) and data.class_names == ("bed", "cat", "happy")
    assert data.groups is not None and len(data.groups.unique()) == 179
    assert not set(data.groups[data.split("train")].tolist()) & set(data.groups[data.split("test")].tolist())
    x, _ = data.batch(torch.arange(652))
    assert abs(float(x.mean())) < 0.1 and 0.9 < float(x.std()) < 1.1
