"""A plan: the levels of a fleet with their sizes and costs, and who gets which; made, saved as TOML, used by a run."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pydantic
import tomli_w

from fleetfit.anatomy import Architecture
from fleetfit.cost import (
    BATCH_SIZE,
    Conditions,
    Cost,
    Piece,
    compute_cost,
    cost_grid,
    full_cost,
    get_latency,
    submodel_cost,
)
from fleetfit.errors import ConfigError, PlanError, did_you_mean, escape_controls, make_printable, truncate
from fleetfit.markup import html_table
from fleetfit.planner.budgets import (
    Budget,
    Floats,
    LevelShape,
    Scaling,
    Targets,
    affords,
    as_fractions,
    assign,
    convert_budgets,
    make_targets,
)
from fleetfit.planner.split import find_shapes, get_sizes
from fleetfit.submodel import Submodel

# ---- the plan ------------------------------------------------------------------------------------------------------

FORMAT = 3


@dataclass(frozen=True)
class LevelChange:
    """Levels that a run has from a round on, and those that it has no more.

    Attributes:
        round: The last round before.
        added: Names of the new ones.
        dropped: Names of those that are gone.
    """

    round: int
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedLevel:
    """One level of a plan.

    Attributes:
        name: "1" for the smallest; in a run whose levels changed, old levels keep their names, and new ones get the
            numbers after the highest.
        depth: Blocks kept.
        width: Fraction of the channels kept (s_w); with `widths`, the mean over the axes that the depth has.
        exits: Its exits, the shallower levels' included.
        parameters: Numbers, frozen ones too; its own and the shallower exits count, in the full model the last only.
        multiply_adds: Multiply-adds of one forward pass of one sample, counted likewise.
        target: r_l, the cost it should have as a fraction of cost(M).
        tolerance: epsilon_l.
        share: The cost it has, as a fraction of cost(M).
        clients: How many clients get it.
        further: Its other costs by name, those that budgets name or that were asked for; of a latency its spread too.
        widths: Fraction kept of each axis, where they differ; axes not named are whole.
    """

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")
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
    further: Mapping[str, float] = field(default_factory=dict, hash=False)
    widths: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def shape(self) -> LevelShape:
        """The level without its counts."""
        return LevelShape(self.depth, self.width, self.exits, self.share, widths=self.widths)


@dataclass(frozen=True)
class Plan:
    """The planner's result.

    Attributes:
        cost: Name of the budgets' cost.
        scaling: How the levels are split: "both", "width", "depth", or "depth_first" where widths differ by axis.
        blocks: Full depth of the model.
        levels: Smallest first; the last is the full model.
        early_heads: Cost of the full model's early classifiers, which level L leaves out.
        left_out: Names of the clients that do not afford the smallest level.
        batch_size: Samples in a training step, for which memory is counted.
        measured: Latencies measured on a machine, so that a run that uses the plan has the same numbers.
        changes: How the levels of a run changed, oldest first.
    """

    cost: str
    scaling: str
    blocks: int
    levels: tuple[PlannedLevel, ...]
    early_heads: Cost
    left_out: tuple[str, ...] = ()
    batch_size: int = BATCH_SIZE
    measured: Mapping[str, list[float]] = field(default_factory=dict, hash=False)
    changes: tuple[LevelChange, ...] = ()

    @property
    def targets(self) -> Targets:
        """The plan as targets of fixed levels, for a run that uses it."""
        return Targets(
            tuple(level.target for level in self.levels),
            tuple(level.tolerance for level in self.levels),
            self.cost,
            splits=tuple(level.shape for level in self.levels),
            fixed=self.scaling,
            conditions=Conditions(self.batch_size, dict(self.measured)),
        )

    def __str__(self) -> str:
        """Return the levels as a table, for terminals."""
        columns, rows, notes = self._list_levels()
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in (columns, *rows)]
        return "\n".join([*lines, *map(make_printable, notes)])

    def _repr_html_(self) -> str:
        """Return the levels as a table, for notebooks."""
        columns, rows, notes = self._list_levels()
        return html_table(columns, rows, f"A plan in {self.cost}", notes)

    def _list_levels(self) -> tuple[tuple[str, ...], Sequence[tuple[str, ...]], Sequence[str]]:
        columns = ("level", "depth", "width", "exits (after block)", "parameters", "multiply-adds",
                   f"{self.cost} / full", "target", "clients")  # fmt: skip
        rows = [
            (one.name, f"{one.depth}/{self.blocks}", f"{one.width:.2f}", ", ".join(map(str, one.exits)),
             f"{one.parameters:,}", f"{one.multiply_adds:,}", f"{one.share:.3f}",
             f"{one.target:.3g} ± {100 * one.tolerance:.3g}%", str(one.clients))
            for one in self.levels
        ]  # fmt: skip
        left_out = [f"{len(self.left_out)} clients afford no level: {', '.join(self.left_out)}."]
        return columns, rows, left_out if self.left_out else []

    def to_toml(self) -> str:
        """Return the plan as the text of a TOML file."""
        entries = [{**asdict(level), "exits": list(level.exits)} for level in self.levels]
        table = {
            "format": FORMAT,
            "cost": self.cost,
            "scaling": self.scaling,
            "blocks": self.blocks,
            "batch_size": self.batch_size,
            "left_out": list(self.left_out),
            "early_heads": asdict(self.early_heads),
            "level": [{k: v for k, v in entry.items() if v != {}} for entry in entries],
        }
        table |= {"measured": self.measured} if self.measured else {}
        table |= {"change": [asdict(change) for change in self.changes]} if self.changes else {}
        return escape_controls(tomli_w.dumps(table))

    @staticmethod
    def from_toml(text: str) -> "Plan":
        """Read what `to_toml` wrote.

        Raises:
            ConfigError: The text is not TOML or not a plan, or of another format.
        """
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"a plan must be TOML: {error}.", key="plan") from None
        return Plan.from_table(values)

    @staticmethod
    def from_table(values: Mapping[str, Any]) -> "Plan":
        """Read the tables of what `to_toml` wrote.

        Raises:
            ConfigError: They are not a plan, or of another format.
        """
        if values.get("format") != FORMAT:
            raise ConfigError(
                f"a plan of format {values.get('format')!r} cannot be read; this FleetFit reads format {FORMAT}.",
                key="format",
            )
        keys = ("format", "cost", "scaling", "blocks", "batch_size", "left_out", "early_heads", "level", "measured",
                "change")  # fmt: skip
        for key in values:
            if key not in keys:
                raise ConfigError(f"a plan has no key {truncate(key)}.{did_you_mean(key, keys)}", key=key)
        entries = {key: value for key, value in values.items() if key not in ("format", "level", "change")}
        entries |= {"levels": values.get("level"), "changes": values.get("change", [])}
        try:  # as JSON, whose lists stand for tuples, and whole numbers for floats
            return pydantic.TypeAdapter(Plan).validate_json(json.dumps(entries), strict=True)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (TypeError, RecursionError) as error:
            reason = str(error)
        raise ConfigError(f"this is not a plan saved by `fleetfit plan` ({truncate(reason, 200)}).", key="plan")


@dataclass(frozen=True)
class SplitLevel:
    """A level as one split plans it, with what it costs.

    Attributes:
        depth: Blocks kept.
        width: Fraction of the channels kept, or their mean over the axes.
        counts: Parameters, and multiply-adds of one forward pass of one sample.
        training_work: Multiply-adds of training one sample.
        memory_bytes: Of one training step.
        message_bytes: Of its state.
        step_s: Seconds of one training step, by name of a profile; empty without profiles.
    """

    depth: int
    width: float
    counts: Cost
    training_work: int
    memory_bytes: float
    message_bytes: float
    step_s: Mapping[str, float]


# ---- planning a fleet: budgets to levels, levels to sub-models, clients to levels ----------------------------------

_PRINTED = ("parameters", "multiply_adds")  # every plan has them


def make_plan(
    architecture: Architecture,
    input_shape: Sequence[int],
    budgets: Mapping[str, Budget] | Sequence[Budget] | Floats,
    tolerances: npt.ArrayLike = 0.1,
    how: str | Sequence[float] = "cluster",
    cost: str = "parameters",
    scaling: Scaling = "both",
    strict: bool = False,
    depths: Sequence[int] | None = None,
    widths: Sequence[float] | None = None,
    also: Iterable[str] = (),
    conditions: Conditions | None = None,
) -> Plan:
    """Plan a fleet.

    Args:
        architecture: The model family.
        input_shape: Shape of one sample.
        budgets: Budget by client name, or one per client (its index is its name): a fraction of cost(M) up to 1,
            absolute above; or a table of costs and budgets, all of which must fit.
        tolerances: epsilon_k of each client, or one for all.
        how: "cluster", "halving", or target ratios; see `make_targets`.
        cost: The budgets' cost, a name in `fleetfit.cost.COSTS`.
        scaling: How levels are split; see `find_shapes`.
        strict: Admit only levels at or under every budget of theirs.
        depths: Exits of the smaller levels, where they are given; not with "depth_first".
        widths: Widths of the smaller levels, where they are given; not with "depth_first". With both given, the levels
            cost what they cost, unless `how` is a list of ratios.
        also: Costs that the plan shows although no budget names them.
        conditions: Under which costs are counted.

    Raises:
        PlanError: Budgets that make no sense, or nothing fits.
    """
    conditions = conditions or Conditions()
    names = list(budgets) if isinstance(budgets, Mapping) else None
    grid = cost_grid(architecture, input_shape, cost, conditions)
    values = list(budgets.values()) if isinstance(budgets, Mapping) else budgets
    whole: Piece = ({}, (architecture.blocks,))
    if isinstance(values, np.ndarray) or not any(isinstance(budget, Mapping | str) for budget in values):
        by_cost = {cost: as_fractions(values, grid.full)}  # type: ignore[arg-type]
    else:
        by_cost = convert_budgets(values, cost, lambda c: compute_cost(architecture, whole, input_shape, c, conditions))
    further = {name: values for name, values in by_cost.items() if name != cost}
    if depths is not None and widths is not None and isinstance(how, str):
        how = [grid.compute(w, tuple(depths[: i + 1])) / grid.full for i, w in enumerate(widths)]
        if how != sorted(set(how)) or any(share >= 1 for share in how):
            raise PlanError(
                f"the given depths and widths must make each level dearer than the one before, got costs {how}.",
                key="depths",
            )
    targets = make_targets(by_cost[cost], how, tolerances, cost, strict, further, conditions)
    splits = find_shapes(architecture, input_shape, targets, scaling, depths, widths)
    costs = [(further[name], [s.further[name] for s in splits]) for name in further]
    level_of = assign(by_cost[cost], tolerances, [s.share for s in splits], costs)
    counts = np.bincount(level_of[level_of >= 0], minlength=len(splits)).tolist()
    shown = [name for name in dict.fromkeys([cost, *further, *also]) if name not in _PRINTED]
    levels = tuple(
        _plan_level(architecture, input_shape, i, split, targets, int(counts[i]), shown)
        for i, split in enumerate(splits)
    )
    last, bare = submodel_cost(architecture, ({}, splits[-1].exits), input_shape), full_cost(architecture, input_shape)
    heads = Cost(last.parameters - bare.parameters, last.multiply_adds - bare.multiply_adds)
    scaling = find_scaling(levels, architecture.blocks) if scaling in ("auto", "depth_first") else scaling
    smallest = {cost: splits[0].share, **splits[0].further}
    left_out = [
        f"{index if names is None else names[index]}{_name_failed_costs(by_cost, tolerances, smallest, index)}"
        for index in np.flatnonzero(level_of < 0).tolist()
    ]
    return Plan(cost, scaling, architecture.blocks, levels, heads, tuple(left_out), conditions.batch_size,
                conditions.measured)  # fmt: skip


def find_scaling(levels: Sequence[PlannedLevel], blocks: int) -> Scaling:
    """Return how levels are split, from their shapes."""
    if all(level.depth == blocks for level in levels):
        return "width"
    if any(level.widths for level in levels):
        return "depth_first"
    return "depth" if all(level.width == 1 for level in levels) else "both"


def _name_failed_costs(
    by_cost: Mapping[str, Floats], tolerances: npt.ArrayLike, smallest: Mapping[str, float], client: int
) -> str:
    """Name the costs of the smallest level that a client does not afford, where there are several."""
    if len(by_cost) == 1:
        return ""
    slack = np.broadcast_to(np.asarray(tolerances, dtype=np.float64), by_cost[next(iter(by_cost))].shape)[client]
    return f" ({', '.join(c for c, b in by_cost.items() if not affords(b[client], slack, smallest[c]))})"


def _plan_level(
    architecture: Architecture,
    input_shape: Sequence[int],
    index: int,
    split: LevelShape,
    targets: Targets,
    clients: int,
    shown: Sequence[str],
) -> PlannedLevel:
    """Count one level exactly, by building it."""
    sizes, exits = get_sizes(architecture, split), split.exits
    if index == len(targets.ratios) - 1:
        sizes, exits = architecture.sizes(1.0), (architecture.blocks,)
    piece = Submodel({axis: range(n) for axis, n in sizes.items()}, exits)
    counted = submodel_cost(architecture, piece, input_shape)
    return PlannedLevel(
        str(index + 1), split.depth, split.width, split.exits, counted.parameters, counted.multiply_adds,
        targets.ratios[index], targets.tolerances[index], split.share, clients,
        compute_further_costs(architecture, piece, input_shape, shown, targets.conditions), split.widths,
    )  # fmt: skip


def compute_further_costs(
    architecture: Architecture,
    submodel: Submodel,
    input_shape: Sequence[int],
    costs: Iterable[str],
    conditions: Conditions,
) -> dict[str, float]:
    """Return further costs of a sub-model by name, and with a latency its spread."""
    by_cost = {}
    for cost in costs:
        by_cost[cost] = float(compute_cost(architecture, submodel, input_shape, cost, conditions))
        if cost == "latency_s":
            sizes = {**architecture.sizes(1.0), **submodel.sizes}
            latency = get_latency(architecture, sizes, submodel.exits, input_shape, conditions)
            by_cost["latency_spread_s"] = latency.spread_s
    return by_cost
