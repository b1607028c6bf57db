"""Execute the runs of a comparison: first tuning, then the table; in sequence, or several at a time.

Finished runs are skipped, and interrupted runs are resumed. A run without a usable update fails alone. Any other error
ends the comparison, and the same command resumes it.

With several jobs, each run is `fleetfit run` or `fleetfit resume` in a process of its own, with one thread, and the
same bits as in this process. Its progress is read from its folder. The processes end with this one, even if it is
killed.
"""

import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fleetfit import files
from fleetfit.api.comparison.plan import (
    NO_VALIDATION,
    ComparisonPlan,
    DryRun,
    PlannedRun,
    RowSetting,
    TunedValues,
)
from fleetfit.api.comparison.results import ResultsFile, Runs
from fleetfit.api.follow import FollowedRun
from fleetfit.api.progress import ComparisonProgress
from fleetfit.api.results import Run, load
from fleetfit.api.run import OnRound, prepare, run_remaining_rounds
from fleetfit.config import Experiment, to_table
from fleetfit.config.dump import find_object_sections, make_plain
from fleetfit.config.merge import flatten
from fleetfit.config.records import restore_records
from fleetfit.errors import (
    ConfigError,
    FleetFitError,
    NoUsableUpdates,
    RunError,
    join_some,
    refuse_on_windows,
    truncate,
)
from fleetfit.machine import PARENT
from fleetfit.report.columns import ROUNDS, find_rounds_to, keep_best, make_accuracy_curve
from fleetfit.runs.data import CHANGED, format_difference
from fleetfit.runs.folder import compute_checksum
from fleetfit.runs.schema import FingerprintRecord, TuningCandidate, TuningResult, rank_candidates

_ENGINES_WITH_WORKERS = ("processes", "ray")
_STOP_S = 20.0  # between the interrupt of a process and its kill
_POLL_S = 0.1  # between two looks at the processes and their folders
_MAX_TITLES = 4  # runs listed in a note on changed data

OnRun = Callable[[str, int, int, Run], OnRound | None]
"""Called before each run with its title, its number, the number of runs, and the run, which may be finished."""


# ---- progress ------------------------------------------------------------------------------------------------------


OnProgress = Callable[[ComparisonProgress], None]


class Eta:
    """Estimates the time left: remaining rounds times the mean seconds of a round of the row, or of all rows.

    Args:
        runs: All runs.
        jobs: Runs at a time.
    """

    def __init__(self, runs: Sequence[PlannedRun], jobs: int = 1) -> None:
        self._runs, self._jobs = runs, jobs
        self._rounds_left = {run.subfolder: run.experiment.rounds for run in runs}
        self._seconds: dict[str, list[float]] = {}
        self._finished: set[Path] = set()

    def add_round(self, run: PlannedRun, report: Mapping[str, Any]) -> None:
        """Count a round of a run."""
        self._rounds_left[run.subfolder] = run.experiment.rounds - report["round"]
        self._seconds.setdefault(run.row, []).append(float(report["seconds"]))

    def add_finished(self, run: PlannedRun) -> None:
        """Count a finished run."""
        self._finished.add(run.subfolder)

    @property
    def progress(self) -> ComparisonProgress:
        """The counts, with the estimate."""
        return ComparisonProgress(
            runs=len(self._runs),
            tuning=sum(run.values is not None for run in self._runs),
            finished=len(self._finished),
            jobs=self._jobs,
            seconds_left=self._estimate_seconds(),
            rows=len({run.row for run in self._runs}),
            rows_measured=len(self._seconds),
        )

    def _estimate_seconds(self) -> float | None:
        runs = [run for run in self._runs if run.subfolder not in self._finished]
        if not runs:
            return 0.0
        if not self._seconds:
            return None
        means = {row: statistics.fmean(seconds) for row, seconds in self._seconds.items()}
        others = statistics.fmean(means.values())
        each = [self._rounds_left[run.subfolder] * means.get(run.row, others) for run in runs]
        return max(sum(each) / self._jobs, max(each))  # the longest run is a lower bound


# ---- notes on data that changed between runs -----------------------------------------------------------------------


class _DataCheck:
    """Compares the data fingerprints of runs with equal `[data]`: files may change during an interruption."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, FingerprintRecord]] = {}  # title and data of the first run, by `[data]`
        self._changes: dict[str, list[str]] = {}  # titles of runs with other data, by the difference
        self._resumed: list[str] = []

    def add(self, title: str, run: Run) -> str:
        """Add a run; return the difference from the first run with the same `[data]` as a sentence, or ""."""
        data = run.files.environment.data
        if data is None:
            return ""
        # the partition and the folder of the transform differ between runs
        section = {
            k: v for k, v in to_table(run.experiment).get("data", {}).items() if k not in ("partition", "transform")
        }
        first, data_before = self._first.setdefault(json.dumps(section, sort_keys=True, default=str), (title, data))
        difference = format_difference(data_before, data)
        if not difference:
            return ""
        changes = f"{CHANGED} {first}: {difference}"
        titles = self._changes.setdefault(changes, [])
        if title not in titles:
            titles.append(title)
        return f"{changes}. Numbers on different data do not rank methods."

    def add_finished(self, title: str, run: Run, now: FingerprintRecord | None) -> None:
        """Add a run that is not trained again, and the data as they are now."""
        before = run.files.environment.data
        if any(note.startswith(CHANGED) for note in run.notes):
            return  # while it was interrupted, which `add_resumed` notes
        if before is not None and now is not None and (difference := format_difference(before, now)):
            self._changes.setdefault(f"{CHANGED} these runs finished: {difference}", []).append(title)

    def add_resumed(self, title: str, run: Run) -> None:
        """Add the notes of a run whose data changed while it was interrupted."""
        self._resumed += [f"{title}: {note}" for note in run.notes if note.startswith(CHANGED)]

    @property
    def notes(self) -> list[str]:
        notes = list(dict.fromkeys(self._resumed))
        for changes, titles in self._changes.items():
            notes.append(
                f"{changes}, in {join_some(titles, _MAX_TITLES, '; ')}. Numbers on different data do not rank "
                "methods. Compare again in another folder, with --out."
            )
        return notes


# ---- all runs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonOutcome:
    """The runs of a comparison after the last of them.

    Attributes:
        runs: The finished runs of the table.
        failures: A sentence on each run of the table without usable updates, by title.
        notes: Notes on data that changed between runs.
    """

    runs: Runs
    failures: Mapping[str, str]
    notes: Sequence[str]


def check_jobs(plan: ComparisonPlan, jobs: int) -> None:
    """Check the number of runs at a time.

    Raises:
        ConfigError: It is below 1, or it is above 1 and a row has objects or an engine with workers.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {jobs}.", key="jobs")
    if jobs > 1:
        refuse_on_windows("A comparison with several runs at a time", "Leave out --jobs.")
    for run in plan.runs if jobs > 1 else ():
        if objects := find_object_sections(to_table(run.experiment)):
            raise ConfigError(
                f"jobs = {jobs} runs each row in its own process, which cannot receive the objects in "
                f'{", ".join(objects)}. Use jobs = 1, or names: "package.module:function" or "file.py:function".',
                key="jobs",
            )
        engine = run.experiment.engine.name
        if engine in _ENGINES_WITH_WORKERS:
            raise ConfigError(
                f'--jobs {jobs} gives each run one process and one thread, but {run.name} has engine "{engine}" with '
                'its own workers. Use --jobs 1, or engine.name = "local".',
                key="engine.name",
            )


def run_comparison(
    plan: ComparisonPlan,
    folder: Path,
    dry_run: DryRun,
    results: ResultsFile,
    jobs: int = 1,
    on_run: OnRun | None = None,
    on_progress: OnProgress | None = None,
) -> ComparisonOutcome:
    """Tune, then run the table. Results are written after each finished run.

    Raises:
        FleetFitError: A run raised it, or a folder has another run, or a process died.
    """
    executor = _Executor(plan, folder, dry_run, jobs, on_run, on_progress)
    tuning = zip(plan.tuning_runs, executor.run(plan.tuning_runs), strict=True)
    tuned: dict[RowSetting, TunedValues] = {}
    for group, runs in itertools.groupby(tuning, key=lambda pair: pair[0].group):
        candidates = list(runs)
        choice = choose_values(plan, candidates)
        results.add_tuning(choice, [run for _, run in candidates if run is not None])
        tuned[group] = tuple(choice.chosen.items())

    def on_finished(finished: Sequence[tuple[PlannedRun, Run]]) -> None:
        for planned, run in finished:
            results.add(planned, run, dict(tuned.get(planned.group, ())))
        results.write()

    tuned_runs = [run.tune(tuned.get(run.group, ())) for run in plan.runs]
    finished_runs: Runs = {}
    for planned, run in zip(plan.runs, executor.run(tuned_runs, on_finished), strict=True):
        if run is not None:
            finished_runs.setdefault(planned.group, []).append(run)
    return ComparisonOutcome(finished_runs, executor.failures, executor.data.notes)


OnFinished = Callable[[Sequence[tuple[PlannedRun, Run]]], None]
"""Called with the already finished runs, if any, and then with each run that finishes."""
OnStart = Callable[[int, Run], OnRound]
"""Called with the number of a task and its run. The result is called with the report of each round."""
Outcome = tuple[int, Run | NoUsableUpdates]
"""The number of a task, and its finished run or the error of a run without usable updates."""


class _Executor:
    """Executes the unfinished planned runs, and reports them to the caller.

    Attributes:
        data: Check of the data of all runs.
        failures: A sentence on each run of the table without usable updates, by title.
    """

    def __init__(
        self,
        plan: ComparisonPlan,
        folder: Path,
        dry_run: DryRun,
        jobs: int,
        on_run: OnRun | None,
        on_progress: OnProgress | None,
    ) -> None:
        self._dry_run, self._jobs, self._on_run, self._on_progress = dry_run, jobs, on_run, on_progress
        self.data, self.failures = _DataCheck(), dict[str, str]()
        runs = [*plan.tuning_runs, *plan.runs]
        self._folders = {run.subfolder: _find_folder(folder, run.subfolder) for run in runs}
        self._eta = Eta(runs, jobs)
        for planned in runs:
            if (self._folders[planned.subfolder] / "config.toml").is_file():
                with contextlib.suppress(FleetFitError):  # a damaged run raises its error when it is its turn
                    run = load(self._folders[planned.subfolder])
                    for report in run.metrics:
                        self._eta.add_round(planned, report)
                    if run.finished:
                        self._eta.add_finished(planned)
        self._report_progress()

    def run(self, runs: Sequence[PlannedRun], on_finished: OnFinished | None = None) -> list[Run | None]:
        """Return the finished runs; None for one without usable updates."""
        finished: dict[int, Run] = {}
        for i, planned in enumerate(runs):
            if (run := self._load_existing(planned)) is not None:
                self.data.add(planned.title, run)
                if run.finished:
                    finished[i] = run
        if finished and on_finished is not None:
            on_finished([(runs[i], run) for i, run in finished.items()])
        self._check_finished(runs, finished)

        def announce(i: int, run: Run) -> OnRound:
            return self._announce(runs[i], i + 1, len(runs), run)

        for i, run in finished.items():
            announce(i, run)
            run._release_memory()
        tasks = [(i, self._make_task(planned)) for i, planned in enumerate(runs) if i not in finished]
        outcomes = _run_in_processes(tasks, self._jobs, announce) if self._jobs > 1 else _run_here(tasks, announce)
        with contextlib.closing(outcomes):  # an error of the caller also stops the processes
            for i, outcome in outcomes:
                planned = runs[i]
                self._eta.add_finished(planned)
                self._report_progress()
                if isinstance(outcome, Run):
                    finished[i] = outcome
                    if on_finished is not None:
                        on_finished([(planned, outcome)])
                elif planned.values is None:
                    self.failures[planned.title] = f"{planned.title} failed: {outcome}"
        return [finished.get(i) for i in range(len(runs))]

    def _check_finished(self, runs: Sequence[PlannedRun], finished: Mapping[int, Run]) -> None:
        """Compare the data of finished runs with those at hand, unless a new run is compared with them."""
        for i, run in finished.items() if len(finished) == len(runs) else ():
            self.data.add_finished(runs[i].title, run, self._dry_run.data.get(runs[i].group))

    def _announce(self, planned: PlannedRun, number: int, count: int, run: Run) -> OnRound:
        """Report a run to the caller; return the function to call with its rounds."""
        changes = self.data.add(planned.title, run)
        self.data.add_resumed(planned.title, run)
        if changes:
            run._notes = (*run.notes, changes)
        on_round = None if self._on_run is None else self._on_run(planned.title, number, count, run)

        def report_round(report: Mapping[str, Any]) -> None:
            self._eta.add_round(planned, report)
            self._report_progress()
            if on_round is not None:
                on_round(report)

        return report_round

    def _report_progress(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._eta.progress)

    def _make_task(self, planned: PlannedRun) -> "_Task":
        folder = self._folders[planned.subfolder]
        return _Task(self._dry_run.add_facts(planned), folder, self._dry_run.notes_of[planned.group])

    def _load_existing(self, planned: PlannedRun) -> Run | None:
        """Return the existing run of the folder, or None.

        Raises:
            RunError: The folder has another run.
        """
        folder = self._folders[planned.subfolder]
        if not (folder / "config.toml").is_file():
            return None
        run = load(folder, **_find_objects(planned.experiment))
        expected = restore_records(planned.experiment, run.experiment)
        # compare tables, not texts: a newer version may have more keys
        if to_table(run.experiment) != to_table(expected):
            section = self._dry_run.plan.section
            hint = " The seed that tunes follows those of the table: compare.tune_seeds keeps that of before."
            raise RunError(
                f"{folder} has another run: {_format_difference(run.experiment, expected)}. Choose another folder "
                f"with --out, or delete this one.{hint * bool(section.tune and not section.tune_seeds)}",
                path=folder,
            )
        return run


def _find_folder(folder: Path, subfolder: Path) -> Path:
    """Return the folder of a run. Refuse symbolic links inside the comparison's folder."""
    path = folder / subfolder
    for part in (path, *path.parents[: len(subfolder.parts) - 1]):
        if part.is_symlink():
            raise RunError(
                f"{part} is a symbolic link, which a comparison never writes through. Move the folder itself there.",
                path=part,
            )
    return path


def _find_objects(experiment: Experiment) -> dict[str, Any]:
    """Return the sections with objects, without their plain keys, which the run folder has."""
    sections = {section: experiment.request.tables[section] for section in find_object_sections(to_table(experiment))}
    return {
        name: {k: v for k, v in section.items() if make_plain(v) != v} if isinstance(section, Mapping) else section
        for name, section in sections.items()
    }


def _format_difference(existing: Experiment, expected: Experiment) -> str:
    def format_value(value: Any) -> str:
        return "not set" if value is None else truncate(json.dumps(value, default=str))

    there, here = flatten(to_table(existing)), flatten(to_table(expected))
    values = [(key, there.get(key), here.get(key)) for key in sorted(there.keys() | here.keys())]
    changes = [f"{key} is {format_value(a)} there and {format_value(b)} here" for key, a, b in values if a != b]
    return ", ".join(changes[:3]) + (f", and {len(changes) - 3} more keys" if len(changes) > 3 else "")


# ---- tuning --------------------------------------------------------------------------------------------------------


def choose_values(plan: ComparisonPlan, runs: Sequence[tuple[PlannedRun, Run | None]]) -> TuningResult:
    """Choose the values of a row and setting.

    Args:
        plan: The comparison.
        runs: The tuning runs, with the seeds of each combination in a row. None is a run without usable updates; its
            values rank last.

    Raises:
        ConfigError: A run has no score.
    """
    candidates = [_score_run(plan, planned, run) for planned, run in runs]
    seeds = len(plan.tune_seeds)
    by_values = [candidates[i : i + seeds] for i in range(0, len(candidates), seeds)]
    best = max(by_values, key=rank_candidates)  # the first one on a tie
    row, setting = runs[0][0].group
    return TuningResult(row=row, setting=setting, chosen=best[0].values, candidates=candidates)


def _score_run(plan: ComparisonPlan, planned: PlannedRun, run: Run | None) -> TuningCandidate:
    values, section = dict(planned.values or ()), plan.section
    if run is None:
        return TuningCandidate(values=values, seed=planned.seed)
    summary = run.files.read_summary()
    if section.tune_on == ROUNDS:
        points = make_accuracy_curve(run._read_rounds(), summary.norm, section.target_on)
    else:
        score = summary.number(section.tune_on)
        points = [] if score is None else [(0, score)]
    if not points:
        raise ConfigError(NO_VALIDATION, key="compare.tune")
    best = keep_best(points)[-1][1]
    rounds = find_rounds_to(points, plan.targets[0]) if section.tune_on == ROUNDS else None
    return TuningCandidate(values=values, score=round(100 * best, 4), seed=planned.seed, rounds=rounds)


# ---- runs in this process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A run to execute.

    Attributes:
        planned: The run.
        folder: Its folder.
        notes: Notes of its row and setting for the user.
    """

    planned: PlannedRun
    folder: Path
    notes: Sequence[str]

    @property
    def has_begun(self) -> bool:
        """Whether the folder has a run, to resume."""
        return files.is_file(self.folder / "config.toml")

    def restore(self) -> Run:
        """Return the run of the folder, which follows the callbacks of this comparison from now on."""
        experiment = self.planned.experiment
        objects = _find_objects(experiment)
        run = load(self.folder, **objects)
        if run.experiment.callbacks == experiment.callbacks:
            return run
        table = {**run.files.read_config(), "callbacks": experiment.callbacks}
        text = tomli_w.dumps({key: value for key, value in table.items() if key != "callbacks" or value})
        environment = {**run.files.json("environment.json"), "sha256": {"config.toml": compute_checksum(text)}}
        run.files.write("environment.json", json.dumps(environment, indent=2) + "\n")
        run.files.write("config.toml", text)
        return load(self.folder, **objects)


def _run_here(tasks: Sequence[tuple[int, _Task]], on_start: OnStart) -> Generator[Outcome]:
    """Run tasks in sequence in this process."""
    for number, task in tasks:
        run = task.restore() if task.has_begun else prepare(task.planned.experiment, task.folder)
        changes = [note for note in run.assembly.notes if note.startswith(CHANGED)]
        run._notes = (*task.notes, *changes)
        try:
            run_remaining_rounds(run, on_start(number, run))
        except NoUsableUpdates as error:
            yield number, error
        else:
            yield number, run
        finally:
            run._release_memory()  # each of many runs would keep its data in memory


# ---- runs in other processes ---------------------------------------------------------------------------------------


def _run_in_processes(tasks: Sequence[tuple[int, _Task]], jobs: int, on_start: OnStart) -> Generator[Outcome]:
    """Run tasks in at most `jobs` processes at a time.

    An error of a run ends all processes. If a process is killed, the other runs finish first.

    Raises:
        FleetFitError: A run raised it, or a process died.
    """
    waiting, processes, lost = deque(tasks), list[_RunProcess](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or processes:
                while waiting and len(processes) < jobs:
                    processes.append(_RunProcess(*waiting.popleft(), Path(folder)))
                for process in list(processes):
                    code = process.process.poll()  # before reading, so that the last rounds are read below
                    process.report(on_start)
                    if code is None:
                        continue
                    processes.remove(process)
                    process.interrupt()
                    if code < 0:
                        lost.append(f"the process of {process.task.planned.title} ended by signal {-code}")
                    else:
                        yield process.number, process.read_outcome(code)
                time.sleep(_POLL_S)
        finally:
            for process in processes:
                process.interrupt()
            for process in processes:
                process.wait()
    if lost:
        raise RunError(f"{'; '.join(lost)}. Its checkpoints are kept. Run the same command to resume it.")


class _RunProcess:
    """`fleetfit run` or `fleetfit resume` of one run in a process of its own, followed by its folder.

    Args:
        number: The number of the task.
        task: The run.
        folder: A folder for the run file and the messages of the process.
    """

    def __init__(self, number: int, task: _Task, folder: Path) -> None:
        self.number, self.task = number, task
        self._followed = FollowedRun(task.folder)
        self._on_round: OnRound | None = None
        self._messages, file = folder / f"{number}.txt", folder / f"{number}.toml"
        if task.has_begun:
            self._followed.run = task.restore()
            self._followed.read()  # the earlier rounds
            words = ["resume", str(task.folder)]
        else:
            file.write_bytes(tomli_w.dumps(make_plain(task.planned.tables)).encode(errors="surrogateescape"))
            words = ["run", str(file), "--out", str(task.folder)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
        theirs, self._ours = os.pipe()
        with self._messages.open("wb") as messages:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetfit", *words, "--quiet"],
                pass_fds=[theirs],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                env={**os.environ, **threads, "PYTHONPATH": path, PARENT: str(theirs)},
                process_group=0,  # Ctrl-C in a terminal reaches only this process, which ends the others
            )
        os.close(theirs)

    def report(self, on_start: OnStart) -> None:
        """Report the start of the run, and its new rounds."""
        reports, run = self._followed.read(), self._followed.run
        if run is None:
            return
        if self._on_round is None:
            run._notes = tuple(self.task.notes)
            self._on_round = on_start(self.number, run)
        for report in reports:
            self._on_round(report)

    def read_outcome(self, code: int) -> Run | NoUsableUpdates:
        """Return the outcome of a process that has ended; print its warnings.

        Raises:
            RunError: The run failed.
        """
        *warnings, error = self._messages.read_text(encoding="utf-8", errors="replace").split("fleetfit: ")
        if code == 0:
            warnings, error = [*warnings, error], ""
        for sentence in filter(None, map(str.strip, warnings)):
            logging.getLogger("fleetfit").warning("%s: %s", self.task.planned.title, sentence)
        if code == 0:
            return load(self.task.folder)
        if code == NoUsableUpdates.EXIT_CODE:
            return NoUsableUpdates(error.strip())
        raise RunError(f"{self.task.planned.title}: {error.strip()}", path=self.task.folder)

    def interrupt(self) -> None:
        """End the pipe. If the process is still running, this interrupts it, as Ctrl-C does."""
        os.close(self._ours)

    def wait(self) -> None:
        """Wait for the end of an interrupted process; kill it if it takes too long."""
        try:
            self.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
