"""Energy, where the platform tells it: Intel's and AMD's counters, and the power rails of NVIDIA's Jetson boards.

Counters are `/sys/class/powercap/intel-rapl:N/energy_uj` (AMD's have the same name): microjoules of a processor package
that begin again at 0 after `max_energy_range_uj`. The memory's zone counts beside its package; other zones are parts of
one, and "psys" contains it. Rails are the channels of INA3221 sensors, volts and amperes by hwmon or watts by older
drivers; power is integrated over time. What is told is of the whole package or board: nothing of an idle machine is
taken off.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_WHOLE = ("VDD_IN", "POM_5V_IN")  # the rail that feeds a whole board
_OTHERS = ("NC", "sum of shunt voltages")
_RANGE_UJ = 2**32  # where a zone does not tell its range


@dataclass(frozen=True)
class Energy:
    """Where energy can be read.

    Attributes:
        source: What it is measured of, in words; or why it is not told.
        joules: Returns the joules since it was first called, and must be called now and then; None: not told.
    """

    source: str
    joules: Callable[[], float] | None = None


def energy_of(system: Path = Path("/sys"), now: Callable[[], float] = time.perf_counter) -> Energy:
    """Return where this machine tells energy, if it does.

    Args:
        system: Where the kernel tells things.
        now: The time in seconds.
    """
    zones, closed = _zones(system / "class" / "powercap")
    if zones:
        return Energy(f"processor ({', '.join(name for name, _ in zones)})", _Counters([zone for _, zone in zones]))
    rails = _rails(system)
    if rails:
        return Energy(f"board ({', '.join(name for name, _ in rails)})", _Power([watts for _, watts in rails], now))
    return Energy(f"not told: {closed} is for root only" if closed else "not told by this machine")


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


# ---- counters ------------------------------------------------------------------------------------------------------


def _zones(powercap: Path) -> tuple[list[tuple[str, Path]], str]:
    """Return the zones that do not overlap, by name; and a counter that may not be read, or ""."""
    found, closed = [], ""
    for zone in sorted(powercap.glob("intel-rapl:*")):
        name = _text(zone / "name")
        if not (name.startswith("package") or name == "dram"):
            continue
        if _number(zone / "energy_uj") is None:
            closed = str(zone / "energy_uj")
        else:
            found.append((name, zone))
    return found, closed


class _Counters:
    """Adds up what counters moved, over their wraparound."""

    def __init__(self, zones: list[Path]) -> None:
        self._zones = zones
        self._last: list[float] = []
        self._sum_uj = 0.0

    def __call__(self) -> float:
        values = [_number(zone / "energy_uj") for zone in self._zones]
        read = [old if value is None else value for value, old in zip(values, self._last or values, strict=True)]
        current = [value for value in read if value is not None]
        for zone, value, old in zip(self._zones, current, self._last or current, strict=True):
            around = _number(zone / "max_energy_range_uj") or _RANGE_UJ
            self._sum_uj += value - old if value >= old else value + around - old
        self._last = current
        return self._sum_uj / 1e6


# ---- rails ---------------------------------------------------------------------------------------------------------


def _rails(system: Path) -> list[tuple[str, Callable[[], float | None]]]:
    """Return the rail of the whole board, or else all rails that there are, with what returns their watts."""
    found: list[tuple[str, Callable[[], float | None]]] = []
    for chip in sorted((system / "class" / "hwmon").glob("hwmon*")):
        if _text(chip / "name").startswith("ina3221"):
            for channel in (1, 2, 3):
                name, pair = _text(chip / f"in{channel}_label"), (f"in{channel}_input", f"curr{channel}_input")
                if all(_number(chip / part) is not None for part in pair):
                    found.append((name or f"{chip.name} channel {channel}", _volts_times_amperes(chip, *pair)))
    for chip in sorted((system / "bus" / "i2c" / "drivers" / "ina3221x").glob("*/iio:device*")):
        for channel in (0, 1, 2):
            power = chip / f"in_power{channel}_input"
            if _number(power) is not None:
                found.append((_text(chip / f"rail_name_{channel}") or power.name, _milliwatts(power)))
    found = [rail for rail in found if rail[0] not in _OTHERS]
    return [rail for rail in found if rail[0] in _WHOLE] or found


def _volts_times_amperes(chip: Path, volts: str, amperes: str) -> Callable[[], float | None]:
    def watts() -> float | None:
        u, i = _number(chip / volts), _number(chip / amperes)  # mV, mA
        return None if u is None or i is None else u * i / 1e6

    return watts


def _milliwatts(power: Path) -> Callable[[], float | None]:
    def watts() -> float | None:
        found = _number(power)
        return None if found is None else found / 1e3

    return watts


class _Power:
    """Integrates power over time, as if it went in straight lines between two looks."""

    def __init__(self, rails: list[Callable[[], float | None]], now: Callable[[], float]) -> None:
        self._rails, self._now = rails, now
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    def __call__(self) -> float:
        found = [watts() for watts in self._rails]
        if None not in found:  # a sensor that is busy is asked again the next time
            at, power = self._now(), sum(w for w in found if w is not None)
            if self._last is not None:
                self._joules += (at - self._last[0]) * (power + self._last[1]) / 2
            self._last = at, power
        return self._joules
