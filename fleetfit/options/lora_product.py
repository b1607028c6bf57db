"""LoRA's product B A is averaged exactly and factored again, in place of averaging A and B apart.

For each layer, with client k's matrices B_k [out of k, rank] and A_k [rank, in of k],

    P = sum_k w_k B_k A_k / sum_k w_k over the clients whose sub-model has the element,

laid out like the layer's own weight [out, in], so that a narrow client counts for its channels only; elements that no
client trained keep the server's product. Its best approximation of the layer's rank, U S V^T by singular values, is
factored into the server's next B and A. All else is averaged as usual. The factor alpha / rank is common and drops out.
Without LoRA this is the plain mean.

Many B and A have one product, and training and server optimizers see which. "nearest": A has the singular values of the
plain mean of the A_k and lies nearest to it, and B goes with it. Clients whose A_k are equal get the plain mean, and A
keeps its size, on which the steps of B depend. "balanced": B = U sqrt(S) and A = sqrt(S) V^T, the largest entry of each
row of V^T being positive. B begins at zero, so early products are small and so are both matrices then, which slows
training; a direction without product is lost for good.

Factoring moves every row of B and every column of A of a layer that a client trained, also rows and columns that no
client had, so that their product stays (but for the error of the rank). Those count as covered, with a weight of almost
nothing: server optimizers move a matrix as a whole, and FedDyn's h, the sum of the clients' movements, stays. A layer
that no client trained keeps its bits. A server optimizer starts from the factors; its result no longer has the mean
product, as without this option it no longer is the mean.

The round reports under "server", relative to the mean product (Frobenius norms over all layers), the error of the rank
(`lost`) and that of the product of the plain means (`lost_apart`). Besides twice the layers' full weights the server
needs one product per update and layer at a time, and one singular value decomposition per layer.
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.core import Federation, Server, Update
from fleetfit.hooks import CoverageMean, Method
from fleetfit.layout import Layout, State, TensorLayout
from fleetfit.machine import use_threads
from fleetfit.peft.lora import A, B

BARELY = 1e-30
"""The coverage of elements that move although no client trained them."""


def lora_product(factors: Literal["nearest", "balanced"] = "nearest") -> Method:
    """Make the option.

    Args:
        factors: Which B and A of the mean product: near the plain means, or of equal size.
    """
    return Method(make_aggregator=partial(ProductMean, factors=factors))


def find_layers(layout: Layout) -> dict[str, Layout]:
    """Return the layers with LoRA, by the beginning of their tensors' names, and the layout of each one's product."""
    layers = {}
    for name, b in layout.tensors.items():
        layer = name.removesuffix(B)
        a = layout.tensors.get(layer + A)
        if layer != name and a is not None and len(b.dims) == len(a.dims) == 2:
            product = TensorLayout((b.dims[0], a.dims[1]), b.block, b.exit, True)
            layers[layer] = Layout(layout.axes, layout.exits, {layer: product})
    return layers


class ProductMean:
    """The mean of a round, with the thin matrices of each layer factored from the mean of their products."""

    def __init__(self, federation: Federation, server: Server, factors: str) -> None:
        self._server, self._factors = server, factors
        self._mean = CoverageMean(federation, server)
        device = next(iter(server.state.values())).device
        layers = find_layers(federation.problem.layout)
        self._products = {layer: Mean(layout, device) for layer, layout in layers.items()}

    def add(self, update: Update, weight: float) -> None:
        """Add an update, and the products of its thin matrices."""
        for layer, mean in self._products.items():
            if layer + B in update.state:
                with use_threads(1):
                    product = update.state[layer + B] @ update.state[layer + A]
                mean.add(update.submodel, {layer: product}, weight)
        self._mean.add(update, weight)

    def result(self) -> Aggregate:
        """Return the mean, with factored products."""
        aggregate = self._mean.result()
        layers = [
            factor_layer(layer, self._server.state, aggregate, mean.result(), self._factors)
            for layer, mean in self._products.items()
        ]
        layers = [(matrices, norms) for matrices, norms in layers if norms]
        if not layers:
            return aggregate
        factors = {name: tensor for matrices, _ in layers for name, tensor in matrices.items()}
        lost, apart, size = (sum(norms) for norms in zip(*(norms for _, norms in layers), strict=True))
        return Aggregate(
            {name: factors.get(name, tensor) for name, tensor in aggregate.mean.items()},
            {
                name: torch.where(coverage > 0, coverage, BARELY) if name in factors else coverage
                for name, coverage in aggregate.coverage.items()
            },
            metrics={"lost": (lost / size) ** 0.5, "lost_apart": (apart / size) ** 0.5} if size else {},
        )


def factor_layer(
    layer: str, old: State, aggregate: Aggregate, product: Aggregate, factors: str
) -> tuple[State, tuple[float, ...]]:
    """Factor the mean product of a layer, if a client trained it.

    Returns:
        B and A by name, and squared Frobenius norms: of the error of the rank, of the error of the product of the plain
        means, and of the mean product.
    """
    covered = product.coverage[layer] > 0
    if not bool(covered.any()):
        return {}, ()
    with use_threads(1):
        b, a = (
            torch.where(aggregate.coverage[name] > 0, aggregate.mean[name], old[name]).double()
            for name in (layer + B, layer + A)
        )
        exact = torch.where(covered, product.mean[layer], old[layer + B] @ old[layer + A]).double()
        new_b, new_a = factor_nearest(exact, a) if factors == "nearest" else factor_balanced(exact, len(a))
        norms = tuple(float(x.square().sum()) for x in (new_b @ new_a - exact, b @ a - exact, exact))
    return {layer + B: new_b.float(), layer + A: new_a.float()}, norms


NOTHING = 1e-6
"""Singular values below this share of the largest are rounding."""
FLATTEST = 1e-3
"""The least ratio of A's size in two directions; B is larger by the inverse."""


def factor_nearest(product: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return B and A of the best approximation of a product, with A near a given one.

    With a = W D Z^T and V the approximation's right singular vectors, A = W D O V^T, where O is the orthogonal matrix
    nearest to D^2 Z^T V (Procrustes), and B = P A^+. Directions that the product lacks are those of a.

    Args:
        product: P [out, in].
        a: The given A [rank, in]; its rank is that of the approximation.
    """
    w, d, z = torch.linalg.svd(a, full_matrices=False)
    _, s, v = torch.linalg.svd(product, full_matrices=False)
    v = v[: len(d)][s[: len(d)] > NOTHING * s[0]]
    if len(v) < len(d):
        rest = torch.linalg.svd(a - (a @ v.T) @ v, full_matrices=False)[2][: len(d) - len(v)]
        v = torch.linalg.qr(torch.cat([v, rest]).T)[0].T  # orthogonal also if a has less than its rank
    left, _, right = torch.linalg.svd(d.square()[:, None] * (z @ v.T))
    o = left @ right
    d = d.clamp(min=FLATTEST * float(d[0])) if d[0] > 0 else torch.ones_like(d)
    return (product @ v.T) @ (o.T / d) @ w.T, (w * d) @ o @ v


def factor_balanced(product: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return B = U sqrt(S) [out, rank] and A = sqrt(S) V^T [rank, in] of the best approximation of a product."""
    u, s, v = torch.linalg.svd(product, full_matrices=False)
    sign = torch.gather(v, 1, v.abs().argmax(dim=1, keepdim=True)).sign()
    u, v, root = u * sign.T, v * sign, s.sqrt()
    b, a = product.new_zeros(len(product), rank), product.new_zeros(rank, product.shape[1])
    n = min(rank, len(s))
    b[:, :n], a[:n] = (u * root)[:, :n], (v * root[:, None])[:n]
    return b, a
