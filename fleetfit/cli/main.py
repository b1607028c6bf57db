"""Entry point of the command line: runs a verb, and maps every exception to a message and an exit code.

docs/errors.md lists the exit codes. Only the standard library is imported before `run_command`, so that Ctrl-C is
answered at once.
"""

import contextlib
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

from fleetfit.cli.output import UserInterrupt, print_sentence, setup_logging
from fleetfit.errors import FleetFitError, NoUsableUpdates, Unexpected, format_cause, make_printable
from fleetfit.machine import is_out_of_memory, stop_with_parent

if TYPE_CHECKING:
    import typer

FAULT, MISTAKE, STOPPED = 1, 2, 130


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: the script's entry point.

    Args:
        arguments: The words after the program's name; None: those of this process.
    """
    if arguments is not None:
        sys.exit(run_command(arguments))
    _open_streams()
    stop_with_parent()
    code = run_command(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
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
        sentence, code = describe_error(error, words)
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
    app = make_app()
    try:
        result = app(args=words, prog_name="fleetfit", standalone_mode=False)
    except SystemExit as end:
        if "_FLEETFIT_COMPLETE" in os.environ or any(word.endswith("-completion") for word in words):
            return int(end.code or 0)  # typer exits after it has completed a word for a shell
        raise
    if result == STOPPED:  # typer's answer to KeyboardInterrupt
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


class LogLevel(StrEnum):
    """The levels of the package's logger."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def make_app() -> "typer.Typer":
    """Return the typer application. Verbs import heavy modules only when they are called."""
    with warnings.catch_warnings():  # typer 0.20 uses names that click 8.5 deprecates
        warnings.simplefilter("ignore", DeprecationWarning)
        import typer
    from fleetfit.cli import compare, fleet, listing, model, plan, predict, run, runs

    app = typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Federated learning across unequal devices: each device trains the sub-model that fits it.",
    )

    @app.callback(invoke_without_command=True)
    def start(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
        traceback: Annotated[
            bool, typer.Option("--traceback", help="Print the traceback of an error; works with every verb.")
        ] = False,
        log: Annotated[
            LogLevel,
            typer.Option("--log", metavar="LEVEL", help="Lowest level of log messages: debug, info, warning or error."),
        ] = LogLevel.warning,
    ) -> None:
        setup_logging(log.value)
        if version:
            from fleetfit import __version__

            typer.echo(__version__)
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    verbs: dict[str, Callable[..., None]] = {
        "run": run.run, "resume": run.resume, "watch": run.watch, "compare": compare.compare, "demo": run.demo,
        "plan": plan.plan, "profile": plan.profile, "runs": runs.runs, "report": runs.report,
        "eval": predict.evaluate, "list": listing.list_builtins, "check-model": model.check_model,
        "predict": predict.predict, "calibrate": predict.calibrate, "export": predict.export,
        "pictures": runs.pictures,
    }  # fmt: skip
    for name, verb in verbs.items():
        app.command(name)(verb)
    app.add_typer(fleet.app, name="flower")
    return app


def describe_error(error: BaseException, words: Sequence[str] = ()) -> tuple[str, int]:
    """Return the message of an error, and the exit code; `words` are those of the verb."""
    import typer

    from fleetfit import files, names

    # the base of typer's errors, without importing click: newer versions of typer carry their own copy of it
    usage_error = cast(type[Any], typer.BadParameter.__mro__[2])
    if isinstance(error, UserInterrupt):
        return str(error), STOPPED
    if isinstance(error, typer.Abort) or _has_interrupt(error):
        return "stopped.", STOPPED
    if isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
        return "", MISTAKE  # the reader closed the pipe, as `head` does
    if isinstance(error, Unexpected):
        return f"{error} Add --traceback for the traceback.", MISTAKE if error.foreign else FAULT
    if isinstance(error, FleetFitError):
        return str(error), error.EXIT_CODE if isinstance(error, NoUsableUpdates) else MISTAKE
    if isinstance(error, usage_error):
        context = getattr(error, "ctx", None)
        if hint := _suggest_override(error, words):
            return hint, MISTAKE
        hint = f' Try "{context.command_path} --help".' if context is not None else ""
        suggests = (
            hasattr(error, "possibilities") and "Did you mean" in error.message
        )  # typer's, which click would repeat
        return f"{error.message if suggests else error.format_message()}{hint}", MISTAKE
    if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
        return f"out of memory: {format_cause(error)}. Use smaller batches, fewer workers or a smaller model.", MISTAKE
    if isinstance(error, OSError) and files.is_environment_error(error):
        targets = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes)]
        return f"{' or '.join(targets) or 'the output'} cannot be used: {files.format_os_error(error)}.", MISTAKE
    plug_in = names.find_plug_in(error)
    if plug_in is not None:
        return f"{plug_in} {names.describe_failure(error)}. Add --traceback for the traceback.", MISTAKE
    if isinstance(error, ModuleNotFoundError):  # as in the environment of `make demo`
        return format_cause(error), MISTAKE
    return (
        f"internal error in FleetFit: {format_cause(error, typed=True)}. This is a mistake of FleetFit: "
        "report it, with the output of --traceback.",
        FAULT,
    )


def _suggest_override(error: Any, words: Sequence[str]) -> str:
    """Return a sentence if an unknown option is a key of a run file, for a verb that takes `--set`; else ""."""
    option = str(getattr(error, "option_name", ""))
    if not hasattr(error, "possibilities") or not option.startswith("--"):
        return ""
    if not any("--set" in parameter.opts for parameter in error.ctx.command.params):
        return ""
    from fleetfit.config.parse import find_keys

    keys = find_keys(option.removeprefix("--").replace("-", "_"))
    if not keys:
        return ""
    place = next((i for i, word in enumerate(words) if word.partition("=")[0] == option), len(words))
    _, equals, value = words[place].partition("=") if place < len(words) else ("", "", "")
    if not equals and place + 1 < len(words) and not words[place + 1].startswith("--"):
        value = words[place + 1]
    settings = " or ".join(f"--set {shlex.quote(f'{key}={value}') if value else f'{key}=VALUE'}" for key in keys)
    return f"no such option: {option}. Keys of a run file are set with {settings}"


def _has_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is Ctrl-C or was caused by it, as when an import is interrupted."""
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
    while os.open(os.devnull, os.O_RDWR) <= 2:  # otherwise the next opened files would become the standard streams
        pass
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *args, **keywords: make_printable(format_warning(*args, **keywords))
