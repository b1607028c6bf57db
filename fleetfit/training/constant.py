"""Which part of a model gives each sample the same values, whatever is trained.

These are the segments below the first thing that depends on trained values, on chance, or on the other samples of a
batch. It is found by looking and proved by trying. Looking: a segment is not constant where a module that runs in it
has a trained parameter, drops something at random, or is a batch norm. Trying: a batch is run in training mode; then
some of its samples again, at other places, beside other samples, with other trained values and another seed; then in
evaluation mode. What does not have the same bits each time is not constant, and nothing is where a buffer changes.

All of it runs in batches of one fixed shape, `BATCH` samples: there, each sample has the same bits in any company, so
that values which are kept are the same in every process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from fleetfit.layout import HasSegments, outputs
from fleetfit.seeds import isolate_rng

BATCH = 32
"""Samples of each batch; fewer are filled up."""


@dataclass(frozen=True, eq=False)
class Part:
    """What is kept of a constant segment's exit, or of the last constant carry.

    Attributes:
        form: How the kept tensors make the value.
        head: The module that makes logits of it, where what the classifier reads is kept, and not the whole carry.
        half: The kind of numbers that the head computes in where that is not as always, or None.
    """

    form: Any
    head: nn.Module | None = None
    half: torch.dtype | None = None

    def value(self, tensors: list[Tensor]) -> Any:
        """Return the value that the kept tensors are of."""
        return tensors[0] if self.head is not None else tree_unflatten(tensors, self.form)

    def logits(self, module: Any, i: int, value: Any) -> Tensor:
        """Return the logits of exit i of what is kept."""
        head: Callable[[Any], Tensor] = self.head or partial(module.head, i)
        if self.half is None:
            return head(value)
        with torch.autocast(value.device.type, dtype=self.half, cache_enabled=False):
            return head(value).float()


@dataclass(frozen=True, eq=False)
class ConstantPart:
    """The constant part of a module.

    Attributes:
        segments: How many; at least one.
        exits: What is kept for the exit of each of them.
        carry: What is kept of the state after the last of them; None where no segment follows.
    """

    segments: int
    exits: tuple[Part, ...]
    carry: Part | None


def constant_of(module: nn.Module, trained: Sequence[Tensor], x: Tensor, other: Tensor) -> ConstantPart | None:
    """Return what is constant in a module, or None where it is less than a segment.

    Args:
        module: Its mode and parameters are as before afterwards.
        trained: Its trained parameters.
        x: Samples [BATCH, ...].
        other: Other samples [BATCH, ...].
    """
    if not isinstance(module, HasSegments) or not isinstance(module, nn.Module) or not trained:
        return None
    before, training = [p.detach().clone() for p in trained], module.training
    try:
        with isolate_rng(x.device), torch.no_grad():
            return _proved(module, trained, x, other)
    finally:
        module.train(training)
        with torch.no_grad():
            for parameter, value in zip(trained, before, strict=True):
                parameter.copy_(value)


def _proved(module: Any, trained: Sequence[Tensor], x: Tensor, other: Tensor) -> ConstantPart | None:
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    runner = _Runner(module, {id(p) for p in trained})
    module.train()
    first = runner.run(x, 1)
    half = len(x) // 2
    mixed = torch.cat([other[:half], x[: len(x) - half].flip(0)])  # at other places, beside others
    for parameter in trained:
        parameter.add_(torch.randn_like(parameter) * 0.1 + 0.05)
    again = runner.run(mixed, 2)
    module.eval()
    calm = runner.run(x, 3)
    if any(not torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers()):
        return None
    count, places = 0, torch.arange(len(x) - half).flip(0)
    for one, two, three in zip(first, again, calm, strict=True):
        if not (one.steady and _same(one.kept, two.kept, places, half) and _same(one.kept, three.kept)):
            break
        count += 1
    while count and count < len(first) and not _whole_carry(first, again, calm, count, places, half):
        count -= 1
    if not count:
        return None
    last = None if count == len(first) else Part(tree_flatten(first[count - 1].carry)[1])
    exits = tuple(Part(tree_flatten(one.kept)[1], one.head, one.half) for one in first[:count])
    found = ConstantPart(count, exits, last)
    return found if _replayed(module, found, first, x) else None


def _whole_carry(first: Any, again: Any, calm: Any, count: int, places: Tensor, half: int) -> bool:
    """Tell whether the state after so many segments is constant, from which the rest begins."""
    one, two, three = (found[count - 1].carry for found in (first, again, calm))
    return _same(one, two, places, half) and _same(one, three)


def _same(a: Any, b: Any, places: Tensor | None = None, at: int = 0) -> bool:
    """Tell whether two nests of tensors [B, ...] have the same bits; of `b` the rows from `at`, of `a` these rows."""
    (first, form), (second, other) = tree_flatten(a), tree_flatten(b)
    if form != other or not all(isinstance(t, Tensor) and t.dim() for t in (*first, *second)):
        return False
    for one, two in zip(first, second, strict=True):
        mine, theirs = (one, two) if places is None else (one[places.to(one.device)], two[at:])
        if one.shape != two.shape or one.dtype != two.dtype or not torch.equal(mine, theirs):
            return False
    return True


def _replayed(module: Any, found: ConstantPart, first: "list[_Segment]", x: Tensor) -> bool:
    """Tell whether the logits from what is kept have the same bits as those of the whole model, with dropout on."""
    module.train()
    with isolate_rng(x.device, 4):
        plain = outputs(module, x)
    kept = [one.kept for one in first[: found.segments]]
    with isolate_rng(x.device, 4):
        again = list(logits_from(module, found, kept, first[found.segments - 1].carry))
    return len(plain) == len(again) and all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def logits_from(module: Any, found: ConstantPart, kept: list[Any], carry: Any) -> Iterator[Tensor]:
    """Yield the logits of each exit, from what is kept of the constant part.

    Args:
        module: The module.
        found: Its constant part.
        kept: The value of each of `found.exits`.
        carry: The state after the constant part.
    """
    for i, part in enumerate(found.exits):
        yield part.logits(module, i, kept[i])
    for i in range(found.segments, len(module.exits)):
        carry = module.segment(i, carry)
        yield module.head(i, carry)


# ---- one run, looked at ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Segment:
    """What one run showed of a segment.

    Attributes:
        carry: The state after it.
        kept: What its exit reads.
        head: The module that makes logits of that; None where the exit reads the carry.
        half: The kind of numbers that the head computes in where that is not as always, or None.
        steady: Whether nothing that ran in it, or below, moves.
    """

    carry: Any
    kept: Any
    head: nn.Module | None
    half: torch.dtype | None
    steady: bool


class _Runner:
    """Runs a module segment by segment and notes which of its parts ran."""

    def __init__(self, module: Any, trained: set[int]) -> None:
        self._module, self._trained = module, trained
        self._tops = list(_wholly(module, trained))

    def run(self, x: Tensor, seed: int) -> list[_Segment]:
        """Return what each segment did."""
        with isolate_rng(x.device, seed):
            return self._run(x)

    def _run(self, x: Tensor) -> list[_Segment]:
        module, found, steady = self._module, [], True
        carry, ran = _watched(module, partial(module.start, x))
        steady = not any(map(self._moves, ran))
        for i in range(len(module.exits)):
            carry, ran = _watched(module, partial(module.segment, i, carry))
            steady = steady and not any(map(self._moves, ran))
            head, given, half = self._read(i, carry)
            found.append(_Segment(carry, carry if head is None else given, head, half, steady))
        return found

    def _moves(self, part: nn.Module) -> bool:
        """Tell whether a module that ran depends on what is trained, on chance or on the batch."""
        if any(id(p) in self._trained for p in part.parameters(recurse=False)) or isinstance(part, _BatchNorm):
            return True
        rates = [value for name, value in vars(part).items() if "drop" in name.lower()]
        rate = getattr(part, "p", 0) if "drop" in type(part).__name__.lower() else 0
        return any(isinstance(r, int | float) and r > 0 for r in (*rates, rate))

    def _read(self, i: int, carry: Any) -> tuple[nn.Module | None, Any, torch.dtype | None]:
        """Return the one trained module that makes the logits of an exit, what it reads, and in which kind of numbers.

        The first is None where there is no such module.
        """
        calls: list[tuple[nn.Module, Any, Any, torch.dtype | None]] = []

        def note(part: nn.Module, given: Any, out: Any) -> None:
            kind = out.device.type if isinstance(out, Tensor) else "cpu"
            half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            calls.append((part, given, out, half))

        hooks = [top.register_forward_hook(note) for top in self._tops]
        try:
            logits = self._module.head(i, carry)
        finally:
            for hook in hooks:
                hook.remove()
        if len(calls) != 1 or calls[0][2] is not logits or len(calls[0][1]) != 1:
            return None, None, None
        head, given, _, half = calls[0]
        return head, given[0], half


def _wholly(module: nn.Module, trained: set[int]) -> Iterator[nn.Module]:
    """Yield the largest parts of a module whose parameters are all trained."""
    mine = [id(p) in trained for p in module.parameters()]
    if mine and all(mine) and not isinstance(module, nn.ModuleDict | nn.ModuleList):
        yield module
    elif any(mine):
        for part in module.children():
            yield from _wholly(part, trained)


def _watched(module: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[nn.Module]]:
    """Run something of a module; return what it gives, and which parts ran."""
    ran: list[nn.Module] = []
    hooks = [part.register_forward_pre_hook(lambda one, _: ran.append(one)) for part in module.modules()]
    try:
        return run(), ran
    finally:
        for hook in hooks:
            hook.remove()
