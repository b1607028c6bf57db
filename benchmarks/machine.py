"""What a figure was measured on, and how busy others kept the machine meanwhile."""

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from fleetfit.machine import available_cores

PACKAGES = ("torch", "numpy", "ray", "flwr", "pfl")


def processor() -> str:
    """Return the processor's name, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def described() -> str:
    """Return processor, cores and versions in a line."""
    import torch

    return (
        f"{available_cores()} of {psutil.cpu_count()} cores of {processor()} "
        f"({torch.backends.cpu.get_cpu_capability()}), "
        f"{platform.system()}, Python {sys.version.split()[0]}, {', '.join(_versions())}"
    )


def _versions() -> list[str]:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@dataclass
class Watch:
    """Counts, from when it is made, the CPU seconds of the whole machine that were not ours.

    Ours are those of this process and of its children that have ended or still live.
    """

    def __post_init__(self) -> None:
        self._all, self._own, self._wall = _busy_s(), _own_s(), _uptime_s()

    def others(self) -> float:
        """Return how many cores others kept busy on average."""
        wall = max(_uptime_s() - self._wall, 1e-3)
        return max(0.0, (_busy_s() - self._all) - (_own_s() - self._own)) / wall

    def verdict(self) -> str:
        """Return "quiet", or "busy" with the cores that others kept busy."""
        others = self.others()
        return "quiet" if others < QUIET else f"busy ({others:.1f} cores)"


QUIET = 0.15
"""Cores that others may keep busy on a machine that still counts as quiet."""


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
                 - getattr(times, "guest_nice", 0.0))  # fmt: skip


def _own_s() -> float:
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + getattr(times, "children_user", 0) + getattr(times, "children_system", 0)
    return total


def _uptime_s() -> float:
    return os.times().elapsed
