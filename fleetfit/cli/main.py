"""Entry point of the command line: runs a verb, and turns every exception into one sentence and an exit code.

docs/errors.md lists the exit codes. Only the standard library is imported before `run_command`, so that Ctrl-C is
answered from the first moment.
"""

import contextlib
import os
import signal
import sys
import warnings
from typing import Any, cast

from fleetfit.cli.output import UserInterrupt, print_sentence
from fleetfit.errors import FleetFitError, Unexpected, format_cause, make_printable
from fleetfit.machine import is_out_of_memory

FAULT, MISTAKE, STOPPED = 1, 2, 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: the script's entry point.

    Args:
        arguments: The words behind the program's name; None: those of this process.
    """
    if arguments is not None:
        sys.exit(run_command(arguments))
    _open_streams()
    code = run_command(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends what is left of the process
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run a verb and return the exit code; the message of an error is printed to stderr."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    shows_traceback = "--traceback" in arguments[:end] or os.environ.get("FLEETFIT_TRACEBACK", "") not in ("", "0")
    words = [word for word in arguments[:end] if word != "--traceback"] + arguments[end:]
    sentence = ""
    try:
        code = _call_verb(words)
    except BaseException as error:
        sentence, code = describe_error(error)
        if shows_traceback and code != STOPPED:
            _print_traceback(error)
    try:
        sys.stdout.flush()
    except OSError as error:
        sentence, code = (sentence, code) if sentence else describe_error(error)
        with contextlib.suppress(OSError):  # discard the rest, so that the interpreter's exit does not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if sentence:
        print_sentence(sentence)
    return code


def _call_verb(words: list[str]) -> int:
    with warnings.catch_warnings():  # typer 0.20 uses names that click 8.5 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        import typer  # noqa: F401
    from fleetfit.cli.verbs import app

    try:
        result = app(args=words, prog_name="fleetfit", standalone_mode=False)
    except SystemExit as end:
        if "_FLEETFIT_COMPLETE" in os.environ or any(word.endswith("-completion") for word in words):
            return int(end.code or 0)  # typer exits after it has completed a word for a shell
        raise
    if result == STOPPED:  # typer's answer to KeyboardInterrupt
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def describe_error(error: BaseException) -> tuple[str, int]:
    """Return the sentence on an error, and the exit code."""
    import typer

    from fleetfit import names, paths

    # the base of typer's errors, without importing click: newer versions of typer carry their own copy of it
    usage_error = cast(type[Any], typer.BadParameter.__mro__[2])
    if isinstance(error, UserInterrupt):
        return str(error), STOPPED
    if isinstance(error, typer.Abort) or _has_interrupt(error):
        return "stopped.", STOPPED
    if isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
        return "", MISTAKE  # the reader of the output needs no more, as `head` does
    if isinstance(error, Unexpected):
        return f"{error} --traceback prints its traceback.", MISTAKE if error.foreign else FAULT
    if isinstance(error, FleetFitError):
        return str(error), MISTAKE
    if isinstance(error, usage_error):
        context = getattr(error, "ctx", None)
        hint = f' Try "{context.command_path} --help".' if context is not None else ""
        return f"{error.format_message()}{hint}", MISTAKE
    if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
        return f"out of memory: {format_cause(error)}. Use smaller batches, fewer workers or a smaller model.", MISTAKE
    if isinstance(error, OSError) and paths.is_environment_error(error):
        files = [
            paths.truncate_path(os.fsdecode(n)) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)
        ]
        return f"{' or '.join(files) or 'the output'} cannot be used: {paths.format_os_error(error)}.", MISTAKE
    plug_in = names.find_plug_in(error)
    if plug_in is not None:
        return f"{plug_in} {names.describe_failure(error)}. --traceback prints its traceback.", MISTAKE
    return (
        f"this is a fault of FleetFit, not yours: {format_cause(error, typed=True)}. Please report it to your "
        "FleetFit distributor, with the traceback that --traceback prints.",
        FAULT,
    )


def _has_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C, or was raised because of it: modules fail to import when interrupted."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _print_traceback(error: BaseException) -> None:
    import traceback

    text = "".join(traceback.format_exception(error))
    if isinstance(error, Unexpected):
        text += error.details
    with contextlib.suppress(OSError):
        print(make_printable(text), file=sys.stderr, end="")


def _open_streams() -> None:
    """Open closed standard streams on the null device, and escape characters that a stream cannot encode."""
    while os.open(os.devnull, os.O_RDWR) <= 2:  # else the next files opened would be the standard streams
        pass
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *args, **keywords: make_printable(format_warning(*args, **keywords))
