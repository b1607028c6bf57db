"""What rows of a comparison got from the small grid that all of them have: every candidate with its score."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetfit.records.schema import TuningCandidate, TuningResult
from fleetfit.report.text import Table


def tuning_table(tuning: Sequence[TuningResult], on: str) -> Table:
    """Return every candidate of every row and setting with its score on validation data.

    Args:
        tuning: What was tried and chosen.
        on: What chose: "local", "global" or "rounds".
    """
    named = any(one.setting for one in tuning)
    counted = on == "rounds"
    columns = ("row", *(["setting"] if named else []), "candidate", *(["rounds"] if counted else []), "score %", "")
    rows = tuple(
        (
            one.row,
            *([one.setting] if named else []),
            values_in_words(values),
            *([_rounds(tried)] if counted else []),
            _scores(tried),
            "chosen" if values == one.chosen else "",
        )
        for one in tuning
        for values, tried in by_values(one)
    )
    seeds = dict.fromkeys(tried.seed for one in tuning for tried in one.candidates)
    what = "fewest rounds to the first target, then the best accuracy" if counted else f'the "{on}" accuracy'
    notes = [
        f"On validation data, with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, by {what}.",
        *edges(tuning),
    ]
    return Table(columns, rows, "Tuned", tuple(notes))


def edges(tuning: Sequence[TuningResult]) -> list[str]:
    """Return a warning for each chosen number that is the smallest or the largest one tried for its row."""
    found = []
    for one in tuning:
        where = ", ".join(filter(None, [one.row, one.setting]))
        for key, value in one.chosen.items():
            numbers = {tried.values[key] for tried in one.candidates if _is_number(tried.values.get(key))}
            if _is_number(value) and len(numbers) > 1 and value in (min(numbers), max(numbers)):
                end = "smallest" if value == min(numbers) else "largest"
                found.append(f"{where}: {key} = {value} is the {end} value tried; a better one may lie beyond it.")
    return found


def by_values(one: TuningResult) -> Iterator[tuple[Mapping[str, Any], list[TuningCandidate]]]:
    """Yield the candidates, each with what its seeds gave."""
    groups: list[tuple[Mapping[str, Any], list[TuningCandidate]]] = []
    for tried in one.candidates:
        found = next((inner for values, inner in groups if values == tried.values), None)
        if found is None:
            groups.append((tried.values, [tried]))
        else:
            found.append(tried)
    yield from groups


def values_in_words(values: Mapping[str, Any]) -> str:
    """Return values as they stand in tables: "local.lr = 0.1, local.weight_decay = 0.0005"."""
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _scores(tried: Sequence[TuningCandidate]) -> str:
    known = [one.score for one in tried if one.score is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.2f}{spread}"


def _rounds(tried: Sequence[TuningCandidate]) -> str:
    known = [one.rounds for one in tried if one.rounds is not None]
    if len(known) < len(tried):
        return f"{len(known)} of {len(tried)} seeds" if known else "-"
    return f"{statistics.fmean(known):.1f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
