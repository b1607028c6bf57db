"""Part 4 of the proof: a smaller model can take its part of the state that training forwards leave behind.

Such state is derived: a training forward computes it, and no optimiser steps it. PyTorch's batch norms keep none here
(see `build_module`). There are two kinds:
- From the data, such as an average per channel, a batch norm written by hand, or a codebook of moving averages. A small
  model sees other activations than the full one, so that nothing but the full model with its other channels at zero can
  be compared with it. Training forwards on the full model fill this state before the other parts compare.
- From the parameters alone, such as the vectors of a spectral norm. The parameters of a small model are a part of the
  full one's, so that cutting and updating must give the same in either order. The vectors of the full matrix are not
  those of a part of it, and the level would compute with a wrong norm.

State that is computed from the data and mixes channels (a whitening matrix) is taken for the first kind.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleetfit.check.full import Full, KeptPlaces, difference, in_float64, load
from fleetfit.check.masked import CannotRun, MaskedCut, build_small, load_small
from fleetfit.errors import ModelError
from fleetfit.layout import State, build_module, named_tensors, outputs
from fleetfit.layout.meta import Operations
from fleetfit.seeds import isolate_rng

_SETTLING, _STEPS = 8, 3  # training forwards before the other parts compare, and here
_MOST_LISTED = 4


def settle_derived_state(full: Full) -> tuple[str, ...]:
    """Give a full model the state that training forwards leave; return what depends on the parameters alone.

    Where there are buffers, the first forward tells whether one of them changes. Nothing is done where it fails, which
    the training step says, or where numbers are not finite.
    """
    fixed = [n for n, t, _ in named_tensors(full.module) if not t.requires_grad and n in full.layout.tensors]
    if not fixed:
        return ()
    try:
        module = _build_full(full)
        with _Reached(full.x) as reached:
            first = _run_training(module, full.x, 1, fixed)
        changed = [name for name in fixed if not torch.equal(first[name], full.state[name].to(first[name]))]
        if not changed:
            return ()
        own = {name: tensor for name, tensor, _ in named_tensors(module)}
        ours = [name for name in changed if not reached.holds(own[name])]
        other = _run_training(_build_full(full), _other_input(full.x), 1, ours)
        last = _run_training(module, full.x, _SETTLING, changed)
    except CannotRun:
        return ()
    state = {**full.state, **{name: tensor.float() for name, tensor in last.items()}}
    expected = full.outputs(state)
    if all(bool(torch.isfinite(t).all()) for t in (*last.values(), *expected)):
        full.state, full.expected = state, expected
    return tuple(name for name in ours if _is_close(other[name], first[name], full.tolerance))


def check_derived_state(full: Full, names: Sequence[str], cuts: Iterable[MaskedCut]) -> None:
    """Check that what a smaller model computes from its parameters is its part of what the full model computes.

    Args:
        full: The full model.
        names: Tensors that training forwards compute from the parameters alone.
        cuts: Which channels to keep.

    Raises:
        ModelError: A small model answers otherwise with its own state than with its part of the full model's.
    """
    if not names:
        return
    with contextlib.suppress(CannotRun):  # the training step says so
        after = _run_training(_build_full(full), full.x, _STEPS, names)
        for cut in cuts:
            _compare(full, cut, after)


def _compare(full: Full, cut: MaskedCut, after: State) -> None:
    places = KeptPlaces(full.layout, cut.channels)
    module, part = build_small(full, places), places.cut(after)
    own = _run_training(module, full.x, _STEPS, part)
    stale = [name for name in part if not _is_close(own[name], part[name], full.tolerance)]
    if not stale:
        return
    answers = []
    for state in (part, own):
        load_small(full, module, {**places.cut(full.state), **state})
        with torch.no_grad(), in_float64():
            answers.append(outputs(module, full.x))
    error = difference(*answers)
    if error > full.tolerance:
        more = f" and {len(stale) - _MOST_LISTED} more" if len(stale) > _MOST_LISTED else ""
        listed = ", ".join(f'"{name}"' for name in stale[:_MOST_LISTED]) + more
        raise ModelError(
            f"{listed}: derived state, which training forwards compute from the parameters. A part of the full model's "
            f"is not what a smaller model computes from its part of the parameters: with {cut.how} kept, {_STEPS} "
            f"training forwards in which no parameter moves change what it answers by {error:.2g} of the outputs' "
            "size; expected no change. The vectors of a spectral norm are such state: they belong to the full matrix. "
            "Compute it from the parameters in every forward and keep no buffer (instead of spectral_norm, a "
            "parametrization that returns w / torch.linalg.matrix_norm(w.flatten(1), 2)), or do not cut these layers: "
            "Axis(..., scaled=False)."
        )


def _build_full(full: Full) -> nn.Module:
    """Build a module of its own, since training forwards may change more than the state."""
    module = build_module(full.architecture, full.layout.full_sizes, full.layout.exits).double()
    load(module, {**full.base, **full.state})
    return module


def _run_training(module: nn.Module, x: Tensor, steps: int, names: Iterable[str]) -> State:
    """Run training forwards; return what tensors are then.

    Raises:
        CannotRun: They fail.
    """
    module.train()
    try:
        with isolate_rng(x.device, 0), torch.enable_grad(), in_float64():
            for _ in range(steps):
                module(x)
    except Exception as error:
        raise CannotRun(str(error)) from error
    finally:
        module.eval()
    own = {name: tensor for name, tensor, _ in named_tensors(module)}
    return {name: own[name].detach().clone() for name in names}


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * b.abs().max()).all()) if b.numel() else True


# ---- which of it depends on the parameters alone: what no input reaches, and what other inputs do not change --------
# Neither is enough: a number taken out of a tensor is not followed, and what an index counts may not change.


def _other_input(x: Tensor) -> Tensor:
    """Return one sample, turned round, as often as there are samples."""
    one = x[:1].flip(*range(1, x.dim())) if x.dim() > 1 else x[:1]
    return one.expand_as(x).clone()


class _Reached(Operations):
    """Follows what is computed from an input, by the storages that hold it."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}  # kept, since another tensor may else get the place of one that is gone
        self._add(x)

    def _add(self, *values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = storage

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor was computed from the input."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; what it returns or writes to is reached if one of its arguments is."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and self.holds(leaf) for leaf in tree_leaves((args, kwargs))):
            written = [a for a, known in zip(args, func._schema.arguments, strict=False)
                       if known.alias_info is not None and known.alias_info.is_write]  # fmt: skip
            self._add(out, written)
        return out
