"""Tells a run's callbacks what it does, each of them each round once, whatever is interrupted or raised.

How far each has been told stands in `callbacks.json` in the run folder. A run that goes on tells only what is new, and
first what a callback has missed: it was not there, raised something, or the process was killed before it heard.
"""

import contextlib
import copy
import functools
import inspect
import json
import logging
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetfit import names
from fleetfit.callbacks import HOOKS, RunStart
from fleetfit.config.naming import called, find_function, without_calling
from fleetfit.errors import ConfigError, FleetFitError, RunError, did_you_mean, format_exception, truncate
from fleetfit.records import RunFolder, forms
from fleetfit.report.recorded import check_report

FILE = "callbacks.json"
_SAY = logging.getLogger("fleetfit")
_TOLD = forms.table({"told": forms.mapped(forms.count)})


# ---- what is given becomes callbacks -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Listener:
    """A callback and what it is called."""

    name: str
    callback: Any


class _AfterRounds:
    """A function that is called after each round."""

    def __init__(self, function: Any) -> None:
        self.on_round = function


def split(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return what a run file can hold of the callbacks that were given, names and tables, and the objects."""
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ConfigError(f"callbacks takes a list of callbacks, functions and names, got {truncate(repr(given))}.")
    written = [one for one in given if isinstance(one, str | Mapping)]
    return written, [one for one in given if not isinstance(one, str | Mapping)]


def listeners(written: Sequence[Any], objects: Sequence[Any] = ()) -> list[Listener]:
    """Make the callbacks of a run.

    Args:
        written: Names, and tables with a name and keys.
        objects: Callbacks, and functions that are called after each round.

    Raises:
        FleetFitError: A name is not known, a key does not fit, or an object is none.
    """
    found = [_named(one) for one in written]
    found += [Listener(getattr(one, "__qualname__", type(one).__name__), one) for one in objects]
    counted: Counter[str] = Counter()
    for place, one in enumerate(found):  # each has a name of its own, under which it is kept how far it is
        counted[one.name] += 1
        number = counted[one.name]
        found[place] = Listener(f"{one.name} ({number})" if number > 1 else one.name, _checked(one))
    return found


def _named(entry: str | Mapping[str, Any]) -> Listener:
    table = {"name": entry} if isinstance(entry, str) else entry
    name, keys = table["name"], {key: value for key, value in table.items() if key != "name"}
    function, label = find_function("callbacks", name)
    if "report" not in inspect.signature(function).parameters:
        return Listener(label, called("callbacks", name, "callbacks", keys))
    keys = names.call(without_calling(function), label, "callbacks", keys, report=None)
    return Listener(label, functools.partial(function, **{key: keys[key] for key in keys if key != "report"}))


def _checked(one: Listener) -> Any:
    """Return an object with some of the hooks.

    Raises:
        ConfigError: It is none, or a hook of it is misspelt.
    """
    thing = one.callback
    if inspect.isclass(thing):
        raise ConfigError(f"the callback {one.name} is a class; give an object of it, {one.name}(...).")
    meant = [name for name in dir(thing) if name.startswith("on_") and callable(getattr(thing, name, None))]
    for name in meant:
        hint = "" if name in HOOKS else did_you_mean(name, HOOKS)
        if hint:
            raise ConfigError(f'the callback {one.name} has "{name}", which nothing calls.{hint}')
    if any(name in HOOKS for name in meant):
        return thing
    if callable(thing):
        return _AfterRounds(thing)
    raise ConfigError(
        f"the callback {one.name} must have one of the methods {', '.join(HOOKS)}, or be a function that takes each "
        f"round's report; got {type(thing).__name__}."
    )


# ---- while it runs -------------------------------------------------------------------------------------------------


class Telling:
    """Tells callbacks of one run.

    Args:
        files: The run folder.
        heard: The callbacks.
        title: What the run is called in a comparison; by default its folder's name.
        group: The comparison's name.
    """

    def __init__(self, files: RunFolder, heard: Sequence[Listener], title: str = "", group: str = "") -> None:
        self._files, self._title, self._group = files, title or files.path.resolve().name, group
        self._heard, self._lost, self._over = list(heard), list[str](), False
        self._told: dict[str, int] = _told_before(files) if heard else {}

    def start(self, rounds: int, done: int) -> None:
        """Tell that the run begins or goes on, and of the rounds that are done what has not been told."""
        if not self._heard:
            return
        config = tomllib.loads(self._files.text("config.toml"))
        for one in list(self._heard):
            start = RunStart(self._files.path, self._title, self._group, copy.deepcopy(config), rounds, done)
            self._tell(one, "on_start", start)
        behind = min((self._told.get(one.name, 0) for one in self._heard), default=done)
        for report in self._files.metrics()[:done] if behind < done else ():
            check_report(report)
            self.round(report)

    def round(self, report: Mapping[str, Any]) -> None:
        """Tell of a round whose report is written."""
        number = report["round"]
        for one in list(self._heard):
            if self._told.get(one.name, 0) >= number:
                continue
            hooks = ("on_round", "on_evaluate") if "evaluate" in report else ("on_round",)
            if all(self._tell(one, hook, copy.deepcopy(dict(report)), f" of round {number}") for hook in hooks):
                self._told[one.name] = number
        if self._heard:
            self._files.write(FILE, json.dumps({"told": self._told}) + "\n")

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Tell that the run is over, once, and say again who did not hear all of it."""
        if self._over:
            return
        self._over = True
        for one in list(self._heard):
            self._tell(one, "on_end", copy.deepcopy(summary))
        for said in self._lost:
            _SAY.warning("%s", said)

    def _tell(self, one: Listener, hook: str, value: Any, of: str = "") -> bool:
        """Call a hook where there is one; return whether it went well."""
        function = getattr(one.callback, hook, None)
        if function is None:
            return True
        try:
            function(value)
        except FleetFitError:
            raise
        except (Exception, SystemExit) as error:
            self._heard.remove(one)
            where = f"the callback {one.name} failed in {hook}{of}"
            self._lost.append(f"{where}, and was not called after that.")
            _SAY.warning("%s: %s. It is not called any more; the run goes on.", where, format_exception(error))
            return False
        return True


@contextlib.contextmanager
def telling(told: Telling) -> Iterator[Telling]:
    """Tell callbacks that a run has stopped, however it does so before its end."""
    try:
        yield told
    except BaseException:
        told.end(None)
        raise


def _told_before(files: RunFolder) -> dict[str, int]:
    """Return up to which round each callback has been told.

    Raises:
        RunError: The file is damaged.
    """
    if not files.has(FILE):
        return {}
    found = files.json(FILE)
    try:
        _TOLD(found, "")
    except ValueError as error:
        raise RunError(
            f"{files.path / FILE} is damaged: {error}. Remove it, and callbacks are told all rounds again."
        ) from None
    return dict(found["told"])
