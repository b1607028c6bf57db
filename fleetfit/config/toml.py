"""Read TOML files, and resolve paths in them."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, truncate

MOST_BYTES = 4 << 20
"""Largest size of a run file, a budget file or a plan. A complete run file has a few thousand bytes."""
DEEPEST = 32
"""Deepest nesting of tables and lists. A complete run file has eight levels."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or exceeds the limits of a run file.
    """
    path = files.parse_path(path)
    try:
        with path.open("rb") if files.is_open_stream(path) else files.open_file(path, ConfigError) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path} exceeds the limit of {MOST_BYTES >> 20} MB for run files.", path=path)
        return parse_toml(content.decode("utf-8-sig"), str(path))
    except OSError as error:  # the TOML error may point into the middle of the file
        raise ConfigError(f"{truncate(path, 200)} cannot be read: {files.format_os_error(error)}.", path=path) from None
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
    check_paths(table, label)
    return table


_PATH_KEYS = ("path", "file", "folder", "tokenizer", "checkpoint", "trace", "start", "levels")
_ESCAPED_PATH = re.compile(r"[A-Za-z]:[\b\t\n\f\r]")
"""The beginning of a Windows path in which TOML has read a backslash as an escape."""


def check_paths(value: Any, label: str, key: str = "") -> None:
    """Refuse Windows paths in which TOML has read backslashes as escapes: tabs, line feeds and others.

    Raises:
        ConfigError: There is one.
    """
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, one in inner:
        check_paths(one, label, f"{key}.{part}".lstrip("."))
    if not isinstance(value, str) or not re.search(r"[\b\t\n\f\r]", value):
        return
    if _ESCAPED_PATH.match(value) or (key.rpartition(".")[2] in _PATH_KEYS and not Path(value).exists()):
        raise ConfigError(
            f"{label}: {truncate(key)} has control characters, got {truncate(repr(value))}: a backslash between double "
            "quotes begins an escape. Write a path of Windows in single quotes, or with /.",
            key=key,
        )


def _suggest_quotes(line: str) -> str:
    """Return a hint for a line with a backslash between double quotes, as in a path of Windows."""
    path = re.search(r'"([^"\'\n]*\\[^"\'\n]*)"?', line)
    if path is None:
        return ""
    line = f"{line[: path.start()].strip()} '{path[1]}'"
    return f" Write a path of Windows in single quotes, or with /: {truncate(line, 200)}"


def check_values(table: Mapping[str, Any], label: str = "") -> None:
    """Check the depth of tables and lists, and the size of whole numbers.

    Args:
        table: Tables, lists, and values of any kind.
        label: Its name in messages.

    Raises:
        ConfigError: Tables are nested deeper than `DEEPEST`, or a number has more than 64 bits.
    """
    begin = f"{label}: " if label else ""
    stack: list[tuple[tuple[str, ...], Any]] = [((), table)]
    while stack:
        keys, value = stack.pop()
        if isinstance(value, Mapping | list | tuple) and len(keys) >= DEEPEST:
            raise ConfigError(
                f"{begin}{truncate('.'.join(keys[:4]))}...: tables and lists are nested deeper than {DEEPEST}.",
                key=".".join(keys[:4]),
            )
        if isinstance(value, Mapping):
            stack += [((*keys, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            stack += [((*keys, str(i)), inner) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            dotted = ".".join(f"#{int(part) + 1}" if part.isdigit() else part for part in keys)
            raise ConfigError(
                f"{begin}{truncate(dotted)}: whole numbers must have at most 64 bits.", key=".".join(keys)
            )


def find_base_folder(path: str | Path) -> Path:
    """Return the base folder of relative paths in a run file; the working folder for a stream."""
    working_folder = Path.cwd()
    return working_folder if files.is_open_stream(Path(path)) else resolve_path(path, working_folder, "run file").parent


def resolve_path(path: str | Path, folder: Path, where: str, key: str | None = None) -> Path:
    """Return the absolute path, whether or not it exists.

    Args:
        path: A path; `~` is the home folder.
        folder: Base folder of a relative path.
        where: The path's key in messages, such as "[data] folder".
        key: Dotted key of the path in a run file; None if it is not from a run file.

    Raises:
        ConfigError: The path is malformed.
    """
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
