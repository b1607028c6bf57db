"""Verbs of the command line, called in this process."""

import contextlib
import io
from typing import NamedTuple

import pytest

from fleetfit.cli import main


class Printed(NamedTuple):
    """The exit code of a verb, and what it printed."""

    code: int
    out: str
    err: str


def run_verb(*arguments: object, code: int | None = None) -> Printed:
    """Run the command line.

    Args:
        *arguments: The words behind the program's name.
        code: The exit code that is expected; None: any.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    assert code in (None, end.value.code), f"exit code {end.value.code}: {err.getvalue()}"
    return Printed(end.value.code, out.getvalue(), err.getvalue())
