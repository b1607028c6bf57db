"""The command line.

`run`, `plan`, `compare`, `resume`, `eval`, `list` and `check-model` are in `verbs`; `predict`, `calibrate`, `export`,
`pictures` and `attention` in `shipping`; `profile` in `profiling`; `flower` in `fleet`.

What goes wrong is one sentence on stderr and exit code 2; an error that is no `FleetFitError` keeps its traceback.
"""

import sys
import warnings
from typing import Any, cast

with warnings.catch_warnings():  # typer 0.20 uses names that click 8.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

from fleetfit.cli.verbs import app
from fleetfit.errors import FleetFitError

# the base of typer's errors, without importing what it is built on: newer versions carry their own copy of that
_CommandError = cast(type[Any], typer.BadParameter.__mro__[2])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: the script's entry point."""
    sys.exit(_code(sys.argv[1:] if arguments is None else arguments))


def _code(arguments: list[str]) -> int:
    try:
        result = app(args=arguments, prog_name="fleetfit", standalone_mode=False)
    except FleetFitError as error:
        return _say(str(error))
    except _CommandError as error:
        context = getattr(error, "ctx", None)
        hint = f' Try "{context.command_path} --help".' if context is not None else ""
        return _say(f"{error.format_message()}{hint}")
    except typer.Abort:
        return _say("stopped.", 130)
    except BrokenPipeError:  # the reader of a pipe left early
        sys.stderr.close()
        return 0
    return result if isinstance(result, int) else 0


def _say(sentence: str, code: int = 2) -> int:
    print(f"fleetfit: {' '.join(sentence.split())}", file=sys.stderr)
    return code


__all__ = ["app", "main"]
