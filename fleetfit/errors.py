"""Errors that speak to the person who made the mistake.

Every error that FleetFit raises on purpose is a `FleetFitError`. Its message says what was wrong, what was expected and
what to do; the command line prints the message without a traceback and exits with code 2.
"""

import difflib
import importlib
import logging
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# ---- text that is safe to print --------------------------------------------------------------------------------------

LONGEST_LINE = 5000
"""Characters of a line that is printed; a path has at most 4096."""
_LONGEST_WORD = 300  # a name in a path has at most 255
_LONG_WORD = re.compile(rf"[^\s/\\]{{{_LONGEST_WORD + 1},}}")
_ADDRESS = re.compile(r" ?<((?:[\w.]|<locals>)+) object at 0x[0-9a-fA-F]+>")
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Return text whose control characters are escaped as in JSON and TOML; line feeds alone stay.

    Control characters are the codes of terminals (C0 and C1), marks that turn the direction of writing, line ends other
    than a line feed, and half characters that UTF-8 does not have. A document of JSON or TOML keeps its value.
    """
    return text if text.isprintable() else _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def drop_addresses(text: str) -> str:
    """Return text without the addresses of objects; a stream of bytes in memory, which nobody can look up, goes."""
    return _ADDRESS.sub(lambda found: "" if found[1].startswith("_io.") else f" <{found[1]} object>", text)


def make_printable(text: str, most: int = LONGEST_LINE) -> str:
    """Return text that is safe to print: control characters are escaped, long words and lines lose their middle."""
    text = _LONG_WORD.sub(lambda found: _cut(found[0], _LONGEST_WORD), escape_controls(text))
    return "\n".join(line if len(line) <= most else _cut(line, most) for line in text.split("\n"))


def _cut(text: str, most: int) -> str:
    kept = (most - 5) // 2
    return f"{text[:kept]} ... {text[-kept:]}"


def _make_record_printable(record: logging.LogRecord) -> bool:
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit the message, which would raise in a handler
        text, record.args = f"{record.msg} {record.args!r}", ()
    printable = make_printable(text)
    if printable != text or not record.args:
        record.msg, record.args = printable, ()
    return True


logging.getLogger("fleetfit").addFilter(_make_record_printable)


# ---- errors ----------------------------------------------------------------------------------------------------------


class FleetFitError(Exception):
    """Base of all errors that a user of FleetFit can cause and mend."""

    def __str__(self) -> str:
        """Return the message; texts of files and messages in it are safe to print."""
        return make_printable(drop_addresses(super().__str__()))


class ConfigError(FleetFitError, ValueError):
    """A run file, an override or an argument is wrong."""


class DataError(FleetFitError):
    """A data set, a file of it, or a partition is wrong."""


class ModelError(FleetFitError):
    """An architecture, its layout or a state does not fit."""


class PlanError(FleetFitError):
    """No plan satisfies the budgets.

    Attributes:
        tolerance: With which levels fit; None where none helps, or nothing was tried.
        mode: Which cut fits within the tolerances as they are, "width"; None likewise.
        ceilings: By further cost the budgets with which levels fit, as fractions of the full model; None likewise.
    """

    def __init__(
        self,
        message: str = "",
        tolerance: float | None = None,
        mode: str | None = None,
        ceilings: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:
        """Take the sentence, and what would help."""
        super().__init__(message)
        self.tolerance, self.mode, self.ceilings = tolerance, mode, ceilings


class RunError(FleetFitError):
    """A run, its folder or one of its rounds cannot go on."""


class NoUsableUpdates(RunError):
    """No client returned a usable update: in several rounds in a row, or in all rounds of a run."""


class Unexpected(RunError):
    """Code of a plug-in or of FleetFit itself raised in a worker what nobody has foreseen."""

    def __init__(self, message: str, details: str, foreign: bool) -> None:
        """Take the sentence and what is behind it.

        Args:
            message: What happened.
            details: The traceback.
            foreign: Whether it was a plug-in's code.
        """
        super().__init__(message)
        self.details, self.foreign = details, foreign


class MissingExtra(FleetFitError, ImportError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, extra: str, what: str) -> None:
        """Say which extra to install.

        Args:
            extra: Name of the extra, as in `pip install "fleetfit[extra]"`.
            what: The feature that needs it, as the start of a sentence ("Reading Parquet files").
        """
        super().__init__(f'{what} needs an optional dependency: pip install "fleetfit[{extra}]"')


WINDOWS = os.name == "nt"


def refuse_on_windows(what: str, instead: str) -> None:
    """Refuse on Windows what hands open connections to other processes, or needs sockets in folders.

    Args:
        what: As the start of a sentence.
        instead: What to do there, as a sentence.

    Raises:
        ConfigError: This is Windows.
    """
    if WINDOWS:
        raise ConfigError(f"{what} works on Linux and macOS only. {instead}")


def need(module: str, extra: str, what: str) -> Any:
    """Return a module that only comes with an extra.

    Args:
        module: Its name.
        extra: The extra of FleetFit that has it.
        what: The feature that needs it, as the start of a sentence.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(extra, what) from error


def one_line(text: object, most: int = 200) -> str:
    """Return a stranger's text in one line that is safe to print and to keep.

    Args:
        text: Whatever was sent; what is no text has its type shown.
        most: Characters that are kept.

    Returns:
        Printable characters only: no line breaks, no escapes of a terminal, no marks that turn the direction of
        writing, no half characters that UTF-8 does not have.
    """
    if not isinstance(text, str):
        return f"({type(text).__name__})"[:most]
    kept = "".join(c if c.isprintable() else " " for c in drop_addresses(text[: 4 * most]))
    line = " ".join(kept.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def what_raised(error: BaseException, most: int = 300) -> str:
    """Return an error in one line: a FleetFitError's own sentence, of all others the type and the place too."""
    if isinstance(error, FleetFitError):
        return one_line(str(error), most)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(str(error), most)}{place}"


def shown(value: object, most: int = 60) -> str:
    """Return a value as a message shows it: in one line that is safe to print, cut where it is long."""
    return one_line(str(value), most)


def quote_some(names: Iterable[object], most: int = 5) -> str:
    """Return the first of some names in quotes, as a message shows them: `"a", "b", ...`."""
    quoted = [f'"{shown(name)}"' for name in names]
    return ", ".join(quoted if len(quoted) <= most else [*quoted[:most], "..."])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint such as ` Did you mean "rounds"?`, or an empty string when nothing is near."""
    if len(word) > 200:  # no misspelling; and comparing takes time that grows with the square of it
        return ""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{near[0]}"?' if near else ""


def should_be(expected: str, got: object) -> str:
    """Return what a value of a few that there are should be, and what it is.

    Args:
        expected: These few as pydantic says them: `'batch' or 'group'`.
        got: The value.
    """
    known = re.findall(r"'([^']*)'", expected)
    quoted = expected.replace("'", '"')
    return f"should be {quoted}, got {shown(repr(got))}.{did_you_mean(str(got).lower(), known)}"


def in_range(name: str, value: float, low: float, high: float = float("inf"), *, closed: bool = False) -> None:
    """Refuse a hyperparameter outside low < value < high; `closed` admits low itself.

    Raises:
        ConfigError: It is outside.
    """
    if not (low <= value if closed else low < value) or not value < high:
        least = f"at least {low:g}" if closed else f"above {low:g}"
        most = "" if high == float("inf") else f" and below {high:g}"
        raise ConfigError(f"{name} must be {least}{most}, got {value}.")
