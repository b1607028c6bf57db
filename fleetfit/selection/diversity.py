"""Clients who differ: by the classes that they tell, else by the directions of their updates (DivFL, ICLR 2022).

Candidates are drawn uniformly among those connected, so that cohorts vary from round to round; the cohort is chosen
among them one after the other.

- Where clients report their classes (`fleet.reports_labels`): after a first one at random, always the client with whom
  the samples of the cohort are spread over the classes most like the target: least sum_c (share_c - target_c)^2, as in
  Fed-CBS (Zhang et al., ICML 2023) with its uniform target.
- Else (Balakrishnan et al., ICLR 2022): the clients whose directions stand for everybody's best, by facility location
  over the directions of the updates last seen. Clients never seen come first, at random.

Differs from the papers: Fed-CBS draws with probabilities and favours those chosen seldom, with encrypted counts; DivFL
compares whole gradients of equal models, here it is small sketches of the updates' directions, compared on what both
clients trained, and kept for the clients that reported last.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.errors import check_range
from fleetfit.method import Method
from fleetfit.selection import _directions
from fleetfit.selection._drawing import (
    any_of,
    listed,
    remembered,
    remembering,
)
from fleetfit.values import Failure, Federation, Server, Update

Target = Literal["uniform", "all"]


def diversity(candidates: int = 0, target: Target = "uniform", buckets: int = 256, kept: int = 1000) -> Method:
    """Make the selection.

    Args:
        candidates: How many are drawn; never fewer than the cohort; 0 is three times as many.
        target: Where classes are told: "uniform", or "all", the classes of all clients together.
        buckets: Numbers in the sketch of a direction, for each level.
        kept: Clients whose direction is kept, those who reported last.
    """
    check_range("candidates", candidates, 0, closed=True)
    check_range("buckets", buckets, 1, closed=True)
    check_range("kept", kept, 2, closed=True)
    return Method(
        choose=partial(choose, candidates=candidates, target=target),
        note=partial(note, buckets=buckets),
        observe=partial(observe, kept=kept),
    )


def choose(
    federation: Federation, server: Server, rng: np.random.Generator, candidates: int, target: Target
) -> list[int]:
    """Choose by classes where they are told, else by directions."""
    here, cohort = federation.reachable(server.round), federation.cohort
    wanted = max(cohort, candidates or 3 * cohort)
    if federation.clients.labels is not None:
        drawn = any_of(here, wanted, rng)
        aim = aimed_at(federation, target)
        return listed(drawn[alike(federation.clients.labels[drawn], aim, min(cohort, len(drawn)))])
    known, sketches = _known(server)
    place = np.full(len(federation.clients), -1)
    place[known] = np.arange(len(known))
    first = any_of(here[place[here] < 0], cohort, rng)
    drawn = any_of(here[place[here] >= 0], wanted, rng)
    left = min(cohort - len(first), len(drawn))
    if not left:
        return listed(first)
    among = _directions.facility_location(_directions.distances(sketches), place[drawn], left)
    return listed(np.concatenate([first, known[among]]))


def aimed_at(federation: Federation, target: Target) -> np.ndarray:
    """Return the shares of the classes that a cohort should have [classes]."""
    labels = federation.clients.labels
    assert labels is not None
    if target == "uniform":
        return np.full(labels.shape[1], 1 / labels.shape[1])
    total = labels[federation.able].sum(0)
    return np.asarray(total / total.sum())


def alike(counts: np.ndarray, target: np.ndarray, count: int) -> list[int]:
    """Choose rows one after the other so that their sum is spread like the target, beginning with the first row.

    Args:
        counts: Samples by class, [n, classes], in random order: the first of equals is taken.
        target: Shares, [classes].
        count: How many, at most n.
    """
    chosen: list[int] = []
    pooled = np.zeros(counts.shape[1])
    left = list(range(len(counts)))
    while len(chosen) < count:
        sums = pooled + counts[left]
        off = ((sums / np.maximum(sums.sum(1, keepdims=True), 1) - target) ** 2).sum(1)
        pick = left.pop(int(np.argmin(off)) if chosen else 0)
        pooled = pooled + counts[pick]
        chosen.append(pick)
    return chosen


def note(federation: Federation, server: Server, update: Update, buckets: int) -> Mapping[str, Any]:
    """Sketch the direction of an update, where classes are not told."""
    if federation.clients.labels is not None:
        return {}
    moved = _directions.movement(federation, server, update)
    return {"direction": _directions.sketch(federation, update.submodel, moved, buckets)}


def observe(
    federation: Federation,
    server: Server,
    aggregate: Aggregate,
    reports: Sequence[Update | Failure],
    kept: int,
) -> Server:
    """Keep the newest directions."""
    new = {r.client: r.metrics["direction"] for r in reports if isinstance(r, Update) and "direction" in r.metrics}
    if not new:
        return server
    known, sketches = _known(server)
    rows = dict(zip(known.tolist(), sketches, strict=True))
    rows = {client: row for client, row in rows.items() if client not in new} | new  # the newest last
    newest = list(rows)[-kept:]
    ids = torch.tensor(newest, dtype=torch.int64)
    return remembering(server, clients=ids, directions=torch.stack([rows[client] for client in newest]))


def _known(server: Server) -> tuple[np.ndarray, torch.Tensor]:
    """Return whose directions are known, and their sketches."""
    kept = remembered(server)
    if "clients" not in kept:
        return np.empty(0, dtype=np.int64), torch.empty(0, 0, 0)
    return kept["clients"].numpy(), kept["directions"]
