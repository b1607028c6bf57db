"""What a person sees: live progress, tables, where the run folder is."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress

from fleetfit.api import Comparison, Run
from fleetfit.api.compare import ComparisonProgress
from fleetfit.api.progress import Rounds, bars
from fleetfit.api.runs import proceed
from fleetfit.cli.output import explain_interrupt, print_line, print_notes, print_table
from fleetfit.cli.planning import Shown
from fleetfit.errors import make_printable
from fleetfit.report import drawing
from fleetfit.report.page import NAME as PAGE
from fleetfit.report.tables import level_table, levels_of_rows, plan_table, samples_left_out, total_table
from fleetfit.report.text import Table, duration, percent

_TEXT_WIDTH = 110
_ACCURACIES = ("global", "local", "global_worst_tenth", "local_worst_tenth", "ensemble", "mean_over_exits", "best_exit",
               "avg", "full")  # fmt: skip


def plan(found: Shown) -> None:
    """Print a plan, and what is to be known beforehand."""
    print_notes(found.notes)
    print_table(plan_table(found.plan, found.title, found.latencies, found.how))


# ---- progress ------------------------------------------------------------------------------------------------------


def trained(target: Run, quiet: bool) -> None:
    """Run the rounds that are left with live progress, then print the result."""
    print_notes(target.notes)
    if not quiet:
        print_line(f"Run folder: {target.folder}")
    progress = None if quiet else Rounds("", target.experiment)

    def finished(summary: Mapping[str, Any]) -> None:
        if progress is not None:
            progress.close()
        _numbers(summary)

    with explain_interrupt(f"fleetfit resume {target.folder}"):
        try:
            proceed(target, progress, on_result=finished)
        finally:
            if progress is not None:
                progress.close()
    _where(target.folder)


def result(found: Run) -> None:
    """Print the tables of a finished run and where it is."""
    _numbers(found.summary)
    _where(found.folder)


def _numbers(summary: Mapping[str, Any]) -> None:
    print_table(level_table(summary))
    print_table(total_table(summary))
    sys.stdout.flush()


def _where(folder: Path) -> None:
    if drawing.available():
        print_line(f"Plots: {folder}/plots")
    else:
        print_line('No plots were drawn: matplotlib is not installed (pip install "fleetfit[plots]").')
    if (folder / PAGE).is_file():
        print_line(f"Page: {folder / PAGE}")
    print_line(f"Run folder: {folder}")


# ---- comparisons ---------------------------------------------------------------------------------------------------


class ComparedRuns:
    """Announces the runs of a comparison and shows their rounds. A row's note is said once, whatever its seeds."""

    def __init__(self, quiet: bool, jobs: int) -> None:
        """Take whether only notes are shown, and how many runs there are at a time."""
        self._quiet, self._known = quiet, set[tuple[str, str]]()
        self._begun, self._left = False, ""
        self._bars: Progress | None = None
        if jobs > 1 and not quiet and sys.stdout.isatty():
            self._bars = bars()
            self._bars.start()

    def __call__(self, title: str, number: int, count: int, run: Run) -> Rounds | None:
        """Announce a run; return what shows its rounds."""
        heading = title if self._quiet else f"[{number}/{count}] {title}"
        for note in run.notes:
            if (run.experiment.name, note) not in self._known:
                self._known.add((run.experiment.name, note))
                print_line(f"{heading}: {note}")
        if self._quiet:
            return None
        if run.finished:
            print_line(f"{heading}: finished before.")
            return None
        return Rounds(heading, run.experiment, self._bars, lambda: self._left)

    def progress(self, found: ComparisonProgress) -> None:
        """Say how many runs there are, and once it is known how long they will take; go on showing that."""
        if self._quiet:
            return
        if not self._begun:
            self._begun = True
            self._say(runs_in_words(found))
        if found.seconds_left:
            first, about = not self._left, duration(found.seconds_left)
            guessed = found.rows_measured < found.rows
            self._left = f"{'perhaps ' * guessed}{about} left of all"
            if first:
                self._say(f"The whole comparison takes about {about} more, by the rounds measured so far{_of(found)}.")

    def _say(self, text: str) -> None:
        """Print a line, above the bars where there are some."""
        if self._bars is not None:
            self._bars.console.print(make_printable(text), markup=False, soft_wrap=True, highlight=False)
        else:
            print_line(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bars is not None:
            self._bars.stop()


def _of(found: ComparisonProgress) -> str:
    """Return in how many rows rounds were measured, where others may take another time."""
    if found.rows_measured == found.rows:
        return ""
    return f", of {found.rows_measured} row{'' if found.rows_measured == 1 else 's'} of {found.rows}"


def runs_in_words(found: ComparisonProgress) -> str:
    """Return how many runs a comparison has: "8 runs, of which 4 tune before the others; 3 are finished."."""
    text = f"{found.runs} run{'' if found.runs == 1 else 's'}"
    if found.tuning:
        text += f", of which {found.tuning} tune before the others"
    if found.jobs > 1:
        text += f", {found.jobs} at a time"
    return text + (f"; {found.finished} {'is' if found.finished == 1 else 'are'} finished." if found.finished else ".")


def compared(found: Comparison) -> None:
    """Print the tables of a comparison."""
    print_table(levels_of_rows({key: [run.summary for run in runs] for key, runs in found.runs.items()}))
    for table in found.tables:
        print_table(table, None if table is found.table else 100)
    print_line(f"Results: {found.results}")
    _where(found.folder)


def columns(found: Mapping[str, Any], score: str) -> None:
    """Print the columns of an evaluation, whose accuracies are called `score`."""
    for norm in ("static", "batch"):
        if norm not in found:
            continue
        values = found[norm]
        rows = [
            (f"{kind.replace('_', ' ')} {score} %", f"{percent(values[kind])}{samples_left_out(values, kind)}")
            for kind in _ACCURACIES
            if values.get(kind) is not None
        ]
        rows += [_level_row(name, entry, score) for name, entry in values["levels"].items()]
        of = f" of {found['data']}, {values['samples']} samples" if "data" in found else ""
        print_table(Table((f"{found['split']} data{of}", f"{norm} batch-norm statistics"), tuple(rows)))


def _level_row(name: str, entry: Mapping[str, Any], score: str) -> tuple[str, str]:
    if "accuracy" in entry:
        return f"level {name}, {score} %", percent(entry["accuracy"])
    return f"level {name}, {entry['clients']} clients, local {score} %", percent(entry["local"])
