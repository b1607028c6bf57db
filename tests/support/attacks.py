"""Jobs and updates of attacked rounds, on a tiny model, number by number."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from tiny import tiny_problem
from torch import Tensor

from fleetfit.core import Job, Update
from fleetfit.submodel import Submodel, extract

PROBLEM = tiny_problem()
LAYOUT = PROBLEM.layout
CORE, MIDDLE, FULL = (PROBLEM.submodel(w, e) for w, e in ((0.5, (1,)), (0.75, (1, 2)), (1.0, (1, 2, 3))))

TINY: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 10}},
    "model": {"name": "tiny:tiny"},
    "method": {"name": "scalefl"},
    "fleet": {"groups": [{"budget": 0.4}, {"budget": 1.0}], "tolerance": 0.5},
    "local": {"epochs": 8, "batch_size": 8, "lr": 0.1},
    "cohort": {"fraction": 1.0},
    "evaluate": {"every": 0, "batch_norm": ["static"], "statistics_samples": 60},
}


def random_state(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=rng) for n, s in LAYOUT.shapes(LAYOUT.full_sizes, LAYOUT.exits).items()}


SENT = random_state(0)


def make_job(piece: Submodel, index: int = 0) -> Job:
    return Job("train", 1, 3, index, index, piece, extract(LAYOUT, SENT, piece), {"name": "fedavg"}, 5)


def make_update(piece: Submodel, seed: int, job: Job) -> Update:
    state = extract(LAYOUT, random_state(seed), piece)
    return Update(1, job.index, job.client, 0, job.submodel, piece, state, 20, {"loss": 1.0})


def elements(state: Mapping[str, Tensor]) -> dict[tuple[str, tuple[int, ...]], float]:
    """Return a state, number by number; prefixes keep their places."""
    return {(name, at): float(t[at]) for name, t in state.items() for at in itertools.product(*map(range, t.shape))}
