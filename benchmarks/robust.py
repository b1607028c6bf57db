"""Averages that compare a round's updates against the plain mean of the same updates, and the memory that they take."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.aggregation import BERT_BASE, RESNET110
from benchmarks.averaging import resident_bytes
from benchmarks.measuring import Figure, Options, amount, ratio
from benchmarks.random_fleet import fleet
from fleetfit.core import Update
from fleetfit.hooks import Method, build
from fleetfit.rounds import start
from fleetfit.submodel import concat_state, get_slice_plan

CASES = {"resnet110": (RESNET110, 50, 3), "bert_base": (BERT_BASE, 10, 1)}
"""Model, clients, and how often to repeat."""
OPTIONS: dict[str, dict[str, Any]] = {"outliers": {}, "krum": {}, "trimmed_mean": {}}


def figures(options: Options) -> Iterator[Figure]:
    """Average the updates of a round with each option, and without."""
    for name, (kind, clients, often) in CASES.items():
        federation, _ = fleet(kind, 8, cohort=8, samples=16)
        server, layout = start(federation), federation.problem.layout
        updates, full = [], concat_state(server.state)
        for i in range(clients):
            piece = federation.levels[3 - 4 * i // clients].submodel
            compiled = get_slice_plan(layout, piece)
            sent = compiled.gather(full)
            moved = sent + 0.01 * torch.randn(compiled.size, generator=torch.Generator().manual_seed(i))
            updates.append(Update(0, i, i, 0, piece, piece, compiled.views(moved), 16, {"loss": 1.0}))

        def averaged(method: Method, updates: Any = updates, of: Any = federation, server: Any = server) -> None:
            aggregator = method.make_aggregator(of, server)
            for update in method.filter_updates(of, server, updates):
                aggregator.add(update, method.weigh(update))
            aggregator.result()

        plain = build({"name": "scalefl"})
        size = f"{name} ({full.numel() / 1e6:.2f}M parameters), {clients} clients of four levels"
        for option, keys in OPTIONS.items():
            robust = build({"name": "scalefl", "options": {option: keys}})
            count = 1 if options.quick else min(often, options.repetitions)
            yield ratio(f"{size}: {option} against the plain mean", lambda m=robust: averaged(m),
                        lambda m=plain: averaged(m), count)  # fmt: skip
            before = resident_bytes(reset=True)
            averaged(robust)
            yield amount(
                f"{size}: {option}, memory beside the updates", (resident_bytes(peak=True) - before) / 1e6, "MB"
            )
        held = sum(concat_state(u.state).numel() * 4 for u in updates) / 1e6
        yield amount(f"{size}: the updates, which are kept", held, "MB")
