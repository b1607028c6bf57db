"""Which places of each dimension a choice of channels keeps, and full states that are cut or masked by them.

A dimension's places are found once, however many tensors have a dimension like it; a state is then cut or masked by one
vector per dimension. That is what `fleetfit.submodel` does too, but many times faster where channels are drawn.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fleetfit.layout import Layout, Segment, State, TensorLayout
from fleetfit.submodel import Channels, Submodel, extract

Dimension = tuple[Segment, ...]


class Places:
    """The places that a choice of channels keeps.

    Attributes:
        channels: Kept channels by axis; axes that are not named are whole.
        sizes: How many there are of each axis.
        kept: Of each kind of dimension the kept places, in the order of the channels.
        full: Of each kind of dimension how many places it has in the full model.
    """

    def __init__(self, layout: Layout, channels: Mapping[str, Channels]) -> None:
        """Find the places.

        Raises:
            ModelError: The channels do not fit the layout.
        """
        self.channels = dict(channels)
        self.sizes = {axis: len(kept) for axis, kept in channels.items()}
        self._tensors = layout.tensors
        kinds: dict[Dimension, str] = {}
        for tensor in layout.tensors.values():
            for dim in tensor.dims:
                kinds.setdefault(dim, str(len(kinds)))
        vectors = Layout(
            layout.axes, layout.exits, {key: TensorLayout((dim,), None, None, True) for dim, key in kinds.items()}
        )
        self.full = {dim: vectors.shapes({}, layout.exits)[key][0] for dim, key in kinds.items()}
        places = {key: torch.arange(float(self.full[dim])) for dim, key in kinds.items()}
        found = extract(vectors, places, Submodel(self.channels, layout.exits))
        self.kept = {dim: found[key].long() for dim, key in kinds.items()}

    def cut(self, state: State) -> State:
        """Return the kept elements of a full state."""
        return {name: self._cut(tensor, self._tensors[name].dims) for name, tensor in state.items()}

    def masked(self, state: State, faint: float = 0.0) -> State:
        """Return a full state whose other elements are zero, or a faint share of what they are."""
        masks = {dim: torch.full((self.full[dim],), faint).index_fill(0, kept, 1.0) for dim, kept in self.kept.items()}
        return {name: _masked(tensor, self._tensors[name].dims, masks, faint) for name, tensor in state.items()}

    def _cut(self, tensor: Tensor, dims: Sequence[Dimension]) -> Tensor:
        for d, dim in enumerate(dims):
            if not self._whole(dim):
                tensor = tensor.index_select(d, self.kept[dim])
        return tensor

    def _whole(self, dim: Dimension) -> bool:
        kept = self.kept[dim]
        return len(kept) == self.full[dim] and bool((kept == torch.arange(len(kept))).all())


def _masked(tensor: Tensor, dims: Sequence[Dimension], masks: Mapping[Dimension, Tensor], faint: float) -> Tensor:
    factor: Tensor | None = None
    for d, dim in enumerate(dims):
        mask = masks[dim]
        if bool((mask != 1).any()):
            shaped = mask.reshape([-1 if i == d else 1 for i in range(len(dims))])
            factor = shaped if factor is None else torch.minimum(factor, shaped)
    return tensor if factor is None else tensor * factor
