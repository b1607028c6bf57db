"""Read a trace of availability: the rounds in which each client is online.

Rounds and clients count from 0. Clients are those of the partition. The trace repeats after its last round.

- `.csv`: a heading `client,start,stop`, then one line per online spell, in rounds start <= r < stop. The trace ends
  with the last spell. Clients without a line are never online.
- `.json`: `{"rounds": 48, "online": {"0": [[0, 12], [24, 30]], ...}}`, the same spells by client. `rounds`, the length
  of the trace, is optional.
- `.npz`: an array `online` of zeros and ones, [rounds, clients].
"""

import csv
import io
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fleetfit import files
from fleetfit.errors import ConfigError

_HEADING = ["client", "start", "stop"]
_MAX_ROUNDS = 1 << 20  # a larger number is a mistake, such as seconds since 1970
_MAX_BYTES = 1 << 32

Spell = tuple[int, int, int]  # client, first round, the round after the last


def read_trace(path: str, clients: int) -> np.ndarray:
    """Return a trace, bool [rounds, clients].

    Raises:
        ConfigError: The file cannot be read, has unknown clients, or never has a client online.
    """
    readers: dict[str, Callable[[Path, int], np.ndarray]] = {".csv": _read_csv, ".json": _read_json, ".npz": _read_npz}
    where, details = "[fleet] availability.trace", {"key": "fleet.availability.trace", "path": path}
    kind = Path(path).suffix.lower()
    if kind not in readers:
        raise ConfigError(f"{where}: {path} must end in .csv, .json or .npz.", **details)
    try:
        online = readers[kind](Path(path), clients)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {files.format_os_error(error)}.", **details) from None
    except ConfigError:
        raise
    except (ValueError, KeyError, RecursionError, OverflowError, zipfile.BadZipFile, csv.Error) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where}: {path} is not a trace: {reason}.", **details) from None
    if not online.any():
        raise ConfigError(f"{where}: in {path} no client is ever online.", **details)
    return online


def _read_csv(path: Path, clients: int) -> np.ndarray:
    lines = csv.reader(io.StringIO(files.read_text(path), newline=""))
    heading = [name.strip() for name in next(lines, [])]
    if heading != _HEADING:
        raise ValueError(f"its first line must be {','.join(_HEADING)}, got {','.join(heading)}")
    return _fill((_parse_spell(row, f"line {lines.line_num}") for row in lines if row), clients)


def _read_json(path: Path, clients: int) -> np.ndarray:
    table = files.parse_json(files.read_text(path))
    if not isinstance(table, dict) or not isinstance(table.get("online"), dict) or table.keys() - {"rounds", "online"}:
        raise ValueError('it must have the key "online" (spells by client), optionally "rounds", and no other')
    rounds = table.get("rounds", 0)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 0 <= rounds <= _MAX_ROUNDS:
        raise ValueError(f"rounds must be a whole number, got {rounds!r}")
    spells = (
        _parse_spell([client, *(spell if isinstance(spell, list) else [spell])], f"client {client}")
        for client, online in table["online"].items()
        for spell in (online if isinstance(online, list) else [online])
    )
    return _fill(spells, clients, rounds)


def _read_npz(path: Path, clients: int) -> np.ndarray:
    with files.open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
        if "online" not in arrays:
            raise ValueError(f'it has no array "online"; it has {", ".join(arrays) or "none"}')
        online = arrays["online"]
    if online.ndim != 2 or not len(online) or online.shape[1] != clients:
        raise ValueError(f"online must be [rounds, {clients}], one column per client; got {list(online.shape)}")
    if not np.isin(online, (0, 1)).all():
        raise ValueError("online must hold zeros and ones")
    return online.astype(bool)


def _parse_spell(values: list[Any], where: str) -> Spell:
    try:
        client, start, stop = (int(str(value)) for value in values)
    except ValueError:
        raise ValueError(f"{where}: expected client, start and stop as whole numbers, got {values}") from None
    if client < 0 or not 0 <= start < stop <= _MAX_ROUNDS:
        raise ValueError(f"{where}: client must be at least 0, and 0 <= start < stop <= {_MAX_ROUNDS}, got {values}")
    return client, start, stop


def _fill(spells: Iterable[Spell], clients: int, rounds: int = 0) -> np.ndarray:
    """Return spells as bool [rounds, clients]. Without `rounds` the trace ends with the last spell."""
    spells = list(spells)
    unknown = [client for client, _, _ in spells if client >= clients]
    if unknown:
        raise ValueError(f"it has client {unknown[0]}, but the run has {clients} clients, counted from 0")
    last = max((stop for _, _, stop in spells), default=0)
    if rounds and last > rounds:
        raise ValueError(f"it has {rounds} rounds, but a spell ends with round {last}")
    rounds = rounds or last
    if rounds * clients > _MAX_BYTES:
        raise ValueError(f"{rounds} rounds of {clients} clients are too many. Make the rounds longer")
    online = np.zeros((rounds, clients), dtype=bool)
    for client, start, stop in spells:
        online[start:stop, client] = True
    return online
