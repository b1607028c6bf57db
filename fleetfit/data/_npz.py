"""Arrays in an `.npz` file or in a folder of `.npy` files, memory-mapped.

A member that was written with `numpy.savez` lies as it is in the file and is mapped there. One that was compressed
(`numpy.savez_compressed`), or one that lies in parts, is written once into the cache and mapped from there.
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fleetfit.data import _cache
from fleetfit.data._kept import kept
from fleetfit.errors import DataError, did_you_mean

Array = NDArray[Any]
_ROWS = 4096  # rows in memory at a time


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
            try:
                with zipfile.ZipFile(path) as archive:
                    self.names = sorted(name[:-4] for name in archive.namelist() if name.endswith(".npy"))
            except (OSError, zipfile.BadZipFile) as error:
                raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error
        else:
            raise DataError(f"there is no file {path}.")
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
                return np.load(self.path / f"{name}.npy", mmap_mode="c")
            found = self._mapped(name)
            return self._unpacked(name) if found is None else found
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise DataError(f'{self.path}: array "{name}" cannot be read: {error}') from error

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
        if not np.prod(shape):
            return np.zeros(shape, dtype)
        return np.memmap(self.path, dtype, "c", start, shape, "F" if fortran else "C")

    def _unpacked(self, name: str) -> Array:
        def build(target: Path) -> None:
            with zipfile.ZipFile(self.path) as archive:
                archive.extract(f"{name}.npy", target)
            np.load(target / f"{name}.npy", mmap_mode="r")  # refuses Python objects

        return kept(self._key([name]), build, lambda target: np.load(target / f"{name}.npy", mmap_mode="c"))


def _header(content: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, Fortran order, dtype and the length of the header of a `.npy` file."""
    version = np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(content)
    if dtype.hasobject:
        raise ValueError("it holds Python objects; save numbers or text")
    return shape, fortran, dtype, content.tell()
