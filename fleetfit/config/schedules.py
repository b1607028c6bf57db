"""Schedules of the learning rate: `[local] schedule`."""

import math
from typing import Annotated, Literal

from pydantic import Field

from fleetfit.config.section import NotNegative, Positive, Section


class Constant(Section):
    """The same learning rate in all rounds."""

    kind: Literal["constant"] = "constant"

    def factor_at(self, rounds: int, round: int) -> float:
        """Return what the learning rate is multiplied by in a round, counted from 0."""
        return 1.0


class Step(Section):
    """Multiply by `factor` from each round in `at` on."""

    kind: Literal["step"]
    at: list[Annotated[int, Field(ge=0)]]
    factor: Positive = 0.1

    def factor_at(self, rounds: int, round: int) -> float:
        """Return factor^(how many of `at` have come), counted from round 0."""
        return float(self.factor ** sum(round >= r for r in self.at))


class Cosine(Section):
    """Fall along half a cosine from 1 in the first round to `minimum` in the last."""

    kind: Literal["cosine"]
    minimum: NotNegative = 0.0

    def factor_at(self, rounds: int, round: int) -> float:
        """Return minimum + (1 - minimum) * (1 + cos(pi * round / (rounds - 1))) / 2."""
        done = round / max(1, rounds - 1)
        return self.minimum + (1 - self.minimum) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


class Exponential(Section):
    """Multiply by `factor` each round."""

    kind: Literal["exponential"]
    factor: Positive

    def factor_at(self, rounds: int, round: int) -> float:
        """Return factor^round."""
        return float(self.factor**round)


Schedule = Annotated[Constant | Step | Cosine | Exponential, Field(discriminator="kind")]
