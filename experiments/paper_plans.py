"""The papers' tables of sizes beside ours: what sub-models cost in ScaleFL and AdaptiveFL, what a ReeFL client sends.

    python experiments/paper_plans.py scalefl-table-1 adaptivefl-table-1
    python experiments/paper_plans.py scalefl                                  # all tables of a paper
    python experiments/paper_plans.py scalefl-table-6 --latency --passes 200   # measure latencies on this machine

ScaleFL (CVPR 2023): Table 1 and Tables 6 to 9 of its appendix, with what Eq. 1 picks. Some printed ratios do not give
the printed costs; such a row is there twice, at the ratio that does and as printed. Table 9 has two counts: what the
paper prints as FLOPs (`count_printed_flops`), and the multiply-adds of the whole sentence.

AdaptiveFL (DAC 2024): Table 1, the pool of sub-models of VGG-16.

ReeFL (ICML 2024): Tables 1 and 2, what a client sends in a round, by method and by what is fine-tuned. The paper's
columns are a sum: four bytes for each trained number, one way, in MiB (2^20 bytes), with a classifier of 100 classes,
as a mean over the clients' depths (and ScaleFL's widths). It counts a classifier after every block, even with four
exits, but one in all for InclusiveFL and ReeFL, and SSF's factors and terms for the norm before each classifier.
ExclusiveFL is printed as if clients of all depths took part. The first numbers count the same way; beside them is the
size of the message that a client of FleetFit sends back, with classifiers at exits only.

`docs/paper-tables.md` has all of them.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from fleetfit import names
from fleetfit.anatomy import Architecture, build_module
from fleetfit.cli import output
from fleetfit.cli.plan import LatencyMeter
from fleetfit.core import Job, Level, LocalResult, Problem, apply_peft
from fleetfit.core.tasks import get_task
from fleetfit.cost import Cost, Latency, TimedModel, cost_grid, full_cost, message_size, submodel_cost
from fleetfit.cost.count import get_layout
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.hooks import build
from fleetfit.methods._pool import make_pool
from fleetfit.planner import LevelShape, Targets, assign, make_fixed_targets, search
from fleetfit.report.tables import LATENCIES, format_latency
from fleetfit.report.text import Table

Value = str | int | float | None


# ---- a table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperTable:
    """A table: a title, columns, rows in their order, and notes; columns of latencies follow the others.

    Attributes:
        parts: Tables that belong under this one.
        models: The sub-model of each row, the full one first; empty if rows are not models.
        printed_ms: The latency of each row in milliseconds, as printed; empty if the paper prints none.
        latencies: The latency of each row on this machine; empty if nothing was measured.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    parts: tuple["PaperTable", ...] = ()
    models: tuple[TimedModel, ...] = ()
    printed_ms: tuple[float, ...] = ()
    latencies: tuple[Latency, ...] = ()

    def add_latencies(self, latencies: Sequence[Latency], notes: Sequence[str]) -> "PaperTable":
        """Return the table with the latencies of its rows, and notes on how they were measured."""
        notes = (*self.notes, *notes)
        if self.printed_ms:
            notes += ("The paper names no machine for its latencies; between machines, compare the fractions of the "
                      "full model's.",)  # fmt: skip
        return replace(self, latencies=tuple(latencies), notes=notes)

    def to_tables(self) -> list[Table]:
        """Return the table, and those under it, as they are printed."""
        columns, cells = self._make_latency_columns()
        rows = tuple(
            tuple(
                "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
                for value in (*row, *latency)
            )
            for row, latency in zip(self.rows, cells, strict=True)
        )
        parts = [table for part in self.parts for table in part.to_tables()]
        return [Table((*self.columns, *columns), rows, self.title, self.notes), *parts]

    def _make_latency_columns(self) -> tuple[tuple[str, ...], list[tuple[Value, ...]]]:
        """Return the columns of latencies and their cells: measured ones, and printed ones beside them."""
        if not self.latencies:
            if self.printed_ms:
                return ("printed latency (ms)",), [(ms,) for ms in self.printed_ms]
            return (), [()] * len(self.rows)
        cells = [format_latency(latency, self.latencies[0]) for latency in self.latencies]
        if not self.printed_ms:
            return LATENCIES, list(cells)
        absolute, relative = LATENCIES
        printed = [(ms, f"{ms / self.printed_ms[0]:.3f}") for ms in self.printed_ms]
        rows: list[tuple[Value, ...]] = [(a, ms, r, part) for (a, r), (ms, part) in zip(cells, printed, strict=True)]
        return (absolute, "printed", relative, "printed"), rows


def build_family(name: str, **settings: Any) -> Architecture:
    """Return a built-in model family by its name in run files."""
    return cast(Architecture, names.resolve("models", name)(**settings))


def pair_costs(cost: Cost, parameters: float, multiply_adds: float) -> tuple[float, float, float, float]:
    """Return computed and printed millions of parameters, then of multiply-adds."""
    return round(cost.parameters / 1e6, 3), parameters, round(cost.multiply_adds / 1e6, 1), multiply_adds


# ---- ScaleFL ---------------------------------------------------------------------------------------------------------

IMAGE = (3, 32, 32)
COLUMNS = ("level", "s_d", "s_w", "exit at block", "parameters (M)", "printed", "multiply-adds (M)", "printed")


@dataclass(frozen=True)
class PrintedRow:
    """A row of ScaleFL's tables.

    Attributes:
        level: Its name.
        s_d: The printed split ratio along depth.
        s_w: The printed split ratio along width.
        parameters: In millions, as printed.
        multiply_adds: In millions, as printed.
        latency_ms: As printed, in the appendix only.
        exits: The classifiers that count.
        fitted_width: The width that gives the printed costs, if `s_w` does not.
    """

    level: str
    s_d: str
    s_w: float
    parameters: float
    multiply_adds: float
    latency_ms: float
    exits: tuple[int, ...]
    fitted_width: float | None = None


def list_variants(printed: Sequence[PrintedRow]) -> list[tuple[str, float, PrintedRow]]:
    """Return a name and a width for each row; a row whose printed ratio does not give its costs comes twice."""
    variants = []
    for row in printed:
        variants.append((row.level, row.s_w if row.fitted_width is None else row.fitted_width, row))
        if row.fitted_width is not None:
            variants.append((f"{row.level}, as printed", row.s_w, row))
    return variants


def make_models(
    architecture: Architecture, input_shape: tuple[int, ...], printed: Sequence[PrintedRow]
) -> tuple[TimedModel, ...]:
    """Return the sub-model of each row, with the classifiers that count."""
    return tuple(
        TimedModel(architecture, architecture.sizes(width), row.exits, input_shape)
        for _, width, row in list_variants(printed)
    )


def make_size_table(
    title: str,
    architecture: Architecture,
    input_shape: tuple[int, ...],
    printed: Sequence[PrintedRow],
    notes: tuple[str, ...],
    parts: tuple[PaperTable, ...] = (),
) -> PaperTable:
    """Return a table of parameters and multiply-adds, each beside the printed ones."""
    rows: list[tuple[Value, ...]] = []
    for name, width, row in list_variants(printed):
        cost = submodel_cost(architecture, (architecture.sizes(width), row.exits), input_shape)
        rows.append((name, row.s_d, width, row.exits[-1], *pair_costs(cost, row.parameters, row.multiply_adds)))
    models = make_models(architecture, input_shape, printed)
    printed_ms = tuple(row.latency_ms for _, _, row in list_variants(printed))
    return PaperTable(title, COLUMNS, tuple(rows), notes, parts, models, printed_ms)


# Tables 1 and 6: ResNet-110

_DEPTHS, _WIDTHS = (36, 42, 48), (0.70, 0.70, 0.75)
_RATIOS = (0.125, 0.25, 0.5, 1.0)
_TOLERANCE = 0.1

FULL = PrintedRow("4", "1.00", 1.00, 1.73, 253.1, 47.2, (54,))
DEPTH_AND_WIDTH = (
    PrintedRow("3", "0.88", 0.75, 0.86, 138.5, 39.2, _DEPTHS),
    PrintedRow("2", "0.77", 0.70, 0.46, 99.7, 33.1, _DEPTHS[:2]),
    PrintedRow("1", "0.66", 0.70, 0.21, 83.4, 27.9, _DEPTHS[:1]),
)
SCALEFL_TABLE_6 = (
    FULL,
    PrintedRow("3-w", "1.00", 0.70, 0.82, 119.7, 37.7, (54,)),
    PrintedRow("2-w", "1.00", 0.45, 0.44, 63.2, 35.6, (54,), fitted_width=0.50),
    PrintedRow("1-w", "1.00", 0.30, 0.21, 28.0, 28.3, (54,), fitted_width=0.35),
    *(replace(row, level=f"{row.level}-dw") for row in DEPTH_AND_WIDTH),
)
_EXITS = (
    "Exits after blocks 36, 42 and 48 of 54 (0.667, 0.778, 0.889) reproduce the printed costs; the released code ships "
    "30, 38 and 46, which do not."
)


def make_scalefl_table_1() -> PaperTable:
    """Return ScaleFL's Table 1, and what Eq. 1 picks, for ResNet-110."""
    architecture = build_family("resnet110")
    whole = submodel_cost(architecture, ({}, (*_DEPTHS, 54)), IMAGE)
    heads = whole.parameters - full_cost(architecture, IMAGE).parameters
    table = make_size_table(
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
        (make_eq_1_table(),),
    )
    return replace(table, printed_ms=())  # Table 6 prints them


def make_scalefl_table_6() -> PaperTable:
    """Return ScaleFL's Table 6: ResNet-110 split along width only, and along depth and width."""
    return make_size_table(
        "ScaleFL, Table 6 (appendix): ResNet-110, split along width only (w) and along depth and width (dw)",
        build_family("resnet110"),
        IMAGE,
        SCALEFL_TABLE_6,
        ("The rows printed with s_w = 0.45 and 0.30 have the costs of 0.50 and 0.35.", _EXITS),
    )


def make_eq_1_table() -> PaperTable:
    """Return what Eq. 1 picks for each r_l at tolerance 0.1, each level alone and all together, beside Table 1."""
    grid = cost_grid(build_family("resnet110"), IMAGE)
    targets = Targets(_RATIOS, (_TOLERANCE,) * len(_RATIOS))
    together = search(grid, targets)
    paper = search(grid, targets, depths=_DEPTHS, widths=_WIDTHS)

    def compute_gap(split: LevelShape) -> float:
        return abs(split.depth / grid.blocks - split.width)

    rows: list[tuple[Value, ...]] = []
    for i in reversed(range(len(_RATIOS))):
        row: list[Value] = [str(i + 1), _RATIOS[i]]
        ratios = tuple(sorted({_RATIOS[i], 1.0}))
        alone = search(grid, Targets(ratios, (_TOLERANCE,) * len(ratios)))[0]
        for split in (alone, together[i], paper[i]):
            row += [f"{split.depth} at {split.width:.2f}, {compute_gap(split):.3f}", round(split.share, 3)]
        rows.append(tuple(row))
    columns = ("level", "r_l", "alone", "cost", "together", "cost", "Table 1", "cost")
    return PaperTable(
        "Eq. 1 at tolerance 0.1, in parameters: block at width, |s_d - s_w|; cost as a fraction of the full model's",
        columns,
        tuple(rows),
        (
            "alone: each level by itself, with its own classifier only. together: depth strictly growing, width never "
            "shrinking, the shallower classifiers counted.",
            f"Sum of |s_d - s_w|: {sum(map(compute_gap, together)):.3f} together, {sum(map(compute_gap, paper)):.3f} "
            "with the paper's splits, all of which are within the tolerance: Table 1 is feasible, but not what Eq. 1 "
            "picks.",
        ),
    )


# Table 7: MSDNet-24

_MSDNET_EXITS = (15, 18, 21, 24)

SCALEFL_TABLE_7 = (
    PrintedRow("4", "1.00", 1.00, 2.64, 101.9, 46.6, _MSDNET_EXITS),
    PrintedRow("3-w", "1.00", 0.75, 1.33, 48.1, 42.1, _MSDNET_EXITS),
    PrintedRow("2-w", "1.00", 0.50, 0.66, 25.6, 34.9, _MSDNET_EXITS),
    PrintedRow("1-w", "1.00", 0.35, 0.30, 12.4, 31.6, _MSDNET_EXITS),
    PrintedRow("3-dw", "0.875", 0.85, 1.38, 59.7, 40.9, _MSDNET_EXITS[:3]),
    PrintedRow("2-dw", "0.75", 0.70, 0.64, 32.4, 37.8, _MSDNET_EXITS[:2]),
    PrintedRow("1-dw", "0.625", 0.65, 0.28, 15.8, 28.6, _MSDNET_EXITS[:1]),
)


def make_scalefl_table_7() -> PaperTable:
    """Return ScaleFL's Table 7: MSDNet-24 split along width only, and along depth and width."""
    return make_size_table(
        "ScaleFL, Table 7 (appendix): MSDNet-24, split along width only (w) and along depth and width (dw)",
        build_family("msdnet24"),
        IMAGE,
        SCALEFL_TABLE_7,
        (
            "Level 4 and the rows split along width only count all four classifiers, after layers 15, 18, 21 and 24.",
            "No width has both costs of row 1-w: 0.35 has its parameters, and 12.4 M multiply-adds need more of both.",
        ),
    )


# Table 8: EfficientNet-B4

_EFFICIENTNET_EXITS = (22, 26, 30)

SCALEFL_TABLE_8 = (
    PrintedRow("4", "1.00", 1.00, 17.2, 1223.5, 212.8, (32,)),
    PrintedRow("3-w", "1.00", 0.70, 8.6, 613.3, 120.3, (32,)),
    PrintedRow("2-w", "1.00", 0.48, 4.2, 299.2, 81.3, (32,)),
    PrintedRow("1-w", "1.00", 0.33, 2.1, 148.8, 59.5, (32,)),
    PrintedRow("3-dw", "0.94", 0.82, 8.6, 799.6, 146.9, _EFFICIENTNET_EXITS),
    PrintedRow("2-dw", "0.81", 0.65, 4.5, 641.5, 110.1, _EFFICIENTNET_EXITS[:2], fitted_width=0.75),
    PrintedRow("1-dw", "0.69", 0.65, 2.1, 534.1, 103.9, _EFFICIENTNET_EXITS[:1], fitted_width=0.75),
)


def make_scalefl_table_8() -> PaperTable:
    """Return ScaleFL's Table 8: EfficientNet-B4 split along width only, and along depth and width."""
    return make_size_table(
        "ScaleFL, Table 8 (appendix): EfficientNet-B4 at 224x224, split along width only (w), along depth and width "
        "(dw)",
        build_family("efficientnet_b4"),
        (3, 224, 224),
        SCALEFL_TABLE_8,
        (
            "The rows printed with s_w = 0.65 have the costs of 0.75. Exits after stages 5, 6 and 7: blocks 22, 26 and "
            "30 of 32.",
            "Level 4 and the rows split along width only leave the early classifiers out.",
        ),
    )


# Table 9: BERT-base

_TOKENS = 64
_BERT_EXITS = (4, 6, 9)

SCALEFL_TABLE_9 = (
    PrintedRow("4", "1.00", 1.00, 109.5, 163.5, 155.9, (12,)),
    PrintedRow("3-w", "1.00", 0.70, 57.3, 106.2, 84.5, (12,)),
    PrintedRow("2-w", "1.00", 0.45, 27.1, 72.0, 44.8, (12,)),
    PrintedRow("1-w", "1.00", 0.30, 14.7, 22.3, 32.9, (12,)),
    PrintedRow("3-dw", "0.75", 0.75, 54.8, 85.3, 79.7, _BERT_EXITS),
    PrintedRow("2-dw", "0.50", 0.55, 26.1, 42.9, 26.6, _BERT_EXITS[:2]),
    PrintedRow("1-dw", "0.33", 0.40, 13.7, 22.2, 15.3, _BERT_EXITS[:1]),
)


def make_scalefl_table_9() -> PaperTable:
    """Return ScaleFL's Table 9: BERT-base split along width only, and along depth and width."""
    architecture = build_family("bert_base", classes=2, input_shape=(_TOKENS,), heads="fixed")
    rows: list[tuple[Value, ...]] = []
    for row in SCALEFL_TABLE_9:
        cost = submodel_cost(architecture, (architecture.sizes(row.s_w), row.exits), (_TOKENS,))
        flops = count_printed_flops(architecture, row.s_w, row.exits, _TOKENS)
        rows.append((row.level, row.s_d, row.s_w, row.exits[-1], round(cost.parameters / 1e6, 2), row.parameters,
                     round(flops / 1e6, 1), row.multiply_adds, round(cost.multiply_adds / 1e6)))  # fmt: skip
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
        models=make_models(architecture, (_TOKENS,), SCALEFL_TABLE_9),
        printed_ms=tuple(row.latency_ms for row in SCALEFL_TABLE_9),
    )  # fmt: skip


def count_printed_flops(architecture: Architecture, width: float, exits: Sequence[int], tokens: int) -> int:
    """Return what Table 9 prints as FLOPs of a sub-model, which are not the multiply-adds of 64 tokens.

    To the last digits, the printed number is a sum of three counts: each linear layer for one token only; both products
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


# ---- AdaptiveFL ------------------------------------------------------------------------------------------------------

ADAPTIVEFL_TABLE_1 = {
    "L1": (33.65, 333.22, 1.00),
    "M1": (16.81, 272.17, 0.50),
    "M2": (15.41, 239.95, 0.46),
    "M3": (14.84, 203.41, 0.44),
    "S1": (8.39, 239.00, 0.25),
    "S2": (6.48, 191.31, 0.19),
    "S3": (5.67, 139.07, 0.17),
}
"""Millions of parameters and of multiply-adds and the ratio of parameters, as printed."""


def make_adaptivefl_table_1() -> PaperTable:
    """Return AdaptiveFL's Table 1."""
    architecture = build_family("vgg16")
    entries = {entry.name: entry for entry in make_pool(architecture)}
    costs = {name: submodel_cost(architecture, entry.submodel, IMAGE) for name, entry in entries.items()}
    rows: list[tuple[Value, ...]] = []
    models = []
    for name, (parameters, multiply_adds, ratio) in ADAPTIVEFL_TABLE_1.items():
        share = round(costs[name].parameters / costs["L1"].parameters, 2)
        numbers = pair_costs(costs[name], parameters, multiply_adds)
        rows.append((name, entries[name].width, entries[name].whole, *numbers, share, ratio))
        submodel = entries[name].submodel
        models.append(TimedModel(architecture, {**architecture.sizes(1.0), **submodel.sizes}, submodel.exits, IMAGE))
    return PaperTable(
        "AdaptiveFL, Table 1: the pool of VGG-16 (p = 3)",
        ("model", "r_w", "I", "parameters (M)", "printed", "multiply-adds (M)", "printed", "ratio", "printed"),
        tuple(rows),
        (
            "Batch norm, ten classes, 32x32 images. The paper's count has four more for each number that a convolution "
            "returns (bias, norm and activation), which is what its rows are above ours: 0.9 to 1.1 M.",
        ),
        models=tuple(models),
    )


# ---- ReeFL -----------------------------------------------------------------------------------------------------------

_DEIT_IMAGE, _CLASSES, _BLOCKS = (3, 224, 224), 100, 12
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
"""The paper's names for what is fine-tuned, and ours."""


@dataclass(frozen=True)
class PaperMethod:
    """A method of ReeFL's tables.

    Attributes:
        label: The paper's name for it.
        spec: Ours.
        all_heads: Whether the paper counts a classifier after every block, and not one in all.
        cuts_width: Whether it cuts width too.
    """

    label: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    all_heads: bool = False
    cuts_width: bool = False


METHODS = (
    PaperMethod("ExclusiveFL", {"name": "exclusivefl", "exits": "all"}, all_heads=True),
    PaperMethod("InclusiveFL", {"name": "inclusivefl"}),
    PaperMethod("ScaleFL", {"name": "scalefl"}, all_heads=True, cuts_width=True),
    PaperMethod("DepthFL", {"name": "depthfl"}, all_heads=True),
    PaperMethod("ReeFL", {"name": "reefl"}),
)


@dataclass(frozen=True)
class Splits:
    """Depths of the clients' models, those of ScaleFL, and ScaleFL's widths (appendix A)."""

    depths: tuple[int, ...]
    scalefl_depths: tuple[int, ...]
    scalefl_widths: tuple[float, ...]

    def list_levels(self, method: PaperMethod) -> list[tuple[int, float]]:
        """Return depth and width of each level."""
        if method.cuts_width:
            return list(zip(self.scalefl_depths, self.scalefl_widths, strict=True))
        return [(depth, 1.0) for depth in self.depths]


FOUR_EXITS = Splits((3, 6, 9, 12), (4, 6, 9, 12), (0.4, 0.55, 0.75, 1.0))
TWELVE_EXITS = Splits(
    tuple(range(1, 13)), tuple(range(1, 13)),
    (0.25, 0.3, 0.35, 0.4, 0.48, 0.55, 0.61, 0.69, 0.75, 0.84, 0.92, 1.0),
)  # fmt: skip

REEFL_TABLE_1 = {
    "Full": (53.31, 52.33, 34.91, 53.31, 53.98),
    "Frozen": (1.12, 0.15, 0.89, 1.12, 1.79),
    "LoRA": (2.53, 1.56, 2.00, 2.53, 3.20),
    "PA": (2.55, 1.58, 2.01, 2.55, 3.22),
    "SA": (2.55, 1.58, 2.01, 2.55, 3.22),
    "SSF": (1.39, 0.40, 1.10, 1.39, 2.04),
}
"""The column "Comm. Cost (MB)" of Table 1, in the order of `METHODS`."""
REEFL_TABLE_2 = {
    "Full": (46.39, 45.57, 26.40, 46.39, 47.21),
    "Frozen": (0.97, 0.15, 0.70, 0.97, 1.79),
    "LoRA": (2.19, 1.37, 1.58, 2.19, 3.01),
    "PA": (2.21, 1.39, 1.60, 2.21, 3.03),
    "SA": (2.21, 1.39, 1.60, 2.21, 3.03),
    "SSF": (1.21, 0.37, 0.87, 1.21, 2.01),
}
"""That of Table 2."""


def make_reefl_table(title: str, splits: Splits, printed: Mapping[str, Sequence[float]]) -> PaperTable:
    """Return the costs of a table of ReeFL, in MiB."""
    rows: list[tuple[Value, ...]] = []
    for mode, numbers in printed.items():
        architecture = apply_peft(
            build_family("deit_s", classes=_CLASSES, input_shape=_DEIT_IMAGE, heads="fixed"), {"name": MODES[mode]}
        )
        for method, printed_mib in zip(METHODS, numbers, strict=True):
            counted, sent = count_bytes(architecture, method, splits)
            rows.append((mode, method.label, round(counted / _MIB, 2), printed_mib, round(sent / _MIB, 2)))
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


def count_bytes(architecture: Architecture, paper_method: PaperMethod, splits: Splits) -> tuple[float, float]:
    """Return the bytes that a client sends, as the paper counts and in fact; a mean over one client of each level.

    Args:
        architecture: The model with its tuning mode, before the method changes it.
        paper_method: The method.
        splits: Depths and widths of the clients' models.
    """
    method = build(paper_method.spec)
    architecture = method.adapt_model(architecture, _DEIT_IMAGE)
    shapes = splits.list_levels(paper_method)
    counted = [count_paper_bytes(architecture, depth, width, paper_method.all_heads) for depth, width in shapes]
    problem = Problem(architecture, _DEIT_IMAGE, get_task("classification"), (_BLOCKS,))
    shares = [(i + 1) / len(shapes) for i in range(len(shapes))]
    levels = method.make_levels(problem, make_fixed_targets([d for d, _ in shapes], [w for _, w in shapes], shares))
    level_of = assign(shares, 0.0, [level.needs for level in levels])
    sent = [
        message_size(list_reply_shapes(architecture, levels[level], paper_method.spec))
        for level in level_of
        if level >= 0
    ]
    return sum(counted) / len(counted), sum(sent) / len(sent)


def count_paper_bytes(architecture: Architecture, depth: int, width: float, all_heads: bool) -> int:
    """Return the bytes of a sub-model as the paper counts them.

    Args:
        architecture: The model family, as a method and a tuning mode changed it.
        depth: Blocks.
        width: Fraction of the channels.
        all_heads: Whether there is a classifier after every block.
    """
    exits = tuple(range(1, depth + 1)) if all_heads else (depth,)
    shapes = get_layout(architecture, _DEIT_IMAGE).shapes(architecture.sizes(width), exits)
    numbers = sum(math.prod(shape) for shape in shapes.values())
    if any(name.endswith(".tuning.scale") for name in shapes):  # SSF, which here leaves classifiers as they are
        norms = [shape for name, shape in shapes.items() if name.startswith(_HEADS) and name.endswith(".norm.weight")]
        numbers += sum(2 * math.prod(shape) for shape in norms)
    return 4 * numbers


def list_reply_shapes(
    architecture: Architecture, level: Level, spec: Mapping[str, Any]
) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a client of a level sends back."""
    submodel = level.submodel
    shapes = get_layout(architecture, _DEIT_IMAGE).shapes(submodel.sizes, submodel.exits)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    job = Job("train", 0, 1, 0, None, submodel, state, spec, 0)
    device: Any = None  # replies do not depend on it
    _, reply = build(spec).reply(job, device, LocalResult(state, None))
    return {name: tuple(tensor.shape) for name, tensor in reply.items()}


# ---- the command -----------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], PaperTable]] = {
    "scalefl-table-1": make_scalefl_table_1,
    "scalefl-table-6": make_scalefl_table_6,
    "scalefl-table-7": make_scalefl_table_7,
    "scalefl-table-8": make_scalefl_table_8,
    "scalefl-table-9": make_scalefl_table_9,
    "adaptivefl-table-1": make_adaptivefl_table_1,
    "reefl-table-1": functools.partial(
        make_reefl_table, "ReeFL, Table 1: what a client of DeiT-S sends in a round, 4 exits, in MiB",
        FOUR_EXITS, REEFL_TABLE_1,
    ),
    "reefl-table-2": functools.partial(
        make_reefl_table, "ReeFL, Table 2: what a client of DeiT-S sends in a round, 12 exits, in MiB",
        TWELVE_EXITS, REEFL_TABLE_2,
    ),
}  # fmt: skip
PAPERS = ("scalefl", "adaptivefl", "reefl")


def measure_table(table: PaperTable, meter: LatencyMeter) -> PaperTable:
    """Return a table with the latencies of its rows.

    Raises:
        ConfigError: Its rows are not models.
    """
    if not table.models:
        raise ConfigError(f'--latency measures models, and the rows of "{table.title}" are not models; leave it out.')
    latencies = meter.measure(table.models)
    labels = [str(row[0]) for row in table.rows]
    return table.add_latencies(latencies, meter.make_notes(labels, latencies, latencies[0]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tables", nargs="+", choices=[*PAPERS, *TABLES], metavar="TABLE",
                        help=f"a paper ({', '.join(PAPERS)}) or one table ({', '.join(TABLES)})")  # fmt: skip
    parser.add_argument("--latency", action="store_true", help="measure how long one sample takes in each row here")
    parser.add_argument("--passes", type=int, default=1000, help="passes that the median is of")
    parser.add_argument("--threads", type=int, default=1, help="threads that compute")
    options = parser.parse_args(arguments)
    chosen = [name for name in TABLES if name in options.tables or name.partition("-")[0] in options.tables]
    try:
        meter = LatencyMeter(options.passes, options.threads) if options.latency else None
        for name in chosen:
            table = TABLES[name]()
            for part in (table if meter is None else measure_table(table, meter)).to_tables():
                output.print_table(part)
    except FleetFitError as error:
        output.print_sentence(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
