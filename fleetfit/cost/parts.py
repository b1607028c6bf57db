"""Costs that add up exactly, by parts: what is outside the blocks, each block, each classifier."""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import nn

from fleetfit.anatomy import Architecture, Layout, build_module, meta
from fleetfit.cost.count import Conditions, call_once, count, get_layout

_PART = re.compile(r"(?:.*\.)?(?P<kind>blocks|heads)\.(?P<number>\d+)")
_PROBES = (0.37, 0.53, 0.71)
_PROBED_EXITS = 4  # at most
_FRAME = 72  # bytes of a message before its numbers, where these are a million or more; up to 16 less for fewer


@dataclass(frozen=True)
class Profile:
    """The cost of one set of sizes by parts.

    Attributes:
        rest: The parts that every depth has (the stem).
        blocks: Each block.
        heads: Each classifier, by block count.
    """

    rest: float
    blocks: Sequence[float]
    heads: Mapping[int, float]

    def compute_total(self, exits: Sequence[int]) -> float:
        """Return the cost of a sub-model with these exits, its last one its depth."""
        return self.rest + sum(self.blocks[: exits[-1]]) + sum(self.heads[e] for e in exits)


Measure = Callable[[Mapping[str, int]], Profile]
"""The parts' costs of a set of sizes."""
Place = tuple[int | None, int | None]
"""The block or the exit that a part belongs to; neither: it has every depth."""


def parameters(architecture: Architecture, input_shape: tuple[int, ...], conditions: Conditions) -> Measure:
    """Count parameters, those that are never trained too, by layout arithmetic."""
    layout = get_layout(architecture, input_shape).complete
    return _measure_tensors(architecture, layout, [name for name, one in layout.tensors.items() if one.trainable])


def non_embedding_parameters(
    architecture: Architecture, input_shape: tuple[int, ...], conditions: Conditions
) -> Measure:
    """Count parameters but those of embeddings, by layout arithmetic."""
    names = call_once(_list_non_embedding, architecture, input_shape)
    return _measure_tensors(architecture, get_layout(architecture, input_shape).complete, names)


def _list_non_embedding(architecture: Architecture, input_shape: tuple[int, ...]) -> tuple[str, ...]:
    layout = get_layout(architecture, input_shape).complete
    with meta.on_meta():
        module = build_module(architecture, layout.full_sizes, layout.exits)
    tables = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    return tuple(name for name, tensor in layout.tensors.items() if tensor.trainable and name not in tables)


def size_bytes(architecture: Architecture, input_shape: tuple[int, ...], conditions: Conditions) -> Measure:
    """Count the bytes of a message that holds the state; see `message_size`."""
    layout = get_layout(architecture, input_shape)
    return _measure_tensors(architecture, layout, list(layout.tensors), bytes_each=4, rest=_FRAME)


def _measure_tensors(
    architecture: Architecture, layout: Layout, names: Sequence[str], bytes_each: int = 1, rest: int = 0
) -> Measure:
    """Count the numbers of some tensors by layout arithmetic, or their bytes, and what every depth has beside them."""

    def measure(sizes: Mapping[str, int]) -> Profile:
        shapes = layout.shapes(sizes, layout.exits)
        tensors = [(get_place(layout, name), bytes_each * math.prod(shapes[name])) for name in names]
        return sum_by_place(architecture, [((None, None), rest), *tensors])

    return measure


def message_size(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of a message of `fleetfit.messages` that holds a state: one flat tensor of float32.

    Four bytes a number, and a header whose length is taken to be the same for all, so that the parts of a model add up.
    """
    return _FRAME + sum(4 * math.prod(shape) for shape in shapes.values())


def multiply_adds(architecture: Architecture, input_shape: tuple[int, ...], conditions: Conditions) -> Measure:
    """Count multiply-adds of one sample.

    One pass at full size gives each module's. How they shrink with the sizes is known for most modules (`_Scaling`),
    and passes at three other widths confirm it; else every set of sizes is counted by running it. A module's place is
    that of its tensors, and passes with single exits confirm it; else all places are counted (`_split_by_exits`), as
    where the head has the embedding's table.
    """
    layout = get_layout(architecture, input_shape)

    def count_exactly(sizes: Mapping[str, int], exits: tuple[int, ...] = layout.exits) -> dict[str, int]:
        _, counted = count(architecture, sizes, exits, input_shape)
        return {name: n for name, n in counted.items() if n}

    whole = count_exactly(layout.full_sizes)
    scaling = _Scaling(layout.complete, whole)
    is_known = scaling.fit([(sizes, count_exactly(sizes)) for sizes in map(architecture.sizes, _PROBES)])
    shares: Mapping[str, Sequence[tuple[Place, int]]] = {
        name: [(_find_place(layout.complete, f"{name}."), n)] for name, n in whole.items()
    }
    by_places = sum_by_place(architecture, itertools.chain(*shares.values()))
    chosen = sorted({layout.exits[i] for i in np.linspace(0, len(layout.exits) - 1, _PROBED_EXITS).astype(int)})
    is_split = any(
        sum(count_exactly(layout.full_sizes, (e,)).values()) != by_places.compute_total((e,)) for e in chosen
    )
    if is_split:
        shares = _split_by_exits(lambda exits: count_exactly(layout.full_sizes, exits), layout.exits)

    def measure(sizes: Mapping[str, int]) -> Profile:
        if is_split and not is_known:
            parts = _split_by_exits(lambda exits: count_exactly(sizes, exits), layout.exits)
            return sum_by_place(architecture, itertools.chain(*parts.values()))
        counted = scaling.compute(sizes) if is_known else count_exactly(sizes)
        return sum_by_place(
            architecture,
            [(place, share * n / whole[name]) for name, n in counted.items() for place, share in shares[name]],
        )

    return measure


def _split_by_exits(
    count_at: Callable[[tuple[int, ...]], Mapping[str, int]], exits: Sequence[int]
) -> dict[str, list[tuple[Place, int]]]:
    """Return the multiply-adds of each module by place, from passes with one exit and with two.

    A pass with exit e and the last one has what the last one alone has, and the classifier of e. What a pass with e
    alone has beside it was computed up to e.
    """
    deepest = count_at((exits[-1],))
    parts: dict[str, list[tuple[Place, int]]] = {}
    before: dict[str, int] = {}
    for e in exits:
        alone, both = (deepest, deepest) if e == exits[-1] else (count_at((e,)), count_at((e, exits[-1])))
        block = None if e == exits[0] else e - 1
        for name in both.keys() | alone.keys():
            head = both.get(name, 0) - deepest.get(name, 0)
            trunk = alone.get(name, 0) - head
            parts.setdefault(name, []).extend([((None, e), head), ((block, None), trunk - before.get(name, 0))])
            before[name] = trunk
    return parts


class _Scaling:
    """How each module's multiply-adds follow from the sizes.

    A convolution's, a linear layer's and an LSTM's are the numbers in its weights times the places where it is applied,
    and the places do not depend on width. What has no weights, such as attention or a scan, is proportional to one axis
    or to the product of two.
    """

    def __init__(self, layout: Layout, whole: Mapping[str, int]) -> None:
        self.layout, self.whole = layout, whole
        self._factors: dict[str, tuple[str, ...]] = {}

    @cached_property
    def _kernels(self) -> dict[str, list[str]]:
        """Names of each module's own matrices and kernels."""
        kernels: dict[str, list[str]] = {}
        for name, tensor in self.layout.tensors.items():
            if len(tensor.dims) > 1:
                kernels.setdefault(name.rpartition(".")[0], []).append(name)
        return kernels

    @cached_property
    def _full_counts(self) -> dict[str, int]:
        return self._count_weights(self.layout.full_sizes)

    def _count_weights(self, sizes: Mapping[str, int]) -> dict[str, int]:
        shapes = self.layout.shapes(sizes, self.layout.exits)
        return {name: sum(math.prod(shapes[k]) for k in kernels) for name, kernels in self._kernels.items()}

    def fit(self, probes: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]) -> bool:
        """Find a rule for each module that gives the exact counts at some sizes; return whether all have one."""
        if any(counted.keys() != self.whole.keys() for _, counted in probes):
            return False
        weights = [self._count_weights(sizes) for sizes, _ in probes]
        for name in self.whole:
            for axes in self._candidates(name):
                if all(
                    self._scale(name, axes, sizes, own) == counted[name]
                    for (sizes, counted), own in zip(probes, weights, strict=True)
                ):
                    self._factors[name] = axes
                    break
            else:
                return False
        return True

    def _candidates(self, name: str) -> Iterable[tuple[str, ...]]:
        if name in self._kernels:
            yield ()  # by its weights
        axes = [name for name, axis in self.layout.axes.items() if axis.scaled]
        yield from ((a,) for a in axes)
        yield from ((a, b) for i, a in enumerate(axes) for b in axes[i:])
        yield ("",)  # constant

    def _scale(
        self, name: str, axes: tuple[str, ...], sizes: Mapping[str, int], weights: Mapping[str, int]
    ) -> int | None:
        """Return the multiply-adds at some sizes, or None where the rule does not give a whole number."""
        n, by = self.whole[name], 1
        if not axes:
            n, by = n * weights[name], self._full_counts[name]
        for axis in filter(None, axes):
            n, by = n * sizes[axis], by * self.layout.full_sizes[axis]
        return None if n % by else n // by

    def compute(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return each module's multiply-adds."""
        weights = self._count_weights(sizes)
        return {name: self._scale(name, axes, sizes, weights) or 0 for name, axes in self._factors.items()}


# ---- places of parts -----------------------------------------------------------------------------------------------


def get_place(layout: Layout, tensor: str) -> Place:
    """Return the block or the exit that a tensor belongs to."""
    return layout.tensors[tensor].block, layout.tensors[tensor].exit


def _find_place(layout: Layout, prefix: str) -> Place:
    """Return the block and exit that a module's tensors agree on, or those of the nearest module around it with any."""
    places = {get_place(layout, key) for key in layout.tensors if key.startswith(prefix)}
    if not places and prefix:
        return _find_place(layout, prefix[: prefix.rstrip(".").rfind(".") + 1])
    return places.pop() if len(places) == 1 else (None, None)


def iter_parts(module: nn.Module) -> Iterator[tuple[nn.Module, Place]]:
    """Yield the blocks and classifiers of a module, by their names, each with its place."""
    for name, part in module.named_modules():
        if (matched := _PART.fullmatch(name)) is not None:
            number = int(matched["number"])
            yield part, (number, None) if matched["kind"] == "blocks" else (None, number)


def sum_by_place(architecture: Architecture, parts: Iterable[tuple[Place, float]]) -> Profile:
    """Add parts up by their places."""
    rest, blocks = 0.0, [0.0] * architecture.blocks
    heads = dict.fromkeys(architecture.positions, 0.0)
    for (block, head), n in parts:
        if head in heads:
            heads[head] += n
        elif block is not None and block < len(blocks):  # in a user's model, numbers may mean something else
            blocks[block] += n
        else:
            rest += n
    return Profile(rest, blocks, heads)
