"""The frozen prefix of a model: the segments that give each sample the same values, whatever is trained.

These are the segments below the first part that depends on trained values, on chance, or on the other samples of a
batch. Parts that run in a segment exclude it if they have a trained parameter, drop something at random, or are a batch
norm. The rest is tried: a batch in training mode; then some of its samples at other positions, beside other samples,
with other trained values and another seed; then in evaluation mode. A segment is frozen if its values have the same
bits each time. No segment is if a buffer changes, or if the logits from these values differ from those of the whole
model.

A module that visits its exits, as the levels of a plain one do, cannot go on behind a segment. It has a frozen prefix
only where all of it is frozen but a module at the end of each exit.

All batches have one fixed shape, `BATCH` samples. In it each sample has the same bits beside any others, so cached
values are the same in every process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from fleetfit.anatomy import HasSegments, VisitsExits, outputs
from fleetfit.seeds import isolate_rng

BATCH = 32
"""Samples of each batch; smaller ones are filled up."""


@dataclass(frozen=True, eq=False)
class CachedValue:
    """A value that is cached for each sample: the input of an exit's classifier, or the state after a segment.

    Attributes:
        structure: Of the value's tensors.
        head: The trained module that makes logits of the value; None if the value is the state after the segment.
        autocast: The type in which the head computes under autocast, or None.
    """

    structure: TreeSpec
    head: nn.Module | None = None
    autocast: torch.dtype | None = None

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """Return the value from its tensors."""
        return tree_unflatten(tensors, self.structure)

    def compute_logits(self, module: Any, index: int, value: Any) -> Tensor:
        """Return the logits of an exit from the value."""
        head: Callable[[Any], Tensor] = self.head or partial(module.head, index)
        if self.autocast is None:
            return head(value)
        with torch.autocast(value.device.type, dtype=self.autocast, cache_enabled=False):
            return head(value).float()


@dataclass(frozen=True, eq=False)
class FrozenPrefix:
    """The frozen segments of a module; at least one.

    Attributes:
        exits: What is cached for the exit of each of them.
        carry: What is cached of the state after the last of them; None if no segment follows.
    """

    exits: tuple[CachedValue, ...]
    carry: CachedValue | None

    @property
    def parts(self) -> tuple[CachedValue, ...]:
        """All that is cached, in the order of `compute_values`."""
        return self.exits if self.carry is None else (*self.exits, self.carry)

    def compute_values(self, module: Any, x: Tensor) -> list[Any]:
        """Return the values of samples [BATCH, ...]."""
        pairs = list(self.run(module, x))
        values = [value for value, _ in pairs]
        return values if self.carry is None else [*values, pairs[-1][1]]

    def run(self, module: Any, x: Tensor) -> Iterator[tuple[Any, Any]]:
        """Yield what each exit reads, and the state after its segment."""
        if isinstance(module, VisitsExits):
            visit = partial(module.visit_exits, x, lambda i, logits: False)
            yield from ((value, value) for value in _read_head_inputs(visit, [c.head for c in self.exits]))
            return
        carry = module.start(x)
        for i, cached in enumerate(self.exits):
            carry = module.segment(i, carry)
            head = cached.head
            yield (carry if head is None else _read_head_inputs(partial(module.head, i, carry), [head])[0]), carry

    def compute_logits(self, module: Any, values: Sequence[Any]) -> list[Tensor]:
        """Return the logits of every exit, shallow to deep, from the values of samples."""
        logits = [cached.compute_logits(module, i, values[i]) for i, cached in enumerate(self.exits)]
        carry = values[-1]
        for i in range(len(self.exits), len(module.exits)):
            carry = module.segment(i, carry)
            logits.append(module.head(i, carry))
        return logits


def find_frozen_prefix(module: nn.Module, trained: Sequence[Tensor], x: Tensor, other: Tensor) -> FrozenPrefix | None:
    """Return the frozen prefix of a module, or None if not even its first segment is frozen.

    Args:
        module: Its mode and parameters are the same afterwards.
        trained: Its trained parameters.
        x: Samples [BATCH, ...].
        other: Other samples [BATCH, ...].
    """
    if not isinstance(module, HasSegments | VisitsExits) or not isinstance(module, nn.Module) or not trained:
        return None
    find = _find_heads if isinstance(module, VisitsExits) else _find_candidate
    before, training = [p.detach().clone() for p in trained], module.training
    try:
        with isolate_rng(x.device), torch.no_grad():
            candidate = find(module, {id(p) for p in trained}, x)
            return _prove(module, candidate, trained, x, other) if candidate.exits else None
    finally:
        module.train(training)
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)


# ---- by the parts that run -------------------------------------------------------------------------------------------


def _find_candidate(module: Any, trained: set[int], x: Tensor) -> FrozenPrefix:
    """Return the segments in which no part runs that depends on training, chance or the batch."""
    heads = list(_find_trained_parts(module, trained))
    exits: list[CachedValue] = []
    module.train()
    with _record_parts(module) as parts:
        carry = module.start(x)
        for i in range(len(module.exits)):
            carry = module.segment(i, carry)
            if any(_is_changing(part, trained) for part in parts):
                break
            with _record_calls(heads) as calls:
                logits = module.head(i, carry)
            exits.append(_describe_head(calls, logits) or CachedValue(tree_flatten(carry)[1]))
            parts.clear()  # those of the exit
    return FrozenPrefix(tuple(exits), None)


def _find_heads(module: Any, trained: set[int], x: Tensor) -> FrozenPrefix:
    """Return the heads of a module that visits its exits, if nothing else of it is trained."""
    heads = list(_find_trained_parts(module, trained))
    own = {id(part) for head in heads for part in head.modules()}
    exits: list[CachedValue] = []

    def visit(_: int, logits: Tensor) -> bool:
        is_frozen = not any(id(part) not in own and _is_changing(part, trained) for part in parts)
        cached = _describe_head(calls, logits)
        if is_frozen and cached is not None:
            exits.append(cached)
        parts.clear()
        calls.clear()
        return not is_frozen or cached is None

    module.train()
    with _record_parts(module) as parts, _record_calls(heads) as calls:
        module.visit_exits(x, visit)
    return FrozenPrefix(tuple(exits) if len(exits) == len(module.exits) else (), None)


@contextmanager
def _record_parts(module: nn.Module) -> Iterator[list[nn.Module]]:
    ran: list[nn.Module] = []
    with ExitStack() as hooks:
        for part in module.modules():
            hooks.enter_context(part.register_forward_pre_hook(lambda part, _: ran.append(part)))
        yield ran


def _is_changing(part: nn.Module, trained: set[int]) -> bool:
    if any(id(p) in trained for p in part.parameters(recurse=False)) or isinstance(part, _BatchNorm):
        return True
    rates = [value for name, value in vars(part).items() if "drop" in name.lower()]
    if "drop" in type(part).__name__.lower():
        rates.append(getattr(part, "p", 0))
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


def _find_trained_parts(module: nn.Module, trained: set[int]) -> Iterator[nn.Module]:
    """Yield the largest parts of a module whose parameters are all trained."""
    flags = [id(p) in trained for p in module.parameters()]
    if flags and all(flags) and not isinstance(module, nn.ModuleDict | nn.ModuleList):
        yield module
    elif any(flags):
        for part in module.children():
            yield from _find_trained_parts(part, trained)


Call = tuple[nn.Module, Any, Any, torch.dtype | None]
"""A head that ran, its inputs, its output, and the type in which it ran under autocast."""


@contextmanager
def _record_calls(heads: Sequence[nn.Module]) -> Iterator[list[Call]]:
    calls: list[Call] = []

    def record(head: nn.Module, inputs: Any, output: Any) -> None:
        kind = output.device.type if isinstance(output, Tensor) else "cpu"
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        calls.append((head, inputs, output, autocast))

    with ExitStack() as hooks:
        for head in heads:
            hooks.enter_context(head.register_forward_hook(record))
        yield calls


def _describe_head(calls: Sequence[Call], logits: Tensor) -> CachedValue | None:
    """Return what is cached for logits: the input of the one head that made them; None where others did."""
    if len(calls) != 1 or calls[0][2] is not logits or len(calls[0][1]) != 1:
        return None
    head, inputs, _, autocast = calls[0]
    return CachedValue(tree_flatten(inputs[0])[1], head, autocast)


class _HeadReached(BaseException):
    """Ends an exit before its head runs; no `except Exception` of the model's code catches it."""


def _read_head_inputs(run: Callable[[], Any], heads: Sequence[Any]) -> list[Any]:
    """Return what some heads read in a run, which ends before the last one."""
    values: list[Any] = []

    def record(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        values.append(tree_map(torch.clone, inputs[0]))  # an in-place operation may follow
        if len(values) == len(heads):
            raise _HeadReached

    with ExitStack() as hooks, suppress(_HeadReached):
        for head in heads:
            hooks.enter_context(head.register_forward_pre_hook(record))
        run()
    return values


# ---- by trying -------------------------------------------------------------------------------------------------------


def _prove(
    module: Any, candidate: FrozenPrefix, trained: Sequence[Tensor], x: Tensor, other: Tensor
) -> FrozenPrefix | None:
    """Return the segments of a candidate whose values have the same bits in every trial."""

    def run(batch: Tensor, seed: int) -> list[tuple[Any, Any]]:
        with isolate_rng(x.device, seed):
            return list(candidate.run(module, batch))

    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train()
    first = run(x, 1)
    half = len(x) // 2
    mixed = torch.cat([other[:half], x[: len(x) - half].flip(0)])  # at other positions, beside others
    for parameter in trained:
        parameter.add_(torch.randn_like(parameter) * 0.1 + 0.05)
    again = run(mixed, 2)
    module.eval()
    evaluated = run(x, 3)
    if any(not torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers()):
        return None
    count, positions = 0, torch.arange(len(x) - half).flip(0)
    while count < len(first):
        pairs = zip(first[count], again[count], evaluated[count], strict=True)
        same = [_is_same(a, b, positions, half) and _is_same(a, c) for a, b, c in pairs]
        if not same[0] or not (same[1] or count + 1 == len(module.exits)):  # no segment needs the last state
            break
        count += 1
    if not count:
        return None
    last = None if count == len(module.exits) else CachedValue(tree_flatten(first[count - 1][1])[1])
    prefix = FrozenPrefix(candidate.exits[:count], last)
    module.train()
    with isolate_rng(x.device, 4):  # dropout above the prefix is on
        plain = outputs(module, x)
    values = prefix.compute_values(module, x)
    with isolate_rng(x.device, 4):
        logits = prefix.compute_logits(module, values)
    same_logits = len(plain) == len(logits) and all(map(torch.equal, plain, logits))
    return prefix if same_logits else None


def _is_same(a: Any, b: Any, positions: Tensor | None = None, start: int = 0) -> bool:
    """Tell whether two trees of tensors [B, ...] have the same bits: `a` at some positions, and `b` from a start on."""
    (first, structure), (second, other) = tree_flatten(a), tree_flatten(b)
    if structure != other or not all(isinstance(t, Tensor) and t.dim() for t in (*first, *second)):
        return False
    for one, two in zip(first, second, strict=True):
        rows, others = (one, two) if positions is None else (one[positions.to(one.device)], two[start:])
        if one.shape != two.shape or one.dtype != two.dtype or not torch.equal(rows, others):
            return False
    return True
