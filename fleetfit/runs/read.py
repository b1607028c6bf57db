"""Typed records of runs on disk, finished or not.

A folder may be untrusted. A missing or damaged file is left out of the record and listed in `problems`. Only a folder
without a run raises an error.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from fleetfit.errors import FleetFitError
from fleetfit.planner import Plan
from fleetfit.runs import RunFolder
from fleetfit.runs.schema import (
    NO_ACCURACIES,
    AccuracyRecord,
    EnvironmentRecord,
    EvaluationRecord,
    FleetRecord,
    NodesRecord,
    RoundRecord,
    SummaryRecord,
)
from fleetfit.runs.summary import make_levels

T = TypeVar("T")


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
