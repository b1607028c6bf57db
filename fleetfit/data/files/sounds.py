"""Labeled sounds on disk as log-mel spectrograms, images of uint8: class folders, or a table of files.

Folders are `train/CLASS/*.wav` and so on, or just `CLASS/*.wav`. Sounds of devices are in `DEVICE/CLASS/*.wav`, or a
CSV file names the file, label and device of each (see `fleetfit.data.files.labeled`). Channels are averaged. PCM .wav
files need no further package; the package soundfile reads FLAC, Ogg and other .wav files.

The power spectrum of 25 ms windows every 10 ms is summed in triangular bands that are equally wide and half overlapping
on the mel scale of O'Shaughnessy, mel(f) = 2595 log10(1 + f / 700) ("HTK"), from 0 Hz to half the sampling rate. The
triangles have height 1 (they are not scaled to equal area as in Slaney's variant, whose bands differ by a constant each
in decibels). Power is relative to a sine of full scale, which has 0 dB in all bands together.

Decibels from -120 to 0 become 0..255 in steps of 0.47 dB; smaller differences are lost. Below -120 dB is only digital
silence, as the rounding to 16 bits alone makes more noise.
"""

import functools
import io
import itertools
import math
import statistics
import wave
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data import cache
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files import parquet
from fleetfit.data.files.folders import resolve_folder
from fleetfit.data.files.labeled import find_labeled_files, find_new_files, read_new_parquet
from fleetfit.data.image_reader import Origin, count_threads
from fleetfit.data.rows import make_new_data
from fleetfit.errors import DataError, MissingExtra, import_optional
from fleetfit.files import check_file, read_bytes

FACTS = Facts(source="folders of sounds, or a table of files")
SUFFIXES = (".wav", ".flac", ".ogg")
RATE = 16_000
WINDOW_MS = 25.0
HOP_MS = 10.0
"""Samples per second, and milliseconds of a window and a hop, of `sounds`."""
_COLUMNS, _LABEL = ("audio", "sound"), ("label", "labels")  # of Parquet files
_REMEDY = "Replace the sound by an intact one, or remove it."
_MAX_RATE = 1_000_000
_FLOOR_DB = -120.0
_BATCH = 64  # number of sounds of a second in memory
_UNREADABLE = (OSError, RuntimeError, TypeError, ValueError, MemoryError, EOFError, wave.Error)

Sound = tuple[Callable[[], bytes], Origin]
"""A function that reads an encoded sound, and the sound's origin, for messages."""


@dataclass(frozen=True)
class Spectrogram:
    """The spectrogram of a sound.

    Attributes:
        rate: Samples per second.
        samples: Samples of a sound; shorter ones are padded with silence at the end, longer ones are cut.
        n_mels: Number of bands, the image's height.
        window: Samples of a window (Hann).
        hop: Samples from one window to the next.
        resamples: Whether sounds of other sampling rates are resampled; else they are refused.
    """

    rate: int
    samples: int
    n_mels: int
    window: int
    hop: int
    resamples: bool = False

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DataError: A size is below 1, or there are too many bands.
        """
        if min(self.n_mels, self.window, self.hop) < 1 or max(self.window, self.hop) > self.samples:
            raise DataError(
                f"a spectrogram needs at least one band, and a window and a hop of 1 to {self.samples} samples; got "
                f"n_mels {self.n_mels}, window {self.window}, hop {self.hop}.",
                key="n_mels",
            )
        if self.bins > 8192:
            raise DataError(
                f"{self.n_mels} mel bands are too many: the lowest are narrower than a bin of the spectrum.",
                key="n_mels",
            )

    @property
    def frames(self) -> int:
        """The image's width; the first window is centered on the first sample."""
        return 1 + self.samples // self.hop

    @property
    def bins(self) -> int:
        """Length of the Fourier transform: a power of two of at least a window, with a bin in every band."""
        narrowest = mel_to_hertz(2 * hertz_to_mel(self.rate / 2) / (self.n_mels + 1))  # the first band's full width
        return int(2 ** math.ceil(math.log2(max(self.window, 2 * self.rate / narrowest))))

    def filters(self) -> Tensor:
        """Return each band's share of each bin's power, [mels, bins / 2 + 1].

        Band m rises from edge m to 1 at edge m + 1 and falls to 0 at edge m + 2, straight in hertz; the n_mels + 2
        edges are equally far apart in mel.
        """
        top = hertz_to_mel(self.rate / 2)
        hertz = [mel_to_hertz(top * i / (self.n_mels + 1)) for i in range(self.n_mels + 2)]
        edges = torch.tensor(hertz, dtype=torch.float64)
        bins = torch.arange(self.bins // 2 + 1, dtype=torch.float64) * (self.rate / self.bins)
        low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
        return torch.minimum(rising, falling).clamp(min=0).float()

    def transform(self, waves: Tensor) -> Tensor:
        """Return the spectrograms of sounds.

        Args:
            waves: float32 [B, samples] within -1..1.

        Returns:
            uint8 [B, 1, mels, frames]; low bands first.
        """
        window = torch.hann_window(self.window)
        spectrum = torch.stft(
            waves, self.bins, self.hop, self.window, window, center=True, pad_mode="constant", return_complex=True
        )
        power = torch.view_as_real(spectrum).square_().sum(-1)
        power *= 4 / (self.bins * float(window.square().sum()))  # by Parseval: a sine of full scale has 1 in all bins
        decibel = (self.filters() @ power).clamp_(min=1e-12).log10_().mul_(10)
        steps = (decibel - _FLOOR_DB).mul_(255 / -_FLOOR_DB).round_().clamp_(0, 255)
        return steps.to(torch.uint8).unsqueeze(1)

    def read_into(self, target: NDArray[np.uint8], sounds: Iterable[Sound]) -> None:
        """Decode sounds and write their spectrograms to an array [N, 1, mels, frames].

        Raises:
            DataError: A sound cannot be decoded, or has another sampling rate and `resamples` is not set.
            MissingExtra: soundfile is not installed, and a sound is not a PCM .wav file.
        """
        remaining, start = iter(sounds), 0
        size = min(_BATCH, max(1, _BATCH * RATE // self.samples))
        with ThreadPoolExecutor(count_threads()) as pool:
            while batch := list(islice(remaining, size)):
                waves = torch.from_numpy(np.stack(list(pool.map(lambda sound: self._read_wave(*sound), batch))))
                target[start : start + len(batch)] = self.transform(waves).numpy()
                start += len(batch)

    def _read_wave(self, read_bytes: Callable[[], bytes], origin: Origin) -> NDArray[np.float32]:
        """Return a sound, mono and of `samples` samples."""
        try:
            with _open_sound(io.BytesIO(read_bytes())) as file:
                rate = int(file.samplerate)
                frames = -(-self.samples * rate // self.rate) if self.resamples else self.samples
                sound = file.read(frames, dtype="float32", always_2d=True)
        except _UNREADABLE as error:
            problem = f"{origin} cannot be decoded as a sound: {error}. {_REMEDY}"
            raise DataError(problem, path=origin.path, row=origin.row) from None
        problem = ""
        if not np.isfinite(sound).all():
            problem = "has a sample that is not finite."
        elif rate != self.rate and not (self.resamples and 1 <= rate <= _MAX_RATE):
            problem = f"has {rate} samples per second, but {self.rate} are needed. Resample it."
        if problem:
            raise DataError(f"{origin} {problem}", path=origin.path, row=origin.row)
        mono = sound.mean(1)
        if rate != self.rate:
            mono = resample(mono, rate, self.rate)[: self.samples]
        padded = np.zeros(self.samples, dtype=np.float32)
        padded[: len(mono)] = mono
        return padded


class _PlainWave:
    """A PCM .wav file, read by the standard library in the form of `soundfile.SoundFile`."""

    def __init__(self, content: IO[bytes]) -> None:
        self._file = wave.open(content)  # noqa: SIM115
        self.samplerate, self.frames = self._file.getframerate(), self._file.getnframes()

    def __enter__(self) -> "_PlainWave":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, frames: int, dtype: str, always_2d: bool) -> NDArray[np.float32]:
        """Return samples within -1..1, [frames, channels]."""
        channels, width = self._file.getnchannels(), self._file.getsampwidth()
        content = np.frombuffer(self._file.readframes(frames), dtype=np.uint8)
        steps = content[: len(content) // (channels * width) * channels * width].reshape(-1, channels, width)
        padded = np.zeros((*steps.shape[:2], 4), dtype=np.uint8)
        padded[..., 4 - width :] = steps if width > 1 else steps ^ 128  # 8 bits have no sign
        return (padded.view("<i4")[..., 0] / 2**31).astype(np.float32)


def _open_sound(content: IO[bytes]) -> Any:
    """Open a sound as a `soundfile.SoundFile`, or a `_PlainWave` where soundfile is not installed."""
    try:
        return import_optional("soundfile", "audio", "Reading sounds").SoundFile(content)
    except MissingExtra:
        try:
            return _PlainWave(content)
        except (wave.Error, EOFError):
            pass
        raise


def resample(sound: NDArray[np.float32], rate: int, target: int) -> NDArray[np.float32]:
    """Return a sound [n] at another sampling rate, without the frequencies from half the lower rate on.

    The spectrum is cut or continued with zeros; silence before and after the sound keeps its ends apart.
    """
    seconds = len(sound) // rate + 2
    spectrum = np.fft.rfft(sound, seconds * rate)[: seconds * min(rate, target) // 2]
    samples = np.fft.irfft(spectrum, seconds * target) * (target / rate)
    return samples[: -(-len(sound) * target // rate)].astype(np.float32)


def hertz_to_mel(hertz: float) -> float:
    """Return a frequency on the mel scale."""
    return 2595 * math.log10(1 + hertz / 700)


def mel_to_hertz(mel: float) -> float:
    """Return the frequency of a value on the mel scale."""
    return 700 * (10 ** (mel / 2595) - 1)


# ---- a set of labeled sounds ----------------------------------------------------------------------------------------


def sounds(
    folder: str,
    label: str | None = None,
    groups: str | None = None,
    sample_rate: int = RATE,
    seconds: float | None = None,
    n_mels: int = 64,
    window_ms: float = WINDOW_MS,
    hop_ms: float = HOP_MS,
    validation: float = 0.1,
    test: float = 0.2,
    seed: int = 0,
    augment: str | None = None,
    mean: tuple[float, ...] = (0.39,),
    std: tuple[float, ...] = (0.18,),
) -> Data:
    """Return labeled sounds as spectrograms [N, 1, mels, frames], uint8 and stored in the cache.

    Shorter sounds are padded with silence at the end, longer ones are cut. Missing splits are held out of the training
    sounds: in proportion for each label, or for each group if there are groups.

    Args:
        folder: A folder of class folders, a table of files, or the folder of one. A relative path that does not exist
            is looked up in the folder FLEETFIT_DATA.
        label: Column of the labels in a table of files; None: detected.
        groups: Column of the devices in such a table; None: detected. Folders of devices are groups.
        sample_rate: Samples per second. Sounds of other rates are resampled. `data.path` sets the most common rate of
            the training sounds.
        seconds: Length of a sound, rounded to whole hops; None: the most common one of the training sounds.
        n_mels: Bands, the height of a spectrogram.
        window_ms: Length of a window in milliseconds.
        hop_ms: Milliseconds from one window to the next.
        validation: Share of the training sounds to hold out, if there is no validation set.
        test: Share of the sounds to hold out as the test set, if there is only a training set.
        seed: Seed of held out samples.
        augment: Augmentation of training batches, such as "crop", which moves them in time and pitch; None: nothing.
        mean: Of the spectrogram's values in [0, 1].
        std: Likewise.

    Raises:
        DataError: A file, a column or a sound is missing or wrong, or a parameter is out of range.
        MissingExtra: soundfile is not installed, and a sound is not a PCM .wav file.
    """
    path = resolve_folder(folder)
    name = path.resolve().stem if path.is_file() else path.resolve().name
    if not 1 <= sample_rate <= _MAX_RATE:
        raise DataError(
            f"{name}: sample_rate must be 1 to {_MAX_RATE:,} samples per second, got {sample_rate}.", key="sample_rate"
        )
    if seconds is not None and not 0 < seconds < math.inf:
        raise DataError(f"{name}: seconds must be above 0, got {seconds}.", key="seconds")
    listed = find_labeled_files(name, path, SUFFIXES, label, groups)
    if listed is None:
        raise DataError(
            f"{path} has no labeled sounds. Expected CLASS/*.wav (or {', '.join(SUFFIXES[1:])}), train/CLASS/*.wav, "
            "DEVICE/CLASS/*.wav, or a CSV file of file and label beside the sounds.",
            path=path,
        )
    paths = listed.paths
    headers = [read_header(file) for file in paths[: listed.sizes["train"]]]
    window, hop = round(window_ms * sample_rate / 1000), round(hop_ms * sample_rate / 1000)
    lengths = [frames * sample_rate / own for frames, own in headers]
    hops = [round(length / max(1, hop)) for length in ([seconds * sample_rate] if seconds is not None else lengths)]
    count = max(statistics.median_high(statistics.multimode(hops)), -(-window // max(1, hop)), 1)
    form = Spectrogram(sample_rate, count * hop, n_mels, window, hop, resamples=True)
    return replace(listed, notes=(*listed.notes, _describe_lengths(name, form, headers, lengths))).make_data(
        name,
        load_spectrograms(name, paths, len(paths), iter_files(paths), form),
        listed.divide(name, validation, test, seed),
        mean=mean,
        std=std,
        augment=augment,
    )


def _describe_lengths(
    name: str, form: Spectrogram, headers: Sequence[tuple[int, int]], lengths: Sequence[float]
) -> str:
    """Describe to which length and sampling rate sounds are brought, and how many were so already."""
    shorter = sum(length < form.samples for length in lengths)
    longer = sum(length > form.samples for length in lengths)
    others = Counter(rate for _, rate in headers if rate != form.rate)
    rates = "".join(f" {count} of {rate} samples per second are resampled." for rate, count in sorted(others.items()))
    return (
        f"{name}: sounds of {form.samples / form.rate:g} s (data.seconds) at {form.rate} samples per second "
        f"(data.sample_rate). Of {len(headers)} training sounds {shorter} are padded with silence and {longer} "
        f"cut.{rates}"
    )


def read_header(file: Path) -> tuple[int, int]:
    """Return the number of samples of a sound, of each channel, and its samples per second.

    Raises:
        DataError: The file cannot be read or decoded.
        MissingExtra: soundfile is not installed, and the file is not a PCM .wav file.
    """
    check_file(file, DataError)
    try:
        with file.open("rb") as content, _open_sound(content) as sound:
            frames, rate = int(sound.frames), int(sound.samplerate)
    except _UNREADABLE as error:
        raise DataError(f"{file} cannot be decoded as a sound: {error}. {_REMEDY}", path=file) from None
    if frames < 1 or not 1 <= rate <= _MAX_RATE:
        raise DataError(f"{file} has {frames} samples at a rate of {rate} per second. Remove it.", path=file)
    return frames, rate


def iter_files(paths: Iterable[Path]) -> Iterator[Sound]:
    """Yield the sounds of files."""
    return ((functools.partial(read_bytes, file, DataError), Origin(file)) for file in paths)


def iter_rows(tables: Iterable[parquet.File], column: str) -> Iterator[Sound]:
    """Yield the sounds of a column of Parquet files."""
    for table in tables:
        for row, content in enumerate(itertools.chain.from_iterable(table.images(column, "sound"))):
            yield functools.partial(bytes, content), Origin(table.path, row)


def load_spectrograms(
    name: str, sources: Sequence[Path], count: int, sounds: Iterable[Sound], form: Spectrogram, column: str = ""
) -> NDArray[np.uint8]:
    """Return the spectrograms of sounds, uint8 [N, 1, mels, frames], from the cache if they are in it.

    Args:
        name: The set's name.
        sources: The files of the sounds.
        count: Number of sounds.
        sounds: The sounds, read if they are not in the cache.
        form: What a spectrogram is like.
        column: The column of the sounds in their files; "" if each is a file.

    Raises:
        DataError: As `Spectrogram.read_into`.
    """

    def build(allocate: cache.Allocate) -> cache.Array:
        array = allocate((count, 1, form.n_mels, form.frames))
        form.read_into(array, sounds)
        return array

    key = ["sounds", form.rate, form.samples, form.n_mels, form.window, form.hop, column, count]
    return cache.load_array(cache.make_key(name, sources, key), count, build)


def compute_seconds(frames: int, keys: Mapping[str, Any]) -> float:
    """Return the length of sounds that have a number of frames with some keys of `sounds`."""
    rate = keys.get("sample_rate", RATE)
    return (frames - 1) * round(keys.get("hop_ms", HOP_MS) * rate / 1000) / rate


def prepare_sounds(path: Path, facts: Data, settings: Mapping[str, Any], halves: bool = False) -> Data | None:
    """Return new sounds of a file, a folder, a table of files or Parquet as spectrograms (see `transform.KINDS`)."""
    listed = find_new_files(path, SUFFIXES, facts, settings.get("label"))
    tables = None if listed else read_new_parquet(path, facts, (settings["label"],) if "label" in settings else _LABEL)
    if listed is None and tables is None:
        return None
    rate = settings.get("sample_rate", RATE)
    window, hop = (
        round(settings.get(f"{key}_ms", usual) * rate / 1000) for key, usual in (("window", WINDOW_MS), ("hop", HOP_MS))
    )
    mels, frames = facts.x.shape[2:]
    form = Spectrogram(rate, (frames - 1) * hop, mels, window, hop, resamples=True)
    name = path.resolve().name
    if listed is None:
        assert tables is not None
        rows, y = tables
        column = rows[0].find_bytes_column(None, _COLUMNS, "sound")
        sources, count = [table.path for table in rows], sum(table.rows for table in rows)
        x = load_spectrograms(name, sources, count, iter_rows(rows, column), form, column)
        return make_new_data(facts, name, x, y, halves)
    x = load_spectrograms(name, listed.paths, len(listed.paths), iter_files(listed.paths), form)
    return make_new_data(facts, name, x, listed.y, halves, notes=listed.notes, file_names=listed.file_names)
