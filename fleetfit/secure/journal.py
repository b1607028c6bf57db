"""Which rounds somebody has taken part in, so that none is done twice.

Training is deterministic: of the same round done again with one client fewer, the two sums would differ by exactly what
that client has sent.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fleetfit.errors import RunError


def _nowhere(last: Mapping[str, int]) -> None:
    """Keep it in memory only."""


@dataclass(eq=False)
class Journal:
    """The last round of each run that was begun.

    Attributes:
        last: By run.
        keep: Is given all of it, and writes it where it outlasts the process, before the round begins.
    """

    last: dict[str, int] = field(default_factory=dict)
    keep: Callable[[Mapping[str, int]], None] = _nowhere

    def begun(self, run: str, round: int) -> bool:
        """Tell whether a round, or one after it, was begun."""
        return round <= self.last.get(run, -1)

    def enter(self, run: str, round: int) -> None:
        """Begin a round.

        Raises:
            RunError: It was begun before.
        """
        if self.begun(run, round):
            raise RunError(
                f"round {round + 1} of this run was begun before: done twice, the difference of two sums would show a "
                "single update.",
                key="round",
            )
        self.last[run] = round
        self.keep(self.last)
