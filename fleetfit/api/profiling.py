"""`profile`: measure the cost of each level of a run on this device, and derive the device's budget.

The device gets the largest measured level within all limits. Its budget has these parts:

- of the fleet's cost (parameters, say), B_k is the cost of that level as a fraction of the full model, rounded up in
  the sixth digit. A planner that has this level gives it: c_l <= (1 + epsilon_k) B_k. The file has the fleet's
  tolerance epsilon_k, or half the way to the next level if that would come in as well;
- `memory_bytes` is the memory limit M, in the planner's predicted bytes: M / (1 + epsilon_k) * p / max(m, p), where a
  step of the level takes m bytes and the planner predicts p. So levels of another plan stay within the limit, too;
- `latency_s`, only with a limit: the limit as a fraction of the full model's latency on this device, and at least the
  level's own. It is a fraction because the planner measures latency on its own machine. The latency of the full model,
  which has no early classifiers, is that of the largest measured level times the ratio of their multiply-adds.

The planner has no cost for step time and energy: these limits only affect the choice of the level.
"""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

import tomli_w
import torch

from fleetfit.api.run import Sections, check_single_run
from fleetfit.config import Experiment, load_experiment
from fleetfit.config.assemble.levels import PlannedProblem, plan_levels
from fleetfit.core import DataDescription, Level, Local
from fleetfit.cost import Latency, full_cost, submodel_cost
from fleetfit.errors import ConfigError, FleetFitError, PlanError, escape_controls
from fleetfit.files import write_text
from fleetfit.hooks import dump_problem
from fleetfit.machine import free_memory, isolate_torch_state
from fleetfit.names import explain_plug_ins
from fleetfit.planner import Amount, assign, convert_budgets, parse_amount
from fleetfit.report.text import Table, format_bytes
from fleetfit.training import resolve_device
from fleetfit.training.profiling import (
    EnergyMeter,
    Measurement,
    ProfileRequest,
    find_energy_meter,
    profile_level,
)

_UNITS = {"memory_bytes": (1e6, "MB"), "size_bytes": (1e6, "MB"), "latency_s": (1.0, "s")}
_MEMORY_SHARE = 0.5  # of the free memory, without a limit for the memory of a step
_LEAST_S = 1.0  # with less time, a level is not measured
_LR = 1e-6  # the trained weights are not used, and must not diverge


@dataclass(frozen=True)
class DeviceLimits:
    """Limits that the owner of a device sets; None: no limit.

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
        """Return the limits in words."""
        limits = {
            "a training step of at most {} s": self.step_s,
            "inference of at most {} s": self.latency_s,
            "a step with at most {} J": self.energy_j,
        }
        words = [text.format(f"{value:g}") for text, value in limits.items() if value is not None]
        if self.memory_bytes is not None:
            words.append(f"a step with at most {format_bytes(self.memory_bytes)}")
        return ", ".join(words) or "no limit"


def parse_limits(
    step_s: float | None = None,
    latency_s: float | None = None,
    memory: str | float | None = None,
    energy_j: float | None = None,
) -> DeviceLimits:
    """Return limits; memory is in bytes, or has a unit, such as "300 MB".

    Raises:
        ConfigError: A limit is not a positive amount.
    """
    try:
        memory_bytes = parse_amount(memory, "memory_bytes") if isinstance(memory, str) else memory
    except FleetFitError as error:
        raise ConfigError(f"memory: {error}", key="memory", path=error.path) from None
    limits = DeviceLimits(step_s, latency_s, memory_bytes, energy_j)
    for name, value in vars(limits).items():
        if value is not None and not value > 0:
            raise ConfigError(f"the limit for {name} must be above 0, got {value:g}.", key=name)
    return limits


@dataclass(frozen=True)
class ProfileTarget:
    """Where and how to measure.

    Attributes:
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads per job, as in a node's configuration.
        limit_s: Limit in seconds of the whole profile.
    """

    device: str = "cpu"
    threads: int = 1
    limit_s: float = 60.0


@dataclass(frozen=True)
class ProfiledLevel:
    """The measured cost of a level on this device.

    Attributes:
        name: "1" for the smallest.
        share: Its cost in the fleet's cost, as a fraction of the full model.
        predicted_bytes: Predicted memory of a training step with all trained exits. (The planner counts the full model
            without early exits.)
        measurement: Its measured cost.
        reasons: Why the level exceeds the limits; empty if it is within all.
    """

    name: str
    share: float
    predicted_bytes: float
    measurement: Measurement
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceBudget:
    """The largest level that a device affords, and the budget for it.

    Attributes:
        level: The level's index, 0 for the smallest.
        budget: By cost, as in a budget file.
        tolerance: epsilon_k.
        notes: Sentences for the device's owner.
    """

    level: int
    budget: Mapping[str, Amount]
    tolerance: float
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class ProfileResult:
    """The measured costs on a device, and the derived budget.

    Attributes:
        levels: The cost of each level, smallest first.
        affords: The level that the device affords, and its budget.
        limits: The limits of the device's owner.
        energy: The source of energy measurements, or why there is none.
        heading: Machine, date and run, line by line.
    """

    levels: tuple[ProfiledLevel, ...]
    affords: DeviceBudget
    limits: DeviceLimits
    energy: str
    heading: tuple[str, ...]

    @property
    def table(self) -> Table:
        """The levels as a table."""
        columns = ("level", "share", "training step", "inference", "step's memory (predicted)", "whole process",
                   "step's energy", "")  # fmt: skip
        rows = []
        for index, level in enumerate(self.levels):
            measurement = level.measurement
            rows.append(
                (
                    level.name,
                    f"{level.share:.3f}",
                    _format_timing(measurement.step),
                    _format_timing(measurement.latency),
                    f"{_format_bytes(measurement.memory_bytes)} ({format_bytes(level.predicted_bytes)})",
                    _format_bytes(measurement.process_bytes),
                    "-" if measurement.energy_j is None else f"{measurement.energy_j:.3g} J",
                    "; ".join(level.reasons) or ("this device's level" if index == self.affords.level else "fits"),
                )
            )
        return Table(columns, tuple(rows))

    def to_toml(self) -> str:
        """Return the budget file: the measurements as comments, `budget` and `tolerance`."""
        table = self.table
        cells = [table.columns, *table.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        lines = [*self.heading, f"energy: {self.energy}", "", *rows, ""]
        lines += [f"level {self.levels[self.affords.level].name} is the largest within: {self.limits}"]
        if "memory_bytes" in self.affords.budget:
            lines.append("memory_bytes is in the planner's predicted bytes, minus the tolerance")
        lines += [*self.affords.notes]
        comment = "".join(f"# {' '.join(line.splitlines())}".rstrip() + "\n" for line in lines)
        values = ", ".join(tomli_w.dumps({key: value}).strip() for key, value in self.affords.budget.items())
        return f"{escape_controls(comment)}\nbudget = {{ {values} }}\ntolerance = {self.affords.tolerance}\n"


# ---- from the costs of levels to a budget B_k ------------------------------------------------------------------------


def list_reasons(measurement: Measurement, predicted_bytes: float, limits: DeviceLimits) -> tuple[str, ...]:
    """Return every limit that a level exceeds, in words."""
    if measurement.failed:
        return (measurement.failed,)
    memory = max(predicted_bytes, measurement.memory_bytes or 0.0)  # as in the budget
    step, latency = measurement.step, measurement.latency
    checks = [
        ("a step takes {:.3g} s", None if step is None else step.median_s, limits.step_s),
        ("inference takes {:.3g} s", None if latency is None else latency.median_s, limits.latency_s),
        ("a step takes {:.3g} J", measurement.energy_j, limits.energy_j),
        ("a step takes {:.4g} MB", memory / 1e6, None if limits.memory_bytes is None else limits.memory_bytes / 1e6),
    ]
    reasons = []
    for words, value, limit in checks:
        if limit is not None and value is None:
            reasons.append(f"{words.split(' takes')[0]} was not measured")
        elif limit is not None and value is not None and value > limit:
            reasons.append(f"{words.format(value)}, over {limit:.4g}")
    return tuple(reasons)


def find_budget(plan: PlannedProblem, levels: Sequence[ProfiledLevel], limits: DeviceLimits) -> DeviceBudget:
    """Return the budget of the largest level within the limits, as derived in the module's docstring.

    Args:
        plan: The planned levels.
        levels: The measured levels.
        limits: The limits.

    Raises:
        PlanError: No level is within the limits, or no budget leads to the level.
    """
    fitting = [index for index, level in enumerate(levels) if not level.reasons]
    if not fitting:
        smallest = levels[0]
        raise PlanError(
            f"this device affords no level: even the smallest, level {smallest.name}, does not fit: "
            f"{'; '.join(smallest.reasons)}. Raise the limits ({limits}), or plan a smaller level."
        )
    for level_index in reversed(fitting):
        budget = _derive_budget(plan, levels, level_index, limits)
        if _assign_level(plan, budget) == level_index:
            return budget
    raise PlanError(
        f"this device affords level {levels[fitting[-1]].name}, but {plan.experiment.method.name} would assign a "
        "larger one for every budget. Choose another method, or leave the device out."
    )


def _derive_budget(
    plan: PlannedProblem, levels: Sequence[ProfiledLevel], index: int, limits: DeviceLimits
) -> DeviceBudget:
    cost, level, planned = plan.experiment.fleet.cost, levels[index], plan.levels
    needs = planned[index].needs or level.share
    amount: Amount = _round_up(needs)
    if needs > 1:  # above the full model: absolute, with the cost's unit if it has one
        absolute_needs = needs * plan.cost(None, cost)
        amount = _format_amount(cost, absolute_needs) if cost in _UNITS else float(math.ceil(absolute_needs))
    budget: dict[str, Amount] = {cost: amount}
    larger = [other.needs for other in planned[index + 1 :]]
    tolerance = _compute_tolerance(plan.experiment.fleet.tolerance, _round_up(needs), larger)
    notes = []
    if limits.memory_bytes is not None and cost != "memory_bytes":
        predicted = plan.cost(planned[index], "memory_bytes")
        needed_bytes = max(level.predicted_bytes, level.measurement.memory_bytes or 0.0)
        budget["memory_bytes"] = _format_amount(
            "memory_bytes", limits.memory_bytes * predicted / needed_bytes / (1 + tolerance)
        )
        if level.measurement.memory_bytes is None:
            notes.append("This platform does not report the memory of a process. The predicted memory is used.")
    if limits.latency_s is not None and cost != "latency_s":
        timed = {i: one.measurement.latency.median_s for i, one in enumerate(levels) if one.measurement.latency}
        last, problem = max(timed), plan.problem
        whole = full_cost(problem.architecture, problem.input_shape).multiply_adds
        part = submodel_cost(problem.architecture, planned[last].submodel, problem.input_shape).multiply_adds
        full_s = timed[last] * whole / part
        if last < len(levels) - 1:
            notes.append(f"The full model's latency is extrapolated from level {levels[last].name} by multiply-adds.")
        share = max(limits.latency_s / full_s / (1 + tolerance), timed[index] / full_s)
        budget["latency_s"] = min(1.0, _round_up(share))
    return DeviceBudget(index, budget, tolerance, tuple(notes))


def _compute_tolerance(tolerance: float, budget: float, larger: Sequence[float]) -> float:
    """Return a tolerance that excludes all larger levels, if there is one."""
    nearest = min((needs / budget - 1 for needs in larger if needs > budget), default=math.inf)
    return tolerance if nearest > 1.01 * tolerance else math.floor(nearest / 2 * 1e6) / 1e6


def _assign_level(plan: PlannedProblem, budget: DeviceBudget) -> int:
    """Return the level that a planner assigns to the budget, without latencies, which the planner measures itself."""
    cost, levels = plan.experiment.fleet.cost, plan.levels
    amounts = {name: amount for name, amount in budget.budget.items() if name != "latency_s" or cost == name}
    fractions = convert_budgets([amounts], cost, lambda name: plan.cost(None, name))

    def compute_need(level: Level, name: str) -> float:
        if level.needs <= 0:
            return 0.0
        need = level.further.get(name)
        return plan.cost(level, name) / plan.cost(None, name) if need is None else need

    further = [(fractions[name], [compute_need(level, name) for level in levels]) for name in fractions if name != cost]
    return int(assign(fractions[cost], budget.tolerance, [level.needs for level in levels], further)[0])


def _round_up(value: float, digits: int = 6) -> float:
    """Round up at a decimal place, so that the budget covers its level."""
    return math.ceil(round(value * 10**digits, 3)) / 10**digits


def _format_amount(cost: str, value: float) -> str:
    unit, name = _UNITS[cost]
    return f"{_round_up(value / unit, 3 if value >= unit else 6):.12g} {name}"


# ---- measuring -------------------------------------------------------------------------------------------------------

Say = Callable[[str], None]


@isolate_torch_state()
@explain_plug_ins()
def profile(
    file: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    step_s: float | None = None,
    latency_s: float | None = None,
    memory: str | float | None = None,
    energy_j: float | None = None,
    device: str = "cpu",
    threads: int = 1,
    limit_s: float = 60.0,
    facts: DataDescription | None = None,
    out: str | Path | None = None,
    force: bool = False,
    say: Say | None = None,
    **sections: Unpack[Sections],
) -> ProfileResult:
    """Measure the cost of each level of a run on this device, and return or write the derived budget.

    It measures each level in its own process, smallest first: the peak memory of a training step, the time and energy
    of steps (the run's loss and optimizer, on random samples), and the inference of one sample. If a level fails or the
    time is over, it does not try larger levels, and the device affords none of them. The docstring of
    `fleetfit.api.profiling` derives the budget.

    Args:
        file: A run file, its tables, or an `Experiment`.
        step_s: Limit in seconds of a training step.
        latency_s: Limit in seconds of inference of one sample.
        memory: Limit in bytes of a training step, or with a unit, such as "300 MB"; by default half of the free memory.
        energy_j: Limit in joules of a training step.
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads per job, as in a node's configuration.
        limit_s: Limit in seconds of the whole profile.
        facts: Facts about the data for building the model; without them, the run's data are loaded.
        out: The budget file to write; None: do not write a file.
        force: Whether to replace an existing file.
        say: Called with a sentence before and after each level.
        **sections: Sections of a run file, as `fleetfit.run` takes them. They win over `file`.

    Raises:
        PlanError: The device affords no level. No file is written.
        FleetFitError: Something does not fit.
    """
    target, limits = ProfileTarget(device, threads, limit_s), parse_limits(step_s, latency_s, memory, energy_j)
    say = say or (lambda _: None)
    path = None if out is None else Path(out)
    if path is not None:
        _check_output(path, force)
    end = time.monotonic() + target.limit_s
    accelerator, energy = _check_target(target, limits)
    experiment = load_experiment(file, **sections)
    check_single_run(experiment, "profile")
    plan = plan_levels(experiment, facts, accelerator)
    free = free_memory(accelerator)
    if limits.memory_bytes is None:
        limits = replace(limits, memory_bytes=_MEMORY_SHARE * free)
    if plan.problem.spec is None:
        raise ConfigError(
            "each level is measured in a process that rebuilds the model from an import path. Name the model "
            '("package.module:function" or "file.py:function").',
            key="model.name",
        )
    levels = _measure_levels(plan, dump_problem(plan.problem), target, limits, free, end, say)
    budget = find_budget(plan, levels, limits)
    result = ProfileResult(tuple(levels), budget, limits, energy.source, _make_heading(plan, target))
    if path is not None:
        try:
            write_text(path, result.to_toml())
        except OSError as error:
            raise ConfigError(f"cannot write the budget to {path}: {error.strerror}.", path=path) from None
    return result


def _check_output(path: Path, force: bool) -> None:
    """Check that the file can be written, before measuring."""
    if path.exists() and not force:
        raise ConfigError(
            f"{path} already exists. Replace it with --force, or choose another file with --out.", path=path
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"cannot write the budget to {path}: it is a folder, or its folder does not exist.", path=path
        )


def _check_target(target: ProfileTarget, limits: DeviceLimits) -> tuple[torch.device, EnergyMeter]:
    if not target.limit_s > 0 or target.threads < 1:
        raise ConfigError(
            f"the time limit must be above 0 s, and threads at least 1; got {target.limit_s:g} and {target.threads}.",
            key="limit_s" if target.threads >= 1 else "threads",
        )
    accelerator, energy = resolve_device(target.device), find_energy_meter()
    if limits.energy_j is not None and energy.read is None:
        raise ConfigError(f"energy is {energy.source}, so --energy-j cannot be checked. Leave it out.", key="energy_j")
    return accelerator, energy


def _measure_levels(
    plan: PlannedProblem,
    spec: Mapping[str, Any],
    target: ProfileTarget,
    limits: DeviceLimits,
    free: int,
    end: float,
    say: Say,
) -> list[ProfiledLevel]:
    """Measure level by level. Each gets an equal share of the remaining time."""
    planned, cost = plan.levels, plan.experiment.fleet.cost
    batch_size = plan.budgets.conditions.batch_size
    local = Local.load({**dict(plan.experiment.local), "lr": _LR, "batch_size": batch_size, "max_steps": None,
                        "patience": None, "compress": None})  # fmt: skip
    host_bytes = None if target.device.startswith("cuda") else free
    levels: list[ProfiledLevel] = []
    for index, level in enumerate(planned):
        left_s = end - time.monotonic()
        share_s, predicted = left_s / (len(planned) - index), plan.memory(level)
        reason = ""
        if levels and levels[-1].measurement.failed:
            reason = "not tried, because a smaller level failed"
        elif predicted > free:
            reason = f"not tried: a step takes at least {format_bytes(predicted)}, but {format_bytes(free)} are free"
        elif left_s < _LEAST_S:
            reason = "not tried: the time is over (raise --limit-s)"
        if reason:
            measurement = Measurement(failed=reason)
        else:
            say(f"Level {level.name} of {len(planned)}: measuring for {share_s:.0f} s at most.")
            request = ProfileRequest(
                spec, plan.method_spec, level.submodel, index, plan.data.classes, local, batch_size, target.device,
                target.threads, host_bytes,
            )  # fmt: skip
            measurement = profile_level(request, share_s, left_s)
        share = plan.cost(level, cost) / plan.cost(None, cost)
        reasons = list_reasons(measurement, predicted, limits)
        levels.append(ProfiledLevel(level.name, share, predicted, measurement, reasons))
        parts = [
            ("a step", _format_timing(measurement.step)),
            ("inference", _format_timing(measurement.latency)),
            ("memory", _format_bytes(measurement.memory_bytes)),
        ]
        costs = ", ".join(f"{name} {value}" for name, value in parts if value != "-")
        say(f"Level {level.name}: {'; '.join(part for part in (costs, *reasons) if part)}.")
    return levels


def _make_heading(plan: PlannedProblem, target: ProfileTarget) -> tuple[str, ...]:
    name = f"{platform.node()}, {platform.platform()}, {platform.machine()}"
    if target.device.startswith("cuda"):
        name += f", {torch.cuda.get_device_name(torch.device(target.device))}"
    model, method = plan.experiment.model.name, plan.experiment.method.name
    shape = " x ".join(map(str, plan.problem.input_shape))
    threads = f"{target.threads} thread{'s' * (target.threads > 1)}"
    return (
        f"Budget of this device, measured by `fleetfit profile`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
        f"machine: {name}; torch {torch.__version__}; {target.device}, {threads}",
        f"run: {model}, {method}, samples of {shape}, batches of {plan.budgets.conditions.batch_size}; share is of "
        f"{plan.experiment.fleet.cost}",
    )


def _format_bytes(count: float | None) -> str:
    return "-" if count is None else format_bytes(count)


def _format_timing(timing: Latency | None) -> str:
    """Return median and spread: 3.12 ± 0.08 ms."""
    if timing is None:
        return "-"
    unit, name = (1.0, "s") if timing.median_s >= 1 else (1e-3, "ms")
    return f"{timing.median_s / unit:.3g} ± {timing.spread_s / unit:.2g} {name}"
