"""Derive levels, exits and their proof from a plain module: an instance is enough.

1. `observe` runs the instance once, with labels on all parameters (`labels`), and finds units and axes (`units`).
2. `numbers` finds which numbers in its modules depend on sizes, by trials; what does not run stays whole.
3. `exits` finds a chain of blocks, and puts classifiers after them.
4. `plan` is what came out, as plain values; `copies` builds a level from it, `derived` makes it an `Architecture`.
5. The full model must equal the instance bit for bit, and the layout is proved as any other (`fleetfit.anatomy.proof`).
"""

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy.copies import (
    build_without_numbers as build_without_numbers,
    copy_all_but_parameters,
    copy_instance as copy_instance,
    find_drawn_constants as find_drawn_constants,
)
from fleetfit.anatomy.derived import (
    DerivedArchitecture as DerivedArchitecture,
    check_full_model,
    find_mismatch,
)
from fleetfit.anatomy.exits import find_exits, find_tail
from fleetfit.anatomy.fitting import (
    SampleFacts as SampleFacts,
    find_facts as find_facts,
    find_replaced_linear as find_replaced_linear,
    fit_instance as fit_instance,
    prepare_instance as prepare_instance,
    replace_linear,
)
from fleetfit.anatomy.labels import Reason, list_tensors
from fleetfit.anatomy.masks import InputMask as InputMask
from fleetfit.anatomy.norms import find_kept_norms
from fleetfit.anatomy.numbers import Trials
from fleetfit.anatomy.observe import Observation, list_aliases, observe
from fleetfit.anatomy.padding import list_masks as list_masks
from fleetfit.anatomy.plan import DerivedPlan as DerivedPlan
from fleetfit.anatomy.proof import check_layout, make_reporter, make_sample_levels
from fleetfit.anatomy.units import CLASSES, Units
from fleetfit.errors import ModelError, did_you_mean, format_cause, quote_some, release_frames
from fleetfit.machine import isolate_torch_state
from fleetfit.seeds import isolate_rng
from fleetfit.submodel import Submodel

WHOLE = "whole"
"""In the place of an axis's name: it is not cut."""
_MAX_CHOICES = 24  # of what numbers mean, that are proved


@isolate_torch_state()
def derive_architecture(
    net: nn.Module,
    example: Tensor,
    exits: str | Sequence[str] = "auto",
    axes: Mapping[str, str] | None = None,
    heads: str = "auto",
    say: Callable[[str], None] | None = None,
    mask: InputMask | None = None,
    samples: Tensor | None = None,
) -> DerivedArchitecture:
    """Derive the levels of an instance, and prove them.

    Args:
        net: The instance; its weights, modes and hooks stay as they are.
        example: At least two samples [batch, ...].
        exits: See `find_exits`.
        axes: By pattern of axis names another name, or "whole" for axes that are not cut. Axes that get the same name
            are cut as one.
        heads: See `find_tail`.
        say: Called with a sentence from time to time, where it takes long.
        mask: Its mask for padding.
        samples: Samples for the proofs; by default noise is drawn.

    Raises:
        ModelError: It cannot be run or followed, or a level would compute something else.
    """
    now = make_reporter(f"Deriving the levels of {type(net).__name__}", say)
    net, example = copy_all_but_parameters(net), example[:2].clone()
    observation = observe(net, example, mask)
    names = _apply_axes(observation.units, axes or {})
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    kept = find_kept_norms(net, trained.__contains__)
    while True:
        trials = Trials(observation, now)
        depth = _find_depth(observation, exits, heads) | {"kept": kept}
        errors: list[ModelError] = []
        for plan in trials.list_plans(_MAX_CHOICES):  # each is found when the one before it fails
            now(f"the proof of plan {len(errors) + 1}")
            try:
                derived = prove_plan(net, replace(plan, **depth).rename_axes(names), example, say, samples)
            except ModelError as error:
                release_frames(error)
                errors.append(error)
            else:
                _check_unused(derived, example)
                derived.net = copy_instance(net)  # now, since the proof needs the memory
                return derived
        roles, likeliest = trials.group_roles(), replace(trials.make_plan(), **depth)
        failing = []
        for role in roles:
            now(f"the proof with {role[0]} alone")
            try:
                others = dict.fromkeys(axis for axis in likeliest.axes if axis not in (*role, CLASSES))
                prove_plan(net, likeliest.rename_axes(others), example, samples=samples)
            except ModelError:
                failing.append(role)
        if not failing and len(roles) > 1:
            raise ModelError(
                f"a narrower {type(net).__name__} computes something else where {', '.join(role[0] for role in roles)} "
                "are cut together, though not where one of them is. Does forward compare sizes, as in x.shape == "
                "y.shape? Sizes that differ here may be equal at another width. Decide by what does not depend on the "
                "width, such as the number of the block.",
                key="model",
            ) from errors[0]
        if not failing or len(failing) == len(roles) == 1:
            raise errors[0]
        for axis in [axis for role in failing for axis in role]:
            observation.units.fix(axis, Reason("a narrower model computes something else"))
        observation.units.settle()


def restore_architecture(net: nn.Module, payload: Any, head: str = "") -> DerivedArchitecture:
    """Return the architecture of another instance like the one from which a plan was derived.

    Args:
        net: The instance, which nothing else may change.
        payload: The plan, as `DerivedPlan.to_payload` returns it.
        head: The name of the linear layer that was replaced by one with the data's classes, if one was.

    Raises:
        ModelError: The plan is damaged or of another version, or the instance has other tensors.
    """
    plan = DerivedPlan.from_payload(payload)
    if head:
        replace_linear(net, head, plan.classes)
    if mismatch := find_mismatch(net, plan):
        raise ModelError(
            f"this {type(net).__name__} is not the module from which the levels were derived: {mismatch}. Use the same "
            "code and arguments on all machines.",
            key="model.name",
        )
    return DerivedArchitecture(net, plan)


def prove_plan(
    net: nn.Module,
    plan: DerivedPlan,
    example: Tensor,
    say: Callable[[str], None] | None = None,
    samples: Tensor | None = None,
) -> DerivedArchitecture:
    """Prove a plan with all its exits and depths; return its architecture.

    Args:
        net: The instance.
        plan: Its plan.
        example: At least two samples [batch, ...].
        say: Called with each step of a long proof.
        samples: Samples for the proof; by default noise is drawn.

    Raises:
        ModelError: Its full model is not the instance, or a level would compute something else.
    """
    architecture = DerivedArchitecture(net, plan, samples=samples)
    check_full_model(architecture, example)
    layout = architecture.find_layout(architecture.positions, frozenset())
    levels = [Submodel(level.channels, layout.exits) for level in make_sample_levels(architecture, layout)]
    shape = tuple(example.shape[1:])
    architecture.report = check_layout(architecture, layout, levels, input_shape=shape, say=say)
    return architecture


def _check_unused(architecture: DerivedArchitecture, example: Tensor) -> None:
    """Refuse parameters that training alone uses: a level has them whole, and everything else is narrow."""
    unused, axes = architecture.plan.unused, architecture.axes
    if not unused:
        return
    half = {name: max(1, axis.size // 2) if axis.scaled else axis.size for name, axis in axes.items()}
    error = _train_once(architecture, half, example)
    if error is not None and _train_once(architecture, architecture.plan.axes, example) is None:
        raise ModelError(
            f"a narrow level does not train: {format_cause(error, typed=True).rstrip('.')}. Training uses "
            f"{quote_some(sorted(unused), 4)}, which evaluation does not, so that no axis is known of them. Switch "
            "this off in the model's configuration (such as mask_time_prob = 0), or remove the parameters.",
            key="model",
        ) from error


def _train_once(architecture: DerivedArchitecture, sizes: Mapping[str, int], example: Tensor) -> Exception | None:
    """Run a level of these sizes in training mode; return its error, if there is one."""
    try:
        with isolate_rng(example.device, 0), torch.no_grad():
            architecture.build(sizes, (architecture.blocks,)).train()(example)
    except Exception as error:  # other people's code may fail in any way
        return error
    return None


def _find_depth(observation: Observation, exits: str | Sequence[str], heads: str) -> dict[str, Any]:
    """Return the exits, what they share, and the number of exits before the first use of each tensor."""
    points = find_exits(observation, exits)
    tail = find_tail(observation, points, heads)
    steps = [observation.outputs[point.module].step for point in points]
    blocks = {name: sum(step > end for end in steps) for name, step in observation.first_use.items()}
    aliases = list_aliases(observation.net)
    blocks |= {name: blocks[first] for name, first in aliases.items() if first in blocks}
    by_module: dict[str, list[int]] = defaultdict(list)
    for name, block in blocks.items():
        by_module[name.rpartition(".")[0]].append(block)
    for name, _ in list_tensors(observation.net):  # what the pass did not use, such as a batch norm's counter
        if others := by_module.get(name.rpartition(".")[0]):
            blocks.setdefault(name, min(others))
    blocks |= {name: 0 for name in blocks if name.rpartition(".")[0] in tail}
    return {"exits": points, "blocks": blocks, "tail": tail}


def _apply_axes(units: Units, axes: Mapping[str, str]) -> dict[str, str]:
    """Fix excluded axes, and merge those of one new name; return the new names by axis."""
    groups: dict[str, list[str]] = {}
    left = units.scaled
    for pattern, name in axes.items():
        matching = [axis for axis in units.scaled if fnmatch.fnmatchcase(axis, pattern)]
        if not matching:
            raise ModelError(
                f'axes: no axis matches "{pattern}".{did_you_mean(pattern, units.scaled)} The axes are '
                f"{', '.join(units.scaled)}.",
                key="derive.axes",
            )
        if not set(matching) & set(left):
            raise ModelError(
                f'axes: patterns before "{pattern}" match all of its axes, and the first one counts. Put "{pattern}" '
                "before them.",
                key="derive.axes",
            )
        groups.setdefault(name, []).extend(axis for axis in left if axis in matching)
        left = [axis for axis in left if axis not in matching]
    for name, members in groups.items():
        members += [name] if name in left else []
        sizes = ", ".join(f"{axis} {len(units.axes[axis])}" for axis in members)
        if name == CLASSES or (name != WHOLE and len({len(units.axes[axis]) for axis in members}) > 1):
            raise ModelError(
                f'axes: "{name}" would be one axis of different sizes or uses: {sizes}. Give them different names.',
                key="derive.axes",
            )
        for axis in members:
            if name == WHOLE:
                units.fix(axis, Reason("it is excluded by axes"))
            elif axis != members[0]:
                units.merge(members[0], axis)
    units.settle()
    return {axis: name for name, members in groups.items() for axis in members if name != WHOLE}
