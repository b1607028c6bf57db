"""The door of the command line: whatever happens behind it is one sentence on stderr and an exit code.

docs/errors.md has the codes. `--traceback` prints the traceback before that.
"""

import contextlib
import os
import sys
import warnings
from typing import Any, cast

from fleetfit.cli.interrupts import Interrupted, Interrupts
from fleetfit.cli.streams import say
from fleetfit.errors import FleetFitError, Unexpected, format_cause, make_printable
from fleetfit.machine import is_out_of_memory

FAULT, MISTAKE, STOPPED, READER_LEFT = 1, 2, 130, 1
SHOWN = "FLEETFIT_TRACEBACK"
"""Environment variable; 1: tracebacks are printed, as with --traceback."""
_OPTION = "--traceback"
_HOW_TO_SEE = f"{_OPTION} prints its traceback."
_COMPLETION = "_FLEETFIT_COMPLETE"


def passed(arguments: list[str], process: bool = False) -> int:
    """Run a command and return the exit code.

    Args:
        arguments: What was typed behind the program's name.
        process: Whether the process is there for this command alone.
    """
    before, _, behind = _parted(arguments)
    shown = _OPTION in before or os.environ.get(SHOWN, "") not in ("", "0")
    wanted = [word for word in before if word != _OPTION] + behind
    with Interrupts() if process else contextlib.nullcontext() as interrupts:
        try:
            if process:
                _open_streams()
            code = _called(wanted)
        except BaseException as error:
            stopped = interrupts is not None and interrupts.seen
            code = _answered(error, stopped, shown)
        if process:
            code = _last_words(code)
    return code


def _parted(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the words before "--", and those from it on."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], "--", arguments[at:]


def _called(arguments: list[str]) -> int:
    with warnings.catch_warnings():  # typer 0.20 uses names that click 8.5 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        import typer  # noqa: F401
    from fleetfit.cli.verbs import app

    try:
        result = app(args=arguments, prog_name="fleetfit", standalone_mode=False)
    except SystemExit as left:
        if _COMPLETION in os.environ or any(word.endswith("-completion") for word in arguments):
            return int(left.code or 0)  # a shell asks what may stand here, and typer leaves when it has said so
        raise
    if result == STOPPED:  # which is what typer makes of it
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _answered(error: BaseException, stopped: bool, shown: bool) -> int:
    """Say what happened, and return the exit code."""
    if shown and not isinstance(error, KeyboardInterrupt):
        import traceback

        with contextlib.suppress(OSError):
            details = error.details if isinstance(error, Unexpected) else ""  # of the worker
            text = "".join([*traceback.format_exception(error), details])
            print(make_printable(text), file=sys.stderr, end="")
    try:
        sentence, code = _judged(error, stopped)
    except KeyboardInterrupt:
        sentence, code = "stopped.", STOPPED
    if sentence:
        say(sentence)
    return code


def _judged(error: BaseException, stopped: bool) -> tuple[str, int]:
    """Return what is said of an error, and the exit code; the specific ones first."""
    import typer

    # the base of typer's errors, without importing what it is built on: newer versions carry their own copy of that
    usage = cast(type[Any], typer.BadParameter.__mro__[2])
    if isinstance(error, Interrupted):
        return str(error), STOPPED
    if stopped or isinstance(error, KeyboardInterrupt | typer.Abort):
        return "stopped.", STOPPED
    if isinstance(error, Unexpected):
        return f"{error} {_HOW_TO_SEE}", MISTAKE if error.foreign else FAULT
    if isinstance(error, FleetFitError):
        return str(error), MISTAKE
    if isinstance(error, usage):
        context = getattr(error, "ctx", None)
        hint = f' Try "{context.command_path} --help".' if context is not None else ""
        return f"{error.format_message()}{hint}", MISTAKE
    if _reader_left(error):
        return "", READER_LEFT
    if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
        return (
            f"no memory was left: {format_cause(error)}. Smaller batches, fewer workers or a smaller model take less.",
            MISTAKE,
        )
    if isinstance(error, OSError):
        from fleetfit import paths

        if paths.known(error):
            names = [
                paths.shown(os.fsdecode(n)) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)
            ]
            return f"{' or '.join(names) or 'a file, or what is printed,'} cannot be used: {paths.why(error)}.", MISTAKE
    return _unexpected(error)


def _unexpected(error: BaseException) -> tuple[str, int]:
    """Return the sentence about an unexpected error: whose fault it is, and how to see its traceback."""
    from fleetfit.names import blamed, what_it_raised

    plug_in = blamed(error)
    if plug_in is not None:
        return f"{plug_in} {what_it_raised(error)}. {_HOW_TO_SEE}", MISTAKE
    return (
        f"this is a fault of FleetFit, not yours: {format_cause(error, typed=True)}. Run it again with "
        f"{_OPTION} and report what it prints {_tracker()}.",
        FAULT,
    )


def _tracker() -> str:
    """Return where faults are reported, as the package's metadata name it."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        for entry in metadata.metadata("fleetfit").get_all("Project-URL") or ():
            name, _, address = entry.partition(",")
            if name.strip().lower() in ("issues", "tracker", "bug tracker", "bugs"):
                return f"at {address.strip()}"
    return "to your FleetFit distributor"


# ---- the streams ---------------------------------------------------------------------------------------------------


def _open_streams() -> None:
    """Give closed streams to the null device, and let no character stop or spoil a line that is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: files must not land on 1 and 2
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given, **named: make_printable(format_warning(*given, **named))


def _reader_left(error: BaseException) -> bool:
    """Tell whether something ended because nobody reads what is printed any more."""
    import select

    if isinstance(error, SystemExit):  # what rich and typer make of it
        return isinstance(error.__context__, BrokenPipeError)
    if not isinstance(error, BrokenPipeError):
        return False
    try:
        look = select.poll()
        look.register(1, 0)
        return bool(look.poll(0))
    except (AttributeError, OSError):  # no such thing on this system
        return True


def _last_words(code: int) -> int:
    """Print what is still held back; afterwards nothing that is held back can fail."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except BrokenPipeError:
            code = code or READER_LEFT
            _to_nowhere(number)
        except (OSError, ValueError) as error:
            if not code and number == 1:
                say(f"what was to be printed could not be: {getattr(error, 'strerror', None) or error}.")
                code = MISTAKE
            _to_nowhere(number)
    return code


def _to_nowhere(number: int) -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
