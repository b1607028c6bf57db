"""Tables as HTML for notebooks. Text is escaped, and colors follow the light or dark theme."""

from collections.abc import Sequence
from html import escape

from fleetfit.errors import escape_controls

_CELL = "border:1px solid rgba(128,128,128,.4);padding:.2em .6em;white-space:pre-wrap;text-align:{}"


def escape_html(text: str) -> str:
    """Return text as HTML shows it: no markup and no control characters."""
    return escape(escape_controls(text))


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    notes: Sequence[str] = (),
    groups: Sequence[tuple[str, int]] = (),
) -> str:
    """Return a table as HTML.

    Args:
        columns: Headings.
        rows: One text per column. All but the first are right-aligned.
        title: Title above the table.
        notes: Sentences below it.
        groups: Headings above the columns, each with the number of columns it spans.
    """
    has_groups = any(name for name, _ in groups)
    above = "".join(_format_cell("th", name, "center", span) for name, span in groups if has_groups)
    head = (f"<tr>{above}</tr>" if above else "") + f"<tr>{_format_cells('th', columns)}</tr>"
    body = "".join(f"<tr>{_format_cells('td', row)}</tr>" for row in rows)
    heading = f"<p><b>{escape_html(title)}</b></p>" if title else ""
    below = "".join(f"<p><small>{escape_html(note)}</small></p>" for note in notes)
    table = f'<table style="border-collapse:collapse"><thead>{head}</thead><tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto;margin-bottom:.8em">{heading}{table}{below}</div>'


def _format_cells(kind: str, texts: Sequence[str]) -> str:
    return "".join(_format_cell(kind, text, "left" if i == 0 else "right") for i, text in enumerate(texts))


def _format_cell(kind: str, text: str, side: str, span: int = 1) -> str:
    wide = f' colspan="{span}"' if span > 1 else ""
    return f'<{kind}{wide} style="{_CELL.format(side)}">{escape_html(text)}</{kind}>'
