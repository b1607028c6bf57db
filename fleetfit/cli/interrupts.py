"""Ctrl-C at any time: one line and exit code 130, also in the middle of an import.

While modules are imported for a verb, nothing has begun and nothing has to be tidied up, and an exception there can get
lost: libraries catch it, or take it for a missing module. So the process ends at once. Later it is an exception as
always, which a run tidies up on; one that gets lost in a callback is raised again.
"""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

_AGAIN_S = 0.02
_HERE = os.path.dirname(__file__)  # noqa: PTH120
_TYPER = ("typer", "click")


class Interrupted(Exception):
    """Ctrl-C ended a verb; the message says how to go on."""


class Interrupts:
    """What Ctrl-C does while the context lasts, and that a second one ends the process behind it."""

    def __init__(self) -> None:
        self.seen = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        """Take over, unless whoever started the process wants Ctrl-C ignored."""
        if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)
            self._before, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the rest to the system: what is left of the process has no sentence to say."""
        if self._before is not None:
            sys.unraisablehook = self._before
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if _nothing_begun(frame):
            os.write(2, b"\nfleetfit: stopped.\n" if os.isatty(2) else b"fleetfit: stopped.\n")
            os._exit(130)
        raise KeyboardInterrupt

    def _lost(self, told: Any) -> None:
        if not issubclass(told.exc_type, KeyboardInterrupt):
            self._before(told)
        elif hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._interrupted)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


def _nothing_begun(frame: FrameType | None) -> bool:
    """Tell whether something is being imported, and whoever wants it is of the command line."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    for one in reversed(frames):
        file = one.f_code.co_filename
        if file.startswith("<frozen importlib"):
            return True
        program = one.f_globals.get("__name__") == "__main__" or file.startswith("<frozen runpy")
        if not (program or file.startswith(_HERE) or any(f"{os.sep}{name}{os.sep}" in file for name in _TYPER)):
            return False
    return False
