"""The levels of a plan as nested pieces, with what they cost."""

from collections.abc import Sequence

from fleetfit.records.schema import LevelRecord
from fleetfit.report.page.parts import PageSection, Part, Piece, Pieces, Sheet, Words
from fleetfit.report.page.traces import level_color
from fleetfit.report.record import RunRecord
from fleetfit.report.tables import make_level_table, make_plan_table
from fleetfit.report.text import format_count, format_percent, get_score_name

HOW = (
    "Grey frame: the full model, its width across and its depth down. Coloured: what the level has of it. Lines in it: "
    "exits. Dashed: the smaller levels, which lie inside. Which channels are kept is the method's choice."
)


def pieces_of(
    levels: Sequence[LevelRecord],
    told: bool = True,
    title: str = "",
    color: int | None = None,
    score: str = "accuracy",
) -> Pieces:
    """Return the picture of levels.

    Args:
        levels: As in `summary.json`.
        told: Whether the accuracy of a level's own clients belongs to it.
        title: What stands above it.
        color: Number of the colour of all of them; by default each has its own.
        score: What that accuracy is called.
    """
    found = []
    for i, level in enumerate(levels):
        blocks = level.blocks
        lines = [
            ("width", f"{100 * level.width:.0f} %"),
            ("depth", f"{level.depth} of {blocks} blocks"),
            ("parameters", format_count(level.parameters)),
            ("multiply-adds", format_count(level.multiply_adds)),
            ("clients", str(level.clients)),
            *([(f"local {score}", f"{format_percent(level.local)} %")] if told and level.local is not None else []),
        ]
        found.append(
            Piece(
                title=f"level {level.level}",
                width=level.width,
                depth=level.depth / blocks,
                exits=[exit / blocks for exit in level.exits],
                inside=[(one.width, one.depth / blocks) for one in levels[:i]],
                lines=lines,
                color=level_color(i) if color is None else color,
            )
        )
    return Pieces(found, title)


def section_of(record: RunRecord) -> PageSection | None:
    """Return the plan of a run; None where nothing says what its levels are."""
    levels = record.summary.levels
    if not levels:
        return None
    parts: list[Part] = [
        pieces_of(levels, not record.is_private, score=get_score_name(record.summary)),
        Words(HOW, "quiet"),
    ]
    if record.plan is not None:
        parts.append(Sheet(make_plan_table(record.plan)))
    else:
        parts.append(Sheet(make_level_table(record.summary)))
    return PageSection("plan", "The plan: the model in pieces", parts)
