"""Energy, if the platform reports it: the counters of Intel and AMD, and the power rails of NVIDIA's Jetson boards.

Counters are `/sys/class/powercap/intel-rapl:N/energy_uj` (AMD's have the same name): microjoules of a processor package
that start again at 0 after `max_energy_range_uj`. The memory's zone counts beside its package; other zones are parts of
a package, and "psys" contains it. Rails are the channels of INA3221 sensors, volts and amperes by hwmon or watts by
older drivers; power is integrated over time. Energy is that of the whole package or board; the idle power is not
subtracted.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

_BOARD_RAILS = ("VDD_IN", "POM_5V_IN")  # they feed a whole board
_UNUSED_RAILS = ("NC", "sum of shunt voltages")
_DEFAULT_RANGE_UJ = 2**32


@dataclass(frozen=True)
class EnergyMeter:
    """A source of energy readings.

    Attributes:
        source: What it measures, in words; or why it measures nothing.
        read: Returns the joules since its first call, and must be called now and then; None: nothing is measured.
    """

    source: str
    read: Callable[[], float] | None = None


def find_energy_meter(system: Path = Path("/sys"), now: Callable[[], float] = time.perf_counter) -> EnergyMeter:
    """Return the energy meter of this machine.

    Args:
        system: The kernel's files.
        now: The time in seconds.
    """
    zones, unreadable = _find_zones(system / "class" / "powercap")
    if zones:
        names = ", ".join(name for name, _ in zones)
        return EnergyMeter(f"processor ({names})", _CounterSum([zone for _, zone in zones]).read)
    rails = _find_rails(system)
    if rails:
        names = ", ".join(name for name, _ in rails)
        return EnergyMeter(f"board ({names})", _PowerIntegral([watts for _, watts in rails], now).read)
    return EnergyMeter(f"not measured: {unreadable} is for root only" if unreadable else "not reported by this machine")


def _read_number(path: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        return float(path.read_text())
    return None


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _find_zones(powercap: Path) -> tuple[list[tuple[str, Path]], str]:
    """Return the zones that do not overlap, with their names; and a counter that cannot be read, or ""."""
    zones, unreadable = list[tuple[str, Path]](), ""
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = _read_text(zone / "name")
        if not (name.startswith("package") or name == "dram"):
            continue
        if _read_number(zone / "energy_uj") is None:
            unreadable = str(zone / "energy_uj")
        else:
            zones.append((name, zone))
    return zones, unreadable


class _CounterSum:
    """The sum of counters since the first reading. An unreadable counter has not moved."""

    def __init__(self, zones: list[Path]) -> None:
        self._zones = zones
        self._last: dict[Path, float] = {}
        self._sum_uj = 0.0

    def read(self) -> float:
        for zone in self._zones:
            value = _read_number(zone / "energy_uj")
            if value is None:
                continue
            moved = value - self._last.get(zone, value)
            if moved < 0:  # it has started again at 0
                moved += _read_number(zone / "max_energy_range_uj") or _DEFAULT_RANGE_UJ
            self._sum_uj += moved
            self._last[zone] = value
        return self._sum_uj / 1e6


def _find_rails(system: Path) -> list[tuple[str, Callable[[], float | None]]]:
    """Return the rail of the whole board, or else all rails, each with a function that returns its watts."""
    rails: list[tuple[str, Callable[[], float | None]]] = []
    for chip in sorted((system / "class" / "hwmon").glob("hwmon*")):
        if _read_text(chip / "name").startswith("ina3221"):
            for channel in (1, 2, 3):
                watts = partial(_read_watts, 1e6, chip / f"in{channel}_input", chip / f"curr{channel}_input")
                if watts() is not None:
                    name = _read_text(chip / f"in{channel}_label")
                    rails.append((name or f"{chip.name} channel {channel}", watts))
    for chip in sorted((system / "bus" / "i2c" / "drivers" / "ina3221x").glob("*/iio:device*")):
        for channel in (0, 1, 2):
            power = chip / f"in_power{channel}_input"
            if _read_number(power) is not None:
                rails.append(
                    (_read_text(chip / f"rail_name_{channel}") or power.name, partial(_read_watts, 1e3, power))
                )
    rails = [rail for rail in rails if rail[0] not in _UNUSED_RAILS]
    return [rail for rail in rails if rail[0] in _BOARD_RAILS] or rails


def _read_watts(scale: float, *paths: Path) -> float | None:
    """Return the watts of a file in mW, or of two files in mV and mA."""
    values = [value for path in paths if (value := _read_number(path)) is not None]
    return math.prod(values) / scale if len(values) == len(paths) else None


class _PowerIntegral:
    """The integral of power over time, linear between two readings."""

    def __init__(self, rails: list[Callable[[], float | None]], now: Callable[[], float]) -> None:
        self._rails, self._now = rails, now
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    def read(self) -> float:
        watts = [value for rail in self._rails if (value := rail()) is not None]
        if len(watts) == len(self._rails):  # a busy sensor is read again the next time
            time_s, power = self._now(), sum(watts)
            if self._last is not None:
                self._joules += (time_s - self._last[0]) * (power + self._last[1]) / 2
            self._last = time_s, power
        return self._joules
