"""Outliers: clients that move unlike the others of their round are left out, and the rest are clipped.

For clients with unequal sub-models. d_k is a client's update less the state it was sent; a block is the elements that
the same clients of the round cover (`fleetfit.hooks.movements`).

1. In each block that `min_clients` or more cover, r_kb = |d_kb - median| / (median over k of the same), with the
   median of each element over the block's clients. A client whose largest r_kb exceeds `threshold` is left out, with
   all that it sent. In a block of n < FEW elements chance decides more: there it may be sqrt(FEW / n) times as far.
2. The others are clipped: d_k min(1, c / |d_k|), c being the median of |d_k| over all of the round.
3. Every client counts alike: its number of samples cannot be verified.

So a client of the largest level is judged both in the blocks of few clients and in those that all train, and one that
is honest in the core and hostile beyond it is detected. Not detected are a hostile majority among the clients that
cover an element, wrong but plausible labels, and movements that stay among the honest ones. Blocks of fewer than
`min_clients` clients, or in which most clients move nothing, are clipped only.

All updates of a round are kept until the last has come.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fleetfit.core import Federation, Server, Update
from fleetfit.errors import check_range
from fleetfit.hooks import Method, weigh_equally
from fleetfit.hooks.movements import Movements
from fleetfit.machine import use_threads
from fleetfit.options._order_statistics import take_median

FEW = 32
"""Elements of a block below which a distance says less: of normal ones 1 of 1,000 is 1.4 times the median's at 32."""


def outliers(threshold: float = 2.0, min_clients: int = 4) -> Method:
    """Make the option.

    Args:
        threshold: How many times as far from the median as the median client a client may be, above 1.
        min_clients: Clients that have to cover a block for it to be judged, at least 3.
    """
    check_range("method.options.outliers.threshold", threshold, 1)
    check_range("method.options.outliers.min_clients", min_clients, 3, closed=True)
    return Method(
        filter_updates=partial(select_updates, threshold=threshold, min_clients=min_clients), weigh=weigh_equally
    )


def select_updates(
    federation: Federation, server: Server, updates: Sequence[Update], threshold: float, min_clients: int
) -> Iterable[Update]:
    """Yield the updates that are not outliers, clipped."""
    if not updates:
        return
    with use_threads(1):
        movements = Movements(federation.problem.layout, server, updates)
        ratios, norms = measure_movements(movements, len(updates), min_clients)
    limit = float(compute_median(norms))
    for update, ratio, norm in zip(updates, ratios.tolist(), norms.tolist(), strict=True):
        if ratio <= threshold:
            share = min(1.0, limit / norm) if norm > 0 else 1.0
            yield update if share == 1 else movements.scale(update, share)


def is_large_enough(count: int, threshold: float = 2.0, min_clients: int = 4) -> bool:
    """Return whether a round of this many clients is judged."""
    return count >= min_clients


def measure_movements(movements: Movements, count: int, min_clients: int) -> tuple[Tensor, Tensor]:
    """Return each client's largest r_kb and its |d_k|, both float64.

    r_kb is 0 for a client without a block that is judged, and less by sqrt(n / FEW) in a block of n < FEW elements.
    """
    squares: dict[int, Tensor] = {}
    elements: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    norms = torch.zeros(count, dtype=torch.float64)
    for part in movements.chunks():
        norms[list(part.members)] += torch.linalg.vector_norm(part.rows, dim=1).double().square_()
        if len(part.members) < min_clients:
            continue
        distances = torch.linalg.vector_norm(part.rows - take_median(part.rows.clone()), dim=1).double().square_()
        squares[part.block] = squares[part.block] + distances if part.block in squares else distances
        elements[part.block] = elements.get(part.block, 0) + part.rows.shape[1]
        members[part.block] = list(part.members)
    largest = torch.zeros(count, dtype=torch.float64)
    for block, total in squares.items():
        distances = total.sqrt()
        median = compute_median(distances)  # 0 if most clients send back the state they received
        if median > 0:
            ratios = distances / median * min(1.0, elements[block] / FEW) ** 0.5
            largest[members[block]] = torch.maximum(largest[members[block]], ratios)
    return largest, norms.sqrt_()


def compute_median(values: Tensor) -> Tensor:
    """Return the median of some numbers: of an even number the mean of the two in the middle."""
    ascending = values.sort().values
    return (ascending[(len(ascending) - 1) // 2] + ascending[len(ascending) // 2]) / 2
