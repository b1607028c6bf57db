"""In the process that measures one level. Run as `python -m fleetfit.training.profiling.process` by `started`.

It reads what to measure as JSON from the standard input, and writes a line of JSON for every finding. Nothing is
pickled: problem and method are rebuilt from their specs, and samples are made up.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TextIO

import torch
from torch import nn

from fleetfit.cost import latency_now
from fleetfit.data import Data
from fleetfit.errors import FleetFitError
from fleetfit.machine import is_out_of_memory
from fleetfit.method import rebuild_problem
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import Submodel
from fleetfit.training.devices import accelerator_named, keep_freed_memory
from fleetfit.training.local_model import initial_base
from fleetfit.training.profiling.energy import energy_of
from fleetfit.training.profiling.memory import hold_to, peak_of
from fleetfit.training.profiling.steps import (
    Stopwatch,
    Timing,
    after,
    drawn,
    random_data,
    train,
)
from fleetfit.training.speed import prepared
from fleetfit.values import Job, Local, Problem

_OF_STEPS = 0.7  # of the time that is left for timing; the rest is for inference


class _Work:
    """A level, and all that its training needs."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.accelerator, self.threads = accelerator_named(asked["device"]), int(asked["threads"])
        problem = rebuild_problem(asked["problem"])
        self.problem = replace(problem, base=initial_base(problem, 0))
        self.piece = Submodel({a: range(n) for a, n in asked["sizes"].items()}, tuple(asked["exits"]))
        self.local, self.method = Local(**asked["local"]), asked["method"]
        self._level, self._classes = int(asked["level"]), int(asked["classes"])

    def prepared(self, module: nn.Module) -> nn.Module:
        """Have a module of the level compute as a job's does."""
        return prepared(module, self.problem.arithmetic_of(self.piece), self.accelerator)

    def data(self, samples: int) -> Data:
        """Return one batch."""
        return random_data(self.problem, self._classes, samples, make_torch_rng("profile"))

    def job(self, problem: Problem) -> Job:
        """Return a training of the level, as a client gets it."""
        state = drawn(problem, self.piece)
        return Job("train", 0, 1, 0, 0, self.piece, state, self.method, seed=0, level=self._level, local=self.local)


def _findings(asked: Mapping[str, Any], began: float) -> Iterator[dict[str, Any]]:
    """Measure memory, then steps and energy, then inference; yield each as soon as it is known."""
    work = _Work(asked)
    torch.set_num_threads(work.threads)
    size = int(asked["batch_size"])
    hold_to(asked["most_bytes"])
    data = work.data(size)
    warmed = replace(work.problem)  # its modules go when it goes, and with them all that was held for the level
    train(work.job(warmed), warmed, work.data(min(size, 2)), work.accelerator, after(1))
    del warmed
    peak = peak_of(lambda: train(work.job(work.problem), work.problem, data, work.accelerator, after(2)),
                   work.accelerator)  # fmt: skip
    yield {} if peak is None else {"memory_bytes": peak.taken_bytes, "process_bytes": peak.process_bytes}
    keep_freed_memory()  # as where jobs run
    left = began + float(asked["share_s"]) - time.perf_counter()
    watch = Stopwatch(time.perf_counter() + _OF_STEPS * left, energy_of().joules)
    train(work.job(work.problem), work.problem, data, work.accelerator, watch)
    steps = len(watch.seconds)
    yield {"step": asdict(Timing.of(watch.seconds))}
    if watch.energy_j is not None:
        yield {"energy_j": watch.energy_j / steps}
    left = began + float(asked["share_s"]) - time.perf_counter()
    sizes = {**work.problem.layout.full_sizes, **work.piece.sizes}
    found = latency_now(work.problem.architecture, sizes, work.piece.exits, work.problem.input_shape, work.threads,
                        work.accelerator, max(0.0, left), work.prepared)  # fmt: skip
    yield {"latency": asdict(Timing(found.median_s, found.spread_s, found.count))}


def reason_of(error: BaseException) -> str:
    """Return why a level could not be measured, as a person says it."""
    said = str(error)
    if is_out_of_memory(error):
        return "no memory was left for it"
    return said if isinstance(error, FleetFitError) else f"{type(error).__name__}: {said}"


def main(source: TextIO, target: TextIO) -> None:
    """Measure what the source asks for."""
    asked = json.loads(source.readline())
    spent = min(max(0.0, time.time() - float(asked["at"])), float(asked["share_s"]))  # to start this process
    began = time.perf_counter() - spent
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, float(asked["end_s"]))  # should nobody be there to end it
    try:
        for found in _findings(asked, began):
            print(json.dumps(found), file=target, flush=True)
        print(json.dumps({"done": True}), file=target, flush=True)
    except Exception as error:
        with contextlib.suppress(OSError):
            print(json.dumps({"failed": reason_of(error)}), file=target, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this to handle
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as told:
        os.dup2(2, 1)  # what a model prints does not get among the findings
        main(sys.stdin, told)
