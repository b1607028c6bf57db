"""The worker of a node: a process that keeps torch, data and models, and does the jobs.

The node has no torch. It starts the worker with the first message, over a pipe of their own (`NodeWorker`), and alone
asks it, one message after the other. The worker (`main`) ends when the node does, also in the middle of a job. The node
ends it when the answer is not wanted any more: nothing else stops a training step at once. The node's memory is in
files that are complete at any time.

Only `main` imports torch, and nothing here imports Flower.
"""

import contextlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import IO

from fleetfit.errors import make_printable, one_line
from fleetfit.fleet.logs import log_to_stderr, trace

Parts = Mapping[str, bytes | bytearray]

# ---- asking the worker ---------------------------------------------------------------------------------------------

_ASK_S = 15.0  # between two questions whether an answer is still wanted: many nodes ask the SuperLink
_STUCK_S = 60  # that a worker may take no byte of a message
_END_S = 10.0
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")  # a job sets its own


class WorkerDeath(Exception):
    """The worker ended without an answer; the message says why. `code` is its exit code, or minus the signal."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.code = code


class NodeWorker:
    """The worker as its node sees it."""

    def __init__(self, config: str) -> None:
        """Start nothing yet.

        Args:
            config: The node's configuration file.
        """
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._output: threading.Thread
        self._last_line = ""

    def ask(self, parts: dict[str, bytearray], is_wanted: Callable[[], bool]) -> bytes | None:
        """Return the answer to a message; None if it is not wanted any more, and the worker is ended.

        Args:
            parts: The message; emptied once the worker has it, since a device may lack the memory for both.
            is_wanted: Called every 15 s until the answer is there.

        Raises:
            WorkerDeath: It could not start, or ended while it worked.
        """
        if self._process is None or self._process.poll() is not None:
            self.end()
            try:
                self._start()
            except OSError as error:
                raise WorkerDeath(f"the node's worker could not start: {error}") from None
        process = self._process
        try:
            send_parts(self._pipe, parts)
            parts.clear()
            while not self._pipe.poll(_ASK_S):
                if not is_wanted():
                    self.end()
                    return None
                # a process of the worker's own may keep the pipe open when it has died
                if process is not None and process.poll() is not None and not self._pipe.poll(0):
                    raise EOFError
            if content := self._pipe.recv_bytes():
                return content
            parts.update({name: bytearray(content) for name, content in receive_parts(self._pipe).items()})
        except (EOFError, OSError):
            if self._process is None:
                return None
            death = self._explain_death(self._process)
            self.end()
            raise death from None
        except BaseException:  # its answer would be read as that of the next message
            self.end()
            raise
        self.end()  # it has imported other code than the message names
        return self.ask(parts, is_wanted)

    def end(self) -> None:
        """End the process, if there is one; another thread that waits for an answer gets None."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with processes of its own
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver does not die at once
                process.wait(_END_S)
            self._pipe.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _STUCK_S, 0))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fleetfit.fleet.worker", str(theirs.fileno()), self._config],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ONE_THREAD},
                umask=0o077,
                process_group=0,  # Ctrl-C is for the node, which says that it leaves
            )
        self._pipe, self._last_line = Connection(ours.detach()), ""
        assert self._process.stdout is not None
        self._output = threading.Thread(target=self._forward, args=(self._process.stdout,), daemon=True)
        self._output.start()

    def _forward(self, output: IO[bytes]) -> None:
        """Print what the worker prints, and keep its last line."""
        with output:
            for line in output:
                text = line.decode(errors="backslashreplace")
                self._last_line = text.strip() or self._last_line
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(make_printable(text))
                    sys.stderr.flush()

    def _explain_death(self, process: "subprocess.Popen[bytes]") -> WorkerDeath:
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return WorkerDeath("the node's worker closed its pipe or takes no message, and was ended.")
        self._output.join(_END_S)
        how = f"signal {-code}: it was killed, or had no memory left." if code < 0 else f"exit code {code}."
        last = f" Its last line: {one_line(self._last_line, 500)}" if self._last_line else ""
        return WorkerDeath(f"the node's worker ended while it worked: {how}{last}", code)


def send_parts(connection: Connection, parts: Parts) -> None:
    """Send a message's parts over a connection."""
    connection.send_bytes(str(len(parts)).encode())
    for name, content in parts.items():
        connection.send_bytes(name.encode())
        connection.send_bytes(content)


def receive_parts(connection: Connection) -> dict[str, bytes]:
    """Return the parts that `send_parts` sent."""
    count = int(connection.recv_bytes(20))
    return {connection.recv_bytes(200).decode(): connection.recv_bytes() for _ in range(count)}


# ---- being the worker -----------------------------------------------------------------------------------------------


def main(descriptor: str, config: str) -> None:
    """Answer messages until the node closes the pipe.

    Args:
        descriptor: Of the pipe.
        config: The node's configuration file.
    """
    pipe, inbox = Connection(int(descriptor)), queue.SimpleQueue[dict[str, bytes]]()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    log_to_stderr()
    from fleetfit.fleet.node import answer

    while True:
        parts = inbox.get()
        trace("working", details="on a job" if "state" in parts else "")
        content = answer(config, parts)
        if not content:
            pipe.send_bytes(b"")
            send_parts(pipe, parts)
        del parts
        if content:
            pipe.send_bytes(content)
        del content  # the memory of the next job


def _read(pipe: Connection, inbox: "queue.SimpleQueue[dict[str, bytes]]") -> None:
    """Read messages; end this process, also within a job, when the node has ended."""
    try:
        while True:
            inbox.put(receive_parts(pipe))
    except (EOFError, OSError):
        os._exit(0)
    except BaseException:  # no memory was left
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(*sys.argv[1:])
