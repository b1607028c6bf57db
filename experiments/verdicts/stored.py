"""What was run: the files of `experiments/results/`, as `fleetfit compare` leaves them (format 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field

from fleetfit import files
from fleetfit.errors import RunError, shown

Accuracy = Annotated[float, Field(allow_inf_nan=False)]
ROUNDS = "rounds"
_ENDS = {"first": 0, "last": -1}


class _Entry(pydantic.BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Curves(_Entry):
    """Accuracies on the way, in percent.

    Attributes:
        round: The evaluated rounds.
        global_: Accuracy of the largest model after each; None where it was not measured.
        per_exit: That of each exit.
    """

    round: list[int] = Field(default_factory=list)
    global_: list[float | None] = Field(default_factory=list, alias="global")
    per_exit: dict[str, list[float | None]] = Field(default_factory=dict)


class StoredLevel(_Entry):
    """What a level is, and costs.

    Attributes:
        level: Its number, as in `per_level`.
        parameters, multiply_adds: Its costs.
    """

    level: str
    parameters: float
    multiply_adds: float


class StoredRun(_Entry):
    """One run of a comparison.

    Attributes:
        row, setting, seed: Which it is.
        rounds: How many rounds it had.
        final: Its numbers by column: percent, rounds, or what the column says.
        per_level: Accuracy of each level, in percent.
        per_exit: Accuracy of each exit of the largest model, in percent.
        curves: Accuracies on the way.
        levels: What its levels are, if the file says it.
        digest: A hash of what it ended in.
    """

    row: str
    setting: str = ""
    seed: int
    rounds: int = 0
    final: dict[str, float | None] = Field(default_factory=dict)
    per_level: dict[str, Accuracy | None] = Field(default_factory=dict)
    per_exit: dict[str, Accuracy | None] = Field(default_factory=dict)
    curves: Curves = Field(default_factory=Curves)
    levels: list[StoredLevel] = Field(default_factory=list)
    digest: str | None = None

    @property
    def named(self) -> str:
        """How messages call it."""
        return ", ".join(filter(None, [f'row "{self.row}"', f'setting "{self.setting}"' * bool(self.setting),
                                       f"seed {self.seed}"]))  # fmt: skip


class StoredFile(_Entry):
    """One file of results.

    Attributes:
        format: The version of the format.
        file: The experiment's file.
        settings_of_file: What stands in it.
        commit: What was run.
        runs: The runs.
    """

    format: Literal[1]
    file: str
    settings_of_file: dict[str, Any] = Field(default_factory=dict)
    commit: str | None = None
    runs: Annotated[list[StoredRun], Field(min_length=1)]


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
        settings: What stands in its file.
        runs: Runs by (setting, row) and seed.
    """

    file: str
    sources: Sequence[str]
    settings: Mapping[str, Any]
    runs: Mapping[tuple[str, str], Mapping[int, StoredRun]]


def read_all(folder: Path) -> dict[str, ExperimentResults]:
    """Return what is stored in a folder, by the experiment's file.

    Raises:
        RunError: A file is none of format 1, holds a run that another one holds too, or the same experiment with other
            settings.
    """
    by_file: dict[str, list[tuple[str, StoredFile]]] = {}
    for path in sorted(folder.glob("*.json")):
        found = _read(path)
        by_file.setdefault(_below_experiments(path, found.file), []).append((path.name, found))
    return {file: _together(folder, file, group) for file, group in sorted(by_file.items())}


def _read(path: Path) -> StoredFile:
    try:
        return StoredFile.model_validate(files.json_of(files.read_text(path)))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(f"#{part + 1}" if isinstance(part, int) else str(part) for part in first["loc"]) or "it"
        raise RunError(
            f"{path}: {place}: {first['msg'].removeprefix('Input ')}, got {shown(repr(first['input']))}. It should be "
            "what `fleetfit compare` writes as results.json, in format 1."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is no file of results: {shown(error, 200)}.") from None


def _below_experiments(path: Path, file: str) -> str:
    parts = PurePosixPath(file.replace("\\", "/")).parts
    if "experiments" not in parts[:-1]:
        raise RunError(f'{path}: file: should be a file below experiments/, got "{shown(file)}".')
    last = len(parts) - 1 - parts[::-1].index("experiments")
    return "/".join(parts[last + 1 :])


def _together(folder: Path, file: str, group: Sequence[tuple[str, StoredFile]]) -> ExperimentResults:
    runs: dict[tuple[str, str], dict[int, StoredRun]] = {}
    whose: dict[tuple[str, str, int], str] = {}
    first, settings = group[0][0], comparable(group[0][1].settings_of_file)
    for name, found in group:
        other = differing(settings, comparable(found.settings_of_file))
        if other:
            raise RunError(
                f"{folder}: {first} and {name} hold results of experiments/{file} with other settings ({other}). Keep "
                "those of the file as it is."
            )
        for run in found.runs:
            key = (run.setting, run.row, run.seed)
            if key in whose:
                raise RunError(
                    f"{folder}: {whose[key]} and {name} both hold {run.named} of experiments/{file}. Remove one."
                )
            whose[key] = name
            runs.setdefault(key[:2], {})[run.seed] = run
    return ExperimentResults(file, [name for name, _ in group], group[0][1].settings_of_file, runs)


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without what two runs that are compared may differ in: rows, seeds, the name."""
    return {
        key: value for key, value in settings.items() if key not in ("name", "seed", "compare", "engine", "checkpoint")
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the sections in which two files differ, as text."""
    return ", ".join(sorted(key for key in {*one, *other} if one.get(key) != other.get(key)))


# ---- a number of a run -----------------------------------------------------------------------------------------------


def value_of(run: StoredRun, column: str) -> Value | None:
    """Return a number of a run; None where it has none.

    Args:
        run: The run.
        column: A column of its table; "rounds", the only one to a target; "level 2", "exit 3", "exit last".
    """
    if column == ROUNDS or column.startswith(f"{ROUNDS} to "):
        return _rounds(run, column)
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


def _rounds(run: StoredRun, column: str) -> Value | None:
    """Return the rounds to a target; those of the whole run, as the least, where it was not reached."""
    names = [name for name in run.final if name == column or (column == ROUNDS and name.startswith(f"{ROUNDS} to "))]
    if len(names) != 1:
        return None
    number = run.final[names[0]]
    if number is None:
        return Value(run.rounds, at_least=True) if run.rounds else None
    if run.curves.round and number <= run.curves.round[0]:
        return Value(number, problem=f'"{run.row}" has reached the target at its first evaluation')
    return Value(number)
