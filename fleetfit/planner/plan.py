"""A plan: the levels of a fleet with their sizes and costs, and who gets which; saved as TOML and used by a run."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from fleetfit.cost import Cost, cost_grid, full_cost, submodel_cost
from fleetfit.errors import ConfigError, PlanError
from fleetfit.layout import Architecture
from fleetfit.planner.budgets import as_fractions, assign, levels_of_budgets
from fleetfit.planner.search import search
from fleetfit.planner.targets import Mode, Split, Targets

FORMAT = 1


@dataclass(frozen=True)
class PlannedLevel:
    """One level of a plan.

    Attributes:
        name: "1" for the smallest.
        depth: Blocks kept.
        width: Fraction of the channels kept (s_w).
        exits: Its exits, the shallower levels' included.
        parameters: Trained numbers; its own and the shallower classifiers count, in the full model the last one only.
        multiply_adds: Multiply-adds of one forward pass of one sample, counted likewise.
        target: r_l, the cost it should have as a fraction of cost(M).
        tolerance: epsilon_l.
        share: The cost it has, as a fraction of cost(M).
        clients: How many clients get it.
    """

    name: str
    depth: int
    width: float
    exits: tuple[int, ...]
    parameters: int
    multiply_adds: int
    target: float
    tolerance: float
    share: float
    clients: int


@dataclass(frozen=True)
class Plan:
    """The planner's result.

    Attributes:
        cost: Name of the cost that budgets are meant in.
        mode: "both", "width" or "depth".
        blocks: Full depth of the model.
        levels: Smallest first; the last is the full model.
        early_heads: What the full model's early classifiers cost, which level L leaves out.
        left_out: Names of the clients that afford not even the smallest level.
    """

    cost: str
    mode: str
    blocks: int
    levels: tuple[PlannedLevel, ...]
    early_heads: Cost
    left_out: tuple[str, ...] = ()

    @property
    def targets(self) -> Targets:
        """The plan as settled targets, for a run that uses it."""
        return Targets(
            tuple(level.target for level in self.levels),
            tuple(level.tolerance for level in self.levels),
            self.cost,
            splits=tuple(Split(level.depth, level.width, level.exits, level.share) for level in self.levels),
            mode=self.mode,
        )

    def to_toml(self) -> str:
        """Return the plan as the text of a TOML file."""
        return tomli_w.dumps(
            {
                "format": FORMAT,
                "cost": self.cost,
                "mode": self.mode,
                "blocks": self.blocks,
                "left_out": list(self.left_out),
                "early_heads": asdict(self.early_heads),
                "level": [{**asdict(level), "exits": list(level.exits)} for level in self.levels],
            }
        )

    @staticmethod
    def from_toml(text: str) -> "Plan":
        """Read what `to_toml` wrote.

        Raises:
            ConfigError: The text is not TOML or not a plan, or a newer FleetFit wrote it.
        """
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"a plan must be TOML: {error}.") from error
        if values.get("format") != FORMAT:
            raise ConfigError(
                f"a plan of format {values.get('format')!r} cannot be read; this FleetFit knows format {FORMAT}."
            )
        try:
            levels = tuple(_level(entry) for entry in values["level"])
            heads = Cost(**_typed(Cost, values["early_heads"]))
            left_out = tuple(str(name) for name in values["left_out"])
            return Plan(str(values["cost"]), str(values["mode"]), int(values["blocks"]), levels, heads, left_out)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"this is no plan that `fleetfit plan` saved ({type(error).__name__}: {error})."
            ) from error


def _level(entry: Mapping[str, Any]) -> PlannedLevel:
    return PlannedLevel(**_typed(PlannedLevel, {**entry, "exits": tuple(int(e) for e in entry["exits"])}))


def _typed(record: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types of a record's fields; whole numbers stand for floats."""
    wanted = {f.name: f.type for f in fields(record)}
    if values.keys() != wanted.keys():
        raise ValueError(f"expected {', '.join(wanted)}; got {', '.join(values)}")
    found = {name: float(v) if wanted[name] is float else v for name, v in values.items()}
    for name, value in found.items():
        kind = wanted[name]
        if isinstance(kind, type) and (not isinstance(value, kind) or isinstance(value, bool)):
            raise TypeError(f'"{name}" must be {kind.__name__}, got {value!r}')
    return found


def make_plan(
    architecture: Architecture,
    input_shape: Sequence[int],
    budgets: Mapping[str, float] | npt.ArrayLike,
    tolerances: npt.ArrayLike = 0.1,
    how: str | Sequence[float] = "cluster",
    cost: str = "parameters",
    mode: Mode = "both",
    strict: bool = False,
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
) -> Plan:
    """Plan a fleet: budgets to levels, levels to sub-models, clients to levels.

    Args:
        architecture: The model family.
        input_shape: Shape of one sample.
        budgets: Budget by client name, or one per client (its index is its name): a fraction of cost(M) up to 1,
            absolute above.
        tolerances: epsilon_k of each client, or one for all.
        how: "cluster", "halving", or target ratios; see `levels_of_budgets`.
        cost: "parameters" or "multiply_adds".
        mode: What is cut; see `search`.
        strict: Admit only levels at or under every budget of theirs.
        depths: Exits of the smaller levels, where they are given.
        widths: Widths of the smaller levels, where they are given. With both given, the levels cost what they cost,
            unless `how` is a list of ratios.

    Raises:
        PlanError: Budgets that make no sense, or nothing fits.
    """
    names = list(budgets) if isinstance(budgets, Mapping) else None
    grid = cost_grid(architecture, input_shape, cost)
    given = as_fractions(list(budgets.values()) if isinstance(budgets, Mapping) else budgets, grid.full)
    if depths is not None and widths is not None and isinstance(how, str):
        how = _shares(grid.full, [grid.of(w, tuple(depths[: i + 1])) for i, w in enumerate(widths)])
    targets = levels_of_budgets(given, how, tolerances, cost, strict)
    splits = search(grid, targets, mode, depths, widths)
    level_of = assign(given, tolerances, [s.share for s in splits])
    under = np.flatnonzero(level_of < 0)
    left_out = tuple(str(i) if names is None else names[i] for i in under.tolist())
    counts = np.bincount(level_of[level_of >= 0], minlength=len(splits)).tolist()
    levels = tuple(
        _planned(architecture, input_shape, i, split, targets, int(counts[i])) for i, split in enumerate(splits)
    )
    whole, bare = submodel_cost(architecture, ({}, splits[-1].exits), input_shape), full_cost(architecture, input_shape)
    heads = Cost(whole.parameters - bare.parameters, whole.multiply_adds - bare.multiply_adds)
    return Plan(cost, mode, architecture.blocks, levels, heads, left_out)


def _shares(full: float, costs: Sequence[float]) -> list[float]:
    found = [c / full for c in costs]
    if found != sorted(set(found)) or any(share >= 1 for share in found):
        raise PlanError(
            f"the given depths and widths must make each level dearer than the one before, got costs {found}."
        )
    return found


def _planned(
    architecture: Architecture, input_shape: Sequence[int], index: int, split: Split, targets: Targets, clients: int
) -> PlannedLevel:
    """Count one level exactly, by building it."""
    if index == len(targets.ratios) - 1:
        counted = full_cost(architecture, input_shape)
    else:
        counted = submodel_cost(architecture, (architecture.sizes(split.width), split.exits), input_shape)
    return PlannedLevel(
        str(index + 1), split.depth, split.width, split.exits, counted.parameters, counted.multiply_adds,
        targets.ratios[index], targets.tolerances[index], split.share, clients,
    )  # fmt: skip
