"""The movements of a round, block by block, for robust averages of clients with different sub-models.

A movement is an update less the state that was sent. A block is a set of elements that the same clients of the round
cover; inside one, movements are rows of equal length and can be compared. Blocks are yielded in chunks of some thousand
elements of the full model, so that memory, beside the updates themselves, is a byte for each element of the model (four
from nine different coverages on) and the rows of one chunk. A tensor that no gradient reached on a client is not
covered by it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fleetfit.layout import Layout
from fleetfit.submodel import SlicePlan, Submodel, concat_state, full_submodel, get_slice_plan
from fleetfit.values import Server, Update

_CHUNK = 1 << 15  # elements; with some dozens of clients the rows of one stay in the processor's cache
_BITS = 8  # groups that have a bit of a byte each; further ones are numbered
_MOST = 1 << 14  # numbers in use, at most, when a group doubles them


@dataclass(frozen=True, eq=False)
class BlockRows:
    """A part of a block.

    Attributes:
        block: Its number: equal numbers, equal clients; bit g is set if group g covers it.
        members: The clients that cover it, as indices in the list of updates.
        rows: Their movements, [members, elements].
        chunk: A slice of the full model's flat buffer.
        indices: Its elements in the chunk; None for all of them.
    """

    block: int
    members: Sequence[int]
    rows: Tensor
    chunk: slice
    indices: Tensor | None

    def write(self, full: Tensor, values: Tensor | float) -> None:
        """Write values of its elements into a buffer of the full model's size."""
        full[self.chunk][... if self.indices is None else self.indices] = values

    def read(self, full: Tensor) -> Tensor:
        """Return the values of its elements in a buffer of the full model's size."""
        return full[self.chunk] if self.indices is None else full[self.chunk][self.indices]


@dataclass(eq=False)
class _Group:
    """Updates of the same sub-model, in which the same tensors were trained.

    Attributes:
        members: Their indices in the list of updates.
        trained: The elements that count, bool, flat; None for all of them.
        compiled: Where the sub-model's elements are in the full model.
    """

    members: list[int]
    trained: Tensor | None
    compiled: SlicePlan

    def mark(self, codes: Tensor, number: int) -> None:
        """Add a number to the elements that count, of the full model."""
        if self.trained is None:
            self.compiled.scatter_scalar(codes, number)
        else:
            self.compiled.scatter(codes, self.trained.to(codes.dtype) * number, add=True)

    def flatten(self, updates: Sequence[Update]) -> list[Tensor]:
        """Return the elements that count of each of its updates, flat."""
        states = [concat_state(updates[member].state).cpu() for member in self.members]
        return states if self.trained is None else [state[self.trained] for state in states]


class Movements:
    """The movements of a round's updates; the clients were sent parts of the server's state.

    Attributes:
        full_block: The number of the block that all updates cover.
    """

    def __init__(
        self, layout: Layout, server: Server, updates: Sequence[Update], *, whole_pieces: bool = False
    ) -> None:
        """Group the updates by the elements that they cover.

        Args:
            layout: The model's layout.
            server: The server before the round.
            updates: The updates of the round.
            whole_pieces: Whether a client covers its whole sub-model, with the tensors that it declares untrained.
        """
        self._layout, self._updates, self._before = layout, updates, concat_state(server.state).cpu()
        groups: dict[tuple[Submodel, frozenset[str]], _Group] = {}
        for index, update in enumerate(updates):
            untrained = frozenset(() if whole_pieces else update.untrained)
            key = (update.submodel, untrained)
            if key not in groups:
                groups[key] = _Group([], _mask_trained(layout, *key), get_slice_plan(layout, update.submodel))
            groups[key].members.append(index)
        self._groups = list(groups.values())
        self.full_block = (1 << len(self._groups)) - 1

    def scale(self, update: Update, share: float) -> Update:
        """Return an update with a share of its movement."""
        compiled = get_slice_plan(self._layout, update.submodel)
        sent = compiled.gather(self._before)
        return replace(
            update, state=compiled.views(torch.lerp(sent, concat_state(update.state).cpu(), share, out=sent))
        )

    def chunks(self) -> Iterator[BlockRows]:
        """Yield the blocks, part by part, in the order of the full model, without elements that no client covers."""
        codes, blocks = self._encode_blocks()
        offsets = [0] * len(self._groups)
        states_by_group = [group.flatten(self._updates) for group in self._groups]
        for start in range(0, codes.numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            chunk_codes, before = codes[chunk], self._before[chunk]
            distinct = _find_distinct(chunk_codes)
            movements: list[tuple[Tensor, Tensor | None]] = []
            for number, states in enumerate(states_by_group):
                covered = _mask_covered(chunk_codes, {code: bool(blocks[code] >> number & 1) for code in distinct})
                sent = before if covered is None else before[covered]
                part = slice(offsets[number], offsets[number] + len(sent))
                offsets[number] = part.stop
                rows = torch.stack([state[part] for state in states]).sub_(sent)
                movements.append((rows, None if covered is None else chunk_codes[covered]))
            for code in distinct:
                if blocks[code]:
                    indices = None if len(distinct) == 1 else (chunk_codes == code).nonzero().flatten()
                    yield self._collect_rows(code, blocks[code], movements, chunk, indices)

    def _collect_rows(
        self, code: int, block: int, movements: Sequence[tuple[Tensor, Tensor | None]], chunk: slice,
        indices: Tensor | None,
    ) -> BlockRows:  # fmt: skip
        parts, members = [], []
        for number, (rows, codes) in enumerate(movements):
            if block >> number & 1:
                parts.append(rows if codes is None else rows.index_select(1, (codes == code).nonzero().flatten()))
                members += self._groups[number].members
        return BlockRows(block, members, torch.cat(parts), chunk, indices)

    def _encode_blocks(self) -> tuple[Tensor, Sequence[int]]:
        """Return a code for each element of the full model, and the number of the block of each code."""
        size = get_slice_plan(self._layout, full_submodel(self._layout)).size
        codes = torch.zeros(size, dtype=torch.uint8)
        for number, group in enumerate(self._groups[:_BITS]):
            group.mark(codes, 1 << number)
        blocks: Sequence[int] = range(1 << min(_BITS, len(self._groups)))
        if len(self._groups) > _BITS:
            codes = codes.int()
        for number, group in enumerate(self._groups[_BITS:], _BITS):
            if len(blocks) > _MOST:
                codes, blocks = _renumber(codes, blocks)
            group.mark(codes, len(blocks))
            blocks = [*blocks, *(block | 1 << number for block in blocks)]
        return codes, blocks


def _renumber(codes: Tensor, blocks: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Return codes and blocks without the codes that do not occur."""
    counts = np.zeros(len(blocks), dtype=np.int64)
    for start in range(0, codes.numel(), _CHUNK):
        counts += np.bincount(codes[start : start + _CHUNK].numpy(), minlength=len(blocks))
    distinct = np.flatnonzero(counts)
    new_codes = torch.zeros(len(blocks), dtype=torch.int32)
    new_codes[torch.from_numpy(distinct)] = torch.arange(len(distinct), dtype=torch.int32)
    for start in range(0, codes.numel(), _CHUNK):
        chunk = codes[start : start + _CHUNK]
        chunk.copy_(new_codes[chunk])
    return codes, [blocks[code] for code in distinct.tolist()]


def _mask_trained(layout: Layout, submodel: Submodel, untrained: frozenset[str]) -> Tensor | None:
    if not untrained:
        return None
    compiled = get_slice_plan(layout, submodel)
    mask = torch.ones(compiled.size, dtype=torch.bool)
    for name in untrained:
        compiled.views(mask)[name].zero_()
    return mask


def _find_distinct(codes: Tensor) -> list[int]:
    """Return the codes that occur, ascending."""
    if bool((codes == codes[0]).all()):
        return [int(codes[0])]
    return np.flatnonzero(np.bincount(codes.numpy())).tolist()


def _mask_covered(codes: Tensor, covers: Mapping[int, bool]) -> Tensor | None:
    """Return the elements that a group covers, bool, by the codes that it covers; None for all of them."""
    if len(covers) == 1:
        return None if all(covers.values()) else torch.zeros_like(codes, dtype=torch.bool)
    table = torch.zeros(max(covers) + 1, dtype=torch.bool)
    table[[code for code, covered in covers.items() if covered]] = True
    return table[codes.int()]
