"""The papers' tables beside what this package computes, as plain data that the command line prints.

ScaleFL (CVPR 2023), Table 1 and Table 6 of its appendix: split ratios, parameters and multiply-adds of ResNet-110. The
printed split ratios are not all those that give the printed costs; the notes say which do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fleetfit.cost import Cost, cost_grid, full_cost, submodel_cost
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.models.resnet110 import resnet110
from fleetfit.planner import Split, Targets, one_level, search

Value = str | int | float | None

_INPUT = (3, 32, 32)
_DEPTHS, _WIDTHS = (36, 42, 48), (0.70, 0.70, 0.75)
_RATIOS = (0.125, 0.25, 0.5, 1.0)
_TOLERANCE = 0.1
_COLUMNS = ("level", "s_d", "s_w", "exit at block", "parameters (M)", "printed", "multiply-adds (M)", "printed")


@dataclass(frozen=True)
class PaperTable:
    """A table: a title, columns, rows in their order, and notes.

    Attributes:
        parts: Tables that belong under this one.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()
    parts: tuple["PaperTable", ...] = ()


def paper_table(name: str) -> PaperTable:
    """Return a table by its name, such as "table-1".

    Raises:
        ConfigError: There is no such table.
    """
    if name not in TABLES:
        raise ConfigError(
            f'"{name}" is no table of the papers; there is {", ".join(TABLES)}.{did_you_mean(name, TABLES)}'
        )
    return TABLES[name]()


def table_1() -> PaperTable:
    """Return ScaleFL's Table 1, the width-only rows of Table 6, and what Eq. 1 picks, all for ResNet-110."""
    printed = {"4": (1.73, 253.1), "3": (0.86, 138.5), "2": (0.46, 99.7), "1": (0.21, 83.4)}
    printed_depth = {"4": "1.00", "3": "0.88", "2": "0.77", "1": "0.66"}
    rows: list[tuple[Value, ...]] = [
        ("4", printed_depth["4"], 1.0, 54, *_beside(full_cost(resnet110(), _INPUT), printed["4"]))
    ]
    for i in (2, 1, 0):
        level, exits = str(i + 1), _DEPTHS[: i + 1]
        rows.append(
            (level, printed_depth[level], _WIDTHS[i], exits[-1], *_beside(_of(_WIDTHS[i], exits), printed[level]))
        )
    heads = _of(1.0, (*_DEPTHS, 54)).parameters - full_cost(resnet110(), _INPUT).parameters
    return PaperTable(
        "ScaleFL, Table 1: ResNet-110, split along depth and width",
        _COLUMNS,
        tuple(rows),
        (
            "Exits after blocks 36, 42 and 48 of 54 (0.667, 0.778, 0.889) reproduce the printed costs; the released "
            "code ships 30, 38 and 46, which do not.",
            "Levels 1 to 3 count their own and the shallower classifiers. Level 4 leaves the early ones out, which "
            f"would add {heads / 1e6:.3f} M parameters.",
            '"FLOPs" in the paper are multiply-adds of convolutions and linear layers, one image at a time.',
        ),
        (table_6_width(), eq_1_table()),
    )


def table_6_width() -> PaperTable:
    """Return the width-only rows of the appendix's Table 6, at the printed ratios and at those that fit."""
    printed: Sequence[tuple[str, float, float, tuple[float, float]]] = (
        ("3-w", 0.70, 0.70, (0.82, 119.7)),
        ("2-w", 0.45, 0.50, (0.44, 63.2)),
        ("1-w", 0.30, 0.35, (0.21, 28.0)),
    )
    rows: list[tuple[Value, ...]] = []
    for level, said, fits, costs in printed:
        rows.append((level, "1.00", fits, 54, *_beside(_of(fits, (54,)), costs)))
        if said != fits:
            rows.append((f"{level}, as printed", "1.00", said, 54, *_beside(_of(said, (54,)), costs)))
    return PaperTable(
        "ScaleFL, Table 6 (appendix): ResNet-110, split along width only",
        _COLUMNS,
        tuple(rows),
        ("The rows printed with s_w = 0.45 and 0.30 have the costs of 0.50 and 0.35.",),
    )


def eq_1_table() -> PaperTable:
    """Return what Eq. 1 picks for each r_l at tolerance 0.1, each level alone and all together, beside Table 1."""
    grid = cost_grid(resnet110(), _INPUT)
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


TABLES: Mapping[str, Callable[[], PaperTable]] = {"table-1": table_1}
"""Tables by the name that `fleetfit plan --paper` takes."""


def _of(width: float, exits: tuple[int, ...]) -> Cost:
    architecture = resnet110()
    return submodel_cost(architecture, (architecture.sizes(width), exits), _INPUT)


def _beside(cost: Cost, printed: tuple[float, float]) -> tuple[float, float, float, float]:
    """Return computed and printed millions of parameters, then of multiply-adds."""
    return round(cost.parameters / 1e6, 3), printed[0], round(cost.multiply_adds / 1e6, 1), printed[1]


def _pair(split: Split, blocks: int) -> tuple[str, float]:
    gap = abs(split.depth / blocks - split.width)
    return f"{split.depth} at {split.width:.2f}, {gap:.3f}", round(split.share, 3)


def _sum(splits: Sequence[Split], blocks: int) -> float:
    return sum(abs(s.depth / blocks - s.width) for s in splits)
