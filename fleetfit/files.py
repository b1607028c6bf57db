"""Files that anybody may have made: what is no regular file is refused, and no link is followed when writing.

A named pipe would be waited for without end, a device may be endless, a link leads elsewhere. Whatever is wrong is an
`OSError` whose `strerror` is the end of a sentence, so that who reads or writes says which file it was and what to do.
A file or folder is written beside its place, flushed to disk and renamed: a process that is killed leaves the old one
or the new one, and what it had begun is cleared away by the next one that writes there.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fleetfit import errors
from fleetfit.errors import ConfigError

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]

_KINDS = {
    stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_LOOKS, _LOOK_S = 10, 0.02
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | _AT_ONCE


def expand_path(path: str | Path) -> Path:
    """Return a path with its `~` replaced.

    Raises:
        ConfigError: There is no such user, or no path has such characters.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        user = str(path).partition("/")[0]
        raise ConfigError(f'{path}: "{user}" is nobody\'s home here. Write the path out.') from None
    if "\0" in str(found):
        raise ConfigError(f"{str(found)!r} is no path: it has a null character.")
    return found


# ---- reading -------------------------------------------------------------------------------------------------------


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: It is something else, or not there, or not to be read.
    """
    _check_regular(Path(path).stat(), path)  # before it is opened: opening a device may set it going
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _AT_ONCE)
    try:
        _check_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: It is something else, or cannot be read.
    """
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path, encoding: str = "utf-8") -> str:
    """Return the text of a regular file, with line ends as they are in Python.

    Raises:
        OSError: It is something else, or cannot be read.
        UnicodeDecodeError: It is no such text.
    """
    return decode_text(read_bytes(path), encoding)


def decode_text(content: bytes, encoding: str = "utf-8") -> str:
    """Return the text of a file's content, with line ends as they are in Python.

    Raises:
        UnicodeDecodeError: It is no such text.
    """
    return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def is_file(path: Path) -> bool:
    """Tell whether a regular file is there.

    Raises:
        OSError: Something else is, or nobody can tell.
    """
    try:
        _check_regular(path.stat(), path)
    except FileNotFoundError:
        if path.is_symlink():
            raise OSError(errno.ENOENT, "it is a symbolic link to nothing", str(path)) from None
        return False
    except NotADirectoryError:
        return False
    return True


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is no JSON, or nested too deeply, or a number in it is too long.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def describe_kind(found: os.stat_result) -> str:
    """Return what lies at a place, such as "a file" or "a named pipe"."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "something else")


def _check_regular(found: os.stat_result, path: str | Path) -> None:
    kind = describe_kind(found)
    if kind == "a folder":
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if kind != "a file":
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


# ---- writing -------------------------------------------------------------------------------------------------------


def safe_join(folder: Path, name: str) -> Path:
    """Return the place of a file in a folder, whose folders in between are made; none of them may be a link.

    Args:
        folder: It may be a link itself.
        name: Relative to it, such as "plots/levels.png".

    Raises:
        OSError: One of them is a link, or something else, or cannot be made.
    """
    place, last = folder, (folder / name).name
    for part in Path(name).parts[:-1]:
        place = place / part
        with contextlib.suppress(FileExistsError):
            place.mkdir()
        kind = describe_kind(place.lstat())
        if kind != "a folder":
            raise OSError(errno.ENOTDIR, f"it lies behind {place}, which is {kind}, not a folder", str(place))
    return place / last


def append_line(path: Path, line: bytes) -> None:
    """Add to a file, which is made if need be, and flush it to disk.

    Raises:
        OSError: It is a link or no file, or cannot be written.
    """
    with open_in_folder(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def open_in_folder(path: Path, flags: int, mode: int = 0o666) -> BinaryIO:
    """Open a file without following a link; nothing is cut off.

    Args:
        path: The file.
        flags: As of `os.open`.
        mode: Of a file that is made.

    Raises:
        OSError: It is a link or no file, or cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path.lstat(), path)
    handle = os.open(path, flags | _AS_IT_IS, mode)
    try:
        _check_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb" if not flags & (os.O_WRONLY | os.O_RDWR) else "wb")
    except BaseException:
        os.close(handle)
        raise


@contextlib.contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file beside a place; it takes the place when the block ends, and is gone if the block fails.

    Args:
        path: The place.
        mode: Who may read and write it; 0o600 for a secret.

    Raises:
        OSError: It cannot be written, or the place is a folder's.
    """
    part = path.with_name(f".{path.name}.part")
    with _begun(part, mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if errors.WINDOWS:  # which renames nothing that is open, and has no lock to be held
                file.close()
            os.replace(part, path)  # noqa: PTH105 - while the lock is held
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    flush_to_disk(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place, flush it to disk, and rename it.

    Raises:
        OSError: It cannot be written.
    """
    content = text.encode()
    with atomic_write(path) as file:
        file.write(content)


def write_user_file(path: str | Path, text: str) -> None:
    """Write a file that a user names: as a whole or not at all, but into a pipe or a terminal as they are.

    Raises:
        OSError: It cannot be written.
        ConfigError: It is no path.
    """
    path = expand_path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
    else:
        write_text(Path(os.path.realpath(path)), text)  # a link that somebody names is theirs to follow


def _begun(part: Path, mode: int) -> BinaryIO:
    """Open a part file, empty and locked; what is in its place and no file is removed, not followed."""
    while True:
        try:
            file = open_in_folder(part, os.O_WRONLY | os.O_CREAT, mode)
        except OSError:
            if part.is_symlink() or not (part.is_file() or part.is_dir() or not part.exists()):
                part.unlink()
                continue
            raise
        _lock(file.fileno(), wait=True)
        if _same(file.fileno(), part):
            file.truncate(0)
            if not mode & 0o077:
                part.chmod(mode)  # it may be older; another person's is refused here
            return file
        file.close()  # somebody else's, who has put it into its place meanwhile


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder beside a place and yield it; it is gone after the block, unless somebody has renamed it.

    Raises:
        OSError: It cannot be made, or another process is writing there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    handle = _held_folder(part)
    try:
        yield part
    finally:
        if handle is None or _same(handle, part):
            shutil.rmtree(part, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _held_folder(part: Path) -> int | None:
    """Make a folder, empty and locked; return what holds the lock."""
    if part.is_symlink() or (part.exists() and not part.is_dir()):
        part.unlink()
    part.mkdir(exist_ok=True)
    handle = None
    if fcntl is not None:
        handle = os.open(part, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _AS_IT_IS)
        if not _lock(handle, wait=False) or not _same(handle, part):
            os.close(handle)
            raise OSError(errno.EBUSY, "another process is writing there", str(part))
    for left in part.iterdir():  # by a process that was killed
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return handle


def _lock(handle: int, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed; tell whether nobody else had, but for the moment in which `is_held` looks."""
    for _ in range(_LOOKS):
        if _lock(file.fileno(), wait=False):
            return True
        time.sleep(_LOOK_S)
    return _lock(file.fileno(), wait=False)


def share_lock(file: BinaryIO) -> None:
    """Hold a file beside others that do so, until it is closed, so that `is_held` sees it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Tell whether a process has locked a file; False also where there is none, or nothing can tell."""
    if fcntl is None:
        return False
    try:
        with open_in_folder(path, os.O_RDONLY) as file:
            return not _lock(file.fileno(), wait=False)
    except OSError:
        return False


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def flush_to_disk(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on disk."""
    if path.is_dir() and errors.WINDOWS:  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if errors.WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
