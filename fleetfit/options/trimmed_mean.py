"""Trimmed mean: of each element the largest and smallest movements are left out of its mean (Yin et al., ICML 2018).

For comparison with `outliers`. Of an element that K clients of the round cover, floor(share * K) movements are left out
at each end, so that where few cover it none may be; a share of 0.5 is the coordinate-wise median. Every client counts
alike. All updates of a round are kept until the last has come.
"""

from collections.abc import Iterator
from functools import partial

import torch

from fleetfit.aggregate import Aggregate
from fleetfit.errors import check_range
from fleetfit.method import Method, Weight
from fleetfit.movements import Movements
from fleetfit.options._ordered import at_most, ordered
from fleetfit.submodel import concat_state, cut, whole
from fleetfit.training import one_thread
from fleetfit.values import Federation, Server, Update


def trimmed_mean(share: float = 0.2) -> Method:
    """Make the option.

    Args:
        share: Of an element's movements that is left out at each end, above 0 and at most 0.5; 0.5: the median.
    """
    check_range("method.plus.trimmed_mean.share", share, 0, 0.5 + 1e-9)
    return Method(merge=partial(trimmed, share=share), replaces=("weight",))


def judges(count: int, share: float = 0.2) -> bool:
    """Tell whether of so many clients any is left out."""
    return count >= 3 and at_most(share, count) > 0


def trimmed(
    federation: Federation, server: Server, updates: Iterator[Update], weight: Weight, share: float
) -> Aggregate:
    """Return the trimmed means."""
    found, layout = list(updates), federation.problem.layout
    compiled, state = cut(layout, whole(layout)), concat_state(server.state).cpu()
    mean, coverage = torch.zeros(compiled.size), torch.zeros(compiled.size)
    with one_thread():
        for part in Movements(layout, server, found).chunks() if found else ():
            count = len(part.members)
            ends = min(at_most(share, count), (count - 1) // 2)
            kept = ordered(part.rows, ends, count - ends)
            total = kept[0].clone()
            for row in kept[1:]:
                total += row
            part.write(mean, total.div_(len(kept)).add_(part.read(state)))
            part.write(coverage, float(count))
    return Aggregate(compiled.views(mean), compiled.views(coverage))
