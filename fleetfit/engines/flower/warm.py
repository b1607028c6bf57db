"""A worker that has torch loaded and stays as long as its node: the process of each message hands its job over.

They speak over a Unix socket in a folder that only this user can enter. The worker is started with the first message
and ends with the node: it watches the process that starts Flower's client apps. Nothing here imports torch.
"""

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client, Connection
from pathlib import Path

_START_S = 180.0  # a Raspberry Pi takes a minute to import torch
_TRIES = 5  # workers that end before they begin
_HOLD_S = 5.0  # that a message waits for a later one
BEGUN = b"begun"
"""What a worker says when it begins with a message."""


def asked(parts: Mapping[str, bytes | bytearray], config: str) -> bytes:
    """Have the worker of this node answer a message; it is started if it is not there.

    Args:
        parts: The message.
        config: The node's configuration file.

    Raises:
        RuntimeError: The worker cannot be started, or ended while it worked.
    """
    place = _place(config, os.getppid())
    for _ in range(_TRIES):
        with _connected(place, config, os.getppid()) as connection:
            try:
                connection.recv_bytes(len(BEGUN))
            except (EOFError, OSError):  # it was at work for somebody who has gone, and ended: see `worker`
                continue
            try:
                send(connection, parts)
                return connection.recv_bytes()
            except (EOFError, OSError):
                break
    raise RuntimeError(f"the node's worker ended while it worked: it was killed, or had no memory left. {_last(place)}")


def arrived(config: str, held: bool) -> None:
    """Note that a message has come; one that is held waits for a later one, a few seconds at most."""
    latest, own = _place(config, os.getppid()) / "latest", str(os.getpid())
    latest.write_text(own)
    until = time.monotonic() + _HOLD_S
    while held and time.monotonic() < until and latest.read_text() == own:
        time.sleep(0.02)


def send(connection: Connection, parts: Mapping[str, bytes | bytearray]) -> None:
    """Send a message's parts over a connection."""
    connection.send_bytes(str(len(parts)).encode())
    for name, content in parts.items():
        connection.send_bytes(name.encode())
        connection.send_bytes(content)


def received(connection: Connection) -> dict[str, bytes]:
    """Return the parts that `send` sent."""
    count = int(connection.recv_bytes(20))
    return {connection.recv_bytes(200).decode(): connection.recv_bytes() for _ in range(count)}


def _place(config: str, watched: int) -> Path:
    """Return the folder of the worker that belongs to a configuration and a process.

    Raises:
        RuntimeError: Somebody else has made it.
    """
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"fleetfit-{os.getuid()}"
    key = f"{Path(config).resolve()} {watched} {_started(watched)}"
    place = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    for folder in (root, place):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise RuntimeError(f"{folder} must be a folder that only this user can enter; remove it.")
    return place


def _started(process: int) -> str:
    """Return when a process was started, so that its number cannot be taken for another one's."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextlib.contextmanager
def _connected(place: Path, config: str, watched: int) -> Iterator[Connection]:
    connection = _try(place)
    if connection is None:
        with _locked(place):
            connection = _try(place) or _start(place, config, watched)
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Let one process at a time start a worker."""
    import fcntl

    with (place / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _try(place: Path) -> Connection | None:
    try:
        return Client(str(place / "socket"), "AF_UNIX")
    except OSError:
        return None


def _start(place: Path, config: str, watched: int) -> Connection:
    with contextlib.suppress(OSError):
        (place / "socket").unlink()
    command = [sys.executable, "-m", "fleetfit.engines.flower.worker", str(place / "socket"), config, str(watched)]
    with (place / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        connection = _try(place)
        if connection is not None:
            return connection
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        raise RuntimeError(f"the node's worker was not ready within {_START_S:.0f} s. {_last(place)}")
    raise RuntimeError(f"the node's worker could not start. {_last(place)}")


def _last(place: Path) -> str:
    """Return the worker's last words."""
    try:
        text = (place / "log").read_text(errors="replace").strip()
    except OSError:
        return ""
    return f"Its last line: {text.splitlines()[-1][:500]}" if text else ""
