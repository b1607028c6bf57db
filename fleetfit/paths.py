"""Paths that people name, and files that they hand over: what is wrong with one is said in a sentence.

`files` looks at a file and raises an `OSError`; here that becomes the error of whoever wanted the file.
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
_OPEN_ALREADY = ("/dev/fd/", "/proc/self/fd/", "/dev/stdout", "/dev/stderr")
_SHOWN = 200  # characters of a path in a message
_LONGEST = 200  # bytes of a name that a label gives; file systems take 255, and plots and copies add to them


def parse_path(text: str | Path, what: str = "a path") -> Path:
    """Return a path as somebody wrote it, `~` replaced.

    Args:
        text: What was written.
        what: What it is of, as the start of a sentence.

    Raises:
        ConfigError: It is empty, is no text in UTF-8, or begins with the home folder of nobody.
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
    """Return in words why a file could not be used."""
    own = error.strerror or ""
    if own.startswith(("it ", "nobody ", "another ")):  # of `files`, in words already
        return own
    return _WORDS.get(error.errno or 0) or own or str(error) or type(error).__name__


def is_environment_error(error: OSError) -> bool:
    """Tell whether an error is one of disks, permissions and paths, which no program is to blame for."""
    return error.errno in _WORDS


def truncate_path(path: str | Path) -> str:
    """Return a path for a message; of one that is very long, the beginning."""
    text = str(path)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# ---- reading -------------------------------------------------------------------------------------------------------


def open_file(path: Path, error: type[FleetFitError]) -> BinaryIO:
    """Open a regular file to read it; never waits for anybody.

    Args:
        path: The file, `~` replaced.
        error: What is raised.

    Raises:
        FleetFitError: It is not there, is no file, or may not be read.
    """
    try:
        return files.open_file(path)
    except FileNotFoundError:
        raise error(f"there is no file {truncate_path(path)}.") from None
    except OSError as failed:
        raise error(f"{truncate_path(path)} cannot be read: {format_os_error(failed)}.") from None
    except ValueError:  # a null character
        raise error(f"there is no file {truncate_path(path)!r}.") from None


def check_file(path: Path, error: type[FleetFitError]) -> None:
    """Refuse what is no regular file that can be read, before a library opens it.

    Raises:
        FleetFitError: As `opened`.
    """
    open_file(path, error).close()


def read_bytes(path: Path, error: type[FleetFitError]) -> bytes:
    """Return a file's content.

    Raises:
        FleetFitError: It cannot be read.
    """
    with open_file(path, error) as file:
        try:
            return file.read()
        except OSError as failed:
            raise error(f"{truncate_path(path)} cannot be read: {format_os_error(failed)}.") from None


def read_text(path: Path, error: type[FleetFitError]) -> str:
    """Return a file's text, UTF-8 with or without a byte order mark; line ends become line feeds.

    Raises:
        FleetFitError: It cannot be read, or is no text in UTF-8.
    """
    try:
        return files.decode_text(read_bytes(path, error), "utf-8-sig")
    except UnicodeDecodeError as failed:
        raise error(f"{path} cannot be read as UTF-8: byte {failed.start} is no text.") from None


# ---- what the command line takes -----------------------------------------------------------------------------------


def parse_input_file(text: str | Path) -> Path:
    """Return the path of a file; whether it is there is asked where it is read.

    Raises:
        ConfigError: It cannot be a path, or leads to something else than a file.
    """
    return _only("a file", *_looked_at(text, "a file's path"))


def parse_output_file(text: str | Path) -> Path:
    """Return the path of a file that is to be written; a terminal, and a pipe that is open already, will do.

    Raises:
        ConfigError: It cannot be a path, or is a folder, or what would be waited for.
    """
    path, kind = _looked_at(text, "the path of a file to write")
    if kind == "a device" or (kind == "a named pipe" and str(path).startswith(_OPEN_ALREADY)):
        return path
    return _only("a file", path, kind)


def parse_folder(text: str | Path) -> Path:
    """Return the path of a folder; whether it is there is asked where it is used.

    Raises:
        ConfigError: It cannot be a path, or leads to something else than a folder.
    """
    return _only("a folder", *_looked_at(text, "a folder's path"))


def _only(wanted: str, path: Path, kind: str) -> Path:
    if kind not in ("", wanted):
        raise ConfigError(f"{path} is {kind}, not {wanted}.")
    return path


def _looked_at(text: str | Path, what: str) -> tuple[Path, str]:
    """Return a path and what it leads to: "a file", "a folder", "a named pipe" and so on, or "" for nothing."""
    path = parse_path(text, what)
    try:
        return path, files.describe_kind(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return path, ""
    except OSError as error:
        raise ConfigError(f"{truncate_path(path)} cannot be used: {format_os_error(error)}.") from None


# ---- names that labels give ------------------------------------------------------------------------------------------


def make_slug(label: str, taken: Collection[str] = ()) -> str:
    """Return a label as the name of a file or a folder, of letters, digits, dots and hyphens.

    A label that would give one that leads elsewhere, is hidden, is too long or is taken gets a short hash, so that it
    stays apart from others.

    Args:
        label: What people call it; an empty one gives an empty name.
        taken: Names of something else.
    """
    plain = re.sub(r"[^\w.]+", "-", label).strip("-").lower()
    kept = plain.lstrip(".-").encode()[:_LONGEST].decode(errors="ignore")
    if not label or (kept and kept == plain and plain not in taken):
        return plain
    mark = sha256(label.encode(errors="surrogatepass")).hexdigest()[:8]
    return "-".join(filter(None, [kept, mark]))
