"""Movements: of one update, of a round's mean (`ServerStep`), and of all updates of a round, block by block.

A movement is an update less the state that was sent. Robust averages compare movements of clients with different
sub-models in blocks. A block is a set of elements that the same clients of the round
cover; inside one, movements are rows of equal length and can be compared. Blocks are yielded in chunks of some thousand
elements of the full model, so that memory, beside the updates themselves, is a byte for each element of the model (four
from nine different coverages on) and the rows of one chunk. A tensor that no gradient reached on a client is not
covered by it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Device, Federation, Job, Problem, Server, Update
from fleetfit.hooks import CoverageMean, ExtraShapes, keep_prefix
from fleetfit.layout import Layout, State
from fleetfit.submodel import (
    FlatState,
    SlicePlan,
    Submodel,
    concat_state,
    full_submodel,
    get_shapes,
    get_slice_plan,
    move_flat,
    pack_state,
    parse_submodel,
)
from fleetfit.submodel.state import Shapes

# ---- one update, and the server's step ------------------------------------------------------------------------------


def get_movement(federation: Federation, server: Server, update: Update) -> Tensor:
    """Return an update's state less the dispatched state, flat, on the host, in the order of the layout.

    Args:
        federation: The server's view.
        server: The server before the round.
        update: A valid update.
    """
    sent = concat_state(federation.method.dispatch(federation, server, update.client, update.dispatched)).cpu()
    return concat_state(update.state).cpu() - move_flat(
        federation.problem.layout, sent, update.dispatched, update.submodel
    )


def count_trainers(federation: Federation) -> Tensor:
    """Return the number of registered clients that may train each element of the full model, at least 1, flat.

    A client may train the elements of its level or, where channels roll or are drawn, all those of the level's blocks.
    """
    is_fixed = federation.method.choose_channels is keep_prefix

    def get_submodel(level: int, client: int) -> Submodel:
        submodel = federation.levels[level].submodel
        return submodel if is_fixed else Submodel({}, submodel.exits)

    return count_clients(federation, get_submodel).clamp_min_(1)


def count_clients(federation: Federation, get_submodel: Callable[[int, int], Submodel]) -> Tensor:
    """Return the number of registered clients whose sub-model has each element of the full model, flat.

    Args:
        federation: The server's view.
        get_submodel: From a level and its first client to the sub-model of all its clients.
    """
    layout = federation.problem.layout
    counts = torch.zeros(get_slice_plan(layout, full_submodel(layout)).size)
    levels = federation.level_of[federation.able]
    for level in np.unique(levels).tolist():
        clients = federation.able[levels == level]
        plan = get_slice_plan(layout, get_submodel(level, int(clients[0])))
        plan.scatter_scalar(counts, float(len(clients)))
    return counts


class ExtraSums(CoverageMean):
    """The mean of the states, and as `Aggregate.extra` the sum of each extra tensor over the clients, by name."""

    def __init__(self, federation: Federation, server: Server, elements: Sequence[str] = ()) -> None:
        """Prepare the sums.

        Args:
            federation: The server's view.
            server: The server before the round.
            elements: Names of tensors with a number for each element of a client's sub-model; their sums have one for
                each element of the full model.
        """
        super().__init__(federation, server)
        self._layout, size = federation.problem.layout, concat_state(server.state).numel() if elements else 0
        self._sums, self._elements = {name: torch.zeros(size) for name in elements}, elements

    def add(self, update: Update, weight: float) -> None:
        """Add an update; its weight does not count in the sums."""
        for name, tensor in update.extra.items():
            if name in self._elements:
                get_slice_plan(self._layout, update.dispatched).scatter(self._sums[name], tensor, add=True)
            else:
                self._sums[name] = self._sums[name] + tensor if name in self._sums else tensor
        super().add(update, weight)

    def result(self) -> Aggregate:
        """Return the average and the sums."""
        return replace(super().result(), extra=self._sums)


# ---- a number for each element, beside the state ---------------------------------------------------------------------


def declare_elements(name: str, up: bool = True) -> dict[str, Any]:
    """Return the hooks of a method that sends a number for each element of a sub-model, by the hooks' names.

    The server attaches what `ServerStep` stored under the name in its memory. What clients report under the name is
    added up without weights, as `Aggregate.extra[name]`.

    Args:
        name: Name of the numbers, in messages and in the server's memory.
        up: Whether clients report such numbers, too.
    """
    hooks = {
        "declare_extra": partial(_make_element_shapes, name=name, up=up),
        "attach": partial(_attach_elements, name=name),
    }
    return hooks | ({"make_aggregator": partial(ExtraSums, elements=(name,))} if up else {})


def _make_element_shapes(problem: Problem, submodel: Submodel, name: str, up: bool) -> ExtraShapes:
    shapes = {name: (get_slice_plan(problem.layout, submodel).size,)}
    return ExtraShapes(down=shapes, up=shapes if up else {})


def _attach_elements(
    federation: Federation, server: Server, client: int | None, submodel: Submodel, name: str
) -> State:
    numbers = load_server_memory(server, name, get_shapes(server.state))
    return {name: get_slice_plan(federation.problem.layout, submodel).gather(numbers)}


def get_extra(job: Job, device: Device, name: str) -> Tensor:
    """Return a job's extra tensor of `declare_elements` for the elements of the sub-model that is trained, flat."""
    return move_flat(device.problem.layout, job.extra[name], job.dispatched or job.submodel, job.submodel)


def make_extra(job: Job, device: Device, flat: Tensor) -> Tensor:
    """Return an extra tensor of `declare_elements` from a number for each element of the sub-model that is trained."""
    return move_flat(device.problem.layout, flat, job.submodel, job.dispatched or job.submodel)


def load_client_state(job: Job, device: Device, name: str) -> Tensor:
    """Return the numbers that a client remembers for the elements of a job's sub-model, flat; 0 where it has none.

    Args:
        job: With the sub-model that is trained.
        device: With the client's memory.
        name: Of the entry in the memory, which `store_client_state` or `pack_state` made.
    """
    stored = (device.memory or {}).get(name)
    if stored is None:
        return torch.zeros_like(concat_state(job.state))
    return move_flat(device.problem.layout, concat_state(stored["state"]), parse_submodel(stored), job.submodel)


def store_client_state(job: Job, device: Device, name: str, flat: Tensor) -> dict[str, Any]:
    """Return the client's memory with numbers for the elements of a job's sub-model; those of others stay."""
    layout, memory, submodel = device.problem.layout, device.memory or {}, job.submodel
    if name in memory and not parse_submodel(memory[name]).is_part_of(submodel):
        stored, submodel = memory[name], full_submodel(layout)
        full = move_flat(layout, concat_state(stored["state"]), parse_submodel(stored), submodel).clone()
        get_slice_plan(layout, job.submodel).scatter(full, flat)
        flat = full
    return {**memory, name: pack_state(submodel, get_slice_plan(layout, submodel).views(flat))}


def load_server_memory(server: Server, name: str, shapes: Shapes, initial: float = 0.0) -> Tensor:
    """Return tensors under a name in the server's memory, flat; those that it lacks have one number everywhere."""
    stored: State = (server.memory or {}).get(name, {})
    return concat_state({key: stored.get(key, torch.full(shape, initial)) for key, shape in shapes.items()})


class ServerStep:
    """The server's step: what a round moves, as flat tensors, and the server after it.

    A method computes the new state from `old`, `mean` and its memory; elements that no client trained stay as they are.

    Attributes:
        old: The state before the round.
        mean: The mean of the updates; elements that are not covered are those of `old`.
        covered: Bool, the elements that a client trained.
        weight: The coverage.
    """

    def __init__(self, server: Server, aggregate: Aggregate) -> None:
        self._server, self._is_partial = server, aggregate.base_state is not None
        before = server.state if aggregate.base_state is None else aggregate.base_state
        self._shapes, self.old = get_shapes(before), concat_state(before)
        mean, self.weight = (
            concat_state({name: part[name] for name in before} if self._is_partial else part).to(self.old.device)
            for part in (aggregate.mean, aggregate.coverage)
        )
        self.covered = self.weight > 0
        self.mean = torch.where(self.covered, mean, self.old)  # 0 / 0 if no client trained the element

    def load_memory(self, name: str, initial: float = 0.0) -> Tensor:
        """Return the tensors under a name in the server's memory, in the state's order; at first a constant."""
        return load_server_memory(self._server, name, self._shapes, initial).to(self.old.device)

    def make_server(self, new: Tensor, **memory: tuple[Tensor, Tensor]) -> Server:
        """Return the server after the round.

        Args:
            new: The new state, for covered elements; the others stay bit for bit.
            **memory: By name the new values for covered elements, and the old values.
        """
        state: State = FlatState(torch.where(self.covered, new, self.old), self._shapes)
        if self._is_partial:
            state = {**self._server.state, **state}
        stored = self._server.memory or {}
        tensors = {
            name: {**stored.get(name, {}), **FlatState(torch.where(self.covered, after, before), self._shapes)}
            for name, (after, before) in memory.items()
        }
        return replace(self._server, state=state, memory={**stored, **tensors})


# ---- all updates of a round -----------------------------------------------------------------------------------------

_CHUNK = 1 << 15  # elements; with some dozens of clients the rows of one stay in the processor's cache
_BITS = 8  # groups whose codes fit in a byte
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
    """Updates of the same sub-model, in which the same tensors were trained."""

    members: list[int]  # indices in the list of updates
    trained: Tensor | None  # the elements that count, bool, flat; None for all of them
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
                compiled = get_slice_plan(layout, update.submodel)
                trained = compiled.zero(torch.ones(compiled.size, dtype=torch.bool), untrained) if untrained else None
                groups[key] = _Group([], trained, compiled)
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
            distinct = np.flatnonzero(np.bincount(chunk_codes.numpy())).tolist()  # ascending
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

    def _encode_blocks(self) -> tuple[Tensor, list[int]]:
        """Return a code for each element of the full model, and the number of the block of each code."""
        size = get_slice_plan(self._layout, full_submodel(self._layout)).size
        codes, blocks = torch.zeros(size, dtype=torch.uint8), [0]
        for number, group in enumerate(self._groups):
            if number == _BITS:
                codes = codes.int()
            if len(blocks) > _MOST:
                codes, blocks = _renumber(codes, blocks)
            group.mark(codes, len(blocks))
            blocks += [block | 1 << number for block in blocks]
        return codes, blocks


def _renumber(codes: Tensor, blocks: list[int]) -> tuple[Tensor, list[int]]:
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


def _mask_covered(codes: Tensor, covers: Mapping[int, bool]) -> Tensor | None:
    """Return the elements that a group covers, bool, by the codes that it covers; None for all of them."""
    if len(covers) == 1:
        return None if all(covers.values()) else torch.zeros_like(codes, dtype=torch.bool)
    table = torch.zeros(max(covers) + 1, dtype=torch.bool)
    table[[code for code, covered in covers.items() if covered]] = True
    return table[codes.int()]
