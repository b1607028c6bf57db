"""`processes` and `ray` with two workers against `local`, against each other and against a bare loop.

Wall seconds, and CPU seconds of all processes that an engine has: on a busy machine these say what its messages cost.
"""

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from benchmarks.loops import Bare
from benchmarks.measuring import Figure, Options, Seconds, alternate, amount, of_many, quotients, shown
from benchmarks.random_fleet import CNN, LOCAL, RESNET20, Kind, fleet, given_slots
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.engines.ray import ray
from fleetfit.rounds import Settings, run_round, start

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
    own: dict[str, list[psutil.Process]] = {}
    try:
        for name, make in makers.items():
            others, began, before = _children(), time.perf_counter(), _cpu_s([])
            started[name] = make(simulation, workers=2)
            run_round(federation, started[name], settings, server)
            took = time.perf_counter() - began
            own[name] = sorted(_children() - others, key=lambda process: process.pid)
            cpu = _cpu_s(own[name]) - before
            yield amount(f"{model}, {name}: two workers start and finish a first round", took, "s",
                         detail=f"{shown(cpu)} CPU s")  # fmt: skip
        fixed = replace(federation, method=replace(federation.method, assign=given_slots(federation, slots)))
        rounds: dict[str, Callable[[], Seconds]] = {}
        for name, engine in started.items():
            rounds[name] = partial(_timed, partial(run_round, fixed, engine, settings, server), own.get(name, []))
        rounds["a bare loop"] = partial(_timed, partial(bare.round, slots), [])
        for name in makers:
            for other in ("local", "a bare loop", *(m for m in makers if m < name)):
                asked = wanted if other == "local" else 0.97 if other in makers else None
                pairs = list(alternate(rounds[other], rounds[name], options.repetitions))
                for clock, column in (("wall", 1), ("CPU", 0)):
                    limit = asked if clock == "wall" or other in makers else None  # nothing is faster by its CPU
                    values = quotients([pair[column] for pair in pairs])
                    yield of_many(f"{model}, {other} against {name} with two workers, {clock}", values,
                                  better="higher", wanted=limit)  # fmt: skip
    finally:
        for engine in started.values():
            engine.close()


def _timed(round: Callable[[], Any], processes: list[psutil.Process]) -> Seconds:
    """Run a round; return its wall seconds, and the CPU seconds of this process and of an engine's others."""
    cpu, wall = _cpu_s(processes), time.perf_counter()
    round()
    return Seconds(_cpu_s(processes) - cpu, time.perf_counter() - wall)


def _cpu_s(processes: list[psutil.Process]) -> float:
    total = time.process_time()
    for process in processes:
        times = process.cpu_times()
        total += times.user + times.system
    return total


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
