"""The architecture that is derived from an instance."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fleetfit.anatomy import (
    Architecture,
    Axis,
    Layout,
    Segment,
    State,
    TensorLayout,
    batch_norms,
    explain_errors,
    get_length,
    list_vectors,
    named_tensors,
)
from fleetfit.anatomy.copies import copy_instance, copy_level, get_number
from fleetfit.anatomy.exits import ExitHead, ModuleWithExits
from fleetfit.anatomy.kernels import skip_fast_path
from fleetfit.anatomy.known_values import iter_tensors
from fleetfit.anatomy.labels import list_tensors
from fleetfit.anatomy.logits import get_logits
from fleetfit.anatomy.masks import call_instance
from fleetfit.anatomy.meta import Watching
from fleetfit.anatomy.norms import STATISTICS, find_kept_norms, is_trained, iter_norms
from fleetfit.anatomy.observe import list_aliases
from fleetfit.anatomy.plan import DerivedPlan, Segments
from fleetfit.anatomy.proof import LayoutReport
from fleetfit.anatomy.units import CLASSES
from fleetfit.errors import ModelError, join_some, quote_some, truncate
from fleetfit.seeds import isolate_rng

_NUMBER = re.compile(r"(?<![\w:])\d+(?![\w])")  # but lines of code, as in net.py:12
_MAX_LISTED = 3
AXIS_COLUMNS = ("axis", "axes", "units", "elements", "cut", "lives in")
INSIDE = "net."
"""The prefix of the instance's tensors in a level."""


class DerivedArchitecture(Architecture):
    """The levels of an instance. A level starts from the instance's own weights.

    Args:
        net: The instance; it is never changed.
        plan: What was derived from it.
        report: Its proof, where it was made in this process.
        samples: Samples of the training data, for proofs; None where there are none here. They are in no plan.
    """

    padding_change = 0.0
    """By how much the logits of a text change beside a longer one, of their size, where padding cannot be masked."""

    falls_back_to_width = True
    """Levels differ in width alone where no depths fit: its exits were found, not made for a method."""

    def __init__(
        self,
        net: nn.Module,
        plan: DerivedPlan,
        report: LayoutReport | None = None,
        samples: torch.Tensor | None = None,
    ) -> None:
        self.net, self.plan, self.report, self.samples = net, plan, report, samples
        first_blocks = plan.find_first_blocks()
        self.axes: Mapping[str, Axis] = {
            axis: Axis(n, scaled=axis != CLASSES, block=first_blocks[axis], ordered=axis in plan.ordered)
            for axis, n in plan.axes.items()
        }
        self.blocks, self.tokens = len(plan.exits) + 1, plan.vocabulary

    def __repr__(self) -> str:
        return f"{type(self.net).__name__} (derived: {len(self.axes)} axes, {self.blocks} exits)"

    def __str__(self) -> str:
        """Return the table of axes, the exits, and what stays whole and why."""
        rows = [AXIS_COLUMNS, *self.list_axes()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(AXIS_COLUMNS) - 1)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
        lines = [repr(self), *(f"  {line}" for line in lines), *self.describe_exits(), *self.describe_whole()]
        return "\n".join(lines)

    def list_axes(self) -> list[tuple[str, ...]]:
        """Return a row of `AXIS_COLUMNS` for the axes of each role; names are patterns that `axes` takes."""
        homes: dict[str, list[tuple[str, int, int]]] = {axis: [] for axis in self.axes}
        for (name, d), segments in self.plan.segments.items():
            for axis in dict.fromkeys(s.axis for s in segments if s.axis is not None):
                homes[axis].append((name, d, sum(s.per for s in segments if s.axis == axis)))
        roles: dict[tuple[Any, ...], list[str]] = {}
        for axis, places in homes.items():
            roles.setdefault((_generalize(axis), tuple((_generalize(n), d, per) for n, d, per in places)), []).append(
                axis
            )
        rows: list[tuple[str, ...]] = []
        for (pattern, places), axes in roles.items():
            sizes = sorted({self.axes[axis].size for axis in axes})
            units = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            listed = list(dict.fromkeys(f"{name}[{d}]" for name, d, _ in places))
            name = axes[0] if len(axes) == 1 else pattern
            cut = "never cut" if axes == [CLASSES] else "first ones" if axes[0] in self.plan.ordered else "any"
            rows.append((name, str(len(axes)), units, str(places[0][2]), cut, join_some(listed, _MAX_LISTED)))
        return rows

    def describe_exits(self) -> list[str]:
        """Return a sentence on the exits."""
        ends = [point.module for point in self.plan.exits]
        if not ends:
            return ["One exit: its own classifier. Name modules in exits for early ones."]
        after = f"after {', '.join(ends)}; then its own classifier."
        if self.plan.tail:
            return [f"{len(ends) + 1} exits, which share {' and '.join(self.plan.tail)}: {after}"]
        own = "its own early logits" if self.plan.exits[0].is_own else "new classifiers"
        return [f"{len(ends) + 1} exits: {own} {after}"]

    def describe_whole(self) -> list[str]:
        """Return a line for what stays whole at every level, and why."""
        lines: dict[str, None] = {}
        for axis, (size, reason) in self.plan.whole.items():
            lines.setdefault(f"Whole at every level: {_generalize(axis)} ({size}): {_generalize(reason)}.")
        return list(lines)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Block counts after which a classifier may sit; the last is the instance's own classifier."""
        return tuple(range(1, self.blocks + 1))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> ModuleWithExits:
        """Return a level with these units of each axis and classifiers after these block counts.

        Raises:
            ModelError: An axis is larger than in the instance.
        """
        for axis, size in axes.items():
            if size > self.plan.axes[axis]:
                raise ModelError(
                    f'axis "{axis}" has {self.plan.axes[axis]} units in the instance, not {size}.', key=axis
                )
        net = copy_level(self.net, self.plan, axes, self.list_absent(exits[-1]))
        for name, parameter in net.named_parameters():
            if name in self.plan.unused:
                parameter.requires_grad_(False)
        heads = {}
        for e in self._list_added(exits):
            point = self.plan.exits[e - 1]
            channels = get_length(point.segments, {**self.plan.axes, **axes})
            each_place = self.plan.next_tokens and point.dims == 3 and point.channels == 2
            heads[e] = ExitHead(channels, self.plan.classes, point.channels, each_place)
        samples = self.samples if torch.get_default_device().type == "meta" else None  # no model keeps them
        return ModuleWithExits(net, exits, heads, self.plan, samples).train()

    @property
    def checkpoint(self) -> str:
        """Where its weights come from."""
        return f"the weights of this {type(self.net).__name__}"

    def pretrained(self, exits: tuple[int, ...]) -> State:
        """Return the instance's own weights, if it has numbers; new classifiers are drawn."""
        names = self.find_layout(exits, frozenset()).complete.tensors
        values = {f"{INSIDE}{name}": tensor for name, tensor, _ in named_tensors(self.net) if not tensor.is_meta}
        return {name: values[name].detach().clone() for name in names if name in values}

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained: all but those without `requires_grad`, and statistics that are kept."""
        return name not in self._frozen

    def find_layout(self, exits: tuple[int, ...], base: frozenset[str]) -> Layout:
        """Return the layout of the model with these exits.

        Args:
            exits: Block counts.
            base: Names of tensors that are never trained and are not sent.
        """
        norms, vectors = batch_norms(self.net).keys() - self.plan.kept, list_vectors(self.net)
        absent, aliases = self.list_absent(exits[-1]), list_aliases(self.net)
        of_classes = {name for (name, _), dim in self.plan.segments.items() if any(s.axis == CLASSES for s in dim)}
        parts: dict[bool, dict[str, TensorLayout]] = {True: {}, False: {}}
        for name, tensor, is_parameter in named_tensors(self.net):
            owner, _, leaf = name.rpartition(".")
            if name in absent or name in aliases or name in vectors or (owner in norms and leaf in STATISTICS):
                continue
            dims = tuple(
                self.plan.segments.get((name, d), (Segment(None, size),)) for d, size in enumerate(tensor.shape)
            )
            full_name = f"{INSIDE}{name}"
            is_sent = full_name not in base and self.trains(full_name)
            block = self.plan.blocks.get(name)
            is_classifier = name in of_classes and block == len(self.plan.exits)
            block, e = (None, self.blocks) if is_classifier else (block or None, None)
            parts[is_sent][full_name] = TensorLayout(dims, block, e, is_parameter)
        for e in self._list_added(exits):
            for name, dims in self._list_head_dims(e).items():
                parts[name not in base][name] = TensorLayout(dims, None, e, True)
        sent = {f"{INSIDE}{name}": f"{INSIDE}{other}" for name, other in aliases.items() if name not in absent}
        return Layout(dict(self.axes), exits, parts[True], sent, parts[False])

    def describe(self) -> list[str]:
        """Return sentences for the first lines of a run."""
        scaled, whole = len(self.axes) - (CLASSES in self.axes), self.describe_whole()
        axes = "one axis" if scaled == 1 else f"{scaled or 'no'} axes"
        sentences = [f"The levels of {type(self.net).__name__} are derived: {axes} of width."]
        sentences += self.describe_exits()
        if whole:
            more = f" {len(whole) - 1} more: `fleetfit check-model` lists them." if len(whole) > 1 else ""
            sentences.append(whole[0] + more)
        if self.plan.mask is not None and self.plan.mask.argument:
            sentences.append(f"forward gets {self.plan.mask.argument} for padding.")
        if self.padding_change:
            sentences.append(
                f"The logits of {type(self.net).__name__} change with padding: those of a short text by "
                f"{self.padding_change:.1%} of their size beside a longer one. Let forward take attention_mask, or "
                "leave padded places out itself."
            )
        if self.plan.unused:
            names = quote_some(sorted(self.plan.unused), _MAX_LISTED)
            sentences.append(f"Parameters that the samples do not use stay as they are: {names}.")
        kept = sorted(self.plan.kept)
        tuned = [name for name, norm in iter_norms(self.net) if name not in kept and is_trained(norm)]
        if kept:
            sentences.append(f"Norms that keep their running statistics: {quote_some(kept, _MAX_LISTED)}.")
        if tuned:
            sentences.append(
                f"Norms with trained statistics that are fine-tuned: {quote_some(tuned, _MAX_LISTED)}. Training uses "
                "each batch's own statistics, and evaluation estimates them anew. To keep them, set requires_grad = "
                "False for these norms' weights."
            )
        return sentences

    def keep_norms(self, outer: Architecture) -> "DerivedArchitecture":
        """Return the architecture in which norms that another one around it freezes keep their statistics."""
        trains = getattr(outer, "trains", self.trains)
        kept = find_kept_norms(self.net, lambda name: trains(f"{INSIDE}{name}"))
        if kept == self.plan.kept:
            return self
        architecture = DerivedArchitecture(self.net, replace(self.plan, kept=kept), self.report, self.samples)
        architecture.padding_change = self.padding_change
        return architecture

    def _list_added(self, exits: tuple[int, ...]) -> list[int]:
        """Return the exits that have a classifier which the instance has not."""
        points = [] if self.plan.tail else self.plan.exits
        return [e for e in exits if e <= len(points) and not points[e - 1].is_own]

    def _list_head_dims(self, e: int) -> dict[str, tuple[Segments, ...]]:
        inner = self.plan.exits[e - 1].segments
        classes = (Segment(CLASSES),) if CLASSES in self.axes else (Segment(None, self.plan.classes),)
        dims = {"norm.weight": (inner,), "norm.bias": (inner,), "fc.weight": (classes, inner), "fc.bias": (classes,)}
        return {f"heads.{e}.{name}": some for name, some in dims.items()}

    def list_absent(self, last: int) -> frozenset[str]:
        """Return the instance's tensors that a level which ends at an exit lacks."""
        return frozenset(name for name, block in self.plan.blocks.items() if block >= last)

    @cached_property
    def _frozen(self) -> frozenset[str]:
        frozen = [name for name, p in self.net.named_parameters() if not p.requires_grad or name in self.plan.unused]
        frozen += [f"{name}.{leaf}" for name in self.plan.kept for leaf in STATISTICS]
        return frozenset(f"{INSIDE}{name}" for name in frozen)


def _generalize(name: str) -> str:
    """Return a name with a star for each number in it."""
    return _NUMBER.sub("*", name)


def check_full_model(architecture: DerivedArchitecture, example: torch.Tensor) -> None:
    """Compare the full model with the instance, bit for bit, and check that each exit reads its own blocks alone.

    Tensors that a level which ends at an exit lacks are not numbers until the exit has its logits: one pass for all.
    Those that it has were read by then: else they would be sent, and nothing in the level would train them.

    Raises:
        ModelError: It computes other logits, or an exit reads what lies behind it, or not all that lies before it.
    """
    plan, name = architecture.plan, type(architecture.net).__name__
    with torch.no_grad(), skip_fast_path(), explain_errors(architecture, example.shape[1:]):
        out = call_instance(copy_instance(architecture.net).eval(), example, plan.mask)
    expected = out if plan.exits and plan.exits[0].is_own else [get_logits(out)]
    with isolate_rng(example.device, 0):  # new classifiers are drawn
        full = architecture.build(plan.axes, architecture.positions).eval()
    net: nn.Module = full.net
    tensors = dict(list_tensors(net))
    behind = [architecture.list_absent(e) for e in architecture.positions]
    reads, read_before = set[int](), dict[int, set[int]]()  # identities: tensors of a module outlive the pass
    unknown, numbers = dict[str, torch.Tensor](), {name: tensor.data for name, tensor in tensors.items()}

    def set_tensors(names: Iterable[str], are_known: bool) -> None:
        """Put tensors into their places, or tensors without numbers; zeros where these are whole."""
        for name in names:
            tensor, (part, _, leaf) = tensors[name], name.rpartition(".")
            if not are_known:
                none = torch.tensor(math.nan if tensor.is_floating_point() else 0).to(tensor).expand(tensor.shape)
                tensor = nn.Parameter(none, requires_grad=False) if isinstance(tensor, nn.Parameter) else none
                unknown[name] = tensor
            else:  # as in `scale * classify(x)`, Python may hold it already
                unknown[name].data = numbers[name]
            setattr(net.get_submodule(part), leaf, tensor)

    def compare(i: int, exit_logits: torch.Tensor) -> bool:
        if not torch.equal(exit_logits, logits[i]):
            where = plan.exits[i].module if i < len(plan.exits) else "the classifier"
            raise ModelError(
                f"the exit after {where} reads tensors that a level which ends there lacks. Name others in exits.",
                key="derive.exits",
            )
        read_before[i] = set(reads)
        set_tensors(behind[i] - behind[min(i + 1, len(behind) - 1)], True)
        return False

    with torch.no_grad(), skip_fast_path(), explain_errors(architecture, example.shape[1:]):
        logits = full(example)
        if not all(map(torch.equal, expected, logits[-len(expected) :])):
            raise ModelError(
                f"a copy of the {name} computes other logits than the instance. Its forward depends "
                "on something that is not copied, such as a random number or a global variable.",
                key="model",
            )
        set_tensors(behind[0], False)
        with Watching(lambda values, out: reads.update(map(id, iter_tensors(values)))):
            full.visit_exits(example, compare)
    for i, before in read_before.items():
        later = {name for name, tensor in tensors.items() if id(tensor) in reads - before}
        if idle := later - behind[i]:
            names = quote_some(sorted(idle), _MAX_LISTED)
            raise ModelError(
                f"a level which ends at the exit after {plan.exits[i].module} has {names}, which are read behind this "
                "exit alone. Name others in exits.",
                key="derive.exits",
            )


def find_mismatch(net: nn.Module, plan: DerivedPlan) -> str:
    """Return how an instance differs from the one of a plan; "" where it does not."""
    shapes = {name: tuple(tensor.shape) for name, tensor in list_tensors(net)}
    for name in {**plan.tensors, **shapes}:
        if shapes.get(name) != plan.tensors.get(name):
            return f'"{truncate(name)}" has shape {shapes.get(name)} here, and {plan.tensors.get(name)} in the plan'
    modules = dict(net.named_modules())
    for number in plan.numbers:
        value = get_number(modules.get(number.module), number.keys)
        if type(value) is not int or value != number.value:
            where = truncate(f"{number.module}.{number.attribute}".lstrip("."))
            return f'"{where}" is {truncate(repr(value))} here, and {number.value} in the plan'
    names = [*(point.module for point in plan.exits), *plan.tail]
    absent = next((name for name in names if name not in modules), None)
    return "" if absent is None else f'there is no module "{truncate(absent)}" here'
