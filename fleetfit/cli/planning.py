"""What `plan` shows: from the options of the command line to plans."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from fleetfit import names
from fleetfit.config import Assembly, assemble
from fleetfit.config.fleet import counted_piece
from fleetfit.config.naming import architecture_of
from fleetfit.config.reading import override
from fleetfit.cost import BATCH_SIZE, Conditions, Latency, Timed, kind_of
from fleetfit.errors import ConfigError, PlanError
from fleetfit.layout import Architecture
from fleetfit.planner import Mode, Plan, make_plan

_IMAGE = (3, 32, 32)
TOKENS = (32,)
"""The shape of a sample of a token model, where none is given."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan --model`, as typed; the defaults are those of the command line."""

    model: str | None = None
    budgets: str = "0.125,0.25,0.5,1"
    cost: str = "parameters"
    tolerance: float = 0.1
    mode: str | None = None
    levels: str = "cluster"
    exits: str | None = None
    widths: str | None = None
    classes: int = 10
    input_shape: str | None = None
    strict: bool = False
    also: str | None = None
    batch_size: int = BATCH_SIZE

    def changed(self) -> list[str]:
        """Return the options, as typed, that say something else than their defaults."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class Shown:
    """A plan as it is shown.

    Attributes:
        plan: The plan.
        title: For whom it is.
        models: The sub-model of each of its levels as it is counted, and behind them the full model.
        notes: What is to be known beforehand.
        latencies: Of its models, where they were measured.
        how: What is to be known of these.
    """

    plan: Plan
    title: str
    models: tuple[Timed, ...] = ()
    notes: tuple[str, ...] = ()
    latencies: tuple[Latency, ...] = ()
    how: tuple[str, ...] = ()


def of_run_file(file: Path | None, overrides: Sequence[str]) -> list[Shown]:
    """Return the plan of a run file's method; of a file that compares, that of each row that has another."""
    from fleetfit.api import runs
    from fleetfit.api.compare import list_plans
    from fleetfit.api.runs import described

    asked = described(file, overrides)
    if file is not None and asked.compare.is_set:
        return [
            Shown(assembly.plan, _title(assembly, rows), _models(assembly))
            for rows, assembly in list_plans(file, overrides)
        ]
    assembly = assemble(asked)
    runs.check_asked(assembly.unused, asked)
    notes = (*runs.gone(asked), *map(str, assembly.unused))
    return [Shown(assembly.plan, _title(assembly), _models(assembly), notes)]


def _title(assembly: Assembly, rows: Sequence[str] = ()) -> str:
    name, data = assembly.experiment.method.name, assembly.data.name
    who = f"{', '.join(rows)}: " if rows else ""
    return f"{who}{name} on {data}, {len(assembly.fleet.group)} clients"


def _models(assembly: Assembly) -> tuple[Timed, ...]:
    problem = assembly.federation.problem
    pieces = [counted_piece(problem, level) for level in assembly.federation.levels]
    return _timed(problem.architecture, [(piece.sizes, piece.exits) for piece in pieces], problem.input_shape)


def _timed(
    architecture: Architecture,
    pieces: Sequence[tuple[Mapping[str, int], tuple[int, ...]]],
    shape: tuple[int, ...],
) -> tuple[Timed, ...]:
    """Return sub-models by sizes and exits, and behind them the full model without early classifiers."""
    whole = architecture.sizes(1.0)
    every = [*pieces, (whole, (architecture.blocks,))]
    return tuple(Timed(architecture, {**whole, **sizes}, exits, shape) for sizes, exits in every)


def of_model(asked: PlanOptions, overrides: Sequence[str]) -> Shown:
    """Return the plan for a model and budgets."""
    assert asked.model is not None
    shape = shape_of(asked.input_shape) if asked.input_shape else _usual_shape(asked.model)
    architecture = model_of(asked.model, asked.classes, shape, overrides)
    if asked.mode not in (None, "both", "width", "depth"):
        raise ConfigError(f'--mode must be both, width or depth, got "{asked.mode}".')
    named = asked.levels in ("cluster", "halving")

    def planned(mode: str) -> Plan:
        return make_plan(
            architecture,
            shape,
            numbers(asked.budgets, "--budgets"),
            asked.tolerance,
            asked.levels if named else numbers(asked.levels, "--levels"),
            asked.cost,
            cast(Mode, mode),
            asked.strict,
            None if asked.exits is None else [int(e) for e in numbers(asked.exits, "--exits")],
            None if asked.widths is None else numbers(asked.widths, "--widths"),
            () if asked.also is None else costs_of(asked.also),
            Conditions(asked.batch_size),
        )

    notes = []
    try:
        found = planned(asked.mode or "both")
    except PlanError as error:
        if asked.mode is not None or error.mode is None:
            raise
        notes = [f"No depths and widths fit within {asked.tolerance:g}, so levels differ in {error.mode} alone; --mode "
                 "both says why."]  # fmt: skip
        found = planned(error.mode)
    title = f"{asked.model}, samples of {' x '.join(map(str, shape))}, {asked.classes} classes"
    pieces = [(architecture.sizes(level.width), level.exits) for level in found.levels[:-1]]
    pieces.append((architecture.sizes(1.0), (architecture.blocks,)))  # as which the last level is counted
    return Shown(found, title, _timed(architecture, pieces, shape), tuple(notes))


def _usual_shape(model: str) -> tuple[int, ...]:
    """Return the shape of a sample where none is given: tokens for a model that has a vocabulary, else an image."""
    return TOKENS if "vocabulary" in inspect.signature(names.resolve("models", model)).parameters else _IMAGE


def costs_of(text: str) -> tuple[str, ...]:
    """Return the names of costs separated by commas.

    Raises:
        ConfigError: There is no such cost.
    """
    found = tuple(part.strip() for part in text.split(","))
    for cost in found:
        kind_of(cost)
    return found


def model_of(name: str, classes: int, shape: tuple[int, ...], overrides: Sequence[str]) -> Architecture:
    """Return an architecture from the command line."""
    settings = model_settings(overrides)
    return architecture_of(name, settings, classes=classes, channels=shape[0], input_shape=shape)


def model_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys of the model that --set sets.

    Raises:
        ConfigError: One of them sets something else.
    """
    settings: dict[str, Any] = {}
    for text in overrides:
        change = override(text)
        if set(change) != {"model"} or not isinstance(change["model"], dict):
            raise ConfigError(f'here --set sets keys of the model, such as --set model.depth=20; got "{text}".')
        settings |= change["model"]
    return settings


def shape_of(text: str | None) -> tuple[int, ...]:
    """Return a shape from "3,32,32"; that of an image where there is none."""
    found = _IMAGE if text is None else tuple(int(n) for n in numbers(text, "--input-shape"))
    if min(found) < 1:
        raise ConfigError(f'--input-shape takes sizes of at least 1, got "{text}".')
    return found


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Return numbers separated by commas.

    Raises:
        ConfigError: Something else is there.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f'{option} takes numbers separated by commas, got "{text}".') from None
