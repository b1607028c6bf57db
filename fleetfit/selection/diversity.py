"""Diversity: clients that differ, by the classes that they report or the directions of their updates (DivFL).

Candidates are drawn uniformly among the connected clients, so that cohorts vary from round to round; the cohort is
chosen among them one after the other.

- With `fleet.reports_labels`: after a first one at random, always the client with which the distribution of the
  cohort's samples over the classes is nearest to the target: least sum_c (share_c - target_c)^2, as in Fed-CBS (Zhang
  et al., ICML 2023) with its uniform target.
- Else (Balakrishnan et al., ICLR 2022): the clients whose directions represent all clients best, by facility location
  over the directions of their last updates. Clients without a direction come first, at random. Once `kept` clients have
  one, those without fill their share of the cohort, on average; so with many more clients it is drawn at random for the
  most part.

A direction is a small sketch of a movement m: s_b = sum over the elements j in bucket b of r_j m_j with seeded signs
r_j (AMS and count sketches). The dot product of two sketches is that of the movements in expectation, with a standard
deviation of about |m| |m'| / sqrt(buckets). The model is divided into regions: the elements of the smallest level,
those that the next one has beyond it, and so on, each with buckets of its own. Two clients are compared on the regions
that both moved, so that a client with a small sub-model and one with a large one are alike if they are alike in the
common part. If a method draws or rolls channels, a region is filled in part only: elements that a client did not get
count as not moved there.

Differs from the papers: Fed-CBS draws with probabilities and favors clients that were chosen seldom, with encrypted
counts; DivFL compares whole gradients of equal models, and not sketches on the common part; sketches are kept only for
the clients that reported last.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Federation, Server, Update
from fleetfit.errors import check_range
from fleetfit.hooks import Method, Reports
from fleetfit.hooks.movements import get_movement
from fleetfit.seeds import make_torch_rng
from fleetfit.selection._sampling import load_memory, sample_uniformly, store_memory
from fleetfit.submodel import Submodel, full_submodel, get_slice_plan

Target = Literal["uniform", "all"]


def diversity(candidates: int = 0, target: Target = "uniform", buckets: int = 256, kept: int = 1000) -> Method:
    """Make the selection.

    Args:
        candidates: How many are drawn; never fewer than the cohort; 0 is three times as many.
        target: With reported classes: "uniform", or "all", the classes of all clients together.
        buckets: Numbers in the sketch of a direction, for each level.
        kept: Clients whose direction is kept, those that reported last.
    """
    check_range("candidates", candidates, 0, closed=True)
    check_range("buckets", buckets, 1, closed=True)
    check_range("kept", kept, 2, closed=True)
    return Method(
        choose_clients=partial(choose, candidates=candidates, target=target, kept=kept),
        annotate=partial(note, buckets=buckets),
        update_server_memory=partial(observe, kept=kept),
        check_memory=check_directions,
    )


def choose(
    federation: Federation, server: Server, rng: np.random.Generator, candidates: int, target: Target, kept: int
) -> list[int]:
    """Choose by classes if clients report them, else by directions."""
    reachable, cohort = federation.reachable(server.round), federation.cohort
    count = max(cohort, candidates or 3 * cohort)
    if federation.clients.labels is not None:
        ids = sample_uniformly(reachable, count, rng)
        shares = compute_target(federation, target)
        chosen: np.ndarray = ids[match_target(federation.clients.labels[ids], shares, min(cohort, len(ids)))]
        return chosen.tolist()
    clients, sketches = _load_directions(server)
    rows = np.full(len(federation.clients), -1)
    rows[clients] = np.arange(len(clients))
    unknown = reachable[rows[reachable] < 0]
    share = len(unknown) / max(len(reachable), 1)
    first = sample_uniformly(unknown, cohort if len(clients) < kept else int(cohort * share + rng.random()), rng)
    ids = sample_uniformly(reachable[rows[reachable] >= 0], count, rng)
    rest = min(cohort - len(first), len(ids))
    if not rest:
        return first.tolist()
    among = facility_location(compute_distances(sketches), rows[ids], rest)
    return np.concatenate([first, clients[among]]).tolist()


def compute_target(federation: Federation, target: Target) -> np.ndarray:
    """Return the shares of the classes that a cohort should have [classes]."""
    labels = federation.clients.labels
    assert labels is not None
    if target == "uniform":
        return np.full(labels.shape[1], 1 / labels.shape[1])
    total = labels[federation.able].sum(0)
    return np.asarray(total / total.sum())


def match_target(counts: np.ndarray, target: np.ndarray, count: int) -> list[int]:
    """Choose rows one after the other so that the shares of their sum are near the target, beginning with the first.

    Args:
        counts: Samples by class, [n, classes], in random order: the first of equals is taken.
        target: Shares, [classes].
        count: How many, at most n.
    """
    chosen: list[int] = []
    total = np.zeros(counts.shape[1])
    candidates = list(range(len(counts)))
    while len(chosen) < count:
        sums = total + counts[candidates]
        errors = ((sums / np.maximum(sums.sum(1, keepdims=True), 1) - target) ** 2).sum(1)
        row = candidates.pop(int(np.argmin(errors)) if chosen else 0)
        total = total + counts[row]
        chosen.append(row)
    return chosen


def note(federation: Federation, server: Server, update: Update, buckets: int) -> Mapping[str, Any]:
    """Sketch the direction of an update, if classes are not reported."""
    if federation.clients.labels is not None:
        return {}
    movement = get_movement(federation, server, update)
    return {"direction": sketch_movement(federation, update.submodel, movement, buckets)}


def observe(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, kept: int) -> Server:
    """Store the newest directions."""
    new = {r.client: r.metrics["direction"] for r in reports if isinstance(r, Update) and "direction" in r.metrics}
    if not new:
        return server
    clients, sketches = _load_directions(server)
    rows = dict(zip(clients.tolist(), sketches, strict=True))
    rows = {client: row for client, row in rows.items() if client not in new} | new  # the newest last
    newest = list(rows)[-kept:]
    ids = torch.tensor(newest, dtype=torch.int64)
    return store_memory(server, clients=ids, directions=torch.stack([rows[client] for client in newest]))


def _load_directions(server: Server) -> tuple[np.ndarray, Tensor]:
    """Return the clients whose directions are stored, and their sketches."""
    memory = load_memory(server)
    if "clients" not in memory:
        return np.empty(0, dtype=np.int64), torch.empty(0, 0, 0)
    return memory["clients"].numpy(), memory["directions"]


def check_directions(federation: Federation, memory: Mapping[str, Any]) -> None:
    """Check that each client with a direction has a finite one."""
    clients, directions = _load_directions(Server({}, memory=memory))
    are_ids = not len(clients) or (clients.dtype == np.int64 and clients.ndim == 1 and clients.min() >= 0)
    if not are_ids or directions.dim() != 3 or len(clients) != len(directions) or not bool(directions.isfinite().all()):
        raise ValueError("choice/clients and choice/directions are not a finite direction for each client")


# ---- directions ------------------------------------------------------------------------------------------------------


def sketch_movement(federation: Federation, submodel: Submodel, movement: Tensor, buckets: int) -> Tensor:
    """Return the sketch of a movement, float32 [levels, buckets]: zeros for a region that was not moved."""
    layout = federation.problem.layout
    full = torch.zeros(get_slice_plan(layout, full_submodel(layout)).size)
    get_slice_plan(layout, submodel).scatter(full, movement)
    full *= _draw_signs(federation.seed, len(full))
    rows: list[np.ndarray] = []  # summed by NumPy: torch's sums depend on the number of threads
    for level in federation.levels:
        compiled = get_slice_plan(layout, level.submodel)
        region = compiled.gather(full)
        compiled.scatter(full, torch.zeros_like(region))  # the rest is for the larger levels
        rows.append(np.pad(region.numpy(), (0, -len(region) % buckets)).reshape(-1, buckets).sum(0))
    return torch.from_numpy(np.stack(rows))


@lru_cache(maxsize=2)
def _draw_signs(seed: int, count: int) -> Tensor:
    return torch.randint(0, 2, (count,), generator=make_torch_rng(seed, "signs"), dtype=torch.int8) * 2 - 1


def compute_distances(sketches: Tensor) -> np.ndarray:
    """Return the distances between directions, [n, n]: |u - v| of the unit vectors u and v on the regions of both.

    Two clients without a common region count as at right angles.

    Args:
        sketches: Float [n, levels, buckets].
    """
    parts = sketches.numpy().astype(np.float64)
    flat, squares = parts.reshape(len(parts), -1), (parts**2).sum(2)
    common = squares @ (squares > 0).T.astype(np.float64)  # [n, n]: of each, its square in regions that the other moved
    norms = np.sqrt(common * common.T)
    cosine = np.divide(flat @ flat.T, norms, out=np.zeros_like(norms), where=norms > 0)
    distances = np.sqrt(2 - 2 * cosine.clip(-1, 1))
    np.fill_diagonal(distances, 0)
    return np.asarray(distances)


def facility_location(distance: np.ndarray, candidates: np.ndarray, count: int) -> list[int]:
    """Choose candidates one after the other so that all clients are near a chosen one (DivFL, Eq. 6 and 7).

    Each is the one that lowers sum_k min_(i chosen) distance[k, i] most; the first of equals.

    Args:
        distance: Of each client to each, [n, n].
        candidates: Indices to choose from, in [0, n).
        count: How many, at most as many as candidates.
    """
    nearest = np.full(len(distance), np.inf)
    chosen: list[int] = []
    rest = list(candidates)
    for _ in range(count):
        totals = np.minimum(nearest[:, None], distance[:, rest]).sum(0)
        client = rest.pop(int(np.argmin(totals)))
        nearest = np.minimum(nearest, distance[:, client])
        chosen.append(int(client))
    return chosen
