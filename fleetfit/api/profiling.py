"""`profile`: what each level of a run costs on this device, and the budget that follows from it.

The device gets the largest level that was measured and keeps within every wish. Its budget says so:

- of the fleet's cost (parameters, say), B_k is what that level costs, as a fraction of the full model, rounded up in
  the sixth digit. A planner that has this level gives it: c_l <= (1 + epsilon_k) B_k. The file has the fleet's
  tolerance epsilon_k, or half the way to the next level where that would come in as well;
- `memory_bytes` is the memory M wished for, in bytes as the planner predicts them: M / (1 + epsilon_k) * p / max(m, p),
  where a step of the level takes m bytes and the planner takes it to need p. So levels of another plan keep within it;
- `latency_s`, only where asked for: the latency wished for, as a fraction of the full model's on this device, and at
  least the level's own. A fraction, since the planner measures latency on its own machine. The full model's, which has
  no early classifiers, is that of the largest level measured times the ratio of their multiply-adds.

Steps and energy have no cost of the planner: they count in the choice of the level only.
"""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fleetfit.api.run import check_single_run
from fleetfit.config import Experiment, load_experiment
from fleetfit.config.build.levels import LevelPlan, plan_levels
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.errors import ConfigError, FleetFitError, PlanError, escape_controls
from fleetfit.files import write_text
from fleetfit.planner import Amount, absolute, assign, budgets_by_cost
from fleetfit.report.text import Table, size
from fleetfit.tensor_defaults import own_mode
from fleetfit.training import accelerator_named
from fleetfit.training.profiling import (
    Energy,
    Found,
    ProfileRequest,
    Timing,
    energy_of,
    free_memory,
    measured,
)
from fleetfit.values import DataDescription, Level

# ---- from what levels cost on a device, and what its owner wishes, to the budget B_k that a planner understands ----

_UNITS = {"memory_bytes": (1e6, "MB"), "size_bytes": (1e6, "MB"), "latency_s": (1.0, "s")}


@dataclass(frozen=True)
class Wishes:
    """What the owner of a device admits; None: no wish.

    Attributes:
        step_s: Seconds of a training step.
        latency_s: Seconds of inference of one sample.
        memory_bytes: Bytes of a training step.
        energy_j: Joules of a training step.
    """

    step_s: float | None = None
    latency_s: float | None = None
    memory_bytes: float | None = None
    energy_j: float | None = None

    def __str__(self) -> str:
        """Say them in words."""
        said = {
            "a training step of at most {} s": self.step_s,
            "inference of at most {} s": self.latency_s,
            "a step with at most {} J": self.energy_j,
        }
        words = [text.format(f"{value:g}") for text, value in said.items() if value is not None]
        if self.memory_bytes is not None:
            words.append(f"a step with at most {size(self.memory_bytes)}")
        return ", ".join(words) or "no limit"


@dataclass(frozen=True)
class ProfiledLevel:
    """A level on this device.

    Attributes:
        name: "1" for the smallest.
        share: What it costs in the fleet's cost, as a fraction of the full model.
        predicted_bytes: Memory of a training step as predicted, with all exits that it trains; the planner counts the
            full model without its early ones.
        found: What was measured.
        against: Why the device cannot have it; empty where it keeps within all wishes.
    """

    name: str
    share: float
    predicted_bytes: float
    found: Found
    against: tuple[str, ...] = ()


@dataclass(frozen=True)
class Affordable:
    """What a device affords.

    Attributes:
        level: Place of the level that it affords, 0 for the smallest.
        budget: By cost, as in a budget file.
        tolerance: epsilon_k.
        notes: What its owner should know.
    """

    level: int
    budget: Mapping[str, Amount]
    tolerance: float
    notes: tuple[str, ...] = field(default=())


def against(found: Found, predicted_bytes: float, wishes: Wishes) -> tuple[str, ...]:
    """Return every reason why a device cannot have a level."""
    if found.failed:
        return (found.failed,)
    memory = predicted_bytes if found.memory_bytes is None else found.memory_bytes
    asked = [
        ("a step takes {:.3g} s", None if found.step is None else found.step.median_s, wishes.step_s),
        ("inference takes {:.3g} s", None if found.latency is None else found.latency.median_s, wishes.latency_s),
        ("a step takes {:.3g} J", found.energy_j, wishes.energy_j),
        ("a step takes {:.4g} MB", memory / 1e6, None if wishes.memory_bytes is None else wishes.memory_bytes / 1e6),
    ]
    reasons = []
    for words, value, wish in asked:
        if wish is not None and value is None:
            reasons.append(f"{words.split(' takes')[0]} was not measured")
        elif wish is not None and value is not None and value > wish:
            reasons.append(f"{words.format(value)}, over {wish:.4g}")
    return tuple(reasons)


def affordable(before: LevelPlan, levels: Sequence[ProfiledLevel], wishes: Wishes) -> Affordable:
    """Return the budget of the largest level that keeps within the wishes; the module's docstring derives it.

    Args:
        before: The levels as planned.
        levels: The same as measured, as many.
        wishes: The owner's.

    Raises:
        PlanError: None does, or no budget says so.
    """
    fitting = [i for i, level in enumerate(levels) if not level.against]
    if not fitting:
        smallest = levels[0]
        raise PlanError(
            f"this device affords no level: level {smallest.name}, the smallest, does not fit, since "
            f"{'; '.join(smallest.against)}. Admit more ({wishes}), or plan a smaller level."
        )
    for chosen in reversed(fitting):
        found = _derived(before, levels, chosen, wishes)
        if _given(before, found) == chosen:
            return found
    name = levels[fitting[-1]].name
    raise PlanError(
        f"this device affords level {name}, but no budget says so: the method {before.experiment.method.name} gives "
        "levels by other needs, so that a larger one would come. Choose another method, or leave the device out."
    )


def _derived(before: LevelPlan, levels: Sequence[ProfiledLevel], chosen: int, wishes: Wishes) -> Affordable:
    cost, level, planned = before.experiment.fleet.cost, levels[chosen], before.found.levels
    needs = planned[chosen].needs or level.share
    budget: dict[str, Amount] = {cost: _amount(cost, needs, before.cost(None, cost))}
    tolerance = _tolerance(before.experiment.fleet.tolerance, _ceiling(needs), [p.needs for p in planned[chosen + 1 :]])
    notes = []
    if wishes.memory_bytes is not None and cost != "memory_bytes":
        predicted = before.cost(planned[chosen], "memory_bytes")
        takes = max(level.predicted_bytes, level.found.memory_bytes or 0.0)
        budget["memory_bytes"] = _with_unit("memory_bytes", wishes.memory_bytes * predicted / takes / (1 + tolerance))
        if level.found.memory_bytes is None:
            notes.append("This platform does not tell the memory of a process: memory is as predicted.")
    if wishes.latency_s is not None and cost != "latency_s":
        assert level.found.latency is not None
        full, said = _full_latency(before, levels)
        notes += [said] if said else []
        share = max(wishes.latency_s / full / (1 + tolerance), level.found.latency.median_s / full)
        budget["latency_s"] = min(1.0, _ceiling(share))
    return Affordable(chosen, budget, tolerance, tuple(notes))


def _tolerance(wanted: float, budget: float, larger: Sequence[float]) -> float:
    """Return a tolerance under which none of the larger levels comes in, as far as one can."""
    gaps = [needs / budget - 1 for needs in larger if needs > budget]
    near = min(gaps, default=math.inf)
    return wanted if near > 1.01 * wanted else math.floor(near / 2 * 1e6) / 1e6


def _given(before: LevelPlan, found: Affordable) -> int:
    """Return the level that a planner gives to the budget, latencies aside: those it measures itself."""
    cost = before.experiment.fleet.cost
    named = {name: amount for name, amount in found.budget.items() if name != "latency_s" or cost == name}
    fractions = budgets_by_cost([named], cost, lambda name: before.cost(None, name))
    levels = before.found.levels
    further = [
        (fractions[name], [_needed(before, level, name) for level in levels]) for name in fractions if name != cost
    ]
    return int(assign(fractions[cost], found.tolerance, [level.needs for level in levels], further)[0])


def _needed(before: LevelPlan, level: Level, cost: str) -> float:
    if level.needs <= 0:
        return 0.0
    known = level.further.get(cost)
    return before.cost(level, cost) / before.cost(None, cost) if known is None else known


def _full_latency(before: LevelPlan, levels: Sequence[ProfiledLevel]) -> tuple[float, str]:
    """Return the full model's latency on this device, and a sentence if that is not measured."""
    index, last = [(i, level) for i, level in enumerate(levels) if level.found.latency is not None][-1]
    problem = before.found.problem
    whole = full_cost(problem.architecture, problem.input_shape).multiply_adds
    part = submodel_cost(problem.architecture, before.found.levels[index].submodel, problem.input_shape).multiply_adds
    said = f"The full model's latency is extrapolated from level {last.name} by multiply-adds."
    assert last.found.latency is not None
    return last.found.latency.median_s * whole / part, "" if index == len(levels) - 1 else said


# ---- amounts -------------------------------------------------------------------------------------------------------


def _ceiling(value: float, digits: int = 6) -> float:
    """Round up in a digit after the point: what is afforded must cover what it was taken from."""
    return math.ceil(round(value * 10**digits, 3)) / 10**digits


def _amount(cost: str, fraction: float, full: float) -> Amount:
    """Return a fraction of a cost as a budget; what is above the full model, with a unit or as a number above 1."""
    if fraction <= 1:
        return _ceiling(fraction)
    return _with_unit(cost, fraction * full) if cost in _UNITS else float(math.ceil(fraction * full))


def _with_unit(cost: str, value: float) -> str:
    unit, name = _UNITS[cost]
    return f"{_ceiling(value / unit, 3 if value >= unit else 6):.12g} {name}"


# ---- measuring -----------------------------------------------------------------------------------------------------

Say = Callable[[str], None]
_SHARE = 0.5  # of the memory that is free now, where nobody says how much a step may take
_LEAST_S = 1.0  # a level is not tried with less time
_SLOW = 1e-6  # learning rate: what is trained does not matter, and must not diverge


@dataclass(frozen=True)
class Machine:
    """Where and how to measure.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads that a job computes with, as in a node's configuration.
        limit_s: Seconds for everything.
    """

    device: str = "cpu"
    threads: int = 1
    limit_s: float = 60.0


@dataclass(frozen=True)
class Profiled:
    """What was measured on a device, and what it affords.

    Attributes:
        levels: What each level costs here, smallest first.
        affords: The level that it affords, and its budget.
        wishes: Within which that is.
        energy: What energy was measured of, or why it was not.
        heading: Machine, date and run, line by line.
    """

    levels: tuple[ProfiledLevel, ...]
    affords: Affordable
    wishes: Wishes
    energy: str
    heading: tuple[str, ...]

    @property
    def table(self) -> Table:
        """The levels as a table."""
        columns = ("level", "share", "training step", "inference", "step's memory (predicted)", "whole process",
                   "step's energy", "")  # fmt: skip
        return Table(columns, tuple(_row(level, i == self.affords.level) for i, level in enumerate(self.levels)))

    def to_toml(self) -> str:
        """Return the budget file: what was measured as comments, `budget` and `tolerance`."""
        table = self.table
        lines = [*self.heading, f"energy: {self.energy}", "", *_aligned([table.columns, *table.rows]), ""]
        lines += [f"level {self.levels[self.affords.level].name} is the largest within: {self.wishes}"]
        if "memory_bytes" in self.affords.budget:
            lines.append("memory_bytes is in bytes as the planner predicts them, less the tolerance")
        lines += [*self.affords.notes]
        comment = "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines)
        values = ", ".join(tomli_w.dumps({key: value}).strip() for key, value in self.affords.budget.items())
        return f"{escape_controls(comment)}\nbudget = {{ {values} }}\ntolerance = {self.affords.tolerance}\n"


@own_mode()
def profile(
    source: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    wishes: Wishes | None = None,
    machine: Machine | None = None,
    facts: DataDescription | None = None,
    out: str | Path | None = None,
    force: bool = False,
    say: Say | None = None,
    overrides: Sequence[str] = (),
    **sections: Any,
) -> Profiled:
    """Measure what each level of a run costs on this device, and return, or write, what it affords.

    Every level is measured in a process of its own, smallest first: the peak memory of a training step, the time and
    the energy of steps (the method's loss and the optimiser of the run, on made-up samples), the inference of one
    sample. A level that fails, or has no time left, ends it: larger ones are not tried, and none of them is afforded.
    `fleetfit.api.profiling` says how the budget follows.

    Args:
        source: A run file, its tables, or an `Experiment`.
        wishes: What the owner admits; without a wish for memory, half of what is free now.
        machine: Where to measure, and how long.
        facts: What a model needs to know of the data; without them the run's data are loaded to find out.
        out: The budget file to write; None: nothing is written.
        force: Whether it may be there already.
        say: Gets a sentence before and after each level.
        overrides: `a.b=c`, as on the command line.
        **sections: Sections of a run file.

    Raises:
        PlanError: The device affords no level; nothing is written.
        FleetFitError: Something does not fit.
    """
    machine, wishes, say = machine or Machine(), wishes or Wishes(), say or _quiet
    path = None if out is None else _place(Path(out), force)
    until = time.monotonic() + machine.limit_s
    accelerator, energy = _checked(machine, wishes)
    experiment = load_experiment(source, overrides, **sections)
    check_single_run(experiment, "profile")
    before = plan_levels(experiment, facts, accelerator)
    free = free_memory(accelerator)
    if wishes.memory_bytes is None and free is not None:
        wishes = replace(wishes, memory_bytes=_SHARE * free)
    spec = before.found.problem.spec
    if spec is None:
        raise ConfigError(
            "a level is measured in a process of its own, which rebuilds the model, so it needs a model with an import "
            'path ("package.module:function" or "file.py:function").'
        )
    levels = _measured(before, spec, machine, wishes, free, until, say)
    found = Profiled(
        tuple(levels), affordable(before, levels, wishes), wishes, energy.source, _heading(before, machine)
    )
    if path is not None:
        _write(path, found.to_toml())
    return found


def wished(
    step_s: float | None = None,
    latency_s: float | None = None,
    memory: str | None = None,
    energy_j: float | None = None,
) -> Wishes:
    """Return wishes from what people write, such as "300 MB".

    Raises:
        ConfigError: One is no amount above 0.
    """
    try:
        memory_bytes = None if memory is None else absolute(memory, "memory_bytes")
    except FleetFitError as error:
        raise ConfigError(f"--memory: {error}") from None
    found = Wishes(step_s, latency_s, memory_bytes, energy_j)
    for name, value in vars(found).items():
        if value is not None and not value > 0:
            raise ConfigError(f"a wish for {name} must be above 0, got {value:g}.")
    return found


def _quiet(_: str) -> None:
    return


def _place(path: Path, force: bool) -> Path:
    """Check that the file can be written, before anything is measured."""
    if path.exists() and not force:
        raise ConfigError(f"{path} is there already; write it anew with --force, or elsewhere with --out.")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"the budget cannot be written to {path}: it is a folder, or its folder is not there.")
    return path


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"the budget cannot be written to {path}: {error.strerror}.") from None


def _checked(machine: Machine, wishes: Wishes) -> tuple[torch.device, Energy]:
    if not machine.limit_s > 0 or machine.threads < 1:
        raise ConfigError(
            f"the time limit must be above 0 s, and threads at least 1; got {machine.limit_s:g} and {machine.threads}."
        )
    accelerator, energy = accelerator_named(machine.device), energy_of()
    if wishes.energy_j is not None and energy.joules is None:
        raise ConfigError(f"energy is {energy.source}, so no level can be held to --energy-j; leave it out.")
    return accelerator, energy


def _measured(
    before: LevelPlan, spec: Mapping[str, Any], machine: Machine, wishes: Wishes, free: int | None, until: float,
    say: Say,
) -> list[ProfiledLevel]:  # fmt: skip
    """Measure level by level; each may take an equal share of the time that is left."""
    planned, cost = before.found.levels, before.experiment.fleet.cost
    local = replace(before.local, lr=_SLOW, batch_size=before.batch_size, max_steps=None, patience=None,
                    deadline_s=None, compress=None)  # fmt: skip
    on_host = None if machine.device.startswith("cuda") else free
    levels: list[ProfiledLevel] = []
    for index, level in enumerate(planned):
        left = until - time.monotonic()
        share_s, predicted = left / (len(planned) - index), before.memory(level)
        reason = _not_tried(levels, left, predicted, free)
        if reason:
            found = Found(failed=reason)
        else:
            say(f"Level {level.name} of {len(planned)}: measuring for {share_s:.0f} s at most.")
            asked = ProfileRequest(
                spec, before.method, level.submodel, index, before.facts.classes, local, before.batch_size,
                machine.device, machine.threads, on_host,
            )  # fmt: skip
            found = measured(asked, share_s, left)
        share = before.cost(level, cost) / before.cost(None, cost)
        levels.append(ProfiledLevel(level.name, share, predicted, found, against(found, predicted, wishes)))
        say(f"Level {level.name}: {_in_words(levels[-1])}.")
    return levels


def _not_tried(levels: Sequence[ProfiledLevel], left_s: float, predicted: float, free: int | None) -> str:
    """Return why a level need not be tried, or ""."""
    if levels and levels[-1].found.failed:
        return "not tried, since a smaller one failed"
    if free is not None and predicted > free:
        return f"not tried: a step takes at least {size(predicted)}, and {size(free)} are free"
    return "not tried: the time was over (more is had with --limit-s)" if left_s < _LEAST_S else ""


# ---- in words ------------------------------------------------------------------------------------------------------


def _heading(before: LevelPlan, machine: Machine) -> tuple[str, ...]:
    there = f"{platform.node()}, {platform.platform()}, {platform.machine()}"
    if machine.device.startswith("cuda"):
        there += f", {torch.cuda.get_device_name(torch.device(machine.device))}"
    model, method = before.experiment.model.name, before.experiment.method.name
    shape = " x ".join(map(str, before.found.problem.input_shape))
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    return (
        f"What this device affords, measured by `fleetfit profile`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        f"machine: {there}; torch {torch.__version__}; {machine.device}, {threads}",
        f"run: {model}, {method}, samples of {shape}, batches of {before.batch_size}; share is of "
        f"{before.experiment.fleet.cost}",
    )


def _in_words(level: ProfiledLevel) -> str:
    found = level.found
    parts = [("a step", _time(found.step)), ("inference", _time(found.latency)), ("memory", _bytes(found.memory_bytes))]
    said = ", ".join(f"{name} {value}" for name, value in parts if value != "-")
    return "; ".join(part for part in (said, *level.against) if part)


def _row(level: ProfiledLevel, chosen: bool) -> tuple[str, ...]:
    found = level.found
    return (
        level.name,
        f"{level.share:.3f}",
        _time(found.step),
        _time(found.latency),
        f"{_bytes(found.memory_bytes)} ({size(level.predicted_bytes)})",
        _bytes(found.process_bytes),
        "-" if found.energy_j is None else f"{found.energy_j:.3g} J",
        "; ".join(level.against) or ("this device's level" if chosen else "fits"),
    )


def _bytes(count: float | None) -> str:
    return "-" if count is None else size(count)


def _time(timing: Timing | None) -> str:
    """Return median and spread: 3.12 ± 0.08 ms."""
    if timing is None:
        return "-"
    unit, name = (1.0, "s") if timing.median_s >= 1 else (1e-3, "ms")
    return f"{timing.median_s / unit:.3g} ± {timing.spread_s / unit:.2g} {name}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
