"""What happens to a message and when, on both sides, for whoever looks for the cause of a late or lost answer.

With FLEETFIT_TRACE set to a file, each process of a fleet appends lines to it: seconds of the machine's monotonic
clock, the process, what happened, and the first letters of the message's id. On one machine the lines of all processes
can be sorted; on several, each has a clock of its own. Nothing here imports torch or Flower.
"""

import os
import time

VARIABLE = "FLEETFIT_TRACE"
_LETTERS = 10


def told(event: str, message: str = "", more: str = "") -> None:
    """Write a line, if somebody wants to know.

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
