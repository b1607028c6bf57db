"""Arguments and options that several verbs have, each with its one help text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fleetfit import paths
from fleetfit.cli.streams import said

RunFile = Annotated[
    Path | None,
    typer.Argument(
        help="Run file (TOML). Without one, ScaleFL on handwritten digits.",
        parser=said(paths.file_to_read),
        metavar="[FILE]",
    ),
]
Folder = Annotated[Path, typer.Argument(help="Run folder.", parser=said(paths.folder), metavar="FOLDER")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the run file, such as local.lr=0.03. Repeatable."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder to write; it must be new or empty.", parser=said(paths.folder), metavar="FOLDER"
    ),
]
GoesOn = Annotated[
    Path | None,
    typer.Option("--out", help="Folder to write, or to go on with.", parser=said(paths.folder), metavar="FOLDER"),
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
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]


def with_speed(overrides: Sequence[str] | None, fast: bool) -> list[str]:
    """Return the overrides, with what --fast stands for."""
    return [*(overrides or ()), *(["engine.speed=fast"] if fast else [])]
