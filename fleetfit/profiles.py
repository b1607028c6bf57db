"""Device profiles: training speed, link and memory of kinds of devices, each figure with its source.

Training speed is in multiply-adds per second, in fp32, as training reaches it, not the peak of a data sheet. Without a
measurement of training it is a peak times an assumed efficiency of `EFFICIENCY`: kernels of small batches and of the
backward pass stay far below the peak (a phone's processor reaches about 0.14 of its own). Bytes are powers of ten.

Links, in bits per second: the Speedtest Global Index of Ookla for September 2020, global means. Mobile networks: 35.96
Mbit/s down, 11.22 up, 40 ms. Fixed broadband: 85.73 Mbit/s down, 45.74 up, 21 ms. Assumed: boards and laptops have
fixed broadband, and a round's handshakes take one latency.

The figures are for simulation and have the right order of magnitude. For a measured device write your own:
`profile = { multiply_adds_per_s = 1e9, ... }`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EFFICIENCY = 0.25
"""Assumed share of a peak that training reaches, without a measurement."""


@dataclass(frozen=True)
class DeviceProfile:
    """A kind of device.

    Attributes:
        multiply_adds_per_s: Of training, effective, in fp32.
        down_bytes_per_s: From the server to the device.
        up_bytes_per_s: From the device to the server.
        latency_s: Seconds of a round before anything is sent.
        memory_bytes: Of the whole device; for information only. A budget of memory is a `budget`.
        what: The device in words.
        source: Where speed and memory come from.
    """

    multiply_adds_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float = 0.0
    memory_bytes: float | None = None
    what: str = ""
    source: str = ""


_BROADBAND = (85.73e6 / 8, 45.74e6 / 8, 0.021)
_MOBILE = (35.96e6 / 8, 11.22e6 / 8, 0.040)

PROFILES: Mapping[str, DeviceProfile] = {
    "raspberry-pi-4b": DeviceProfile(
        4e9, *_BROADBAND, 2e9,
        "Raspberry Pi 4B, four Cortex-A72 at 1.5 GHz, 2 GB",
        "speed: 8 GFLOP/s of HPL in fp64 (B. Feiereisen, Benchmarking the Raspberry Pi 4, 2022); assumed: twice that "
        "in fp32, and half of it in training; memory: AdaptiveFL's test bed (Table 5)",
    ),
    "jetson-nano": DeviceProfile(
        EFFICIENCY * 235.8e9 / 2, *_BROADBAND, 4e9,
        "Jetson Nano, 128-core Maxwell GPU, 4 GB",
        "speed: 472 GFLOP/s in fp16, so 235.8 in fp32 (NVIDIA, Jetson Nano data sheet), times 0.25, assumed; memory: "
        "the same data sheet",
    ),
    "jetson-xavier-agx": DeviceProfile(
        EFFICIENCY * 512 * 1.377e9, *_BROADBAND, 32e9,
        "Jetson AGX Xavier, 512-core Volta GPU, 32 GB",
        "speed: 512 cores at 1.377 GHz, one multiply-add a cycle each (NVIDIA, Jetson AGX Xavier data sheet), times "
        "0.25, assumed; tensor cores do not take fp32; memory: AdaptiveFL's test bed (Table 5)",
    ),
    "phone": DeviceProfile(
        22.5e9 / 2, *_MOBILE, 6e9,
        "phone of 2019 to 2021, Snapdragon 8 series processor, 6 GB",
        "speed: 15 to 30 GFLOP/s in training on the processor (Das et al., arXiv 2202.10100, 2022), the middle; a "
        "Snapdragon 855 has a peak of about 160 by its clocks; memory: assumed",
    ),
    "laptop": DeviceProfile(
        EFFICIENCY * 4 * 1.6e9 * 16, *_BROADBAND, 8e9,
        "laptop, Core i5-8250U, four cores at 1.6 GHz, 8 GB",
        "speed: four cores at their base frequency of 1.6 GHz (Intel ARK), two AVX2 units of 8 multiply-adds a cycle "
        "each, times 0.25, assumed; memory: assumed",
    ),
}  # fmt: skip
"""The profiles that come with FleetFit, by the name that a run file gives them."""
