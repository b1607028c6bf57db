"""What an evaluation measures: split, batch-norm policies, clients and samples, or a part of these."""

from dataclasses import dataclass, field, replace

from fleetfit.core import Device, Evaluation
from fleetfit.core.section import Norm


@dataclass(frozen=True)
class EvaluationPart:
    """The part of an evaluation that those before the last one measure, the same each time. None leaves all.

    Attributes:
        clients: The largest number of clients.
        client_samples: The largest number of samples of each client.
        samples: The largest number of samples of the server's own test set.
        statistics_samples: The largest number of training samples for static statistics, over all clients.
    """

    clients: int | None = None
    client_samples: int | None = None
    samples: int | None = None
    statistics_samples: int | None = None


@dataclass(frozen=True)
class EvaluationScope:
    """The scope of an evaluation.

    Attributes:
        evaluation: Split and batch size.
        norms: Batch-norm policies, the headline first: "static", "batch".
        statistics_samples: Training samples, over all clients, from which static statistics are re-estimated.
        whole: Also each level on the server's own test set, and each client at its best exit.
        clients: The largest number of clients; None for all.
        samples: The largest number of samples of the server's own test set, the same in all rounds; None for all.
        always: Whether evaluations before the last one are `whole` too.
        beyond: Whether clients run models that they do not afford, which only simulated devices can.
        triggered: A device of the server's with the test set on which a backdoor attack's success is measured; part of
            a `whole` evaluation.
        part: The part of all this that is measured; None for all.
    """

    evaluation: Evaluation = field(default_factory=Evaluation)
    norms: tuple[Norm, ...] = ("static", "batch")
    statistics_samples: int = 5000
    whole: bool = True
    clients: int | None = None
    samples: int | None = None
    always: bool = False
    beyond: bool = True
    triggered: Device | None = None
    part: EvaluationPart | None = None

    def reduce(self, part: EvaluationPart | None) -> "EvaluationScope":
        """Return the scope of an evaluation before the last one, which may measure a part."""
        limits = part or EvaluationPart()
        statistics_samples = [one for one in (self.statistics_samples, limits.statistics_samples) if one is not None]
        samples = [one for one in (self.samples, limits.samples) if one is not None]
        return replace(self, whole=self.whole and self.always, norms=self.norms[:1], part=part,
                       statistics_samples=min(statistics_samples), samples=min(samples, default=None))  # fmt: skip
