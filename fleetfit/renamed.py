"""What has another name now: keys of run files and of a node's file, places of plug-ins, kinds of what can be listed.

Whatever somebody wrote with an old name is still read, and a line says the new one. The tables here are the only place
that knows old names: a key that is renamed needs a row, and nothing else.
"""

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from fleetfit.errors import ConfigError, truncate

RUN_FILE: Mapping[str, str] = {
    "engine.over_selection": "cohort.over_selection",
    "engine.quorum": "cohort.quorum",
    "fleet.told": "fleet.reports_budget",
    "fleet.tells_labels": "fleet.reports_labels",
    "tuning": "peft",
}
"""Dotted keys of run files, of overrides and of keyword arguments: old -> new, which may be in another section."""

NODE_FILE: Mapping[str, str] = {"tell_budget": "reports_budget", "tell_labels": "reports_labels"}
"""Dotted keys of a node's configuration file."""

KINDS: Mapping[str, str] = {"choices": "selection", "tuning": "peft"}
"""What `fleetfit list` lists."""

MODULES: Mapping[str, str] = {
    "fleetfit.choices": "fleetfit.selection",
    "fleetfit.compression": "fleetfit.messages",
    "fleetfit.guard": "fleetfit.validation",
    "fleetfit.layout.declare": "fleetfit.layout.axes",
    "fleetfit.method.defaults": "fleetfit.method.hooks",
    "fleetfit.planner.pool": "fleetfit.methods._pool",
    "fleetfit.planner.targets": "fleetfit.planner.budgets",
    "fleetfit.submodel.channels": "fleetfit.submodel",
    "fleetfit.submodel.cut": "fleetfit.submodel",
    "fleetfit.submodel.flat": "fleetfit.state",
    "fleetfit.submodel.piece": "fleetfit.submodel",
    "fleetfit.submodel.states": "fleetfit.submodel",
    "fleetfit.train": "fleetfit.training",
    "fleetfit.train.batches": "fleetfit.training.steps",
    "fleetfit.train.limits": "fleetfit.training.job",
    "fleetfit.tuning": "fleetfit.peft",
    "fleetfit.wire": "fleetfit.messages",
}
"""Modules, in `package.module:function`; a row also stands for the modules below it that have none of their own."""

_LISTS = ("compare.row", "compare.setting", "compare.grid", "compare.tune")
"""Places of a run file in which keys of a run file stand."""
_PLUG_IN = re.compile(r"(fleetfit(?:\.\w+)+)(:\w+)")

Say = Callable[[str], object]


def aloud(line: str) -> None:
    """Say a line to whoever runs this: on the command line it is printed."""
    logging.getLogger("fleetfit").warning(line)


def silently(line: str) -> None:
    """Say nothing: what a run folder holds was right when it was written."""


def renewed(given: Mapping[str, Any], names: Mapping[str, str] = RUN_FILE, say: Say = aloud) -> dict[str, Any]:
    """Return tables in which keys and places of plug-ins have their present names.

    Args:
        given: Tables, as somebody wrote them; they stay as they are.
        names: The table of old and new keys.
        say: Called with a line for each old name that was found.

    Raises:
        ConfigError: A key is given by its old and by its new name.
    """
    lines: list[str] = []
    found = _table(given, "", names, lines)
    for line in dict.fromkeys(lines):
        say(line)
    return found


def place(name: str) -> str:
    """Return the name of a plug-in with the module where its function is now; of any other name, itself."""
    parts = _PLUG_IN.fullmatch(name)
    if parts is None:
        return name
    module, function = parts.groups()
    old = module
    while old.count("."):
        if old in MODULES:
            return f"{MODULES[old]}{module[len(old) :]}{function}"
        old = old.rpartition(".")[0]
    return name


def place_said(name: str) -> str:
    """Return the same as `place`, and say once that the name is another one now."""
    new = place(name)
    if new != name:
        _once(_line(name, new))
    return new


def kind(name: str, say: Say = aloud) -> str:
    """Return what a kind of what can be listed is called now."""
    if name in KINDS:
        say(_line(name, KINDS[name]))
    return KINDS.get(name, name)


@functools.cache
def _once(line: str) -> None:
    aloud(line)


def _line(old: str, new: str) -> str:
    return f'"{truncate(old)}" is called "{truncate(new)}" now; the old name is still read.'


_Moved = dict[str, tuple[str, Any]]  # what belongs to another section: new key -> old key, value


def _table(
    given: Mapping[str, Any], where: str, names: Mapping[str, str], lines: list[str], outer: _Moved | None = None
) -> dict[str, Any]:
    """Return a table; `where` is its place, with a dot behind it, or "" at the top.

    What belongs to another section goes into `outer`, and there at the top.
    """
    found: dict[str, Any] = {}
    moved: _Moved = {} if outer is None else outer
    for key, value in given.items():
        full = _key(f"{where}{key}", names, lines)
        if not full.startswith(where):
            moved[full] = f"{where}{key}", value
            continue
        new = _text(key, lines) if full == f"{where}{key}" else full[len(where) :]
        if new != key and new in given:
            raise ConfigError(_both(f"{where}{key}", f"{where}{new}"))
        inside = _inside(value, full, names, lines, moved)
        if not isinstance(inside, dict) or inside or not value:  # not what only held keys of other sections
            found[new] = inside
    for full, (old, value) in moved.items() if outer is None else ():
        section, _, key = full.partition(".")
        table = found.get(section, {})
        if not isinstance(table, Mapping) or key in table or full in found:
            raise ConfigError(_both(old, full))
        found[section] = {**table, key: value}
    return found


def _both(old: str, new: str) -> str:
    return f'"{old}" is the old name of "{new}", and both are given. Leave the old one out.'


def _inside(value: Any, where: str, names: Mapping[str, str], lines: list[str], moved: _Moved) -> Any:
    if isinstance(value, str):
        return _text(value, lines)
    if isinstance(value, Mapping):
        whole = where in _LISTS
        return _table(value, "" if whole else f"{where}.", names, lines, None if whole else moved)
    if isinstance(value, list | tuple) and any(isinstance(one, str | Mapping | list | tuple) for one in value):
        return [_inside(one, where, names, lines, moved) for one in value]
    return value


def _key(key: str, names: Mapping[str, str], lines: list[str]) -> str:
    """Return a dotted key by its present name."""
    for old, new in names.items():
        if key == old or key.startswith(f"{old}."):
            lines.append(_line(old, new))
            return new + key[len(old) :]
    return key


def _text(text: Any, lines: list[str]) -> Any:
    new = place(text) if isinstance(text, str) else text
    if new != text:
        lines.append(_line(text, new))
    return new
