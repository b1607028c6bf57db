"""`results.json` of a comparison: written when it begins to train and after each run that is finished.

What is interrupted has in it what is finished. A copy with the name of the run file may go to another folder, where
results are kept and committed; only a finished comparison is copied.
"""

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.api.comparison.planned import ComparedRun, ComparisonPlan
from fleetfit.api.results import Run
from fleetfit.config import to_table
from fleetfit.config.reading import checked, leaves, merged, value_at
from fleetfit.config.writing import make_plain
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.files import write_text
from fleetfit.report.columns import final_numbers
from fleetfit.report.results import (
    ComparisonResults,
    LevelResult,
    RunResult,
    TuningResult,
    curves_of,
    percent_of,
    read_results,
    to_json,
)

NAME = "results.json"
_SECTIONS = ("data", "model", "peft", "fleet", "method", "local", "cohort", "attack", "engine", "evaluate")

Place = tuple[str, str, int]
"""Row, setting and seed."""


class ResultsFile:
    """Collects what is finished, and writes the file.

    Args:
        plan: What is compared.
        file: The run file.
        folder: The comparison's folder.
        against: Label of the row that the others are measured against.
    """

    def __init__(self, plan: ComparisonPlan, file: str | Path, folder: Path, against: str) -> None:
        self._plan, self._file, self._folder, self._against = plan, Path(file), folder, against
        self._order = [(entry.row, entry.setting, entry.seed) for entry in plan.entries()]
        self._runs: dict[Place, RunResult] = {}
        self._levels: dict[tuple[str, str], list[LevelResult]] = {}
        self._tuning: list[TuningResult] = []
        self._said: list[Mapping[str, Any]] = []

    def add(self, entry: ComparedRun, found: Run, tuned: Mapping[str, Any]) -> None:
        """Take a finished run in; nothing is written."""
        place = (entry.row, entry.setting, entry.seed)
        plan, overrides = self._plan, self._seen(self._own_keys(entry))
        self._runs[place] = run_result(entry, found, overrides, tuned, plan.targets, plan.section.target_on)
        self._levels.setdefault(place[:2], levels_of(entry, found))
        self._said.append(_environment_of(found))

    def add_tuning(self, results: Sequence[TuningResult], runs: Sequence[Run]) -> None:
        """Take in what rows got, and the runs that tried; nothing is written."""
        self._tuning += results
        self._said += [_environment_of(found) for found in runs]

    def write(self) -> None:
        """Write what is finished into the comparison's folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self.path, to_json(self.results))

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._folder / NAME

    @property
    def results(self) -> ComparisonResults:
        """What is finished so far, in the order of the table."""
        done = [place for place in self._order if place in self._runs]
        said = self._said
        table = to_table(checked(merged(self._plan.base, self._plan.change)))
        return ComparisonResults(
            name=self._file.stem,
            file=_from_here(self._file),
            versions={name: _all(said, name) or "unknown" for name in ("fleetfit", "torch", "python")},
            commit=_all(said, "fleetfit_commit"),
            machine={"processor": _all(said, "processor") or "unknown", "cores": next(_cores(said), 0)},
            against=self._against,
            settings=self._seen({key: table[key] for key in _SECTIONS if key in table}),
            runs=tuple(self._runs[place] for place in done),
            tuning=tuple(self._tuning),
            levels=tuple(one for key in dict.fromkeys(place[:2] for place in done) for one in self._levels[key]),
        )

    def _own_keys(self, entry: ComparedRun) -> dict[str, Any]:
        """Return what the row and the setting of a run set, by dotted key."""
        numbers = {("row", name): i for i, name in enumerate(self._plan.rows, 1)}
        row = self._plan.changes.get(("row", numbers["row", entry.row]), {})
        setting = self._plan.settings[entry.setting]
        return {key: make_plain(value_at(table, key)[0]) for table in (row, setting) for key in leaves(table)}

    def _seen(self, value: Any) -> Any:
        """Return values with the paths below the run file's folder, or the working folder, as seen from the file."""
        if isinstance(value, Mapping):
            return {self._seen(key): self._seen(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._seen(inner) for inner in value]
        if isinstance(value, str) and Path(value).is_absolute():
            home = self._file.resolve().parent
            if any(Path(value).is_relative_to(root) for root in (home, Path.cwd())):
                return os.path.relpath(value, home)
        return value


def run_result(
    entry: ComparedRun,
    found: Run,
    overrides: Mapping[str, Any],
    tuned: Mapping[str, Any],
    targets: Sequence[float],
    target_on: str,
) -> RunResult:
    """Return the result of a finished run."""
    summary, metrics = found.summary, found.metrics
    columns = summary["evaluate"].get(summary["norm"], {})
    levels = {name: percent_of(level["local"], 4) for name, level in columns.get("levels", {}).items()}
    return RunResult(
        row=entry.row,
        setting=entry.setting,
        seed=entry.seed,
        overrides=overrides,
        tuned=tuned,
        rounds=summary["rounds"],
        seconds=round(summary["seconds"], 2),
        training_seconds=_rounded(summary.get("seconds_of", {}).get("training")),
        speed=found.experiment.engine.speed,
        digest=sha256((found.folder / "config.toml").read_bytes()).hexdigest(),
        final=final_numbers(summary, metrics, targets, target_on),
        per_level={name: accuracy for name, accuracy in levels.items() if accuracy is not None},
        per_exit={str(i): round(100 * share, 4) for i, share in enumerate(columns.get("exits", ()), 1)},
        curves=curves_of(metrics, summary["norm"]),
    )


def levels_of(entry: ComparedRun, found: Run) -> list[LevelResult]:
    """Return what the levels of a finished run are, and cost."""
    names = ("level", "width", "depth", "blocks", "parameters", "multiply_adds")
    return [
        LevelResult(entry.row, entry.setting, **{name: level[name] for name in names})
        for level in found.summary["levels"]
    ]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


def _environment_of(found: Run) -> Mapping[str, Any]:
    """Return what a run's folder says of where it was run; folders of earlier versions, and damaged ones, say less."""
    try:
        said = found.files.json("environment.json")
    except FleetFitError:
        return {}
    return said if isinstance(said, Mapping) else {}


def _all(said: Sequence[Mapping[str, Any]], key: str) -> str | None:
    """Return what all runs say, or each thing that some say."""
    return ", ".join(dict.fromkeys(str(one[key]) for one in said if one.get(key))) or None


def _cores(said: Sequence[Mapping[str, Any]]) -> Any:
    return (one["processors"] for one in said if type(one.get("processors")) is int)


def _from_here(file: Path) -> str:
    """Return a path as it is seen from the working folder; its name where it lies elsewhere."""
    path = file.resolve()
    return path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.name


# ---- the copy that is kept -------------------------------------------------------------------------------------------


def record_path(file: str | Path, folder: str | Path) -> Path:
    """Return where the results of a run file are kept in a folder.

    Raises:
        ConfigError: There is something else of that name.
    """
    path = files.expand_path(folder) / f"{Path(file).stem}.json"
    if path.exists() or path.is_symlink():
        try:
            read_results(path)
        except FleetFitError as error:
            raise ConfigError(
                f"--record would write to {path}, where there is something else: {error} Move it away, or choose "
                "another folder."
            ) from None
    return path


def keep(results: ComparisonResults, path: Path) -> None:
    """Write the results of a finished comparison where they are kept.

    Raises:
        ConfigError: Nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_user_file(path, to_json(results))
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path}: {error.strerror}.") from None
