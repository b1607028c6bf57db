"""Figures of the page, drawn from the stored results alone; the same results give the same files."""

import io
import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from experiments.verdicts.claims import OWN, Claims
from experiments.verdicts.judging import Judged, Verdict
from experiments.verdicts.measured import places_of
from experiments.verdicts.stored import ExperimentResults
from fleetfit import files
from fleetfit.report.drawing import COLORS, DARK, LIGHT, get_color, label_axes, make_figure
from fleetfit.report.figures import draw_levels
from fleetfit.runs.schema import LevelRecord, LevelResult, RunResult

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BySeed = Mapping[int, RunResult]
Rows = Mapping[str, BySeed]
PointsOf = Callable[[RunResult], dict[float, float]]
Point = tuple[float, float, float, float]
"""A place, and there the mean over the seeds, the least and the most."""
LEAD = "lead"
"""The family of claims that FleetFit is above all other methods, and the name of their figure."""
_KINDS = {"rounds": "Accuracy by round", "exits": "Accuracy by exit", "levels": "Accuracy by cost", "shapes": "Levels"}
_COLORS = {Verdict.HOLDS: "#2f8a4b", Verdict.CONTRADICTED: "#b3272d", Verdict.OPEN: "#6b5b4b"}
_DARK_FORM = {
    "#ffffff": "#1b2226", "#000000": "#c9d2d6", DARK: "#d5dde1", LIGHT: "#3d4a52",
    **dict(zip(COLORS, ("#6aa5e8", "#f0934f", "#5fc17c", "#c08ad6", "#ef6a6f", "#b9a794", "#4cc0cc", "#d9bb55"),
               strict=True)),
}  # fmt: skip
"""Each color of the figures, and what it is for readers of dark pages."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """A figure.

    Attributes:
        name: Its file.
        kind: What it shows, in a few words.
        title: What it shows, in full.
        figure: The figure.
        paper: The chapter that it opens; empty if it belongs to an experiment.
        file: The experiment, below `experiments/`; empty if it belongs to a paper.
    """

    name: str
    kind: str
    title: str
    figure: "Figure"
    paper: str = ""
    file: str = ""


def drawn(
    claims: Claims,
    judged: Sequence[Judged],
    results: Mapping[str, ExperimentResults],
) -> list[Drawn]:
    """Return all figures that the results allow.

    Args:
        claims: What is claimed.
        judged: The verdicts.
        results: What was run, by the experiment's file.

    Raises:
        MissingExtra: There are some, and matplotlib is not installed.
    """
    found = [*_lead(judged), *_effects(claims, judged)]
    for file in dict.fromkeys(table.file for table in claims.table):
        if file in results:
            asked = any(p.file == file and p.column.startswith("exit ") for t in claims.table for p in places_of(t))
            found += _of_experiment(results[file], asked)
    return found


def save(figures: Sequence[Drawn], folder: Path) -> None:
    """Write figures into a folder, and remove others that were written there before."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.svg"):
        if path.name not in {one.name for one in figures}:
            path.unlink()
    for one in figures:
        with (
            matplotlib.rc_context({"svg.hashsalt": one.name, "svg.fonttype": "none"}),
            io.StringIO() as buffer,
        ):
            one.figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
            files.write_text(folder / one.name, _add_dark_form(buffer.getvalue()))


def _add_dark_form(svg: str) -> str:
    """Add the colors for readers of dark pages to a figure."""
    rules = [
        f'[style*="{part}: {light}"] {{ {part}: {dark} !important }}'
        for light, dark in _DARK_FORM.items()
        for part in ("fill", "stroke")
        if f"{part}: {light}" in svg
    ]
    rules.append(f'text:not([style*="fill:"]) {{ fill: {_DARK_FORM["#000000"]} }}')
    return svg.replace("</style>", f"\n@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>", 1)


# ---- the proof -------------------------------------------------------------------------------------------------------


def _lead(judged: Sequence[Judged]) -> Iterator[Drawn]:
    """Draw how far FleetFit is above each other method, in every setting of the proof that was run."""
    settings: dict[tuple[str, str], dict[str, Judged]] = {}
    for one in judged:
        if one.table.family == LEAD and one.estimates:
            first = one.estimates[0].contrast.minus[0]
            settings.setdefault((one.table.title, first.setting), {})[first.column] = one
    if not settings:
        return
    every = sorted((one for claims in settings.values() for one in claims.values()), key=lambda one: -one.contrasts)
    rivals = dict.fromkeys(e.contrast.minus[0].row for one in every for e in one.estimates)
    heights = {row: y for y, row in enumerate(reversed(rivals))}
    columns = min(len(settings), 3)
    lines = -(-len(settings) // columns)
    figure = make_figure(9.2, lines * (1.7 + 0.24 * len(heights)))
    for place, ((title, setting), claims) in enumerate(settings.items(), 1):
        axes = figure.add_subplot(lines, columns, place)
        axes.axvline(0, color=DARK, linewidth=0.8, linestyle=":")
        for i, (column, one) in enumerate(claims.items()):
            for e in one.estimates:
                y = heights[e.contrast.minus[0].row] + 0.14 * (1 - 2 * i)
                if e.low is not None and e.high is not None:
                    axes.plot([e.low, e.high], [y, y], color=get_color(i), linewidth=1.6)
                axes.plot([e.mean], [y], "o", color=get_color(i), markersize=4, label=column)
        axes.set_yticks(range(len(heights)), heights, fontsize=9)
        axes.tick_params(labelleft=(place - 1) % columns == 0)
        axes.set_ylim(-0.6, len(heights) - 0.4)
        _quiet(axes, "percentage points")
        seeds = next(iter(claims.values())).estimates[0].seeds
        name = textwrap.fill(", ".join(filter(None, [title, setting])), 34)
        axes.set_title(f"{name}\n{seeds} seeds", fontsize=9, loc="left", color=DARK)
    figure.suptitle("How far FleetFit is above each other method", fontsize=11)
    _legend_below(figure)
    yield Drawn(
        f"{LEAD}.svg",
        "FleetFit against other methods",
        "FleetFit against each other method: the mean difference and its 95% interval, which is not corrected.",
        figure,
        paper=OWN,
    )


# ---- effects of a paper ----------------------------------------------------------------------------------------------


def _effects(claims: Claims, judged: Sequence[Judged]) -> Iterator[Drawn]:
    """Draw every claim's effect with its interval, differences and ratios side by side; a figure for each paper."""
    for paper in dict.fromkeys(table.paper for table in claims.table):
        own = [one for one in judged if one.table.paper == paper and one.table.family != LEAD]
        own = [one for one in own if one.weakest and one.weakest.low is not None]
        groups = [[one for one in own if one.claim.measure == measure] for measure in ("difference", "ratio")]
        groups = [group for group in groups if group]
        if not groups:
            continue
        figure = make_figure(9.2, 1.2 + 0.29 * max(map(len, groups)))
        for place, group in enumerate(groups, 1):
            _forest(figure.add_subplot(1, len(groups), place), group)
        _legend_below(figure, 5)
        yield Drawn(
            f"effects-{_slug(paper)}.svg",
            f"{paper}: effects and their intervals",
            f"{paper}: effects with their 95% intervals.",
            figure,
            paper=paper,
        )


def _forest(axes: "Axes", group: Sequence[Judged]) -> None:
    ratio = group[0].claim.measure == "ratio"
    for y, one in enumerate(reversed(group)):
        found = one.weakest
        if found is None or found.low is None or found.high is None:
            continue
        shade = _COLORS.get(one.verdict, DARK)
        axes.plot([found.low, found.high], [y, y], color=shade, linewidth=2, label=one.verdict.value)
        axes.plot([found.mean], [y], "o", color=shade, markersize=4)
        if found.contrast.printed is not None:
            axes.plot([found.contrast.printed], [y], "x", color=DARK, markersize=5, label="the paper's size")
        at = one.claim.by if one.claim.by is not None else float(ratio)
        bound = "zero, or the claimed bound"
        axes.plot([at, at], [y - 0.4, y + 0.4], color=DARK, linewidth=0.8, linestyle=":", label=bound)
    if ratio:
        _log(axes, large=False)
    _quiet(axes, "ratio" if ratio else "percentage points")
    axes.set_yticks(range(len(group)), [one.claim.id for one in reversed(group)], fontsize=9)
    axes.set_ylim(-0.6, len(group) - 0.4)


def _log(axes: "Axes", large: bool) -> None:
    """Make the x axis logarithmic, with numbers at 1, 2 and 5; large ones with k, M and G."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(EngFormatter() if large else StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _quiet(axes: "Axes", x: str) -> None:
    """Make axes with a scale of their own quiet."""
    axes.set_xlabel(x)
    axes.grid(color=LIGHT, linewidth=0.6, axis="x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# ---- an experiment ---------------------------------------------------------------------------------------------------


def _of_experiment(results: ExperimentResults, exits: bool) -> Iterator[Drawn]:
    """Draw an experiment; the exits where claims compare them, and where more than one row has any."""
    settings: dict[str, dict[str, BySeed]] = {}
    for (setting, row), by_seed in results.runs.items():
        settings.setdefault(setting, {})[row] = by_seed
    drawings = {
        "rounds": (_by_round(settings), "accuracy of the largest model by round, mean over the seeds and their range"),
        "exits": (
            _by_exit(settings, 1 if exits else 2),
            "accuracy of each exit of the largest model, mean over the seeds and their range",
        ),
    }
    costed = next((setting for (setting, _), levels in results.levels.items() if len(levels) > 1), None)
    if costed is not None:
        said = f" ({costed})" if costed else ""
        local = "mean over the seeds of each level on its own clients' test data"
        drawings["levels"] = (_by_cost(results, costed), f"accuracy of each level against its cost{said}, {local}")
        drawings["shapes"] = (
            _shapes(results, costed),
            f"what each level keeps of the model{said}, and its accuracy: {local}",
        )
    stem = _slug(str(PurePosixPath(results.file).with_suffix("")))
    for kind, (figure, said) in drawings.items():
        if figure is not None:
            name = f"{_KINDS[kind]} in {results.file}"
            yield Drawn(f"{stem}-{kind}.svg", name, f"`{results.file}`: {said}.", figure, file=results.file)


def _by_round(settings: Mapping[str, Rows]) -> "Figure | None":
    def curve(run: RunResult) -> dict[float, float]:
        points = zip(run.curves.round, run.curves.global_, strict=False)
        return {float(at): value for at, value in points if value is not None}

    return _lines(settings, curve, "round")


def _by_exit(settings: Mapping[str, Rows], rows: int) -> "Figure | None":
    def exits(run: RunResult) -> dict[float, float]:
        return {float(at): value for at, value in run.per_exit.items() if value is not None}

    return _lines(settings, exits, "exit", rows)


def _lines(settings: Mapping[str, Rows], points_of: PointsOf, x: str, rows: int = 1) -> "Figure | None":
    """Draw a line for each row, side by side for each setting; nothing where too few rows have two points."""
    shown: dict[str, dict[str, list[Point]]] = {}
    for setting, every in settings.items():
        for row, by_seed in every.items():
            points = _averaged([points_of(run) for run in by_seed.values()])
            if len(points) > 1:
                shown.setdefault(setting, {})[row] = points
    if len({row for lines in shown.values() for row in lines}) < rows:
        return None
    names = list(dict.fromkeys(row for every in settings.values() for row in every))
    figure = make_figure(max(5.4, 4.4 * len(shown)), 3.6)
    for place, (setting, lines) in enumerate(shown.items(), 1):
        axes = figure.add_subplot(1, len(shown), place)
        for row, points in lines.items():
            at, mean, low, high = zip(*points, strict=True)
            i = names.index(row)
            axes.plot(at, mean, color=get_color(i), linestyle=_get_line_style(i), marker="o", markersize=3, label=row)
            axes.fill_between(at, low, high, color=get_color(i), alpha=min(0.15, 0.5 / len(lines)), linewidth=0)
        label_axes(axes, x, "accuracy (%)", setting)
        axes.locator_params(axis="x", integer=True)
    _legend_below(figure)
    return figure


def _legend_below(figure: "Figure", most: int = 4) -> None:
    """Say below the axes what the lines are, in as many columns as the figure is wide for."""
    handles, labels = _all_labels(figure)
    for columns in range(most, 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def _all_labels(figure: "Figure") -> tuple[list["Artist"], list[str]]:
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _averaged(every: Sequence[Mapping[float, float]]) -> list[Point]:
    """Return (place, mean, least, most) at each place that all seeds have."""
    shared = sorted(set.intersection(*(set(points) for points in every))) if every else []
    found = [(at, [points[at] for points in every]) for at in shared]
    return [(at, statistics.fmean(values), min(values), max(values)) for at, values in found]


def _by_cost(results: ExperimentResults, setting: str) -> "Figure | None":
    """Draw ScaleFL's Figure 3: accuracy of the levels of each row in a setting against what they cost."""
    figure, some = make_figure(9.2, 3.8), False
    for place, cost in enumerate(("parameters", "multiply_adds"), 1):
        axes = figure.add_subplot(1, 2, place)
        for i, (row, levels) in enumerate(_levelled(results, setting).items()):
            points = [(getattr(level, cost), accuracy) for level, accuracy in levels]
            axes.plot(
                *zip(*points, strict=True), _get_line_style(i), color=get_color(i), marker="o", markersize=4, label=row
            )
            some = True
        _log(axes, large=True)
        _quiet(axes, cost.replace("_", "-"))
        axes.set_ylabel("accuracy (%)")
    _legend_below(figure)
    return figure if some else None


def _shapes(results: ExperimentResults, setting: str) -> "Figure | None":
    """Draw ScaleFL's Figure 2, of the methods that it shows: each level as a rectangle, its accuracy above."""
    found = _levelled(results, setting)
    rows = {
        row: [
            LevelRecord(
                level=level.level, width=level.width, depth=level.depth, blocks=level.blocks, exits=[level.depth],
                parameters=level.parameters, multiply_adds=level.multiply_adds, clients=1, local=accuracy / 100,
            )
            for level, accuracy in found[row]
        ]
        for row in ("HeteroFL", "ScaleFL") if row in found
    }  # fmt: skip
    return draw_levels({row: [levels] for row, levels in rows.items()}) if len(rows) == 2 else None


def _levelled(results: ExperimentResults, setting: str) -> dict[str, list[tuple[LevelResult, float]]]:
    """Return the levels of each row in a setting with the mean of their accuracies, where all seeds have one.

    Nothing where no row has two of them: a client of each level has to be among those that are evaluated.
    """
    found: dict[str, list[tuple[LevelResult, float]]] = {}
    for (where, row), levels in results.levels.items():
        runs = list(results.runs.get((where, row), {}).values()) if where == setting else []
        for level in levels:
            accuracies = [run.per_level[level.level] for run in runs if level.level in run.per_level]
            if accuracies and len(accuracies) == len(runs):
                found.setdefault(row, []).append((level, statistics.fmean(accuracies)))
    return found if any(len(levels) > 1 for levels in found.values()) else {}


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")


def _get_line_style(index: int) -> str:
    """Return the line style of a row. Rows of the same color have different styles."""
    return ("-", "--", ":", "-.")[index // len(COLORS) % 4]
