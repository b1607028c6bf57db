"""Early stopping of a run's newest checkpoint, and its levels (ScaleFL, CVPR 2023, Figures 3 and 5 to 9).

    .venv/bin/python -m experiments.figures.early_exits RUN --budget 0.6 --class 8

Draws samples by the exit where they stop, accuracy over budgets, and accuracy of levels over cost into RUN/plots.
"""

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.figures.costs import LevelCost, draw_accuracy_by_level, draw_accuracy_over_budget, format_cost
from experiments.figures.samples_by_exit import draw_exits, explain_no_images, get_class_names, select_classes
from experiments.figures.script import run_script
from fleetfit import inference
from fleetfit.anatomy import make_input, outputs
from fleetfit.api.inference import (
    calibration_file,
    compute_exit_costs,
    compute_scores,
    find_budget_cost,
    find_level,
    load_calibration,
    load_model,
    load_samples,
    parse_budget,
    select_data,
)
from fleetfit.api.results import Run, load
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.errors import ConfigError, FleetFitError, MissingExtra, ModelError, RunError
from fleetfit.inference import Measure, Outcome, Scores
from fleetfit.report import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 0.75
"""Default budget without a saved calibration, as a fraction of the last exit's cost."""


@dataclass(frozen=True)
class PictureOptions:
    """The options of the script.

    Attributes:
        level: 1..L, or its name; the largest by default.
        budget: Average cost of a sample, as in `Run.calibrate`; None: that of the saved calibration, else `BUDGET`.
        cost: "multiply_adds" or "latency_s"; None: by the budget's unit, else multiply-adds.
        measure: Confidence: "max", "entropy" or "margin"; None: the saved calibration's, else "max".
        temperature: Whether each exit's temperature is fitted.
        classes: Names of the classes whose samples are drawn; by default the paper's, or the first five.
        share: Fraction of a class's samples to draw; by default 0.1, at least 50 samples.
        data: Other data of the same shape to draw; a fleet's run needs them.
    """

    level: int | str | None = None
    budget: float | str | None = None
    cost: str | None = None
    measure: Measure | None = None
    temperature: bool = False
    classes: tuple[str, ...] = ()
    share: float | None = None
    data: Data | None = None


@dataclass(frozen=True, eq=False)
class Pictures:
    """Figures by file name, and notes on them."""

    figures: dict[str, "Figure"] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def draw_pictures(run: Run, options: PictureOptions) -> Pictures:
    """Draw the figures that a run has data for. Notes list the others with the reason. Writes no files.

    Args:
        run: A run with a checkpoint, or a finished one.
        options: The options.

    Raises:
        ConfigError: A level, class, cost or measure is unknown, the budget does not reach the first exit, or the share
            is not above 0.
        MissingExtra: matplotlib is not installed.
    """
    if not drawing.is_available():  # before the first computation
        raise MissingExtra("plots", "Drawing plots")
    result = Pictures()
    level = find_level(run, options.level).name
    reason = _find_obstacle(run, level, options)
    if reason:
        result.notes.append(f"No figure of early stopping: {reason}.")
    else:
        _draw_stopping(run, level, options, result)
    _draw_levels(run, result)
    return result


# ---- early stopping --------------------------------------------------------------------------------------------------


def _find_obstacle(run: Run, level: str, options: PictureOptions) -> str:
    """Return why early stopping cannot be drawn, or ""."""
    if options.data is None and run.assembly.simulation is None:
        return "the samples of this run are not on this machine. Name data (--data NAME)"
    data = select_data(run, None, options.data)
    if data.task != "classification":
        return f"it needs one class per sample, but the task of {data.name} is {data.task}"
    lacking = [split for split in ("validation", "test") if not len(data.split(split))]
    if lacking:
        return f"{data.name} has no {lacking[0]} samples"
    if len(find_level(run, level).submodel.exits) < 2:
        return f"level {level} has only one exit"
    return ""


def _draw_stopping(run: Run, level: str, options: PictureOptions, result: Pictures) -> None:
    """Draw the curve over budgets and the samples of each class by exit."""
    data = select_data(run, None, options.data)
    labels = select_classes(data, options.classes)
    test = compute_scores(run, level, "test", None, data)
    numbers, outcome = _load_or_calibrate(run, level, options, test, result.notes)
    share = numbers["budget"] / numbers["costs"][-1]
    budget = f"{format_cost(numbers['budget'], numbers['cost'])} ({100 * share:.0f}% of the last exit's)"
    title = f"{data.name}, level {level}"
    result.figures["stopping"] = draw_accuracy_over_budget(numbers, f"{title}: accuracy with early stopping")
    reason = explain_no_images(data)
    if reason:
        result.notes.append(f"No figures of samples by exit: {reason}.")
        return
    present = set(test.labels.tolist())
    lacking = [get_class_names(data)[label] for label in labels if label not in present]
    if lacking and not options.classes:
        result.notes.append(f"No figures without test samples: class {', '.join(lacking)}.")
        labels = [label for label in labels if label in present]
    for label in labels:
        figure = draw_exits(data, test, outcome.exits, label, options.share, f"{title}, average budget {budget}")
        result.figures[_format_name(get_class_names(data), label)] = figure


def _load_or_calibrate(
    run: Run, level: str, options: PictureOptions, test: Scores, notes: list[str]
) -> tuple[dict[str, Any], Outcome]:
    """Return the numbers of a calibration (the saved one if no options are set), and the exits of test samples.

    Raises:
        ConfigError: The saved calibration is of another state of the model, or the budget does not reach the first
            exit.
        RunError: The saved calibration cannot be read.
    """
    is_new = options.temperature or any(
        option is not None for option in (options.budget, options.cost, options.measure)
    )
    saved = None if is_new else load_calibration(run, level)
    if saved is not None:
        policy, numbers = inference.read_policy(saved), dict(saved)
        _check_calibration(numbers, test, run.folder / calibration_file(level))
        notes.append(f"Budget and thresholds are those of {run.folder / calibration_file(level)}.")
        return numbers, inference.apply_policy(test, policy, numbers["costs"])
    data = select_data(run, None, options.data)
    validation = compute_scores(run, level, "validation", None, data)
    cost = options.cost or find_budget_cost(options.budget)
    costs = compute_exit_costs(run, level, cost, data)
    budget = parse_budget(BUDGET if options.budget is None else options.budget, cost, costs)
    calibration = inference.calibrate(
        level, validation, test, costs, budget, cost, measure=options.measure or "max", temperature=options.temperature
    )
    return calibration.numbers(), calibration.test


def _check_calibration(numbers: dict[str, Any], test: Scores, path: Path) -> None:
    """Refuse a calibration that is incomplete, or of another state of the model or another data set."""
    lacking = [key for key in ("level", "cost", "costs", "budget", "accuracies", "curve", "test") if key not in numbers]
    if lacking:
        raise RunError(f"{path} has no {lacking[0]}. Calibrate again.", path=path)
    saved, now = numbers["accuracies"], test.accuracies
    tolerance = 2 / len(test.labels) + 1e-9  # another machine may round one or two samples to another class
    if len(saved) != len(now) or any(abs(a - b) > tolerance for a, b in zip(saved, now, strict=True)):
        raise ConfigError(f"{path} is of another state of this model. Calibrate again, or set a budget.", path=path)


def _format_name(names: Sequence[str], label: int) -> str:
    """Return the file name of a class's figure, with the class's number if its name is empty or not unique."""
    endings = [re.sub(r"[^\w.]+", "-", name).strip("-.").lower() for name in names]
    ending = endings[label]
    is_unique = ending and endings.count(ending) == 1
    return f"exits-{ending}" if is_unique else f"exits-{ending}-{label}".replace("--", "-")


# ---- levels ----------------------------------------------------------------------------------------------------------


def _draw_levels(run: Run, result: Pictures) -> None:
    """Draw the accuracies of the levels over their cost."""
    costs, empty = [], []
    try:
        columns = run.columns[run.experiment.evaluate.batch_norm[0]]
        for level in run.assembly.federation.levels:
            entry = columns["levels"].get(level.name, {})
            accuracies = entry.get("exits") or [entry.get("local")]
            if None in accuracies:
                empty.append(level.name)
            else:
                costs.append(measure_level(run, level.name, accuracies))
    except FleetFitError as error:
        result.notes.append(f"No figure of accuracy over cost: {str(error).rstrip('.')}.")
        return
    if empty:
        result.notes.append(
            f"Levels without clients are left out of the figure of accuracy over cost: level {', '.join(empty)}."
        )
    if costs:
        title = f"{run.experiment.method.name} on {run.assembly.data.name}: levels, and their exits as small markers"
        measure = run.assembly.federation.problem.task.score
        result.figures["accuracy-cost"] = draw_accuracy_by_level(costs, title, measure)


def measure_level(run: Run, level: str, accuracies: Sequence[float]) -> LevelCost:
    """Return accuracies and costs of a level's exits. It measures the time with one sample and one thread.

    Args:
        run: The run.
        level: The level's name.
        accuracies: Accuracies of the exits [E], or of the last exit only.

    Raises:
        FleetFitError: The level's model cannot be built.
    """
    problem, submodel = run.assembly.federation.problem, find_level(run, level).submodel
    architecture, shape, module = problem.architecture, problem.input_shape, load_model(run, level)
    sizes, count = {**problem.layout.full_sizes, **submodel.sizes}, len(submodel.exits)
    parameters = [
        float(submodel_cost(architecture, (sizes, submodel.exits[: i + 1]), shape).parameters) for i in range(count)
    ]
    x = make_input(architecture, shape, 1, torch.Generator().manual_seed(0))
    try:
        seconds = inference.measure_exit_latencies(module, x)
    except ModelError:  # the model cannot run segment by segment
        seconds = [*[math.nan] * (count - 1), *inference.measure_exit_latencies(_Whole(module), x)]
    last = count - len(accuracies)
    return LevelCost(level, tuple(accuracies), tuple(parameters[last:]), tuple(seconds[last:]))


class _Whole(nn.Module):
    """A module as one segment with one exit, to measure its total time."""

    exits = (1,)

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def start(self, x: Tensor) -> Tensor:
        """Return the samples."""
        return x

    def segment(self, i: int, carry: Tensor) -> Tensor:
        """Return the samples."""
        return carry

    def head(self, i: int, carry: Tensor) -> Tensor:
        """Return the last logits."""
        return outputs(self.module, carry)[-1]


# ---- the command line ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw early stopping of a run, and the accuracy of its levels over their cost; return the exit code."""
    parser = argparse.ArgumentParser(prog="early_exits", description=main.__doc__)
    parser.add_argument("--level", help="level (1 is the smallest) or its name; default: the largest")
    parser.add_argument(
        "--budget",
        help="average cost of a sample: a fraction of the last exit's cost, or absolute, such as 35 ms; default: "
        "that of the level's saved calibration, else 0.75",
    )
    parser.add_argument("--cost", help="multiply_adds or latency_s (on this machine); default: by the budget's unit")
    parser.add_argument("--measure", help="measure of confidence: max, entropy or margin")
    parser.add_argument("--temperature", action="store_true", help="scale each exit's logits by a fitted temperature")
    parser.add_argument("--class", dest="classes", action="append", default=[], help="class whose samples are drawn")
    parser.add_argument("--share", type=float, help="fraction of a class's samples; default: 0.1, at least 50 samples")
    parser.add_argument("--data", help="other data of the same shape")

    def draw(options: argparse.Namespace) -> tuple[dict[str, "Figure"], list[str]]:
        budget: float | str | None = options.budget
        with contextlib.suppress(TypeError, ValueError):
            budget = float(options.budget)
        run = load(options.folder)
        other = None if options.data is None else load_samples(run, options.data, halves=True)
        result = draw_pictures(
            run,
            PictureOptions(options.level, budget, options.cost, options.measure, options.temperature,
                           tuple(options.classes), options.share, other),
        )  # fmt: skip
        return result.figures, result.notes

    return run_script(parser, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
