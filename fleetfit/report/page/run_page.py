"""The page of one run."""

from collections import Counter
from pathlib import Path

from fleetfit.errors import truncate
from fleetfit.report.curves import COSTS, Point, Series, cost_curve, fit_unit, round_digits
from fleetfit.report.page.accuracy import make_ranking_section, make_run_accuracy_section, make_run_levels_section
from fleetfit.report.page.blocks import Block, Page, PageSection, Plot, Plots, Sheet
from fleetfit.report.page.participants import make_clients_section, make_run_participation_section
from fleetfit.report.page.plan import make_plan_section
from fleetfit.report.page.plots import ROUNDS, Line, PlotAxis, plot_lines
from fleetfit.report.page.provenance import make_run_provenance_section
from fleetfit.report.text import Table, format_bytes, format_duration, format_percent, get_score_name
from fleetfit.runs.folder import RunFolder


def make_run_page(run: RunFolder, page: Path) -> Page:
    """Return the page of a run.

    Args:
        run: The run.
        page: The file, to which links are relative.
    """
    sections = [
        make_run_provenance_section(run, page),
        make_plan_section(run),
        make_run_accuracy_section(run),
        make_run_levels_section(run),
        make_ranking_section(run),
        make_run_participation_section(run),
        make_clients_section(run),
        make_costs_section(run),
    ]
    summary, rounds_done = run.summary, len(run.rounds)
    title = f"{run.method} on {summary.data} with {summary.model}" if run.is_finished else run.method
    rounds = f"{rounds_done} round{'s' if rounds_done != 1 else ''}"
    state = rounds if run.is_finished else f"{rounds} of {run.get_setting('rounds', default=None)}, not finished"
    return Page(
        truncate(run.name, 120),
        truncate(f"{title}, {state}", 240),
        [section for section in sections if section is not None],
        list_tiles(run),
        [*summary.notes, *run.find_problems()],
    )


def list_tiles(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of the page."""
    summary, score = run.summary, get_score_name(run.summary)
    last = f"after round {run.evaluations[-1][0]}" if run.evaluations else ""
    kinds = {
        "local": (f"local {score}", f"own level, own data; {last}"),
        "global": (f"global {score}", f"largest level, all clients; {last}"),
        "local_worst_tenth": ("worst tenth, local", last),
        "personal": (f"personal {score}", "own level, own data, own class frequencies"),
    }
    if run.is_private:
        test = "on the server's test set"
        kinds = {"full": ("full model", test), "avg": ("mean of the levels", test)}
    tiles = [
        (label, f"{format_percent(share)} %", hint)
        for kind, (label, hint) in kinds.items()
        if (share := run.last.number(kind)) is not None
    ]
    if run.is_private:
        privacy = next((report.privacy for report in reversed(run.rounds) if report.privacy is not None), None)
        if privacy is not None:
            tiles.append(("epsilon spent", f"{privacy.epsilon:.2f}", f"at delta {privacy.delta:.3g}"))
    else:
        down, up = summary.bytes_down, summary.bytes_up
        if down is not None and up is not None:
            tiles.append(("sent", format_bytes(down + up), f"{format_bytes(down)} down, {format_bytes(up)} up"))
        if summary.failures:
            tiles.append(("failures", f"{summary.failures:,}", "failed jobs"))
        if summary.simulated_s is not None:
            tiles.append(("simulated time", format_duration(summary.simulated_s), "on the devices"))
    if run.rounds:
        seconds = sum(report.seconds for report in run.rounds)
        tiles.append(("computed in", format_duration(seconds), f"{len(run.rounds)} rounds"))
    return tiles


def make_costs_section(run: RunFolder) -> PageSection | None:
    """Return bytes, multiply-adds and simulated seconds over rounds, and the wall time by activity."""
    plots = [
        _plot_costs(run, "Cumulative bytes sent", "bytes", {"bytes_down": "down", "bytes_up": "up"}, "sent", 3),
        _plot_costs(run, "Cumulative multiply-adds of clients", "multiply_adds"),
        _plot_costs(run, "Cumulative simulated time", "simulated_s"),
    ]
    blocks: list[Block] = [Plots(present)] if (present := [plot for plot in plots if plot is not None]) else []
    table = _make_time_table(run)
    if table is not None:
        blocks.append(Sheet(table))
    return PageSection("costs", "Costs", blocks) if blocks else None


def _plot_costs(
    run: RunFolder, title: str, cost: str, parts: dict[str, str] | None = None, label: str = "", digits: int = 2
) -> Plot | None:
    """Return a cumulative cost over rounds.

    Args:
        run: The run.
        title: Title of the plot.
        cost: One of `COSTS`.
        parts: Labels of the parts of the cost; by default a single line.
        label: Label of the axis; the cost's by default.
        digits: Decimals of a point's number.
    """
    curves = {name: cost_curve(run, part) for part, name in (parts or {cost: COSTS[cost].label}).items()}
    unit = fit_unit(cost, max((curve[-1].y for curve in curves.values() if curve), default=0.0))
    lines = [
        Line(
            Series(name, {run.seed: [Point(number, x, round_digits(y / unit.size)) for number, x, y in curve]}),
            i if parts else 2,
            strong=False,
        )
        for i, (name, curve) in enumerate(curves.items())
    ]
    y = PlotAxis(f"{label or COSTS[cost].label} ({unit.name})", f" {unit.name}", digits, zero=True)
    return plot_lines(cost.replace("_", "-"), title, lines, ROUNDS, y)


def _make_time_table(run: RunFolder) -> Table | None:
    """Return the wall time of all rounds by activity."""
    seconds = Counter[str]()
    for report in run.rounds:
        seconds.update(report.seconds_of)
    total = sum(report.seconds for report in run.rounds)
    if not seconds or not total:
        return None
    remainder = max(0.0, total - seconds.total())
    rows = [
        (activity, format_duration(value), f"{100 * value / total:.1f}")
        for activity, value in {**seconds, "everything else": remainder, "together": total}.items()
    ]
    return Table(("wall time of all rounds", "time", "%"), tuple(rows))
