"""Aggregate updates as a round does, without a round."""

from collections.abc import Iterable
from typing import Any

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server, Update
from fleetfit.hooks import FEDAVG, CoverageMean


def aggregate_updates(
    federation: Federation, server: Server, updates: Iterable[Update], aggregate: Any = None, weight: Any = None
) -> Aggregate:
    """Return what updates add up to.

    Args:
        federation: The server's view.
        server: The server before the round.
        updates: The updates.
        aggregate: The hook; None: the method's.
        weight: The weights; None: the method's.
    """
    aggregator = (aggregate or federation.method.make_aggregator)(federation, server)
    for update in updates:
        aggregator.add(update, (weight or federation.method.weigh)(update))
    return aggregator.result()


def aggregate_plainly(
    federation: Federation, server: Server, updates: Iterable[Update], weight: Any = None
) -> Aggregate:
    """Return the coverage-weighted mean of updates."""
    return aggregate_updates(federation, server, updates, CoverageMean, weight)


class Watched:
    """A hook `make_aggregator` that calls a function before each update is added.

    Attributes:
        on_add: Called with the update.
        aggregate: The hook that does the work.
    """

    def __init__(self, on_add: Any, aggregate: Any = FEDAVG.make_aggregator) -> None:
        self.on_add, self.aggregate = on_add, aggregate

    def __call__(self, federation: Federation, server: Server) -> Any:
        return _WatchedAggregator(self.on_add, self.aggregate(federation, server))


class _WatchedAggregator:
    def __init__(self, on_add: Any, aggregator: Any) -> None:
        self.on_add, self.aggregator = on_add, aggregator

    def add(self, update: Update, weight: float) -> None:
        self.on_add(update)
        self.aggregator.add(update, weight)

    def result(self) -> Aggregate:
        return self.aggregator.result()
