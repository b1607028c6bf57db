"""What was run: the files of `experiments/results/`, as `fleetfit compare --record` leaves them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from fleetfit.errors import RunError, truncate
from fleetfit.report.columns import is_rounds, number_name
from fleetfit.runs.comparison import read_results
from fleetfit.runs.schema import ComparisonResults, LevelResult, RunResult, TuningResult

ROUNDS = "rounds"
_REACHED = "rounds_to_"
_ENDS = {"first": 0, "last": -1}
_MAY_DIFFER = ("method", "peft", "engine", "checkpoint")
"""Sections that do not keep two runs from being compared: rows set the first two, and the others change no numbers, but
for the rounding of `engine.speed = "fast"`."""


@dataclass(frozen=True)
class Value:
    """A number of a run.

    Attributes:
        number: The number.
        at_least: The true one is this or more, because the run ended before it was known.
        problem: Why nothing can be concluded from it; empty where something can.
    """

    number: float
    at_least: bool = False
    problem: str = ""


@dataclass(frozen=True)
class ExperimentResults:
    """All that was stored of one experiment.

    Attributes:
        file: Its file, below `experiments/`.
        sources: The names of the files of results.
        settings: What stands in its file, with every default.
        runs: Runs by (setting, row) and seed.
        levels: The levels of each (setting, row); empty where they were not stored.
        tuning: What was tried for each (setting, row), and chosen; empty where nothing was.
    """

    file: str
    sources: Sequence[str]
    settings: Mapping[str, Any]
    runs: Mapping[tuple[str, str], Mapping[int, RunResult]]
    levels: Mapping[tuple[str, str], Sequence[LevelResult]] = field(default_factory=dict)
    tuning: Mapping[tuple[str, str], TuningResult] = field(default_factory=dict)

    @property
    def targets(self) -> list[str]:
        """The names of rounds to a target that at least one run has reached."""
        found = {name for by_seed in self.runs.values() for run in by_seed.values() for name in run.final}
        return sorted(name for name in found if name.startswith(_REACHED))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_all(folder: Path) -> dict[str, ExperimentResults]:
    """Return what is stored in a folder, by the experiment's file.

    Raises:
        RunError: A file is none of results, holds a run that another one holds too, or the same experiment with other
            settings.
    """
    by_file: dict[str, list[tuple[str, ComparisonResults]]] = {}
    for path in sorted(folder.glob("*.json")):
        found = read_results(path)
        by_file.setdefault(_below_experiments(path, found.file), []).append((path.name, found))
    return {file: _together(folder, file, group) for file, group in sorted(by_file.items())}


def _below_experiments(path: Path, file: str) -> str:
    parts = PurePosixPath(file).parts
    if "experiments" not in parts[:-1]:
        raise RunError(
            f'{path}: file should be a path through experiments/, got "{truncate(file)}". Start the comparison from '
            "the repository's folder."
        )
    last = len(parts) - 1 - parts[::-1].index("experiments")
    return "/".join(parts[last + 1 :])


def _together(folder: Path, file: str, group: Sequence[tuple[str, ComparisonResults]]) -> ExperimentResults:
    """Put the files of one experiment together; each may hold some of its rows or seeds.

    Raises:
        RunError: They do not fit together, or the seeds of a row have different numbers of rounds.
    """
    runs: dict[tuple[str, str], dict[int, RunResult]] = {}
    levels: dict[tuple[str, str], list[LevelResult]] = {}
    tuning: dict[tuple[str, str], TuningResult] = {}
    whose: dict[tuple[str, str, int], str] = {}
    first, settings = group[0][0], group[0][1].settings
    for name, found in group:
        other = differing(settings, found.settings)
        if other:
            raise RunError(
                f"{folder}: {first} and {name} hold results of experiments/{file} with other settings ({other}). Keep "
                "those of the file as it is."
            )
        for run in found.runs:
            key = (run.setting, run.row, run.seed)
            if key in whose:
                said = ", ".join([f'row "{run.row}"', *([f'setting "{run.setting}"'] if run.setting else [])])
                raise RunError(
                    f"{folder}: {whose[key]} and {name} both hold {said}, seed {run.seed} of experiments/{file}. "
                    "Remove one."
                )
            seeds = runs.setdefault(key[:2], {})
            rounds = next(iter(seeds.values()), run).rounds
            if rounds != run.rounds and not _may_end_early(found, run):
                raise RunError(
                    f'{folder}: of row "{run.row}" of experiments/{file}, seed {run.seed} in {name} has {run.rounds} '
                    f"rounds, and another seed {rounds}. Store seeds of the same number of rounds."
                )
            whose[key] = name
            seeds[run.seed] = run
        for pair in dict.fromkeys((level.setting, level.row) for level in found.levels):
            levels[pair] = [level for level in found.levels if (level.setting, level.row) == pair]
        tuning |= {(one.setting, one.row): one for one in found.tuning}
    return ExperimentResults(file, [name for name, _ in group], settings, runs, levels, tuning)


def _may_end_early(results: ComparisonResults, run: RunResult) -> bool:
    """Return whether early stopping may end a run before its last round."""
    return "evaluate.patience" in run.overrides or results.settings.get("evaluate", {}).get("patience") is not None


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the sections in which two files' settings differ, but for those that may, as text."""
    keys = {*one, *other} - set(_MAY_DIFFER)
    return ", ".join(sorted(key for key in keys if _that_counts(one, key) != _that_counts(other, key)))


def _that_counts(settings: Mapping[str, Any], key: str) -> Any:
    """Return a section; that of the evaluation without how often it is done on the way."""
    found = settings.get(key)
    if key != "evaluate" or not isinstance(found, Mapping):
        return found
    return {name: value for name, value in found.items() if name != "every"}


# ---- a number of a run -----------------------------------------------------------------------------------------------


def value_of(results: ExperimentResults, run: RunResult, column: str) -> Value | None:
    """Return a number of a run; None where it has none.

    Args:
        results: The experiment that it belongs to.
        run: The run.
        column: A column of its table; "rounds", the only one to a target; "level 2", "exit 3", "exit last"; or the
            name of any other of its final numbers.
    """
    if column == ROUNDS or is_rounds(column):
        return _rounds(results, run, column)
    kind, _, which = column.partition(" ")
    if kind in ("level", "exit"):
        found = run.per_level if kind == "level" else run.per_exit
        if which in _ENDS and found:
            which = sorted(found, key=_by_number)[_ENDS[which]]
        number = found.get(which)
    else:
        number = run.final.get(column)
    return None if number is None else Value(number)


def _by_number(key: str) -> tuple[float, str]:
    return (float(key), "") if key.replace(".", "", 1).isdecimal() else (float("inf"), key)


def _rounds(results: ExperimentResults, run: RunResult, column: str) -> Value | None:
    """Return the rounds to a target; those of the whole run, as the least, where it did not reach it.

    A run that did not has no such number, so that the others say which targets there were.
    """
    names = results.targets if column == ROUNDS else [number_name(column)]
    if len(names) > 1:
        return None
    number = run.final.get(names[0]) if names else None
    if number is None:
        return Value(run.rounds, at_least=True) if run.rounds else None
    evaluated = run.curves.round
    if evaluated and number <= evaluated[0]:
        return Value(number, problem=f'row "{run.row}" has reached the target at its first evaluation')
    return Value(number)
