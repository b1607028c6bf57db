"""Read TOML files, and make paths in them absolute."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, truncate

MOST_BYTES = 4 << 20
"""Largest size of a run file, a budget file or a plan; a complete run file has some thousands."""
DEEPEST = 32
"""Deepest nesting of tables and lists; a complete run file has eight."""


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
            raise ConfigError(f"{path} exceeds the {MOST_BYTES >> 20} MB limit for run files.", path=path)
        return parse_toml(content.decode("utf-8-sig"), str(path))
    except OSError as error:  # in the middle of a file
        raise ConfigError(f"{truncate(path, 200)} cannot be read: {files.format_os_error(error)}.", path=path) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a TOML file: it is not UTF-8 text.", path=path) from None
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
        raise ConfigError(f"{label} is not valid TOML: {truncate(error, 300)}.") from None
    except RecursionError:
        raise ConfigError(f"{label}: tables and lists are nested deeper than {DEEPEST}.") from None
    except ValueError:  # Python's limit on digits, the one error that tomllib does not convert
        raise ConfigError(f"{label}: a number has thousands of digits; whole numbers have at most 64 bits.") from None
    check_values(table, label)
    return table


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
        place, value = stack.pop()
        if isinstance(value, Mapping | list | tuple) and len(place) >= DEEPEST:
            raise ConfigError(
                f"{begin}{truncate('.'.join(place[:4]))}...: tables and lists are nested deeper than {DEEPEST}.",
                key=".".join(place[:4]),
            )
        if isinstance(value, Mapping):
            stack += [((*place, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            stack += [((*place, str(i)), inner) for i, inner in enumerate(value)]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            shown = ".".join(f"#{int(part) + 1}" if part.isdigit() else part for part in place)
            raise ConfigError(f"{begin}{truncate(shown)}: a whole number has at most 64 bits.", key=".".join(place))


def find_base_folder(path: str | Path) -> Path:
    """Return the folder to which paths in a run file are relative; of a stream, the working folder."""
    here = Path.cwd()
    return here if files.is_open_stream(Path(path)) else resolve_path(path, here, "run file").parent


def resolve_path(path: str | Path, folder: Path, where: str, key: str | None = None) -> Path:
    """Return the absolute path, whether or not it exists.

    Args:
        path: A path; `~` is a home folder.
        folder: The folder to which it is relative.
        where: The place of the path, for messages, such as "[data] folder".
        key: The key that has the path; None for another place.

    Raises:
        ConfigError: The path is malformed.
    """
    if "\0" in str(path):
        raise ConfigError(f"{where}: a path holds no NUL character, got {truncate(repr(str(path)))}.", key=key)
    try:
        return (folder / Path(path).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{where}: {truncate(path, 200)} is not a path here: {reason}.", key=key) from None


def path_exists(path: Path) -> bool:
    """Return whether a path exists; a malformed one does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
