"""`[fleet] availability`: which clients are connected when, by chance or from a trace.

A trace is a file that says in which rounds, counted from 0, each client is online. Clients are counted from 0 too, and
are those of the partition. After its last round the trace begins again.

- `.csv`: a line `client,start,stop` for each spell, online in rounds start <= r < stop, under a heading with these
  names; the trace ends with the last spell. Clients that are not named are never online.
- `.json`: `{"rounds": 48, "online": {"0": [[0, 12], [24, 30]], ...}}`, the same spells by client; `rounds`, the length
  of the trace, may be left out.
- `.npz`: an array `online` of zeros and ones, [rounds, clients].
"""

import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fleetfit import files
from fleetfit.config.section import Fraction, Positive, Probability, Section
from fleetfit.errors import ConfigError
from fleetfit.values import Availability

_HEADING = ["client", "start", "stop"]
_MOST = 1 << 20  # rounds; beyond it is a mistake, such as seconds since 1970
_ROOM = 1 << 32  # rounds times clients, which is bytes

Spell = tuple[int, int, int]  # client, first round, the round after the last


class AvailabilitySection(Section):
    """`[fleet] availability`: when clients are connected (see `fleetfit.values.Availability`).

    Attributes:
        share: Share of the time that a client is online, on average; 1 by default.
        spread: How much clients differ in it, from 0 to 1.
        rounds: Mean length of an online spell; by default every round is drawn by itself.
        day: Rounds of a day, if there are days.
        leave: Probability that a chosen client goes away in the round, after it was sent its model.
        trace: A file instead of chance.
    """

    share: Fraction | None = None
    spread: Probability = 0.0
    rounds: Positive | None = None
    day: Positive | None = None
    leave: Probability = 0.0
    trace: str | None = None


def build_availability(section: AvailabilitySection | None, clients: int, seed: int) -> Availability | None:
    """Return when so many clients are connected; None where they always are.

    Raises:
        ConfigError: The keys do not go together, or the trace does not fit.
    """
    if section is None:
        return None
    where = "[fleet] availability"
    if section.trace is not None:
        said = [
            k for k in ("share", "spread", "rounds", "day") if k in section.model_fields_set and getattr(section, k)
        ]
        if said:
            raise ConfigError(f"{where}: a trace says who is online when; leave {said[0]} out, or the trace.")
        return Availability(clients, leave=section.leave, trace=read_trace(section.trace, clients), seed=seed)
    share = 1.0 if section.share is None else section.share
    if section.rounds is not None and share == 1:
        raise ConfigError(f"{where}: with share = 1 nobody ever goes offline; leave rounds out, or make share smaller.")
    if section.rounds is not None and section.rounds * (1 - share) < 1:
        raise ConfigError(
            f"{where}: clients that are online {share:g} of the time stay for {1 / (1 - share):.4g} rounds where every "
            f"round is drawn by itself; rounds must be at least that, got {section.rounds:g}."
        )
    return Availability(clients, share, section.spread, section.rounds, section.day, section.leave, seed=seed)


def read_trace(path: str, clients: int) -> np.ndarray:
    """Return a trace, bool [rounds, clients].

    Raises:
        ConfigError: It cannot be read, names clients that there are not, or nobody is ever online.
    """
    readers = {".csv": _of_csv, ".json": _of_json, ".npz": _of_npz}
    kind = Path(path).suffix.lower()
    if kind not in readers:
        raise ConfigError(f"[fleet] availability.trace: {path} must end in .csv, .json or .npz.")
    try:
        found = readers[kind](Path(path), clients)
    except FileNotFoundError:
        raise ConfigError(f"[fleet] availability.trace: there is no file {path}.") from None
    except OSError as error:
        raise ConfigError(
            f"[fleet] availability.trace: {path} cannot be read: {files.format_os_error(error)}."
        ) from None
    except ConfigError:
        raise
    except (ValueError, KeyError, RecursionError, OverflowError, zipfile.BadZipFile, csv.Error) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"[fleet] availability.trace: {path} is no trace: {reason}.") from None
    if not found.any():
        raise ConfigError(f"[fleet] availability.trace: in {path} nobody is ever online.")
    return found


def _of_csv(path: Path, clients: int) -> np.ndarray:
    lines = csv.reader(io.StringIO(files.read_text(path), newline=""))
    heading = [name.strip() for name in next(lines, [])]
    if heading != _HEADING:
        raise ValueError(f"its first line must be {','.join(_HEADING)}, got {','.join(heading)}")
    return _filled((_spell(row, f"line {lines.line_num}") for row in lines if row), clients)


def _of_json(path: Path, clients: int) -> np.ndarray:
    nest = files.parse_json(files.read_text(path))
    if not isinstance(nest, dict) or not isinstance(nest.get("online"), dict) or nest.keys() - {"rounds", "online"}:
        raise ValueError('it must have the keys "online", spells by client, and at most "rounds" beside')
    length = nest.get("rounds", 0)
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= _MOST:
        raise ValueError(f"rounds must be a whole number, got {length!r}")
    return _filled(_spells_of_json(nest["online"]), clients, length)


def _spells_of_json(online: dict[str, Any]) -> Iterator[Spell]:
    for client, spells in online.items():
        for spell in spells if isinstance(spells, list) else [spells]:
            yield _spell([client, *(spell if isinstance(spell, list) else [spell])], f"client {client}")


def _of_npz(path: Path, clients: int) -> np.ndarray:
    with files.open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
        if "online" not in arrays:
            raise ValueError(f'it has no array "online"; it has {", ".join(arrays) or "none"}')
        found = arrays["online"]
    if found.ndim != 2 or not len(found) or found.shape[1] != clients:
        raise ValueError(f"online must be [rounds, {clients}], a column for each client, got {list(found.shape)}")
    if not np.isin(found, (0, 1)).all():
        raise ValueError("online must hold zeros and ones")
    return found.astype(bool)


def _spell(values: list[Any], where: str) -> Spell:
    try:
        client, start, stop = (int(str(value)) for value in values)
    except ValueError:
        raise ValueError(f"{where}: expected client, start and stop as whole numbers, got {values}") from None
    if client < 0 or not 0 <= start < stop <= _MOST:
        raise ValueError(f"{where}: client must be at least 0, and 0 <= start < stop <= {_MOST}, got {values}")
    return client, start, stop


def _filled(spells: Iterator[Spell], clients: int, rounds: int = 0) -> np.ndarray:
    listed = list(spells)
    unknown = [client for client, _, _ in listed if client >= clients]
    if unknown:
        raise ValueError(f"it names client {unknown[0]}, but there are {clients} clients, counted from 0")
    last = max((stop for _, _, stop in listed), default=0)
    if rounds and last > rounds:
        raise ValueError(f"it has {rounds} rounds, but a spell ends with round {last}")
    if (rounds or last) * clients > _ROOM:
        raise ValueError(f"{rounds or last} rounds of {clients} clients are too many; make the rounds longer")
    found = np.zeros((rounds or last, clients), dtype=bool)
    for client, start, stop in listed:
        found[start:stop, client] = True
    return found
