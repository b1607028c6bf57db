"""A TOML file becomes tables."""

import tomllib
from pathlib import Path
from typing import Any

from fleetfit.errors import ConfigError


def read_table(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: The file is missing, cannot be read or is not TOML.
    """
    path = Path(path).expanduser()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; a run file is a TOML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no TOML file: it is not UTF-8 text.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}.") from None
