"""What server optimisers share: the round's movement, and steps that touch only what the round covered."""

from dataclasses import replace

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.layout import State
from fleetfit.submodel import FlatState, concat_state, get_shapes
from fleetfit.values import Server


class Movement:
    """A round seen by a server optimiser, as flat tensors.

    Attributes:
        old: The state before the round.
        mean: The mean of the updates; means nothing where not covered.
        covered: Bool, where somebody trained.
        weight: The coverage.
    """

    def __init__(self, server: Server, aggregate: Aggregate) -> None:
        """Take a server and what its round added up to."""
        self._server = server
        before = server.state if aggregate.before is None else aggregate.before
        self._partly = aggregate.before is not None
        self._shapes = get_shapes(before)
        self.old = concat_state(before) if before else torch.zeros(0)
        here = {name: aggregate.mean[name] for name in self._shapes} if self._partly else aggregate.mean
        counts = {name: aggregate.coverage[name] for name in self._shapes} if self._partly else aggregate.coverage
        self.mean = (concat_state(here) if before else self.old).to(self.old.device)
        self.weight = (concat_state(counts) if before else self.old).to(self.old.device)
        self.covered = self.weight > 0
        self.mean = torch.where(self.covered, self.mean, self.old)  # 0 / 0 where nobody trained

    def remembered(self, name: str, initial: float = 0.0) -> Tensor:
        """Return what the server remembers under a name, in the state's order; a number where it has nothing yet."""
        kept: State = (self._server.memory or {}).get(name, {})
        found = {key: kept.get(key, torch.full(shape, initial)) for key, shape in self._shapes.items()}
        return concat_state(found).to(self.old.device) if found else self.old

    def after(self, new: Tensor, **memory: tuple[Tensor, Tensor]) -> Server:
        """Return the server after the round.

        Args:
            new: The new state, used where somebody trained; elsewhere the old one stays bit for bit.
            **memory: By name what the server remembers: (new values, used where somebody trained; old values).
        """
        state: State = FlatState(torch.where(self.covered, new, self.old), self._shapes)
        if self._partly:
            state = {**self._server.state, **state}
        kept = {
            name: {**(self._server.memory or {}).get(name, {}),
                   **FlatState(torch.where(self.covered, now, before), self._shapes)}
            for name, (now, before) in memory.items()
        }  # fmt: skip
        memory_now = {**(self._server.memory or {}), **kept}  # what client selection remembers stays
        return replace(self._server, state=state, memory=memory_now)
