"""Make the report of a round: plain values, as a line of `metrics.jsonl` has them."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from typing import Any

from fleetfit.core import Failure, Federation, Local, Server, Update
from fleetfit.errors import one_line
from fleetfit.layout import Layout
from fleetfit.submodel import Submodel

_MAX_NAMED = 3
"""Clients or reasons that a sentence names."""
LEFT_OUT = "its update was left out by the method (filter_updates)"
"""The reason of a failure that stands for an update which the method's `filter_updates` did not return."""


def make_round_report(
    federation: Federation, server: Server, local: Local, replies: Sequence[Update | Failure]
) -> dict[str, Any]:
    """Return the report of a round.

    Args:
        federation: The server's view.
        server: The server with the round counted.
        local: Local training in this round.
        replies: Updates, whose states may be gone, and failures, in job order.
    """
    updates = [reply for reply in replies if isinstance(reply, Update)]
    failures = [reply for reply in replies if isinstance(reply, Failure)]
    samples = sum(update.num_examples for update in updates)
    clients_by_level = Counter(str(federation.numbers[update.level]) for update in updates)
    has_losses = samples > 0 and all("loss" in update.metrics for update in updates)  # secure rounds report none
    loss = sum(update.metrics["loss"] * update.num_examples for update in updates) / samples if has_losses else None
    report = {
        "round": server.round,
        "lr": local.lr,
        "train": {"loss": loss, "clients": len(updates), "samples": samples, "by_level": dict(clients_by_level)},
        "failures": [
            {
                "client": failure.client,
                "level": federation.numbers[failure.level],
                "reason": failure.reason,
                "absent": failure.absent,
            }
            for failure in failures
        ],
        "bytes_down": sum(reply.bytes_down for reply in replies),
        "bytes_up": sum(reply.bytes_up for reply in replies),
        "waste": compute_waste(federation.problem.layout, replies),
        "multiply_adds": sum(reply.multiply_adds for reply in replies),
    }
    if counts := sum_client_counters(updates, federation.numbers):
        report["counts"] = counts
    report["simulated_s"] = simulated_seconds(replies, local.deadline_s)
    if local.deadline_s is not None:
        report["deadline"] = count_deadlines(replies)
    if federation.connected is not None:
        report["online"] = len(federation.reachable(server.round - 1))
    return report


def make_rollback_report(
    federation: Federation, report: Mapping[str, Any], server: Server, local: Local, record: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the report of a round that was rolled back: nothing counts as trained, and `undone` says why."""
    nothing = make_round_report(federation, server, local, [])["train"]
    return {key: value for key, value in report.items() if key != "counts"} | {"train": nothing, "undone": record}


def make_element_counter(layout: Layout) -> Callable[[Submodel], int]:
    """Return a function that counts the elements of sub-models, of each shape once."""

    @cache
    def count(sizes: tuple[tuple[str, int], ...], exits: tuple[int, ...]) -> int:
        return sum(map(math.prod, layout.shapes(dict(sizes), exits).values()))

    return lambda submodel: count(tuple(submodel.sizes.items()), submodel.exits)


def compute_waste(layout: Layout, replies: Sequence[Update | Failure]) -> float:
    """Return a round's communication waste rate, 1 - elements that came back / elements sent (AdaptiveFL, 4.4)."""
    count = make_element_counter(layout)
    sent = sum(count(reply.dispatched) for reply in replies)
    returned = sum(count(reply.submodel) for reply in replies if isinstance(reply, Update))
    return 1 - returned / sent if sent else 0.0


def sum_client_counters(updates: Sequence[Update], numbers: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the sums of what clients count, by counter and level: those metrics that are tables of numbers.

    Args:
        updates: Of a round.
        numbers: Those of the levels.
    """
    sums: dict[str, dict[str, Counter[str]]] = {}
    for update in updates:
        for name, value in update.metrics.items():
            if isinstance(value, Mapping) and all(type(number) in (int, float) for number in value.values()):
                counts = {str(key): number for key, number in value.items()}
                sums.setdefault(name, {}).setdefault(str(numbers[update.level]), Counter()).update(counts)
    return {name: {level: dict(counter) for level, counter in levels.items()} for name, levels in sums.items()}


def count_by_honesty(
    hostile: Set[int], replies: Sequence[Update | Failure], levels: Mapping[int, int], numbers: Sequence[int]
) -> dict[str, Any]:
    """Return how many hostile and honest clients sent an update, and how many of these the method left out.

    Args:
        hostile: Ids of the clients that attack.
        replies: The outcome of each job.
        levels: Level, 0-based, of the sub-model that came back, by job index; absent where it is the one that was sent.
        numbers: Those of the levels.

    Returns:
        Under "sent" and "left_out" each: "hostile", and "honest" by the level that was trained.
    """
    counts: dict[str, Any] = {key: {"hostile": 0, "honest": Counter()} for key in ("sent", "left_out")}
    for reply in replies:
        is_left_out = isinstance(reply, Failure) and reply.reason == LEFT_OUT
        for key in ("sent", "left_out") if is_left_out else ("sent",) if isinstance(reply, Update) else ():
            if reply.client in hostile:
                counts[key]["hostile"] += 1
            else:
                counts[key]["honest"][str(numbers[levels.get(reply.index, reply.level)])] += 1
    return {key: {**by_kind, "honest": dict(sorted(by_kind["honest"].items()))} for key, by_kind in counts.items()}


def simulated_seconds(replies: Sequence[Update | Failure], deadline_s: float | None) -> float | None:
    """Return the simulated seconds of a synchronous round, those of its slowest client; None without a clock.

    The server waits for every client, until the deadline if there is one. It waits until then for a lost message, too.
    """
    seconds = [reply.simulated_s for reply in replies if reply.simulated_s is not None]
    if not seconds:
        return None
    if deadline_s is None:
        return max(seconds)
    return deadline_s if len(seconds) < len(replies) else min(max(seconds), deadline_s)


def count_deadlines(replies: Sequence[Update | Failure]) -> dict[str, int]:
    """Return how many clients trained a shallower exit, stopped before the end of their training, or were late."""
    updates = [reply for reply in replies if isinstance(reply, Update)]
    return {
        "shallower": sum(len(update.submodel.exits) < len(update.dispatched.exits) for update in updates),
        "stopped": sum(bool(update.metrics.get("stopped")) for update in updates),
        "late": sum(reply.late for reply in replies if isinstance(reply, Failure)),
    }


# ---- rounds that are rolled back, and rounds without a usable update -------------------------------------------------


def make_rollback_record(
    reason: str, replies: Sequence[Update | Failure], norms: Mapping[int, float], numbers: Sequence[int]
) -> dict[str, Any]:
    """Return the record of a rollback in a round's report: the reason, and each client with the norm of its update.

    Args:
        reason: Why the round is rolled back.
        replies: Updates and failures of the round.
        norms: Euclidean norm of each update, by job index.
        numbers: Those of the levels.
    """
    reported = [
        {"client": reply.client, "level": numbers[reply.level], "norm": norms.get(reply.index)}
        for reply in replies
        if isinstance(reply, Update)
    ]
    reported.sort(key=lambda entry: -(entry["norm"] or 0.0))
    return {"reason": one_line(reason, 500), "reported": reported}


def format_rollback(record: Mapping[str, Any], names: Sequence[str] | None = None) -> str:
    """Return a sentence on a round that was rolled back: the reason, and the largest updates.

    Args:
        record: The record of the rollback.
        names: Names of the clients by id; None: they have none.
    """
    entries = [entry for entry in record["reported"][:_MAX_NAMED] if entry["norm"] is not None]
    norms = ", ".join(f"{_format_client(entry, names)} ({entry['norm']:.3g})" for entry in entries)
    largest = f" Largest updates by norm: {norms}." if entries else ""
    return f"rolled back: {record['reason'].rstrip('.')}.{largest} The run continues from the state before it."


def _format_client(entry: Mapping[str, Any], names: Sequence[str] | None) -> str:
    client = entry["client"]
    return f"client {client}" if names is None or client is None or client >= len(names) else names[client]


def format_largest_updates(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the clients with the largest updates in several rollbacks, as text."""
    largest: dict[Any, float] = {}
    counts = Counter[Any]()
    for record in records:
        for entry in record["reported"]:
            largest[entry["client"]] = max(largest.get(entry["client"], 0.0), entry["norm"] or 0.0)
            counts[entry["client"]] += 1
    clients = sorted(largest, key=lambda client: (-largest[client], -counts[client]))[:_MAX_NAMED]
    if not clients:
        return "none"
    return ", ".join(f"client {c} (norm {largest[c]:.3g}, in {counts[c]} of {len(records)} rounds)" for c in clients)


def explain_empty_rounds(reports: Sequence[Mapping[str, Any]], in_a_row: bool) -> str:
    """Return why a run stops: the reasons of rounds without a usable update, with their counts.

    Args:
        reports: Their reports, redacted where a run has `[privacy]`.
        in_a_row: Whether they follow each other; else they are all rounds of the run in which clients trained.
    """
    count = len(reports)
    if "privacy" in reports[-1]:
        rounds = f"for {count} rounds in a row" if in_a_row else "in all rounds"
        return (
            f"{rounds} no client returned a usable update, or the round was rolled back. "
            "Which clients, and why, is withheld by [privacy]; the same run without it reports them."
        )
    records = [report["undone"] for report in reports if "undone" in report]
    if any(record["reported"] for record in records):
        rounds = f"{count} rounds{' in a row' if in_a_row else ''}"
        rounds = rounds if len(records) == count else f"{len(records)} of {count} rounds"
        return (
            f"{rounds} were rolled back, the last one because {records[-1]['reason'].removesuffix('.')}. Largest "
            f"updates in them: {format_largest_updates(records)}. The state is that of before. Leave these clients "
            "out, or check what they send."
        )
    reasons = Counter(failure["reason"] for report in reports for failure in report["failures"])
    reasons += Counter("no client was connected" for report in reports if report.get("online") == 0)
    listed = "; ".join(
        f"{reason} ({'once' if number == 1 else f'{number} times'})"
        for reason, number in reasons.most_common(_MAX_NAMED)
    )
    others = f"; and {len(reasons) - _MAX_NAMED} other reasons" if len(reasons) > _MAX_NAMED else ""
    last = f". The last round was rolled back: {records[-1]['reason'].removesuffix('.')}" if records else ""
    start = "no client returned a usable update in any round, so nothing was learned"
    if in_a_row:
        start = f"for {count} rounds in a row no client returned a usable update"
    return f"{start}. Reasons: {listed or 'none given'}{others}{last}."
