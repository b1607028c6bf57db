"""LoRA's product B A is averaged exactly and factored again, in place of averaging A and B apart.

For each layer, with client k's matrices B_k [out of k, rank] and A_k [rank, in of k],

    P = sum_k w_k B_k A_k / sum_k w_k over the clients whose sub-model has the element,

laid out like the layer's own weight [out, in], so that a narrow client counts for its channels only; what nobody
trained keeps the server's product. Its best approximation of the layer's rank, U S V^T by singular values, is factored
into the server's next B and A. All else is averaged as ever. The factor alpha / rank is common and drops out. Without
LoRA this is the plain mean.

Many B and A have one product, and training and server optimisers see which. "nearest": A has the singular values of the
plain mean of the A_k and lies nearest to it, and B goes with it. Clients whose A_k are equal get the plain mean, and A
keeps its size, on which the steps of B depend. "balanced": B = U sqrt(S) and A = sqrt(S) V^T, the largest entry of each
row of V^T being positive. B begins at zero, so early products are small and so are both matrices then, which slows
training; a direction without product is lost for good.

Factoring moves every row of B and every column of A of a layer that anybody trained, those too that no client had, so
that their product stays (but for what the rank cannot hold). Those count as covered, by a weight of almost nothing:
server optimisers move a matrix as a whole, and FedDyn's h, which is what clients did, stays. A layer that nobody
trained keeps its bits. A server optimiser starts from the factors; its result no longer has the mean product, as
without this option it no longer is the mean.

The round reports under "server", relative to the mean product (Frobenius norms over all layers), what the rank cannot
hold (`lost`) and how far off the product of the plain means would be (`lost_apart`). Besides twice the layers' full
weights the server needs one product per update and layer at a time, and one singular value decomposition per layer.
"""

from functools import partial
from typing import Literal

import torch

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.layout import Layout, State, TensorLayout
from fleetfit.method import CoverageMean, Method
from fleetfit.options._factors import balanced, nearest
from fleetfit.peft.lora import A, B
from fleetfit.training import one_thread
from fleetfit.values import Federation, Server, Update

BARELY = 1e-30
"""The coverage of what moves though nobody trained it."""


def lora_product(factors: Literal["nearest", "balanced"] = "nearest") -> Method:
    """Make the option.

    Args:
        factors: Which B and A of the mean product: near the plain means, or of equal size.
    """
    return Method(aggregate=partial(ProductMean, factors=factors))


def layers_of(layout: Layout) -> dict[str, Layout]:
    """Return the layers with LoRA, by the beginning of their tensors' names, and the layout of each one's product."""
    found = {}
    for name, b in layout.tensors.items():
        layer = name.removesuffix(B)
        a = layout.tensors.get(layer + A)
        if layer != name and a is not None and len(b.dims) == len(a.dims) == 2:
            product = TensorLayout((b.dims[0], a.dims[1]), b.block, b.exit, True)
            found[layer] = Layout(layout.axes, layout.exits, {layer: product})
    return found


class ProductMean:
    """The mean of a round, with the thin matrices of each layer factored from the mean of their products."""

    def __init__(self, federation: Federation, server: Server, factors: str) -> None:
        self._server, self._factors = server, factors
        self._mean = CoverageMean(federation, server)
        device = next(iter(server.state.values())).device
        layers = layers_of(federation.problem.layout)
        self._products = {layer: Mean(layout, device) for layer, layout in layers.items()}

    def add(self, update: Update, weight: float) -> None:
        """Add an update, and the products of its thin matrices."""
        for layer, mean in self._products.items():
            if layer + B in update.state:
                with one_thread():
                    product = update.state[layer + B] @ update.state[layer + A]
                mean.add(update.submodel, {layer: product}, weight)
        self._mean.add(update, weight)

    def result(self) -> Aggregate:
        """Return the mean, with factored products."""
        aggregate = self._mean.result()
        layers = [
            factored(layer, self._server.state, aggregate, mean.result(), self._factors)
            for layer, mean in self._products.items()
        ]
        layers = [(matrices, norms) for matrices, norms in layers if norms]
        if not layers:
            return aggregate
        new = {name: tensor for matrices, _ in layers for name, tensor in matrices.items()}
        lost, apart, size = (sum(norms) for norms in zip(*(norms for _, norms in layers), strict=True))
        counts = aggregate.coverage
        return Aggregate(
            {name: new.get(name, tensor) for name, tensor in aggregate.mean.items()},
            {name: torch.where(c > 0, c, BARELY) if name in new else c for name, c in counts.items()},
            metrics={"lost": (lost / size) ** 0.5, "lost_apart": (apart / size) ** 0.5} if size else {},
        )


def factored(
    layer: str, old: State, aggregate: Aggregate, product: Aggregate, factors: str
) -> tuple[State, tuple[float, ...]]:
    """Factor the mean product of a layer; nothing where nobody trained it.

    Returns:
        B and A by name, and squared Frobenius norms: what the rank cannot hold, how far the product of the plain means
        is off, and the mean product itself.
    """
    covered = product.coverage[layer] > 0
    if not bool(covered.any()):
        return {}, ()
    with one_thread():
        b, a = (
            torch.where(aggregate.coverage[name] > 0, aggregate.mean[name], old[name]).double()
            for name in (layer + B, layer + A)
        )
        exact = torch.where(covered, product.mean[layer], old[layer + B] @ old[layer + A]).double()
        new_b, new_a = nearest(exact, a) if factors == "nearest" else balanced(exact, len(a))
        norms = tuple(float(x.square().sum()) for x in (new_b @ new_a - exact, b @ a - exact, exact))
    return {layer + B: new_b.float(), layer + A: new_a.float()}, norms
