"""The command line that these figures share: a run folder, where to write, and in which format."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfit.errors import FleetFitError
from fleetfit.report.drawing import make_plots_folder, save_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def run_script(
    parser: argparse.ArgumentParser,
    draw: "Callable[[argparse.Namespace], tuple[Mapping[str, Figure], Sequence[str]]]",
    arguments: Sequence[str] | None = None,
) -> int:
    """Draw the figures of the run that the arguments name; return the exit code.

    Args:
        parser: Its further arguments.
        draw: Returns the figures by file name, and notes on them.
        arguments: Those of the command line by default.
    """
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, help="output folder; default: RUN/plots")
    parser.add_argument("--format", choices=("png", "pdf", "svg"), default="png", help="image format")
    options = parser.parse_args(arguments)
    try:
        figures, notes = draw(options)
        folder = make_plots_folder(options.folder) if options.out is None else options.out
        paths = save_figures(figures, folder, options.format)
    except FleetFitError as error:
        print(error, file=sys.stderr)
        return 2
    for note in notes:
        print(f"Note: {note}")
    for path in paths:
        print(f"Drawn: {path}")
    return 0
