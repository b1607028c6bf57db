"""Averaging ten updates of four levels against a plain copy of the same bytes, and what is held meanwhile."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Figure, Options, amount, ratio
from benchmarks.random_fleet import CNN, Kind, fleet
from fleetfit.aggregate import Mean, apply_mean
from fleetfit.core import Problem
from fleetfit.submodel import concat_state, get_slice_plan
from fleetfit.training import initial_state

RESNET110 = Kind({"name": "resnet110"}, (3, 32, 32), 16)
BERT_BASE = Kind({"name": "bert_base"}, (128,), 16, vocabulary=30522)
KINDS = {"resnet110": (RESNET110, 5, 2.0), "bert_base": (BERT_BASE, 1, 2.0), "cnn": (CNN, 20, None)}
"""With how often to repeat, and what is wanted."""


def figures(options: Options) -> Iterator[Figure]:
    """Fold ten updates, and copy the same bytes."""
    for name, (kind, often, wanted) in KINDS.items():
        federation, _ = fleet(kind, 8, cohort=8, samples=16)
        problem = federation.problem
        state = initial_state(problem, 0)
        full = concat_state(state)
        pieces = sorted((federation.levels[i % 4].submodel for i in range(10)),
                        key=lambda p, layout=problem.layout: -get_slice_plan(layout, p).size)  # fmt: skip
        keys = pieces if full.numel() > 1e7 else list(range(10))  # of ten updates, one of a level, where they are large
        each = {k: get_slice_plan(problem.layout, p).views(get_slice_plan(problem.layout, p).gather(full))
                for k, p in dict(zip(keys, pieces, strict=True)).items()}  # fmt: skip
        room = {k: torch.empty_like(concat_state(s)) for k, s in each.items()}
        states, buffers = [each[k] for k in keys], [room[k] for k in keys]

        def ours(
            weight: float, problem: Problem = problem, pieces: Any = pieces, states: Any = states, state: Any = state
        ) -> None:
            mean = Mean(problem.layout)
            for piece, update in zip(pieces, states, strict=True):
                mean.add(piece, update, weight)
            apply_mean(state, mean.result())

        def copies(buffers=buffers, states=states) -> None:
            for buffer, update in zip(buffers, states, strict=True):
                buffer.copy_(concat_state(update))

        what = f"{name} ({full.numel() / 1e6:.2f}M parameters), 10 clients of four levels, against a copy"
        yield ratio(what, partial(ours, 1.0), copies, often * options.repetitions, wanted=wanted)
        yield ratio(f"{what}, weighted by samples", partial(ours, 64.0), copies, often * options.repetitions)
        for cohort in (10, 100, 1000) if name != "bert_base" else (10, 100):
            yield amount(f"{name}, memory held while {cohort:,} updates are folded",
                         held(problem, pieces, states, cohort) / 1e6, "MB")  # fmt: skip


def held(problem: Problem, pieces: list[Any], states: list[Any], cohort: int) -> int:
    """Return the bytes of the tensors that a running mean holds after so many updates."""
    mean = Mean(problem.layout)
    for i in range(cohort):
        mean.add(pieces[i % 10], states[i % 10], 1.0)
    values = [v for held in vars(mean).values() for v in (held if isinstance(held, tuple) else (held,))]
    tensors = {v.data_ptr(): v for v in values if isinstance(v, Tensor)}.values()
    return sum(t.numel() * t.element_size() for t in tensors)
