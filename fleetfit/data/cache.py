"""What is made once from a data set's files and kept on disk: decoded images, encoded texts, an index.

The folder is the environment variable FLEETFIT_CACHE, else ~/.cache/fleetfit. It may be deleted at any time; one that
cannot be written to only means that arrays are decoded again. What has to be a folder of files is then made anew for
each process, in a temporary folder that the process removes at its end.
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
from numpy.typing import DTypeLike, NDArray

from fleetfit.errors import DataError

T = TypeVar("T")
FORMAT = 1  # raise it when the same files and parameters would decode to other bytes

Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...]], Array]


def key(name: str, files: Sequence[Path], parameters: Sequence[object], suffix: str = ".npy") -> str:
    """Return a file name that changes whenever the decoded samples could.

    Args:
        name: The data set, for people who look into the folder.
        files: Where the samples are read from; path, size and modification time count.
        parameters: Whatever else decides about the decoded bytes; must survive JSON.
        suffix: How the file's name ends; a folder's has none.
    """
    stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps([FORMAT, stamps, list(parameters)]).encode()).hexdigest()
    return f"{name}-{digest[:24]}{suffix}"


def cached(
    file_name: str, rows: int, build: Callable[[Allocate], Array], dtype: DTypeLike = np.uint8, ndim: int = 4
) -> Array:
    """Return samples from the cache, or build them and keep them there.

    Args:
        file_name: What `key` returned.
        rows: Number of samples.
        build: Gets a function that makes an uninitialised array of a shape, and returns that array filled.
        dtype: Of the array: uint8 for images.
        ndim: Its number of dimensions: 4 for images [rows, C, H, W].

    Returns:
        The array, memory-mapped copy-on-write where the cache could be used: it can be written to, and the file never
        changes.
    """
    kind = np.dtype(dtype)
    place = cache_folder()
    if place is None:
        return build(lambda shape: np.empty(shape, kind))
    path = place / file_name
    found = _opened(path, rows, kind, ndim)
    if found is not None:
        return found
    try:
        handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=file_name, dir=place)
        os.close(handle)
    except OSError:
        return build(lambda shape: np.empty(shape, kind))
    try:
        array = build(lambda shape: _on_disk(Path(temporary), shape, kind))
        if not isinstance(array, np.memmap):
            return array
        _publish(array, Path(temporary), path)
        found = _opened(path, rows, kind, ndim)
        return array if found is None else found
    finally:
        Path(temporary).unlink(missing_ok=True)


def cache_folder() -> Path | None:
    """Return the cache folder, made if need be; None if there can be none."""
    try:
        chosen = os.environ.get("FLEETFIT_CACHE")
        place = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fleetfit"
        place.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return place


def _on_disk(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return a new array in a file whose space is reserved: a full disk must be an error now, not a crash later."""
    try:
        array: Array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        return np.empty(shape, dtype)
    return array


def _publish(array: "np.memmap[Any, Any]", temporary: Path, path: Path) -> None:
    """Put a finished file in its place at once, so that nobody ever sees half of one; failing to is no error."""
    try:
        array.flush()
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        return


def _opened(path: Path, rows: int, dtype: np.dtype[Any], ndim: int) -> Array | None:
    """Return the cached samples, or None if they are missing or damaged."""
    if not path.is_file():
        return None
    try:
        array = np.lib.format.open_memmap(path, mode="c")
    except Exception:  # whatever is wrong with the file, it is built again
        return None
    whole = array.dtype == dtype and array.ndim == ndim and len(array) == rows and array.flags.c_contiguous
    return array if whole else None


# ---- a folder of files -----------------------------------------------------------------------------------------------


def kept(folder_name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Return what is kept in a folder of the cache, made first if it is missing or damaged.

    Args:
        folder_name: What `key` returned, without a suffix.
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
            "variable FLEETFIT_CACHE to a folder that has room.",
            path=temporary.parent,
        ) from error
    finally:
        if cache is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _empty_folder(cache: Path | None, name: str) -> Path:
    if cache is not None:
        try:
            return Path(tempfile.mkdtemp(suffix=".tmp", prefix=name, dir=cache))
        except OSError as error:
            raise DataError(
                f"the cache folder {cache} cannot be written to: {error}. Set FLEETFIT_CACHE.", path=cache
            ) from error
    folder = Path(tempfile.mkdtemp(prefix="fleetfit-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
