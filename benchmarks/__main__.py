"""What FleetFit adds to the work itself, as ratios: `make bench`, or `python -m benchmarks [part ...]`.

Parts: `round` (our round against a bare PyTorch loop), `aggregation` (against a plain copy of the same bytes),
`clients` (cost per round against the number of registered clients), `engines` (processes and ray with two workers
against local and a bare loop), `codec` (messages and files against a copy of the same bytes), `frozen` (a step on a
frozen backbone against gradients for everything), `fleet` (a message to a node, in three ways of running its work; only
when it is named). `python -m benchmarks ship RUN` measures the exported levels of a run.

Both sides of a ratio alternate in one process; the figure is the median of the ratios in CPU seconds, with its range.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import codec, frozen
from fleetfit.aggregate import Mean, applied
from fleetfit.data import Data
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.engines.ray import ray
from fleetfit.layout import build_module
from fleetfit.levels import split_levels
from fleetfit.losses import self_distillation
from fleetfit.method import build
from fleetfit.planner import Targets
from fleetfit.rounds import Settings, one_round, start
from fleetfit.submodel import cut, flat_of
from fleetfit.tasks import classification
from fleetfit.training import initial_state
from fleetfit.training.devices import keep_freed_memory
from fleetfit.values import Clients, DeviceResources, Federation, Local, Problem, Simulation

LOCAL = Local(lr=0.05, momentum=0.9, weight_decay=5e-4, batch_size=16, epochs=1)
RATIOS = Targets((0.125, 0.25, 0.5, 1.0), (0.1, 0.1, 0.1, 0.1))


class Parts(Sequence[dict[str, Tensor]]):
    """Splits of any number of clients, made when they are asked for."""

    def __init__(self, clients: int, samples: int, total: int) -> None:
        self.clients, self.samples, self.total = clients, samples, total

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self.clients:
            raise IndexError(i)
        first = (i * self.samples) % (self.total - self.samples + 1)
        none = torch.empty(0, dtype=torch.int64)
        return {"train": torch.arange(first, first + self.samples), "validation": none, "test": none}


def fleet(model: str, shape: tuple[int, ...], clients: int, samples: int, cohort: int) -> tuple[Federation, Simulation]:
    """A federation of four equal budget classes on random images."""
    rng = np.random.default_rng(0)
    total = 4000
    x = torch.from_numpy(rng.integers(0, 256, size=(total, *shape), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, 10, size=total))
    nobody = torch.empty(0, dtype=torch.int64)
    data = Data("random", x, y, {"train": torch.arange(total), "validation": nobody, "test": nobody}, 10,
                mean=(0.5,) * shape[0], std=(0.25,) * shape[0], augment="crop-flip")  # fmt: skip
    given = {"classes": 10, "channels": shape[0], "input_shape": list(shape)}
    problem = Problem.rebuilt({"model": {"name": model}, "given": given, "task": "classification", "exits": []})
    levels = split_levels(problem, RATIOS)
    problem = problem.with_exits({e for level in levels for e in level.submodel.exits})
    spec = {"name": "scalefl"}
    budgets = np.tile([0.125, 0.25, 0.5, 1.0], clients // 4 + 1)[:clients]
    registered = Clients(np.full(clients, samples), budgets, np.full(clients, 0.15))
    federation = Federation(problem, registered, tuple(levels), cohort, build(spec), spec, 0)
    return federation, Simulation(
        problem, data, Parts(clients, samples, total), DeviceResources({"parameters": budgets})
    )


# ---- (a) our round against a bare loop ---------------------------------------------------------------------------


class Bare:
    """Forward, backward and optimiser steps on the same sub-models, and nothing else."""

    def __init__(self, federation: Federation, simulation: Simulation) -> None:
        self.data, self.parts, self.models = simulation.data, simulation.parts, []
        for level in federation.levels:
            sizes = {**federation.problem.layout.full_sizes, **level.submodel.sizes}
            module = build_module(federation.problem.architecture, sizes, level.submodel.exits)
            count = sum(p.numel() for p in module.parameters())
            flat, grad, at = torch.empty(count), torch.zeros(count), 0
            for parameter in module.parameters():
                here = slice(at, at := at + parameter.numel())
                flat[here] = parameter.detach().flatten()
                parameter.data, parameter.grad = flat[here].view(parameter.shape), grad[here].view(parameter.shape)
            self.models.append((module, flat, grad))

    def round(self, slots: list[tuple[int, int]]) -> None:
        rng = torch.Generator().manual_seed(0)
        for client, level in slots:
            module, flat, grad = self.models[level]
            module.train()
            whole = torch.nn.Parameter(flat)
            whole.grad = grad
            optimiser = torch.optim.SGD([whole], lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
            indices = self.parts[client]["train"]
            for batch in indices[torch.randperm(len(indices), generator=rng)].split(16):
                x, y = self.data.batch(batch, rng)
                grad.zero_()
                self_distillation(module(x), y, classification, 0.1, 3.0).backward()
                optimiser.step()


def round_overhead(model: str, shape: tuple[int, ...], samples: int, repetitions: int) -> None:
    """Alternate our round and the bare loop on the same clients and levels."""
    federation, simulation = fleet(model, shape, clients=8, samples=samples, cohort=8)
    engine, settings, bare = local(simulation), Settings(1, LOCAL), Bare(federation, simulation)
    server = start(federation)
    slots = [(c, int(federation.level_of[c])) for c in range(8)]
    pairs = alternate(lambda: one_round(federation, engine, settings, server), lambda: bare.round(slots), repetitions)
    report(f"round, {model}, batch 16, four levels, {samples} samples per client", pairs, "bare loop")


# ---- (b) aggregation against a copy ------------------------------------------------------------------------------


def aggregation(model: str, shape: tuple[int, ...], repetitions: int) -> None:
    """Fold ten updates of four levels, and copy the same bytes."""
    federation, _ = fleet(model, shape, 8, 16, 8)
    problem = federation.problem
    state = initial_state(problem, 0)
    full = flat_of(state)
    pieces = sorted((federation.levels[i % 4].submodel for i in range(10)), key=lambda p: -cut(problem.layout, p).size)
    states = [cut(problem.layout, p).views(cut(problem.layout, p).gather(full)) for p in pieces]
    buffers = [torch.empty_like(flat_of(s)) for s in states]

    def ours() -> None:
        mean = Mean(problem.layout)
        for piece, update in zip(pieces, states, strict=True):
            mean.add(piece, update, 1.0)
        applied(state, mean.result())

    def copies() -> None:
        for buffer, update in zip(buffers, states, strict=True):
            buffer.copy_(flat_of(update))

    report(f"aggregation, {model}, 10 clients of four levels", alternate(ours, copies, repetitions), "copy")
    for cohort in (10, 100, 1000):
        print(f"  memory held while folding {cohort:>5} updates: {held(problem, pieces, states, cohort) / 1e6:6.1f} MB")


def held(problem: Problem, pieces: list[Any], states: list[Any], cohort: int) -> int:
    """Return the bytes of the tensors that a running mean holds after so many updates."""
    mean = Mean(problem.layout)
    for i in range(cohort):
        mean.add(pieces[i % 10], states[i % 10], 1.0)
    values = [v for held in vars(mean).values() for v in (held if isinstance(held, tuple) else (held,))]
    tensors = {v.data_ptr(): v for v in values if isinstance(v, Tensor)}.values()
    return sum(t.numel() * t.element_size() for t in tensors)


# ---- (c) registered clients --------------------------------------------------------------------------------------


def registered(repetitions: int) -> None:
    """Time a round of ten clients with more and more clients registered."""
    runs = {}
    for clients in (100, 10_000, 1_000_000):
        federation, simulation = fleet("cnn", (1, 28, 28), clients, samples=64, cohort=10)
        engine, server = local(simulation), start(federation)
        ten = [(client, int(federation.level_of[client])) for client in range(10)]
        same_slots = replace(federation.method, assign=given_slots(federation, ten))
        runs[clients] = (replace(federation, method=federation.method), same_slots, engine, server)
    seconds: dict[int, list[float]] = {clients: [] for clients in runs}
    for _ in range(repetitions):
        for clients, (federation, method, engine, server) in runs.items():
            fixed = replace(federation, method=method)
            fixed.__dict__["level_of"] = federation.level_of
            began = time.process_time()
            federation.method.assign(federation, server, np.random.default_rng(0))  # the cost of choosing
            one_round(fixed, engine, Settings(1, LOCAL), server)
            seconds[clients].append(time.process_time() - began)
    first = statistics.median(seconds[100])
    for clients, found in seconds.items():
        middle = statistics.median(found)
        print(
            f"round, {clients:>9,} registered clients, cohort 10: "
            f"{middle:.3f} CPU s, {middle / first:.3f} x that of 100"
        )


def given_slots(federation: Federation, slots: list[tuple[int, int]]) -> Callable[..., Any]:
    """Assign the same clients and levels in every round, so that nothing else differs."""
    found = [(client, level, federation.levels[level].submodel) for client, level in slots]
    return lambda *_: found


# ---- engines -----------------------------------------------------------------------------------------------------


def engines(repetitions: int) -> None:
    """Alternate rounds on `local`, on `processes` and `ray` with two workers each, and a bare loop, in wall seconds."""
    federation, simulation = fleet("cnn", (1, 28, 28), 40, samples=128, cohort=16)
    server, settings, bare = start(federation), Settings(1, LOCAL), Bare(federation, simulation)
    slots = [(c, int(federation.level_of[c])) for c in range(16)]
    makers = {"processes": processes, "ray": ray} if importlib.util.find_spec("ray") else {"processes": processes}
    started: dict[str, Any] = {"local": local(simulation)}
    try:
        for name, make in makers.items():
            began = time.perf_counter()
            started[name] = make(simulation, workers=2)
            one_round(federation, started[name], settings, server)
            print(f"{name}: two workers start and finish a first round in {time.perf_counter() - began:.1f} s")
        fixed = replace(federation, method=replace(federation.method, assign=given_slots(federation, slots)))
        rounds = {name: partial(one_round, fixed, engine, settings, server) for name, engine in started.items()}
        rounds["a bare loop"] = partial(bare.round, slots)
        for name in makers:
            for other in ("local", "a bare loop", *(m for m in makers if m < name)):
                pairs = alternate(rounds[other], rounds[name], repetitions, clock=time.perf_counter)
                report(f"wall time of a round, {other} against {name} with two workers, cnn", pairs, name)
    finally:
        for engine in started.values():
            engine.close()


# ---- measuring ---------------------------------------------------------------------------------------------------


def alternate(
    a: Callable[[], Any], b: Callable[[], Any], repetitions: int, clock: Callable[[], float] = time.process_time
) -> Iterator[tuple[float, float]]:
    """Run a and b in turn, once unmeasured, and yield their seconds."""
    a(), b()
    for _ in range(repetitions):
        t0 = clock()
        a()
        t1 = clock()
        b()
        yield t1 - t0, clock() - t1


def report(what: str, pairs: Iterator[tuple[float, float]], against: str) -> None:
    """Print the median of the ratios and its range."""
    found = list(pairs)
    ratios = sorted(a / b for a, b in found)
    ours, theirs = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"{what}: {statistics.median(ratios):.3f} x {against} (range {ratios[0]:.3f}-{ratios[-1]:.3f}, "
          f"n = {len(ratios)}; {ours * 1e3:.1f} ms against {theirs * 1e3:.1f} ms)", flush=True)  # fmt: skip


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["round", "aggregation", "clients", "engines", "codec", "frozen"])
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    if options.parts[0] == "ship":
        from benchmarks.ship import ship

        for folder in options.parts[1:]:
            ship(folder)
        return
    if "round" in options.parts:
        round_overhead("cnn", (1, 28, 28), 128, options.repetitions)
        round_overhead("resnet20", (3, 32, 32), 64, options.repetitions)
    if "aggregation" in options.parts:
        aggregation("resnet110", (3, 32, 32), 5 * options.repetitions)
        aggregation("cnn", (1, 28, 28), 20 * options.repetitions)
    if "clients" in options.parts:
        registered(options.repetitions)
    if "engines" in options.parts:
        engines(options.repetitions)
    if "fleet" in options.parts:
        from benchmarks import fleet as messages

        messages.fleet()
    if "codec" in options.parts:
        for what, ours, copy in codec.steps():
            report(what, alternate(ours, copy, 10 * options.repetitions), "a copy")
    if "frozen" in options.parts:
        for name, ours, naive in frozen.modes():
            report(f"a training step, DeiT-S of 6 blocks, {name}", alternate(ours, naive, options.repetitions), "naive")
            alive = [frozen.peak_bytes(step) / 1e6 for step in (ours, naive)]
            print(f"  peak memory {alive[0] / alive[1]:.3f} x naive ({alive[0]:.1f} MB against {alive[1]:.1f} MB)")


if __name__ == "__main__":
    main()
