"""Outliers: who moves otherwise than the others of its round is left out, and nobody moves the model far alone.

For clients with unequal pieces. d_k is a client's update less what it was sent, a block the elements that the same
clients of the round cover (`fleetfit.movements`).

1. In each block that `least` clients or more cover, r_kb = |d_kb - median| / (median over k of the same), with the
   median of each element over the block's clients. A client whose largest r_kb exceeds `threshold` is left out, with
   all that it sent. In a block of n < FEW elements chance decides more: there it may be sqrt(FEW / n) times as far.
2. The others are clipped: d_k min(1, c / |d_k|), c being the median of |d_k| over all of the round.
3. Every client counts alike: how many samples it has, only it says.

So a client of the largest level is judged where few can hide it as well as in what all train, and one that is honest in
the core and hostile beyond it is found. What nobody can tell stays: a majority of those who cover an element, labels
that are wrong but plausible, and movements that stay among the honest ones. Blocks of fewer than `least` clients, or in
which most clients move nothing, get the clip only.

All updates of a round are kept until the last has come.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fleetfit.errors import check_range
from fleetfit.method import Method, weigh_equally
from fleetfit.movements import Movements
from fleetfit.options._ordered import middle
from fleetfit.training import one_thread
from fleetfit.values import Federation, Server, Update

FEW = 32
"""Elements of a block below which a distance says less: of normal ones 1 of 1,000 is 1.4 times the median's at 32."""


def outliers(threshold: float = 2.0, least: int = 4) -> Method:
    """Make the option.

    Args:
        threshold: How many times as far from the median as the median client a client may be, above 1.
        least: Clients that have to cover a block for it to be judged, at least 3.
    """
    check_range("method.plus.outliers.threshold", threshold, 1)
    check_range("method.plus.outliers.least", least, 3, closed=True)
    return Method(receive=partial(received, threshold=threshold, least=least), weight=weigh_equally)


def received(
    federation: Federation, server: Server, updates: Sequence[Update], threshold: float, least: int
) -> Iterable[Update]:
    """Yield the updates that are not outliers, clipped."""
    if not updates:
        return
    with one_thread():
        moves = Movements(federation.problem.layout, server, updates)
        farthest, norms = measured(moves, len(updates), least)
    limit = float(median(norms))
    for place, update in enumerate(updates):
        if float(farthest[place]) <= threshold:
            share = min(1.0, limit / float(norms[place])) if norms[place] > 0 else 1.0
            yield update if share == 1 else moves.shortened(update, share)


def judges(count: int, threshold: float = 2.0, least: int = 4) -> bool:
    """Tell whether so many clients are enough."""
    return count >= least


def measured(moves: Movements, count: int, least: int) -> tuple[Tensor, Tensor]:
    """Return each client's largest r_kb and its |d_k|, both float64.

    r_kb is 0 of a client that no block judges, and less by sqrt(n / FEW) in a block of n < FEW elements.
    """
    squares: dict[int, Tensor] = {}
    elements: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    norms = torch.zeros(count, dtype=torch.float64)
    for part in moves.chunks():
        norms[list(part.members)] += torch.linalg.vector_norm(part.rows, dim=1).double().square_()
        if len(part.members) < least:
            continue
        apart = part.rows - middle(part.rows.clone())
        found = torch.linalg.vector_norm(apart, dim=1).double().square_()
        squares[part.block] = squares[part.block] + found if part.block in squares else found
        elements[part.block] = elements.get(part.block, 0) + part.rows.shape[1]
        members[part.block] = list(part.members)
    farthest = torch.zeros(count, dtype=torch.float64)
    for block, found in squares.items():
        ratios = relative(found.sqrt()) * min(1.0, elements[block] / FEW) ** 0.5
        farthest[members[block]] = torch.maximum(farthest[members[block]], ratios)
    return farthest, norms.sqrt_()


def relative(lengths: Tensor) -> Tensor:
    """Return lengths as multiples of their median; zeros where that is 0, as where most send back what they got."""
    usual = median(lengths)
    return lengths / usual if usual > 0 else torch.zeros_like(lengths)


def median(values: Tensor) -> Tensor:
    """Return the median of some numbers: of an even number the mean of the two in the middle."""
    found = values.sort().values
    return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
