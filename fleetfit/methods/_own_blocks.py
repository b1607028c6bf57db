"""The full model beside the last block that each level keeps for itself, as one layout in which all is averaged.

A level of d blocks has its last block under `exit{d}/` only, and what it has beyond the level below under that prefix
too: its own movement of these blocks is asked for. The deepest level's last block keeps its name: nobody else has it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleetfit.layout import Layout, TensorLayout


@dataclass(frozen=True, eq=False)
class OwnBlocks:
    """What levels share and what they do not.

    Attributes:
        layout: Of all of it; a sub-model with one exit has what it trains.
        source: The tensor of the model that each one is, or is a copy of.
        kept: By depth of a level, those of its last block that the server keeps for it.
        top: By depth, the trained tensors of its last block: by name within the block, the name here.
        further: By depth, the blocks beyond the level below that have the names and shapes of that level's last one.
        below: By depth, that of the level below; the first level has none.
    """

    layout: Layout
    source: Mapping[str, str]
    kept: Mapping[int, frozenset[str]]
    top: Mapping[int, Mapping[str, str]]
    further: Mapping[int, Sequence[Mapping[str, str]]]
    below: Mapping[int, int]


@functools.lru_cache(maxsize=16)
def own_blocks(layout: Layout, depths: tuple[int, ...]) -> OwnBlocks:
    """Return what levels of these depths, ascending, share and what they do not."""
    full, below = depths[-1], dict(zip(depths[1:], depths, strict=False))
    tensors: dict[str, TensorLayout] = {}
    source: dict[str, str] = {}
    kept: dict[int, set[str]] = {depth: set() for depth in depths}
    for name, tensor in layout.tensors.items():
        block = tensor.block
        source[name], tensors[name] = name, tensor
        if block == full - 1:
            tensors[name] = replace(tensor, block=None, exit=full)
        elif block is not None:
            tensors[name] = replace(tensor, block=block + 1)  # shared by those for whom it is not the last one
            for depth in depths:
                if below.get(depth, depth - 1) <= block < depth:
                    copy = f"exit{depth}/{name}"
                    source[copy], tensors[copy] = name, replace(tensor, block=None, exit=depth)
                    if block == depth - 1:
                        kept[depth].add(copy)
    top = {depth: _block(layout, depth - 1, "" if depth == full else f"exit{depth}/") for depth in depths}
    further = {
        depth: [b for b in (*(_block(layout, i, f"exit{depth}/") for i in range(least, depth - 1)), top[depth])
                if _shapes(layout, source, b) == _shapes(layout, source, top[least])]
        for depth, least in below.items()
    }  # fmt: skip
    everything = Layout(layout.axes, layout.exits, tensors)
    return OwnBlocks(everything, source, {d: frozenset(names) for d, names in kept.items()}, top, further, below)


def _block(layout: Layout, number: int, prefix: str) -> dict[str, str]:
    """Return the trained tensors of a block: by name within it, the name behind a prefix."""
    names = [name for name, tensor in layout.tensors.items() if tensor.block == number and tensor.trainable]
    marker = f"blocks.{number}."
    if all(marker in name for name in names):
        return {name.rpartition(marker)[2]: prefix + name for name in names}
    paths, shared = [name.split(".") for name in names], 0  # whatever the block is called, what its names share is it
    for step in zip(*(path[:-1] for path in paths), strict=False):
        if len(set(step)) > 1:
            break
        shared += 1
    return {".".join(path[shared:]): prefix + name for path, name in zip(paths, names, strict=True)}


def _shapes(layout: Layout, source: Mapping[str, str], block: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    full = layout.shapes({}, layout.exits)
    return {key: full[source[name]] for key, name in block.items()}
