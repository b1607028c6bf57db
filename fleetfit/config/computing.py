"""How a run computes: `[engine] speed` and the finer keys beside it become what each level is computed with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fleetfit.config.schema import EngineSection
from fleetfit.errors import ConfigError, truncate
from fleetfit.layout import build_module
from fleetfit.training.speed import check_compiler, has_bf16, has_convolutions, paying
from fleetfit.values import Level, Problem
from fleetfit.values.arithmetic import PLAIN, Arithmetic, Computed


@dataclass(frozen=True)
class Computing:
    """How the levels of a run are computed.

    Attributes:
        computed: By shape; empty where all of it is as always.
        chosen: The same as words by level's name, to stand in the run's configuration; empty where nothing was chosen.
        notes: What the user should know of it.
    """

    computed: tuple[Computed, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def computing(
    section: EngineSection, problem: Problem, levels: Sequence[Level], accelerator: torch.device
) -> Computing:
    """Return how the levels are computed: as the finer keys say, as was chosen before, or as pays.

    Args:
        section: `[engine]`.
        problem: With the exits of the levels.
        levels: The run's.
        accelerator: Where most of it is computed; what it can do decides.

    Raises:
        ConfigError: What was chosen is of other levels, or there is no compiler for what is to be compiled.
    """
    fast = section.speed == "fast"
    finer: dict[str, Any] = {"precision": section.precision, "compile": section.compile}
    if not fast and section.model_fields_set.isdisjoint((*finer, "memory_format")):
        return Computing()
    modules = [build_level(problem, level) for level in levels]
    if any(map(has_convolutions, modules)):
        finer["memory_format"] = section.memory_format
    finer = {key: value for key, value in finer.items() if value is not None}
    before = _chosen_before(section.chosen, levels) if fast else {}
    found = {}
    for level, module in zip(levels, modules, strict=True):
        own = before.get(level.name) or (paying(module, problem.input_shape, accelerator) if fast else PLAIN)
        found[level.name] = replace(own, **finer)
    if any(one.compile for one in found.values()):
        check_compiler(accelerator)
    full = problem.layout.full_sizes
    computed = tuple(
        Computed({**full, **level.submodel.sizes}, level.submodel.exits, found[level.name]) for level in levels
    )
    chosen = {name: str(one) for name, one in found.items()} if fast else {}
    notes = _notes(section, list(found.values()), bool(before), accelerator)
    if problem.features_bytes:  # kept whatever the arithmetic
        notes = [note for note in notes if note != _NOTHING]
    return Computing(computed if any(one != PLAIN for one in found.values()) else (), chosen, tuple(notes))


def build_level(problem: Problem, level: Level) -> torch.nn.Module:
    """Return the module of a level on the meta device: shapes only."""
    sizes = {**problem.layout.full_sizes, **level.submodel.sizes}
    with torch.device("meta"):
        return build_module(problem.architecture, sizes, level.submodel.exits)


def _chosen_before(chosen: Mapping[str, str], levels: Sequence[Level]) -> dict[str, Arithmetic]:
    names = [level.name for level in levels]
    if chosen and sorted(chosen) != sorted(names):
        raise ConfigError(
            f"[engine] chosen is of levels {', '.join(map(truncate, chosen))}, and this run has {', '.join(names)}. "
            "A run writes it; leave it out to have it chosen anew."
        )
    return {name: Arithmetic.read(text) for name, text in chosen.items()}


_NOTHING = 'engine.speed = "fast" changes nothing: for this model nothing is known that pays on this machine.'


def _notes(section: EngineSection, found: list[Arithmetic], before: bool, accelerator: torch.device) -> list[str]:
    """Say what of a speed this machine cannot do, or what of it has no effect."""
    lacks = "this machine has no bf16 instructions"
    half, able = any(one.precision == "bf16" for one in found), has_bf16(accelerator)
    if half and not able:
        why = ", as it did where it began" if before else ""
        return [f"The run computes in bf16{why}, and {lacks}: they are emulated, which is slower than fp32."]
    if section.speed == "fast" and not able and section.precision is None:
        return [f'engine.speed = "fast" keeps to fp32: {lacks}, and emulating them would be slower.']
    if section.speed == "fast" and all(one == PLAIN for one in found):
        return [_NOTHING]
    return []
