"""Choose how each level is computed from `[engine]`: precision, memory format, compilation, and cached features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fleetfit.anatomy import build_module, unwrap
from fleetfit.config.schema import EngineSection, RecordedSection
from fleetfit.core import Level, Problem
from fleetfit.core.arithmetic import NEWEST_RULE, PLAIN, Arithmetic, MemoryFormat, ShapeArithmetic
from fleetfit.core.problem import UNLIMITED
from fleetfit.errors import ConfigError, truncate
from fleetfit.models.family import Family
from fleetfit.seeds import isolate_rng
from fleetfit.training import resolve_device
from fleetfit.training.memory_format import find_view_error
from fleetfit.training.runtime import check_compiler, choose_arithmetic, has_bf16, has_convolutions


@dataclass(frozen=True)
class Computing:
    """How the levels of a run are computed.

    Attributes:
        computed: By shape; empty if all levels are computed in fp32, contiguous and not compiled.
        chosen: The same as text by the level's name, for `recorded.computing`; empty if nothing was chosen.
        memory_format: For `recorded.memory_format`.
        notes: Notes for the user.
    """

    computed: tuple[ShapeArithmetic, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict)
    memory_format: MemoryFormat | None = None
    notes: tuple[str, ...] = ()


def choose_computing(
    section: EngineSection, records: RecordedSection, problem: Problem, levels: Sequence[Level],
    accelerator: torch.device, is_resumed: bool = False,
) -> Computing:  # fmt: skip
    """Choose how the levels are computed: by the keys, else by the recorded choice, else by this machine.

    Args:
        section: `[engine]`.
        records: `[recorded]`.
        problem: With the exits of the levels.
        levels: The run's.
        accelerator: Device that computes most of it.
        is_resumed: Whether the record is of the run itself, whose levels may have changed since then.

    Raises:
        ConfigError: `recorded.computing` has other levels, or a level needs a compiler and there is none.
    """
    fast = section.speed == "fast"
    fixed: dict[str, Any] = {"precision": section.precision, "compile": section.compile}
    rule = None if fast or len(problem.input_shape) != 3 else records.memory_format or NEWEST_RULE
    if len(problem.input_shape) == 3:
        fixed["memory_format"] = section.memory_format or rule
    fixed = {key: value for key, value in fixed.items() if value is not None}
    recorded: dict[str, Arithmetic] = {}
    if fast and records.computing:
        names = [level.name for level in levels]
        if sorted(records.computing) != sorted(names) and not is_resumed:
            raise ConfigError(
                f"[recorded] computing is of levels {', '.join(map(truncate, records.computing))}, but this run has "
                f"{', '.join(names)}. A run writes this key itself: leave it out.",
                key="recorded.computing",
            )
        recorded = {name: Arithmetic.read(text) for name, text in records.computing.items() if name in names}
    arithmetic: dict[str, Arithmetic] = {}
    for level in levels:
        choice = recorded.get(level.name, PLAIN)
        if fast and level.name not in recorded:
            choice = choose_arithmetic(build_level(problem, level), problem.input_shape, accelerator)
        arithmetic[level.name] = replace(choice, **fixed)
    arithmetic = _keep_plain_for_views(section, problem, arithmetic)
    if any(one.compile for one in arithmetic.values()):
        check_compiler(accelerator)
    full = problem.layout.full_sizes
    computed = tuple(
        ShapeArithmetic({**full, **level.submodel.sizes}, level.submodel.exits, arithmetic[level.name])
        for level in levels
    )
    is_plain = all(one == PLAIN for one in arithmetic.values())
    notes: tuple[str, ...] = ()
    if not has_bf16(accelerator) and any(one.precision == "bf16" for one in arithmetic.values()):
        reason = ", as on the machine that started it" if recorded else ""
        notes = (
            f"The run computes in bf16{reason}, and {_NO_BF16}. Emulation is slower than fp32.",
        )  # fmt: skip
    elif fast and not has_bf16(accelerator) and section.precision is None:
        notes = (f'engine.speed = "fast" uses fp32: {_NO_BF16}, and emulation would be slower.',)
    elif fast and is_plain and not problem.features_bytes:  # cached features are faster in any precision
        notes = (
            'engine.speed = "fast" changes nothing: no faster computation is known for this model on this machine.',
        )
    chosen = {name: str(one) for name, one in arithmetic.items()} if fast else {}
    return Computing(() if is_plain else computed, chosen, None if section.memory_format else rule, notes)


_NO_BF16 = "this machine has no bf16 instructions"


def _keep_plain_for_views(
    section: EngineSection, problem: Problem, arithmetic: Mapping[str, Arithmetic]
) -> dict[str, Arithmetic]:
    """Return the plain memory format for all levels if channels-last images cannot pass the model; ours take them.

    Raises:
        ConfigError: The run file asks for channels-last.
    """
    if isinstance(unwrap(problem.architecture), Family) or all(
        one.memory_format == "contiguous" for one in arithmetic.values()
    ):
        return dict(arithmetic)
    with isolate_rng(torch.device("cpu")):
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.layout.exits)
        error = find_view_error(module, problem.input_shape) if has_convolutions(module) else ""
    if not error:
        return dict(arithmetic)
    if section.memory_format == "channels_last":
        raise ConfigError(
            f'[engine] memory_format: "channels_last" does not suit this model. Its forward pass fails: {error} Leave '
            "the key out, or change the module.",
            key="engine.memory_format",
        )
    return {name: replace(one, memory_format="contiguous") for name, one in arithmetic.items()}


def build_level(problem: Problem, level: Level) -> torch.nn.Module:
    """Return the module of a level on the meta device: shapes only."""
    sizes = {**problem.layout.full_sizes, **level.submodel.sizes}
    with torch.device("meta"):
        return build_module(problem.architecture, sizes, level.submodel.exits)


def set_feature_cache(problem: Problem, section: EngineSection) -> Problem:
    """Set the memory for cached features of a frozen backbone; 0 without a backbone."""
    if not problem.base:
        return problem
    size = section.feature_cache_bytes
    if size is None:
        size = UNLIMITED if section.speed == "fast" else 0.0
    return problem.replace_features_bytes(size)


def find_server_device(section: EngineSection) -> torch.device:
    """Return the server's device: the engine's device if this machine has it, else the CPU."""
    name = section.settings.get("device", "cpu")
    try:
        return resolve_device(name if isinstance(name, str) else "cpu")
    except ConfigError:  # the engine reports it when a run starts
        return torch.device("cpu")
