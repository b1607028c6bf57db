"""Compare methods: run the rows of a file in all settings with all seeds, and make one table.

`plan` lists and checks the runs, `execute` runs them, and `results` writes and reads the tables.
"""

import contextlib
import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from fleetfit import files, names
from fleetfit.api.comparison.execute import ComparisonOutcome, OnProgress, OnRun, check_jobs, run_comparison
from fleetfit.api.comparison.plan import (
    ComparisonPlan as ComparisonPlan,
    DryRun,
    check_folder,
    check_rows as check_rows,
    format_label as format_label,
    hold_folder,
    list_plans as list_plans,
    plan_comparison as plan_comparison,
)
from fleetfit.api.comparison.results import (
    Comparison as Comparison,
    ResultsFile,
    find_record_path,
    load_comparison as load_comparison,
    open_comparison,
    write_record,
)
from fleetfit.api.progress import (
    ComparisonDisplay,
    ProgressOption,
    explain_interrupt,
    make_comparison_display,
)
from fleetfit.api.run import Sections
from fleetfit.config import Experiment
from fleetfit.config.assemble.data import share_data
from fleetfit.errors import COMMAND, NoUsableUpdates
from fleetfit.files import make_slug
from fleetfit.machine import isolate_torch_state
from fleetfit.runs import RUNS
from fleetfit.runs.comparison import read_results as read_results
from fleetfit.runs.schema import ComparisonResults as ComparisonResults
from fleetfit.training.runtime import trim_heap

_LONGEST_NAME = 200  # bytes of a comparison's name in its folder's name


@isolate_torch_state()
def compare(
    file: str | Path | Mapping[str, Any] | Experiment | ComparisonPlan | None = None,
    *,
    out: str | Path | None = None,
    jobs: int = 1,
    against: str | None = None,
    record: str | Path | None = None,
    on_run: OnRun | None = None,
    on_progress: OnProgress | None = None,
    progress: ProgressOption | ComparisonDisplay = "auto",
    **sections: Unpack[Sections],
) -> Comparison:
    """Run every row of a file in every setting with every seed.

    Without a file, two methods with two seeds on a data frame:

        rows = [{"method": "fleetfit"}, {"method": "heterofl"}]
        compare(data=frame, rounds=20, compare={"row": rows, "grid": {"seed": [0, 1]}}).to_frame()

    Args:
        file: A run file with `[[compare.row]]`, `[[compare.setting]]`, `[compare.grid]` or `[compare.tune]`; its
            tables, an `Experiment`, or what `plan_comparison` returns, without sections.
        out: The folder. By default it is in `runs/` and its name depends on the runs, so the same call resumes. With
            objects in place of names it is a new folder each time.
        jobs: Number of runs at a time. With more than one, each run has its own process, with one thread and its own
            data. The bits are the same.
        against: Label of the baseline row; by default `compare.against`, or the first row.
        record: A folder for a copy of `results.json`, with the run file's name, after all runs are finished.
        on_run: Called before each run, in place of showing it. Its result, if any, is called with each round's report.
        on_progress: Called with the state and the estimated time left of the comparison: before the first run, after
            each round and after each run.
        progress: Whether to show the runs and their rounds: bars or lines on stderr, in a notebook the cell; False
            shows nothing.
        **sections: Sections of a run file, as `fleetfit.run` takes them, and `compare` with keys of `[compare]`. They
            change what all rows of `file` share; a row or setting with the key keeps its value. Without `file` they are
            the run file.

    Returns:
        The comparison. Its `failures` has the runs without a usable update; all others are finished. All rows tune over
        the same values (ReeFL, appendix A). Each run has a folder in the comparison's folder.

    Raises:
        NoUsableUpdates: No run had a usable update.
        FleetFitError: The file is wrong, the folder is not empty and has no comparison, a run's folder has another run,
            or the process of a run died (raised after the other runs have finished).
    """
    names.check_not_importing()
    plan = file if isinstance(file, ComparisonPlan) else plan_comparison(file, **sections)
    record_path = None if record is None else find_record_path(plan.path, record)
    if out is not None:
        folder = files.parse_path(out)
    else:
        is_usable = plan.name == Path(plan.name).name and len(plan.name.encode(errors="replace")) <= _LONGEST_NAME
        folder = RUNS / f"compare-{plan.name if is_usable else make_slug(plan.name)}-{plan.fingerprint}"
    check_folder(plan, folder)
    plan.find_reference(against)
    check_jobs(plan, jobs)
    display = make_comparison_display(progress, jobs)
    with contextlib.ExitStack() as stack:
        if not isinstance(progress, ComparisonDisplay):
            stack.enter_context(explain_interrupt(functools.partial(_format_advice, folder)))
        if display is not None:
            stack.enter_context(contextlib.closing(display))
            display.say("Checking every row and setting before the first run.")
            if plan.has_implied_smallest:
                display.say(
                    f'The row "{plan.smallest}", FedAvg at the smallest budget, is added where it fits; [compare] '
                    "smallest_baseline = false leaves it out."
                )
            on_run, on_progress = on_run or display.show_run, on_progress or display.show_progress
        dry_run, results, outcome = _run_rows(plan, folder, against, jobs, on_run, on_progress)
        results.finish(outcome.runs, outcome.failures, [*dry_run.notes, *outcome.notes])
        if not isinstance(progress, ComparisonDisplay):  # which prints them below the table
            for note in outcome.notes:
                logging.getLogger("fleetfit").warning("%s", note)
        if outcome.failures:
            record_path = None  # only a finished comparison is copied
        if record_path is not None:
            write_record(results.results, record_path)
        if display is not None:
            display.close()
            display.say("Drawing the plots and the page.")
        comparison = open_comparison(folder, runs=outcome.runs, results=record_path)
        comparison.write()
        return comparison


def _run_rows(
    plan: ComparisonPlan,
    folder: Path,
    against: str | None,
    jobs: int,
    on_run: OnRun | None,
    on_progress: OnProgress | None,
) -> tuple[DryRun, ResultsFile, ComparisonOutcome]:
    """Check all rows and run them; see `compare`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(share_data())
        dry_run = check_rows(plan, folder)
        plan = dry_run.plan
        results = ResultsFile(plan, folder, plan.find_reference(against))
        if jobs > 1:  # worker processes load their own data
            stack.close()
            trim_heap()
        stack.enter_context(hold_folder(plan, folder))
        outcome = run_comparison(plan, folder, dry_run, results, jobs, on_run, on_progress)
    if not outcome.runs:
        raise NoUsableUpdates(f"no run of the comparison had a usable update. {' '.join(outcome.failures.values())}")
    return dry_run, results, outcome


def _format_advice(folder: Path) -> str:
    if not folder.is_dir():
        return "Nothing was written."
    return (
        f'Nothing is half written; continue with the same arguments:{COMMAND}ff.compare(..., out="{folder.as_posix()}")'
    )
