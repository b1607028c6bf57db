"""A round of ten clients as more and more clients are registered; a round of ten thousand out of a million."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.averaging import resident_bytes
from benchmarks.measuring import Figure, Options, amount, of_many
from benchmarks.random_fleet import CNN, LOCAL, fleet, given_slots
from fleetfit.core import Availability, Local
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, run_round, start
from fleetfit.rounds.links import LinkFaults

REGISTERED = (100, 10_000, 1_000_000)
JOBS = (1_000, 10_000)
ONE_STEP = Local(lr=0.05, batch_size=4, epochs=1)


def figures(options: Options) -> Iterator[Figure]:
    """Measure rounds of ten clients, then large ones."""
    yield from few_of_many(options)
    yield from many_of_many(options)


def few_of_many(options: Options) -> Iterator[Figure]:
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
            run_round(fixed, engine, Settings(1, LOCAL), server)
            if turn:
                seconds[clients].append(time.process_time() - began)
    first = seconds[REGISTERED[0]]
    for clients in REGISTERED[1:]:
        quotients = [b / a for a, b in zip(first, seconds[clients], strict=True)]
        yield of_many(f"a round of 10 out of {clients:,} registered clients, against out of {REGISTERED[0]}", quotients,
                      detail=f"{statistics.median(seconds[clients]) * 1e3:.0f} CPU ms")  # fmt: skip


def many_of_many(options: Options) -> Iterator[Figure]:
    """Run rounds of one step for each of many clients, who come and go, and lose a tenth of their messages."""
    registered, jobs = REGISTERED[-1], [n // 10 for n in JOBS] if options.quick else JOBS
    spent, rounds = dict[int, float](), 3
    for cohort in jobs:
        federation, simulation = fleet(replace(CNN, shape=(1, 8, 8)), registered, cohort, samples=4)
        there = Availability(registered, share=0.5, spread=0.5, rounds=4.0)
        simulation = replace(simulation, resources=replace(simulation.resources, availability=there))
        federation = replace(federation, connected=there.online)
        settings = Settings(rounds, ONE_STEP, links=LinkFaults(0.05, 0.05, 0.05))
        engine, server, seconds, held = local(simulation), start(federation), list[float](), list[int]()
        server, _ = run_round(federation, engine, settings, server)
        before = resident_bytes(reset=True)
        for _ in range(rounds - 1):
            began = time.process_time()
            server, _ = run_round(federation, engine, settings, server)
            seconds.append((time.process_time() - began) / cohort)
            held.append(resident_bytes())
        peak = resident_bytes(peak=True)
        spent[cohort] = statistics.median(seconds)
        what = f"a round of {cohort:,} jobs out of {registered:,} registered clients"
        yield amount(f"{what}: memory above what is held between rounds", (peak - before) / 1e6, "MB",
                     detail=f"{spent[cohort] * 1e3:.2f} CPU ms a job")  # fmt: skip
        yield amount(f"{what}: memory that the next round begins with, more than the last one did",
                     (held[-1] - held[0]) / 1e6, "MB")  # fmt: skip
    few, many = jobs
    yield of_many(f"a job in a round of {many:,} out of {registered:,}, against one in a round of {few:,}",
                  [spent[many] / spent[few]])  # fmt: skip
