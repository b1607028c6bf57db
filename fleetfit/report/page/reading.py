"""What the files of run folders say, as far as they can be read: what is missing is left out, what is damaged is told.

A folder may come from anybody and from any version. So nothing here raises because of a file, but where there is no
folder of a run or of a comparison at all; values fit the models of `fleetfit.records.schema`.
"""

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fleetfit.errors import FleetFitError, RunError
from fleetfit.files import parse_path
from fleetfit.planner import Plan
from fleetfit.records import RunFolder
from fleetfit.report.recorded import class_counts_in, summary_in
from fleetfit.report.results import ComparisonResults, RunResult, read_results

_TUNING = "tune"
"""The folder in a comparison's with the runs that only chose values."""

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run folder that was read.

    Attributes:
        folder: Where it is.
        config: Its `config.toml`; empty where it cannot be read.
        text: The same as text.
        environment: Where it ran.
        fleet: Who its clients are.
        counts: Training samples [clients, classes] of the first clients.
        nodes: The nodes of a real fleet.
        metrics: The reports of its rounds.
        final: Its `summary.json`; empty where it is not finished.
        plan: Its levels, or None.
        wrong: What could not be read, in sentences.
    """

    folder: Path
    config: Mapping[str, Any]
    text: str
    environment: Mapping[str, Any]
    fleet: Mapping[str, Any]
    counts: Sequence[Sequence[int]]
    nodes: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    final: Mapping[str, Any]
    plan: Plan | None
    wrong: tuple[str, ...]

    @cached_property
    def private(self) -> bool:
        """Whether it withholds who took part, as `[privacy]` says."""
        told = any("privacy" in report for report in self.metrics) or "privacy" in self.final
        return told or "privacy" in self.config

    @property
    def secure(self) -> bool:
        """Whether it withholds what clients lost, as `[secure]` says."""
        return "secure" in self.config or any("secure" in report for report in self.metrics)

    @cached_property
    def norm(self) -> str:
        """The batch-norm policy of the headline."""
        if self.final:
            return str(self.final["norm"])
        found = (norm for m in self.metrics for norm in ("static", "batch") if norm in m.get("evaluate", {}))
        return next(found, "static")

    @cached_property
    def evaluated(self) -> list[tuple[int, Columns]]:
        """The rounds that were evaluated, with their columns."""
        return [(m["round"], m["evaluate"][self.norm]) for m in self.metrics if self.norm in m.get("evaluate", {})]

    @property
    def last(self) -> Columns:
        """The columns of the last evaluation; empty where there is none."""
        return self.evaluated[-1][1] if self.evaluated else {}

    def said(self, *keys: str, default: Any = "") -> Any:
        """Return a value of its configuration."""
        found: Any = self.config
        for key in keys:
            found = found.get(key, default) if isinstance(found, Mapping) else default
        return found

    @property
    def name(self) -> str:
        """The run's name, or its folder's."""
        return str(self.final.get("name") or self.said("name") or self.folder.resolve().name)

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.final.get("method") or self.said("method", "name") or "a method")

    @property
    def seed(self) -> int:
        """Its seed; 0 where nothing says it."""
        found = self.final.get("seed", self.said("seed", default=0))
        return found if type(found) is int else 0

    @property
    def summary(self) -> Mapping[str, Any]:
        """What `summary.json` says, or will say of the rounds so far: method, norm, levels, evaluate."""
        if self.final:
            return self.final
        levels = [] if self.plan is None else [
            {"level": one.name, "width": one.width, "depth": one.depth, "blocks": self.plan.blocks,
             "exits": list(one.exits), "parameters": one.parameters, "multiply_adds": one.multiply_adds,
             "clients": one.clients, "local": self.last.get("levels", {}).get(one.name, {}).get("local")}
            for one in self.plan.levels
        ]  # fmt: skip
        found = (m["evaluate"] for m in reversed(self.metrics) if self.norm in m.get("evaluate", {}))
        evaluated: Mapping[str, Any] = next(found, {})
        return {"method": self.method, "norm": self.norm, "levels": levels, "evaluate": evaluated,
                "local": self.last.get("local"), "global": self.last.get("global")}  # fmt: skip


def read_run(folder: str | Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """Return what a run folder says.

    Args:
        folder: The run folder.
        summary: What will be its `summary.json`, where that is not written yet.

    Raises:
        RunError: It is no run folder.
    """
    files = RunFolder.open(folder)
    wrong: list[str] = []

    def of(name: str, read: Callable[[], Any], absent: Any) -> Any:
        try:
            return read() if name == "metrics.jsonl" or files.has(name) else absent
        except (FleetFitError, ValueError, RecursionError) as error:
            wrong.append(f"{name} could not be read, and what it says is left out here: {error}")
            return absent

    metrics = of("metrics.jsonl", files.metrics, [])
    if not wrong and (damage := of("metrics.jsonl", files.damaged_end, "")):
        wrong.append(f"metrics.jsonl: {damage}, and what it says is left out here.")
    text = of("config.toml", lambda: files.text("config.toml"), "")
    config = of("config.toml", lambda: tomllib.loads(text), {})
    return RunRecord(
        folder=files.path,
        config=config,
        text=text,
        environment=of("environment.json", lambda: _table(files, "environment.json"), {}),
        fleet=of("fleet.json", lambda: _table(files, "fleet.json"), {}),
        counts=of("fleet.json", lambda: class_counts_in(files), []),
        nodes=of("nodes.json", lambda: _table(files, "nodes.json"), {}),
        metrics=metrics,
        final=summary if summary is not None else of("summary.json", lambda: summary_in(files), {}),
        plan=of("plan.toml", lambda: Plan.from_toml(files.text("plan.toml")), None),
        wrong=tuple(dict.fromkeys(wrong)),
    )


def _table(files: RunFolder, name: str) -> Mapping[str, Any]:
    found = files.json(name)
    if not isinstance(found, Mapping):
        raise ValueError("it is no table")
    return found


# ---- runs of one kind, and folders of many -----------------------------------------------------------------------


@dataclass(frozen=True)
class SeedGroup:
    """The runs of one row in one setting, by seed.

    Attributes:
        row: What differs in the method: the label of the table's line.
        setting: What else differs; "" where nothing does.
        runs: One run for each seed.
    """

    row: str
    setting: str
    runs: Sequence[tuple[int, RunRecord]]


@dataclass(frozen=True)
class ComparisonRecord:
    """The folder of a comparison that was read.

    Attributes:
        folder: Where it is.
        results: Its `results.json`.
        entries: Its `compare.json`; empty where the comparison is not finished.
        notes: What stands below the table in `table.md`.
        groups: Its runs, row by row and setting by setting.
        wrong: What could not be read, in sentences.
    """

    folder: Path
    results: ComparisonResults
    entries: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    groups: Sequence[SeedGroup]
    wrong: tuple[str, ...]


def is_comparison(folder: str | Path) -> bool:
    """Tell whether a folder is a comparison's."""
    path = parse_path(folder)
    return not (path / "config.toml").exists() and (path / "results.json").is_file()


def read_comparison(folder: str | Path) -> ComparisonRecord:
    """Return what the folder of a comparison says, perhaps of one that is not finished.

    Raises:
        RunError: It has no `results.json` that can be read.
    """
    path = parse_path(folder)
    files = RunFolder(path)
    results = read_results(path / "results.json")
    wrong: list[str] = []
    entries: list[Mapping[str, Any]] = []
    notes: list[str] = []
    try:
        found = files.json("compare.json") if files.has("compare.json") else []
        entries = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
        notes = notes_of(files.text("table.md")) if files.has("table.md") else []
    except RunError as error:
        wrong.append(f"what it says is left out here: {error}")
    groups: dict[tuple[str, str], list[tuple[int, RunRecord]]] = {}
    for one, record in _runs_of(path, results.runs):
        groups.setdefault((one.row, one.setting), []).append((one.seed, record))
        wrong += [f"{one.row}, seed {one.seed}: {sentence}" for sentence in record.wrong]
    return ComparisonRecord(
        path, results, entries, notes, [SeedGroup(*key, runs) for key, runs in groups.items()], tuple(wrong)
    )


def _runs_of(folder: Path, results: Sequence[RunResult]) -> Iterator[tuple[RunResult, RunRecord]]:
    """Yield the runs whose folders are there: those with the configuration of which a result has the checksum."""
    there: dict[str, list[Path]] = {}
    for config in sorted(folder.glob("*/**/config.toml")):
        if config.relative_to(folder).parts[0] != _TUNING and config.is_file():
            there.setdefault(hashlib.sha256(config.read_bytes()).hexdigest(), []).append(config.parent)
    for one in results:
        places = there.get(one.digest, [])
        if places:
            yield one, read_run(places.pop(0) if len(places) > 1 else places[0])


def notes_of(markdown: str) -> list[str]:
    """Return the sentences below the first table of a `table.md`."""
    found, table = [], False
    for line in markdown.splitlines():
        if line.startswith("|"):
            table = True
        elif table and line.startswith("**"):
            break
        elif table and line.strip():
            found.append(line.strip())
    return found
