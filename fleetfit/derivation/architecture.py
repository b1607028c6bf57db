"""The architecture that is derived from an instance."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fleetfit.derivation.copies import copy_level
from fleetfit.derivation.exits import ExitHead, ModuleWithExits
from fleetfit.derivation.labels import list_tensors
from fleetfit.derivation.observe import list_aliases
from fleetfit.derivation.plan import DerivedPlan, ExitPoint, Segments
from fleetfit.derivation.units import CLASSES, get_length
from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Axis, Layout, Segment, TensorLayout, batch_norms, named_tensors

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
INSIDE = "net."
"""The prefix of the instance's tensors in a level."""


class DerivedArchitecture(Architecture):
    """The levels of an instance. A level starts from the instance's own weights.

    Args:
        net: The instance; it is never changed.
        plan: What was derived from it.
    """

    falls_back_to_width = True
    """Levels differ in width alone where no depths fit: its exits were found, not made for a method."""

    def __init__(self, net: nn.Module, plan: DerivedPlan) -> None:
        self.net, self.plan = net, plan
        self.axes: Mapping[str, Axis] = {
            axis: Axis(n, scaled=axis != CLASSES, ordered=axis in plan.ordered) for axis, n in plan.axes.items()
        }
        self.blocks, self.tokens = len(plan.exits) + 1, plan.vocabulary

    def __repr__(self) -> str:
        return f"{type(self.net).__name__} (derived: {len(self.axes)} axes, {self.blocks} exits)"

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Block counts after which a classifier may sit; the last is the instance's own classifier."""
        return tuple(range(1, self.blocks + 1))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return a level with these units of each axis and classifiers after these block counts.

        Raises:
            ModelError: An axis is larger than in the instance.
        """
        for axis, size in axes.items():
            if size > self.plan.axes[axis]:
                raise ModelError(f'axis "{axis}" has {self.plan.axes[axis]} units in the instance, not {size}.', key=axis)
        net = copy_level(self.net, self.plan, axes, self._list_absent(exits[-1]))
        points = self.plan.exits
        heads = {e: self._make_head(points[e - 1], axes) for e in self._list_added(exits)}
        return ModuleWithExits(net, exits, points, heads).train()

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained: all but those of the instance without `requires_grad`."""
        return name not in self._frozen

    def find_layout(self, exits: tuple[int, ...], base: frozenset[str]) -> Layout:
        """Return the layout of the model with these exits.

        Args:
            exits: Block counts.
            base: Names of tensors that are never trained and are not sent.
        """
        norms = batch_norms(self.net)
        absent, aliases = self._list_absent(exits[-1]), list_aliases(self.net)
        parts: dict[bool, dict[str, TensorLayout]] = {True: {}, False: {}}
        for name, tensor, is_parameter in named_tensors(self.net):
            owner, _, leaf = name.rpartition(".")
            if name in absent or name in aliases or (owner in norms and leaf in _STATISTICS):
                continue
            dims = tuple(
                self.plan.segments.get((name, d), (Segment(None, size),)) for d, size in enumerate(tensor.shape)
            )
            full_name = f"{INSIDE}{name}"
            is_sent = full_name not in base and self.trains(full_name)
            parts[is_sent][full_name] = TensorLayout(dims, self.plan.blocks.get(name) or None, None, is_parameter)
        for e in self._list_added(exits):
            for name, dims in self._list_head_dims(e).items():
                parts[name not in base][name] = TensorLayout(dims, None, e, True)
        sent = {f"{INSIDE}{name}": f"{INSIDE}{other}" for name, other in aliases.items() if name not in absent}
        return Layout(dict(self.axes), exits, parts[True], sent, parts[False])

    def describe(self) -> list[str]:
        """Return sentences on exits, axes, and what stays whole and why."""
        plan, name = self.plan, type(self.net).__name__
        ends = [point.module for point in plan.exits]
        own = "its own early logits" if any(point.is_own for point in plan.exits) else f"early exits after {', '.join(ends)}"
        exits = f"{own}, and its own classifier" if ends else "one exit, its own classifier"
        scaled = [axis for axis in plan.axes if axis != CLASSES]
        sentences = [f"The levels of {name} are derived: {len(scaled)} axes of width; {exits}."]
        if plan.whole:
            axis, (size, reason) = next(iter(plan.whole.items()))
            more = f", and {len(plan.whole) - 1} more (fleetfit check-model lists them)" if len(plan.whole) > 1 else ""
            sentences.append(f"Whole at every level: {axis} ({size}): {reason}{more}.")
        return sentences

    def _list_added(self, exits: tuple[int, ...]) -> list[int]:
        """Return the exits that have a classifier which the instance has not."""
        points = self.plan.exits
        return [e for e in exits if e <= len(points) and not points[e - 1].is_own]

    def _make_head(self, point: ExitPoint, axes: Mapping[str, int]) -> ExitHead:
        channels = get_length(point.segments, {**self.plan.axes, **axes})
        each_place = self.plan.next_tokens and point.dims == 3 and point.channels == 2
        return ExitHead(channels, self.plan.classes, point.channels, each_place)

    def _list_head_dims(self, e: int) -> dict[str, tuple[Segments, ...]]:
        inner = self.plan.exits[e - 1].segments
        classes = (Segment(CLASSES),) if CLASSES in self.axes else (Segment(None, self.plan.classes),)
        dims = {"norm.weight": (inner,), "norm.bias": (inner,), "fc.weight": (classes, inner), "fc.bias": (classes,)}
        return {f"heads.{e}.{name}": some for name, some in dims.items()}

    def _list_absent(self, last: int) -> frozenset[str]:
        """Return the tensors behind an exit."""
        return frozenset(name for name, block in self.plan.blocks.items() if block >= last)

    @cached_property
    def _frozen(self) -> frozenset[str]:
        return frozenset(f"{INSIDE}{name}" for name, p in self.net.named_parameters() if not p.requires_grad)


def check_same_as_instance(architecture: DerivedArchitecture, example: torch.Tensor) -> None:
    """Compare the full model with the instance, bit for bit.

    Raises:
        ModelError: They differ.
    """
    from fleetfit.derivation.copies import copy_instance
    from fleetfit.derivation.observe import get_logits

    net = copy_instance(architecture.net).eval()
    full = architecture.build(architecture.plan.axes, (architecture.blocks,)).eval()
    with torch.no_grad():
        expected, logits = get_logits(net(example)), full(example)[-1]
    if not torch.equal(expected, logits):
        raise ModelError(
            f"a copy of the {type(net).__name__} computes other logits than the instance. Its forward depends on "
            "something that is not copied, such as a random number or a global variable.",
            key="model",
        )


def list_shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and buffer."""
    return {name: tuple(tensor.shape) for name, tensor in list_tensors(net)}


def find_mismatch(net: nn.Module, plan: DerivedPlan) -> str:
    """Return how an instance differs from the one of a plan; "" where it does not."""
    shapes: Mapping[str, Any] = list_shapes(net)
    for name in {**plan.tensors, **shapes}:
        if shapes.get(name) != plan.tensors.get(name):
            return f'"{name}" has shape {shapes.get(name)} here, and {plan.tensors.get(name)} in the plan'
    return ""
