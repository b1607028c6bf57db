"""A state in one flat buffer."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from fleetfit.layout import State


class FlatState(Mapping[str, Tensor]):
    """A read-only state whose tensors are views of one flat fp32 buffer, made when first asked for.

    Attributes:
        flat: The buffer, in the order of the names.
        shapes: The shape of each tensor.
    """

    def __init__(self, flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Take a buffer and the shapes of the tensors that lie in it side by side."""
        self.flat = flat
        self.shapes = shapes

    @cached_property
    def _views(self) -> dict[str, Tensor]:
        pieces = self.flat.split([math.prod(shape) for shape in self.shapes.values()])
        return {name: piece.view(s) for (name, s), piece in zip(self.shapes.items(), pieces, strict=True)}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes


def shapes_of(state: State) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of each tensor of a state."""
    if isinstance(state, FlatState):
        return state.shapes
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def flat_of(state: State) -> Tensor:
    """Return a state as one flat fp32 tensor, in its own order: no copy when its tensors lie side by side already."""
    if isinstance(state, FlatState):
        return state.flat
    tensors = list(state.values())
    first = tensors[0]
    place, width, buffer = first.data_ptr(), first.element_size(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        ours = (
            tensor.data_ptr() == place and tensor.untyped_storage().data_ptr() == buffer
        )  # neighbours may be strangers
        if tensor.dtype != torch.float32 or not ours or not tensor.is_contiguous():
            return torch.cat([t.detach().reshape(-1).float() for t in tensors])
        place += tensor.numel() * width
    total = (place - first.data_ptr()) // width
    return first.detach().as_strided((total,), (1,), first.storage_offset())
