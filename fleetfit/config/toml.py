"""Read TOML files, and resolve paths in them."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.config.keys import format_key
from fleetfit.errors import ConfigError, truncate

DEEPEST = 32
"""Deepest nesting of tables and lists. A complete run file has eight levels."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or exceeds the limits of a run file.
    """
    path = files.parse_path(path)
    try:
        text = files.read_bytes(path, ConfigError).decode("utf-8-sig")
        return parse_toml(text, str(path))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a TOML file: its text is not UTF-8. Save it as UTF-8.", path=path) from None
    except ConfigError as error:
        error.path = error.path or path
        raise


def parse_toml(text: str, label: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Args:
        text: The text.
        label: Its name in messages.

    Raises:
        ConfigError: The text is not TOML, or exceeds the limits of a run file.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        number = re.search(r"at line (\d+)", str(error))
        line = text.split("\n")[int(number[1]) - 1] if number else ""
        raise ConfigError(f"{label} is not valid TOML: {truncate(error, 300)}.{_suggest_quotes(line)}") from None
    except RecursionError:
        raise ConfigError(f"{label}: tables and lists are nested deeper than {DEEPEST}.") from None
    except ValueError:  # Python's limit on digits; tomllib does not convert this error
        raise ConfigError(f"{label}: whole numbers must have at most 64 bits; one has thousands of digits.") from None
    check_values(table, label)
    return table


_PATH_KEYS = ("path", "file", "folder", "tokenizer", "checkpoint", "trace", "init_from", "levels")
_ESCAPED_PATH = re.compile(r"[A-Za-z]:[\b\t\n\f\r]")
"""The beginning of a Windows path in which TOML has read a backslash as an escape."""


def _is_escaped_path(key: str, value: str) -> bool:
    """Return whether TOML has read backslashes of a Windows path as escapes: tabs, line feeds and others."""
    has_controls = re.search(r"[\b\t\n\f\r]", value) is not None
    return has_controls and (
        _ESCAPED_PATH.match(value) is not None or (key in _PATH_KEYS and not path_exists(Path(value)))
    )


def _suggest_quotes(line: str) -> str:
    """Return a hint for a line with a backslash between double quotes, as in a path of Windows."""
    path = re.search(r'"([^"\'\n]*\\[^"\'\n]*)"?', line)
    if path is None:
        return ""
    line = f"{line[: path.start()].strip()} '{path[1]}'"
    return f" Write a path of Windows in single quotes, or with /: {truncate(line, 200)}"


def check_values(table: Mapping[str, Any], label: str = "") -> None:
    """Check the depth of tables and lists, the size of whole numbers, and paths of Windows.

    Args:
        table: Tables, lists, and values of any kind.
        label: Its name in messages.

    Raises:
        ConfigError: Tables are nested deeper than `DEEPEST`, a number has more than 64 bits, or a path has escapes.
    """
    stack: list[tuple[tuple[str, ...], Any]] = [((), table)]
    while stack:
        keys, value = stack.pop()
        key, problem = ".".join(keys), ""
        if isinstance(value, Mapping | list | tuple) and len(keys) >= DEEPEST:
            key, problem = ".".join(keys[:4]), f"tables and lists are nested deeper than {DEEPEST}."
        elif isinstance(value, Mapping):
            stack += [((*keys, str(part)), inner) for part, inner in value.items()]
        elif isinstance(value, list | tuple):
            stack += [((*keys, str(i)), inner) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            problem = "whole numbers must have at most 64 bits."
        elif isinstance(value, str) and _is_escaped_path(keys[-1] if keys else "", value):
            problem = (
                f"has control characters, got {truncate(repr(value))}: a backslash between double quotes begins an "
                "escape. Write a path of Windows in single quotes, or with /."
            )
        if problem:
            raise ConfigError(": ".join(filter(None, (label, format_key(key), problem))), key=key)


def resolve_path(path: str | Path, folder: Path, key: str | None = None) -> Path:
    """Return the absolute path, whether or not it exists.

    Args:
        path: A path; `~` is the home folder.
        folder: Base folder of a relative path.
        key: Dotted key of the path in a run file; None for the run file itself.

    Raises:
        ConfigError: The path is malformed.
    """
    where = format_key(key) if key else "run file"
    if "\0" in str(path):
        raise ConfigError(
            f"{where}: a path must not contain a NUL character, got {truncate(repr(str(path)))}.", key=key
        )
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, or the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{where}: {truncate(path, 200)} is not a valid path: {reason}.", key=key) from None


def path_exists(path: Path) -> bool:
    """Return whether a path exists; False for a malformed one."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
