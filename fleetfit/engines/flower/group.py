"""Processes that end together, whatever ends the one that started them; and being told to end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

# It ends its process group once the process that holds the other end of its input is gone.
_KEEPER = "trap '' HUP INT TERM; read _; kill -KILL 0"
_JOIN_S = 10.0


class Group:
    """Processes that end together: with this block, or when this process is killed."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0
        )
        self._members: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        command: Sequence[str],
        descriptors: Sequence[int] = (),
        output: IO[bytes] | None = None,
        read: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a process.

        Args:
            command: The command.
            descriptors: What it inherits.
            output: Where it writes; by default where this process does.
            read: Whether it reads from a pipe, its `stdin`.
        """
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if read else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=descriptors,
            env=self._environment,
            umask=0o077,
            process_group=self._keeper.pid,
        )
        self._members.append(process)
        return process

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        for process in (*self._members, self._keeper):
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


class Output(threading.Thread):
    """Passes on what is written to `file`, and keeps the last lines of it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        ours, theirs = os.pipe()
        self.file = os.fdopen(theirs, "wb")
        self._source = os.fdopen(ours, "rb")
        self._lines: deque[bytes] = deque(maxlen=50)

    @property
    def last(self) -> str:
        """The last lines."""
        return b"".join(self._lines).decode(errors="replace")

    def run(self) -> None:
        """Read until nobody holds `file` any more."""
        with self._source:
            for line in self._source:
                self._lines.append(line)
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()

    def __enter__(self) -> "Output":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.join(_JOIN_S)


class _Told(BaseException):
    """Somebody wants this process to end."""


@contextlib.contextmanager
def told_to_end() -> Iterator[None]:
    """Leave the block when this process is told to end, once: what is done then is not interrupted."""
    asked = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    heard = [each for each in asked if signal.getsignal(each) is not signal.SIG_IGN]  # nohup stays nohup

    def told(number: int, frame: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)
        raise _Told

    before = {each: signal.signal(each, told) for each in heard}
    try:
        yield
    except _Told:
        pass
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
