"""Arrays in an `.npz` file or in a folder of `.npy` files, memory-mapped.

A member that was written with `numpy.savez` lies as it is in the file and is mapped there. One that was compressed
(`numpy.savez_compressed`), or one that lies in parts, is written once into the cache and mapped from there.
"""

import math
import os
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fleetfit import paths
from fleetfit.data import _cache
from fleetfit.data._kept import kept
from fleetfit.errors import DataError, FleetFitError, did_you_mean

Array = NDArray[Any]
_ROWS = 4096  # rows in memory at a time
_MOST_SAID = 300  # characters of a library's own message


class Arrays:
    """The arrays of one file or folder, by name."""

    def __init__(self, path: Path) -> None:
        """Look at what is there.

        Raises:
            DataError: The path is no `.npz` file and no folder of `.npy` files.
        """
        self.path = path
        if path.is_dir():
            self.names = sorted(file.stem for file in path.glob("*.npy"))
        elif path.is_file():
            paths.check_file(path, DataError)
            try:
                with zipfile.ZipFile(path) as archive:
                    found = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
            except Exception as error:  # a damaged directory of the archive raises whatever it likes
                raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error
            self.names = sorted(name for name in found if name and not any(part in name for part in ("/", "\\", "\0")))
            if len(set(self.names)) != len(self.names):
                raise DataError(f"{path} has two arrays of one name.")
        else:
            paths.check_file(path, DataError)  # says what it is instead
        if not self.names:
            raise DataError(f"{path} holds no arrays.")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def one(self, name: str) -> Array:
        """Return an array, mapped copy-on-write: it can be written to, and the file never changes.

        Raises:
            DataError: There is none of that name, or it holds Python objects or cannot be read.
        """
        if name not in self.names:
            raise DataError(
                f'{self.path} has no array "{name}"; it has {", ".join(self.names)}.{did_you_mean(name, self.names)}'
            )
        try:
            if self.path.is_dir():
                found: Array | None = self._loaded(self.path / f"{name}.npy")
            else:
                found = self._mapped(name)
            found = self._unpacked(name) if found is None else found
        except FleetFitError:
            raise
        except Exception as error:  # a damaged header or archive raises whatever it likes
            said = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f'{self.path}: array "{name}" cannot be read: {said[:_MOST_SAID]}') from error
        if not found.ndim:
            raise DataError(f'{self.path}: array "{name}" is a single value; it must have one for each sample.')
        return found

    def _loaded(self, path: Path) -> Array:
        """Map a file of its own, whose header is looked at first."""
        with paths.opened(path, DataError) as file:
            shape, fortran, dtype, header = _header(file)
            size = os.fstat(file.fileno()).st_size
        if size - header < _size_of(shape, dtype):
            raise ValueError(f"it should have {_size_of(shape, dtype):,} bytes, and {size - header:,} are there")
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "c", header, shape, "F" if fortran else "C")

    def joined(self, names: Sequence[str]) -> Array:
        """Return arrays one after the other, from the cache if they are several."""
        parts = [self.one(name) for name in names]
        if len(parts) == 1:
            return parts[0]
        if len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            shapes = ", ".join(
                f"{name} {part.dtype} {list(part.shape)}" for name, part in zip(names, parts, strict=True)
            )
            raise DataError(f"{self.path}: {shapes} do not fit together.")

        def build(target: Path) -> None:
            shape = (sum(map(len, parts)), *parts[0].shape[1:])
            whole = np.lib.format.open_memmap(target / "whole.npy", "w+", parts[0].dtype, shape)
            at = 0
            for part in parts:
                for start in range(0, len(part), _ROWS):
                    some = part[start : start + _ROWS]
                    whole[at : at + len(some)] = some
                    at += len(some)
            whole.flush()

        return kept(self._key([*names]), build, lambda target: np.load(target / "whole.npy", mmap_mode="c"))

    def _key(self, parameters: Sequence[str]) -> str:
        stamps = [self.path / f"{name}.npy" for name in parameters] if self.path.is_dir() else [self.path]
        return _cache.key(self.path.stem, stamps, ["arrays", *parameters], suffix="")

    def _mapped(self, name: str) -> Array | None:
        """Return a member that is not compressed, where it lies in the file."""
        with zipfile.ZipFile(self.path) as archive:
            member = archive.getinfo(f"{name}.npy")
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
                return None
            with archive.open(member) as content:
                shape, fortran, dtype, header = _header(content)
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            local = file.read(30)  # the zip format's local header: two lengths at its end, then name and extra field
        start = member.header_offset + 30 + int.from_bytes(local[26:28], "little")
        start += int.from_bytes(local[28:30], "little") + header
        if _size_of(shape, dtype) + header != member.file_size:
            raise ValueError(f"it should have {_size_of(shape, dtype):,} bytes, and {member.file_size:,} are there")
        if not math.prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(self.path, dtype, "c", start, shape, "F" if fortran else "C")

    def _unpacked(self, name: str) -> Array:
        def build(target: Path) -> None:
            with zipfile.ZipFile(self.path) as archive:
                member = archive.getinfo(f"{name}.npy")
                with archive.open(member) as content:
                    shape, _, dtype, header = _header(content)
                if _size_of(shape, dtype) + header != member.file_size:
                    raise ValueError("its header says another size than the archive")
                if member.file_size > shutil.disk_usage(target).free:
                    raise DataError(f'{self.path}: array "{name}" unpacks to {member.file_size:,} bytes, and there is '
                                    f"no room for them in {target.parent}.")  # fmt: skip
                archive.extract(member, target)

        return kept(self._key([name]), build, lambda target: np.load(target / f"{name}.npy", mmap_mode="c"))


def _size_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the bytes of an array; NumPy's own product would overflow."""
    if any(not isinstance(n, int) or n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    return math.prod(shape) * dtype.itemsize


def _header(content: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, Fortran order, dtype and the length of the header of a `.npy` file."""
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(content)
    if dtype.hasobject:
        raise ValueError("it holds Python objects; save numbers or text")
    return shape, fortran, dtype, content.tell()
