"""What was made once from a data set's files and is kept in the cache as a folder of arrays.

Without a cache folder it is made anew for each process, in a temporary folder that the process removes at its end.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fleetfit.data._cache import cache_folder
from fleetfit.errors import DataError

T = TypeVar("T")


def kept(folder_name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Return what is kept in a folder of the cache, made first if it is missing or damaged.

    Args:
        folder_name: What `_cache.key` returned, without a suffix.
        build: Writes the files into an empty folder.
        load: Reads them; whatever it raises about a folder that was there already means that it is damaged.

    Raises:
        DataError: There is no room for it.
    """
    cache = cache_folder()
    if cache is not None:
        place = cache / folder_name
        if place.is_dir():
            try:
                return load(place)
            except Exception:  # whatever is wrong with it, it is made again
                shutil.rmtree(place, ignore_errors=True)
    temporary = _empty_folder(cache, folder_name)
    try:
        build(temporary)
        if cache is None:
            return load(temporary)
        try:
            temporary.rename(place)
        except OSError:  # another process was faster, or something cannot be removed
            if not place.is_dir():
                raise
        return load(place)
    except OSError as error:
        raise DataError(
            f"{folder_name} cannot be kept in {temporary.parent}: {error}. Make room there, or set the environment "
            "variable FLEETFIT_CACHE to a folder that has room."
        ) from error
    finally:
        if cache is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _empty_folder(cache: Path | None, name: str) -> Path:
    if cache is not None:
        try:
            return Path(tempfile.mkdtemp(suffix=".tmp", prefix=name, dir=cache))
        except OSError as error:
            raise DataError(f"the cache folder {cache} cannot be written to: {error}. Set FLEETFIT_CACHE.") from error
    folder = Path(tempfile.mkdtemp(prefix="fleetfit-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
