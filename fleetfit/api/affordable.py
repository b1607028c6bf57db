"""From what levels cost on a device, and what its owner wishes, to the budget B_k that a planner understands.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetfit.config.beforehand import Beforehand
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.errors import PlanError
from fleetfit.planner import Amount, assign, budgets_by_cost
from fleetfit.report.text import size
from fleetfit.train.profiling import Found
from fleetfit.values import Level

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


def affordable(before: Beforehand, levels: Sequence[ProfiledLevel], wishes: Wishes) -> Affordable:
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


def _derived(before: Beforehand, levels: Sequence[ProfiledLevel], chosen: int, wishes: Wishes) -> Affordable:
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


def _given(before: Beforehand, found: Affordable) -> int:
    """Return the level that a planner gives to the budget, latencies aside: those it measures itself."""
    cost = before.experiment.fleet.cost
    named = {name: amount for name, amount in found.budget.items() if name != "latency_s" or cost == name}
    fractions = budgets_by_cost([named], cost, lambda name: before.cost(None, name))
    levels = before.found.levels
    further = [
        (fractions[name], [_needed(before, level, name) for level in levels]) for name in fractions if name != cost
    ]
    return int(assign(fractions[cost], found.tolerance, [level.needs for level in levels], further)[0])


def _needed(before: Beforehand, level: Level, cost: str) -> float:
    if level.needs <= 0:
        return 0.0
    known = level.further.get(cost)
    return before.cost(level, cost) / before.cost(None, cost) if known is None else known


def _full_latency(before: Beforehand, levels: Sequence[ProfiledLevel]) -> tuple[float, str]:
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
