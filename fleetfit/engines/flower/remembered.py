"""What a node keeps on its own disk: what it remembers of a run, and tensors that are never trained.

It is never sent. Of a run's memory the last two versions are there: the one that the last job began with, and the one
that it left, since the server's next job says which of them was accepted. Files are `fleetfit.messages` messages,
written beside their place and renamed (`fleetfit.files`), so that a loss of power leaves one or the other.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import RunError
from fleetfit.messages import pack, unpack

_RUNS = 8  # whose memory is kept
_BASES = 3
_RUN = re.compile(r"[0-9a-f]{8,64}")


class Remembered:
    """The files of a node."""

    def __init__(self, folder: Path) -> None:
        """Take the folder, which is made when something is kept."""
        self._folder = folder

    def memory(self, run: str, version: int) -> tuple[Any, bool]:
        """Return what was kept under a version (-1: nothing was), and whether it is missing."""
        if version < 0:
            return None, False
        found = self._versions(run)
        return found.get(version), version not in found

    def keep(self, run: str, before: int, version: int, memory: Any) -> None:
        """Keep a new version beside the one that it began with."""
        kept = {v: m for v, m in self._versions(run).items() if v == before and v != version}
        self._write(self._file(run), {"versions": list(kept), "memories": list(kept.values())}, version, memory)
        _keep_newest(self._folder / "runs", _RUNS)

    def _write(self, path: Path, nest: dict[str, Any], version: int, memory: Any) -> None:
        _written(path, pack({"versions": [*nest["versions"], version], "memories": [*nest["memories"], memory]}))

    def _versions(self, run: str) -> dict[int, Any]:
        path = self._file(run)
        try:
            nest = unpack(files.read_bytes(path))
            return dict(zip(nest["versions"], nest["memories"], strict=True))
        except FileNotFoundError:
            return {}
        except (RunError, KeyError, TypeError, ValueError, OSError):  # a damaged disk: as good as nothing
            return {}

    def _file(self, run: str) -> Path:
        if not _RUN.fullmatch(run):
            raise RunError(f'"{run[:40]}" is no name of a run.')
        return self._folder / "runs" / f"{run}.ffit"

    # -- tensors that are never trained

    def base(self, digest: str) -> bytes | None:
        """Return the packed tensors of a digest, or None where they are not there, or damaged."""
        try:
            content = files.read_bytes(self._folder / "base" / f"{_digest_checked(digest)}.ffit")
        except OSError:
            return None
        return content if digest_of(content) == digest else None

    def keep_base(self, digest: str, content: bytes | bytearray) -> None:
        """Keep packed tensors.

        Raises:
            RunError: They are others than the digest says.
        """
        if digest_of(content) != digest:
            raise RunError("the tensors that came are not those that were announced.")
        _written(self._folder / "base" / f"{_digest_checked(digest)}.ffit", content)
        _keep_newest(self._folder / "base", _BASES)


def digest_of(content: bytes | bytearray) -> str:
    """Return the SHA-256 of packed tensors, as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _digest_checked(digest: str) -> str:
    if not _RUN.fullmatch(digest):
        raise RunError("a digest has 64 hexadecimal digits.")
    return digest


def _keep_newest(folder: Path, count: int) -> None:
    kept = sorted(folder.glob("*.ffit"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[count:]:
        path.unlink(missing_ok=True)


def _written(path: Path, content: bytes | bytearray) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    with files.replacing(path, 0o600) as file:
        file.write(content)
