"""The worker of a node: a process that keeps torch, data and models, does the jobs, and lives as long as the node.

Flower starts a process for each message, in which importing torch takes seconds, and a minute on a Raspberry Pi. So the
client app, in that process, asks the worker (`ask_worker`), over a Unix socket in a folder that only this user can
enter. The worker (`main`) is started with the first message and ends with the node: it watches the process that starts
Flower's client apps. It does not use Flower, and works under any node, Flower's own too.

It does one message after the other. If the client app ends before it has its answer (a run was stopped in the middle of
a long job), the worker ends too, since nothing else stops a job at once; the next message starts another one. The
node's memory is in files that are complete at any time.

Only `main` imports torch: the client app imports this module in a process without it.
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
from fleetfit.fleet.logs import log_to_stderr, trace

# ---- asking the worker ---------------------------------------------------------------------------------------------

_START_S = 180.0  # a Raspberry Pi takes a minute to import torch
_TRIES = 5  # workers that end before they begin
_HOLD_S = 5.0  # that a message waits for a later one
BEGUN = b"begun"
"""A worker's first message on a connection, when it begins to work for it."""


def ask_worker(parts: Mapping[str, bytes | bytearray], config: str) -> bytes:
    """Return the answer of this node's worker to a message; start the worker if there is none.

    Args:
        parts: The message.
        config: The node's configuration file.

    Raises:
        RuntimeError: The worker cannot be started, or ended while it worked.
    """
    folder = _find_folder(config, os.getppid())
    for _ in range(_TRIES):
        with _connect(folder, config, os.getppid()) as connection:
            try:
                connection.recv_bytes(len(BEGUN))
            except (EOFError, OSError):  # it worked for a client app that had ended, and ended too
                continue
            try:
                send_parts(connection, parts)
                return connection.recv_bytes()
            except (EOFError, OSError):
                break
    raise RuntimeError(
        f"the node's worker ended while it worked: it was killed, or had no memory left. {_read_last_line(folder)}"
    )


def note_arrival(config: str, is_held: bool) -> None:
    """Note that a message has come; one that is held waits for a later one, a few seconds at most."""
    latest, own = _find_folder(config, os.getppid()) / "latest", str(os.getpid())
    latest.write_text(own)
    until = time.monotonic() + _HOLD_S
    while is_held and time.monotonic() < until and latest.read_text() == own:
        time.sleep(0.02)


def send_parts(connection: Connection, parts: Mapping[str, bytes | bytearray]) -> None:
    """Send a message's parts over a connection."""
    connection.send_bytes(str(len(parts)).encode())
    for name, content in parts.items():
        connection.send_bytes(name.encode())
        connection.send_bytes(content)


def receive_parts(connection: Connection) -> dict[str, bytes]:
    """Return the parts that `send_parts` sent."""
    count = int(connection.recv_bytes(20))
    return {connection.recv_bytes(200).decode(): connection.recv_bytes() for _ in range(count)}


def _find_folder(config: str, watched: int) -> Path:
    """Return the folder of the worker that belongs to a configuration and a process.

    Raises:
        ConfigError: This is Windows.
        RuntimeError: Another user owns it, or can enter it.
    """
    refuse_on_windows("A fleet's node", "Under Windows, run it in WSL 2, which is Linux.")
    root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"fleetfit-{os.getuid()}"
    key = f"{Path(config).resolve()} {watched} {_find_start_time(watched)}"
    own = root / hashlib.sha256(key.encode()).hexdigest()[:16]
    for folder in (root, own):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise RuntimeError(f"{folder} must be a folder that only this user can enter; remove it.")
    return own


def _find_start_time(process: int) -> str:
    """Return when a process was started: its number alone may be used again."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextlib.contextmanager
def _connect(folder: Path, config: str, watched: int) -> Iterator[Connection]:
    """Connect to the worker; one process at a time starts it if there is none."""
    connection = _try_to_connect(folder)
    if connection is None:
        import fcntl

        with (folder / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            connection = _try_to_connect(folder) or _start(folder, config, watched)
    try:
        yield connection
    finally:
        connection.close()


def _try_to_connect(folder: Path) -> Connection | None:
    try:
        return Client(str(folder / "socket"), "AF_UNIX")
    except OSError:
        return None


def _start(folder: Path, config: str, watched: int) -> Connection:
    with contextlib.suppress(OSError):
        (folder / "socket").unlink()
    command = [sys.executable, "-m", "fleetfit.fleet.worker", str(folder / "socket"), config, str(watched)]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        connection = _try_to_connect(folder)
        if connection is not None:
            return connection
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        raise RuntimeError(f"the node's worker was not ready within {_START_S:.0f} s. {_read_last_line(folder)}")
    raise RuntimeError(f"the node's worker could not start. {_read_last_line(folder)}")


def _read_last_line(folder: Path) -> str:
    try:
        text = (folder / "log").read_text(errors="replace").strip()
    except OSError:
        return ""
    return f"Its last line: {text.splitlines()[-1][:500]}" if text else ""


# ---- being the worker -----------------------------------------------------------------------------------------------

_POLL_S = 0.5  # between two looks whether the client app is still connected


def main(path: str, config: str, watched: str) -> None:
    """Answer messages until the watched process ends.

    Args:
        path: Of the socket.
        config: The node's configuration file.
        watched: Number of the process.
    """
    from fleetfit.fleet.node import answer

    os.umask(0o077)
    log_to_stderr()
    threading.Thread(target=_end_with, args=(int(watched), Path(path).parent), daemon=True).start()

    with Listener(path, "AF_UNIX") as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
                _serve(connection, partial(answer, config))


def _serve(connection: Connection, answer: Callable[[Mapping[str, bytes]], bytes]) -> None:
    if _find_user(connection) != os.getuid():
        return
    connection.send_bytes(BEGUN)
    parts, answered = receive_parts(connection), threading.Event()
    trace("working", details="on a job" if "state" in parts else "")
    threading.Thread(target=_end_when_abandoned, args=(connection, answered), daemon=True).start()
    try:
        content = answer(parts)
    finally:
        answered.set()
    connection.send_bytes(content)


def _end_when_abandoned(connection: Connection, answered: threading.Event) -> None:
    """End this process when the other end is closed before it has its answer."""
    while not answered.is_set():
        with contextlib.suppress(OSError):
            is_closed = connection.poll(_POLL_S)  # the client app sends nothing more
            if is_closed and not answered.is_set():
                trace("abandoned")
                os._exit(1)


def _find_user(connection: Connection) -> int:
    """Return the user of the process at the other end."""
    if not hasattr(socket, "SO_PEERCRED"):  # the folder's permissions must do
        return os.getuid()
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _end_with(watched: int, folder: Path) -> None:
    """End this process, and remove its folder, as soon as another process has ended."""
    try:
        handle = os.pidfd_open(watched)
        select.select([handle], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # no such call on this system
        while _is_alive(watched):
            time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main(*sys.argv[1:])
