"""The movement of a round, as server optimisers need it: their steps touch covered elements only."""

from dataclasses import replace

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.layout import State
from fleetfit.submodel import FlatState, concat_state, get_shapes
from fleetfit.values import Server


class Movement:
    """The movement of a round, as flat tensors.

    Attributes:
        old: The state before the round.
        mean: The mean of the updates; elements that are not covered are those of `old`.
        covered: Bool, the elements that a client trained.
        weight: The coverage.
    """

    def __init__(self, server: Server, aggregate: Aggregate) -> None:
        self._server = server
        before = server.state if aggregate.before is None else aggregate.before
        self._partly = aggregate.before is not None
        self._shapes = get_shapes(before)
        self.old = concat_state(before) if before else torch.zeros(0)
        mean = {name: aggregate.mean[name] for name in self._shapes} if self._partly else aggregate.mean
        coverage = {name: aggregate.coverage[name] for name in self._shapes} if self._partly else aggregate.coverage
        self.weight = (concat_state(coverage) if before else self.old).to(self.old.device)
        self.covered = self.weight > 0
        flat = (concat_state(mean) if before else self.old).to(self.old.device)
        self.mean = torch.where(self.covered, flat, self.old)  # 0 / 0 if no client trained the element

    def load_memory(self, name: str, initial: float = 0.0) -> Tensor:
        """Return the tensors under a name in the server's memory, in the state's order; at first a constant."""
        stored: State = (self._server.memory or {}).get(name, {})
        tensors = {key: stored.get(key, torch.full(shape, initial)) for key, shape in self._shapes.items()}
        return concat_state(tensors).to(self.old.device) if tensors else self.old

    def make_server(self, new: Tensor, **memory: tuple[Tensor, Tensor]) -> Server:
        """Return the server after the round.

        Args:
            new: The new state, for covered elements; the others stay bit for bit.
            **memory: By name the new values for covered elements, and the old values.
        """
        state: State = FlatState(torch.where(self.covered, new, self.old), self._shapes)
        if self._partly:
            state = {**self._server.state, **state}
        stored = self._server.memory or {}
        tensors = {
            name: {**stored.get(name, {}), **FlatState(torch.where(self.covered, after, before), self._shapes)}
            for name, (after, before) in memory.items()
        }
        return replace(self._server, state=state, memory={**stored, **tensors})
