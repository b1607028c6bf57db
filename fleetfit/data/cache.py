"""The disk cache of samples that are slow to make: decoded images, encoded texts, indices.

The folder is the environment variable FLEETFIT_CACHE, else ~/.cache/fleetfit. It may be deleted at any time. If it is
not writable, arrays are built in memory, and folders in a temporary folder that the process removes at its end.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetfit.errors import DataError

T = TypeVar("T")
FORMAT = 1  # raise it if the same files and parameters would decode to other bytes

Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...]], Array]
"""Makes an uninitialized array of a shape."""


def make_key(name: str, files: Sequence[Path], parameters: Sequence[object], suffix: str = ".npy") -> str:
    """Return the name of a file or folder in the cache, different for different samples.

    Args:
        name: The data set, for readers of the cache folder.
        files: The sources of the samples. Path, size and times of modification and change count; the time of change
            tells new content of an old time of modification, as `cp -p`, rsync and archives leave it.
        parameters: Everything else that the samples depend on, as JSON values.
        suffix: Suffix of the name; empty for a folder.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]
    stamps = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]
    digest = hashlib.sha256(json.dumps([FORMAT, stamps, list(parameters)]).encode()).hexdigest()
    return f"{name}-{digest[:24]}{suffix}"


def find_cache_folder() -> Path | None:
    """Return the cache folder, creating it if necessary; None if that is impossible."""
    try:
        variable = os.environ.get("FLEETFIT_CACHE")
        folder = Path(variable).expanduser() if variable else Path.home() / ".cache" / "fleetfit"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return folder


# ---- arrays ----------------------------------------------------------------------------------------------------------


def load_array(file_name: str, rows: int, build: Callable[[Allocate], Array]) -> Array:
    """Load images, uint8 [rows, C, H, W], from the cache; if they are missing or damaged, build and store them.

    Args:
        file_name: From `make_key`.
        rows: Number of samples.
        build: Fills and returns an array that it allocates with the given function.

    Returns:
        The array. With a usable cache it is memory-mapped copy-on-write: writable, without changing the file.
    """
    folder = find_cache_folder()
    if folder is None:
        return build(lambda shape: np.empty(shape, np.uint8))
    path = folder / file_name
    cached = _open_array(path, rows)
    if cached is not None:
        return cached
    try:
        handle, name = tempfile.mkstemp(suffix=".tmp", prefix=file_name, dir=folder)
        os.close(handle)
    except OSError:
        return build(lambda shape: np.empty(shape, np.uint8))
    temporary = Path(name)
    try:
        array = build(lambda shape: _allocate_file(temporary, shape))
        if not isinstance(array, np.memmap):
            return array
        try:
            array.flush()
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            return array
        cached = _open_array(path, rows)
        return array if cached is None else cached
    finally:
        temporary.unlink(missing_ok=True)


def _allocate_file(path: Path, shape: tuple[int, ...]) -> Array:
    """Return a new array in a file; in memory if the disk is full, which would otherwise crash a later write."""
    try:
        array: Array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        return np.empty(shape, np.uint8)
    return array


def _open_array(path: Path, rows: int) -> Array | None:
    """Return cached samples; None if they are missing or damaged."""
    if not path.is_file():
        return None
    try:
        array = np.lib.format.open_memmap(path, mode="c")
    except Exception:  # any damage: the array is built again
        return None
    is_intact = array.dtype == np.uint8 and array.ndim == 4 and len(array) == rows and array.flags.c_contiguous
    return array if is_intact else None


# ---- folders of files ------------------------------------------------------------------------------------------------


def load_folder(folder_name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Load a folder of the cache; if it is missing or damaged, build it first.

    Args:
        folder_name: From `make_key`, without a suffix.
        build: Writes the files into an empty folder.
        load: Reads them; any exception means that an existing folder is damaged.

    Raises:
        DataError: The files cannot be written.
    """
    cache = find_cache_folder()
    folder = None if cache is None else cache / folder_name
    if folder is not None and folder.is_dir():
        try:
            return load(folder)
        except Exception:  # any damage: the folder is built again
            shutil.rmtree(folder, ignore_errors=True)
    temporary = _make_temporary_folder(cache, folder_name)
    try:
        build(temporary)
        if folder is None:
            return load(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster, or the damaged folder cannot be removed
            if not folder.is_dir():
                raise
        return load(folder)
    except OSError as error:
        raise DataError(
            f"{folder_name} cannot be written to {temporary.parent}: {error}. Free some space, or set the environment "
            "variable FLEETFIT_CACHE to another folder.",
            path=temporary.parent,
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _make_temporary_folder(cache: Path | None, name: str) -> Path:
    if cache is not None:
        try:
            place = cache / name
            place.parent.mkdir(exist_ok=True)
            return Path(tempfile.mkdtemp(suffix=".tmp", prefix=place.name, dir=place.parent))
        except OSError as error:
            raise DataError(
                f"cannot write to the cache folder {cache}: {error}. Set FLEETFIT_CACHE to another folder.", path=cache
            ) from error
    folder = Path(tempfile.mkdtemp(prefix="fleetfit-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
