"""Part 4 of the proof: a smaller model can take its part of the state that training forwards leave behind.

Such state is derived: a training forward computes it, and no optimizer steps it. PyTorch's batch norms keep none here
(see `build_module`). State of the data, such as a codebook of moving averages, is compared by the other parts, after
training forwards on the full model have filled it. State of the parameters alone, such as the vectors of a spectral
norm written by hand, must be the same whether it is cut and then updated, or updated and then cut: the vectors of the
full matrix are not those of a part of it. State of the data that mixes channels is taken for the first kind.
"""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleetfit.anatomy import State, named_tensors
from fleetfit.anatomy.meta import Operations
from fleetfit.anatomy.proof.full import (
    FullModel,
    KeptPlaces,
    difference,
    overlay,
    read_outputs,
    use_float64,
)
from fleetfit.anatomy.proof.levels import load_level
from fleetfit.anatomy.proof.masked import CannotRun, MaskedCut, build_small
from fleetfit.errors import ModelError, quote_some
from fleetfit.seeds import isolate_rng
from fleetfit.submodel import Submodel

_SETTLING, _STEPS = 8, 3  # training forwards before parts 1 to 3, and in this part


def settle_derived_state(full: FullModel) -> tuple[str, ...]:
    """Give a full model the state that training forwards leave; return the tensors that depend on parameters alone.

    The state stays as it is where no buffer changes in the first forward, where the forward fails (training then names
    the error), or where numbers are not finite.
    """
    fixed = [n for n, t, _ in named_tensors(full.module) if not t.requires_grad and n in full.layout.tensors]
    if not fixed:
        return ()
    whole = Submodel({}, full.layout.exits)
    try:
        module = load_level(full, whole)  # of its own, since training forwards may change more than the state
        with _Reached(full.x) as reached:
            first = _run_training(module, full.x, 1, fixed)
        changed = [name for name in fixed if not torch.equal(first[name], full.state[name].to(first[name]))]
        if not changed:
            return ()
        tensors = {name: tensor for name, tensor, _ in named_tensors(module)}
        unreached = [name for name in changed if not reached.holds(tensors[name])]
        one = full.x[:1].flip(*range(1, full.x.dim())) if full.x.dim() > 1 else full.x[:1]
        other = _run_training(load_level(full, whole), one.expand_as(full.x).clone(), 1, unreached)
        last = _run_training(module, full.x, _SETTLING, changed)
    except CannotRun:
        return ()
    state = overlay(full.state, {name: tensor.float() for name, tensor in last.items()})
    expected = full.outputs(state)
    if all(bool(torch.isfinite(t).all()) for t in (*last.values(), *expected)):
        full.state, full.expected = state, expected
    return tuple(name for name in unreached if _is_close(other[name], first[name], full.tolerance))


def check_derived_state(full: FullModel, names: Sequence[str], cuts: Iterable[MaskedCut]) -> None:
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
        after = _run_training(load_level(full, Submodel({}, full.layout.exits)), full.x, _STEPS, names)
        for cut in cuts:
            _compare(full, cut, after)


def _compare(full: FullModel, cut: MaskedCut, after: State) -> None:
    places = KeptPlaces(full.layout, cut.channels)
    module, part = build_small(full, cut.channels), places.cut(after)
    own = _run_training(module, full.x, _STEPS, part)
    stale = [name for name in part if not _is_close(own[name], part[name], full.tolerance)]
    if not stale:
        return
    logits = []
    for state in (part, own):
        full.load(overlay(places.cut(full.state), state), module)
        with torch.no_grad(), use_float64():
            logits.append(read_outputs(module, full.x))
    error = difference(*logits)
    if error > full.tolerance:
        raise ModelError(
            f"{quote_some(stale)}: derived state, which training forwards compute from the parameters. A smaller model "
            f"computes another state than its part of the full model's: with {cut.how} kept, {_STEPS} training "
            f"forwards in which no parameter moves change its outputs by {error:.2g} of the outputs' size; expected no "
            "change. The vectors of a spectral norm written by hand are such state: they belong to the full matrix. "
            "Compute it from the parameters in every forward and keep no buffer (PyTorch's spectral_norm, or a "
            "parametrization that returns w / torch.linalg.matrix_norm(w.flatten(1), 2)), or do not cut these layers: "
            "Axis(..., scaled=False)."
        )


def _run_training(module: nn.Module, x: Tensor, steps: int, names: Iterable[str]) -> State:
    """Run training forwards; return tensors after them."""
    module.train()
    try:
        with isolate_rng(x.device, 0), torch.enable_grad(), use_float64():
            for _ in range(steps):
                module(x)
    except Exception as error:
        raise CannotRun(str(error)) from error
    finally:
        module.eval()
    tensors = {name: tensor for name, tensor, _ in named_tensors(module)}
    return {name: tensors[name].detach().clone() for name in names}


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * b.abs().max()).all()) if b.numel() else True


# ---- tensors that no input reaches ---------------------------------------------------------------------------------
# State of the parameters alone is reached by no input, and other inputs do not change it. Neither is enough: a number
# taken out of a tensor is not followed, and the count of an index may not change.


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
        """Return whether a tensor was computed from the input."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; what it returns or writes to is reached if one of its arguments is."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and self.holds(leaf) for leaf in tree_leaves((args, kwargs))):
            written = [a for a, argument in zip(args, func._schema.arguments, strict=False)
                       if argument.alias_info is not None and argument.alias_info.is_write]  # fmt: skip
            self._add(out, written)
        return out
