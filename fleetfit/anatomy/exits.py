"""Early exits of an instance: where they may sit, their classifiers, and the module that has them."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.anatomy import Segment, evaluate_kept_norms
from fleetfit.anatomy.copies import PastExit, copy_instance
from fleetfit.anatomy.known_values import set_values
from fleetfit.anatomy.logits import get_logits
from fleetfit.anatomy.masks import call_instance
from fleetfit.anatomy.observe import Observation, get_first, has_axis
from fleetfit.anatomy.plan import DerivedPlan, ExitPoint
from fleetfit.errors import ModelError, did_you_mean

_MAX_EXITS = 12
_LEAST_SHARE = 1 / 3  # of the parameters between words and classes, in a chain of blocks
_LEAST_BLOCK = 1 / 50  # of the parameters of the block before
_CLOSE = 1e-4  # of logits by other kernels
_FEW_MODULES = 2  # behind the last block of a chain: the instance's own classifier
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""PyTorch's norms; those of batches and of instances have one base."""

# ---- where they sit ------------------------------------------------------------------------------------------------


def find_exits(observation: Observation, exits: str | Sequence[str]) -> tuple[ExitPoint, ...]:
    """Return the early exits of an instance, shallow to deep.

    Args:
        observation: What was seen of it.
        exits: "auto" for its own exits if it returns a list of logits, else the longest chain of blocks; "none"; or
            names of modules.

    Raises:
        ModelError: A named module cannot have an exit after it.
    """
    if exits == "none":
        return ()
    if exits == "auto" and observation.early:
        return tuple(replace(_make_point(observation, name), is_own=True) for name in observation.early)
    names = _find_chain(observation) if exits == "auto" else _check_names(observation, exits)
    return tuple(_make_point(observation, name) for name in names)


def find_tail(observation: Observation, points: Sequence[ExitPoint], heads: str) -> tuple[str, ...]:
    """Return the modules behind the last block that make the logits, where early exits share them.

    These are tried: what the last block gave must become the logits by one after the other.

    Args:
        observation: What was seen of the instance.
        points: Its early exits.
        heads: "own" for a classifier of its own at each exit, "shared", or "auto": shared where the instance's last
            modules give logits of each place and have more parameters than a block, as with a large vocabulary.

    Raises:
        ModelError: They are to be shared, and give something else than the logits.
    """
    if heads == "own" or not points or points[0].is_own:
        return ()
    net, outputs, blocks = observation.net, observation.outputs, _list_blocks(observation)
    last = blocks[-1] if blocks else points[-1].module
    leaves = [name for name, part in net.named_modules() if name and next(part.children(), None) is None]
    tail = [name for name in outputs if name in leaves and outputs[name].step > outputs[last].step]
    size = sum(p.numel() for name in tail for p in net.get_submodule(name).parameters())
    is_large = observation.logits.dim() == 3 and size > sum(p.numel() for p in net.get_submodule(last).parameters())
    if heads == "auto" and not is_large:
        return ()
    end = replace(_make_point(observation, last), module="")
    if tail and all(replace(point, module="") == end for point in points) and _ends(observation, last, tail):
        return tuple(tail)
    if heads == "auto":
        return ()
    raise ModelError(
        f'heads = "shared": the output of {last} does not become the logits by '
        f'{", ".join(tail) or "a module behind it"} alone, or the exits give other channels. Set heads = "own".',
        key="derive.heads",
    )


def _ends(observation: Observation, last: str, tail: Sequence[str]) -> bool:
    """Return whether modules, one after the other, turn the last block's output into the logits."""
    value, logits = observation.outputs[last].tensor, observation.logits
    try:
        with torch.no_grad():
            for name in tail:
                value = copy_instance(observation.net.get_submodule(name)).eval()(value)
    except Exception:  # it takes something else
        return False
    return value.shape == logits.shape and torch.allclose(value, logits, rtol=_CLOSE, atol=_CLOSE)


def _make_point(observation: Observation, name: str) -> ExitPoint:
    shape, (d, segments) = observation.outputs[name].tensor.shape, observation.find_channels(name)
    if not has_axis(segments) and not observation.example.is_floating_point():
        d, segments = len(shape) - 1, None  # no axis tells channels from places of tokens
    return ExitPoint(name, len(shape), d, segments or (Segment(None, shape[d]),))


def _can_end(observation: Observation, name: str) -> bool:
    output = observation.outputs.get(name)
    return (
        output is not None
        and output.calls == 1
        and 2 <= output.tensor.dim() <= 5
        and output.tensor.shape[0] == observation.example.shape[0]
    )


def _check_names(observation: Observation, names: str | Sequence[str]) -> list[str]:
    """Return named modules in the order in which they end."""
    if isinstance(names, str):
        raise ModelError(f'exits must be "auto", "none" or a list of module names, got "{names}".', key="derive.exits")
    known = [name for name, _ in observation.net.named_modules() if name]
    last = max(observation.first_use.values(), default=0)
    for name in names:
        if name not in known:
            raise ModelError(
                f'exits: the module has no "{name}".{did_you_mean(str(name), known)} Modules after which an exit may '
                f"sit: {', '.join(_find_chain(observation)) or 'none was found'}.",
                key="derive.exits",
            )
        if not _can_end(observation, name) or observation.outputs[name].step >= last:
            raise ModelError(
                f'exits: "{name}" cannot have a classifier after it: it must run once, give a tensor [batch, ...], and '
                "more of the model must follow. Name another module.",
                key="derive.exits",
            )
    return sorted(dict.fromkeys(names), key=lambda name: observation.outputs[name].step)


def _list_blocks(observation: Observation) -> list[str]:
    """Return the blocks of the longest chain with a third of the parameters, but for those of words and classes."""
    heads = {name for name, out in observation.outputs.items() if name and out.tensor is observation.logits}
    of_words_or_classes = {
        id(p)
        for name, part in observation.net.named_modules()
        if isinstance(part, nn.Embedding) or name in heads
        for p in part.parameters(recurse=False)
    }
    total = sum(p.numel() for p in observation.net.parameters() if id(p) not in of_words_or_classes)
    chains = [(weight, names) for weight, names in _list_chains(observation) if weight >= _LEAST_SHARE * total]
    return max(chains, key=lambda chain: (len(chain[1]), chain[0]))[1] if chains else []


def _find_chain(observation: Observation) -> list[str]:
    """Return the modules after which classifiers may sit: blocks, but for the one before the last classifier."""
    outputs, names = observation.outputs, _list_blocks(observation)
    if not names:
        return []
    behind = {name.rpartition(".")[0] for name, step in observation.first_use.items() if step > outputs[names[-1]].step}
    if len(behind) <= _FEW_MODULES:
        names = names[:-1]
    last = max(observation.first_use.values())
    names = [name for name in names if outputs[name].step < last]
    step = -(-len(names) // _MAX_EXITS) or 1
    return names[::-1][::step][::-1]


def _list_chains(observation: Observation) -> Iterator[tuple[int, list[str]]]:
    """Yield chains of blocks: the number of their parameters, and the last module of each block."""
    net, outputs = observation.net, observation.outputs
    for name, part in net.named_modules():
        prefix = f"{name}." if name else ""
        children = {f"{prefix}{child}": module for child, module in part.named_children()}
        ran = sorted((n for n in children if _can_end(observation, n)), key=lambda n: outputs[n].step)
        if not isinstance(part, nn.Sequential | nn.ModuleList):  # stages or blocks beside each other: layer1 ... layer4
            kinds = Counter(type(children[n]) for n in ran if not type(children[n]).__module__.startswith("torch."))
            ran = [
                n
                for n in ran
                if next(children[n].parameters(), None) is not None
                and (isinstance(children[n], nn.Sequential) or kinds[type(children[n])] > 1)
            ]
            if len(ran) < 2:
                continue
        blocks = [block for n in ran for block in _open_stage(observation, n, children[n])]
        follows = itertools.pairwise(blocks)
        if any(
            outputs[after].made_of and not outputs[after].made_of & outputs[before].mark for before, after in follows
        ):
            continue  # modules beside each other, such as experts
        weights = {n: sum(p.numel() for p in net.get_submodule(n).parameters()) for n in blocks}
        heavy: list[str] = []
        for n in blocks:
            least = _LEAST_BLOCK * weights[heavy[-1]] if heavy else 0  # a gate of a few channels belongs to its block
            if weights[n] > least and not isinstance(net.get_submodule(n), (*NORMS, nn.PReLU)):
                heavy.append(n)
        if len(heavy) >= 2:
            ends = [blocks[blocks.index(n) - 1] for n in heavy[1:]] + [blocks[-1]]
            yield sum(weights.values()), ends


def _open_stage(observation: Observation, name: str, part: nn.Module) -> list[str]:
    """Return the blocks of a stage: a Sequential of modules that are not PyTorch's; else the module itself."""
    inner = [f"{name}.{child}" for child, _ in part.named_children()]
    own = [not type(module).__module__.startswith("torch.") for module in part.children()]
    if isinstance(part, nn.Sequential) and inner and all(own) and all(_can_end(observation, n) for n in inner):
        return inner
    return [name]


# ---- their classifiers, and the module ----------------------------------------------------------------------------


class ExitHead(nn.Module):
    """An early classifier: mean over places, layer norm, linear.

    Args:
        channels: Channels of the output that it reads.
        classes: Its logits.
        d: The dimension of channels.
        each_place: Whether it gives logits at each place, as for next tokens.
    """

    def __init__(self, channels: int, classes: int, d: int, each_place: bool) -> None:
        super().__init__()
        self.d, self.each_place = d, each_place
        self.norm, self.fc = nn.LayerNorm(channels), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [batch, classes], or [batch, places, classes]; of 2 dimensions, the mean is taken already."""
        places = [d for d in range(1, x.dim()) if d != self.d] if x.dim() > 2 else []
        # the copy, since an in-place operation may follow on what was read
        pooled = x.clone() if self.each_place or not places else x.mean(places)
        logits: Tensor = self.fc(self.norm(pooled))
        return logits


class ModuleWithExits(nn.Module):
    """An instance, or a level of it, with classifiers after some of its modules. It ends after the last one.

    Args:
        net: The module.
        exits: Block counts of its exits; exit e is after `plan.exits[e - 1]`, the last is the module's own.
        heads: The early classifiers that the module has not itself, by block count.
        plan: The plan of the instance.
        samples: Samples of whole numbers, whose places forward may read, for passes without numbers.
    """

    def __init__(
        self,
        net: nn.Module,
        exits: tuple[int, ...],
        heads: Mapping[int, nn.Module],
        plan: DerivedPlan,
        samples: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.net, self.exits, self.mask, self.answers, self.tail = net, exits, plan.mask, plan.answers, plan.tail
        self.ends = tuple(plan.exits[e - 1].module for e in exits if e <= len(plan.exits))
        self.heads = nn.ModuleDict({str(e): head for e, head in heads.items()})
        self._values = None if samples is None or samples.is_floating_point() else samples.numpy()
        self._visit: Callable[[int, Tensor], bool] | None = None
        self._first = 0  # of the exits that are read
        self.returns_list = True
        """False: forward returns the logits of its only exit themselves, as the instance does."""

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules but the norms that keep their statistics."""
        super().train(mode)
        evaluate_kept_norms(self)
        return self

    def forward(self, x: Tensor) -> list[Tensor] | Tensor:
        """Return the logits of each exit, shallow to deep."""
        logits: dict[int, Tensor] = {}
        last = len(self.exits) - 1
        visit = self._visit

        def add(i: int, z: Tensor) -> None:
            logits[i] = z if visit is None else torch.empty(0)  # a visitor keeps what it needs
            if (visit is not None and visit(i, z)) or (i == last and i < len(self.ends)):
                raise PastExit

        def make_hook(i: int) -> Callable[..., None]:
            return lambda module, args, out: add(i, self._classify(i, out, x))

        handles = [
            self.net.get_submodule(name).register_forward_hook(make_hook(i))
            for i, name in enumerate(self.ends)
            if i >= self._first
        ]
        if x.is_meta and self._values is not None and self._values.shape[1:] == x.shape[1:]:
            set_values(x, torch.from_numpy(self._values[np.arange(len(x)) % len(self._values)]))  # seen by no mode
        try:
            out = call_instance(self.net, x, self.mask, self.answers)
            add(last, get_logits(out))
        except PastExit as end:
            if end.args and last not in logits:  # the block was skipped, so the next one's input is what left it
                with contextlib.suppress(PastExit):
                    add(last, self._classify(last, end.args, x))
        finally:
            for handle in handles:
                handle.remove()
        if visit is None:  # an exit whose block was skipped is the next one in this step
            for i in reversed(range(self._first, last)):
                logits.setdefault(i, logits[i + 1])
        every = [logits[i] for i in sorted(logits)]
        return every if self.returns_list else every[-1]

    def _classify(self, i: int, out: Any, x: Tensor) -> Tensor:
        """Return the logits of an exit that reads what a module gave."""
        key, hidden = str(self.exits[i]), get_first(out)
        if hidden is None:
            raise ModelError(f"{self.ends[i]} gives no tensor for the exit after it.", key="model.derive.exits")
        if key in self.heads:
            hidden = self.heads[key](self._pool(self.heads[key], hidden, x))
        for name in self.tail:
            hidden = self.net.get_submodule(name)(hidden)
        return hidden

    def _pool(self, head: nn.Module, hidden: Tensor, x: Tensor) -> Tensor:
        """Return the mean over a text's own tokens, where a classifier takes the mean over places."""
        d = getattr(head, "d", 0)
        if self.mask is None or head.each_place or hidden.dim() != 3 or hidden.shape[3 - d] != x.shape[1]:
            return hidden
        tokens = self.mask.find_tokens(x).unsqueeze(d)
        return hidden.masked_fill(~tokens, 0).sum(3 - d) / tokens.sum(3 - d)

    def visit_exits(self, x: Tensor, visit: Callable[[int, Tensor], bool], every: bool = True) -> None:
        """Call `visit(i, logits)` at each exit, shallow to deep, until it returns True; nothing behind is computed.

        Args:
            x: Samples [B, ...].
            visit: Takes the exit, from 0, and its logits of the whole batch.
            every: False: at the last exit alone, without the added classifiers of the others.
        """
        self._first = 0 if every else len(self.exits) - 1
        # in half precision, forward's results are converted behind the exits
        self._visit = lambda i, z: visit(i, z.float() if z.dtype == torch.bfloat16 else z)
        try:
            self.forward(x)  # with what wraps it: precision, device
        finally:
            self._visit, self._first = None, 0
