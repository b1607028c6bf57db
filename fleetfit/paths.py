"""Paths that a user names, and the files there: problems become errors of the caller's class, with the path.

`files` raises an `OSError`; this module turns it into a sentence.
"""

import errno
import os
import re
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from fleetfit import files
from fleetfit.errors import ConfigError, FleetFitError

_WORDS = {
    errno.ENOENT: "it is not there",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder",
    errno.EACCES: "you have no permission",
    errno.EPERM: "you have no permission",
    errno.EROFS: "the disk is read-only",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your share of the disk is full",
    errno.EFBIG: "the file would be larger than it may be",
    errno.ENAMETOOLONG: "the path is too long",
    errno.ELOOP: "its links go in a circle",
    errno.EMFILE: "too many files are open",
    errno.ENFILE: "too many files are open",
    errno.EIO: "the disk cannot be read or written",
    errno.ENXIO: "nobody is at the other end",
    errno.ENODEV: "it is a device",
    errno.ENOMEM: "no memory is left",
}
"""What the system says of files, in words."""
_OPEN_STREAMS = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin", "/dev/stdout", "/dev/stderr")
_SHOWN = 200  # characters of a path in a message
_LONGEST = 200  # bytes of a name that a label gives; file systems take 255, and plots and copies add to them


def parse_path(text: str | Path, what: str = "a path") -> Path:
    """Return the path that a user wrote, with `~` expanded.

    Args:
        text: The path.
        what: What it names, as the start of a sentence.

    Raises:
        ConfigError: The path is empty or not UTF-8 text, or its home folder does not exist.
    """
    written = str(text)
    if not written.strip():
        raise ConfigError(f"{what} must not be empty.")
    try:
        written.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{what} must be text in UTF-8, got {os.fsencode(written)!r}; rename it.") from None
    return files.expand_path(text)


def format_os_error(error: OSError) -> str:
    """Return the cause of a file's error in words."""
    own = error.strerror or ""
    if own.startswith(("it ", "nobody ", "another ")):  # of `files`, in words already
        return own
    return _WORDS.get(error.errno or 0) or own or str(error) or type(error).__name__


def is_environment_error(error: OSError) -> bool:
    """Return whether the environment caused an OSError: disk, permission or path."""
    return error.errno in _WORDS


def truncate_path(path: str | Path) -> str:
    """Return a path for a message, cut after 200 characters."""
    text = str(path)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# ---- reading -------------------------------------------------------------------------------------------------------


def open_file(path: Path, error: type[FleetFitError]) -> BinaryIO:
    """Open a regular file for reading, without ever waiting for a pipe or device.

    Args:
        path: The file, with `~` expanded.
        error: The class of the error to raise.

    Raises:
        FleetFitError: The file is missing, is not a regular file, or cannot be read.
    """
    try:
        return files.open_file(path)
    except FileNotFoundError:
        raise error(f"there is no file {truncate_path(path)}.", path=path) from None
    except OSError as failed:
        raise error(f"{truncate_path(path)} cannot be read: {format_os_error(failed)}.", path=path) from None
    except ValueError:  # a null character
        raise error(f"there is no file {truncate_path(path)!r}.", path=path) from None


def check_file(path: Path, error: type[FleetFitError]) -> None:
    """Check that a path is a regular file that can be read, before a library opens it.

    Raises:
        FleetFitError: As `open_file`.
    """
    open_file(path, error).close()


def read_bytes(path: Path, error: type[FleetFitError]) -> bytes:
    """Return a file's content.

    Raises:
        FleetFitError: The file cannot be read.
    """
    with open_file(path, error) as file:
        try:
            return file.read()
        except OSError as failed:
            raise error(f"{truncate_path(path)} cannot be read: {format_os_error(failed)}.", path=path) from None


def read_text(path: Path, error: type[FleetFitError]) -> str:
    """Return a file's text, UTF-8 with or without a byte order mark; line ends become line feeds.

    Raises:
        FleetFitError: The file cannot be read, or is not UTF-8 text.
    """
    try:
        return files.decode_text(read_bytes(path, error), "utf-8-sig")
    except UnicodeDecodeError as failed:
        message = f"{path} cannot be read as UTF-8: byte {failed.start} is not valid."
        raise error(message, path=path) from None


# ---- what the command line takes -----------------------------------------------------------------------------------


def parse_input_file(text: str | Path) -> Path:
    """Return the path of a file or of an open stream, such as `<(...)` of a shell; the file may be missing.

    Raises:
        ConfigError: The text is not a path, or the path leads to something else.
    """
    path, kind = _check_place(text, "a file's path")
    return path if kind == "a named pipe" and is_open_stream(path) else _require("a file", path, kind)


def parse_output_file(text: str | Path) -> Path:
    """Return the path of a file to write, of a terminal or of an open stream.

    Raises:
        ConfigError: The text is not a path, or the path leads to a folder, or to a pipe that has no reader yet.
    """
    path, kind = _check_place(text, "the path of a file to write")
    if kind == "a device" or (kind == "a named pipe" and is_open_stream(path)):
        return path
    return _require("a file", path, kind)


def parse_folder(text: str | Path) -> Path:
    """Return the path of a folder; it may be missing.

    Raises:
        ConfigError: The text is not a path, or the path leads to something else.
    """
    return _require("a folder", *_check_place(text, "a folder's path"))


def is_open_stream(path: Path) -> bool:
    """Return whether a path names a stream that this process has open already, so that opening it never waits."""
    return str(path).startswith(_OPEN_STREAMS)


def _require(wanted: str, path: Path, kind: str) -> Path:
    if kind not in ("", wanted):
        raise ConfigError(f"{path} is {kind}, not {wanted}.", path=path)
    return path


def _check_place(text: str | Path, what: str) -> tuple[Path, str]:
    """Return a path and what it leads to: "a file", "a folder", "a named pipe" and so on, or "" for nothing."""
    path = parse_path(text, what)
    try:
        return path, files.describe_kind(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return path, ""
    except OSError as error:
        raise ConfigError(f"{truncate_path(path)} cannot be used: {format_os_error(error)}.", path=path) from None


# ---- names that labels give ------------------------------------------------------------------------------------------


def make_slug(label: str, taken: Collection[str] = ()) -> str:
    """Return a label as the name of a file or folder, of letters, digits, dots and hyphens.

    A short hash is added where the name would be hidden, lead elsewhere, be too long, or be taken.

    Args:
        label: The label; an empty one gives an empty name.
        taken: Names that are in use.
    """
    plain = re.sub(r"[^\w.]+", "-", label).strip("-").lower()
    kept = plain.lstrip(".-").encode()[:_LONGEST].decode(errors="ignore")
    if not label or (kept and kept == plain and plain not in taken):
        return plain
    mark = sha256(label.encode(errors="surrogatepass")).hexdigest()[:8]
    return "-".join(filter(None, [kept, mark]))
