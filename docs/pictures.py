"""Draw the pictures of docs/idea.md: SVG that follows the reader's light or dark, with text that can be selected.

    .venv/bin/python docs/pictures.py

Each picture has its own ground, so that it can be read on any page; a test compares. As in the figures of a run, width
goes across and depth down.
"""

from collections.abc import Iterable
from pathlib import Path

# ruff: noqa: E501
FOLDER = Path(__file__).parent / "pictures"
STYLE = """
  .ground { fill: #ffffff } text { fill: #1f2a30; font: 14px system-ui, "Segoe UI", Roboto, sans-serif }
  .small { font-size: 12px; fill: #4c5a61 } .name { font-weight: 600 } .line { stroke: #4c5a61; fill: none; stroke-width: 1.4 }
  .head { fill: #4c5a61 } .none { fill: #eef1f2; stroke: #c9d2d6 } .edge { stroke: #ffffff; stroke-width: 1 }
  .l1 { fill: #b4690a } .l2 { fill: #1f7d72 } .l3 { fill: #2273a3 } .l4 { fill: #6353b0 } .on { fill: #ffffff }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #1b2226 } text { fill: #e6ecee } .small { fill: #aebac0 } .line { stroke: #aebac0 }
    .head { fill: #aebac0 } .none { fill: #263037; stroke: #3d4a52 } .edge { stroke: #1b2226 }
    .l1 { fill: #e8a54d } .l2 { fill: #37b3a3 } .l3 { fill: #4b9fd0 } .l4 { fill: #9385dc } .on { fill: #10171a }
  }
"""
COUNTS = ("1/8", "1/4", "1/2", "1")
DEPTHS = (3, 4, 5, 6)  # blocks of each level
WIDTHS = (4, 5, 6, 8)  # channels of each level, of 8


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return an SVG file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{said}</text>'


def box(x: float, y: float, w: float, h: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" class="{kind}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}" marker-end="url(#arrow)"/>'


def piece(x: float, y: float, level: int, cell: float, kinds: str = "") -> Iterable[str]:
    """Draw the full model as a grid, channels across and blocks down, with a level's piece filled."""
    for block in range(6):
        for channel in range(8):
            inside = block < DEPTHS[level] and channel < WIDTHS[level]
            yield box(
                x + channel * cell,
                y + block * cell,
                cell,
                cell,
                f"edge {kinds or f'l{level + 1}'}" if inside else "none",
            )


def exit_mark(x: float, y: float, level: int, said: str = "") -> Iterable[str]:
    yield f'<circle cx="{x:g}" cy="{y:g}" r="6" class="l{level + 1}"/>'
    if said:
        yield text(x, y - 11, said, "small", "middle")


def cut() -> str:
    """Four levels: the pieces that four budgets get."""
    parts = [
        text(20, 28, "One model, four pieces", "name"),
        text(20, 48, "channels across, blocks down; the dot is the piece's last exit", "small"),
    ]
    for level in range(4):
        x, y, cell = 20 + level * 200, 76, 22
        parts += piece(x, y, level, cell)
        parts += exit_mark(x + 10, y + DEPTHS[level] * cell + 10, level)
        parts.append(text(x, y + 6 * cell + 42, f"level {level + 1}: budget {COUNTS[level]}", "name"))
        parts.append(text(x, y + 6 * cell + 60, f"{WIDTHS[level]} channels, {DEPTHS[level]} blocks", "small"))
    return picture(
        816, 290, "Four nested pieces of one model, for budgets of an eighth, a quarter, a half and all of it", parts
    )


def round_() -> str:
    """A round: pieces go out, are trained on the devices' own data, and come back."""
    parts = [box(20, 90, 150, 120, "none"), text(95, 80, "server", "name", "middle")]
    parts += piece(51, 117, 3, 11)
    parts.append(text(95, 232, "the full model", "small", "middle"))
    names = (("sensor", 0), ("phone", 1), ("laptop", 2), ("workstation", 3))
    for i, (name, level) in enumerate(names):
        y = 24 + i * 72
        parts += [arrow(178, 132 + i * 8, 292, y + 26), box(300, y, 190, 56, "none")]
        parts += piece(312, y + 10, level, 6)
        parts += [
            text(374, y + 24, name, "name"),
            text(374, y + 42, f"trains level {level + 1}", "small"),
            arrow(496, y + 26, 598, 132 + i * 8),
        ]
    parts += [box(606, 90, 150, 120, "none"), text(681, 80, "put together", "name", "middle")]
    shades = {1: "l4", 2: "l3", 3: "l2", 4: "l1"}
    for block in range(6):
        for channel in range(8):
            count = sum(block < d and channel < w for d, w in zip(DEPTHS, WIDTHS, strict=True))
            parts.append(box(637 + channel * 11, 117 + block * 11, 11, 11, f"edge {shades[count]}"))
    parts.append(text(681, 232, "each element: the mean", "small", "middle"))
    parts.append(text(681, 248, "of its clients", "small", "middle"))
    parts.append(text(395, 322, "data never leave a device; only trained pieces do", "small", "middle"))
    return picture(
        776,
        336,
        "A round: the server sends each device its piece, each trains it on its own data, the pieces are averaged",
        parts,
    )


def coverage() -> str:
    """How many of four clients train each element."""
    cell, x0, y0 = 34, 30, 70
    parts = [
        text(20, 28, "The clients of an element", "name"),
        text(20, 48, "one client of each level: the numbers count the clients that an average is over", "small"),
    ]
    shades = {1: "l4", 2: "l3", 3: "l2", 4: "l1"}
    for block in range(6):
        for channel in range(8):
            count = sum(block < d and channel < w for d, w in zip(DEPTHS, WIDTHS, strict=True))
            x, y = x0 + channel * cell, y0 + block * cell
            parts += [
                box(x, y, cell, cell, f"edge {shades[count]}"),
                text(x + cell / 2, y + cell / 2 + 5, str(count), "on", "middle"),
            ]
    lines = ("x = sum of w x, over its clients,", "      divided by the sum of their w", "", "w: samples, or one for each client",
             "", "No client: its value keeps its bits.", "Strong clients alone train deep and wide parts;", "all clients train the shared part.")  # fmt: skip
    parts += [text(330, 92 + 24 * i, line, "name" if i < 2 else "") for i, line in enumerate(lines) if line]
    return picture(
        690,
        300,
        "How many clients train each element: four in the part that all levels share, one where only the full model reaches",
        parts,
    )


def exits() -> str:
    """Inference: a sample leaves at the first exit that is sure enough."""
    parts = [
        text(20, 28, "One model, four places to leave", "name"),
        text(20, 48, "the more confident an exit, the earlier a sample leaves", "small"),
    ]
    y = 92
    parts.append(text(100, 72, "sample", "name", "middle"))
    for level, (low, high) in enumerate(((0, 3), (3, 4), (4, 5), (5, 6))):
        for _ in range(low, high):
            parts += [arrow(100, y - 14, 100, y - 2), box(40, y, 120, 28, f"l{level + 1}")]
            y += 44
        at = y - 30
        parts += [
            arrow(166, at, 208, at),
            box(214, at - 16, 70, 32, "none"),
            text(249, at + 5, f"exit {level + 1}", "", "middle"),
        ]
        said = ("sure: stop", "sure: stop", "sure: stop", "always")[level]
        parts.append(text(296, at + 4, said, "small"))
    return picture(
        390,
        352,
        "Six blocks below each other with an exit after the third, fourth, fifth and sixth, where a sample may leave",
        parts,
    )


PICTURES = {"cut": cut, "round": round_, "coverage": coverage, "exits": exits}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
