"""What the processes of a fleet say: the package's log, as lines on stderr, and a trace of what happens to messages.

Processes that Flower or a node starts have no command line of ours that listens to the log: each of them calls `hear`.

With FLEETFIT_TRACE set to a file, each process of a fleet appends lines to it, for whoever looks for the cause of a
late or lost answer: seconds of the machine's monotonic clock, the process, what happened, and the first letters of the
message's id. On one machine the lines of all processes can be sorted; on several, each has a clock of its own.

Nothing here imports torch or Flower.
"""

import contextlib
import logging
import os
import sys
import time

from fleetfit.errors import make_printable

VARIABLE = "FLEETFIT_TRACE"
_LETTERS = 10


class _Lines(logging.Handler):
    """Writes each record as a line of stderr, as the command line does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("fleetfit: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        line = make_printable(self.format(record)) + "\n"
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            try:
                sys.stderr.write(line)
                sys.stderr.flush()
            except RuntimeError:  # a signal came in the middle of another line
                os.write(2, line.encode())


def hear() -> None:
    """Print what the package logs from warnings on, once, unless somebody listens already."""
    logger = logging.getLogger("fleetfit")
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(_Lines())


def traced(event: str, message: str = "", more: str = "") -> None:
    """Write a line to the trace, if somebody wants to know.

    Args:
        event: What happened, such as "sent".
        message: Id of the message that it happened to.
        more: A few words.
    """
    place = os.environ.get(VARIABLE)
    if not place:
        return
    line = f"{time.monotonic():.3f} {os.getpid()} {event} {message[:_LETTERS]} {more}".rstrip()
    try:
        handle = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, line.encode() + b"\n")
        finally:
            os.close(handle)
    except OSError:  # a trace never stops what it looks at
        return
