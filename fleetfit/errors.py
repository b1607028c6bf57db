"""Exceptions of FleetFit, and quoting of values in messages.

    FleetFitError               what a user can cause and fix
    |- ConfigError              a run file, an override or an argument
    |- DataError                a data set, one of its files, or a partition
    |- ModelError               an architecture, its layout or a state
    |- PlanError                no plan satisfies the budgets
    |- RunError                 a run, its folder or one of its rounds
    |  |- NoUsableUpdates       no client returned a usable update
    |  |- Unexpected            an unexpected exception in a worker
    |- MissingExtra             an optional dependency is not installed
    Interrupt                   Ctrl-C in a call from Python
    |- ScriptInterrupt          Ctrl-C in a script

A message has the error, its place, the expected and the actual value, and the fix, in this order. The attributes `key`
and `path` have the place for programs. The command line prints the message without a traceback and exits with code 2.
"""

import difflib
import importlib
import logging
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

COMMAND = "\n    "
"""What a message has before a command to copy, which stands on a line of its own."""


class FleetFitError(Exception):
    """Base of all errors that a user can cause and fix.

    Attributes:
        key: The wrong key of a run file or the wrong parameter, dotted, such as "local.lr" or "fleet.groups.0.budget";
            positions count from 0. None if no single key is wrong.
        path: The wrong file or folder, or None.
    """

    def __init__(self, message: str = "", *, key: str | None = None, path: str | Path | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.path = None if path is None else Path(path)
        self.__suppress_context__ = True  # a traceback shows no error that was handled before; `from error` still does

    def __str__(self) -> str:
        """Return the message; control characters in quoted values are escaped."""
        return make_printable(drop_addresses(super().__str__()))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints of the error: its message, or the traceback if `FLEETFIT_TRACEBACK` is set."""
        if os.environ.get("FLEETFIT_TRACEBACK", "") not in ("", "0"):
            return ["".join(traceback.format_exception(self)) + getattr(self, "details", "")]
        remedy = f"For the traceback:{COMMAND}%env FLEETFIT_TRACEBACK=1{COMMAND}%tb"
        return [f"{type(self).__name__}: {self}", "", remedy]


class Interrupt(KeyboardInterrupt):
    """Ctrl-C stopped a call from Python. The message has what continues it."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class ScriptInterrupt(Interrupt, SystemExit):
    """Ctrl-C stopped a script, which has printed the message: the interpreter exits without a traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.code = 130


class ConfigError(FleetFitError, ValueError):
    """A run file, an override or an argument is wrong."""


class DataError(FleetFitError):
    """A data set, one of its files, or a partition is wrong.

    Attributes:
        row: Row of the file as in the message: lines and rows of text from 1, rows of Parquet from 0; None if no single
            row is wrong.
        column: Name of the column or array; None likewise.
    """

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        path: str | Path | None = None,
        row: int | None = None,
        column: str | None = None,
    ) -> None:
        super().__init__(message, key=key, path=path)
        self.row, self.column = None if row is None else int(row), column


class ModelError(FleetFitError):
    """An architecture, its layout or a state does not fit."""


class PlanError(FleetFitError):
    """No plan satisfies the budgets.

    Attributes:
        tolerance: The smallest tolerance with which levels fit; None if none helps, or none was tried.
        scaling: The scaling that fits within the given tolerances, "width"; None likewise.
        ceilings: Budgets with which levels fit, by further cost, as fractions of the full model; None likewise.
    """

    def __init__(
        self,
        message: str = "",
        tolerance: float | None = None,
        scaling: str | None = None,
        ceilings: Mapping[str, tuple[float, ...]] | None = None,
        *,
        key: str | None = None,
        path: str | Path | None = None,
    ) -> None:
        super().__init__(message, key=key, path=path)
        self.tolerance, self.scaling, self.ceilings = tolerance, scaling, ceilings


class RunError(FleetFitError):
    """A run, its folder or one of its rounds cannot continue."""


class NoUsableUpdates(RunError):
    """No client returned a usable update in several consecutive rounds, or in all rounds of a run.

    Attributes:
        EXIT_CODE: The exit code of commands that it ends.
    """

    EXIT_CODE = 3


class Unexpected(RunError):
    """An unexpected exception in a worker.

    Attributes:
        details: Its traceback.
        foreign: Whether a plug-in raised it.
    """

    def __init__(self, message: str, details: str, foreign: bool) -> None:
        super().__init__(message)
        self.details, self.foreign = details, foreign


class MissingExtra(FleetFitError, ImportError):  # type: ignore[misc]  # ImportError has a `path`, too
    """A feature needs an optional dependency that is not installed.

    Attributes:
        extra: Name of the extra, as in `pip install "fleetfit[extra]"`.
    """

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(f'{what} needs an optional dependency: pip install "fleetfit[{extra}]"')
        self.extra = extra


# ---- checks --------------------------------------------------------------------------------------------------------

WINDOWS = os.name == "nt"


def refuse_on_windows(what: str, instead: str) -> None:
    """Refuse a feature on Windows that passes open sockets to other processes, or needs sockets in folders.

    Args:
        what: The feature, as the start of a sentence.
        instead: An alternative on Windows, as a sentence.

    Raises:
        ConfigError: The system is Windows.
    """
    if WINDOWS:
        raise ConfigError(f"{what} only works on Linux and macOS. {instead}")


def import_optional(module: str, extra: str, what: str) -> Any:
    """Import a module that comes with an extra.

    Args:
        module: Its name.
        extra: The extra of FleetFit that has it.
        what: The feature that needs it, as the start of a sentence.

    Raises:
        MissingExtra: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(extra, what) from error


def check_range(name: str, value: float, low: float, high: float = float("inf"), *, closed: bool = False) -> None:
    """Check low < value < high; `closed` includes `low`.

    Args:
        name: The parameter, for the message and as the error's `key`.
        value: Its value.
        low: Lower bound.
        high: Upper bound, excluded.
        closed: Whether `low` itself is allowed.

    Raises:
        ConfigError: The value is outside.
    """
    if not (low <= value if closed else low < value) or not value < high:
        least = f"at least {low:g}" if closed else f"above {low:g}"
        most = "" if high == float("inf") else f" and below {high:g}"
        raise ConfigError(f"{name} must be {least}{most}, got {value}.", key=name)


# ---- values in messages --------------------------------------------------------------------------------------------


def one_line(text: object, most: int = 200) -> str:
    """Return untrusted text as one printable line.

    Args:
        text: The text; for any other object its type is returned.
        most: Number of characters to keep.

    Returns:
        Printable characters only: no line breaks, terminal escapes, direction marks or lone surrogates.
    """
    if not isinstance(text, str):
        return f"({type(text).__name__})"[:most]
    printable = "".join(c if c.isprintable() else " " for c in drop_addresses(text[: 4 * most]))
    line = " ".join(printable.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def truncate(value: object, most: int = 60) -> str:
    """Return a value as one printable line of at most `most` characters."""
    return one_line(str(value), most)


def quote_some(names: Iterable[object], most: int = 5) -> str:
    """Return the first names in quotes: `"a", "b", ...`."""
    quoted = [f'"{truncate(name)}"' for name in names]
    return ", ".join(quoted if len(quoted) <= most else [*quoted[:most], "..."])


def join_some(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first texts, and how many more there are: `a, b and 3 more`."""
    return separator.join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def format_ranges(numbers: Iterable[int], separator: str = ", ") -> str:
    """Return ascending numbers as ranges: "3, 7-9"."""
    ranges: list[list[int]] = []
    for n in map(int, numbers):
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return separator.join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def format_exception(error: BaseException, most: int = 300) -> str:
    """Return an exception in one line: the message of a FleetFitError; else type, message and source line."""
    if isinstance(error, FleetFitError):
        return one_line(str(error), most)
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(str(error), most)}{location}"


NO_STATISTICS = "there are no batch-norm statistics for this level: no client could measure them"
"""Why an evaluation fails where other jobs failed first. Reports name the cause of those instead."""


_NOT_IN_DEMO = {"pyarrow", "scipy", "sklearn"}
"""Modules of core dependencies that the environment of `make demo` lacks."""


def release_frames(error: BaseException) -> None:
    """Let go of the local variables of the frames that an error came through: they may hold whole models."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


def format_cause(error: BaseException, *, typed: bool = False) -> str:
    """Return the message of a foreign exception in one line, cut after 300 characters; its type if it is empty.

    Args:
        error: Any exception; `str` of a plug-in's own class may fail.
        typed: Whether the type comes before the message.
    """
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r})"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _NOT_IN_DEMO:
        return f'{error.name} is not installed. Install all that FleetFit needs: pip install "fleetfit"'
    try:
        message = " ".join(str(error).split())[:300]
    except Exception:
        message = "its message cannot be read"
    if not message:
        return name
    return f"{name}: {message}" if typed else message


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return a hint such as ` Did you mean "rounds"?`, or an empty string when no name is close."""
    if len(word) > 200:  # the time of the comparison is quadratic in the length
        return ""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def format_expected(expected: str, got: object) -> str:
    """Format `should be "a" or "b", got 'c'.`, with a hint at the closest.

    Args:
        expected: The allowed values as pydantic lists them: `'batch' or 'group'`.
        got: The value.
    """
    options = re.findall(r"'([^']*)'", expected)
    quoted = expected.replace("'", '"')
    return f"should be {quoted}, got {truncate(repr(got))}.{did_you_mean(str(got).lower(), options)}"


# ---- untrusted text on a terminal ----------------------------------------------------------------------------------

LONGEST_LINE = 5000
"""Maximal characters of a printed line; a path has at most 4096."""
_LONGEST_WORD = 300  # a name in a path has at most 255
_LONG_WORD = re.compile(rf"[^\s/\\]{{{_LONGEST_WORD + 1},}}")
_ADDRESS = re.compile(r" ?<((?:[\w.]|<locals>)+) object at 0x[0-9a-fA-F]+>")
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Escape control characters as JSON and TOML do, except line feeds.

    Control characters are C0 and C1 codes, direction marks, line separators other than a line feed, and lone
    surrogates. The value of a JSON or TOML document does not change.
    """
    return text if text.isprintable() else _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def drop_addresses(text: str) -> str:
    """Remove memory addresses from object representations, and in-memory streams entirely."""
    return _ADDRESS.sub(lambda match: "" if match[1].startswith("_io.") else f" <{match[1]} object>", text)


def make_printable(text: str, most: int = LONGEST_LINE) -> str:
    """Make text safe to print: escape control characters, and cut the middle of long words and lines."""
    text = _LONG_WORD.sub(lambda match: _shorten(match[0], _LONGEST_WORD), escape_controls(text))
    return "\n".join(line if len(line) <= most else _shorten(line, most) for line in text.split("\n"))


def _shorten(text: str, most: int) -> str:
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def _make_record_printable(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # arguments do not fit the message, and would raise in a handler
        text, record.args = f"{record.msg} {record.args!r}", ()
    printable = make_printable(text)
    if printable != text or not record.args:
        record.msg, record.args = printable, ()
    return True


logging.getLogger("fleetfit").addFilter(_make_record_printable)
