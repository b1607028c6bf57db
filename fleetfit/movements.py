"""A round's movements side by side, block by block, where clients train different pieces: what robust averages share.

A movement is an update less what was sent. A block is a set of elements that the same clients of the round cover;
inside one, movements are rows of equal length and can be compared. Blocks come in chunks of some thousand places of
the full model, so that beside the updates themselves, which have to be kept, memory is a byte for each element of the
model (more from nine different sub-models on) and the rows of one chunk. A tensor that no gradient reached on a client
is not covered by it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fleetfit.errors import RunError
from fleetfit.layout import Layout
from fleetfit.submodel import Cut, Submodel, cut, flat_of, whole
from fleetfit.values import Server, Update

_CHUNK = 1 << 15  # places; with some dozens of clients the rows of one stay in the processor's cache
_ROOM = ((8, torch.uint8), (15, torch.int16), (31, torch.int32), (63, torch.int64))
"""How many groups a kind of whole number has bits for."""


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A part of a block.

    Attributes:
        block: Which one: equal numbers, equal clients.
        members: Who covers it, as places in the list of updates.
        rows: Their movements, [members, elements].
        place: Where in the full model's flat buffer it lies, together with `inside`.
        inside: Which elements of the place it has, indices; None for all of them.
    """

    block: int
    members: Sequence[int]
    rows: Tensor
    place: slice
    inside: Tensor | None

    def write(self, full: Tensor, values: Tensor | float) -> None:
        """Write values to the elements' places in a buffer of the full model's size."""
        here = full[self.place]
        if self.inside is None:
            here[...] = values
        else:
            here[self.inside] = values

    def read(self, full: Tensor) -> Tensor:
        """Return the elements' values of a buffer of the full model's size."""
        here = full[self.place]
        return here if self.inside is None else here[self.inside]


@dataclass(eq=False)
class _Group:
    """Updates of the same sub-model, in which the same tensors were trained.

    Attributes:
        members: Their places in the list of updates.
        counted: Which elements count, bool, flat; None for all of them.
        compiled: The sub-model's index work.
    """

    members: list[int]
    counted: Tensor | None
    compiled: Cut

    def flats(self, updates: Sequence[Update]) -> list[Tensor]:
        """Return the states of its updates, flat: the elements that count."""
        states = [flat_of(updates[member].state).cpu() for member in self.members]
        return states if self.counted is None else [state[self.counted] for state in states]


class Movements:
    """The movements of a round's updates, of clients that were sent parts of the server's state."""

    def __init__(self, layout: Layout, server: Server, updates: Sequence[Update]) -> None:
        """Group the updates by what they cover.

        Raises:
            RunError: There are more different sub-models than can be told apart.
        """
        self._layout, self._updates, self._before = layout, updates, flat_of(server.state).cpu()
        known: dict[tuple[Submodel, tuple[str, ...]], _Group] = {}
        for place, update in enumerate(updates):
            key = (update.submodel, update.untrained)
            if key not in known:
                known[key] = _Group([], _counted(layout, update), cut(layout, update.submodel))
            known[key].members.append(place)
        self._groups = list(known.values())
        if len(self._groups) > _ROOM[-1][0]:
            raise RunError(f"updates of {len(self._groups)} different sub-models cannot be compared; 63 at most.")

    def shortened(self, update: Update, share: float) -> Update:
        """Return an update with a share of its movement."""
        compiled = cut(self._layout, update.submodel)
        sent = compiled.gather(self._before)
        return replace(update, state=compiled.views(torch.lerp(sent, flat_of(update.state).cpu(), share, out=sent)))

    def everybody(self) -> int:
        """Return the number of the block that all updates cover."""
        return (1 << len(self._groups)) - 1

    def chunks(self) -> Iterator[BlockRows]:
        """Yield the blocks, part by part, in the order of the full model; nothing of what nobody covers."""
        codes, at = self._codes(), [0] * len(self._groups)
        taken = [group.flats(self._updates) for group in self._groups]
        for start in range(0, codes.numel(), _CHUNK):
            place = slice(start, start + _CHUNK)
            here, before = codes[place], self._before[place]
            blocks = _distinct(here)
            moves: list[tuple[Tensor, Tensor | None]] = []
            for number, states in enumerate(taken):
                mine = _covering(here, blocks, number)
                sent = before if mine is None else before[mine]
                part = slice(at[number], at[number] + len(sent))
                at[number] = part.stop
                rows = torch.stack([state[part] for state in states]).sub_(sent)
                moves.append((rows, None if mine is None else here[mine]))
            for block in blocks:
                if block:
                    yield self._rows(block, moves, here, place, len(blocks) == 1)

    def _rows(
        self, block: int, moves: Sequence[tuple[Tensor, Tensor | None]], here: Tensor, place: slice, alone: bool
    ) -> BlockRows:
        parts, members = [], []
        for number, (rows, bits) in enumerate(moves):
            if block >> number & 1:
                parts.append(rows if bits is None else rows.index_select(1, (bits == block).nonzero().flatten()))
                members += self._groups[number].members
        inside = None if alone else (here == block).nonzero().flatten()
        return BlockRows(block, members, torch.cat(parts), place, inside)

    def _codes(self) -> Tensor:
        """Return for each element of the full model who covers it: one bit for each group."""
        kind = next(kind for bits, kind in _ROOM if len(self._groups) <= bits)
        found = torch.zeros(cut(self._layout, whole(self._layout)).size, dtype=kind)
        for number, group in enumerate(self._groups):
            if group.counted is None:
                group.compiled.scatter_scalar(found, 1 << number)
            else:
                group.compiled.scatter(found, group.counted.to(kind) * (1 << number), add=True)
        return found


def _counted(layout: Layout, update: Update) -> Tensor | None:
    if not update.untrained:
        return None
    compiled = cut(layout, update.submodel)
    found = torch.ones(compiled.size, dtype=torch.bool)
    for name in update.untrained:
        compiled.views(found)[name].zero_()
    return found


def _distinct(codes: Tensor) -> list[int]:
    """Return the numbers that occur, ascending."""
    if bool((codes == codes[0]).all()):
        return [int(codes[0])]
    if codes.dtype == torch.uint8:
        return np.flatnonzero(np.bincount(codes.numpy())).tolist()
    found: list[int] = torch.unique(codes).tolist()
    return found


def _covering(codes: Tensor, blocks: Sequence[int], group: int) -> Tensor | None:
    """Return which elements a group covers, bool; None for all of them in a chunk of one block."""
    if len(blocks) == 1:
        return None if blocks[0] >> group & 1 else torch.zeros_like(codes, dtype=torch.bool)
    return (codes & (1 << group)) != 0
