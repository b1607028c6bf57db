"""Directions of updates as small sketches, compared on what both sub-models cover.

A sketch of a movement m is s_b = sum over the elements j in bucket b of r_j m_j with seeded signs r_j (AMS and count
sketches): the dot product of two sketches is that of the movements in expectation, with a standard deviation of about
|m| |m'| / sqrt(buckets).

The model is divided into regions: what the smallest level has, what the next one has beyond that, and so on, each with
buckets of its own. Two clients are compared on the regions that both moved, so that one with a small sub-model and one
with a large one count as alike if they are alike in the part that they share. Channels that a method draws or rolls
fill a region only in part: what a client did not get counts as not moved there.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from fleetfit.layout import State
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import Submodel, concat_state, full_submodel, get_slice_plan, move_state
from fleetfit.values import Federation, Server, Update


def movement(federation: Federation, server: Server, update: Update) -> State:
    """Return an update's state minus what was sent."""
    layout = federation.problem.layout
    sent = federation.method.dispatch(federation, server, update.client, update.dispatched)
    if update.submodel != update.dispatched:
        sent = move_state(layout, sent, update.dispatched, update.submodel)
    compiled = get_slice_plan(layout, update.submodel)
    names = compiled.names
    moved = concat_state({n: update.state[n] for n in names}) - concat_state({n: sent[n] for n in names}).to("cpu")
    return compiled.views(moved)


def sketch(federation: Federation, piece: Submodel, moved: State, buckets: int) -> Tensor:
    """Return the sketch of a movement, float32 [levels, buckets]: a row of zeros where a region was not moved."""
    layout = federation.problem.layout
    full = torch.zeros(get_slice_plan(layout, full_submodel(layout)).size)
    get_slice_plan(layout, piece).scatter(full, concat_state(moved))
    full *= _signs(federation.seed, len(full))
    rows: list[np.ndarray] = []  # summed by NumPy: torch's sums depend on the number of threads
    for level in federation.levels:
        compiled = get_slice_plan(layout, level.submodel)
        here = compiled.gather(full)
        compiled.scatter(full, torch.zeros_like(here))  # what is left is for the larger levels
        rows.append(np.pad(here.numpy(), (0, -len(here) % buckets)).reshape(-1, buckets).sum(0))
    return torch.from_numpy(np.stack(rows))


@functools.lru_cache(maxsize=2)
def _signs(seed: int, count: int) -> Tensor:
    return torch.randint(0, 2, (count,), generator=make_torch_rng(seed, "signs"), dtype=torch.int8) * 2 - 1


def distances(sketches: Tensor) -> np.ndarray:
    """Return how far directions are apart, [n, n]: |u - v| of the unit vectors u and v on the regions of both.

    Two clients that share no region are taken as at right angles.

    Args:
        sketches: Float [n, levels, buckets].
    """
    parts = sketches.numpy().astype(np.float64)
    flat, squares = parts.reshape(len(parts), -1), (parts**2).sum(2)
    mine = squares @ (squares > 0).T.astype(np.float64)  # [n, n]: of each, what it moved where the other moved too
    norms = np.sqrt(mine * mine.T)
    cosine = np.divide(flat @ flat.T, norms, out=np.zeros_like(norms), where=norms > 0)
    found = np.sqrt(2 - 2 * cosine.clip(-1, 1))
    np.fill_diagonal(found, 0)
    return np.asarray(found)


def facility_location(distance: np.ndarray, candidates: np.ndarray, count: int) -> list[int]:
    """Choose candidates one after the other so that the others are near some chosen one (DivFL, Eq. 6 and 7).

    Each is the one that lowers sum_k min_(i chosen) distance[k, i] most; the first of equals.

    Args:
        distance: From everybody to everybody, [n, n].
        candidates: Places of those to choose from, in [0, n).
        count: How many, at most as many as candidates.
    """
    nearest = np.full(len(distance), np.inf)
    chosen: list[int] = []
    left = list(candidates)
    for _ in range(count):
        totals = np.minimum(nearest[:, None], distance[:, left]).sum(0)
        pick = left.pop(int(np.argmin(totals)))
        nearest = np.minimum(nearest, distance[:, pick])
        chosen.append(int(pick))
    return chosen
