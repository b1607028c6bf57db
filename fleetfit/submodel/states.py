"""States of sub-models: extract them, put them back, move them from one sub-model to another, check them."""

import math
from collections.abc import Mapping

import torch

from fleetfit.errors import ModelError
from fleetfit.layout import Layout, State
from fleetfit.submodel.cut import cut
from fleetfit.submodel.flat import flat_of
from fleetfit.submodel.piece import Submodel


def norm(state: State) -> float:
    """Return the Euclidean norm of a state; infinite or not a number where its square is none in float32."""
    if not state:
        return 0.0
    flat = flat_of(state)
    return math.sqrt(flat.dot(flat))


def finite(state: State) -> bool:
    """Tell whether all numbers of a state are finite, and small enough for the square of its norm to be.

    Values of which that is not true are as good as infinite: no variance, norm or product of them is a number.
    """
    return math.isfinite(norm(state))


def whole(layout: Layout) -> Submodel:
    """Return the sub-model that is the full model."""
    return Submodel({name: range(axis.size) for name, axis in layout.axes.items()}, layout.exits)


def extract(layout: Layout, state: State, submodel: Submodel) -> State:
    """Return a sub-model's state, a copy, from the full model's.

    Raises:
        ModelError: The sub-model or the state does not fit the layout.
    """
    _check_names(layout, state)
    compiled = cut(layout, submodel)
    return compiled.views(compiled.gather(flat_of(_ordered(layout, state))))


def put_back(layout: Layout, state: State, submodel: Submodel, piece: State) -> State:
    """Return a new full state in which the sub-model's elements come from `piece`, and all others from `state`."""
    _check_names(layout, state)
    compiled = cut(layout, submodel)
    check_shapes(piece, compiled.shapes)
    full = flat_of(_ordered(layout, state)).clone()
    compiled.scatter(full, flat_of({name: piece[name] for name in compiled.names}))
    return cut(layout, whole(layout)).views(full)


def recut(layout: Layout, state: State, source: Submodel, target: Submodel, fill: State | None = None) -> State:
    """Move a state from one sub-model to another: what both have is kept, the rest is from `fill` (full; or zeros)."""
    if source == target:
        return {name: tensor.clone() for name, tensor in state.items()}
    compiled = cut(layout, whole(layout))
    base = fill if fill is not None else compiled.views(torch.zeros(compiled.size))
    return extract(layout, put_back(layout, base, source, state), target)


def check_shapes(state: State, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a state with the expected names and shapes, by equality: a size of one never stands for another.

    Raises:
        ModelError: A tensor is missing, unexpected, or of another shape.
    """
    if state.keys() != shapes.keys():
        missing, extra = sorted(shapes.keys() - state.keys()), sorted(state.keys() - shapes.keys())
        raise ModelError(f"a state does not fit its sub-model: missing {missing[:3]}, unexpected {extra[:3]}.")
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise ModelError(
                f'a state does not fit its sub-model: "{name}" is {tuple(state[name].shape)}, expected {shape}.'
            )


def _check_names(layout: Layout, state: State) -> None:
    if state.keys() != layout.tensors.keys():
        odd = sorted(state.keys() ^ layout.tensors.keys())
        raise ModelError(f"a full state must have the layout's tensors; these differ: {odd[:4]}.")


def _ordered(layout: Layout, state: State) -> State:
    return state if list(state) == list(layout.tensors) else {name: state[name] for name in layout.tensors}
