"""The section on the plan: levels as nested rectangles, with their costs."""

from collections.abc import Sequence

from fleetfit.errors import join_some
from fleetfit.report.page.blocks import Block, LevelRectangle, LevelRectangles, PageSection, Paragraph, Sheet
from fleetfit.report.page.plots import get_level_color
from fleetfit.report.tables import make_level_table, make_plan_table
from fleetfit.report.text import format_count, format_percent, get_score_name
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import LevelRecord

_LEGEND = Paragraph(
    "Gray frame: the full model, width across and depth down. Colored: the level. Lines: exits. Dashed: the smaller "
    "levels inside. The method chooses which channels are kept.",
    "quiet",
)
_MAX_TITLES = 6


def make_plan_section(run: RunFolder) -> PageSection | None:
    """Return the plan of a run; None if its levels are unknown."""
    levels = run.summary.levels
    if not levels:
        return None
    score = "" if run.is_private else get_score_name(run.summary)
    table = make_plan_table(run.plan) if run.plan is not None else make_level_table(run.summary)
    rectangles = LevelRectangles(_make_rectangles(levels, score))
    return PageSection("plan", "The plan: sub-models by level", [rectangles, _LEGEND, Sheet(table)])


def make_plans_section(rows: Sequence[RowRecord]) -> PageSection | None:
    """Return the plans of rows and settings; equal plans are shown once."""
    names = list(dict.fromkeys(row.row for row in rows))
    labels: dict[str, list[str]] = {}
    rectangles: dict[str, list[LevelRectangle]] = {}
    for row in rows:
        levels = row.records[0].summary.levels
        if levels:
            key = repr([level.model_copy(update={"local": None}) for level in levels])
            labels.setdefault(key, []).append(row.label)
            rectangles.setdefault(key, _make_rectangles(levels, color=names.index(row.row)))
    blocks: list[Block] = []
    for key, titles in labels.items():
        blocks.append(LevelRectangles(rectangles[key], join_some(titles, _MAX_TITLES, "; ")))
    return PageSection("plans", "The plans: sub-models by level", [*blocks, _LEGEND]) if blocks else None


def _make_rectangles(levels: Sequence[LevelRecord], score: str = "", color: int | None = None) -> list[LevelRectangle]:
    """Return the rectangles of levels.

    Args:
        levels: Smallest first.
        score: The name of the local accuracy; "" leaves it out.
        color: Number of the color of all levels; by default each has its own.
    """
    rectangles = []
    for i, level in enumerate(levels):
        blocks = level.blocks
        facts = [
            ("width", f"{100 * level.width:.0f} %"),
            ("depth", f"{level.depth} of {blocks} blocks"),
            ("parameters", format_count(level.parameters)),
            ("multiply-adds", format_count(level.multiply_adds)),
            ("clients", str(level.clients)),
        ]
        if score and level.local is not None:
            facts.append((f"local {score}", f"{format_percent(level.local)} %"))
        rectangles.append(
            LevelRectangle(
                title=f"level {level.level}",
                width=level.width,
                depth=level.depth / blocks,
                exits=[exit / blocks for exit in level.exits],
                smaller=[(one.width, one.depth / blocks) for one in levels[:i]],
                facts=facts,
                color=get_level_color(i) if color is None else color,
            )
        )
    return rectangles
