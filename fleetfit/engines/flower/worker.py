"""The warm worker of a node (see `fleetfit.engines.flower.warm`): comes with its first message, goes with the node.

It does one message after the other. Where whoever asked has gone, nobody wants the answer (a run was stopped in the
middle of a long job, say): the worker ends then, since nothing else stops a job at once, and the next message starts
another one. What the node remembers is in files that are whole at any time.
"""

import contextlib
import os
import select
import shutil
import socket
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from fleetfit.engines.flower.node import answer
from fleetfit.engines.flower.trace import told
from fleetfit.engines.flower.warm import BEGUN, received

_LOOK_S = 0.5  # at whether whoever asked is still there


def main(place: str, config: str, watched: str) -> None:
    """Answer messages until the watched process ends."""
    os.umask(0o077)
    threading.Thread(target=_end_with, args=(int(watched), Path(place).parent), daemon=True).start()

    with Listener(place, "AF_UNIX") as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
                _serve(connection, config)


def _serve(connection: Connection, config: str) -> None:
    if _user(connection) != os.getuid():
        return
    connection.send_bytes(BEGUN)
    parts, answered = received(connection), threading.Event()
    told("working", more="on a job" if "state" in parts else "")
    threading.Thread(target=_end_when_gone, args=(connection, answered), daemon=True).start()
    try:
        content = answer(config, parts)
    finally:
        answered.set()
    connection.send_bytes(content)


def _end_when_gone(connection: Connection, answered: threading.Event) -> None:
    """End this process when the other end is closed before it has its answer."""
    while not answered.is_set():
        with contextlib.suppress(OSError):
            gone = connection.poll(_LOOK_S)  # it says nothing more, so what can be read is its end
            if gone and not answered.is_set():
                told("abandoned")
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
