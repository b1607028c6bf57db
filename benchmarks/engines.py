"""`processes` and `ray` with two workers against `local`, against each other and against a bare loop: wall seconds."""

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.loops import Bare
from benchmarks.measuring import Figure, Options, amount, ratio
from benchmarks.random_fleet import CNN, LOCAL, RESNET20, Kind, fleet, given_slots
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.engines.ray import ray
from fleetfit.rounds import Settings, one_round, start

KINDS = {"cnn": (CNN, None), "resnet20": (RESNET20, 1.85)}
"""With how many times as fast as `local` two workers should be, where a step takes 5 ms or more."""


def figures(options: Options) -> Iterator[Figure]:
    """Alternate the same round on each engine."""
    for name, (kind, wanted) in KINDS.items():
        yield from of_model(name, kind, wanted, options)


def of_model(model: str, kind: Kind, wanted: float | None, options: Options) -> Iterator[Figure]:
    """Compare the engines on one model."""
    federation, simulation = fleet(kind, 40, cohort=16)
    server, settings, bare = start(federation), Settings(1, LOCAL), Bare(federation, simulation)
    slots = [(client, int(federation.level_of[client])) for client in range(16)]
    makers = {"processes": processes, "ray": ray} if importlib.util.find_spec("ray") else {"processes": processes}
    started: dict[str, Any] = {"local": local(simulation)}
    try:
        for name, make in makers.items():
            began = time.perf_counter()
            started[name] = make(simulation, workers=2)
            one_round(federation, started[name], settings, server)
            took = time.perf_counter() - began
            yield amount(f"{model}, {name}: two workers start and finish a first round", took, "s")
        fixed = replace(federation, method=replace(federation.method, assign=given_slots(federation, slots)))
        rounds = {name: partial(one_round, fixed, engine, settings, server) for name, engine in started.items()}
        rounds["a bare loop"] = partial(bare.round, slots)
        for name in makers:
            for other in ("local", "a bare loop", *(m for m in makers if m < name)):
                asked = wanted if other == "local" else 0.97 if other in makers else None
                yield ratio(f"{model}, {other} against {name} with two workers, wall", rounds[other], rounds[name],
                            options.repetitions, clock="wall", better="higher", wanted=asked)  # fmt: skip
    finally:
        for engine in started.values():
            engine.close()
