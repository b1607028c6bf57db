"""A TOML file becomes tables, and paths in it become absolute; what no run file holds is refused."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, truncate

MOST_BYTES = 4 << 20
"""Of a run file, a budget file or a plan: one with everything in it has some thousands."""
DEEPEST = 32
"""Tables and lists within each other: a run file with everything in it has eight."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: The file is missing, cannot be read, is not TOML, or no file of settings has such tables.
    """
    path = files.parse_path(path)
    try:
        return parse_toml(_bytes_of(path).decode("utf-8-sig"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {truncate(path, 200)}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; a run file is a TOML file.") from None
    except OSError as error:
        raise ConfigError(f"{truncate(path, 200)} cannot be read: {files.format_os_error(error)}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no TOML file: it is not UTF-8 text.") from None


def _bytes_of(path: Path) -> bytes:
    """Read a regular file or an open stream, up to the largest size of a run file."""
    with path.open("rb") if files.is_open_stream(path) else files.open_file(path) as file:
        found = file.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES >> 20} MB, which no file of settings has.")
    return found


def parse_toml(text: str, what: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Args:
        text: The text.
        what: What messages call it.

    Raises:
        ConfigError: It is not TOML, or no file of settings has such tables.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{what} is no valid TOML: {truncate(error, 300)}.") from None
    except RecursionError:
        raise ConfigError(
            f"{what}: tables and lists are nested deeper than {DEEPEST}, which no settings are."
        ) from None
    except ValueError:  # the one that tomllib lets pass is Python's limit on digits
        raise ConfigError(f"{what}: a number has thousands of digits; whole numbers have at most 64 bits.") from None
    check_values(found, what)
    return found


def check_values(table: Mapping[str, Any], what: str = "") -> None:
    """Refuse tables that no file of settings has: nested without end, or with numbers beyond 64 bits.

    Args:
        table: Tables, lists, and values of any kind.
        what: What messages call it.

    Raises:
        ConfigError: There is such a thing; the message names its key.
    """
    begin = f"{what}: " if what else ""
    left: list[tuple[tuple[str, ...], Any]] = [((), table)]
    while left:
        place, value = left.pop()
        if isinstance(value, Mapping | list | tuple) and len(place) >= DEEPEST:
            raise ConfigError(
                f"{begin}{truncate('.'.join(place[:4]))}...: tables and lists are nested deeper than {DEEPEST}, "
                "which no settings are."
            )
        if isinstance(value, Mapping):
            left += [((*place, str(key)), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [((*place, f"#{i}"), inner) for i, inner in enumerate(value, 1)]
        elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise ConfigError(f"{begin}{truncate('.'.join(place))}: a whole number has at most 64 bits.")


def find_base_folder(path: str | Path) -> Path:
    """Return the folder from which relative paths in a run file are seen; of a stream, the working folder."""
    here = Path.cwd()
    return here if files.is_open_stream(Path(path)) else resolve_path(path, here, "run file").parent


def resolve_path(given: str | Path, folder: Path, key: str) -> Path:
    """Return where a path of a run file lies, seen from its folder; whether something is there is not asked.

    Args:
        given: The path; `~` stands for a home folder.
        folder: The run file's.
        key: Where the path was given, for messages, such as "[data] folder".

    Raises:
        ConfigError: Nothing can have such a path.
    """
    if "\0" in str(given):
        raise ConfigError(f"{key}: a path holds no NUL character, got {truncate(repr(str(given)))}.")
    try:
        return (folder / Path(given).expanduser()).resolve()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a name that is too long, a loop of links, an unknown user's home
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{key}: {truncate(given, 200)} is no path here: {reason}.") from None


def path_exists(path: Path) -> bool:
    """Tell whether something is at a path; at one that nothing can have, nothing is."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
