"""Call a run's callbacks, each once per round, even if the run is interrupted and resumed.

`callbacks.json` in the run folder has the last round that each callback has received. A resumed run first passes the
missed rounds to a callback: it may be new, it may have raised an error, or the process may have been killed.
"""

import copy
import functools
import inspect
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any

from fleetfit.callbacks import HOOKS, RunStart
from fleetfit.config.components import build_component, find_function
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, format_exception, truncate
from fleetfit.factories import bind_keys
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import CallbacksRecord

FILE = "callbacks.json"
_logger = logging.getLogger("fleetfit")


# ---- making callbacks ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NamedCallback:
    """A callback and its name in messages and in `callbacks.json`."""

    name: str
    callback: Any


def split_callbacks(callbacks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split callbacks into entries of a run file (names and tables) and objects."""
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Sequence):
        raise ConfigError(
            f"callbacks should be a list of callbacks, functions and names, got {truncate(repr(callbacks))}.",
            key="callbacks",
        )
    entries = [callback for callback in callbacks if isinstance(callback, str | Mapping)]
    return entries, [callback for callback in callbacks if not isinstance(callback, str | Mapping)]


def make_callbacks(entries: Sequence[Any], objects: Sequence[Any] = ()) -> list[NamedCallback]:
    """Make the callbacks of a run.

    Args:
        entries: Names, and tables with a name and keys.
        objects: Callbacks, and functions that are called after each round.

    Raises:
        FleetFitError: A name is unknown, a key is wrong, or an object is not a callback.
    """
    pairs = [_make_callback(entry) for entry in entries]
    pairs += [(getattr(callback, "__qualname__", type(callback).__name__), callback) for callback in objects]
    counts: Counter[str] = Counter()
    result = []
    for name, callback in pairs:  # names must be distinct, because the last round is stored by name
        counts[name] += 1
        unique_name = f"{name} ({counts[name]})" if counts[name] > 1 else name
        result.append(NamedCallback(unique_name, _validate(name, callback)))
    return result


def _make_callback(entry: str | Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the callback of an entry of a run file."""
    table = {"name": entry} if isinstance(entry, str) else entry
    name, keys = table["name"], {key: value for key, value in table.items() if key != "name"}
    function, label = find_function("callbacks", name)
    if "report" not in inspect.signature(function).parameters:
        return label, build_component("callbacks", name, "callbacks", keys)
    arguments = bind_keys(function, label, "callbacks", keys, report=None)
    return label, functools.partial(function, **{key: arguments[key] for key in arguments if key != "report"})


def _validate(name: str, callback: Any) -> Any:
    """Return a callback with at least one hook.

    Raises:
        ConfigError: The callback has no hook, or a hook is misspelled.
    """
    if inspect.isclass(callback):
        raise ConfigError(f"the callback {name} is a class. Pass an object: {name}(...).", key="callbacks")
    hooks = [hook for hook in dir(callback) if hook.startswith("on_") and callable(getattr(callback, hook, None))]
    for hook in hooks:
        hint = "" if hook in HOOKS else did_you_mean(hook, HOOKS)
        if hint:
            raise ConfigError(f'the callback {name} has "{hook}", which FleetFit never calls.{hint}', key="callbacks")
    if any(hook in HOOKS for hook in hooks):
        return callback
    if callable(callback):
        return SimpleNamespace(on_round=callback)
    raise ConfigError(
        f"the callback {name} must have one of the methods {', '.join(HOOKS)}, or be a function of a round's report; "
        f"got {type(callback).__name__}.",
        key="callbacks",
    )


# ---- calling them --------------------------------------------------------------------------------------------------


class CallbackRunner:
    """Calls the callbacks of one run. As a context manager, it calls `on_end` if the run stops early.

    Args:
        files: The run folder.
        callbacks: The callbacks.
        title: Title of the run in a comparison; by default the folder's name.
        group: Name of the comparison.
    """

    def __init__(self, files: RunFolder, callbacks: Sequence[NamedCallback], title: str = "", group: str = "") -> None:
        self._files, self._title, self._group = files, title or files.path.resolve().name, group
        self._callbacks, self._failures, self._ended = list(callbacks), list[str](), False
        self._last_rounds: dict[str, int] = _load_last_rounds(files) if callbacks else {}

    def __enter__(self) -> "CallbackRunner":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.end(None)

    def start(self, rounds: int, done: int) -> None:
        """Call `on_start`, and the hooks for those of the `done` rounds that a callback has missed."""
        if not self._callbacks:
            return
        config = self._files.read_config()
        for entry in list(self._callbacks):
            start = RunStart(self._files.path, self._title, self._group, copy.deepcopy(config), rounds, done)
            self._call(entry, "on_start", start)
        first = min((self._last_rounds.get(entry.name, 0) for entry in self._callbacks), default=done)
        for report in self._files.metrics()[:done] if first < done else ():
            self.round(report)

    def round(self, report: Mapping[str, Any]) -> None:
        """Call `on_round` and `on_evaluate` with the report of a round.

        Raises:
            FleetFitError: A callback stops the run. All callbacks have received the round by then.
        """
        number, stop = report["round"], None
        hooks = ("on_round", "on_evaluate") if "evaluate" in report else ("on_round",)
        for entry in list(self._callbacks):
            if self._last_rounds.get(entry.name, 0) >= number:
                continue
            for hook in hooks:
                try:
                    if not self._call(entry, hook, copy.deepcopy(dict(report)), f" of round {number}"):
                        break
                except FleetFitError as error:  # a resumed run must not pass the round to this callback again
                    stop = stop or error
            else:
                self._last_rounds[entry.name] = number
        if self._callbacks:
            self._files.write(FILE, json.dumps({"told": self._last_rounds}) + "\n")
        if stop is not None:
            raise stop

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Call `on_end` once, and repeat the failures of callbacks."""
        if self._ended:
            return
        self._ended = True
        for entry in list(self._callbacks):
            self._call(entry, "on_end", copy.deepcopy(summary))
        for sentence in self._failures:
            _logger.warning("%s", sentence)

    def _call(self, entry: NamedCallback, hook: str, value: Any, occasion: str = "") -> bool:
        """Call a hook if the callback has it. If it raises an error, drop the callback and return False."""
        function = getattr(entry.callback, hook, None)
        if function is None:
            return True
        try:
            function(value)
        except FleetFitError:
            raise
        except (Exception, SystemExit) as error:
            self._callbacks.remove(entry)
            failure = f"the callback {entry.name} failed in {hook}{occasion}"
            self._failures.append(f"{failure}, and was not called again.")
            _logger.warning("%s: %s. It will not be called again. The run continues.", failure, format_exception(error))
            return False
        return True


def _load_last_rounds(files: RunFolder) -> dict[str, int]:
    """Return the last round that each callback has received.

    Raises:
        RunError: The file is damaged.
    """
    if not files.has(FILE):
        return {}
    remedy = "Remove it; callbacks then receive all rounds again."
    return dict(files.read(FILE, CallbacksRecord, remedy).told)
