"""ScaleFL's tables of sizes (CVPR 2023): Table 1, and Tables 6 to 9 of its appendix, with what Eq. 1 picks.

Some printed ratios do not give the printed costs; such a row stands there twice, at the ratio that does and as printed.
Latencies are printed in Tables 6 to 9 only; `fleetfit plan --paper NAME --latency` measures ours.
Table 9 has two counts: what the paper prints as FLOPs (`counted_as_printed` says what that is), and the multiply-adds
of the whole sentence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fleetfit.cost import Timed, cost_grid, full_cost, submodel_cost
from fleetfit.layout import Architecture, build_module
from fleetfit.papers.table import PaperTable, Value, beside, built_in
from fleetfit.planner import LevelShape, Targets, one_level, search

IMAGE = (3, 32, 32)
COLUMNS = ("level", "s_d", "s_w", "exit at block", "parameters (M)", "printed", "multiply-adds (M)", "printed")


@dataclass(frozen=True)
class Printed:
    """A row of the tables.

    Attributes:
        level: What the row is called.
        s_d: The printed split ratio along depth.
        s_w: The printed split ratio along width.
        parameters: In millions, as printed.
        multiply_adds: In millions, as printed.
        latency_ms: As printed, in the appendix only.
        exits: The classifiers that count.
        fits: The width whose costs are the printed ones, where that is not the printed one.
    """

    level: str
    s_d: str
    s_w: float
    parameters: float
    multiply_adds: float
    latency_ms: float
    exits: tuple[int, ...]
    fits: float | None = None

    @property
    def width(self) -> float:
        """The width that gives the printed costs."""
        return self.s_w if self.fits is None else self.fits


def variants(printed: Sequence[Printed]) -> list[tuple[str, float, Printed]]:
    """Return a name and a width for each row, and a second one where the printed ratio does not give the costs."""
    found = []
    for row in printed:
        found.append((row.level, row.width, row))
        if row.fits is not None:
            found.append((f"{row.level}, as printed", row.s_w, row))
    return found


def models_of(
    architecture: Architecture, input_shape: tuple[int, ...], printed: Sequence[Printed]
) -> tuple[Timed, ...]:
    """Return the sub-model of each row, with the classifiers that count."""
    return tuple(
        Timed(architecture, architecture.sizes(width), row.exits, input_shape) for _, width, row in variants(printed)
    )


def _sizes(
    title: str,
    architecture: Architecture,
    input_shape: tuple[int, ...],
    printed: Sequence[Printed],
    notes: tuple[str, ...],
    parts: tuple[PaperTable, ...] = (),
) -> PaperTable:
    """Return a table of parameters and multiply-adds, each beside the printed ones."""
    rows: list[tuple[Value, ...]] = []
    for name, width, row in variants(printed):
        cost = submodel_cost(architecture, (architecture.sizes(width), row.exits), input_shape)
        rows.append((name, row.s_d, width, row.exits[-1], *beside(cost, row.parameters, row.multiply_adds)))
    models = models_of(architecture, input_shape, printed)
    return PaperTable(title, COLUMNS, tuple(rows), notes, parts, models, _latencies(printed))


def _latencies(printed: Sequence[Printed]) -> tuple[float, ...]:
    return tuple(row.latency_ms for _, _, row in variants(printed))


# ---- Tables 1 and 6: ResNet-110 --------------------------------------------------------------------------------------

_DEPTHS, _WIDTHS = (36, 42, 48), (0.70, 0.70, 0.75)
_RATIOS = (0.125, 0.25, 0.5, 1.0)
_TOLERANCE = 0.1

FULL = Printed("4", "1.00", 1.00, 1.73, 253.1, 47.2, (54,))
DEPTH_AND_WIDTH = (
    Printed("3", "0.88", 0.75, 0.86, 138.5, 39.2, _DEPTHS),
    Printed("2", "0.77", 0.70, 0.46, 99.7, 33.1, _DEPTHS[:2]),
    Printed("1", "0.66", 0.70, 0.21, 83.4, 27.9, _DEPTHS[:1]),
)
TABLE_6 = (
    FULL,
    Printed("3-w", "1.00", 0.70, 0.82, 119.7, 37.7, (54,)),
    Printed("2-w", "1.00", 0.45, 0.44, 63.2, 35.6, (54,), fits=0.50),
    Printed("1-w", "1.00", 0.30, 0.21, 28.0, 28.3, (54,), fits=0.35),
    *(replace(row, level=f"{row.level}-dw") for row in DEPTH_AND_WIDTH),
)
_EXITS = (
    "Exits after blocks 36, 42 and 48 of 54 (0.667, 0.778, 0.889) reproduce the printed costs; the released code ships "
    "30, 38 and 46, which do not."
)


def table_1() -> PaperTable:
    """Return ScaleFL's Table 1, and what Eq. 1 picks, for ResNet-110."""
    architecture = built_in("resnet110")
    whole = submodel_cost(architecture, ({}, (*_DEPTHS, 54)), IMAGE)
    heads = whole.parameters - full_cost(architecture, IMAGE).parameters
    found = _sizes(
        "ScaleFL, Table 1: ResNet-110, split along depth and width",
        architecture,
        IMAGE,
        (FULL, *DEPTH_AND_WIDTH),
        (
            _EXITS,
            "Levels 1 to 3 count their own and the shallower classifiers. Level 4 leaves the early ones out, which "
            f"would add {heads / 1e6:.3f} M parameters.",
            '"FLOPs" in the paper are multiply-adds of convolutions and linear layers, one image at a time.',
        ),
        (eq_1_table(),),
    )
    return replace(found, printed_ms=())  # they stand in Table 6


def table_6() -> PaperTable:
    """Return ScaleFL's Table 6: ResNet-110 split along width only, and along depth and width."""
    return _sizes(
        "ScaleFL, Table 6 (appendix): ResNet-110, split along width only (w) and along depth and width (dw)",
        built_in("resnet110"),
        IMAGE,
        TABLE_6,
        ("The rows printed with s_w = 0.45 and 0.30 have the costs of 0.50 and 0.35.", _EXITS),
    )


def eq_1_table() -> PaperTable:
    """Return what Eq. 1 picks for each r_l at tolerance 0.1, each level alone and all together, beside Table 1."""
    grid = cost_grid(built_in("resnet110"), IMAGE)
    targets = Targets(_RATIOS, (_TOLERANCE,) * len(_RATIOS))
    together = search(grid, targets)
    paper = search(grid, targets, depths=_DEPTHS, widths=_WIDTHS)
    rows: list[tuple[Value, ...]] = []
    for i in reversed(range(len(_RATIOS))):
        picks = one_level(grid, _RATIOS[i], _TOLERANCE), together[i], paper[i]
        rows.append((str(i + 1), _RATIOS[i], *(value for split in picks for value in _pair(split, grid.blocks))))
    columns = ("level", "r_l", "alone", "cost", "together", "cost", "Table 1", "cost")
    return PaperTable(
        "Eq. 1 at tolerance 0.1, in parameters: block at width, |s_d - s_w|; cost as a fraction of the full model's",
        columns,
        tuple(rows),
        (
            "alone: each level by itself, with its own classifier only. together: depth strictly growing, width never "
            "shrinking, the shallower classifiers counted.",
            f"Sum of |s_d - s_w|: {_sum(together, grid.blocks):.3f} together, {_sum(paper, grid.blocks):.3f} with the "
            "paper's splits, all of which are within the tolerance: Table 1 is feasible, but not what Eq. 1 picks.",
        ),
    )


def _pair(split: LevelShape, blocks: int) -> tuple[str, float]:
    gap = abs(split.depth / blocks - split.width)
    return f"{split.depth} at {split.width:.2f}, {gap:.3f}", round(split.share, 3)


def _sum(splits: Sequence[LevelShape], blocks: int) -> float:
    return sum(abs(s.depth / blocks - s.width) for s in splits)


# ---- Table 7: MSDNet-24 ----------------------------------------------------------------------------------------------

_MSDNET_EXITS = (15, 18, 21, 24)

TABLE_7 = (
    Printed("4", "1.00", 1.00, 2.64, 101.9, 46.6, _MSDNET_EXITS),
    Printed("3-w", "1.00", 0.75, 1.33, 48.1, 42.1, _MSDNET_EXITS),
    Printed("2-w", "1.00", 0.50, 0.66, 25.6, 34.9, _MSDNET_EXITS),
    Printed("1-w", "1.00", 0.35, 0.30, 12.4, 31.6, _MSDNET_EXITS),
    Printed("3-dw", "0.875", 0.85, 1.38, 59.7, 40.9, _MSDNET_EXITS[:3]),
    Printed("2-dw", "0.75", 0.70, 0.64, 32.4, 37.8, _MSDNET_EXITS[:2]),
    Printed("1-dw", "0.625", 0.65, 0.28, 15.8, 28.6, _MSDNET_EXITS[:1]),
)


def table_7() -> PaperTable:
    """Return ScaleFL's Table 7: MSDNet-24 split along width only, and along depth and width."""
    return _sizes(
        "ScaleFL, Table 7 (appendix): MSDNet-24, split along width only (w) and along depth and width (dw)",
        built_in("msdnet24"),
        IMAGE,
        TABLE_7,
        (
            "Level 4 and the rows split along width only count all four classifiers, after layers 15, 18, 21 and 24.",
            "No width has both costs of row 1-w: 0.35 has its parameters, and 12.4 M multiply-adds need more of both.",
        ),
    )


# ---- Table 8: EfficientNet-B4 ----------------------------------------------------------------------------------------

_EFFICIENTNET_EXITS = (22, 26, 30)

TABLE_8 = (
    Printed("4", "1.00", 1.00, 17.2, 1223.5, 212.8, (32,)),
    Printed("3-w", "1.00", 0.70, 8.6, 613.3, 120.3, (32,)),
    Printed("2-w", "1.00", 0.48, 4.2, 299.2, 81.3, (32,)),
    Printed("1-w", "1.00", 0.33, 2.1, 148.8, 59.5, (32,)),
    Printed("3-dw", "0.94", 0.82, 8.6, 799.6, 146.9, _EFFICIENTNET_EXITS),
    Printed("2-dw", "0.81", 0.65, 4.5, 641.5, 110.1, _EFFICIENTNET_EXITS[:2], fits=0.75),
    Printed("1-dw", "0.69", 0.65, 2.1, 534.1, 103.9, _EFFICIENTNET_EXITS[:1], fits=0.75),
)


def table_8() -> PaperTable:
    """Return ScaleFL's Table 8: EfficientNet-B4 split along width only, and along depth and width."""
    return _sizes(
        "ScaleFL, Table 8 (appendix): EfficientNet-B4 at 224x224, split along width only (w), along depth and width "
        "(dw)",
        built_in("efficientnet_b4"),
        (3, 224, 224),
        TABLE_8,
        (
            "The rows printed with s_w = 0.65 have the costs of 0.75. Exits after stages 5, 6 and 7: blocks 22, 26 and "
            "30 of 32.",
            "Level 4 and the rows split along width only leave the early classifiers out.",
        ),
    )


# ---- Table 9: BERT-base ----------------------------------------------------------------------------------------------

_TOKENS = 64
_BERT_EXITS = (4, 6, 9)

TABLE_9 = (
    Printed("4", "1.00", 1.00, 109.5, 163.5, 155.9, (12,)),
    Printed("3-w", "1.00", 0.70, 57.3, 106.2, 84.5, (12,)),
    Printed("2-w", "1.00", 0.45, 27.1, 72.0, 44.8, (12,)),
    Printed("1-w", "1.00", 0.30, 14.7, 22.3, 32.9, (12,)),
    Printed("3-dw", "0.75", 0.75, 54.8, 85.3, 79.7, _BERT_EXITS),
    Printed("2-dw", "0.50", 0.55, 26.1, 42.9, 26.6, _BERT_EXITS[:2]),
    Printed("1-dw", "0.33", 0.40, 13.7, 22.2, 15.3, _BERT_EXITS[:1]),
)


def table_9() -> PaperTable:
    """Return ScaleFL's Table 9: BERT-base split along width only, and along depth and width."""
    architecture = built_in("bert_base", classes=2, input_shape=(_TOKENS,), heads="fixed")
    rows: list[tuple[Value, ...]] = []
    for row in TABLE_9:
        cost = submodel_cost(architecture, (architecture.sizes(row.s_w), row.exits), (_TOKENS,))
        as_counted = counted_as_printed(architecture, row.s_w, row.exits, _TOKENS)
        rows.append((row.level, row.s_d, row.s_w, row.exits[-1], round(cost.parameters / 1e6, 2), row.parameters,
                     round(as_counted / 1e6, 1), row.multiply_adds, round(cost.multiply_adds / 1e6)))  # fmt: skip
    return PaperTable(
        "ScaleFL, Table 9 (appendix): BERT-base, split along width only (w) and along depth and width (dw)",
        ("level", "s_d", "s_w", "exit at block", "parameters (M)", "printed", "as the paper counts (M)", "printed",
         "multiply-adds (M)"),
        tuple(rows),
        (
            'All 12 heads are kept and made smaller (heads = "fixed"). Level 4 and the rows split along width only '
            "leave the early classifiers out.",
            "As the paper counts: linear layers for one token, attention for 64 (one of its two products at full width "
            "in every row), two per number of a layer norm. The multiply-adds are those of all 64 tokens.",
            "Row 1-w is printed with 22.3 M, which is what row 1-dw has; counted like the others it has 57.2 M.",
        ),
        models=models_of(architecture, (_TOKENS,), TABLE_9),
        printed_ms=_latencies(TABLE_9),
    )  # fmt: skip


def counted_as_printed(architecture: Architecture, width: float, exits: Sequence[int], tokens: int) -> int:
    """Return what Table 9 prints as FLOPs of a sub-model: no multiply-adds of 64 tokens.

    What is printed is, to the last digits, a sum of three counts: each linear layer for one token only; both products
    of attention for all 64 tokens, but one of the two at the full width of 768 whatever s_w is; and two per number that
    a layer norm returns, for all 64 tokens.
    """
    sizes, depth = architecture.sizes(width), exits[-1]
    hidden, full = sizes["hidden"], architecture.axes["hidden"].size
    with torch.device("meta"):
        module = build_module(architecture, sizes, tuple(exits))
    linear = sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
    products = depth * tokens**2 * (hidden + full)
    norms = (2 * depth + 1) * 2 * tokens * hidden
    return linear + products + norms
