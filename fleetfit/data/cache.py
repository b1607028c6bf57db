"""The disk cache of samples that are slow to make: decoded images, encoded texts, indices.

The folder is the environment variable FLEETFIT_CACHE, else ~/.cache/fleetfit. It may be deleted at any time. If it
cannot be made, arrays are built in memory, and folders in a temporary folder that the process removes at its end.
"""

import atexit
import contextlib
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

_ARRAY = "samples.npy"
Array = NDArray[Any]
Allocate = Callable[[tuple[int, ...]], Array]
"""Makes an uninitialized array of a shape."""


def make_key(name: str, files: Sequence[Path], parameters: Sequence[object]) -> str:
    """Return the name of a folder in the cache, different for different samples.

    Args:
        name: The data set, for readers of the cache folder.
        files: The sources of the samples. Path, size and times of modification and change count; the time of change
            tells new content of an old time of modification, as `cp -p`, rsync and archives leave it.
        parameters: Everything else that the samples depend on, as JSON values.
    """
    stats = [(str(file.resolve()), file.stat()) for file in files]
    stamps = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]
    digest = hashlib.sha256(json.dumps([FORMAT, stamps, list(parameters)]).encode()).hexdigest()
    return f"{name}-{digest[:24]}"


def find_cache_folder() -> Path | None:
    """Return the cache folder, creating it if necessary; None if that is impossible."""
    try:
        variable = os.environ.get("FLEETFIT_CACHE")
        folder = Path(variable).expanduser() if variable else Path.home() / ".cache" / "fleetfit"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return folder


def load_array(folder_name: str, rows: int, build: Callable[[Allocate], Array]) -> Array:
    """Load images, uint8 [rows, C, H, W], from the cache; if they are missing or damaged, build and store them.

    Args:
        folder_name: From `make_key`.
        rows: Number of samples.
        build: Fills and returns an array that it allocates with the given function.

    Returns:
        The array. With a usable cache it is memory-mapped copy-on-write: writable, without changing the file.
    """

    def write(folder: Path) -> None:
        array: Any = build(lambda shape: _allocate_file(folder / _ARRAY, shape))
        array.flush()

    def load(folder: Path) -> Array:
        array: Array = np.lib.format.open_memmap(folder / _ARRAY, mode="c")
        if array.dtype != np.uint8 or array.ndim != 4 or len(array) != rows or not array.flags.c_contiguous:
            raise ValueError("not the array")
        return array

    if find_cache_folder() is not None:
        with contextlib.suppress(OSError):
            return _load_or_build(folder_name, write, load)
    return build(lambda shape: np.empty(shape, np.uint8))


def _allocate_file(path: Path, shape: tuple[int, ...]) -> Array:
    """Return a new array in a file. A full disk is an OSError here; it would crash a later write."""
    array: Array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def load_folder(folder_name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Load a folder of the cache; if it is missing or damaged, build it first.

    Args:
        folder_name: From `make_key`.
        build: Writes the files into an empty folder.
        load: Reads them; any exception means that an existing folder is damaged.

    Raises:
        DataError: The files cannot be written.
    """
    try:
        return _load_or_build(folder_name, build, load)
    except OSError as error:
        place = find_cache_folder() or Path(tempfile.gettempdir())
        raise DataError(
            f"{folder_name} cannot be written to {place}: {error}. Free some space, or set the environment variable "
            "FLEETFIT_CACHE to another folder.",
            path=place,
        ) from error


def _load_or_build(folder_name: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    cache = find_cache_folder()
    if cache is None:
        temporary = Path(tempfile.mkdtemp(prefix="fleetfit-data-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        build(temporary)
        return load(temporary)
    folder = cache / folder_name
    if folder.is_dir():
        try:
            return load(folder)
        except Exception:  # any damage: the folder is built again
            shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(exist_ok=True)
    temporary = Path(tempfile.mkdtemp(suffix=".tmp", prefix=folder.name, dir=folder.parent))
    try:
        build(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was faster, or the damaged folder cannot be removed
            if not folder.is_dir():
                raise
        return load(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
