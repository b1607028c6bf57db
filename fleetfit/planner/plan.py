"""A plan: the levels of a fleet with their sizes and costs, and who gets which; saved as TOML and used by a run."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, get_origin

import tomli_w

from fleetfit.cost import BATCH_SIZE, Conditions, Cost
from fleetfit.errors import ConfigError, did_you_mean, shown
from fleetfit.planner.targets import Split, Targets

FORMAT = 2
_READ = (1, 2)


@dataclass(frozen=True)
class PlannedLevel:
    """One level of a plan.

    Attributes:
        name: "1" for the smallest.
        depth: Blocks kept.
        width: Fraction of the channels kept (s_w).
        exits: Its exits, the shallower levels' included.
        parameters: Numbers, frozen ones too; its own and the shallower exits count, in the full model the last only.
        multiply_adds: Multiply-adds of one forward pass of one sample, counted likewise.
        target: r_l, the cost it should have as a fraction of cost(M).
        tolerance: epsilon_l.
        share: The cost it has, as a fraction of cost(M).
        clients: How many clients get it.
        further: Its other costs by name, those that budgets name or that were asked for; of a latency its spread too.
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
    further: Mapping[str, float] = field(default_factory=dict, hash=False)


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
        batch_size: Samples in a training step, for which memory is counted.
        measured: What was measured on a machine, so that whoever uses the plan gets the same numbers.
    """

    cost: str
    mode: str
    blocks: int
    levels: tuple[PlannedLevel, ...]
    early_heads: Cost
    left_out: tuple[str, ...] = ()
    batch_size: int = BATCH_SIZE
    measured: Mapping[str, list[float]] = field(default_factory=dict, hash=False)

    @property
    def targets(self) -> Targets:
        """The plan as settled targets, for a run that uses it."""
        return Targets(
            tuple(level.target for level in self.levels),
            tuple(level.tolerance for level in self.levels),
            self.cost,
            splits=tuple(Split(level.depth, level.width, level.exits, level.share) for level in self.levels),
            mode=self.mode,
            conditions=Conditions(self.batch_size, dict(self.measured)),
        )

    def to_toml(self) -> str:
        """Return the plan as the text of a TOML file."""
        entries = [{**asdict(level), "exits": list(level.exits)} for level in self.levels]
        table = {
            "format": FORMAT,
            "cost": self.cost,
            "mode": self.mode,
            "blocks": self.blocks,
            "batch_size": self.batch_size,
            "left_out": list(self.left_out),
            "early_heads": asdict(self.early_heads),
            "level": [{k: v for k, v in entry.items() if v != {}} for entry in entries],
        }
        return tomli_w.dumps(table | ({"measured": self.measured} if self.measured else {}))

    @staticmethod
    def from_toml(text: str) -> "Plan":
        """Read what `to_toml` wrote.

        Raises:
            ConfigError: The text is not TOML or not a plan, or a newer FleetFit wrote it.
        """
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"a plan must be TOML: {error}.") from error
        return Plan.of_table(values)

    @staticmethod
    def of_table(values: Mapping[str, Any]) -> "Plan":
        """Read the tables of what `to_toml` wrote.

        Raises:
            ConfigError: They are no plan, or a newer FleetFit wrote them.
        """
        if values.get("format") not in _READ:
            raise ConfigError(
                f"a plan of format {values.get('format')!r} cannot be read; this FleetFit knows formats "
                f"{' and '.join(map(str, _READ))}."
            )
        known = ("format", "cost", "mode", "blocks", "batch_size", "left_out", "early_heads", "level", "measured")
        for key in values:
            if key not in known:
                raise ConfigError(f"a plan has no key {shown(key)}.{did_you_mean(key, known)}")
        try:
            levels = tuple(_level(entry) for entry in values["level"])
            heads = Cost(**_typed(Cost, values["early_heads"]))
            left_out = tuple(str(name) for name in values["left_out"])
            measured = {str(what): [float(n) for n in numbers] for what, numbers in values.get("measured", {}).items()}
            batch_size = int(values.get("batch_size", BATCH_SIZE))
            return Plan(str(values["cost"]), str(values["mode"]), int(values["blocks"]), levels, heads, left_out,
                        batch_size, measured)  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"this is no plan that `fleetfit plan` saved ({type(error).__name__}: {shown(error, 200)})."
            ) from error


def _level(entry: Mapping[str, Any]) -> PlannedLevel:
    return PlannedLevel(**_typed(PlannedLevel, {**entry, "exits": tuple(int(e) for e in entry["exits"])}))


def _typed(record: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types of a record's fields; whole numbers stand for floats."""
    known = {f.name: f for f in fields(record)}
    needed = {name for name, f in known.items() if f.default_factory is MISSING}
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f'"{shown(unknown[0])}" is no key; there are {", ".join(known)}')
    if not needed <= values.keys():
        raise ValueError(f"expected {', '.join(known)}; got {', '.join(values)}")
    wanted = {name: get_origin(known[name].type) or known[name].type for name in values}
    found = {name: float(v) if wanted[name] is float else v for name, v in values.items()}
    for name, value in found.items():
        kind = wanted[name]
        if isinstance(kind, type) and (not isinstance(value, kind) or isinstance(value, bool)):
            raise TypeError(f'"{name}" must be {kind.__name__}, got {value!r}')
    return found
