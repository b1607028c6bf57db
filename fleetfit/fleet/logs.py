"""A fleet's processes log to stderr, and to a trace on request.

Flower, or a node, starts these processes without FleetFit's command line: each of them calls `log_to_stderr`.

With FLEETFIT_TRACE set to a file, each process of a fleet appends lines to it, to find the cause of a late or lost
reply: seconds of the machine's monotonic clock, the process, the event, and the first letters of the message's id. On
one machine the lines of all processes can be sorted; several machines have different clocks.

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


class _StderrHandler(logging.Handler):
    """Writes each record as a line of stderr, as the command line does."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("fleetfit: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        line = make_printable(self.format(record)) + "\n"
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            try:
                sys.stderr.write(line)
                sys.stderr.flush()
            except RuntimeError:  # a signal came in the middle of another line
                os.write(2, line.encode())


def log_to_stderr() -> None:
    """Print the package's warnings and errors, once, unless it has a handler."""
    logger = logging.getLogger("fleetfit")
    if all(isinstance(handler, logging.NullHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())


def trace(event: str, message: str = "", details: str = "") -> None:
    """Append a line to the trace, if there is one.

    Args:
        event: What happened, such as "sent".
        message: Id of the message.
        details: A few words.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = f"{time.monotonic():.3f} {os.getpid()} {event} {message[:_LETTERS]} {details}".rstrip()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, line.encode() + b"\n")
        finally:
            os.close(handle)
    except OSError:  # the trace must not stop a fleet
        return
