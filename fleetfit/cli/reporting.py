"""`fleetfit report`: the page of run folders, written again."""

from pathlib import Path
from typing import Annotated

import typer

from fleetfit.cli.arguments import parse_folder, parse_output_file


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders of comparisons; several go on one page.",
            parser=parse_folder,
            metavar="RUN...",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The file; report.html in the folder by default, of several folders in the working folder.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Write the page of a run or a comparison again, or one page of several folders; nothing is trained.

    The page is one file of HTML that opens from disk and loads nothing. It also works for a run that is not finished.
    """
    from fleetfit.api import write_report
    from fleetfit.cli import output

    output.print_line(f"Page: {write_report(*folders, out=out)}")
