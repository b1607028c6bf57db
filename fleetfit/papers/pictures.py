"""What a run's pictures show, gathered: who leaves where, what stopping early costs, what each level reaches."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetfit import inference
from fleetfit.api import Run
from fleetfit.api.inference import (
    calibration_file,
    compute_exit_costs,
    compute_scores,
    find_budget_cost,
    find_level,
    load_calibration,
    load_model,
    parse_budget,
    select_data,
)
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.errors import ConfigError, FleetFitError, MissingExtra, ModelError, RunError
from fleetfit.inference import Measure, Outcome, Scores
from fleetfit.layout import outputs, some_input
from fleetfit.papers.exits import chosen_classes, class_names, exits_of_class, no_images
from fleetfit.report import drawing
from fleetfit.report.plots import figures_of_run
from fleetfit.report.stopping import LevelCost, accuracy_by_level, accuracy_over_budget, amount
from fleetfit.values import DataDescription

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUDGET = 0.75
"""The budget where none is given and none was calibrated for, as a share of what the last exit costs."""


@dataclass(frozen=True)
class PictureOptions:
    """Which pictures are wanted.

    Attributes:
        level: 1..L, or its name; the largest by default.
        budget: Average cost of a sample, as in `Run.calibrate`; None: that of the saved calibration, else `BUDGET`.
        cost: "multiply_adds" or "latency_s"; None: as the budget's unit says, else multiply-adds.
        measure: Confidence: "max", "entropy" or "margin"; None: the saved calibration's, else "max".
        temperature: Whether each exit's temperature is fitted.
        classes: Whose samples are drawn, by name; by default those of the paper, or the first five.
        share: How many samples of a class are drawn; by default a tenth, or as many as make 50.
        data: Other data of the same shape whose samples are drawn; needed where the run is a fleet's.
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
class Drawn:
    """Figures by the names of their files, and what the user should know about them."""

    figures: dict[str, "Figure"] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def pictures(run: Run, asked: PictureOptions) -> Drawn:
    """Draw what can be drawn of a run; a note says what cannot, and why. Nothing is written.

    Args:
        run: With a checkpoint, or finished.
        asked: Which pictures.

    Raises:
        ConfigError: There is no such level, class, cost or measure, the budget does not reach the first exit, or the
            share is none.
        MissingExtra: matplotlib is not installed.
    """
    if not drawing.available():  # known before anything is computed
        raise MissingExtra("plots", "Drawing plots")
    drawn = Drawn()
    if run.finished:
        drawn.figures.update(figures_of_run(run.folder, run.summary, run.metrics))
        if not run.files.checkpoints():
            drawn.notes.append("No pictures of early stopping and of accuracy over cost: there is no checkpoint.")
            return drawn
    else:
        drawn.notes.append("No plots of its rounds and levels: the run is not finished.")
    level = find_level(run, asked.level).name
    reason = _no_stopping(run, level, asked)
    if reason:
        drawn.notes.append(f"No picture of early stopping: {reason}.")
    else:
        _stopping(run, level, asked, drawn)
    _levels(run, drawn)
    return drawn


# ---- early stopping --------------------------------------------------------------------------------------------------


def _no_stopping(run: Run, level: str, asked: PictureOptions) -> str:
    """Return why early stopping cannot be drawn, or ""."""
    if asked.data is None and isinstance(run.assembly.data, DataDescription):
        return "the samples of a fleet's run are on its nodes; name some that are here (--data NAME)"
    data = select_data(run, None, asked.data)
    if data.task != "classification":
        return f"it needs one class for each sample, and the task of {data.name} is {data.task}"
    lacking = [split for split in ("validation", "test") if not len(data.split(split))]
    if lacking:
        return f"{data.name} has no {lacking[0]} samples"
    if len(find_level(run, level).submodel.exits) < 2:
        return f"level {level} has one exit, so nobody can leave before it"
    return ""


def _stopping(run: Run, level: str, asked: PictureOptions, drawn: Drawn) -> None:
    """Draw the curve over budgets and the samples of each class by exit."""
    data = select_data(run, None, asked.data)
    labels = chosen_classes(data, asked.classes)
    test = compute_scores(run, level, "test", None, data)
    numbers, came = _calibrated(run, level, asked, test, drawn.notes)
    share = numbers["budget"] / numbers["costs"][-1]
    budget = f"{amount(numbers['budget'], numbers['cost'])} ({100 * share:.0f}% of the last exit's)"
    title = f"{data.name}, level {level}"
    drawn.figures["stopping"] = accuracy_over_budget(numbers, f"{title}: accuracy with early stopping")
    reason = no_images(data)
    if reason:
        drawn.notes.append(f"No pictures of samples by exit: {reason}.")
        return
    there = set(test.labels.tolist())
    lacking = [class_names(data)[label] for label in labels if label not in there]
    if lacking and not asked.classes:
        drawn.notes.append(f"No test samples, so no pictures: class {', '.join(lacking)}.")
        labels = [label for label in labels if label in there]
    for label in labels:
        figure = exits_of_class(data, test, came.exits, label, asked.share, f"{title}, average budget {budget}")
        drawn.figures[_file(class_names(data), label)] = figure


def _calibrated(
    run: Run, level: str, asked: PictureOptions, test: Scores, notes: list[str]
) -> tuple[dict[str, Any], Outcome]:
    """Return a calibration's numbers, the saved one's if nothing else is asked for, and who leaves where.

    Raises:
        ConfigError: The saved one is of another state of the model, or the budget does not reach the first exit.
        RunError: The saved one cannot be read.
    """
    anew = asked.temperature or any(given is not None for given in (asked.budget, asked.cost, asked.measure))
    saved = None if anew else load_calibration(run, level)
    if saved is not None:
        policy, numbers = inference.read_policy(saved), dict(saved)
        _check_saved(numbers, test, run.folder / calibration_file(level))
        notes.append(f"Budget and thresholds are those of {run.folder / calibration_file(level)}.")
        return numbers, inference.outcome(test, policy, numbers["costs"])
    data = select_data(run, None, asked.data)
    validation = compute_scores(run, level, "validation", None, data)
    cost = asked.cost or find_budget_cost(asked.budget)
    costs = compute_exit_costs(run, level, cost, data)
    budget = parse_budget(BUDGET if asked.budget is None else asked.budget, cost, costs)
    found = inference.calibrate(
        level, validation, test, costs, budget, cost, measure=asked.measure or "max", temperature=asked.temperature
    )
    return found.numbers(), found.test


def _check_saved(numbers: dict[str, Any], test: Scores, path: Path) -> None:
    """Refuse a calibration that lacks something, or is of another state of the model or another data set."""
    lacking = [key for key in ("level", "cost", "costs", "budget", "accuracies", "curve", "test") if key not in numbers]
    if lacking:
        raise RunError(f"{path} has no {lacking[0]}. Calibrate again.", path=path)
    then, now = numbers["accuracies"], test.accuracies
    moved = 2 / len(test.labels) + 1e-9  # another machine may round a sample or two to another class
    if len(then) != len(now) or any(abs(a - b) > moved for a, b in zip(then, now, strict=True)):
        raise ConfigError(f"{path} is of another state of this model. Calibrate again, or give a budget.", path=path)


def _file(names: Sequence[str], label: int) -> str:
    """Return the name of a class's picture; the class's number joins where the name alone will not do."""
    endings = [re.sub(r"[^\w.]+", "-", name).strip("-.").lower() for name in names]
    own = endings[label]
    alone = own and endings.count(own) == 1
    return f"exits-{own}" if alone else f"exits-{own}-{label}".replace("--", "-")


# ---- levels ----------------------------------------------------------------------------------------------------------


def _levels(run: Run, drawn: Drawn) -> None:
    """Draw accuracies of the levels over what they cost."""
    found, without = [], []
    try:
        columns = run.columns[run.experiment.evaluate.norms[0]]
        for level in run.assembly.federation.levels:
            entry = columns["levels"].get(level.name, {})
            accuracies = entry.get("exits") or [entry.get("local")]
            if None in accuracies:
                without.append(level.name)
            else:
                found.append(level_cost(run, level.name, accuracies))
    except FleetFitError as error:
        drawn.notes.append(f"No picture of accuracy over cost: {str(error).rstrip('.')}.")
        return
    if without:
        drawn.notes.append(f"Without clients, so not in the picture of accuracy over cost: level {', '.join(without)}.")
    if found:
        title = f"{run.experiment.method.name} on {run.assembly.data.name}: levels, and their exits as small markers"
        measure = run.assembly.federation.problem.task.score
        drawn.figures["accuracy-cost"] = accuracy_by_level(found, title, measure)


def level_cost(run: Run, level: str, accuracies: Sequence[float]) -> LevelCost:
    """Return what the exits of a level reach and cost; the time is measured now, one sample, one thread.

    Args:
        run: Whose level.
        level: Its name.
        accuracies: Of its exits [E], or of its last exit alone.

    Raises:
        FleetFitError: The level's model cannot be made.
    """
    problem, piece = run.assembly.federation.problem, find_level(run, level).submodel
    architecture, shape, module = problem.architecture, problem.input_shape, load_model(run, level)
    sizes, count = {**problem.layout.full_sizes, **piece.sizes}, len(piece.exits)
    parameters = [
        float(submodel_cost(architecture, (sizes, piece.exits[: i + 1]), shape).parameters) for i in range(count)
    ]
    x = some_input(architecture, shape, 1, torch.Generator().manual_seed(0))
    try:
        seconds = inference.exit_latencies(module, x)
    except ModelError:  # it cannot be run segment by segment
        seconds = [*[math.nan] * (count - 1), *inference.exit_latencies(_Whole(module), x)]
    last = count - len(accuracies)
    return LevelCost(level, tuple(accuracies), tuple(parameters[last:]), tuple(seconds[last:]))


class _Whole(nn.Module):
    """A module as one segment with one exit, whose time is that of the whole."""

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
