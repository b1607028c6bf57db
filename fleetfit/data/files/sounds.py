"""Read sounds as log-mel spectrograms, images of uint8.

The power spectrum of 25 ms windows every 10 ms is summed in triangular bands that are equally wide and half overlapping
on the mel scale of O'Shaughnessy, mel(f) = 2595 log10(1 + f / 700) ("HTK"), from 0 Hz to half the sampling rate. The
triangles have height 1 (they are not scaled to equal area as in Slaney's variant, whose bands differ by a constant each
in decibels). Power is relative to a sine of full scale, which has 0 dB in all bands together.

Decibels from -120 to 0 become 0..255 in steps of 0.47 dB; smaller differences are lost. Below -120 dB is only digital
silence, as the rounding to 16 bits alone makes more noise.
"""

import io
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetfit.data.image_reader import Origin, count_threads
from fleetfit.errors import DataError, import_optional

_FLOOR_DB = -120.0
_BATCH = 64  # number of sounds in memory

Sound = tuple[Callable[[], bytes], Origin]
"""A function that reads an encoded sound, and the sound's origin, for messages."""


@dataclass(frozen=True)
class Spectrogram:
    """The spectrogram of a sound.

    Attributes:
        rate: Samples per second.
        samples: Samples of a sound; shorter ones are padded with silence at the end, longer ones are cut.
        mels: Number of bands, the image's height.
        window: Samples of a window (Hann).
        hop: Samples from one window to the next.
    """

    rate: int
    samples: int
    mels: int
    window: int
    hop: int

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            DataError: A size is below 1, or there are too many bands.
        """
        if min(self.mels, self.window, self.hop) < 1 or max(self.window, self.hop) > self.samples:
            raise DataError(
                f"a spectrogram needs at least one band, and a window and a hop of 1 to {self.samples} samples; got "
                f"mels {self.mels}, window {self.window}, hop {self.hop}.",
                key="mels",
            )
        if self.bins > 8192:
            raise DataError(
                f"{self.mels} mel bands are too many: the lowest are narrower than a bin of the spectrum.", key="mels"
            )

    @property
    def frames(self) -> int:
        """The image's width; the first window is centred on the first sample."""
        return 1 + self.samples // self.hop

    @property
    def bins(self) -> int:
        """Length of the Fourier transform: a power of two of at least a window, with a bin in every band."""
        narrowest = mel_to_hertz(2 * hertz_to_mel(self.rate / 2) / (self.mels + 1))  # the first band's full width
        return int(2 ** math.ceil(math.log2(max(self.window, 2 * self.rate / narrowest))))

    def filters(self) -> Tensor:
        """Return each band's share of each bin's power, [mels, bins / 2 + 1].

        Band m rises from edge m to 1 at edge m + 1 and falls to 0 at edge m + 2, straight in hertz; the mels + 2 edges
        are equally far apart in mel.
        """
        top = hertz_to_mel(self.rate / 2)
        hertz = [mel_to_hertz(top * i / (self.mels + 1)) for i in range(self.mels + 2)]
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
            DataError: A sound cannot be decoded or has another sampling rate.
            MissingExtra: soundfile is not installed.
        """
        remaining, start = iter(sounds), 0
        with ThreadPoolExecutor(count_threads()) as pool:
            while batch := list(islice(remaining, _BATCH)):
                waves = torch.from_numpy(np.stack(list(pool.map(lambda sound: self._read_wave(*sound), batch))))
                target[start : start + len(batch)] = self.transform(waves).numpy()
                start += len(batch)

    def _read_wave(self, read_bytes: Callable[[], bytes], origin: Origin) -> NDArray[np.float32]:
        """Return a sound, mono and of `samples` samples."""
        soundfile = import_optional("soundfile", "audio", "Reading sounds")
        try:
            wave, rate = soundfile.read(io.BytesIO(read_bytes()), dtype="float32", always_2d=True, frames=self.samples)
        except (OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
            problem = f"{origin} cannot be decoded as a sound: {error}"
            raise DataError(problem, path=origin.path, row=origin.row) from error
        problem = ""
        if not np.isfinite(wave).all():
            problem = "has a sample that is not finite."
        elif rate != self.rate:
            problem = f"has {rate} samples per second, but {self.rate} are needed. Resample it."
        if problem:
            raise DataError(f"{origin} {problem}", path=origin.path, row=origin.row)
        padded = np.zeros(self.samples, dtype=np.float32)
        padded[: len(wave)] = wave.mean(1)
        return padded


def hertz_to_mel(hertz: float) -> float:
    """Return a frequency on the mel scale."""
    return 2595 * math.log10(1 + hertz / 700)


def mel_to_hertz(mel: float) -> float:
    """Return the frequency of a value on the mel scale."""
    return 700 * (10 ** (mel / 2595) - 1)
