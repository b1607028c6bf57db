"""Pictures that are drawn when they are asked for."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from fleetfit.api import load
from fleetfit.cli.predicting import named_data, own_data
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.files import expand_path
from fleetfit.inference import Measure
from fleetfit.papers.attention import attention_of_samples
from fleetfit.papers.pictures import PictureOptions
from fleetfit.papers.pictures import pictures as drawn_of
from fleetfit.report.drawing import draw, plots_in, saved

FORMATS = ("png", "pdf", "svg")


def attention(folder: Path, samples: int, out: Path | None, other: str | None = None) -> Path:
    """Draw the attention maps of a run's model on test images, and return the file.

    Args:
        folder: The run folder.
        samples: How many images.
        out: The file, or None for `plots/attention.png` in the run folder.
        other: Another data set whose images are drawn; needed where the run is a fleet's.

    Raises:
        ConfigError: The file cannot be written, or there are not so many test images.
        FleetFitError: It is no run folder, its model has no attention maps, or matplotlib is not installed.
    """
    found = load(folder)
    path = found.folder / "plots" / "attention.png" if out is None else expand_path(out)
    if path.suffix.removeprefix(".") not in FORMATS:
        raise ConfigError(f"--out must end in .png, .pdf or .svg, got {path}.")
    data = own_data(found, other, None)
    figure = attention_of_samples(found.model(), data, samples, f"{data.name}, after round {found.server.round}")
    if out is None:
        return saved({path.stem: figure}, plots_in(found.folder))[0]
    try:
        draw(figure, Path(os.path.realpath(path)))  # a link that somebody names is theirs to follow
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror}.") from None
    return path


def pictures(
    folder: Path, asked: PictureOptions, out: Path | None, ending: str, data: str | None = None
) -> tuple[list[Path], list[str]]:
    """Draw a run's levels and early stopping, and return the files and what the user should know.

    Args:
        folder: The run folder.
        asked: Which pictures.
        out: The folder that gets them, or None for `plots` in the run folder.
        ending: "png", "pdf" or "svg".
        data: Other data of the same shape, a data set or a path; None: the run's.

    Raises:
        ConfigError: The files cannot be written, or what is asked for is not there.
        FleetFitError: It is no run folder, or matplotlib is not installed.
    """
    if ending not in FORMATS:
        raise ConfigError(f"--format must be {', '.join(FORMATS)}, got {ending}.{did_you_mean(ending, FORMATS)}")
    found = load(folder)
    drawn = drawn_of(found, replace(asked, data=named_data(found, data, halves=True)))
    place = plots_in(found.folder) if out is None else expand_path(out)
    return saved(drawn.figures, place, ending), drawn.notes


def asked(
    level: str | None, budget: str | None, cost: str | None, measure: str | None, temperature: bool,
    classes: Sequence[str] | None, share: float | None,
) -> PictureOptions:  # fmt: skip
    """Return the options of `fleetfit pictures` as values: a level's number or name, a number or text with a unit."""
    limit: float | str | None = budget
    with contextlib.suppress(ValueError):
        limit = None if budget is None else float(budget)
    return PictureOptions(
        level,
        limit,
        cost,
        cast(Measure | None, measure),
        temperature,
        tuple(classes or ()),
        share,
    )
