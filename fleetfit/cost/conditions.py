"""Under which conditions costs are counted, and what was measured so far."""

from dataclasses import dataclass, field

BATCH_SIZE = 16
"""Samples in a training step, where nobody says."""


@dataclass(frozen=True)
class Conditions:
    """Under which conditions costs are counted.

    Attributes:
        batch_size: Samples in one training step, which memory depends on.
        measured: What was measured on a machine, by what it is. Measuring adds to it and never measures twice, so that
            a run can record it and be taken up again with the same numbers.
    """

    batch_size: int = BATCH_SIZE
    measured: dict[str, list[float]] = field(default_factory=dict, hash=False, compare=False)
