"""What the nodes of a real fleet tell the server of themselves."""

from dataclasses import dataclass, replace
from typing import Any

from fleetfit.planner import Budget


@dataclass(frozen=True)
class DataDescription:
    """What a model needs to know of the data: the same on all nodes.

    Attributes:
        name: Of the data set.
        task: What is learned.
        sample_shape: Of one sample, as a model gets it.
        classes: How many.
        vocabulary: Tokens, or 0.
        padding: The token that fills, or -1.
    """

    name: str
    task: str
    sample_shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0
    padding: int = -1

    @property
    def tokenizer(self) -> str:
        """The file that says what tokens are: it lies on the nodes."""
        return ""

    @property
    def shape(self) -> "DataDescription":
        """What must be the same on all nodes: all but the name."""
        return replace(self, name="")

    def __str__(self) -> str:
        """Say it in words."""
        return f"{self.task}, samples {list(self.sample_shape)}, {self.classes} classes, {self.vocabulary} tokens"


@dataclass(frozen=True)
class NodeDescription:
    """What a node told of itself.

    Attributes:
        name: What it is called.
        facts: Of its data.
        num_examples: Training samples.
        budget: What it affords, or None where it does not tell.
        tolerance: How far a model may exceed that; what it is worth without a budget, nobody asks.
        labels: Training samples by class, or None where it does not tell.
    """

    name: str
    facts: DataDescription
    num_examples: int
    budget: Budget | None = None
    tolerance: float = 0.1
    labels: tuple[int, ...] | None = None

    @property
    def nest(self) -> dict[str, Any]:
        """The same as plain values, as a node sends it and a run folder keeps it."""
        facts = {**vars(self.facts), "sample_shape": list(self.facts.sample_shape)}
        return {"name": self.name, "facts": facts, "examples": {"train": self.num_examples}, "budget": self.budget,
                "tolerance": self.tolerance, "labels": None if self.labels is None else list(self.labels)}  # fmt: skip
