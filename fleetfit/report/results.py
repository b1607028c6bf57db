"""The results of a comparison as one small JSON file, made to be committed: format 1, written and read here.

    {"format": 1, "name", "file", "versions", "commit", "machine", "against", "settings_of_file",
     "runs": [{"row", "setting", "seed", "overrides", "tuned", "rounds", "seconds", "training_seconds", "speed",
               "digest", "final", "per_level", "per_exit", "curves"}],
     "levels": [{"row", "setting", "level", "width", "depth", "blocks", "parameters", "multiply_adds"}],
     "tuning": [{"row", "setting", "chosen", "candidates": [{"values", "score", "seed"}]}]}

Accuracies are in percent. What was not measured is absent. Every run is one line, so that a difference between two
versions of a file is small; curves are thinned, the last point kept, so that a large table still is a small file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import RunError, escape_controls
from fleetfit.records import to_json_value
from fleetfit.records.schema import InvalidRecord, ResultsRecord

FORMAT = 1
"""Version of the file."""
MOST_POINTS = 20
"""Points of a curve at most."""
SMALL_BYTES = 60_000
"""A file above this size gets fewer points in its curves, down to `_FEWEST`."""
_FEWEST = 5

Curves = Mapping[str, Any]
"""Numbers by name, one for each evaluated round: `round`, `local`, `global`, `loss`; `per_exit` holds one list for each
exit. A number that an evaluation lacks is None."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        row: Label of its row.
        setting: Label of its setting; empty where the file has none.
        seed: Its seed.
        overrides: What its row and its setting set, by dotted key of a run file.
        tuned: What was chosen for its row and setting on validation data, by dotted key.
        rounds: Its rounds.
        seconds: Wall seconds of all rounds.
        training_seconds: Those of them that training took; None where they were not told apart.
        speed: `engine.speed`, "exact" or "fast".
        digest: SHA-256 of its resolved configuration, `config.toml`.
        final: Its final numbers by name (`fleetfit.report.columns.final_numbers`): percent, rounds, costs.
        per_level: Local accuracy in percent of each level's own clients.
        per_exit: Accuracy in percent of each exit of the largest model, counted from 1.
        curves: What was measured on the way.
    """

    row: str
    setting: str
    seed: int
    overrides: Mapping[str, Any]
    tuned: Mapping[str, Any]
    rounds: int
    seconds: float
    training_seconds: float | None
    speed: str
    digest: str
    final: Mapping[str, float]
    per_level: Mapping[str, float]
    per_exit: Mapping[str, float]
    curves: Curves


@dataclass(frozen=True)
class TriedValues:
    """Values that were tried for a row in a setting.

    Attributes:
        values: The values by dotted key.
        score: The accuracy on validation data, in percent, by which they were judged; None where there is none.
        seed: The seed of the run that tried them.
        rounds: Rounds to the target on validation data, where these decide; None where it was not reached.
    """

    values: Mapping[str, Any]
    score: float | None
    seed: int
    rounds: float | None = None


@dataclass(frozen=True)
class TuningResult:
    """What a row got in a setting, and what was tried for it.

    Attributes:
        row: Label of the row.
        setting: Label of the setting.
        chosen: The values that were chosen, by dotted key.
        candidates: All that were tried, once for each seed.
    """

    row: str
    setting: str
    chosen: Mapping[str, Any]
    candidates: tuple[TriedValues, ...]


@dataclass(frozen=True)
class LevelResult:
    """What a level of a row is, and costs; the same for all seeds.

    Attributes:
        row: Label of the row.
        setting: Label of the setting.
        level: Name of the level, as in `RunResult.per_level`.
        width: Share of the channels that it keeps.
        depth: Blocks that it keeps.
        blocks: Blocks of the full model.
        parameters: Its parameters.
        multiply_adds: Multiply-adds of one sample.
    """

    row: str
    setting: str
    level: str
    width: float
    depth: int
    blocks: int
    parameters: int
    multiply_adds: int


@dataclass(frozen=True)
class ComparisonResults:
    """The results of a comparison, perhaps of one that is not finished yet.

    Attributes:
        name: Name of the run file.
        file: Path of the run file, as it was seen from the working folder.
        versions: Of `fleetfit`, `torch` and `python`.
        commit: Commit of the checkout of FleetFit, "-dirty" if its package was changed; None outside of one.
        machine: `processor` and `cores`.
        against: Label of the row that the others are measured against.
        settings: The file's tables with every default visible.
        runs: The finished runs, row by row.
        tuning: What each row got; empty where nothing was tuned.
        levels: The levels of each row and setting; empty in files that were written before they were kept.
    """

    name: str
    file: str
    versions: Mapping[str, str]
    commit: str | None
    machine: Mapping[str, Any]
    against: str
    settings: Mapping[str, Any]
    runs: tuple[RunResult, ...] = ()
    tuning: tuple[TuningResult, ...] = field(default=())
    levels: tuple[LevelResult, ...] = field(default=())


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_json(results: ComparisonResults) -> str:
    """Return the text of the file; see the module's docstring."""
    points = MOST_POINTS
    text = _text(results, points)
    while len(text.encode()) > SMALL_BYTES and points > _FEWEST:
        points -= 1
        text = _text(results, points)
    return text


def _text(results: ComparisonResults, points: int) -> str:
    """Return the text with so many points in each curve: a line for each entry of the lists and of the settings."""
    head = {
        "format": FORMAT,
        "name": results.name,
        "file": results.file,
        "versions": results.versions,
        "commit": results.commit,
        "machine": results.machine,
        "against": results.against,
    }
    parts = [f"{_line(key)}: {_line(value)}" for key, value in head.items()]
    settings = [f"{_line(key)}: {_line(value)}" for key, value in results.settings.items()]
    parts.append(f'"settings_of_file": {_block("{}", settings)}')
    runs = [{**_plain(run), "curves": thinned(run.curves, points)} for run in results.runs]
    parts.append(f'"runs": {_block("[]", (_line(run, (",", ":")) for run in runs))}')
    parts.append(f'"levels": {_block("[]", (_line(_plain(one)) for one in results.levels))}')
    parts.append(f'"tuning": {_block("[]", (_line(_tuning_nest(one)) for one in results.tuning))}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _tuning_nest(one: TuningResult) -> dict[str, Any]:
    return {**_plain(one), "candidates": [_plain(candidate) for candidate in one.candidates]}


def _plain(value: Any) -> dict[str, Any]:
    """Return the fields of a value that have something to say."""
    found = {one.name: getattr(value, one.name) for one in fields(value)}
    return {key: inner for key, inner in found.items() if inner is not None}


def _block(brackets: str, lines: Any) -> str:
    inner = ",\n".join(lines)
    return f"{brackets[0]}\n{inner}\n{brackets[1]}" if inner else brackets


def _line(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    return escape_controls(json.dumps(to_json_value(value), ensure_ascii=False, default=str, separators=separators))


def thinned(curves: Curves, points: int) -> dict[str, Any]:
    """Return curves with at most so many points, evenly chosen, the first and the last among them."""
    count = len(curves.get("round", ()))
    step = (count - 1) / (points - 1)
    kept = list(range(count)) if count <= points else [round(i * step) for i in range(points)]

    def some(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: some(inner) for key, inner in value.items()}
        return [value[i] for i in kept]

    return {key: some(value) for key, value in curves.items()}


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_results(path: str | Path) -> ComparisonResults:
    """Return the results of a comparison from a file that `fleetfit compare` wrote.

    Args:
        path: `results.json` of a comparison's folder, or a copy that `--record` made.

    Raises:
        RunError: The file cannot be read, is none of results, or has a format that this version does not know.
    """
    try:
        found = json.loads(files.read_text(path))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.", path=path) from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} holds no results of a comparison: it is no JSON.", path=path) from None
    if isinstance(found, dict) and type(found.get("format")) is int and found["format"] > FORMAT:
        raise RunError(
            f"{path} has format {found['format']}; this version of FleetFit reads format {FORMAT}.", path=path
        )
    try:
        ResultsRecord.load(found)
    except InvalidRecord as error:
        raise RunError(f"{path} holds no results of a comparison: {error}.", key=error.key, path=path) from None
    return results_of(found)


def results_of(nest: Mapping[str, Any]) -> ComparisonResults:
    """Return the results that plain values of the right form stand for."""
    names = [one.name for one in fields(LevelResult)]
    return ComparisonResults(
        name=nest["name"], file=nest["file"], versions=nest["versions"], commit=nest.get("commit"),
        machine=nest["machine"], against=nest["against"], settings=nest["settings_of_file"],
        runs=tuple(_run_of(run) for run in nest["runs"]),
        tuning=tuple(_tuning_of(one) for one in nest.get("tuning", ())),
        levels=tuple(LevelResult(**{key: one[key] for key in names}) for one in nest.get("levels", ())),
    )  # fmt: skip


def _run_of(nest: Mapping[str, Any]) -> RunResult:
    absent: dict[str, Any] = {"overrides": {}, "tuned": {}, "training_seconds": None, "per_level": {}, "per_exit": {}}
    return RunResult(**{one.name: nest.get(one.name, absent.get(one.name)) for one in fields(RunResult)})


def _tuning_of(nest: Mapping[str, Any]) -> TuningResult:
    tried = tuple(
        TriedValues(one["values"], one.get("score"), one["seed"], one.get("rounds")) for one in nest["candidates"]
    )
    return TuningResult(nest["row"], nest["setting"], nest["chosen"], tried)


def curves_of(metrics: Sequence[Mapping[str, Any]], norm: str) -> Curves:
    """Return what the evaluated rounds of a run measured.

    Args:
        metrics: The reports of its rounds.
        norm: Batch-norm policy of the headline.
    """
    evaluated = [(report, report["evaluate"][norm]) for report in metrics if norm in report.get("evaluate", {})]
    exits = max((len(columns.get("exits", ())) for _, columns in evaluated), default=0)
    found: dict[str, Any] = {
        "round": [report["round"] for report, _ in evaluated],
        "local": [percent_of(columns.get("local")) for _, columns in evaluated],
        "global": [percent_of(columns.get("global")) for _, columns in evaluated],
        "loss": [_rounded(report["train"]["loss"]) for report, _ in evaluated],
    }
    if exits:
        found["per_exit"] = {
            str(i + 1): [percent_of(dict(enumerate(columns.get("exits", ()))).get(i), 1) for _, columns in evaluated]
            for i in range(exits)
        }
    return found


def percent_of(share: float | None, digits: int = 2) -> float | None:
    """Return a share in percent, rounded; None of none."""
    return None if share is None else round(100 * share, digits)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
