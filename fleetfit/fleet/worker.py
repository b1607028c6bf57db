"""The worker of a node: a process that has torch, data and models loaded, does the jobs, and stays as long as the node.

Flower starts a process for each message, in which importing torch takes seconds, and a minute on a Raspberry Pi. So the
client app, in that process, asks the worker (`asked`), over a Unix socket in a folder that only this user can enter.
The worker (`main`) is started with the first message and ends with the node: it watches the process that starts
Flower's client apps. It needs nothing of Flower, and works under any node, Flower's own too.

It does one message after the other. Where whoever asked has gone, nobody wants the answer (a run was stopped in the
middle of a long job, say): the worker ends then, since nothing else stops a job at once, and the next message starts
another one. What the node remembers is in files that are whole at any time.

Only `main` imports torch: who asks reads this module in a process without it.
"""

import contextlib
import hashlib
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from fleetfit.errors import refuse_on_windows
from fleetfit.fleet import logs
from fleetfit.fleet.logs import traced

# ---- asking the worker ---------------------------------------------------------------------------------------------

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
            except (EOFError, OSError):  # it was at work for somebody who has gone, and ended
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
        ConfigError: This is Windows.
        RuntimeError: Somebody else has made it.
    """
    refuse_on_windows("A fleet's node", "Under Windows, run it in WSL 2, which is Linux.")
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
    command = [sys.executable, "-m", "fleetfit.fleet.worker", str(place / "socket"), config, str(watched)]
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


# ---- being the worker -----------------------------------------------------------------------------------------------

_LOOK_S = 0.5  # at whether whoever asked is still there


def main(place: str, config: str, watched: str) -> None:
    """Answer messages until the watched process ends."""
    from fleetfit.fleet.node import answer

    os.umask(0o077)
    logs.hear()
    threading.Thread(target=_end_with, args=(int(watched), Path(place).parent), daemon=True).start()

    with Listener(place, "AF_UNIX") as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
                _serve(connection, partial(answer, config))


def _serve(connection: Connection, answer: Callable[[Mapping[str, bytes]], bytes]) -> None:
    if _user(connection) != os.getuid():
        return
    connection.send_bytes(BEGUN)
    parts, answered = received(connection), threading.Event()
    traced("working", more="on a job" if "state" in parts else "")
    threading.Thread(target=_end_when_gone, args=(connection, answered), daemon=True).start()
    try:
        content = answer(parts)
    finally:
        answered.set()
    connection.send_bytes(content)


def _end_when_gone(connection: Connection, answered: threading.Event) -> None:
    """End this process when the other end is closed before it has its answer."""
    while not answered.is_set():
        with contextlib.suppress(OSError):
            gone = connection.poll(_LOOK_S)  # it says nothing more, so what can be read is its end
            if gone and not answered.is_set():
                traced("abandoned")
                os._exit(1)


def _user(connection: Connection) -> int:
    """Return whose process is at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):  # the folder's rights must do
        return os.getuid()
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", found)[1])


def _end_with(watched: int, place: Path) -> None:
    """End this process, and remove its folder, as soon as another process has ended."""
    try:
        handle = os.pidfd_open(watched)
        select.select([handle], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # no such call on this system
        while _alive(watched):
            time.sleep(1)
    shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
