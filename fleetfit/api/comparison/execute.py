"""Execute the runs of a comparison: first tuning, then the table; in sequence, or in several processes.

Finished runs are skipped, and interrupted runs are resumed. A run without a usable update fails alone. Any other error
ends the comparison, and the same command resumes it.

With several jobs, each run has a process with one thread, and the same bits as in this process. A process executes one
run after another and keeps their shared data. Tasks and reports are JSON over a socket pair. The processes end with
this one, even if it is killed.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fleetfit import errors
from fleetfit.api.comparison.plan import (
    NO_VALIDATION,
    ComparisonPlan,
    DryRun,
    PlannedRun,
    RowSetting,
    TunedValues,
    make_tables,
)
from fleetfit.api.comparison.results import ResultsFile, Runs
from fleetfit.api.metadata import CHANGED, Fingerprint, format_difference, read_fingerprint
from fleetfit.api.progress import ComparisonProgress
from fleetfit.api.results import Run, load
from fleetfit.api.run import OnRound, prepare, run_remaining_rounds
from fleetfit.config import Experiment, to_table
from fleetfit.config.assemble.data import share_data
from fleetfit.config.dump import fill_in_defaults, find_object_sections
from fleetfit.config.merge import find_value, list_keys, merge_tables
from fleetfit.config.parse import parse_experiment
from fleetfit.config.records import record_latencies, replace_callbacks, restore_records
from fleetfit.errors import (
    ConfigError,
    FleetFitError,
    NoUsableUpdates,
    RunError,
    Unexpected,
    refuse_on_windows,
    truncate,
)
from fleetfit.names import describe_failure, find_plug_in
from fleetfit.report.columns import ROUNDS, find_rounds_to, keep_best, make_accuracy_curve
from fleetfit.runs.schema import TuningCandidate, TuningResult

_ENGINES_WITH_WORKERS = ("processes", "ray")
_STOP_S = 20.0  # between the signal to a process and its kill
_MOST_TITLES = 4  # runs listed in a note on changed data

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


@dataclass
class _FirstUse:
    """The first run of a section `[data]`, and the titles of runs with other data, by difference."""

    title: str
    data: Fingerprint
    others: dict[str, list[str]] = field(default_factory=dict)


class _DataCheck:
    """Compares the data fingerprints of runs with equal `[data]`: files may change during an interruption."""

    def __init__(self) -> None:
        self._first: dict[str, _FirstUse] = {}
        self._resumed: list[str] = []

    def add(self, title: str, run: Run) -> str:
        """Add a run; return the difference from the first run with the same `[data]` as a sentence, or ""."""
        data = read_fingerprint(run.files)
        if data is None:
            return ""
        # the partition and the path of the encoded columns differ between runs
        section = {
            k: v for k, v in to_table(run.experiment).get("data", {}).items() if k not in ("partition", "columns")
        }
        first = self._first.setdefault(json.dumps(section, sort_keys=True, default=str), _FirstUse(title, data))
        changes = format_difference(first.data, data)
        if not changes:
            return ""
        titles = first.others.setdefault(changes, [])
        if title not in titles:
            titles.append(title)
        return f"{CHANGED} {first.title}: {changes}. Numbers on different data do not rank methods."

    def add_resumed(self, title: str, run: Run) -> None:
        """Add the notes of a run whose data changed while it was interrupted."""
        self._resumed += [f"{title}: {note}" for note in run.notes if note.startswith(CHANGED)]

    @property
    def notes(self) -> list[str]:
        notes = list(dict.fromkeys(self._resumed))
        for first in self._first.values():
            for changes, titles in first.others.items():
                more = f" and {len(titles) - _MOST_TITLES} more" if len(titles) > _MOST_TITLES else ""
                notes.append(
                    f"{CHANGED} {first.title}: {changes}, in {'; '.join(titles[:_MOST_TITLES])}{more}. Numbers on "
                    "different data do not rank methods. Compare again in another folder, with --out."
                )
        return notes


# ---- all runs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonOutcome:
    """The runs of a comparison after the last of them.

    Attributes:
        tuned: Chosen values of each row and setting.
        runs: The finished runs of the table.
        failures: A sentence on each run of the table without usable updates, by title.
        notes: Notes on data that changed between runs.
    """

    tuned: Mapping[RowSetting, TunedValues]
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

    tuned_runs = [
        replace(run, table=merge_tables(run.table, make_tables(tuned.get(run.group, ())))) for run in plan.runs
    ]
    finished_runs: Runs = {}
    for planned, run in zip(plan.runs, executor.run(tuned_runs, on_finished), strict=True):
        if run is not None:
            finished_runs.setdefault(planned.group, []).append(run)
    return ComparisonOutcome(tuned, finished_runs, executor.failures, executor.data.notes)


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
        self._group = folder.resolve().name
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

    def _announce(self, planned: PlannedRun, number: int, count: int, run: Run) -> OnRound:
        """Report a run to the caller; return the function to call with its rounds."""
        changes = self.data.add(planned.title, run)
        self.data.add_resumed(planned.title, run)
        if changes and not run.finished:
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
        return _Task(
            title=planned.title,
            table=self._dry_run.share_evaluations(planned),
            measured=self._dry_run.measured[planned.group],
            folder=str(self._folders[planned.subfolder]),
            suppressed_notes=self._dry_run.suppressed_notes[planned.group],
            group=self._group,
        )

    def _load_existing(self, planned: PlannedRun) -> Run | None:
        """Return the existing run of the folder, or None.

        Raises:
            RunError: The folder has another run.
        """
        folder = self._folders[planned.subfolder]
        if not (folder / "config.toml").is_file():
            return None
        run = load(folder, **_find_objects(planned.table, planned.experiment))
        expected = restore_records(fill_in_defaults(planned.experiment), run.experiment)
        # compare tables, not texts: a newer version may have more keys
        if to_table(run.experiment) != to_table(expected):
            raise RunError(
                f"{folder} has another run: {_format_difference(run.experiment, expected)}. Choose another folder "
                "with --out, or delete this one.",
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


def _find_objects(table: Mapping[str, Any], experiment: Experiment) -> dict[str, Any]:
    return {section: table[section] for section in find_object_sections(to_table(experiment))}


def _format_difference(existing: Experiment, expected: Experiment) -> str:
    def format_value(value: tuple[Any, ...]) -> str:
        return truncate(json.dumps(value[0], default=str)) if value else "not set"

    existing_table, expected_table = to_table(existing), to_table(expected)
    keys = sorted({*list_keys(existing_table), *list_keys(expected_table)})
    values = [(key, find_value(existing_table, key), find_value(expected_table, key)) for key in keys]
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
    best = max(by_values, key=lambda group: _rank(plan, group))  # the first one on a tie
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


def _rank(plan: ComparisonPlan, candidates: Sequence[TuningCandidate]) -> tuple[float, float]:
    """Return (-mean rounds to the target, or 0 if accuracy decides; mean accuracy) over the seeds."""
    scores = [one.score for one in candidates if one.score is not None]
    accuracy = statistics.fmean(scores) if len(scores) == len(candidates) else float("-inf")
    if plan.section.tune_on != ROUNDS:
        return 0.0, accuracy
    rounds = [one.rounds for one in candidates if one.rounds is not None]
    return (-statistics.fmean(rounds) if len(rounds) == len(candidates) else float("-inf")), accuracy


# ---- runs in this process ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A run as its process receives it. Except for objects in `table`, all values are plain.

    Attributes:
        title: The title of the run.
        table: Its run file.
        measured: Measurements for its row and setting.
        folder: Its folder.
        suppressed_notes: Notes that it leaves out.
        group: Name of the comparison's folder.
    """

    title: str
    table: Mapping[str, Any]
    measured: Mapping[str, list[float]]
    folder: str
    suppressed_notes: Sequence[str]
    group: str

    def start(self) -> Run:
        """Return the assembled run, new or resumed."""
        experiment = parse_experiment(self.table)
        if (Path(self.folder) / "config.toml").is_file():
            run = load(self.folder, **_find_objects(self.table, experiment))
            run.experiment = replace_callbacks(run.experiment, experiment.callbacks)
        else:
            experiment = fill_in_defaults(experiment)
            experiment = record_latencies(experiment, {**self.measured, **experiment.fleet.measured})
            run = prepare(experiment, self.folder)
        notes = tuple(note for note in run.assembly.notes if note not in self.suppressed_notes)
        run.__dict__["assembly"] = replace(run.assembly, notes=notes)
        run._comparison = (self.title, self.group)
        return run


def _run_here(tasks: Sequence[tuple[int, _Task]], on_start: OnStart) -> Generator[Outcome]:
    """Run tasks in sequence in this process."""
    for number, task in tasks:
        run = task.start()
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
    """Run tasks in at most `jobs` processes.

    An error of a run ends all processes. If a process is killed, the other runs finish first.

    Raises:
        FleetFitError: A run raised it, or a process died.
    """
    waiting = deque(tasks)
    lost: list[str] = []
    workers: list[_Worker] = []
    try:
        while waiting or any(worker.task is not None for worker in workers):
            for worker in workers:
                if worker.task is None and waiting:
                    worker.start(*waiting.popleft())
            while waiting and len(workers) < jobs:
                workers.append(_Worker())
                workers[-1].start(*waiting.popleft())
            by_connection = {worker.connection: worker for worker in workers if worker.task is not None}
            for connection in wait(list(by_connection)):
                worker = by_connection[connection]  # type: ignore[index]
                try:
                    outcome = worker.receive(on_start)
                except EOFError:
                    lost.append(worker.format_end())
                    workers.remove(worker)
                    continue
                if outcome is not None:
                    yield outcome
    except BaseException:
        _stop(workers, signal.SIGTERM)
        raise
    _stop(workers)
    if lost:
        raise RunError(f"{'; '.join(lost)}. Its checkpoints are kept. Run the same command to resume it.")


def _stop(workers: Sequence["_Worker"], how: signal.Signals | None = None) -> None:
    for worker in workers:
        worker.connection.close()
        if how is not None:
            worker.process.send_signal(how)
    for worker in workers:
        try:
            worker.process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


class _Worker:
    """A process that runs one task at a time.

    Attributes:
        process: The process.
        connection: The socket to it.
        task: Its task; None while it has none.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve_tasks; serve_tasks({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C in a terminal reaches only this process, which ends the others
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.task: _Task | None = None
        self._number = 0
        self._on_round: OnRound | None = None

    def start(self, number: int, task: _Task) -> None:
        """Send a task to the process."""
        self.task, self._number = task, number
        self._send(vars(task))

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # `receive` notices a dead process
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self, on_start: OnStart) -> Outcome | None:
        """Handle the next message; return the outcome of the task, or None if it is still running.

        Raises:
            EOFError: The process is dead.
            FleetFitError: The run raised it.
        """
        assert self.task is not None
        try:
            message = json.loads(self.connection.recv_bytes())
        except OSError:
            raise EOFError from None
        if "notes" in message:
            run = load(self.task.folder)
            run._notes = tuple(message["notes"])
            self._on_round = on_start(self._number, run)
            self._send("continue")
            return None
        if "round" in message:
            assert self._on_round is not None
            self._on_round(message["round"])
            return None
        task, self.task = self.task, None
        if "error" not in message:
            return self._number, load(task.folder)
        error = unpack_error(message, task.title)
        if isinstance(error, NoUsableUpdates):
            return self._number, error
        raise error

    def format_end(self) -> str:
        """Describe how the process ended."""
        assert self.task is not None
        self.connection.close()
        code = self.process.wait()
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process of {self.task.title} ended by {cause}"


def pack_error(error: Exception) -> dict[str, Any]:
    """Return an error of a run as a message."""
    if isinstance(error, FleetFitError):
        return {
            "error": str(error), "kind": type(error).__name__, "attributes": {"path": error.path, **vars(error)}
        }  # fmt: skip
    plug_in = find_plug_in(error)
    details = "".join(traceback.format_exception(error))
    return {
        "error": f"{plug_in or 'FleetFit'} {describe_failure(error)}.",
        "kind": Unexpected.__name__,
        "attributes": {"details": details, "foreign": plug_in is not None, "key": None, "path": None},
    }


def unpack_error(message: Mapping[str, Any], title: str) -> FleetFitError:
    """Return the error in the message of a process, with its class, key, path and further attributes."""
    kind = getattr(errors, message["kind"], RunError)
    error: FleetFitError = kind.__new__(kind)  # constructors of subclasses take more arguments
    error.args = (message["error"] if kind is NoUsableUpdates else f"{title}: {message['error']}",)
    for name, value in message["attributes"].items():
        setattr(error, name, Path(value) if name == "path" and value is not None else value)
    return error


def serve_tasks(descriptor: int) -> None:
    """Run tasks in this process until the other end closes, or until SIGTERM.

    Args:
        descriptor: File descriptor of the socket.
    """
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def listen() -> None:
        """Receive messages. When the other end closes, end this process, even during a run."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(json.loads(connection.recv_bytes()))
        os.kill(os.getpid(), signal.SIGTERM)

    def send(**message: Any) -> None:
        connection.send_bytes(json.dumps(message, default=str).encode())

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError, ConnectionError), share_data():
        while True:
            _serve_task(messages, send)


def _serve_task(messages: "queue.SimpleQueue[Any]", send: Callable[..., None]) -> None:
    task = _Task(**messages.get())
    try:
        run = task.start()
        send(notes=list(run.notes))
        messages.get()  # until the caller has been notified
        run_remaining_rounds(run, lambda report: send(round=dict(report)))
        run._release_memory()
    except ConnectionError:
        raise
    except Exception as error:
        send(**pack_error(error))
    else:
        send(done=True)
