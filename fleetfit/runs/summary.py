"""The final numbers of a run, from the reports of its rounds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetfit.runs.schema import RoundRecord, SummaryRecord

if TYPE_CHECKING:  # listing run folders does not import PyTorch
    from fleetfit.planner import Plan

_MAX_REASONS = 5  # of failed jobs


class Best(NamedTuple):
    """The round with the highest `local` on validation data, and that accuracy."""

    round: int
    local: float


def make_summary(
    description: Mapping[str, Any], plan: "Plan | None", reports: Sequence[Mapping[str, Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """Return the final numbers of a run, as in `summary.json`.

    Args:
        description: Name, method, model, data, seed, norm (the main batch-norm policy) and score (the name of the
            task's accuracy).
        plan: The levels; None if they cannot be read.
        reports: The reports of the rounds so far.
        notes: Notes for the user, such as on clients that did not take part.
    """
    rounds = [RoundRecord.load(report) for report in reports]
    is_private = any(record.privacy is not None for record in rounds)
    evaluations = [report["evaluate"] for report in reports if description["norm"] in report.get("evaluate", ())]
    columns: Mapping[str, Any] = evaluations[-1] if evaluations else {}
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
        "levels": [] if plan is None else _make_levels(plan, headline.get("levels", {})),
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
        "left_out": [] if plan is None else list(plan.left_out),
        "notes": list(notes),
        **({"failure_reasons": dict(reasons.most_common(_MAX_REASONS))} if reasons and not is_private else {}),
        **({} if (best := find_best(rounds, description["norm"])) is None else {"best": best._asdict()}),
        **_make_excluded_shares(rounds),
        **({"privacy": reports[-1]["privacy"]} if reports and "privacy" in reports[-1] else {}),
    }


def find_best(rounds: Iterable[RoundRecord], norm: str, before: Best | None = None) -> Best | None:
    """Return the best of the rounds that were evaluated on validation data; the first of equals, None without one.

    Args:
        rounds: The rounds.
        norm: Main batch-norm policy.
        before: The best of the rounds before them.
    """
    best = before
    for record in rounds:
        if record.evaluate is None or record.evaluate.split != "validation":
            continue
        accuracies = record.evaluate.accuracies(norm)
        local = None if accuracies is None else accuracies.local
        if local is not None and (best is None or local > best.local):
            best = Best(record.round, local)
    return best


def _make_levels(plan: "Plan", accuracies: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the levels of a plan, each with the accuracy of its own clients in an evaluation."""
    return [
        {
            "level": level.name, "width": level.width, "depth": level.depth, "blocks": plan.blocks,
            "exits": list(level.exits), "parameters": level.parameters, "multiply_adds": level.multiply_adds,
            "clients": level.clients, "local": accuracies.get(level.name, {}).get("local"),
        }
        for level in plan.levels
    ]  # fmt: skip


def _drop_clients(value: Any) -> Any:
    return {k: v for k, v in value.items() if k != "per_client"} if isinstance(value, Mapping) else value


def _make_excluded_shares(rounds: Sequence[RoundRecord]) -> dict[str, float | None]:
    """Return the shares of hostile and honest clients' updates that a defense excluded, over all rounds.

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
