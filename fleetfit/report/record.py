"""Typed records of runs and comparisons on disk, finished or not, and the final numbers of a run.

A folder may be untrusted, or from another version. A missing or damaged file is left out of the record and listed in
`problems`. Only a folder without a run or a comparison raises an error.
"""

import hashlib
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from fleetfit.errors import FleetFitError, RunError
from fleetfit.files import parse_path
from fleetfit.planner import Plan
from fleetfit.records import RunFolder
from fleetfit.records.schema import (
    NO_ACCURACIES,
    AccuracyRecord,
    ComparisonResults,
    EntryRecord,
    EnvironmentRecord,
    EvaluationRecord,
    FleetRecord,
    LevelRecord,
    NodesRecord,
    RoundRecord,
    RunResult,
    SummaryRecord,
)

_TUNING = "tune"
"""The folder of a comparison's tuning runs."""

T = TypeVar("T")
_MOST_REASONS = 5  # of failed jobs


# ---- the final numbers of a run --------------------------------------------------------------------------------------


def make_summary(
    description: Mapping[str, Any], plan: Plan, reports: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the final numbers of a run, as in `summary.json`.

    Args:
        description: Name, method, model, data, seed, norm (the main batch-norm policy) and score (the name of the
            task's accuracy).
        plan: The levels.
        reports: The reports of all rounds.
        notes: Notes for the user, such as on clients that did not take part.
    """
    rounds = [RoundRecord.load(report) for report in reports]
    is_private = any(record.privacy is not None for record in rounds)
    columns: Mapping[str, Any] = next((one["evaluate"] for one in reversed(reports) if "evaluate" in one), {})
    headline: Mapping[str, Any] = columns.get(description["norm"], {})
    simulated = [record.simulated_s for record in rounds if record.simulated_s is not None]
    seconds, reasons = Counter[str](), Counter[str]()
    for record in rounds:
        seconds.update(record.seconds_of)
        reasons.update(failure.reason for failure in record.list_failures())
    return {
        "format": SummaryRecord.FORMAT,
        **description,
        "rounds": rounds[-1].round if rounds else 0,
        "levels": [level.dump() for level in make_levels(plan, headline.get("levels", {}))],
        "global": headline.get("global"),
        "local": headline.get("local"),
        "evaluate": {key: _drop_clients(value) for key, value in columns.items()},
        "bytes_down": None if is_private else sum(record.bytes_down or 0 for record in rounds),
        "waste": None if is_private else sum(record.waste for record in rounds) / max(1, len(rounds)),
        "bytes_up": None if is_private else sum(record.bytes_up or 0 for record in rounds),
        "failures": None if is_private else reasons.total(),
        "empty_rounds": None if is_private else sum(not record.train.clients for record in rounds),
        "seconds": sum(record.seconds for record in rounds),
        "seconds_of": dict(seconds),
        "multiply_adds": None if is_private else sum(record.multiply_adds or 0 for record in rounds),
        "simulated_s": sum(simulated) if simulated else None,
        "left_out": list(plan.left_out),
        "notes": list(notes),
        **({"failure_reasons": dict(reasons.most_common(_MOST_REASONS))} if reasons and not is_private else {}),
        **_make_excluded_shares(rounds),
        **({"privacy": reports[-1]["privacy"]} if reports and "privacy" in reports[-1] else {}),
    }


def make_levels(plan: Plan, accuracies: Mapping[str, Any]) -> list[LevelRecord]:
    """Return the levels of a plan, each with the accuracy of its own clients.

    Args:
        plan: The plan.
        accuracies: The levels of an evaluation, as in `metrics.jsonl`.
    """
    return [
        LevelRecord(
            level=level.name, width=level.width, depth=level.depth, blocks=plan.blocks, exits=list(level.exits),
            parameters=level.parameters, multiply_adds=level.multiply_adds, clients=level.clients,
            local=accuracies.get(level.name, {}).get("local"),
        )
        for level in plan.levels
    ]  # fmt: skip


def _drop_clients(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "per_client"} if isinstance(value, Mapping) else value


def _make_excluded_shares(rounds: Sequence[RoundRecord]) -> dict[str, float | None]:
    """Return the shares of hostile and honest clients' updates that a defence excluded, over all rounds.

    Returns:
        "hostile_excluded", "honest_excluded", and by level "honest_excluded_1"; empty if no client is hostile and the
        method excludes no updates.
    """
    updates, left_out = Counter[str](), Counter[str]()
    for received in (record.received for record in rounds if record.received is not None):
        updates.update({"hostile": received.sent.hostile, **received.sent.honest})
        left_out.update({"hostile": received.left_out.hostile, **received.left_out.honest})
    if not updates:
        return {}
    levels = sorted(updates.keys() - {"hostile"}, key=int)
    honest = sum(updates[level] for level in levels)
    return {
        "hostile_excluded": left_out["hostile"] / updates["hostile"] if updates["hostile"] else None,
        "honest_excluded": sum(left_out[level] for level in levels) / honest if honest else None,
        **{f"honest_excluded_{level}": left_out[level] / updates[level] for level in levels},
    }


def add_seconds(report: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return the report of a round, or a summary, with the wall time of later activities."""
    total = Counter(report["seconds_of"])
    total.update(seconds)
    return {**report, "seconds": report["seconds"] + sum(seconds.values()), "seconds_of": dict(total)}


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """A run folder.

    Attributes:
        folder: The folder.
        config: `config.toml`; empty if it cannot be read.
        config_text: `config.toml` as text.
        environment: The environment in which the run started.
        fleet: Its clients; None if `fleet.json` cannot be read.
        nodes: The nodes of a real fleet.
        rounds: The reports of its rounds.
        plan: Its levels; None if `plan.toml` cannot be read.
        stored_summary: `summary.json`; None if the run is not finished.
        problems: Sentences on unreadable files.
    """

    folder: Path
    config: Mapping[str, Any]
    config_text: str
    environment: EnvironmentRecord
    fleet: FleetRecord | None
    nodes: NodesRecord
    rounds: Sequence[RoundRecord]
    plan: Plan | None
    stored_summary: SummaryRecord | None
    problems: tuple[str, ...]

    @property
    def is_finished(self) -> bool:
        """Whether the run has its final numbers."""
        return self.stored_summary is not None

    @cached_property
    def is_private(self) -> bool:
        """Whether the run withholds participation, as with `[privacy]`."""
        reported = any(record.privacy is not None for record in self.rounds)
        return reported or "privacy" in self.config or bool(self.stored_summary and self.stored_summary.privacy)

    @property
    def is_secure(self) -> bool:
        """Whether the run withholds the clients' losses, as with `[secure]`."""
        return "secure" in self.config or any(record.secure is not None for record in self.rounds)

    @cached_property
    def norm(self) -> str:
        """The main batch-norm policy: "static" or "batch"."""
        if self.stored_summary is not None:
            return self.stored_summary.norm
        evaluations = (record.evaluate for record in self.rounds if record.evaluate is not None)
        return next((norm for one in evaluations for norm in ("static", "batch") if one.accuracies(norm)), "static")

    @cached_property
    def evaluations(self) -> list[tuple[int, AccuracyRecord]]:
        """The evaluated rounds, with accuracies by the main batch-norm policy."""
        pairs = [(one.round, one.evaluate.accuracies(self.norm)) for one in self.rounds if one.evaluate is not None]
        return [(number, accuracies) for number, accuracies in pairs if accuracies is not None]

    @property
    def last(self) -> AccuracyRecord:
        """The accuracies of the last evaluation; empty if there is none."""
        return self.evaluations[-1][1] if self.evaluations else NO_ACCURACIES

    @property
    def class_counts(self) -> Sequence[Sequence[int]]:
        """Training samples [clients, classes] of the first clients; empty without classes."""
        return (self.fleet.first.class_counts or []) if self.fleet is not None else []

    @property
    def class_names(self) -> Sequence[str]:
        """A name for each class of `class_counts`; its number where the run has no names."""
        classes = len(self.class_counts[0]) if self.class_counts else 0
        names = self.fleet.first.class_names if self.fleet is not None else []
        return names if len(names) == classes else [str(c) for c in range(classes)]

    def get_setting(self, *keys: str, default: Any = "") -> Any:
        """Return a value of the configuration by its keys."""
        value: Any = self.config
        for key in keys:
            value = value.get(key, default) if isinstance(value, Mapping) else default
        return value

    @property
    def name(self) -> str:
        """The name of the run, or of its folder."""
        return self.summary.name or self.folder.resolve().name

    @property
    def method(self) -> str:
        """The method's name."""
        return self.summary.method or "a method"

    @property
    def seed(self) -> int:
        """The run's seed; 0 if unknown."""
        return self.summary.seed or 0

    @cached_property
    def summary(self) -> SummaryRecord:
        """The final numbers, or those of the rounds so far."""
        if self.stored_summary is not None:
            return self.stored_summary
        evaluate = next(
            (one.evaluate for one in reversed(self.rounds) if one.evaluate and one.evaluate.accuracies(self.norm)),
            EvaluationRecord(),
        )
        accuracies = {name: {"local": level.local} for name, level in self.last.levels.items()}
        seed = self.get_setting("seed", default=0)
        return SummaryRecord.model_construct(
            name=str(self.get_setting("name")),
            method=str(self.get_setting("method", "name")),
            model=str(self.get_setting("model", "name")),
            data=str(self.get_setting("data", "name")),
            seed=seed if type(seed) is int else 0,
            norm=self.norm,
            rounds=len(self.rounds),
            levels=[] if self.plan is None else make_levels(self.plan, accuracies),
            global_=self.last.global_,
            local=self.last.local,
            evaluate=evaluate,
            bytes_down=self.sum_bytes("bytes_down"),
            bytes_up=self.sum_bytes("bytes_up"),
            waste=None,
            failures=None,
            seconds=sum(record.seconds for record in self.rounds),
            notes=[],
        )

    def sum_bytes(self, key: Literal["bytes_down", "bytes_up"]) -> int | None:
        """Return the bytes of all rounds; None if a round withholds them."""
        values: list[int | None] = [getattr(record, key) for record in self.rounds]
        counts = [value for value in values if value is not None]
        return sum(counts) if counts and len(counts) == len(values) and not self.is_private else None


def read_run(folder: str | Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """Return the record of a run folder.

    Args:
        folder: The run folder.
        summary: The content of `summary.json`, if it is not written yet.

    Raises:
        RunError: The folder is not a run folder.
    """
    files = RunFolder.open(folder)
    problems: list[str] = []

    def read(name: str, load: Callable[[], T], default: T) -> T:
        try:
            return load() if name == "metrics.jsonl" or files.has(name) else default
        except (FleetFitError, ValueError, RecursionError) as error:
            problems.append(f"{name} cannot be read and is left out: {error}")
            return default

    rounds = read("metrics.jsonl", files.read_rounds, list[RoundRecord]())
    if not problems and (damage := read("metrics.jsonl", files.find_damaged_end, "")):
        problems.append(f"metrics.jsonl: {damage} and left out.")
    text = read("config.toml", lambda: files.text("config.toml"), "")
    return RunRecord(
        folder=files.path,
        config=read("config.toml", lambda: tomllib.loads(text), {}),
        config_text=text,
        environment=read(
            "environment.json", lambda: files.read("environment.json", EnvironmentRecord), EnvironmentRecord()
        ),
        fleet=read("fleet.json", lambda: files.read("fleet.json", FleetRecord), None),
        nodes=read("nodes.json", lambda: files.read("nodes.json", NodesRecord), NodesRecord()),
        rounds=rounds,
        plan=read("plan.toml", lambda: Plan.from_toml(files.text("plan.toml")), None),
        stored_summary=(
            read("summary.json", files.read_summary, None) if summary is None else SummaryRecord.load(summary)
        ),
        problems=tuple(dict.fromkeys(problems)),
    )


# ---- rows and comparisons --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowRecord:
    """The runs of one row in one setting.

    Attributes:
        row: Label of the row.
        setting: Label of the setting; "" if there is only one.
        runs: Seeds and runs.
    """

    row: str
    setting: str
    runs: Sequence[tuple[int, RunRecord]]

    @property
    def label(self) -> str:
        """The labels of row and setting."""
        return ", ".join(filter(None, [self.row, self.setting]))

    @property
    def records(self) -> list[RunRecord]:
        """The runs."""
        return [run for _, run in self.runs]

    @property
    def is_private(self) -> bool:
        """Whether a run withholds participation."""
        return any(run.is_private for run in self.records)


def explain_partial(runs: Sequence[RunRecord]) -> list[str]:
    """Return a sentence on the evaluations that measured a part of clients and samples; empty if there are none."""
    parts = [one.evaluate.partial for run in runs for one in run.rounds if one.evaluate and one.evaluate.partial]
    if not parts:
        return []
    clients, samples = (
        f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"
        for counts in ([part.clients for part in parts], [part.samples for part in parts])
    )
    part = f"{clients} clients with {samples} samples" if any(part.clients for part in parts) else f"{samples} samples"
    return [f"Evaluations before the last one measure the same {part} each time; the last one measures all."]


@dataclass(frozen=True)
class ComparisonRecord:
    """The folder of a comparison.

    Attributes:
        folder: The folder.
        results: Its `results.json`.
        entries: Its `compare.json`; empty if the comparison is not finished.
        notes: The sentences below the table in `table.md`.
        rows: Its runs, by row and setting.
        problems: Sentences on unreadable files.
    """

    folder: Path
    results: ComparisonResults
    entries: Sequence[EntryRecord]
    notes: Sequence[str]
    rows: Sequence[RowRecord]
    problems: tuple[str, ...]


def is_comparison(folder: str | Path) -> bool:
    """Return whether a folder is a comparison's."""
    path = parse_path(folder)
    return not (path / "config.toml").exists() and (path / "results.json").is_file()


def read_comparison(folder: str | Path) -> ComparisonRecord:
    """Return the record of a comparison's folder.

    Raises:
        RunError: It has no readable `results.json`.
    """
    path = parse_path(folder)
    files = RunFolder(path)
    results = read_results(path / "results.json")
    problems: list[str] = []
    entries: list[EntryRecord] = []
    notes: list[str] = []
    try:
        entries = read_entries(files)
        notes = find_notes(files.text("table.md")) if files.has("table.md") else []
    except RunError as error:
        problems.append(f"It is left out: {error}")
    rows: dict[tuple[str, str], list[tuple[int, RunRecord]]] = {}
    for result, record in _iter_runs(path, results.runs):
        rows.setdefault((result.row, result.setting), []).append((result.seed, record))
        problems += [f"{result.row}, seed {result.seed}: {sentence}" for sentence in record.problems]
    records = [RowRecord(*key, runs) for key, runs in rows.items()]
    return ComparisonRecord(path, results, entries, notes, records, tuple(problems))


def read_results(path: str | Path) -> ComparisonResults:
    """Read the results of a comparison from a file of `fleetfit compare`.

    Args:
        path: `results.json` of a comparison's folder, or a copy by `--record`.

    Raises:
        RunError: The file cannot be read, has no results, or has an unknown format.
    """
    return ComparisonResults.read(Path(path))


def read_entries(files: RunFolder) -> list[EntryRecord]:
    """Return the runs of `compare.json`; empty if the comparison is not finished.

    Raises:
        RunError: The file is damaged.
    """
    if not files.has("compare.json"):
        return []
    try:
        return TypeAdapter(list[EntryRecord]).validate_python(files.json("compare.json"))
    except ValidationError:
        path = files.path / "compare.json"
        raise RunError(
            f"{path} is damaged. Run the same fleetfit compare command to write it again; finished runs are not "
            "repeated.",
            path=path,
        ) from None


def _iter_runs(folder: Path, results: Sequence[RunResult]) -> Iterator[tuple[RunResult, RunRecord]]:
    """Yield the runs whose folders exist and whose configuration has the result's checksum."""
    folders: dict[str, list[Path]] = {}
    for config in sorted(folder.glob("*/**/config.toml")):
        if config.relative_to(folder).parts[0] != _TUNING and config.is_file():
            folders.setdefault(hashlib.sha256(config.read_bytes()).hexdigest(), []).append(config.parent)
    for result in results:
        candidates = folders.get(result.digest, [])
        if candidates:
            yield result, read_run(candidates.pop(0) if len(candidates) > 1 else candidates[0])


def find_notes(markdown: str) -> list[str]:
    """Return the sentences below the first table of a `table.md`."""
    notes, has_table = [], False
    for line in markdown.splitlines():
        if line.startswith("|"):
            has_table = True
        elif has_table and line.startswith("**"):
            break
        elif has_table and line.strip():
            notes.append(line.strip())
    return notes
