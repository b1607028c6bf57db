"""Read and write files safely, including untrusted ones.

Only regular files are read: opening a named pipe may block forever, and a device may be endless. Links are not followed
when writing. Functions that take an error class raise it with the path. Others raise an `OSError` whose `strerror`
completes a sentence.

A file or folder is written under a temporary name next to its path, flushed to disk and renamed, so a killed process
leaves either the old or the new content. The temporary name is fixed and locked, so that the next writer removes the
remains of a killed one. The random names of `tempfile` would leave them.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, cast

from fleetfit import errors
from fleetfit.errors import ConfigError, FleetFitError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_KINDS = {
    stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_CAUSES = {
    errno.ENOENT: "it does not exist",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder",
    errno.EACCES: "you have no permission",
    errno.EPERM: "you have no permission",
    errno.EROFS: "the disk is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your disk quota is used up",
    errno.EFBIG: "the file would exceed the size limit",
    errno.ENAMETOOLONG: "the path is too long",
    errno.ELOOP: "its symbolic links form a loop",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open",
    errno.EIO: "the disk cannot be read or written",
    errno.ENXIO: "no process reads from it",
    errno.ENODEV: "it is a device",
    errno.ENOMEM: "no memory is left",
}
_OPEN_STREAMS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin", "/dev/stdout", "/dev/stderr")
_LOCK_TIMEOUT_S = 0.2
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems without locks
_MAX_ENTRIES = 10_000  # of a folder, among which a misspelled name is looked up
_LONGEST_SLUG = 200  # bytes; file systems take 255, and suffixes are appended
_NONBLOCKING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | _NONBLOCKING


# ---- paths that a user writes ----------------------------------------------------------------------------------------


def parse_path(text: str | Path, what: str = "a path") -> Path:
    """Parse a user's path, with `~` expanded.

    Args:
        text: The path.
        what: Description of the path, as the start of a sentence.

    Raises:
        ConfigError: The path is empty or not UTF-8 text, has a null character, or its home folder does not exist.
    """
    raw = str(text)
    if not raw.strip():
        raise ConfigError(f"{what} must not be empty.")
    try:
        raw.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} must be UTF-8 text, got {os.fsencode(raw)!r}. Rename it.") from None
    if "\0" in raw:
        raise ConfigError(f"{what} must not have a null character, got {raw!r}.", path=text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = raw.partition("/")[0]
        raise ConfigError(f'{raw}: "{user}" has no home folder here. Write the path out.', path=text) from None


def parse_input_file(text: str | Path) -> Path:
    """Parse the path of a file, which may be missing.

    Raises:
        ConfigError: The text is not a path, or the path leads to something else.
    """
    return _require("a file", *_find_kind(text, "a file's path"))


def parse_output_file(text: str | Path) -> Path:
    """Parse the path of a file to write, of a terminal or of an open stream.

    Raises:
        ConfigError: The text is not a path, or the path leads to a folder, or to a pipe without a reader.
    """
    path, kind = _find_kind(text, "the path of a file to write")
    if kind == "a device" or (kind == "a named pipe" and str(path).startswith(_OPEN_STREAMS)):
        return path  # opening a stream that this process has open already does not block
    return _require("a file", path, kind)


def parse_folder(text: str | Path) -> Path:
    """Parse the path of a folder, which may be missing.

    Raises:
        ConfigError: The text is not a path, or the path leads to something else.
    """
    return _require("a folder", *_find_kind(text, "a folder's path"))


def _require(expected: str, path: Path, kind: str) -> Path:
    if kind not in ("", expected):
        raise ConfigError(f"{path} is {kind}, not {expected}.", path=path)
    return path


def _find_kind(text: str | Path, what: str) -> tuple[Path, str]:
    path = parse_path(text, what)
    try:
        return path, _describe_kind(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return path, ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {format_os_error(error)}.", path=path) from None


def follow_links(path: Path) -> Path:
    """Return the path to which links lead, also one that does not exist yet.

    Raises:
        OSError: The links form a loop (ELOOP).
    """
    target = Path(os.path.realpath(path))
    if any(part.is_symlink() for part in (target, *target.parents)):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def make_folder(path: Path) -> None:
    """Make a folder with its parents, unless it exists; a link to nothing is followed.

    Raises:
        OSError: The folder cannot be made.
    """
    follow_links(path).mkdir(parents=True, exist_ok=True)


def suggest_neighbor(*paths: str | Path) -> str:
    """Return a hint at the entry beside missing files or folders of one name that may be meant; "" if there is none."""
    entries: list[str] = []
    for path in map(Path, paths):
        with contextlib.suppress(OSError, ValueError):
            entries += sorted(entry.name for entry in itertools.islice(os.scandir(path.parent), _MAX_ENTRIES))
    name = Path(paths[0]).name
    near = [entry for entry in entries if name.lower() in (entry.lower(), Path(entry).stem.lower())]
    return f' Did you mean "{errors.truncate(near[0])}"?' if near else errors.did_you_mean(name, entries)


def make_slug(label: str, used: Collection[str] = ()) -> str:
    """Convert a label to the name of a file or folder, with letters, digits, dots and hyphens.

    A short hash is added if the name would be hidden, lead elsewhere, be too long, or be in use.

    Args:
        label: The label; an empty one gives an empty name.
        used: Names that are in use.
    """
    plain = re.sub(r"[^\w.]+", "-", label).strip("-").lower()
    safe = plain.lstrip(".-").encode()[:_LONGEST_SLUG].decode(errors="ignore")
    if not label or (safe and safe == plain and plain not in used):
        return plain
    return "-".join(filter(None, [safe, sha256(label.encode(errors="surrogatepass")).hexdigest()[:8]]))


# ---- errors ----------------------------------------------------------------------------------------------------------


def format_os_error(error: OSError) -> str:
    """Describe the cause of a file's error."""
    reason = error.strerror or ""
    if reason[:1].islower():  # raised in this module
        return reason
    return _CAUSES.get(error.errno or 0) or reason or str(error) or type(error).__name__


def is_environment_error(error: OSError) -> bool:
    """Return whether the environment caused an OSError: disk, permission or path."""
    return error.errno in _CAUSES


def _describe_kind(status: os.stat_result) -> str:
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def _check_regular(status: os.stat_result, path: str | Path) -> None:
    kind = _describe_kind(status)
    if kind == "a folder":
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if kind != "a file":
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


# ---- reading ---------------------------------------------------------------------------------------------------------


def open_file(path: str | Path, error: type[FleetFitError] | None = None) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Never blocks on a pipe or device.

    Args:
        path: The file, with `~` expanded.
        error: The class of the error to raise in place of an OSError.

    Raises:
        OSError: The file is missing, is not a regular file, or cannot be read.
    """
    with _raise_as(error, path):
        _check_regular(Path(path).stat(), path)  # check first, because opening a device may start it
        return _open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | _NONBLOCKING)


@contextlib.contextmanager
def _raise_as(error: type[FleetFitError] | None, path: str | Path) -> Iterator[None]:
    """Raise an error class of the caller, if there is one, in place of the system's errors."""
    if error is None:
        yield
        return
    try:
        yield
    except FileNotFoundError:
        raise error(f"no such file: {path}.{suggest_neighbor(path)}", path=path) from None
    except OSError as cause:
        raise error(f"{path} cannot be read: {format_os_error(cause)}.", path=path) from None
    except UnicodeDecodeError as cause:
        raise error(f"{path} cannot be read as UTF-8: byte {cause.start} is not valid.", path=path) from None
    except ValueError:  # a null character
        raise error(f"no such file: {str(path)!r}.", path=path) from None


def _open(path: str | Path, flags: int, mode: int = 0o666) -> BinaryIO:
    handle = os.open(path, flags, mode)
    try:
        _check_regular(os.fstat(handle), path)
        kind = "r+b" if flags & os.O_RDWR else "wb" if flags & os.O_WRONLY else "rb"
        return cast("BinaryIO", os.fdopen(handle, kind))
    except BaseException:
        os.close(handle)
        raise


def check_file(path: Path, error: type[FleetFitError]) -> None:
    """Check that a path is a readable regular file, before a library opens it.

    Raises:
        FleetFitError: As `open_file`.
    """
    open_file(path, error).close()


def read_bytes(path: str | Path, error: type[FleetFitError] | None = None) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file, with `~` expanded.
        error: The class of the error to raise in place of an OSError.

    Raises:
        OSError: The path is not a regular file, or cannot be read.
    """
    with _raise_as(error, path), open_file(path) as file:
        return file.read()


def read_text(path: str | Path, error: type[FleetFitError] | None = None) -> str:
    """Read a file's text: UTF-8 with or without a byte order mark. Line ends become line feeds.

    Args:
        path: The file, with `~` expanded.
        error: The class of the error to raise in place of an OSError or UnicodeDecodeError.

    Raises:
        OSError: The file cannot be read.
        UnicodeDecodeError: The file is not UTF-8 text.
    """
    with _raise_as(error, path):
        return read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; False if it is missing.

    Raises:
        OSError: The path is something else, or its status cannot be read.
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
        ValueError: The text is not JSON, is nested too deeply, or has too long a number.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# ---- writing ---------------------------------------------------------------------------------------------------------


def safe_join(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, and create the folders between, none of which may be a link.

    Args:
        folder: The folder, which may be a link itself.
        name: The file, relative to it, such as "plots/levels.png".

    Raises:
        OSError: A folder between is a link or not a folder, or cannot be created.
    """
    parent, last = folder, (folder / name).name
    for part in Path(name).parts[:-1]:
        parent = parent / part
        with contextlib.suppress(FileExistsError):
            parent.mkdir()
        kind = _describe_kind(parent.lstat())
        if kind != "a folder":
            raise OSError(errno.ENOTDIR, f"its parent {parent} is {kind}, not a folder", str(parent))
    return parent / last


def open_in_folder(path: Path, flags: int, mode: int = 0o666) -> BinaryIO:
    """Open a file without following a link and without truncating it.

    Args:
        path: The file.
        flags: Flags of `os.open`.
        mode: Permissions of a new file.

    Raises:
        OSError: The path is a link or not a regular file, or cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        _check_regular(path.lstat(), path)
    return _open(path, flags | _NO_LINKS, mode)


def append_line(path: Path, line: bytes) -> None:
    """Append to a file, creating it if necessary, and flush it to disk. What a loss of power cut off stays a line.

    Raises:
        OSError: The path is a link or not a regular file, or cannot be written.
    """
    with open_in_folder(path, os.O_RDWR | os.O_APPEND | os.O_CREAT) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces a path at the end of the block, and is removed if the block fails.

    Args:
        path: The file to write. A link is replaced, not followed.
        mode: Permissions; 0o600 for a secret.

    Raises:
        OSError: The file cannot be written, or the path is a folder.
    """
    temporary = path.with_name(f".{path.name}.part")
    with _open_temporary(temporary, mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if errors.WINDOWS:  # Windows cannot rename an open file, and there is no lock to hold
                file.close()
            os.replace(temporary, path)  # noqa: PTH105 - while the lock is held
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    flush_to_disk(path.parent)


def _open_temporary(path: Path, mode: int) -> BinaryIO:
    """Open the temporary file, empty and locked. A link or pipe with its name is removed."""
    while True:
        try:
            file = open_in_folder(path, os.O_WRONLY | os.O_CREAT, mode)
        except OSError:
            if path.is_symlink() or not (path.is_file() or path.is_dir() or not path.exists()):
                path.unlink()
                continue
            raise
        _lock(file.fileno(), wait=True)
        if _is_same_file(file.fileno(), path):
            file.truncate(0)
            if not mode & 0o077:
                path.chmod(mode)  # the file may be older; the system refuses this for another user's file
            return file
        file.close()  # another writer renamed it meanwhile


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        OSError: The file cannot be written.
    """
    content = text.encode()
    with atomic_write(path) as file:
        file.write(content)


def write_user_file(path: str | Path, text: str) -> None:
    """Write a text file to a user's path: atomically, also through a link; directly to a pipe or terminal.

    Raises:
        OSError: The file cannot be written.
        ConfigError: As `parse_path`.
    """
    path = parse_path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
    else:
        write_text(Path(os.path.realpath(path)), text)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder next to a path. It is removed after the block unless the caller renamed it.

    Raises:
        OSError: The folder cannot be created, or another process is writing it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    if temporary.is_symlink() or (temporary.exists() and not temporary.is_dir()):
        temporary.unlink()
    temporary.mkdir(exist_ok=True)
    handle = _lock_folder(temporary)
    try:
        for leftover in temporary.iterdir():  # left by a killed process
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        yield temporary
    finally:
        if handle is None or _is_same_file(handle, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    if path.is_dir() and errors.WINDOWS:  # Windows cannot open a folder
        return
    handle = os.open(path, os.O_RDWR if errors.WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- locks -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock file exclusively for the block. The system releases it when the process dies.

    Raises:
        OSError: Another process holds it (EBUSY); or the path is a link, not a regular file, or cannot be written.
    """
    from filelock import FileLock, Timeout

    open_in_folder(path, os.O_RDWR | os.O_CREAT).close()
    lock = FileLock(path, timeout=_LOCK_TIMEOUT_S)  # `is_held` in another process briefly holds it
    try:
        lock.acquire()
    except Timeout:
        raise OSError(errno.EBUSY, "another process holds it", str(path)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def lock(file: BinaryIO) -> None:
    """Lock a file exclusively until it is closed, waiting for others; without effect where there are no such locks."""
    _lock(file.fileno(), wait=True)


def share_lock(file: BinaryIO) -> None:
    """Share a lock until the file is closed. `is_held` detects it."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(file.fileno(), fcntl.LOCK_SH)


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock file; False if it is missing or the system has no such locks."""
    if fcntl is None:
        return False
    try:
        with open_in_folder(path, os.O_RDONLY) as file:
            return not _lock(file.fileno(), wait=False)
    except OSError:
        return False


def _lock(handle: int, wait: bool) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def _lock_folder(path: Path) -> int | None:
    """Lock a folder and return the descriptor; None if the system has no such locks."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_LINKS)
    if _lock(handle, wait=False) and _is_same_file(handle, path):
        return handle
    os.close(handle)
    raise OSError(errno.EBUSY, "another process is writing there", str(path))


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False
