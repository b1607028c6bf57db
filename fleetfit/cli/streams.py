"""What the command line says and prints: sentences on stderr, and on stdout nothing but the result."""

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fleetfit.errors import ConfigError, FleetFitError, make_printable


def say(sentence: str) -> None:
    """Print a sentence on stderr, on one line; where there is no stderr, nobody hears it."""
    with contextlib.suppress(OSError, ValueError):
        line = make_printable(f"fleetfit: {' '.join(sentence.split())}")
        line = f"\n{line}" if sentence.startswith("stopped.") and sys.stderr.isatty() else line  # behind the ^C
        print(line, file=sys.stderr)


def said(parser: Callable[[str], Path]) -> Callable[[str], Path]:
    """Return a parser of an argument whose errors reach the door as they are.

    A `ConfigError` is a `ValueError`, and of such the command line's library makes a sentence of its own.
    """

    @functools.wraps(parser)
    def parsed(text: str) -> Path:
        try:
            return parser(text)
        except ConfigError as error:
            raise FleetFitError(str(error)) from None

    return parsed


class _Spoken(logging.Handler):
    """What the package logs, as sentences on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def hear(level: str = "warning") -> None:
    """Print what the package logs from a level on."""
    logger = logging.getLogger("fleetfit")
    if not any(isinstance(handler, _Spoken) for handler in logger.handlers):
        logger.addHandler(_Spoken())
    logger.setLevel(level.upper())


@contextlib.contextmanager
def only_the_result() -> Iterator[None]:
    """Send what anybody prints meanwhile to stderr: of a plug-in or a worker, nothing may get among JSON."""
    sys.stdout.flush()
    real = sys.stdout is sys.__stdout__
    kept = os.dup(1) if real else -1
    try:
        if real:
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if real:
            sys.stderr.flush()
            os.dup2(kept, 1)
            os.close(kept)
