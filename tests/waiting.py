"""Processes that tests start: always ended, their pipes closed, and waited for by what they have done.

No test has a number of seconds in which a machine has to do something: it waits until something has happened, or until
that cannot happen any more because the process is gone. The limit here is only there so that a run ends at last.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LIMIT_S = 900


@contextlib.contextmanager
def running(command: Sequence[Any], **how: Any) -> "Iterator[subprocess.Popen[Any]]":
    """Start a process; afterwards it is gone, and its pipes are closed."""
    process: subprocess.Popen[Any] = subprocess.Popen([str(word) for word in command], **how)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            if how.get("start_new_session"):
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait(LIMIT_S)


def wait_until(happened: Callable[[], Any], process: "subprocess.Popen[Any] | None" = None) -> Any:
    """Wait until something is true and return it; fail where the process has ended without it."""
    limit = time.monotonic() + LIMIT_S
    while True:
        gone = process is not None and process.poll() is not None
        result = happened()
        if result:
            return result
        assert not gone, f"the process has ended with {process.returncode if process else None}"
        assert time.monotonic() < limit, f"nothing has happened in {LIMIT_S} s"
        time.sleep(0.002)


def listening_to_ctrl_c() -> None:
    """Let a new process take Ctrl-C as in a terminal: a job in the background ignores it. For `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
