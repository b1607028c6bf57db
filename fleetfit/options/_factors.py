"""Two thin matrices with a given product, or with its best approximation of their rank."""

import torch
from torch import Tensor

NOTHING = 1e-6
"""Singular values below this share of the largest are rounding."""
FLATTEST = 1e-3
"""A may be so much smaller in one direction than in another; B is as much larger there."""


def nearest(product: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return B and A of the best approximation of a product, with A near a given one.

    With a = W D Z^T and V the approximation's right singular vectors, A = W D O V^T, where O is the orthogonal matrix
    nearest to D^2 Z^T V (Procrustes), and B = P A^+. Directions that the product lacks are those of a.

    Args:
        product: P [out, in].
        a: What A shall be near to [rank, in]; its rank is that of the approximation.
    """
    w, d, z = torch.linalg.svd(a, full_matrices=False)
    _, s, v = torch.linalg.svd(product, full_matrices=False)
    kept = v[: len(d)][s[: len(d)] > NOTHING * s[0]]
    if len(kept) < len(d):
        rest = torch.linalg.svd(a - (a @ kept.T) @ kept, full_matrices=False)[2][: len(d) - len(kept)]
        kept = torch.linalg.qr(torch.cat([kept, rest]).T)[0].T  # orthogonal also where a has less than its rank
    left, _, right = torch.linalg.svd(d.square()[:, None] * (z @ kept.T))
    turn = left @ right
    d = d.clamp(min=FLATTEST * float(d[0])) if d[0] > 0 else torch.ones_like(d)
    return (product @ kept.T) @ (turn.T / d) @ w.T, (w * d) @ turn @ kept


def balanced(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return B = U sqrt(S) [out, rank] and A = sqrt(S) V^T [rank, in] of the best approximation of a product."""
    u, s, v = torch.linalg.svd(product, full_matrices=False)
    sign = torch.gather(v, 1, v.abs().argmax(dim=1, keepdim=True)).sign()
    u, v, root = u * sign.T, v * sign, s.sqrt()
    b, a = product.new_zeros(len(product), rank), product.new_zeros(rank, product.shape[1])
    n = min(rank, len(s))
    b[:, :n], a[:n] = (u * root)[:, :n], (v * root[:, None])[:n]
    return b, a
