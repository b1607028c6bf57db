"""The text of `results.json`, in a form for version control.

Accuracies are in percent. Numbers that were not measured are left out. Each run is one line, so that diffs are small.
Curves are thinned but keep their last point, so that a large table is a small file.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fleetfit.errors import escape_controls
from fleetfit.report.columns import make_final_numbers
from fleetfit.report.curves import KINDS, thin, to_percent
from fleetfit.runs.folder import RunFolder, to_json_value
from fleetfit.runs.schema import ComparisonResults, CurvesRecord, Record, RoundRecord, RunResult

MAX_POINTS = 20
"""Maximal number of points of a curve."""
SMALL_BYTES = 60_000
"""Above this file size curves have fewer points, down to `_FEWEST`."""
_FEWEST = 5


def format_results(results: ComparisonResults) -> str:
    """Return the text of the file."""
    few, many = _FEWEST, MAX_POINTS
    for points in (many, few):
        text = _format(results, points)
        if len(text.encode()) <= SMALL_BYTES:
            break
    else:
        return text  # even the fewest points are too many bytes
    while points < many - 1:  # `points` fit, `many` do not
        middle = (points + many) // 2
        longer = _format(results, middle)
        if len(longer.encode()) <= SMALL_BYTES:
            points, text = middle, longer
        else:
            many = middle
    return text


def _format(results: ComparisonResults, points: int) -> str:
    """Return the text with a number of points per curve, and one line per entry of lists and settings."""
    head = ["format", "name", "file", "versions", "commit", "machine", "against"]
    optional = ("title", "smallest", "columns", "targets", "target_on", "tune_on", "tune_rounds")
    head += [key for key in optional if getattr(results, key) != ComparisonResults.model_fields[key].default]
    parts = [f"{_format_value(key)}: {_format_value(getattr(results, key))}" for key in head]
    settings = [f"{_format_value(key)}: {_format_value(value)}" for key, value in results.settings.items()]
    parts.append(f'"settings_of_file": {_format_block("{}", settings)}')
    runs = [{**_make_table(run), "curves": thin_curves(run.curves, points)} for run in results.runs]
    parts.append(f'"runs": {_format_block("[]", (_format_value(run, (",", ":")) for run in runs))}')
    parts.append(f'"levels": {_format_block("[]", (_format_value(_make_table(one)) for one in results.levels))}')
    tuning = [
        {**_make_table(one), "candidates": [_make_table(candidate) for candidate in one.candidates]}
        for one in results.tuning
    ]
    parts.append(f'"tuning": {_format_block("[]", map(_format_value, tuning))}')
    printed = [_make_table(one) for one in results.printed]
    for key, values in (("printed", printed), ("rows", results.rows), ("failures", results.failures),
                        ("notes", results.notes)):  # fmt: skip
        if values:
            parts.append(f'"{key}": {_format_block("[]", map(_format_value, values))}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _make_table(record: Record) -> dict[str, Any]:
    """Return the fields of a record that are not None, in the order of its model."""
    values = {name: getattr(record, name) for name in type(record).model_fields}
    return {name: value for name, value in values.items() if value is not None}


def _format_block(brackets: str, lines: Iterable[str]) -> str:
    inner = ",\n".join(lines)
    return f"{brackets[0]}\n{inner}\n{brackets[1]}" if inner else brackets


def _format_value(value: Any, separators: tuple[str, str] = (", ", ": ")) -> str:
    return escape_controls(json.dumps(to_json_value(value), ensure_ascii=False, default=str, separators=separators))


def thin_curves(curves: CurvesRecord, points: int) -> dict[str, Any]:
    """Return curves with at most a number of evenly spaced points, including the first and the last."""

    def shorten(value: Any) -> Any:
        return {k: shorten(v) for k, v in value.items()} if isinstance(value, dict) else thin(value, points)

    return {key: shorten(value) for key, value in curves.dump().items()}


def make_run_result(
    row: str, setting: str, seed: int, run: RunFolder, targets: Sequence[float] = (), target_on: str = "global",
    **fields: Any,
) -> RunResult:  # fmt: skip
    """Return the numbers of a run, finished or not.

    Args:
        row: Label of its row.
        setting: Label of its setting.
        seed: Its seed.
        run: Its folder.
        targets: The target accuracies for counting rounds.
        target_on: The name of that accuracy.
        **fields: Further fields of the result.
    """
    summary, training = run.summary, run.summary.seconds_of.get("training")
    if run.is_finished:
        final = make_final_numbers(summary, run.rounds, targets, target_on)
    else:
        final = {kind: to_percent(share) for kind in KINDS if (share := run.last.number(kind)) is not None}
    return RunResult(
        row=row, setting=setting, seed=seed, rounds=summary.rounds, seconds=round(summary.seconds, 2),
        training_seconds=None if training is None else round(training, 2),
        speed=str(run.get_setting("engine", "speed")), final=final,
        per_level={name: to_percent(one.local) for name, one in run.last.levels.items() if one.local is not None},
        per_exit={str(i): to_percent(share) for i, share in enumerate(run.last.exits, 1)},
        curves=make_curves(run.rounds, run.norm), **{"digest": "", **fields},
    )  # fmt: skip


def make_curves(rounds: Sequence[RoundRecord], norm: str) -> CurvesRecord:
    """Return the curves of the evaluated rounds of a run.

    Args:
        rounds: The reports of its rounds.
        norm: The main batch-norm policy.
    """
    pairs = [(one, one.evaluate.accuracies(norm)) for one in rounds if one.evaluate is not None]
    evaluations = [(one, accuracies) for one, accuracies in pairs if accuracies is not None]
    exits = max((len(accuracies.exits) for _, accuracies in evaluations), default=0)
    per_exit = {
        str(i + 1): _to_percents((dict(enumerate(accuracies.exits)).get(i) for _, accuracies in evaluations), 1)
        for i in range(exits)
    }
    losses = [one.train.loss for one, _ in evaluations]
    return CurvesRecord(
        round=[one.round for one, _ in evaluations],
        local=_to_percents(accuracies.local for _, accuracies in evaluations),
        global_=_to_percents(accuracies.global_ for _, accuracies in evaluations),
        loss=[None if loss is None else round(loss, 3) for loss in losses],
        **({"per_exit": per_exit} if exits else {}),
    )


def _to_percents(shares: Iterable[float | None], digits: int = 2) -> list[float | None]:
    return [None if share is None else to_percent(share, digits) for share in shares]
