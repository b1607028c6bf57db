"""Plots of a run folder and of a comparison; they need the extra `plots`.

Accuracy and training loss over rounds, and accuracy after so many megabytes, simulated seconds and multiply-adds; the
levels' shapes with their accuracies, as in ScaleFL's Figure 2; class counts of the first 20 clients, as in Figure 4 of
its appendix; how often each exit was the teacher, where a method counts that, as in ReeFL's Figure 7.

A marker is a measurement, and the lines between are straight; panels side by side have the same axis; of several seeds
each has a thin line, and their mean a thick one. What is in the wrong order is said below the plot.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetfit.files import make_slug
from fleetfit.records import RunFolder
from fleetfit.records.schema import NO_ACCURACIES, EvaluationRecord, LevelAccuracy, LevelRecord, SummaryRecord
from fleetfit.report.columns import ON_THE_WAY
from fleetfit.report.drawing import (
    COLORS,
    DARK,
    LIGHT,
    Metrics,
    Points,
    Summary,
    color,
    curve_of_seeds,
    empty,
    evaluated,
    figure_with_axes,
    finish,
    legend_below,
    noted,
    plots_in,
    same_accuracies,
    saved,
    shade_of,
    style_of,
    wrapped,
)
from fleetfit.report.order import explain_order, explain_row_order
from fleetfit.report.text import exit_names, format_mean, get_score_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_CLIENTS = 50  # whose samples are drawn: a fleet's file has all of them
_PANEL = 3.5  # inches
_LETTERS = 24  # of a row's label beside its levels, before it is set smaller and in two lines
_WIDTHS = (3.4, 1.8)  # points: where two lines are the same, as with one level, both are seen

Seeds = Sequence[tuple[Summary, Metrics]]
"""The final numbers and the rounds' reports of each seed of a row; of a run, its own alone."""


def plots_of_run(folder: Path, summary: Summary, metrics: Metrics) -> list[Path]:
    """Draw every plot of a run into `folder/plots`.

    Args:
        folder: The run folder; its `fleet.json` has the class counts.
        summary: Its final numbers.
        metrics: The reports of its rounds.

    Returns:
        The files.

    Raises:
        MissingExtra: matplotlib is not installed.
        RunError: A file is damaged, or the pictures cannot be written.
    """
    return saved(figures_of_run(folder, summary, metrics), plots_in(folder))


def figures_of_run(folder: Path, summary: Summary, metrics: Metrics) -> "dict[str, Figure]":
    """Draw every plot of a run; return the figures by the names of their files.

    Raises:
        MissingExtra: matplotlib is not installed.
        RunError: `fleet.json` is damaged.
    """
    found = {
        "accuracy": accuracy_of_run(summary, metrics),
        "loss": loss_of_rows({summary["method"]: [(summary, metrics)]}, said_of(summary)),
        "cost": accuracy_over_cost({summary["method"]: [(summary, metrics)]}, kinds_of(summary), said_of(summary)),
        "levels": shapes({summary["method"]: [summary]}),
        "teachers": teachers(summary, metrics),
    }
    figures = {name: figure for name, figure in found.items() if figure is not None}
    counts = RunFolder(folder).read_class_counts()
    if counts:
        figures["partition"] = partition_dots(counts[:_MOST_CLIENTS], summary["data"])
    return figures


def plots_of_comparison(
    folder: Path,
    results: Mapping[tuple[str, str], Seeds],
    columns: Sequence[str] = ("local", "global"),
    targets: Sequence[float] = (),
    target_on: str = "global",
) -> list[Path]:
    """Draw accuracies, losses and shapes of all rows with all seeds into `folder/plots`, a set for each setting.

    Args:
        folder: The comparison's.
        results: Summaries and reports of all seeds by (row, setting).
        columns: What the table shows; the accuracies among them are drawn where they were measured on the way.
        targets: Accuracies that rounds are counted to, drawn as lines.
        target_on: Which accuracy those are about.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figures: dict[str, Figure] = {}
    wanted = [name for name in (*columns, *([target_on] if targets else [])) if name in (*ON_THE_WAY, "avg", "full")]
    kinds = list(dict.fromkeys(wanted)) or ["local", "global"]
    if all("privacy" in summary for seeds in results.values() for summary, _ in seeds):
        kinds = [kind for kind in kinds if kind in ("avg", "full")] or ["avg", "full"]  # the others are withheld
    for setting in dict.fromkeys(setting for _, setting in results):
        rows = {row: found for (row, s), found in results.items() if s == setting}
        ending = f"-{make_slug(setting)}" if setting else ""
        found = {
            "accuracy": accuracy_of_rows(rows, kinds, {target_on: targets}, setting),
            "loss": loss_of_rows(rows, setting),
            "cost": accuracy_over_cost(rows, [kind for kind in kinds if kind in ("local", "global")] or kinds, setting),
            "levels": shapes({row: [summary for summary, _ in seeds] for row, seeds in rows.items()}, setting),
        }
        figures |= {f"{name}{ending}": figure for name, figure in found.items() if figure is not None}
    return saved(figures, plots_in(folder))


# ---- what a plot says of what it shows -------------------------------------------------------------------------------


def said_of(summary: Summary) -> str:
    """Return a run in words: "scalefl on digits, seed 0"."""
    seed = f", seed {summary['seed']}" if "seed" in summary else ""
    return f"{summary['method']} on {summary['data']}{seed}"


def seeds_in_words(rows: Mapping[str, Sequence[object]]) -> str:
    """Return what thin and thick lines are: "3 seeds (thin) and their mean"; "one seed" where there is only one."""
    counts = sorted({len(seeds) for seeds in rows.values()})
    if counts[-1:] in ([], [1]):
        return "one seed"
    many = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"{many} seeds (thin) and their mean"


def kinds_of(summary: Summary) -> list[str]:
    """Return which accuracies are drawn of a run: of one with `[privacy]`, those on the server's test set."""
    return ["avg", "full"] if "privacy" in summary else ["local", "global"]


# ---- over rounds -----------------------------------------------------------------------------------------------------


def accuracy_of_run(summary: Summary, metrics: Metrics) -> "Figure":
    """Draw accuracies over rounds, that of each level on its own clients, and beside it that of each exit."""
    measured = evaluated(metrics, summary["norm"])
    last = measured[-1][1] if measured else {}
    exits = summary["levels"][-1]["exits"][: len(last.get("exits", ()))]
    panels = 2 if len(exits) > 1 else 1
    figure = empty(1.2 + 4.6 * panels, 4.4)
    figure.suptitle(said_of(summary), fontsize=10, color=DARK, x=0.01, ha="left")
    axes = figure.subplots(1, panels, sharex=True, sharey=True, squeeze=False)[0]
    levels = [name for name, entry in last.get("levels", {}).items() if entry.get("local") is not None]
    for i, name in enumerate(levels if len(last.get("levels", {})) > 1 else ()):
        points = [(done, columns["levels"].get(name, {}).get("local")) for done, columns in measured]
        curve_of_seeds(axes[0], [points], shade_of(DARK, i, len(levels)), f"local, level {name}", 1.1)
    for kind, shade, width in zip(kinds_of(summary), (COLORS[1], COLORS[0]), _WIDTHS, strict=True):
        curve_of_seeds(axes[0], [[(done, columns.get(kind)) for done, columns in measured]], shade, kind, width)
    where = "on the server's test set" if "privacy" in summary else "mean over clients"
    finish(axes[0], "round", f"{get_score_name(_make_record(summary))} (%)", f"{where}; markers: measured")
    if panels > 1:
        for i, name in enumerate(exit_names(exits, exits)):
            points = [(done, dict(enumerate(columns.get("exits", ()))).get(i)) for done, columns in measured]
            curve_of_seeds(axes[1], [points], shade_of(COLORS[2], i, len(exits)), f"exit {name}", 1.6)
        finish(axes[1], "round", "", "exits (after block) of the largest model")
    same_accuracies(axes)
    axes[0].set_xlim(0, max(1, summary.get("rounds", 1), *(report["round"] for report in metrics)) * 1.03)
    for one in axes:
        legend_below(one)
    noted(figure, explain_order([_make_record(summary)]))
    return figure


def accuracy_of_rows(
    rows: Mapping[str, Seeds],
    kinds: Sequence[str] = ("local", "global"),
    targets: Mapping[str, Sequence[float]] | None = None,
    setting: str = "",
) -> "Figure":
    """Draw accuracies over rounds of several methods, one kind beside the other, and the targets as lines.

    Args:
        rows: Summaries and reports of all seeds of each row.
        kinds: Accuracies, by their columns' names.
        targets: Accuracies to reach by kind.
        setting: Label of the setting.
    """
    figure = empty(1.0 + max(4.6, 4.2 * len(kinds)), 4.4)
    _title(figure, setting, rows)
    score = _score_of_rows(rows)
    every = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(every, kinds, strict=True):
        for target in (targets or {}).get(kind, ()):
            axes.axhline(100 * target, color=DARK, linewidth=0.9, linestyle="--")
        for i, (name, seeds) in enumerate(rows.items()):
            curve_of_seeds(axes, [_accuracies(one, kind) for one in seeds], color(i), name, style=style_of(i))
        finish(axes, "round", f"{score} (%)" if axes is every[0] else "", f"{kind.replace('_', ' ')} {score}")
    same_accuracies(every)
    every[0].set_xlim(0, _most_rounds(rows) * 1.03)
    legend_below(every[0], 3 * len(kinds))
    noted(
        figure,
        explain_row_order({name: [_make_record(summary) for summary, _ in seeds] for name, seeds in rows.items()}),
    )
    return figure


def loss_of_rows(rows: Mapping[str, Seeds], title: str = "") -> "Figure | None":
    """Draw the mean training loss of each round's clients; None where no round says it.

    Args:
        rows: Summaries and reports of all seeds of each row.
        title: What is drawn, beside the seeds.
    """
    curves = {name: [_losses(metrics) for _, metrics in seeds] for name, seeds in rows.items()}
    if not any(value is not None for seeds in curves.values() for points in seeds for _, value in points):
        return None
    figure, axes = figure_with_axes(6.4, 4.2)
    _title(figure, title, rows)
    for i, (name, seeds) in enumerate(curves.items()):
        curve_of_seeds(axes, seeds, color(i), name, percent=False, style=style_of(i))
    own = "; methods add up different losses" if len(rows) > 1 else ""
    finish(axes, "round", "training loss", f"mean over the clients of each round{own}")
    axes.set_xlim(0, _most_rounds(rows) * 1.03)
    if len(rows) > 1:
        legend_below(axes, 4)
    return figure


def _title(figure: "Figure", what: str, rows: Mapping[str, Seeds]) -> None:
    said = what if "seed" in what else ": ".join(filter(None, (what, seeds_in_words(rows))))
    figure.suptitle(said, fontsize=10, color=DARK, x=0.01, ha="left")


def _make_record(summary: Summary) -> SummaryRecord:
    columns = summary.get("evaluate", {})
    policies = {}
    for norm in ("static", "batch"):
        if norm in columns:
            levels = {
                name: LevelAccuracy.model_construct(**{"clients": None, **level})
                for name, level in columns[norm].get("levels", {}).items()
            }
            policies[norm] = NO_ACCURACIES.model_copy(update={**columns[norm], "levels": levels})
    return SummaryRecord.model_construct(**{
        **summary,
        "levels": [LevelRecord.model_construct(**level) for level in summary["levels"]],
        "evaluate": EvaluationRecord().model_copy(update={"split": columns.get("split", ""), **policies}),
    })  # fmt: skip


def _score_of_rows(rows: Mapping[str, Seeds]) -> str:
    return get_score_name(*(_make_record(summary) for seeds in rows.values() for summary, _ in seeds))


def _accuracies(seed: tuple[Summary, Metrics], kind: str) -> list[tuple[int, float | None]]:
    summary, metrics = seed
    return [(done, columns.get(kind)) for done, columns in evaluated(metrics, summary["norm"])]


def _losses(metrics: Metrics) -> Points:
    return [(report["round"], report.get("train", {}).get("loss")) for report in metrics]


def _most_rounds(rows: Mapping[str, Seeds]) -> int:
    return max((report["round"] for seeds in rows.values() for _, metrics in seeds for report in metrics), default=1)


# ---- over what the rounds until then added up to ---------------------------------------------------------------------

_LABELS = {"bytes": "sent, both directions", "multiply_adds": "multiply-adds of clients", "seconds": "simulated time"}
_UNITS: Mapping[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "multiply_adds": ((1e15, "10¹⁵"), (1e12, "10¹²"), (1e9, "10⁹")),
    "seconds": ((3600, "h"), (60, "min"), (1, "s")),
}  # largest first


def accuracy_over_cost(
    rows: Mapping[str, Seeds], kinds: Sequence[str] = ("local", "global"), title: str = ""
) -> "Figure | None":
    """Draw accuracy against bytes, multiply-adds and simulated seconds, as far as one of the runs reports them.

    Args:
        rows: Summaries and reports of all seeds by row; where there is one row with one seed, the kinds share a panel.
        kinds: Accuracies, by their columns' names.
        title: What is drawn.

    Returns:
        Costs side by side, kinds below each other; None where no run reports a cost.
    """
    until = {cost: {name: [spent(m, cost) for _, m in seeds] for name, seeds in rows.items()} for cost in _LABELS}
    costs = [cost for cost, found in until.items() if any(any(seeds) for seeds in found.values())]
    if not costs:
        return None
    one = len(rows) == 1 and all(len(seeds) == 1 for seeds in rows.values())
    lines = [kinds] if one else [[kind] for kind in kinds]
    figure = empty(1.0 + max(4.6, _PANEL * len(costs)), 1.3 + 2.6 * len(lines))
    _title(figure, title, rows)
    every = figure.subplots(len(lines), len(costs), sharey=True, sharex="col", squeeze=False)
    for column, cost in enumerate(costs):
        most = max((total for seeds in until[cost].values() for one in seeds for total in one.values()), default=0.0)
        scale, unit = next(((s, u) for s, u in _UNITS[cost] if most >= 2 * s), _UNITS[cost][-1])
        for line, shown in enumerate(lines):
            axes = every[line][column]
            for i, (name, seeds) in enumerate(rows.items()):
                for j, kind in enumerate(shown):
                    points = [
                        [(totals[round] / scale, value) for round, value in _accuracies(seed, kind) if totals]
                        for seed, totals in zip(seeds, until[cost][name], strict=True)
                    ]
                    shade, label, width = (color(1 - j), kind, _WIDTHS[j % 2]) if one else (color(i), name, _WIDTHS[1])
                    curve_of_seeds(axes, points, shade, label, width, style=style_of(i))
            x = f"{_LABELS[cost]} ({unit})" if line == len(lines) - 1 else ""
            finish(
                axes,
                x,
                f"{'' if one else shown[0].replace('_', ' ')} {_score_of_rows(rows)} (%)".strip() if not column else "",
                "",
            )
            axes.set_xlim(0, 1.03 * most / scale or 1)
    same_accuracies(every.flat)
    legend_below(every[-1][0], 3 * len(costs))
    return figure


def spent(metrics: Metrics, cost: str) -> dict[int, float]:
    """Return by round what all rounds until then cost; nothing where no round says it.

    A round without clients has no seconds, and adds none.
    """
    total, found, said = 0.0, {}, False
    for report in metrics:
        added = {
            "bytes": None if report["bytes_down"] is None else report["bytes_down"] + report["bytes_up"],
            "seconds": report.get("simulated_s"),
            "multiply_adds": report.get("multiply_adds"),
        }[cost]
        total, said = total + (added or 0), said or added is not None
        found[report["round"]] = total
    return found if said else {}


# ---- levels and clients ----------------------------------------------------------------------------------------------


def shapes(rows: Mapping[str, Sequence[Summary]], title: str = "") -> "Figure":
    """Draw each level as a rectangle, width by depth of the full model, with its local accuracy above.

    Args:
        rows: Final numbers of all seeds by row; the shapes are the first one's.
        title: What is drawn.
    """
    from matplotlib.patches import Rectangle

    most = max(len(seeds[0]["levels"]) for seeds in rows.values())
    figure = empty(1.0 + 1.75 * most, 0.7 + 2.25 * len(rows))
    if title:
        figure.suptitle(title, fontsize=10, color=DARK, x=0.01, ha="left")
    for r, (name, seeds) in enumerate(rows.items()):
        for i, level in enumerate(seeds[0]["levels"]):
            axes = figure.add_subplot(len(rows), most, r * most + i + 1)
            deep, wide = level["depth"] / level["blocks"], level["width"]
            axes.add_patch(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=LIGHT, linewidth=1.2))
            axes.add_patch(Rectangle((0, 1 - deep), wide, deep, facecolor=color(r), alpha=0.85, linewidth=0))
            for exit in level["exits"]:
                at = 1 - exit / level["blocks"]
                axes.plot([0, wide], [at, at], color="white" if exit < level["depth"] else DARK, linewidth=1.4)
            axes.text(wide / 2, -0.05, f"{100 * wide:.0f}% wide", ha="center", va="top", fontsize=8, color=DARK)
            axes.text(1.08, 1 - deep / 2, f"{100 * deep:.0f}% deep", rotation=270, va="center", fontsize=8, color=DARK)
            found = format_mean([seed["levels"][i]["local"] for seed in seeds if i < len(seed["levels"])])
            nobody = "not told" if level.get("clients") else "no clients"  # with `[privacy]` clients do not tell
            accuracy = nobody if found == "-" else f"{found}%"
            axes.set_title(f"level {level['level']}\n{accuracy}", fontsize=9, color=DARK)
            axes.set(xlim=(-0.02, 1.24), ylim=(-0.16, 1.02))
            axes.set_axis_off()
            if i == 0:
                size = 10 if len(name) <= _LETTERS else 7
                label = wrapped(name, _LETTERS if size == 10 else 34)
                axes.text(-0.08, 0.5, label, rotation=90, ha="right", va="center", fontsize=size, fontweight="bold")
    count = max(len(seeds) for seeds in rows.values())
    score = get_score_name(*(_make_record(one) for seeds in rows.values() for one in seeds))
    over = f" (mean ± standard deviation of {count} seeds)" if count > 1 else ""
    noted(
        figure,
        [f"grey frame: full model; lines: exits; above: local {score}{over}"],
    )
    return figure


def partition_dots(class_counts: Sequence[Sequence[int]], data: str) -> "Figure":
    """Draw a dot for each client and class, its area in proportion to the client's training samples of that class.

    Args:
        class_counts: Training samples [clients, classes].
        data: The data set's name.
    """
    clients, classes = len(class_counts), len(class_counts[0])
    figure, axes = figure_with_axes(max(4.5, 1.4 + 0.32 * clients), max(3.0, min(9.0, 1.4 + 0.3 * classes)))
    most = max(1, *(max(counts) for counts in class_counts))
    step = min(0.32, 7.5 / classes) * 72  # points between two classes
    scale = (0.95 * step) ** 2 / most
    points = [(k, c, n * scale) for k, counts in enumerate(class_counts) for c, n in enumerate(counts) if n]
    axes.scatter(*zip(*points, strict=True), color=COLORS[0], alpha=0.75, linewidths=0) if points else None
    finish(axes, "client", "class", f"training samples of the first {clients} clients, {data} (largest dot: {most})")
    axes.set(xlim=(-0.8, clients - 0.2), ylim=(-0.8, classes - 0.2))
    axes.set_xticks(range(0, clients, 1 if clients <= 20 else 5))
    axes.set_yticks(range(0, classes, max(1, classes // 20)))
    return figure


# ---- teachers --------------------------------------------------------------------------------------------------------


def teachers(summary: Summary, metrics: Metrics) -> "Figure | None":
    """Draw how often each exit was the teacher, beside what the exits know (ReeFL, ICML 2024, Figure 7).

    Left: accuracy of each exit in the last evaluation. Middle: in how many training steps each exit taught the others,
    at the clients of the largest level, in the last round that had some, as the paper shows it. Right: all rounds and
    levels together, a shade for each level.

    Args:
        summary: The run's final numbers.
        metrics: The reports of its rounds; `counts.teachers` has level -> exit -> steps.

    Returns:
        The figure; None where the run's method counts no teachers.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    counts = _taught_in(metrics)
    if not counts:
        return None
    levels = sorted({level for found in counts.values() for level in found}, key=int)
    last = max(round for round, found in counts.items() if levels[-1] in found)
    total: dict[str, Counter[str]] = {level: Counter() for level in levels}
    for found in counts.values():
        for level, taught in found.items():
            total[level].update(taught)
    exits = sorted({int(exit) for taught in total.values() for exit in taught})
    figure = empty(10.5, 3.4)
    left, middle, right = figure.subplots(1, 3)
    _accuracy_of_exits(left, summary, metrics)
    finish(middle, "exit after block", "steps as teacher", f"level {levels[-1]} in round {last}")
    _steps(middle, exits, {levels[-1]: counts[last][levels[-1]]}, levels)
    finish(right, "exit after block", "steps as teacher", f"all levels in {len(counts)} rounds")
    _steps(right, exits, total, levels)
    if len(levels) > 1:
        right.legend(title="level", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def _taught_in(metrics: Metrics) -> dict[int, dict[str, dict[str, int]]]:
    """Return steps by round, level and exit; what clients count that is no exit is left out."""
    found = {}
    for report in metrics:
        levels = report.get("counts", {}).get("teachers", {})
        taught = {level: {e: n for e, n in steps.items() if e.isdecimal()} for level, steps in levels.items()}
        kept = {level: steps for level, steps in taught.items() if steps}
        if kept:
            found[report["round"]] = kept
    return found


def _accuracy_of_exits(axes: "Axes", summary: Summary, metrics: Metrics) -> None:
    """Draw the accuracy of each exit of the largest model, as far as it was evaluated."""
    measured = evaluated(metrics, summary["norm"])
    values = [100 * accuracy for accuracy in measured[-1][1].get("exits", [])] if measured else []
    places = range(len(values))
    axes.bar(places, values, color=COLORS[1], width=0.7)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f"{value:.1f}", (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=8)
    after = f"after round {measured[-1][0]}" if measured else "never evaluated"
    finish(
        axes,
        "exit after block",
        f"{get_score_name(_make_record(summary))} (%)",
        f"{summary['method']} on {summary['data']}, {after}",
    )
    axes.set_xticks(places, [str(exit) for exit in summary["levels"][-1]["exits"][: len(values)]])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.1)


def _steps(axes: "Axes", exits: Sequence[int], taught: Mapping[str, Mapping[str, int]], levels: Sequence[str]) -> None:
    """Draw steps by exit, one level on top of the other; the largest level is the darkest."""
    from matplotlib.colors import to_rgb

    places, below = range(len(exits)), [0] * len(exits)
    for level, counts in taught.items():
        steps = [counts.get(str(exit), 0) for exit in exits]
        pale = 0.8 * (1 - (levels.index(level) + 1) / len(levels))
        shade = [pale + (1 - pale) * part for part in to_rgb(COLORS[0])]
        axes.bar(places, steps, bottom=below, color=shade, width=0.7, label=level)
        below = [a + b for a, b in zip(below, steps, strict=True)]
    axes.set_xticks(places, [str(exit) for exit in exits])
    axes.grid(visible=False, axis="x")
