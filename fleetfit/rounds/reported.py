"""What a round's report says: plain values, as they stand in `metrics.jsonl`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleetfit.layout import Layout
from fleetfit.submodel import Submodel
from fleetfit.values import Failure, Federation, Local, Server, Update


class Elements:
    """How many elements sub-models have, each shape counted once."""

    def __init__(self, layout: Layout) -> None:
        """Count nothing yet."""
        self._layout = layout
        self._known: dict[Any, int] = {}

    def of(self, piece: Submodel) -> int:
        """Return the elements of a sub-model."""
        key = (tuple(piece.sizes.items()), piece.exits)
        if key not in self._known:
            shapes = self._layout.shapes(piece.sizes, piece.exits).values()
            self._known[key] = sum(int(np.prod(shape)) for shape in shapes)
        return self._known[key]


def waste(layout: Layout, reports: Sequence[Update | Failure]) -> float:
    """Return a round's communication waste rate: 1 - elements that came back / elements sent (AdaptiveFL 4.4)."""
    elements = Elements(layout)
    sent = sum(elements.of(r.dispatched) for r in reports)
    back = sum(elements.of(r.submodel) for r in reports if isinstance(r, Update))
    return 1 - back / sent if sent else 0.0


def report_of(
    federation: Federation, server: Server, local: Local, reports: Sequence[Update | Failure]
) -> dict[str, Any]:
    """Return the report of a round."""
    good = [r for r in reports if isinstance(r, Update)]
    samples = sum(u.num_examples for u in good)
    by_level: dict[str, int] = {}
    for update in good:
        by_level[str(update.level + 1)] = by_level.get(str(update.level + 1), 0) + 1
    loss = sum(u.metrics["loss"] * u.num_examples for u in good) / samples if samples else None
    failures = [r for r in reports if isinstance(r, Failure)]
    return {
        "round": server.round,
        "lr": local.lr,
        "train": {"loss": loss, "clients": len(good), "samples": samples, "by_level": by_level},
        "failures": [{"client": r.client, "level": r.level + 1, "reason": r.reason, "absent": r.absent}
                     for r in failures],
        "bytes_down": sum(r.bytes_down for r in reports),
        "bytes_up": sum(r.bytes_up for r in reports),
        "waste": waste(federation.problem.layout, reports),
        "multiply_adds": sum(r.multiply_adds for r in reports),
        **counted(good),
        "simulated_s": simulated_seconds(reports, local.deadline_s),
        **({} if local.deadline_s is None else {"deadline": met(reports)}),
        **({} if federation.connected is None else {"online": len(federation.reachable(server.round - 1))}),
    }  # fmt: skip


def counted(updates: Sequence[Update]) -> dict[str, Any]:
    """Return the sums of what clients count, by what is counted and by level: metrics that are tables of numbers."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for update in updates:
        for name, value in update.metrics.items():
            if isinstance(value, Mapping) and all(type(n) in (int, float) for n in value.values()):
                texts = {str(key): n for key, n in value.items()}
                found.setdefault(name, {}).setdefault(str(update.level + 1), Counter()).update(texts)
    return {"counts": {n: {lv: dict(c) for lv, c in levels.items()} for n, levels in found.items()}} if found else {}


def simulated_seconds(reports: Sequence[Update | Failure], deadline_s: float | None) -> float | None:
    """Return the simulated seconds of a synchronous round: those of its slowest client; None where no clock is.

    The server waits for everybody, until the deadline where there is one; whoever was lost on the way is waited for
    until then too.
    """
    known = [r.simulated_s for r in reports if r.simulated_s is not None]
    if not known:
        return None
    if deadline_s is None:
        return max(known)
    return deadline_s if len(known) < len(reports) else min(max(known), deadline_s)


def met(reports: Sequence[Update | Failure]) -> dict[str, int]:
    """Return how many clients trained a shallower exit, stopped before the end of their training, or came too late."""
    good = [r for r in reports if isinstance(r, Update)]
    return {
        "shallower": sum(len(u.submodel.exits) < len(u.dispatched.exits) for u in good),
        "stopped": sum(bool(u.metrics.get("stopped")) for u in good),
        "late": sum(r.late for r in reports if isinstance(r, Failure)),
    }
