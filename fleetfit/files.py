"""Safe reading and writing of files, also in a stranger's folder.

Only regular files are read: opening a named pipe may wait forever, and a device may be endless. Links are not followed
when writing. Errors are `OSError`s whose `strerror` ends a sentence; the caller names the file and the remedy.

A file or folder is written under a temporary name beside its path, flushed to disk and renamed, so a killed process
leaves the old content or the new. The temporary name is fixed and locked: the next writer clears away what a killed
one left, which `tempfile` with its random names would not.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
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
_LOOK_S = 0.2
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | _AT_ONCE


def expand_path(path: str | Path) -> Path:
    """Return a path with `~` expanded.

    Raises:
        ConfigError: The user of the home folder is unknown, or the path has a null character.
    """
    try:
        expanded = Path(path).expanduser()
    except RuntimeError:
        user = str(path).partition("/")[0]
        raise ConfigError(f'{path}: "{user}" has no home folder here. Write the path out.', path=path) from None
    if "\0" in str(expanded):
        raise ConfigError(f"{str(expanded)!r} is not a path: it has a null character.", path=path)
    return expanded


# ---- reading -------------------------------------------------------------------------------------------------------


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: The path leads to something else, is missing, or cannot be read.
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
    """Return whether a path is a regular file; False where it is missing.

    Raises:
        OSError: The path is something else, or cannot be looked at.
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
        ValueError: The text is not JSON, is nested too deeply, or has a number that is too long.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def describe_kind(found: os.stat_result) -> str:
    """Return the kind of a file in words, such as "a file" or "a named pipe"."""
    return _KINDS.get(stat.S_IFMT(found.st_mode), "something else")


def _check_regular(found: os.stat_result, path: str | Path) -> None:
    kind = describe_kind(found)
    if kind == "a folder":
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if kind != "a file":
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


# ---- writing -------------------------------------------------------------------------------------------------------


def safe_join(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, after making the folders between; none of them may be a link.

    Args:
        folder: The folder, which may be a link itself.
        name: The file, relative to it, such as "plots/levels.png".

    Raises:
        OSError: A folder between is a link or something else, or cannot be made.
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
    """Append to a file, making it if necessary, and flush it to disk.

    Raises:
        OSError: The path is a link or not a regular file, or cannot be written.
    """
    with open_in_folder(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def open_in_folder(path: Path, flags: int, mode: int = 0o666) -> BinaryIO:
    """Open a file without following a link and without truncating it.

    Args:
        path: The file.
        flags: As of `os.open`.
        mode: Permissions of a new file.

    Raises:
        OSError: The path is a link or not a regular file, or cannot be opened.
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
    """Open a temporary file beside a path; it replaces the path when the block ends, and is removed if it fails.

    Args:
        path: The file to write; a link there is replaced, not followed.
        mode: Permissions; 0o600 for a secret.

    Raises:
        OSError: The file cannot be written, or the path is a folder.
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
    """Write a text file atomically.

    Raises:
        OSError: The file cannot be written.
    """
    content = text.encode()
    with atomic_write(path) as file:
        file.write(content)


def write_user_file(path: str | Path, text: str) -> None:
    """Write a text file that a user names: atomically, behind a link too; into a pipe or terminal directly.

    Raises:
        OSError: The file cannot be written.
        ConfigError: As `expand_path`.
    """
    path = expand_path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
    else:
        write_text(Path(os.path.realpath(path)), text)


def _begun(part: Path, mode: int) -> BinaryIO:
    """Open the temporary file, empty and locked; a link or pipe with its name is removed."""
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
        file.close()  # another writer has renamed it meanwhile


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make an empty folder beside a path and yield it; it is removed after the block unless the caller renamed it.

    Raises:
        OSError: The folder cannot be made, or another process is writing it.
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
    """Make a folder, empty and locked; return the descriptor that holds the lock."""
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


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock file exclusively for the block; the system releases it when the process dies.

    Raises:
        OSError: Another process holds it (EBUSY); or the path is a link, not a regular file, or cannot be written.
    """
    from filelock import FileLock, Timeout

    open_in_folder(path, os.O_RDWR | os.O_CREAT).close()
    lock = FileLock(path, timeout=_LOOK_S)  # `is_held` in another process holds it for a moment
    try:
        lock.acquire()
    except Timeout:
        raise OSError(errno.EBUSY, "another process holds it", str(path)) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def share_lock(file: BinaryIO) -> None:
    """Share a lock until the file is closed; `is_held` sees it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock file; False where there is none, or the system has no such locks."""
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
    """Flush a file, or the names in a folder, to disk."""
    if path.is_dir() and errors.WINDOWS:  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDWR if errors.WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
