"""Arguments and options that several verbs share."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetfit import files
from fleetfit.errors import ConfigError, FleetFitError


def forward_config_errors(parser: Callable[[str], Path], name: str) -> Callable[[str], Path]:
    """Return a parser of an argument whose errors reach `main` as they are.

    A `ConfigError` is a `ValueError`, and typer would replace its message. `--help` shows `name` as its type.
    """

    @functools.wraps(parser)
    def parse(text: str) -> Path:
        try:
            return parser(text)
        except ConfigError as error:
            raise FleetFitError(str(error), key=error.key, path=error.path) from None

    parse.__name__ = name
    return parse


def _parse_run_file(text: str) -> Path:
    """Parse the path of a run file. A folder passes: the error of reading it says what takes it."""
    path = files.parse_path(text, "a run file's path")
    return path if path.is_dir() else files.parse_input_file(path)


parse_run_file = forward_config_errors(_parse_run_file, "file")
parse_folder = forward_config_errors(files.parse_folder, "folder")
parse_input_file = forward_config_errors(files.parse_input_file, "file")
parse_output_file = forward_config_errors(files.parse_output_file, "file")


def path_option(parser: Callable[[str], Path], help: str, *names: str) -> Any:
    """Return an option with a path. By default it has the parameter's name."""
    return typer.Option(*names, help=help, parser=parser, metavar=parser.__name__.upper())


def path_argument(parser: Callable[[str], Path], help: str, metavar: str = "") -> Any:
    """Return an argument with a path."""
    return typer.Argument(help=help, parser=parser, metavar=metavar or parser.__name__.upper())


RunFile = Annotated[
    Path | None, path_argument(parse_run_file, "Run file (TOML). Default: FleetFit on handwritten digits.", "[FILE]")
]
Folder = Annotated[Path, path_argument(parse_folder, "Run folder.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the run file, such as local.lr=0.03. Repeatable."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Continue with another value, such as rounds=20. Repeatable."),
]
Out = Annotated[Path | None, path_option(parse_folder, "Output folder; it must be new or empty.", "--out")]
NewOrStopped = Annotated[
    Path | None, path_option(parse_folder, "Output folder: new, empty, or the one to continue.", "--out")
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", min=1, help="Number of runs at a time, each in its own process. Results are the same bits."
    ),
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast",
        help=(
            "Use the fastest precision and memory format of this machine (engine.speed=fast); bits differ between "
            "machines."
        ),
    ),
]
OtherData = Annotated[
    str | None,
    typer.Option("--data", help="Use other data: a data set's name, a file or a folder. Images are resized."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder and errors.")]


def add_speed(overrides: Sequence[str] | None, fast: bool) -> list[str]:
    """Return the overrides, with `engine.speed=fast` if `--fast` is set."""
    return [*(overrides or ()), *(["engine.speed=fast"] if fast else [])]
