"""A round of ten clients as more and more clients are registered."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.measuring import Figure, Options, of_many
from benchmarks.random_fleet import CNN, LOCAL, fleet, given_slots
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, one_round, start

REGISTERED = (100, 10_000, 1_000_000)


def figures(options: Options) -> Iterator[Figure]:
    """Alternate the same round, and the choice of its clients, between fleets of different sizes."""
    runs = {}
    for clients in REGISTERED:
        federation, simulation = fleet(CNN, clients, cohort=10, samples=64)
        ten = [(client, int(federation.level_of[client])) for client in range(10)]
        fixed = replace(federation, method=replace(federation.method, assign=given_slots(federation, ten)))
        fixed.__dict__["level_of"] = federation.level_of
        runs[clients] = (federation, fixed, local(simulation), start(federation))
    seconds: dict[int, list[float]] = {clients: [] for clients in runs}
    for turn in range(options.repetitions + 1):
        for clients, (federation, fixed, engine, server) in runs.items():
            began = time.process_time()
            federation.method.assign(federation, server, np.random.default_rng(0))  # the cost of choosing
            one_round(fixed, engine, Settings(1, LOCAL), server)
            if turn:
                seconds[clients].append(time.process_time() - began)
    first = seconds[REGISTERED[0]]
    for clients in REGISTERED[1:]:
        quotients = [b / a for a, b in zip(first, seconds[clients], strict=True)]
        yield of_many(f"a round of 10 out of {clients:,} registered clients, against out of {REGISTERED[0]}", quotients,
                      detail=f"{statistics.median(seconds[clients]) * 1e3:.0f} CPU ms")  # fmt: skip
