"""What PyTorch's norms of weights keep beside a weight, and what of it a mean or a part of the weight would not fit.

- A spectral norm, old or new, divides a weight W by u'Wv. Each training forward moves u and v towards the first
  singular vectors of W. Those of another matrix, a mean over clients or a part of the full model's, give another norm
  than 1. So no state has them, and who loads a state computes them from the weight.
- A product of Householder reflections (`orthogonal`) keeps signs on the diagonal of its weight, and reads them as whole
  numbers. The mean of ones may be just below 1, which would be read as 0.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.parametrizations import _OrthMaps, _Orthogonal, _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm


class _SpectralVectors(NamedTuple):
    """One spectral norm: the module that has its vectors, that module's name, their names in it, and W."""

    module: nn.Module
    prefix: str
    u: str
    v: str
    matrix: Tensor


def list_vectors(module: nn.Module) -> frozenset[str]:
    """Return the names of the vectors of spectral norms."""
    return frozenset(f"{norm.prefix}{leaf}" for norm in _list_norms(module) for leaf in (norm.u, norm.v))


def forget_vectors(module: nn.Module) -> None:
    """Take the vectors of spectral norms out of a module's `state_dict`."""
    for norm in _list_norms(module):
        norm.module._non_persistent_buffers_set |= {norm.u, norm.v}


@torch.no_grad()
def settle_norms(module: nn.Module, is_saved: bool = False) -> None:
    """Make what norms keep beside the weights fit the weights that were loaded.

    Args:
        module: The module.
        is_saved: Whether its `state_dict` has the vectors of spectral norms from now on.
    """
    for diagonal in _list_signs(module):
        diagonal.copy_(torch.where(diagonal < 0, -1.0, 1.0))
    for norm in _list_norms(module):
        u, v = getattr(norm.module, norm.u), getattr(norm.module, norm.v)
        rows, columns = norm.matrix.shape
        w, short, long = (norm.matrix, u, v) if rows <= columns else (norm.matrix.T, v, u)
        gram = w @ w.T
        if bool(gram.isfinite().all()):  # else the loss is not, and who checks it says so
            short.copy_(torch.linalg.eigh(gram)[1][:, -1])
            long.copy_(normalize(w.T @ short, dim=0))
        if is_saved:
            norm.module._non_persistent_buffers_set -= {norm.u, norm.v}


def has_norms(module: nn.Module) -> bool:
    """Return whether `settle_norms` does anything."""
    return any(True for _ in _list_norms(module)) or any(True for _ in _list_signs(module))


def _list_norms(module: nn.Module) -> Iterator[_SpectralVectors]:
    for name, part in module.named_modules():
        if isinstance(part, ParametrizationList) and any(isinstance(one, _SpectralNorm) for one in part):
            weight = part.original if part.is_tensor else None
            for i, one in enumerate(part):
                if weight is None:
                    break
                if isinstance(one, _SpectralNorm) and hasattr(one, "_u"):
                    yield _SpectralVectors(one, f"{name}.{i}.", "_u", "_v", one._reshape_weight_to_matrix(weight))
                weight = one(weight) if i + 1 < len(part) else weight
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm) and (weight := getattr(part, f"{hook.name}_orig")) is not None:
                matrix = hook.reshape_weight_to_matrix(weight)
                yield _SpectralVectors(part, f"{name}." if name else "", f"{hook.name}_u", f"{hook.name}_v", matrix)


def _list_signs(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        if isinstance(part, ParametrizationList) and part.is_tensor and part.original is not None:
            first = part[0]
            if isinstance(first, _Orthogonal) and first.orthogonal_map == _OrthMaps.householder:
                yield part.original.diagonal(dim1=-2, dim2=-1)
