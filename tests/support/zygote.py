"""A process that has imported FleetFit, and forks itself for each worker of engine `processes`.

A fresh Python spends two seconds on imports, and a test's workers a tenth of that on jobs. A fork is a process of its
own, with the environment, folder and paths that a fresh one would have.
"""

import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HEAVY = ("peft",)  # imported once more in the zygote, where the tests' process has it
_LARGEST = 2**18  # bytes of a request


class ForkedProcess:
    """What engine `processes` needs of a `subprocess.Popen`.

    Attributes:
        pid: The process.
    """

    def __init__(self, pid: int, alive: int) -> None:
        self.pid, self._alive = pid, alive

    def poll(self) -> int | None:
        """Return None while the process is alive."""
        return None if self._alive >= 0 and not select.select([self._alive], [], [], 0)[0] else 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self._alive >= 0:
            if not select.select([self._alive], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            os.close(self._alive)
            self._alive = -1
        return 0

    def kill(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Zygote:
    """The process that forks; it ends with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "support.zygote", str(theirs.fileno())]
            paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
            environment = {**os.environ, "PYTHONPATH": paths}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, process_group=0
            )
        self._socket = ours

    def start(self, command: Sequence[str], pass_fds: Sequence[int], env: dict[str, str], **_: Any) -> ForkedProcess:
        """Fork a process that runs `python -m MODULE DESCRIPTOR ARGUMENTS...` as a fresh one would."""
        _, _, module, descriptor, *arguments = command
        assert [int(descriptor)] == list(pass_fds)
        heavy = [name for name in _HEAVY if name in sys.modules]
        request = {"module": module, "arguments": arguments, "env": env, "folder": str(Path.cwd()), "import": heavy}
        alive, end = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [int(descriptor), end, 1, 2])
        finally:
            os.close(end)
        return ForkedProcess(int(self._socket.recv(_LARGEST)), alive)

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.wait()


@functools.cache
def shared_zygote() -> Zygote:
    """Return the zygote of this process."""
    return Zygote()


# ---- in the zygote ---------------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> None:
    import fleetfit.engines.processes
    import fleetfit.training  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    paths = sys.path[1:]
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 4)
        if not message:
            return
        request = json.loads(message)
        for name in request["import"]:
            __import__(name)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _run(request, descriptors, paths)
        connection.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _run(request: dict[str, Any], descriptors: list[int], paths: list[str]) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, _, out, err = descriptors  # the second one closes with the process
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:] = [request["folder"], *request["env"].get("PYTHONPATH", "").split(os.pathsep), *paths]
        sys.argv = [request["module"], str(connection), *request["arguments"]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # runpy warns of a module that was imported before
            runpy.run_module(request["module"], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
