"""Sections on accuracy: over rounds and costs, by level, by exit, and by client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleetfit.report.curves import (
    COSTS,
    KINDS,
    SERVER_KINDS,
    Point,
    Series,
    accuracy_curve,
    accuracy_curves,
    accuracy_over_cost,
    choose_unit,
    exit_curves,
    explain_partial,
    level_curves,
    loss_curve,
    loss_curves,
    to_percent,
)
from fleetfit.report.order import explain_order, explain_row_order, number_levels
from fleetfit.report.page.blocks import Block, PageSection, Paragraph, Plot, Plots, Sheet
from fleetfit.report.page.plots import (
    MAX_MARKERS,
    ROUNDS,
    SEEDS_CAPTION,
    Dots,
    Line,
    PlotAxis,
    get_color,
    get_level_color,
    make_score_axis,
    plot_dots,
    plot_lines,
    share_accuracy_axis,
)
from fleetfit.report.page.run_set import MAIN_KINDS, PRIVATE_KINDS, RunSet, capitalize
from fleetfit.report.tables import make_row_level_table, make_total_table
from fleetfit.report.text import Table, exit_names, format_mean, format_percent, get_score_name
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import NO_ACCURACIES, EvaluationRecord, SummaryRecord

_MEANING = (
    "Local: each client with the model of its own level. Global: each client with the largest model. Worst tenth: "
    "mean over the tenth of the clients with the lowest accuracy."
)
_LOSS = PlotAxis("training loss", "", 4)
_PERSONAL = " Personal: as local, with the log class frequencies of each client added to its logits."
_VISIBLE = (*MAIN_KINDS, "local_worst_tenth", "personal")  # accuracies of a run that are visible at first
_MAX_WORST = 15  # clients listed by name


# ---- over rounds and costs -------------------------------------------------------------------------------------------


def make_run_accuracy_section(run: RunFolder) -> PageSection | None:
    """Return accuracy and loss of a run over rounds, and accuracy over each cost."""
    if not run.rounds:
        return None
    rows = [RowRecord(run.method, "", [(run.seed, run)])]
    score, axis = capitalize(get_score_name(run.summary)), make_score_axis(get_score_name(run.summary))
    curves = {kind: accuracy_curve(run, kind) for kind in KINDS}
    enough = min(2, max(map(len, curves.values())))  # a kind that only the last evaluation has is not a line
    kinds = [kind for kind, curve in curves.items() if len(curve) >= max(1, enough)]
    visible = SERVER_KINDS if run.is_private else _VISIBLE
    lines = [
        Line(
            Series(KINDS[kind], {run.seed: curves[kind]}),
            i,
            hidden=kind not in visible,
            strong=kind in (*MAIN_KINDS, "full"),
        )
        for i, kind in enumerate(kinds)
    ]
    count = len(run.evaluations)
    marker = ", which have a marker" if count <= MAX_MARKERS else ""
    description = f"Evaluated in {count} of {len(run.rounds)} rounds{marker}"
    meaning = "" if run.is_private else f"{_MEANING}{_PERSONAL if curves['personal'] else ''} "
    caption = " ".join([f"{meaning}{description}.", *explain_partial([run]), "Click a label to show or hide its line."])
    loss = Line(Series("mean of the clients", {run.seed: loss_curve(run)}), 4, strong=False)
    plots = [
        plot_lines("accuracy", f"{score} over rounds", lines, ROUNDS, axis, caption),
        plot_lines("loss", "Training loss over rounds", [loss], ROUNDS, _LOSS),
    ]
    for cost in COSTS:
        lines = [
            Line(Series(kind, series.curves), i)
            for i, kind in enumerate(MAIN_KINDS)
            for series in accuracy_over_cost(rows, kind, cost)
        ]
        x, title = _make_cost_axis(rows, cost), f"{score} over {COSTS[cost].title}"
        plots.append(plot_lines(f"accuracy-{cost}", title, lines, x, axis))
    blocks: list[Block] = [Plots(share_accuracy_axis(plots))]
    if run.is_private:
        blocks.append(Paragraph("Training loss, bytes and multiply-adds are withheld ([privacy])."))
    elif run.is_secure and not loss_curve(run):
        blocks.append(Paragraph("Training loss is withheld: with [secure] the server does not see clients' losses."))
    return PageSection("learning", f"{score} and loss", blocks)


def make_accuracy_section(runs: RunSet, setting: str, number: int) -> PageSection | None:
    """Return accuracies and loss of the rows of a setting over rounds and costs, one plot per kind."""
    rows = runs.select(setting)
    if not rows:
        return None
    private = [run.is_private for row in rows for run in row.records]
    columns = [column for column in runs.columns if column in KINDS]
    further = [*(PRIVATE_KINDS if any(private) else ()), *(() if all(private) else MAIN_KINDS)]
    kinds = list(dict.fromkeys([*columns, *further]))
    plot_count = len(runs.settings) * (len(kinds) + 1 + 2 * len(COSTS))
    axis = make_score_axis(runs.score)

    def plot(name: str, title: str, curves: Sequence[Series], x: PlotAxis, y: PlotAxis) -> Plot | None:
        lines = [Line(series, runs.labels.index(series.label)) for series in curves]
        return plot_lines(f"{name}-{number}", title, lines, x, y, plots=plot_count)

    plots = [
        plot(f"accuracy-{kind}", KINDS[kind].capitalize(), accuracy_curves(rows, kind), ROUNDS, axis) for kind in kinds
    ]
    plots.append(plot("loss", "Training loss", loss_curves(rows), ROUNDS, _LOSS))
    for cost in COSTS:
        x = _make_cost_axis(rows, cost)
        for kind in MAIN_KINDS:
            title = f"{kind.capitalize()} {runs.score} over {COSTS[cost].title}"
            plots.append(plot(f"{kind}-{cost}", title, accuracy_over_cost(rows, kind, cost), x, axis))
    has_seeds = max(len(row.runs) for row in rows) > 1
    caption = SEEDS_CAPTION if has_seeds else "One seed only: the variation between seeds is not shown."
    caption = " ".join([caption, *explain_partial([run for row in rows for run in row.records])])
    title = f"{capitalize(runs.score)} and loss" + (f": {setting}" if setting else "")
    return PageSection(f"learning-{number}", title, [Paragraph(caption, "quiet"), Plots(share_accuracy_axis(plots))])


def _make_cost_axis(rows: Sequence[RowRecord], cost: str) -> PlotAxis:
    unit = choose_unit(rows, cost).name
    return PlotAxis(f"{COSTS[cost].label} ({unit})", f" {unit}", 2, zero=True)


# ---- by level and exit -----------------------------------------------------------------------------------------------


def make_run_levels_section(run: RunFolder) -> PageSection | None:
    """Return the accuracy of a run by level and by exit: over rounds, and of the last evaluation."""
    if not run.evaluations:
        return None
    score, axis = get_score_name(run.summary), make_score_axis(get_score_name(run.summary))
    levels = [Line(one, get_level_color(i), strong=False) for i, one in enumerate(level_curves(run))]
    exits = [Line(one, i, strong=False) for i, one in enumerate(exit_curves(run))]
    data, partial = "on the server's test set" if run.is_private else "all clients", " ".join(explain_partial([run]))
    plots = [
        plot_lines("levels", f"Local {score} of each level's clients", levels, ROUNDS, axis, partial),
        plot_lines(
            "exits", f"{capitalize(score)} of each exit of the largest level, {data}", exits, ROUNDS, axis, partial
        ),
    ]
    blocks: list[Block] = [Plots(shared)] if (shared := share_accuracy_axis(plots)) else []
    blocks.append(Sheet(_make_level_table(run)))
    if run.summary.levels:
        blocks += [Paragraph(sentence, "note") for sentence in explain_order([hide_private_numbers(run)])]
    if run.is_finished:
        rows = [row for row in make_total_table(run.summary).rows if row[0] != "time" and not row[0].startswith(" ")]
        blocks.append(Sheet(Table(("what", "value"), tuple(rows), "The run as a whole")))
    return PageSection("levels", "Levels and exits", blocks)


def hide_private_numbers(run: RunFolder) -> SummaryRecord:
    """Return the final numbers of a run without withheld ones."""
    summary = run.summary.model_copy(update={"rounds": len(run.rounds)})
    if not run.is_private:
        return summary
    test = {"test_exits": run.last.test_exits, "test_levels": run.last.test_levels}
    evaluate = EvaluationRecord().model_copy(update={run.norm: NO_ACCURACIES.model_copy(update=test)})
    levels = [level.model_copy(update={"local": None}) for level in summary.levels]
    hidden = dict.fromkeys(("global_", "local", "bytes_down", "bytes_up"))
    return summary.model_copy(update={"levels": levels, "evaluate": evaluate, **hidden})


def _make_level_table(run: RunFolder) -> Table:
    """Return the last evaluation by level: on its own clients, of each exit, on the whole test set."""
    levels = {level.level: level.exits for level in run.summary.levels}
    numbers = number_levels(list(levels))
    exits = run.summary.levels[-1].exits if levels else []
    columns: list[str] = ["level"]
    if not run.is_private:
        names = [f"exit {name}, local %" for name in exit_names(exits, exits)]
        columns += ["clients", f"local {get_score_name(run.summary)} %", *names]
    if run.last.test_levels:
        columns.append("on the whole test set %")
    rows = []
    for name, level in run.last.levels.items():
        cells = [name]
        if not run.is_private:
            by_exit = dict(zip(levels.get(name, ()), level.exits, strict=False))
            cells += [
                str(level.clients),
                format_percent(level.local),
                *(format_percent(by_exit.get(exit)) for exit in exits),
            ]
        if run.last.test_levels:
            cells.append(format_percent(run.last.test_levels.get(numbers.get(name, name))))
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows), f"After round {run.evaluations[-1][0]}")


def make_levels_section(runs: RunSet) -> PageSection:
    """Return the last evaluation of all rows: by level, by exit, and of the worst tenth of the clients."""
    plots: list[Plot | None] = []
    for number, setting in enumerate(runs.settings):
        suffix = f": {setting}" if setting else ""
        # (row, name) -> order and label; exits are ordered by blocks, which may differ between rows
        levels = {row.row: row.records[0].summary.levels for row in runs.select(setting)}
        level_places = {
            (row, level.level): (i, f"level {level.level}")
            for row, row_levels in levels.items()
            for i, level in enumerate(row_levels)
        }
        exit_places = {
            (row, str(i)): (exit, f"after block {exit}")
            for row, row_levels in levels.items()
            for i, exit in enumerate(row_levels[-1].exits if row_levels else (), 1)
        }
        plots += [
            _plot_last(runs, setting, "per_level", f"Local {runs.score} by level{suffix}", level_places, number),
            _plot_last(
                runs, setting, "per_exit", f"{capitalize(runs.score)} of the exits of the largest level{suffix}",
                exit_places, number,
            ),
        ]  # fmt: skip
    blocks: list[Block] = [Plots(shared)] if (shared := share_accuracy_axis(plots)) else []
    summaries = {(row.row, row.setting): [hide_private_numbers(run) for run in row.records] for row in runs.rows}
    by_label = {", ".join(filter(None, key)): group for key, group in summaries.items()}
    blocks += [Paragraph(sentence, "note") for sentence in explain_row_order(by_label)]
    blocks.append(Sheet(make_row_level_table(summaries)))
    worst = _make_worst_table(runs)
    if worst is not None:
        blocks.append(Sheet(worst))
    return PageSection("ends", "Levels, exits and clients", blocks)


def _plot_last(
    runs: RunSet,
    setting: str,
    attribute: str,
    title: str,
    places: Mapping[tuple[str, str], tuple[int, str]],
    number: int,
) -> Plot | None:
    """Return a dot for each seed and label, from an attribute of `RunResult`."""
    dots = []
    for i, row in enumerate(runs.labels):
        points = [
            (places[row, name][1], value, f"seed {run.seed}")
            for run in runs.results.runs
            if (run.row, run.setting) == (row, setting)
            for name, value in getattr(run, attribute).items()
            if (row, name) in places
        ]
        dots.append(Dots(row, [p[0] for p in points], [p[1] for p in points], [p[2] for p in points], i))
    order = list(dict.fromkeys(label for _, label in sorted(set(places.values()))))
    name = f"{attribute.replace('_', '-')}-{number}"
    return plot_dots(name, title, dots, order, make_score_axis(runs.score), "One dot per seed, after the last round.")


def _make_worst_table(runs: RunSet) -> Table | None:
    """Return the mean accuracy of the worst tenth of the clients, over the seeds."""
    rows = []
    for row in runs.rows:
        shares = [
            [None if run.is_private else run.last.number(kind) for run in row.records]
            for kind in ("local", "local_worst_tenth", "global", "global_worst_tenth")
        ]
        if any(share is not None for seeds in shares for share in seeds):
            rows.append((row.label, *map(format_mean, shares)))
    columns = ("row", "local, mean %", "local, worst tenth %", "global, mean %", "global, worst tenth %")
    return Table(columns, tuple(rows), "All clients, and the worst tenth of them") if rows else None


# ---- by client -------------------------------------------------------------------------------------------------------


def make_ranking_section(run: RunFolder) -> PageSection | None:
    """Return the accuracies of a run's clients from best to worst, and the worst tenth by name."""
    by_client = {"local": run.last.per_client.local, "global": run.last.per_client.global_}
    ranked = {
        kind: sorted(((share, name) for name, share in shares.items()), key=lambda pair: -pair[0])
        for kind, shares in by_client.items()
        if shares and not run.is_private
    }
    if not ranked:
        return None
    score = get_score_name(run.summary)
    counts = {len(clients) for clients in ranked.values()}
    shaded = "; shaded: the worst tenth" if len(counts) == 1 else ""
    lines = [
        Line(
            Series(kind, {run.seed: [Point(i, i, to_percent(share)) for i, (share, _) in enumerate(clients, 1)]}),
            number,
            strong=False,
        )
        for number, (kind, clients) in enumerate(ranked.items())
    ]
    caption = (
        f"Each line has its own order{shaded}. Accuracies of single clients are coarse, because each client has "
        "few test samples."
    )
    x, y = PlotAxis("client, by rank", whole=True), make_score_axis(score)
    plot = plot_lines("clients", f"{capitalize(score)} of single clients", lines, x, y, caption)
    if plot is not None and len(counts) == 1:
        (count,) = counts
        strip = {
            "type": "rect", "xref": "x", "yref": "paper", "x0": count - max(1, count // 10) + 0.5, "x1": count + 0.5,
            "y0": 0, "y1": 1, "line": {"width": 0}, "fillcolor": get_color(7, 0.13), "layer": "below",
        }  # fmt: skip
        plot = replace(plot, layout={**plot.layout, "shapes": [strip]})
    blocks: list[Block] = [Plots([plot])] if plot is not None else []
    for kind, clients in ranked.items():
        tenth = clients[-max(1, len(clients) // 10) :]
        mean = run.last.number(f"{kind}_worst_tenth")
        title = f"The worst tenth, {kind}" + (f": {format_percent(mean)} %" if mean is not None else "")
        rows = tuple((name, format_percent(share)) for share, name in reversed(tenth[-_MAX_WORST:]))
        more = len(tenth) - len(rows)
        notes = (f"{more} more clients are in the worst tenth.",) if more > 0 else ()
        blocks.append(Sheet(Table(("client", f"{score} %"), rows, title, notes)))
    return PageSection("by-client", "Clients from best to worst", blocks)
