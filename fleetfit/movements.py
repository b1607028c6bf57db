"""A round's movements side by side, block by block, where clients train different pieces: what robust averages share.

A movement is an update less what was sent. A block is a set of elements that the same clients of the round cover;
inside one, movements are rows of equal length and can be compared. Blocks come in chunks of some thousand places of
the full model, so that beside the updates themselves, which have to be kept, memory is a byte for each element of the
model (four from nine different coverages on) and the rows of one chunk. A tensor that no gradient reached on a client
is not covered by it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fleetfit.layout import Layout
from fleetfit.submodel import SlicePlan, Submodel, concat_state, full_submodel, get_slice_plan
from fleetfit.values import Server, Update

_CHUNK = 1 << 15  # places; with some dozens of clients the rows of one stay in the processor's cache
_BITS = 8  # groups that have a bit of a byte each; further ones are numbered
_MOST = 1 << 14  # numbers in use, at most, when a group doubles them


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A part of a block.

    Attributes:
        block: Which one: equal numbers, equal clients; bit g is set where group g covers it.
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
    compiled: SlicePlan

    def mark(self, codes: Tensor, number: int) -> None:
        """Add a number to the elements that count, of the full model."""
        if self.counted is None:
            self.compiled.scatter_scalar(codes, number)
        else:
            self.compiled.scatter(codes, self.counted.to(codes.dtype) * number, add=True)

    def flats(self, updates: Sequence[Update]) -> list[Tensor]:
        """Return the states of its updates, flat: the elements that count."""
        states = [concat_state(updates[member].state).cpu() for member in self.members]
        return states if self.counted is None else [state[self.counted] for state in states]


class Movements:
    """The movements of a round's updates, of clients that were sent parts of the server's state."""

    def __init__(
        self, layout: Layout, server: Server, updates: Sequence[Update], *, whole_pieces: bool = False
    ) -> None:
        """Group the updates by what they cover.

        Args:
            layout: Of the model.
            server: What the clients were sent parts of.
            updates: What came back.
            whole_pieces: Whether a client covers its whole sub-model, whatever it says that no gradient reached.
        """
        self._layout, self._updates, self._before = layout, updates, concat_state(server.state).cpu()
        known: dict[tuple[Submodel, frozenset[str]], _Group] = {}
        for place, update in enumerate(updates):
            untrained = frozenset(() if whole_pieces else update.untrained)
            key = (update.submodel, untrained)
            if key not in known:
                known[key] = _Group(
                    [], _counted(layout, update.submodel, untrained), get_slice_plan(layout, update.submodel)
                )
            known[key].members.append(place)
        self._groups = list(known.values())

    def shortened(self, update: Update, share: float) -> Update:
        """Return an update with a share of its movement."""
        compiled = get_slice_plan(self._layout, update.submodel)
        sent = compiled.gather(self._before)
        return replace(
            update, state=compiled.views(torch.lerp(sent, concat_state(update.state).cpu(), share, out=sent))
        )

    def everybody(self) -> int:
        """Return the number of the block that all updates cover."""
        return (1 << len(self._groups)) - 1

    def chunks(self) -> Iterator[BlockRows]:
        """Yield the blocks, part by part, in the order of the full model; nothing of what nobody covers."""
        codes, blocks_of = self._codes()
        at = [0] * len(self._groups)
        taken = [group.flats(self._updates) for group in self._groups]
        for start in range(0, codes.numel(), _CHUNK):
            place = slice(start, start + _CHUNK)
            here, before = codes[place], self._before[place]
            there = _distinct(here)
            moves: list[tuple[Tensor, Tensor | None]] = []
            for number, states in enumerate(taken):
                mine = _covering(here, {code: bool(blocks_of[code] >> number & 1) for code in there})
                sent = before if mine is None else before[mine]
                part = slice(at[number], at[number] + len(sent))
                at[number] = part.stop
                rows = torch.stack([state[part] for state in states]).sub_(sent)
                moves.append((rows, None if mine is None else here[mine]))
            for code in there:
                if blocks_of[code]:
                    yield self._rows(code, blocks_of[code], moves, here, place, len(there) == 1)

    def _rows(
        self, code: int, block: int, moves: Sequence[tuple[Tensor, Tensor | None]], here: Tensor, place: slice,
        alone: bool,
    ) -> BlockRows:  # fmt: skip
        parts, members = [], []
        for number, (rows, codes) in enumerate(moves):
            if block >> number & 1:
                parts.append(rows if codes is None else rows.index_select(1, (codes == code).nonzero().flatten()))
                members += self._groups[number].members
        inside = None if alone else (here == code).nonzero().flatten()
        return BlockRows(block, members, torch.cat(parts), place, inside)

    def _codes(self) -> tuple[Tensor, Sequence[int]]:
        """Return for each element of the full model a number, and for each number the block that it stands for."""
        size = get_slice_plan(self._layout, full_submodel(self._layout)).size
        codes = torch.zeros(size, dtype=torch.uint8)
        for number, group in enumerate(self._groups[:_BITS]):
            group.mark(codes, 1 << number)
        blocks: Sequence[int] = range(1 << min(_BITS, len(self._groups)))
        if len(self._groups) > _BITS:
            codes = codes.int()
        for number, group in enumerate(self._groups[_BITS:], _BITS):
            if len(blocks) > _MOST:
                codes, blocks = _renumbered(codes, blocks)
            group.mark(codes, len(blocks))
            blocks = [*blocks, *(block | 1 << number for block in blocks)]
        return codes, blocks


def _renumbered(codes: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return the same with the numbers that occur only."""
    found = np.zeros(len(blocks), dtype=np.int64)
    for start in range(0, codes.numel(), _CHUNK):
        found += np.bincount(codes[start : start + _CHUNK].numpy(), minlength=len(blocks))
    there = np.flatnonzero(found)
    number = torch.zeros(len(blocks), dtype=torch.int32)
    number[torch.from_numpy(there)] = torch.arange(len(there), dtype=torch.int32)
    for start in range(0, codes.numel(), _CHUNK):
        here = codes[start : start + _CHUNK]
        here.copy_(number[here])
    return codes, [blocks[code] for code in there.tolist()]


def _counted(layout: Layout, piece: Submodel, untrained: frozenset[str]) -> Tensor | None:
    if not untrained:
        return None
    compiled = get_slice_plan(layout, piece)
    found = torch.ones(compiled.size, dtype=torch.bool)
    for name in untrained:
        compiled.views(found)[name].zero_()
    return found


def _distinct(codes: Tensor) -> list[int]:
    """Return the numbers that occur, ascending."""
    if bool((codes == codes[0]).all()):
        return [int(codes[0])]
    return np.flatnonzero(np.bincount(codes.numpy())).tolist()


def _covering(codes: Tensor, covers: Mapping[int, bool]) -> Tensor | None:
    """Return which elements a group covers, bool, by the numbers that it covers; None for all of them."""
    if len(covers) == 1:
        return None if all(covers.values()) else torch.zeros_like(codes, dtype=torch.bool)
    table = torch.zeros(max(covers) + 1, dtype=torch.bool)
    table[[code for code, covered in covers.items() if covered]] = True
    return table[codes.int()]
