"""Rows x settings x seeds from one file: each its own run folder below one folder, resumable, and the table at the end.

Rows and tuned values are compared fairly: every row gets the same grid and the same small grid to tune, chosen on
validation data with seeds of its own (ReeFL, appendix A); the table says what each got. A run that is finished is not
run again, one that was cut off goes on.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.api.comparison.announced import announcing, title_of
from fleetfit.api.comparison.kept import ResultsFile, keep, record_path
from fleetfit.api.comparison.opened import load_comparison
from fleetfit.api.comparison.planned import ComparedRun, ComparisonPlan, TunedKeys, label, nested
from fleetfit.api.comparison.rehearsed import Rehearsal, RowTask, find_objects
from fleetfit.api.comparison.remaining import ComparisonProgress, ExpectedRun, Remaining
from fleetfit.api.comparison.reported import Comparison, Runs, reported
from fleetfit.api.comparison.same_data import SameData
from fleetfit.api.comparison.tuned import candidates, chosen
from fleetfit.api.described import settled
from fleetfit.api.progress import Wanted, shown_runs
from fleetfit.api.results import Run, load
from fleetfit.api.runs import OnRound, proceed
from fleetfit.config import Assembly, Experiment, to_table
from fleetfit.config.build.run import as_recorded
from fleetfit.config.naming import sharing_data
from fleetfit.config.reading import anchored, changes_of, checked, laid, leaves, merged, sections_of, value_at
from fleetfit.config.tables import find_base_folder, read_table
from fleetfit.config.writing import dumped
from fleetfit.errors import ConfigError, FleetFitError, NoUsableUpdates, RunError, refuse_on_windows, truncate
from fleetfit.paths import make_slug
from fleetfit.report.differences import Difference
from fleetfit.report.results import ComparisonResults, RunResult, TriedValues, TuningResult, read_results
from fleetfit.stored import RUNS
from fleetfit.tensor_defaults import own_mode
from fleetfit.training.devices import give_back_freed_memory

__all__ = [
    "ComparedRun",
    "Comparison",
    "ComparisonPlan",
    "ComparisonProgress",
    "ComparisonResults",
    "Difference",
    "OnProgress",
    "OnRun",
    "RunResult",
    "TriedValues",
    "TunedKeys",
    "TuningResult",
    "compare",
    "label",
    "load_comparison",
    "read_results",
]

_WITH_WORKERS = ("processes", "ray")
_LONGEST = 200  # bytes of a name that is part of a folder's as it is

OnProgress = Callable[[ComparisonProgress], None]
"""Called with how far a comparison is."""
OnRun = Callable[[str, int, int, Run], OnRound | None]
"""Called before each run with its title, its number, how many there are, and the run, perhaps finished already."""


@own_mode()
def compare(
    file: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    on_run: OnRun | None = None,
    jobs: int = 1,
    against: str | None = None,
    record: str | Path | None = None,
    on_progress: OnProgress | None = None,
    progress: Wanted = "auto",
    **sections: Any,
) -> Comparison:
    """Run every row of a file in every setting with every seed.

    Args:
        file: A run file with `[[compare.row]]`, `[[compare.setting]]` or `[compare.grid]`, perhaps `[compare.tune]`;
            its tables, or an `Experiment`.
        out: The folder; by default one below `runs/` that depends on what is compared, so the same command goes on.
            With objects in the place of names it is a new one each time.
        overrides: `a.b=c`, for all runs: they win over rows and settings.
        on_run: Called before each run; what it returns is called with each round's report.
        jobs: Runs at a time. With more than one, each is in a process of its own with one thread and its own data, and
            all have the same bits.
        against: Label of the row that the others are measured against; `compare.against`, or the first row, by default.
        on_progress: Called before the first run, after each round and after each run with how far all of it is, and how
            long it will take yet.
        progress: Whether rounds are shown while they run, where there is no `on_run`: "auto" in a notebook only, True
            also in a terminal.
        record: A folder where `results.json` is kept as well, under the name of the run file, once all is finished.
        **sections: Sections of a run file; objects may stand in for names: `model=MyArchitecture()`, `data=my_data`.
            Beside a file or tables they win over rows and settings; alone they are the file.

    Returns:
        The comparison. A run without any usable update is in its `failures`; the others are finished.

    Raises:
        NoUsableUpdates: No run had one.
        FleetFitError: Something does not fit, or a folder holds a run of something else; or the process of a run died,
            which is said once the others are done.
    """
    plan = planned(file, overrides, **sections)
    path = Path(file) if isinstance(file, str | Path) else Path(f"{plan.name}.toml")
    on_run = shown_runs(progress) if on_run is None else on_run
    reference = plan.reference(against)
    _check_jobs(plan, jobs)
    kept = None if record is None else record_path(path, record)
    folder = (
        files.expand_path(out) if out is not None else RUNS / f"compare-{_folder_name(plan.name)}-{plan.fingerprint}"
    )
    rehearsal, results = Rehearsal(plan, folder), ResultsFile(plan, path, folder, reference)
    with contextlib.ExitStack() as sharing:
        sharing.enter_context(sharing_data())
        notes = rehearsal.check()
        if jobs > 1:  # each process has its own
            sharing.close()
            give_back_freed_memory()
        sharing.enter_context(announcing(plan, folder))
        following = _Following(_remaining(plan, folder, jobs, rehearsal), on_run, on_progress)
        runner = _RowRunner(rehearsal, following, jobs)
        tuned, runs = _compared(runner, plan, folder, results)
    if not runs:
        raise NoUsableUpdates(f"no run of the comparison learned anything. {' '.join(runner.failures.values())}")
    if kept is not None and not runner.failures:
        keep(results.results, kept)
    said = {key: label(choice) for key, choice in tuned.items()}
    notes = [*runner.failures.values(), *notes, *following.data.notes]
    return reported(plan, runs, said, results, notes, tuple(runner.failures), kept if not runner.failures else None)


def _folder_name(name: str) -> str:
    """Return the part of the folder's name that the comparison's name gives: itself, where it is one."""
    return name if name == Path(name).name and len(name.encode(errors="replace")) <= _LONGEST else make_slug(name)


def _check_jobs(plan: ComparisonPlan, jobs: int) -> None:
    """Refuse a number of runs at a time that cannot be.

    Raises:
        ConfigError: It is below 1, or a row's engine has workers of its own.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}.")
    if jobs > 1:
        refuse_on_windows("A comparison with several runs at a time", "Leave out --jobs.")
    for entry in plan.entries() if jobs > 1 else ():
        if found := find_objects(entry.table):
            raise ConfigError(
                f"jobs = {jobs} runs each row in a process of its own, which cannot get the objects in "
                f'{", ".join(found)}. Use jobs = 1, or names: "package.module:function" or "file.py:function".'
            )
        engine = checked(entry.table).engine.name
        if engine in _WITH_WORKERS:
            raise ConfigError(
                f'--jobs {jobs} gives each run one process and one thread, and {entry.title} has engine "{engine}", '
                'which has workers of its own. Use --jobs 1, or engine.name = "local".'
            )


def _compared(
    runner: "_RowRunner", plan: ComparisonPlan, folder: Path, results: ResultsFile
) -> tuple[dict[tuple[str, str], TunedKeys], Runs]:
    """Tune and run; return what each row and setting got, and the runs, in the table's order."""
    tuned = _tune(plan, runner, folder, results)
    asked = []
    for number, entry in enumerate(plan.entries(), 1):
        table = merged(entry.table, nested(tuned.get((entry.row, entry.setting), ())))
        asked.append(_Asked(entry, table, _place(folder, entry.place), title_of(entry), number, plan.count))

    def finished(done: Sequence[tuple[_Asked, Run]]) -> None:
        for one, found in done:
            results.add(one.entry, found, dict(tuned.get((one.entry.row, one.entry.setting), ())))
        results.write()

    runs: Runs = {}
    for one, found in zip(asked, runner.run(asked, finished), strict=True):
        if found is not None:
            runs.setdefault((one.entry.row, one.entry.setting), []).append(found)
    return tuned, runs


def planned(
    source: str | Path | Mapping[str, Any] | Experiment | None = None, overrides: Sequence[str] = (), **sections: Any
) -> ComparisonPlan:
    """Return what a file, its tables or sections ask to compare; see `compare`.

    Raises:
        ConfigError: Something does not fit; what needs no data is checked.
    """
    here, change = Path.cwd(), changes_of(overrides)
    given = anchored(_with_sections(sections), here)
    if source is None:
        return ComparisonPlan(given, "comparison", change)
    change = laid(change, given)
    if isinstance(source, str | Path):
        base = anchored(sections_of(read_table(source)), find_base_folder(source))
        return ComparisonPlan(base, Path(source).stem, change)
    table = dumped(source, only_set=True) if isinstance(source, Experiment) else source
    return ComparisonPlan(anchored(_with_sections(table), here), "comparison", change)


def _with_sections(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables with sections in the place of names and objects, in rows and settings, too."""
    found = sections_of(table)
    for part in ("row", "setting"):
        if isinstance(found.get("compare"), dict) and isinstance(found["compare"].get(part), list | tuple):
            rows = found["compare"][part]
            found["compare"][part] = [sections_of(row) if isinstance(row, Mapping) else row for row in rows]
    return found


def plans_of(file: str | Path, overrides: Sequence[str] = ()) -> list[tuple[list[str], Assembly]]:
    """Return the rows of a comparison that have the same plan, and one of their assemblies, for each plan.

    Raises:
        FleetFitError: Something does not fit.
    """
    rehearsal = Rehearsal(planned(file, overrides))
    found: dict[str, tuple[list[str], Assembly]] = {}
    with sharing_data():
        rehearsal.check()
        for entry, assembly in rehearsal.assemblies():
            title = ", ".join(filter(None, [entry.row, entry.setting]))
            rows, _ = found.setdefault(assembly.plan.to_toml(), ([], assembly))
            rows.append(title)
    return list(found.values())


# ---- running -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """A run of a comparison, perhaps one that tunes: its tables and folder, its title, its number of how many."""

    entry: ComparedRun
    table: Mapping[str, Any]
    place: Path
    title: str
    number: int
    count: int
    tunes: bool = False


class _Following:
    """Tells how far a comparison is, and passes on what its runs report."""

    def __init__(self, left: Remaining, on_run: OnRun | None, on_progress: OnProgress | None) -> None:
        self._left, self._on_run, self._on_progress, self.data = left, on_run, on_progress, SameData()
        self._tell()

    def began(self, asked: _Asked, found: Run) -> OnRound:
        """Announce a run; return what its rounds are told to."""
        changed = self.data.known(asked.title, found)
        self.data.mixed(asked.title, found)
        if changed and not found.finished:
            found._known_notes = (*found.notes, changed)
        on_round = None if self._on_run is None else self._on_run(asked.title, asked.number, asked.count, found)
        if not found.finished:
            self._left.began(asked.entry.place)

        def after_round(report: Mapping[str, Any]) -> None:
            self._left.round(asked.entry.place, report)
            self._tell()
            if on_round is not None:
                on_round(report)

        return after_round

    def finished(self, asked: _Asked) -> None:
        """Count a run that has been finished."""
        self._left.finished(asked.entry.place)
        self._tell()

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._left.progress)


def _remaining(plan: ComparisonPlan, folder: Path, jobs: int, rehearsal: Rehearsal) -> Remaining:
    """Return what says how long a comparison will take yet, with what its folder has from before."""
    expected = {}
    for tunes, entries in ((True, [entry for entry, _ in candidates(plan)]), (False, plan.entries())):
        for entry in entries:
            run = checked(entry.table)
            expected[entry.place] = ExpectedRun((entry.row, entry.setting), run.rounds, run.evaluate.every, tunes)
    left = Remaining(expected, jobs, rehearsal.work)
    for place in expected:
        if (folder / place / "config.toml").is_file():
            with contextlib.suppress(FleetFitError):  # a damaged one says so when it is run
                found = load(folder / place)
                left.known(place, found.metrics, found.finished)
    return left


OnFinished = Callable[[Sequence[tuple[_Asked, Run]]], None]
"""Called with those that were finished before, if there are any, and then with each one that has been finished."""


class _RowRunner:
    """Runs what is asked for: one after the other, or side by side.

    Attributes:
        failures: By title the runs of the table that had no usable update, and a sentence on each.
    """

    def __init__(self, rehearsal: Rehearsal, following: _Following, jobs: int) -> None:
        self._rehearsal, self._following, self._jobs = rehearsal, following, jobs
        self._useless: set[Path] = set()
        self.failures: dict[str, str] = {}

    def run(self, asked: Sequence[_Asked], finished: OnFinished | None = None) -> Iterator[Run | None]:
        """Yield the finished runs, in the order in which they are asked for; None for one without usable updates."""
        there = [self._there(one) for one in asked]
        before = [(one, found) for one, found in zip(asked, there, strict=True) if found and found.finished]
        for one, known in zip(asked, there, strict=True):
            if known is not None:
                self._following.data.known(one.title, known)
        if before and finished is not None:
            finished(before)
        if self._jobs > 1:
            self._side_by_side(asked, there, finished)
            yield from (None if one.place in self._useless else load(one.place) for one in asked)
            return
        for one, known in zip(asked, there, strict=True):
            yield self._alone(one, known, finished)

    def _failed(self, asked: _Asked, error: Exception) -> None:
        self._useless.add(asked.place)
        self._following.finished(asked)
        if not asked.tunes:
            self.failures[asked.title] = f"{asked.title} failed: {error}"

    def _alone(self, asked: _Asked, there: Run | None, finished: OnFinished | None) -> Run | None:
        """Run one, go on with it, or open it if it is finished."""
        found = there if there is not None and there.finished else self._task(asked).begun()
        on_round = self._following.began(asked, found)
        if found is not there:
            try:
                if not found.finished:
                    proceed(found, on_round)
            except NoUsableUpdates as error:
                self._failed(asked, error)
                found._let_go()
                return None
            self._following.finished(asked)
            if finished is not None:
                finished([(asked, found)])
        found._let_go()  # a comparison may have many runs, each with its own data in memory
        return found

    def _side_by_side(self, asked: Sequence[_Asked], there: Sequence[Run | None], finished: OnFinished | None) -> None:
        """Run those that are not finished, so many at a time."""
        from fleetfit.api.comparison.side_by_side import run_side_by_side  # processes begin there

        left = []
        for one, found in zip(asked, there, strict=True):
            if found is not None and found.finished:
                self._following.began(one, found)
            else:
                left.append(one)
        tasks = [self._task(one) for one in left]

        def done(number: int) -> None:
            self._following.finished(left[number])
            if finished is not None:
                finished([(left[number], load(left[number].place))])

        def failed(number: int, error: NoUsableUpdates) -> None:
            self._failed(left[number], error)

        def began(number: int, found: Run) -> OnRound:
            return self._following.began(left[number], found)

        run_side_by_side(tasks, self._jobs, began, done, failed)

    def _task(self, asked: _Asked) -> RowTask:
        known = self._rehearsal.with_known(asked.entry, settled(checked(asked.table))).fleet.measured
        return RowTask(asked.title, asked.table, known, asked.place, self._rehearsal.spared, self._rehearsal.name)

    def _there(self, asked: _Asked) -> Run | None:
        """Return the run that is in the folder already, or None.

        Raises:
            RunError: It is a run of something else.
        """
        place = asked.place
        if not (place / "config.toml").is_file():
            return None
        found = load(place, **find_objects(asked.table))
        same = as_recorded(settled(checked(asked.table)), found.experiment)
        if to_table(found.experiment) != to_table(same):  # not the text: keys may have come since it was written
            raise RunError(
                f"{place} holds a run of something else: {_difference(found.experiment, same)}. Choose another "
                "folder with --out, or delete it."
            )
        return found


def _place(folder: Path, run: Path) -> Path:
    """Return the folder of a run of a comparison.

    Raises:
        RunError: It, or one on the way to it, is a link, which could lead anywhere.
    """
    place = folder / run
    for part in (place, *place.parents[: len(run.parts) - 1]):
        if part.is_symlink():
            raise RunError(
                f"{part} is a symbolic link, and nothing is written through one. Move the folder itself there."
            )
    return place


def _difference(found: Experiment, asked: Experiment) -> str:
    """Return in which keys a run that is there differs from the one that is asked for."""
    there, here = to_table(found), to_table(asked)
    keys = sorted({*leaves(there), *leaves(here)})
    pairs = [(key, value_at(there, key), value_at(here, key)) for key in keys]
    said = [f"{key} is {_said(a)} there and {_said(b)} here" for key, a, b in pairs if a != b]
    return ", ".join(said[:3]) + (f", and {len(said) - 3} more keys" if len(said) > 3 else "")


def _said(value: tuple[Any, ...]) -> str:
    return truncate(json.dumps(value[0], default=str)) if value else "not set"


def _tune(
    plan: ComparisonPlan, runner: _RowRunner, folder: Path, results: ResultsFile
) -> dict[tuple[str, str], TunedKeys]:
    """Choose among the tuned values for every row and setting, by validation data alone."""
    tried = list(candidates(plan))
    asked = []
    for number, (entry, choice) in enumerate(tried, 1):
        seed = f"seed {entry.seed}" if len(plan.tune_seeds) > 1 else ""
        title = ", ".join(filter(None, ["tuning", entry.row, entry.setting, label(choice), seed]))
        asked.append(_Asked(entry, entry.table, _place(folder, entry.place), title, number, len(tried), True))
    runs = list(runner.run(asked))
    found = chosen(plan, tried, runs)
    if found:
        results.add_tuning([result for _, result in found], [run for run in runs if run is not None])
    return {(result.row, result.setting): values for values, result in found}
