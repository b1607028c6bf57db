"""Tables as they will stand in a paper: plain rows of text, their Markdown and CSV; numbers come from run folders."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetfit.planner import Plan

FORMAT = 1
"""Version of `summary.json`."""


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        columns: Headings.
        rows: One text per column.
        title: What stands above it.
        notes: Sentences below it.
        groups: Headings above the columns, each with the number of columns it spans; they add up to the columns.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = field(default=())
    groups: tuple[tuple[str, int], ...] = field(default=())

    def to_markdown(self) -> str:
        """Return the table as Markdown; a heading above columns is repeated in each of them."""
        lines = [_markdown_line(self.headings), "|" + " --- |" * len(self.columns)]
        lines += [_markdown_line(row) for row in self.rows]
        parts = [f"**{self.title}**\n"] if self.title else []
        return "\n".join([*parts, *lines, *(f"\n{note}" for note in self.notes)]) + "\n"

    def to_csv(self) -> str:
        """Return the table as CSV; a heading above columns is repeated in each of them."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *self.rows])
        return text.getvalue()

    @property
    def headings(self) -> list[str]:
        """One heading per column, with the one above it."""
        above = [name for name, span in self.groups for _ in range(span)] or [""] * len(self.columns)
        return [f"{a} {c}".strip() for a, c in zip(above, self.columns, strict=True)]


def _markdown_line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


# ---- numbers as text -----------------------------------------------------------------------------------------------


def percent(value: Any) -> str:
    """Return an accuracy as in the papers, "79.61"; "-" where there is none."""
    return "-" if value is None else f"{100 * value:.2f}"


def short(count: float) -> str:
    """Return a count in short: 950, 57.6 K, 1.73 M, 253.1 M."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " K")):
        if count >= unit:
            scaled = count / unit
            return f"{scaled:.2f}{name}" if scaled < 10 else f"{scaled:.1f}{name}"
    return f"{count:g}"


def size(count: float) -> str:
    """Return a number of bytes in short, in powers of ten: 12.3 MB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds in short: 3.2 s, 4 min 10 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---- one run ---------------------------------------------------------------------------------------------------------


def summary_of(
    description: Mapping[str, Any], plan: Plan, metrics: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the final numbers of a run.

    Args:
        description: What was run: name, method, model, data, seed, norm (the headline's batch-norm policy).
        plan: The levels.
        metrics: The reports of all rounds.
        notes: What the user must know, such as who did not take part.
    """
    columns: Mapping[str, Any] = next((m["evaluate"] for m in reversed(metrics) if "evaluate" in m), {})
    headline: Mapping[str, Any] = columns.get(description["norm"], {})
    found = headline.get("levels", {})
    levels = [
        {
            "level": level.name,
            "width": level.width,
            "depth": level.depth,
            "blocks": plan.blocks,
            "exits": list(level.exits),
            "parameters": level.parameters,
            "multiply_adds": level.multiply_adds,
            "clients": level.clients,
            "local": found.get(level.name, {}).get("local"),
        }
        for level in plan.levels
    ]
    return {
        "format": FORMAT,
        **description,
        "rounds": metrics[-1]["round"] if metrics else 0,
        "levels": levels,
        "global": headline.get("global"),
        "local": headline.get("local"),
        "evaluate": {key: _without_clients(value) for key, value in columns.items()},
        "bytes_down": sum(m["bytes_down"] for m in metrics),
        "bytes_up": sum(m["bytes_up"] for m in metrics),
        "failures": sum(len(m["failures"]) for m in metrics),
        "seconds": sum(m["seconds"] for m in metrics),
        "left_out": list(plan.left_out),
        "notes": list(notes),
    }


def _without_clients(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "per_client"} if isinstance(value, Mapping) else value


def level_table(summary: Mapping[str, Any]) -> Table:
    """Return what each level is and how well it does on its own clients."""
    columns = ("level", "width", "depth", "exits", "parameters", "multiply-adds", "clients", "local accuracy %")
    rows = tuple(
        (
            entry["level"],
            f"{entry['width']:.2f}",
            f"{entry['depth']}/{entry['blocks']}",
            ", ".join(map(str, entry["exits"])),
            short(entry["parameters"]),
            short(entry["multiply_adds"]),
            str(entry["clients"]),
            percent(entry["local"]),
        )
        for entry in summary["levels"]
    )
    title = f"{summary['method']} on {summary['data']} with {summary['model']}, {summary['rounds']} rounds"
    return Table(columns, rows, title)


def total_table(summary: Mapping[str, Any]) -> Table:
    """Return the numbers of the run as a whole."""
    rows = [
        ("global accuracy %", percent(summary["global"])),
        ("local accuracy %", percent(summary["local"])),
    ]
    for norm, title in (("static", "static batch-norm statistics"), ("batch", "batch statistics")):
        columns = summary["evaluate"].get(norm)
        if isinstance(columns, Mapping) and norm != summary["norm"]:
            said = f", batches of {columns['batch_size']}, {columns['order']}" if "batch_size" in columns else ""
            both = f"{percent(columns['global'])} / {percent(columns['local'])}"
            rows.append((f"global / local accuracy %, {title}{said}", both))
    rows.append(("bytes sent down / up", f"{size(summary['bytes_down'])} / {size(summary['bytes_up'])}"))
    if summary["failures"]:
        rows.append(("jobs that brought nothing back", str(summary["failures"])))
    rows.append(("time", duration(summary["seconds"])))
    return Table(("", summary["method"]), tuple(rows), notes=tuple(summary["notes"]))


def plan_table(plan: Plan, title: str = "") -> Table:
    """Return the levels of a plan with their costs."""
    columns = (
        "level",
        "width",
        "depth",
        "exits",
        "parameters",
        "multiply-adds",
        "target",
        f"{plan.cost} / full",
        "clients",
    )
    rows = tuple(
        (
            level.name,
            f"{level.width:.2f}",
            f"{level.depth}/{plan.blocks}",
            ", ".join(map(str, level.exits)),
            short(level.parameters),
            short(level.multiply_adds),
            f"{level.target:.3g} ± {100 * level.tolerance:.3g}%",
            f"{level.share:.3f}",
            str(level.clients),
        )
        for level in plan.levels
    )
    notes = []
    if plan.early_heads.parameters:
        notes.append(f"Level {plan.levels[-1].name} is counted without its early classifiers: "
                     f"{short(plan.early_heads.parameters)} parameters, "
                     f"{short(plan.early_heads.multiply_adds)} multiply-adds.")  # fmt: skip
    if plan.left_out:
        notes.append(f"{len(plan.left_out)} clients afford no level: {', '.join(plan.left_out)}.")
    return Table(columns, rows, title, tuple(notes))


# ---- many runs -------------------------------------------------------------------------------------------------------


def compare_table(
    rows: Sequence[str],
    settings: Sequence[str],
    results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    title: str = "",
    notes: Sequence[str] = (),
) -> Table:
    """Return methods as rows and local and global accuracy per setting as columns, as in ScaleFL's Table 3.

    Args:
        rows: Labels of the rows.
        settings: Labels of the settings; one empty label where there is only one setting.
        results: Summaries of all seeds by (row, setting); a pair may be missing.
        title: What stands above the table.
        notes: Sentences below it.
    """
    columns = ("method", *(kind for _ in settings for kind in ("local", "global")))
    body = []
    for row in rows:
        cells = [row]
        for setting in settings:
            found = results.get((row, setting), ())
            cells += [spread([summary[kind] for summary in found]) for kind in ("local", "global")]
        body.append(tuple(cells))
    groups = (("", 1), *((setting, 2) for setting in settings))
    return Table(columns, tuple(body), title, tuple(notes), groups)


def levels_of_rows(results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Table:
    """Return the levels of every row and setting, accuracies over the seeds, and what the row sent."""
    columns = ("run", "level", "width", "depth", "parameters", "multiply-adds", "clients", "local accuracy %",
               "global accuracy %", "bytes down / up")  # fmt: skip
    rows = []
    for key, summaries in results.items():
        first = summaries[0]
        for index, level in enumerate(first["levels"]):
            local = spread([s["levels"][index]["local"] for s in summaries if index < len(s["levels"])])
            overall = ("", "", "")
            if index == 0:
                sent = f"{size(first['bytes_down'])} / {size(first['bytes_up'])}"
                overall = (", ".join(filter(None, key)), spread([s["global"] for s in summaries]), sent)
            rows.append((overall[0], *_shape_of(level), local, *overall[1:]))
    return Table(columns, tuple(rows))


def _shape_of(level: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        level["level"],
        f"{level['width']:.2f}",
        f"{level['depth']}/{level['blocks']}",
        short(level["parameters"]),
        short(level["multiply_adds"]),
        str(level["clients"]),
    )


def spread(values: Sequence[float | None]) -> str:
    """Return "mean ± standard deviation" in percent; one value alone; "-" for none."""
    known = [100 * v for v in values if v is not None]
    if not known:
        return "-"
    if len(known) == 1:
        return f"{known[0]:.2f}"
    return f"{statistics.mean(known):.2f} ± {statistics.stdev(known):.2f}"


def data_table(facts: Mapping[str, Any]) -> Table:
    """Return sizes, classes and resolution of data sets, as in ScaleFL's Table 2.

    Args:
        facts: Name -> `fleetfit.data.Facts`, or None where a module states none.
    """

    def cell(value: Any) -> str:
        return "any" if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    rows = tuple(
        (name, *(("", "", "", "") if f is None else map(cell, (f.train, f.test, f.classes, f.resolution))))
        for name, f in facts.items()
    )
    return Table(("data set", "train size", "test size", "classes", "resolution"), rows)
