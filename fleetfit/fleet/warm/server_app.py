"""The server app: replies that are asked for often, and somebody who says at once that it was killed.

Such a process says how its task went when it ends. Of one that was killed (no memory was left, say) Flower hears
nothing, and takes it for alive for a minute: for so long all nodes work for a server app that is gone. So a small
process beside it speaks for it: `python -m fleetfit.fleet.warm.server_app`, started by `spoken_for`.
"""

import contextlib
import functools
import importlib
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from fleetfit.fleet.warm.private_names import GRID, say_failed

_TRY_S = 60.0  # to reach a SuperLink that is away; by then Flower has noticed by itself
_PAUSE_S = 2.0
_OVER = b"over\n"


@contextlib.contextmanager
def warmed(grid: Any) -> Iterator[None]:
    """Serve what is done in this block sooner, where the installed Flower allows it.

    Args:
        grid: Flower's grid of the server app.
    """
    _ask_often()
    with spoken_for(grid):
        yield


def _ask_often() -> None:
    """Have Flower ask often for a reply's content, which comes after the reply; where it can still be told to.

    It waits 1 s after the first time in vain, and longer each time, which is most of the time of a small model's round.
    """
    try:
        module = importlib.import_module(GRID)
    except ImportError:
        return
    found = getattr(module, "pull_objects", None)
    if found is not None and "initial_backoff" in inspect.signature(found).parameters:
        module.pull_objects = functools.partial(found, initial_backoff=0.05)  # type: ignore[attr-defined]


@contextlib.contextmanager
def spoken_for(grid: Any) -> Iterator[None]:
    """Have a process beside this one that tells the SuperLink when this one is killed.

    Args:
        grid: Flower's grid of the server app; where it is not as expected, nobody speaks.
    """
    address, token, certificates = (getattr(grid, name, None) for name in ("_addr", "_token", "_cert"))
    if not isinstance(address, str) or not isinstance(token, str) or not isinstance(certificates, bytes | None):
        yield
        return
    task = {"address": address, "token": token, "insecure": bool(getattr(grid, "_insecure", False)),
            "certificates": certificates and certificates.decode("ascii", "replace")}  # fmt: skip
    command = [sys.executable, "-P", "-m", "fleetfit.fleet.warm.server_app"]
    quiet = subprocess.DEVNULL
    # A session of its own: who ends the server app's group with it must not end this one first.
    beside = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    assert beside.stdin is not None
    with contextlib.suppress(OSError):
        beside.stdin.write(json.dumps(task).encode() + b"\n")
        beside.stdin.flush()
    try:
        yield
    finally:  # from here on Flower itself says how it went
        with contextlib.suppress(OSError):
            beside.stdin.write(_OVER)
        with contextlib.suppress(OSError):
            beside.stdin.close()
        beside.wait()


def _main() -> None:
    """Read a task from the standard input; say that it has failed if that is closed without a word."""
    line = sys.stdin.buffer.readline()
    if not line or sys.stdin.buffer.read() == _OVER:
        return
    import httpx

    until = time.monotonic() + _TRY_S
    while time.monotonic() < until:
        try:
            say_failed(**json.loads(line), details="The server app's process was killed.")
        except httpx.HTTPStatusError:  # heard, and known already
            return
        except httpx.HTTPError:
            time.sleep(_PAUSE_S)
        else:
            return


if __name__ == "__main__":
    _main()
