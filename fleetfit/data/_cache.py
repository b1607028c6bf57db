"""Decoded images kept on disk, so that a data set is decoded once and memory-mapped from then on.

The folder is the environment variable FLEETFIT_CACHE, else ~/.cache/fleetfit. It may be deleted at any time; one that
cannot be written to only means that images are decoded again.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FORMAT = 1  # raise it when the same files and parameters would decode to other bytes

Pixels = NDArray[np.uint8]
Allocate = Callable[[tuple[int, ...]], Pixels]


def key(name: str, files: Sequence[Path], parameters: Sequence[object]) -> str:
    """Return a file name that changes whenever the decoded images could.

    Args:
        name: The data set, for people who look into the folder.
        files: Where the images are read from; path, size and modification time count.
        parameters: Whatever else decides about the decoded bytes; must survive JSON.
    """
    stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps([FORMAT, stamps, list(parameters)]).encode()).hexdigest()
    return f"{name}-{digest[:24]}.npy"


def cached(file_name: str, rows: int, build: Callable[[Allocate], Pixels]) -> Pixels:
    """Return images from the cache, or build them and keep them there.

    Args:
        file_name: What `key` returned.
        rows: Number of images.
        build: Gets a function that makes an uninitialised uint8 array of a shape, and returns that array filled.

    Returns:
        uint8 [rows, C, H, W], memory-mapped copy-on-write where the cache could be used: it can be written to, and the
        file never changes.
    """
    folder = _folder()
    if folder is None:
        return build(_in_memory)
    path = folder / file_name
    found = _opened(path, rows)
    if found is not None:
        return found
    try:
        handle, temporary = tempfile.mkstemp(suffix=".tmp", prefix=file_name, dir=folder)
        os.close(handle)
    except OSError:
        return build(_in_memory)
    try:
        pixels = build(lambda shape: _on_disk(Path(temporary), shape))
        if not isinstance(pixels, np.memmap):
            return pixels
        _publish(pixels, Path(temporary), path)
        found = _opened(path, rows)
        return pixels if found is None else found
    finally:
        Path(temporary).unlink(missing_ok=True)


def _folder() -> Path | None:
    """Return the cache folder, made if need be; None if there can be none."""
    try:
        chosen = os.environ.get("FLEETFIT_CACHE")
        folder = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "fleetfit"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return folder


def _in_memory(shape: tuple[int, ...]) -> Pixels:
    return np.empty(shape, dtype=np.uint8)


def _on_disk(path: Path, shape: tuple[int, ...]) -> Pixels:
    """Return a new array in a file whose space is reserved: a full disk must be an error now, not a crash later."""
    try:
        array: Pixels = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        if hasattr(os, "posix_fallocate"):
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        return _in_memory(shape)
    return array


def _publish(pixels: "np.memmap[tuple[int, ...], np.dtype[np.uint8]]", temporary: Path, path: Path) -> None:
    """Put a finished file in its place at once, so that nobody ever sees half of one; failing to is no error."""
    try:
        pixels.flush()
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        return


def _opened(path: Path, rows: int) -> Pixels | None:
    """Return the cached images, or None if they are missing or damaged."""
    if not path.is_file():
        return None
    try:
        array = np.lib.format.open_memmap(path, mode="c")
    except Exception:  # whatever is wrong with the file, it is built again
        return None
    whole = array.dtype == np.uint8 and array.ndim == 4 and len(array) == rows and array.flags.c_contiguous
    return array if whole else None
