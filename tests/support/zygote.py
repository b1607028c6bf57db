"""A process that has imported FleetFit, and forks itself for each worker of engine `processes` or of a comparison.

A fresh Python spends two seconds on imports, and a test's workers a tenth of that on jobs. A fork is a process of its
own, with the environment, folder and paths that a fresh one would have.
"""

import contextlib
import fcntl
import functools
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HEAVY = ("peft",)  # imported once more in the zygote, where the tests' process has it
_LARGEST = 2**18  # bytes of a request
_FREE = 500  # a number of descriptors that nobody has


class ForkedProcess:
    """What is needed of a `subprocess.Popen`.

    Attributes:
        pid: The process.
        returncode: How it ended, as in `subprocess.Popen`; None while it is alive.
    """

    def __init__(self, reports: int) -> None:
        self._reports = reports
        self.pid = self._read()
        self.returncode: int | None = None

    def _read(self) -> int:
        (number,) = struct.unpack("i", os.read(self._reports, 4))
        return int(number)

    def poll(self) -> int | None:
        """Return how it ended; None while it is alive."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            self.returncode = self._read()
            os.close(self._reports)
        return self.returncode

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


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

    def start(
        self, command: Sequence[str], pass_fds: Sequence[int], env: dict[str, str], stdout: int = 1,
        stderr: Any = None, **_: Any
    ) -> ForkedProcess:  # fmt: skip
        """Fork a process that runs `python -m MODULE ARGUMENTS...` or `python -c PROGRAM` as a fresh one would.

        Args:
            command: The command of the fresh process.
            pass_fds: One descriptor, which has the same number there.
            env: Its environment.
            stdout: A descriptor, or `subprocess.DEVNULL`.
            stderr: A file; by default that of this process.
        """
        (descriptor,) = pass_fds
        request = {
            "command": command[1:], "descriptor": descriptor, "env": env, "folder": str(Path.cwd()),
            "import": [name for name in _HEAVY if name in sys.modules],
        }  # fmt: skip
        reports, end = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, end)
            out = stack.enter_context(Path(os.devnull).open("wb")).fileno() if stdout == subprocess.DEVNULL else stdout
            err = 2 if stderr is None else stderr.fileno()
            socket.send_fds(self._socket, [json.dumps(request).encode()], [descriptor, end, out, err])
        return ForkedProcess(reports)

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
    import fleetfit.api.comparison.execute
    import fleetfit.engines.processes
    import fleetfit.training  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end by themselves
    paths = sys.path[1:]
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 4)
        if not message:
            return
        request = json.loads(message)
        for name in request["import"]:
            __import__(name)
        if os.fork() == 0:
            connection.close()
            _keep(request, descriptors, paths)
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(request: dict[str, Any], descriptors: list[int], paths: list[str]) -> None:
    """Fork the process; report its id, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _run(request, descriptors, paths)
    os.setpgid(0, 0)
    passed, end, *_ = descriptors
    os.close(passed)
    os.write(end, struct.pack("i", pid))
    os.write(end, struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def _run(request: dict[str, Any], descriptors: list[int], paths: list[str]) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        passed, _, out, err = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FREE) for each in descriptors)
        for descriptor, number in ((passed, request["descriptor"]), (out, 1), (err, 2)):
            os.dup2(descriptor, number)
        for descriptor in {*descriptors, passed, out, err} - {request["descriptor"], 1, 2}:
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:] = [request["folder"], *request["env"].get("PYTHONPATH", "").split(os.pathsep), *paths]
        how, what, *arguments = request["command"]
        sys.argv = [what if how == "-m" else how, *arguments]
        if how == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # runpy warns of a module that was imported before
                runpy.run_module(what, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
