"""Trimmed mean: of each element the largest and smallest movements are left out of its mean (Yin et al., ICML 2018).

For comparison with `outliers`. Of an element that K clients of the round cover, floor(fraction * K) movements are left
out at each end, for small K perhaps none; a fraction of 0.5 is the coordinate-wise median. Every client counts alike.
All updates of a round are kept until the last has come.
"""

from functools import partial

import torch

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server, Update
from fleetfit.errors import check_range
from fleetfit.hooks import Method
from fleetfit.hooks.movements import Movements
from fleetfit.machine import use_threads
from fleetfit.options._order_statistics import floor_share, select_ranks
from fleetfit.submodel import concat_state, full_submodel, get_slice_plan


def trimmed_mean(fraction: float = 0.2) -> Method:
    """Make the option.

    Args:
        fraction: Fraction of an element's movements that is left out at each end, above 0 and at most 0.5; 0.5: the
            median.
    """
    check_range("method.options.trimmed_mean.fraction", fraction, 0, 0.5 + 1e-9)
    return Method(make_aggregator=partial(TrimmedMean, fraction=fraction), unused_hooks=("weigh",))


def is_large_enough(count: int, fraction: float = 0.2) -> bool:
    """Return whether a round of this many clients leaves any movement out."""
    return count >= 3 and floor_share(fraction, count) > 0


class TrimmedMean:
    """The trimmed means of a round; keeps all of its updates."""

    def __init__(self, federation: Federation, server: Server, fraction: float) -> None:
        self._layout, self._server, self._fraction = federation.problem.layout, server, fraction
        self._updates: list[Update] = []

    def add(self, update: Update, weight: float) -> None:
        """Keep an update; the weight does not count."""
        self._updates.append(update)

    def result(self) -> Aggregate:
        """Return the trimmed means."""
        layout = self._layout
        full, state = get_slice_plan(layout, full_submodel(layout)), concat_state(self._server.state).cpu()
        mean, coverage = torch.zeros(full.size), torch.zeros(full.size)
        with use_threads(1):
            for part in Movements(layout, self._server, self._updates).chunks() if self._updates else ():
                count = len(part.members)
                ends = min(floor_share(self._fraction, count), (count - 1) // 2)
                rows = select_ranks(part.rows, ends, count - ends)
                total = rows[0].clone()
                for row in rows[1:]:
                    total += row
                part.write(mean, total.div_(len(rows)).add_(part.read(state)))
                part.write(coverage, float(count))
        return Aggregate(full.views(mean), full.views(coverage))
