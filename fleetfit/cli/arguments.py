"""Arguments and options that several verbs have, each with its one help text."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleetfit import files
from fleetfit.errors import ConfigError, FleetFitError


def forward_config_errors(parser: Callable[[str], Path]) -> Callable[[str], Path]:
    """Return a parser of an argument whose errors reach `main` as they are.

    A `ConfigError` is a `ValueError`, and typer would replace its message.
    """

    @functools.wraps(parser)
    def parse(text: str) -> Path:
        try:
            return parser(text)
        except ConfigError as error:
            raise FleetFitError(str(error), key=error.key, path=error.path) from None

    return parse


parse_folder = forward_config_errors(files.parse_folder)
parse_input_file = forward_config_errors(files.parse_input_file)
parse_output_file = forward_config_errors(files.parse_output_file)

RunFile = Annotated[
    Path | None,
    typer.Argument(
        help="Run file (TOML). Without one, ScaleFL on handwritten digits.",
        parser=parse_input_file,
        metavar="[FILE]",
    ),
]
Folder = Annotated[Path, typer.Argument(help="Run folder.", parser=parse_folder, metavar="FOLDER")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the run file, such as local.lr=0.03. Repeatable."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Folder to write; it must be new or empty.",
        parser=parse_folder,
        metavar="FOLDER",
    ),
]
NewOrStopped = Annotated[
    Path | None,
    typer.Option("--out", help="Folder to write, or to continue.", parser=parse_folder, metavar="FOLDER"),
]
Jobs = Annotated[
    int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, each in a process with one thread; same bits.")
]
Fast = Annotated[
    bool,
    typer.Option(
        "--fast", help="Compute as is fastest on this machine, not with every machine's bits: engine.speed=fast."
    ),
]
OtherData = Annotated[str | None, typer.Option("--data", help="Another data set of the same shape and classes.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


def add_speed(overrides: Sequence[str] | None, fast: bool) -> list[str]:
    """Return the overrides and that of --fast."""
    return [*(overrides or ()), *(["engine.speed=fast"] if fast else [])]
