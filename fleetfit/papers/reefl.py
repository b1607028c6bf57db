"""ReeFL's Tables 1 and 2 (ICML 2024): what a client sends in a round, by method and by what is fine-tuned.

The paper's columns are a sum: four bytes for each trained number, one way, in MiB (2^20 bytes), with a classifier of
100 classes, as a mean over the clients' depths (and ScaleFL's widths). It counts a classifier after every block, even
where there are four exits, but one in all for InclusiveFL and ReeFL, and SSF's factors and terms for the norm before
each classifier. ExclusiveFL is printed as if clients of all depths took part. The first numbers count so; beside them
stands what a client of FleetFit sends back: the message with the tensors that it has, classifiers at exits only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fleetfit.cost import message_size
from fleetfit.cost.count import layout_of
from fleetfit.layout import Architecture
from fleetfit.method import build
from fleetfit.papers.table import PaperTable, Value, built_in
from fleetfit.planner import assign, given_levels
from fleetfit.tasks import task_named
from fleetfit.values import Job, Level, Problem, tuned

_IMAGE, _CLASSES, _BLOCKS = (3, 224, 224), 100, 12
_MIB = 2**20
_HEADS = ("heads.", "classifier.")

MODES = {
    "Full": "full",
    "Frozen": "frozen",
    "LoRA": "lora",
    "PA": "parallel_adapter",
    "SA": "serial_adapter",
    "SSF": "ssf",
}
"""What is fine-tuned, as the paper calls it, and our name for it."""


@dataclass(frozen=True)
class Counted:
    """A method of the tables.

    Attributes:
        label: What the paper calls it.
        spec: Ours.
        each: Whether the paper counts a classifier after every block, and not one in all.
        scaled: Whether it cuts width too.
    """

    label: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    each: bool = False
    scaled: bool = False


METHODS = (
    Counted("ExclusiveFL", {"name": "exclusivefl", "exits": "all"}, each=True),
    Counted("InclusiveFL", {"name": "inclusivefl"}),
    Counted("ScaleFL", {"name": "scalefl"}, each=True, scaled=True),
    Counted("DepthFL", {"name": "depthfl"}, each=True),
    Counted("ReeFL", {"name": "reefl"}),
)


@dataclass(frozen=True)
class Levels:
    """Depths of the clients' models, those of ScaleFL, and ScaleFL's widths (appendix A)."""

    depths: tuple[int, ...]
    scaled_depths: tuple[int, ...]
    widths: tuple[float, ...]

    def splits(self, scaled: bool) -> list[tuple[int, float]]:
        """Return depth and width of each level."""
        return list(zip(self.scaled_depths if scaled else self.depths, self.widths if scaled else (1.0,) *
                        len(self.depths), strict=True))  # fmt: skip


FOUR = Levels((3, 6, 9, 12), (4, 6, 9, 12), (0.4, 0.55, 0.75, 1.0))
TWELVE = Levels(
    tuple(range(1, 13)), tuple(range(1, 13)),
    (0.25, 0.3, 0.35, 0.4, 0.48, 0.55, 0.61, 0.69, 0.75, 0.84, 0.92, 1.0),
)  # fmt: skip

TABLE_1 = {
    "Full": (53.31, 52.33, 34.91, 53.31, 53.98),
    "Frozen": (1.12, 0.15, 0.89, 1.12, 1.79),
    "LoRA": (2.53, 1.56, 2.00, 2.53, 3.20),
    "PA": (2.55, 1.58, 2.01, 2.55, 3.22),
    "SA": (2.55, 1.58, 2.01, 2.55, 3.22),
    "SSF": (1.39, 0.40, 1.10, 1.39, 2.04),
}
"""The column "Comm. Cost (MB)" of Table 1, in the order of `METHODS`."""
TABLE_2 = {
    "Full": (46.39, 45.57, 26.40, 46.39, 47.21),
    "Frozen": (0.97, 0.15, 0.70, 0.97, 1.79),
    "LoRA": (2.19, 1.37, 1.58, 2.19, 3.01),
    "PA": (2.21, 1.39, 1.60, 2.21, 3.03),
    "SA": (2.21, 1.39, 1.60, 2.21, 3.03),
    "SSF": (1.21, 0.37, 0.87, 1.21, 2.01),
}
"""That of Table 2."""


def reefl_table_1() -> PaperTable:
    """Return the cost of ReeFL's Table 1: four exits."""
    return _table("ReeFL, Table 1: what a client of DeiT-S sends in a round, 4 exits, in MiB", FOUR, TABLE_1)


def reefl_table_2() -> PaperTable:
    """Return the cost of ReeFL's Table 2: twelve exits."""
    return _table("ReeFL, Table 2: what a client of DeiT-S sends in a round, 12 exits, in MiB", TWELVE, TABLE_2)


def _table(title: str, levels: Levels, printed: Mapping[str, Sequence[float]]) -> PaperTable:
    rows: list[tuple[Value, ...]] = []
    for mode, numbers in printed.items():
        architecture = tuned(
            built_in("deit_s", classes=_CLASSES, input_shape=_IMAGE, heads="fixed"), {"name": MODES[mode]}
        )
        for method, said in zip(METHODS, numbers, strict=True):
            known, sent = costs(architecture, method, levels)
            rows.append((mode, method.label, round(known / _MIB, 2), said, round(sent / _MIB, 2)))
    return PaperTable(
        title,
        ("fine-tuned", "method", "as the paper counts", "printed", "sent back"),
        tuple(rows),
        (
            "As the paper counts: four bytes a number, 100 classes, mean over the levels; a classifier after every "
            "block, but one in all for InclusiveFL and ReeFL. The final norm belongs to the last classifier.",
            "Sent back: FleetFit's message, its header included. Classifiers are at exits only, and a client sends "
            "the rows of Ree's positions that its depth has a use for. Of ExclusiveFL only full models are sent.",
        ),
    )


def costs(architecture: Architecture, method: Counted, levels: Levels) -> tuple[float, float]:
    """Return the bytes that a client sends, as the paper counts, and in truth; a mean over one client of each level.

    Args:
        architecture: What is fine-tuned, before the method changes it.
        method: The method.
        levels: Depths and widths of the clients' models.
    """
    made = build(method.spec)
    architecture = made.model(architecture, _IMAGE)
    splits = levels.splits(method.scaled)
    counted = [as_counted(architecture, depth, width, method.each) for depth, width in splits]
    problem = Problem(architecture, _IMAGE, task_named("classification"), (_BLOCKS,))
    shares = [(i + 1) / len(splits) for i in range(len(splits))]
    found = made.levels(problem, given_levels([d for d, _ in splits], [w for _, w in splits], shares))
    takes = assign(shares, 0.0, [level.needs for level in found])
    sent = [message_size(returned(architecture, found[level], method.spec)) for level in takes if level >= 0]
    return sum(counted) / len(counted), sum(sent) / len(sent)


def as_counted(architecture: Architecture, depth: int, width: float, each: bool) -> int:
    """Return the bytes of a sub-model as the paper counts them.

    Args:
        architecture: The model family, with what a method and a tuning mode made of it.
        depth: Blocks.
        width: Fraction of the channels.
        each: Whether there is a classifier after every block.
    """
    exits = tuple(range(1, depth + 1)) if each else (depth,)
    shapes = layout_of(architecture).shapes(architecture.sizes(width), exits)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    if any(name.endswith(".tuning.scale") for name in shapes):  # SSF, which here leaves classifiers as they are
        norms = [shape for name, shape in shapes.items() if name.startswith(_HEADS) and name.endswith(".norm.weight")]
        numbers += sum(2 * math.prod(shape) for shape in norms)
    return 4 * numbers


def returned(architecture: Architecture, level: Level, spec: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a client of a level sends back."""
    piece = level.submodel
    shapes = layout_of(architecture).shapes(piece.sizes, piece.exits)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    job = Job("train", 0, 1, 0, None, piece, state, spec, 0)
    device: Any = None  # no reply looks at it
    _, back = build(spec).reply(job, device, state)
    return {name: tuple(tensor.shape) for name, tensor in back.items()}
