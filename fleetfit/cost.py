"""What a sub-model costs: parameters, multiply-adds, and the seam for further costs.

ScaleFL (CVPR 2023) 3.1.1 measures cost(M) in parameters or in "FLOPs"; its tables print multiply-adds of convolutions
and linear layers, one image at a time. A level's sub-model has its own classifier and the shallower ones, and they
count; cost(M), and so level L, is the full model without early classifiers (Table 1 counts so).

`submodel_cost` builds a sub-model on the meta device and counts. The planner asks for thousands of sub-models, so it
uses a `Grid`: costs of all depths and widths, put together from a `Profile` (rest, blocks, heads) of each distinct set
of sizes.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fleetfit.errors import ConfigError, ModelError, did_you_mean
from fleetfit.layout import Architecture, Layout, build_module, infer_layout
from fleetfit.submodel import Submodel

WIDTHS = tuple(w / 100 for w in range(1, 101))
"""The widths that the grid search of ScaleFL Eq. 1 goes through."""
R = TypeVar("R")
_BATCH = 2  # batch norm refuses a single value per channel


@dataclass(frozen=True)
class Cost:
    """What a sub-model costs.

    Attributes:
        parameters: Trained numbers, classifiers included.
        multiply_adds: Multiply-adds of one forward pass of one sample; half of what torch counts as FLOPs.
    """

    parameters: int
    multiply_adds: int


# ---- one sub-model, exactly ----------------------------------------------------------------------------------------


def submodel_cost(
    architecture: Architecture,
    submodel: Submodel | tuple[Mapping[str, int], Sequence[int]],
    input_shape: Sequence[int],
) -> Cost:
    """Return the cost of a sub-model, all its classifiers included, by building it on the meta device.

    Args:
        architecture: The model family.
        submodel: The sub-model, or a pair of sizes by axis (axes not named are whole) and exits.
        input_shape: Shape of one sample, such as (3, 32, 32).

    Raises:
        ModelError: The model cannot be built or does not accept the input.
    """
    sizes, exits = (submodel.sizes, submodel.exits) if isinstance(submodel, Submodel) else submodel
    whole = {name: axis.size for name, axis in architecture.axes.items()}
    key = tuple(sorted({**whole, **sizes}.items()))
    return _cached(_submodel_cost, architecture, key, tuple(exits), tuple(input_shape))


def full_cost(architecture: Architecture, input_shape: Sequence[int]) -> Cost:
    """Return cost(M): the full model without early classifiers."""
    return submodel_cost(architecture, ({}, (architecture.blocks,)), input_shape)


def _submodel_cost(
    architecture: Architecture, key: tuple[tuple[str, int], ...], exits: tuple[int, ...], input_shape: tuple[int, ...]
) -> Cost:
    module, flops = _count(architecture, dict(key), exits, input_shape)
    return Cost(sum(p.numel() for p in module.parameters()), sum(flops.values()) // (2 * _BATCH))


def _count(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], input_shape: tuple[int, ...]
) -> tuple[nn.Module, dict[str, int]]:
    """Run a module on the meta device; return it and the FLOPs of a batch by module name, children not counted."""
    with torch.device("meta"):
        module = build_module(architecture, sizes, exits).eval()
        x = torch.empty(_BATCH, *input_shape)
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            module(x)
    except Exception as error:
        message = f"{type(architecture).__name__} does not accept an input of shape {input_shape}: {error}"
        raise ModelError(message) from error
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    root = type(module).__name__
    total = {name.removeprefix(root).removeprefix("."): n for name, n in counts.items() if name.startswith(root)}
    total[""] = counter.get_total_flops()
    own = dict(total)
    for name, n in total.items():
        if name:
            own[_parent(name, total)] -= n
    return module, own


def _parent(name: str, known: Mapping[str, Any]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in known:
            break
    return name


# ---- many sub-models, by parts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """The cost of one set of sizes by parts.

    Attributes:
        rest: What every depth has (the stem).
        blocks: Each block.
        heads: Each classifier, by block count.
    """

    rest: float
    blocks: Sequence[float]
    heads: Mapping[int, float]


Measure = Callable[[Mapping[str, int]], Profile]
"""The parts' costs of a set of sizes."""
CostFunction = Callable[[Architecture, tuple[int, ...]], Measure]
"""Makes the measure of an architecture and the shape of one sample."""


def parameters(architecture: Architecture, input_shape: tuple[int, ...]) -> Measure:
    """Count trained numbers, by layout arithmetic."""
    layout = _layout(architecture)

    def measure(sizes: Mapping[str, int]) -> Profile:
        shapes = layout.shapes(sizes, layout.exits)
        trained = {name: int(np.prod(shape)) for name, shape in shapes.items() if layout.tensors[name].trainable}
        return _profile(
            architecture, [(layout.tensors[name].block, layout.tensors[name].exit, n) for name, n in trained.items()]
        )

    return measure


def multiply_adds(architecture: Architecture, input_shape: tuple[int, ...]) -> Measure:
    """Count multiply-adds of one sample.

    A convolution's and a linear layer's are the numbers in its weights times the places where it is applied, and the
    places do not depend on width. So one pass at full size is enough, if two more at other widths confirm it; else
    every set of sizes is measured. What runs outside blocks and classifiers counts at every depth.
    """
    layout = _layout(architecture)

    def exact(sizes: Mapping[str, int]) -> dict[str, float]:
        _, flops = _count(architecture, sizes, layout.exits, input_shape)
        return {name: n / (2 * _BATCH) for name, n in flops.items() if n}

    whole = exact(layout.full_sizes)
    full_weights = _weights(layout, layout.full_sizes)

    def scaled(sizes: Mapping[str, int]) -> dict[str, float]:
        weights = _weights(layout, sizes)
        return {name: n * weights.get(name, 0) / full_weights.get(name, 1) for name, n in whole.items()}

    probes = [architecture.sizes(width) for width in (0.37, 0.71)]
    count = scaled if all(scaled(sizes) == exact(sizes) for sizes in probes) else exact
    places = {name: _place(layout, f"{name}.") for name in whole}

    def measure(sizes: Mapping[str, int]) -> Profile:
        return _profile(architecture, [(*places[name], n) for name, n in count(sizes).items()])

    return measure


COSTS: Mapping[str, CostFunction] = {"parameters": parameters, "multiply_adds": multiply_adds}
"""Every cost by its name in `fleet.cost`."""


def _layout(architecture: Architecture) -> Layout:
    return _cached(infer_layout, architecture)


def _place(layout: Layout, prefix: str) -> tuple[int | None, int | None]:
    """Return the block and exit that a module's tensors agree on, or those of the nearest module around it with any."""
    found = {(t.block, t.exit) for key, t in layout.tensors.items() if key.startswith(prefix)}
    if not found and prefix:
        return _place(layout, prefix[: prefix.rstrip(".").rfind(".") + 1])
    return found.pop() if len(found) == 1 else (None, None)


def _weights(layout: Layout, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers in each module's own matrices and kernels."""
    found: dict[str, int] = {}
    for name, shape in layout.shapes(sizes, layout.exits).items():
        if len(shape) > 1:
            module = name.rpartition(".")[0]
            found[module] = found.get(module, 0) + int(np.prod(shape))
    return found


def _profile(architecture: Architecture, parts: Sequence[tuple[int | None, int | None, float]]) -> Profile:
    rest, blocks = 0.0, [0.0] * architecture.blocks
    heads = dict.fromkeys(architecture.positions, 0.0)
    for block, head, n in parts:
        if head is not None:
            heads[head] += n
        elif block is not None:
            blocks[block] += n
        else:
            rest += n
    return Profile(rest, blocks, heads)


@dataclass(frozen=True, eq=False)
class Grid:
    """Costs of every depth and width of an architecture.

    Attributes:
        cost: The cost's name.
        blocks: Full depth.
        positions: Block counts after which a classifier may sit (P of them).
        widths: Widths (W of them), ascending; the last is 1.
        trunk: Cost of the blocks up to each position and the rest, without classifiers [P, W].
        heads: Cost of each position's classifier [P, W].
    """

    cost: str
    blocks: int
    positions: tuple[int, ...]
    widths: tuple[float, ...]
    trunk: np.ndarray[Any, np.dtype[np.float64]]
    heads: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def full(self) -> float:
        """cost(M): the full model without early classifiers."""
        return float(self.trunk[-1, -1] + self.heads[-1, -1])

    def of(self, width: float, exits: Sequence[int]) -> float:
        """Return the cost of a sub-model with these exits, its last one its depth.

        Raises:
            ModelError: The grid has no such width or position.
        """
        column = int(np.argmin(np.abs(np.array(self.widths) - width)))
        unknown = [e for e in exits if e not in self.positions]
        if unknown or abs(self.widths[column] - width) > 1e-9 or not exits:
            raise ModelError(f"the cost grid has no width {width} with exits {tuple(exits)}; widths go by 0.01 up to "
                             f"1, exits are among {self.positions}.")  # fmt: skip
        rows = [self.positions.index(e) for e in exits]
        return float(self.trunk[rows[-1], column] + self.heads[rows, column].sum())


def cost_grid(architecture: Architecture, input_shape: Sequence[int], cost: str = "parameters") -> Grid:
    """Return the costs of every depth and width, cached by the architecture's parameters.

    Raises:
        ConfigError: There is no such cost.
    """
    if cost not in COSTS:
        raise ConfigError(f'"{cost}" is no cost; choose one of {", ".join(COSTS)}.{did_you_mean(cost, COSTS)}')
    return _cached(_grid, architecture, tuple(input_shape), cost)


def _grid(architecture: Architecture, input_shape: tuple[int, ...], cost: str) -> Grid:
    positions = tuple(architecture.positions)
    measure = COSTS[cost](architecture, input_shape)
    known: dict[tuple[tuple[str, int], ...], Profile] = {}
    trunk, heads = np.zeros((2, len(positions), len(WIDTHS)))
    for w, width in enumerate(WIDTHS):
        sizes = architecture.sizes(width)
        key = tuple(sorted(sizes.items()))
        profile = known[key] if key in known else known.setdefault(key, measure(sizes))
        upto = np.cumsum([profile.rest, *profile.blocks])
        trunk[:, w] = upto[list(positions)]
        heads[:, w] = [profile.heads[p] for p in positions]
    return Grid(cost, architecture.blocks, positions, WIDTHS, trunk, heads)


@functools.lru_cache(maxsize=1024)
def _remembered(function: Callable[..., Any], *key: Hashable) -> Any:
    return function(*key)


def _cached(function: Callable[..., R], architecture: Architecture, *key: Hashable) -> R:
    """Call a function, or return what it gave for an equal architecture; one that cannot be hashed is measured anew."""
    try:
        hash(architecture)
    except TypeError:
        return function(architecture, *key)
    return cast(R, _remembered(function, cast(Hashable, architecture), *key))
