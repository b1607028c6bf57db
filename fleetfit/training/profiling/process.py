"""The process that measures one level, run as `python -m fleetfit.training.profiling.process` by `profile_level`.

It reads the request as JSON from standard input, and prints a line of JSON for every result. Nothing is pickled:
problem and method are rebuilt from their specs, and samples are random.
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

from fleetfit.core import Job, Local, Problem
from fleetfit.cost.latency import measure_latency, summarize_passes
from fleetfit.errors import FleetFitError
from fleetfit.hooks import rebuild_problem
from fleetfit.machine import is_out_of_memory
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import Submodel
from fleetfit.training.local_model import initial_base
from fleetfit.training.profiling.energy import find_energy_meter
from fleetfit.training.profiling.memory import limit_memory, measure_peak
from fleetfit.training.profiling.steps import Stopwatch, draw_state, make_random_data, stop_after, train_until
from fleetfit.training.runtime import keep_freed_memory, prepare_model, resolve_device

_STEPS_SHARE = 0.7  # of the time for timing; the rest is for inference


def measure(request: Mapping[str, Any], end: float) -> Iterator[dict[str, Any]]:
    """Measure memory, then steps and energy, then inference; yield each result at once.

    Args:
        request: The request of `ProfileRequest.to_json`.
        end: When only required repetitions are made, by `time.perf_counter`.
    """
    accelerator, threads, size = resolve_device(request["device"]), int(request["threads"]), int(request["batch_size"])
    problem = rebuild_problem(request["problem"])
    problem = replace(problem, base=initial_base(problem, 0))
    submodel = Submodel({axis: range(n) for axis, n in request["sizes"].items()}, tuple(request["exits"]))
    local, classes = Local(**request["local"]), int(request["classes"])

    def make_job(problem: Problem) -> Job:
        state, level = draw_state(problem, submodel), int(request["level"])
        return Job("train", 0, 1, 0, 0, submodel, state, request["method"], seed=0, level=level, local=local)

    torch.set_num_threads(threads)
    limit_memory(request["most_bytes"])
    data = make_random_data(problem, classes, size, make_torch_rng("profile"))
    warm_up = replace(problem)  # its modules are freed with it, and all that the level needs
    few = make_random_data(problem, classes, min(size, 2), make_torch_rng("profile"))
    train_until(make_job(warm_up), warm_up, few, accelerator, stop_after(1))
    del warm_up
    yield measure_peak(lambda: train_until(make_job(problem), problem, data, accelerator, stop_after(2)), accelerator)

    keep_freed_memory()  # as engines do
    now = time.perf_counter()
    watch = Stopwatch(now + _STEPS_SHARE * (end - now), find_energy_meter().read)
    train_until(make_job(problem), problem, data, accelerator, watch)
    yield {"step": asdict(summarize_passes(watch.seconds))}
    if watch.energy_j is not None:
        yield {"energy_j": watch.energy_j / len(watch.seconds)}

    sizes, left_s = {**problem.layout.full_sizes, **submodel.sizes}, max(0.0, end - time.perf_counter())
    arithmetic = problem.get_arithmetic(submodel)
    latency = measure_latency(
        problem.architecture, sizes, submodel.exits, problem.input_shape, threads, accelerator, left_s,
        lambda module: prepare_model(module, arithmetic, accelerator),
    )  # fmt: skip
    yield {"latency": asdict(latency)}


def describe_error(error: BaseException) -> str:
    """Return why a level could not be measured."""
    if is_out_of_memory(error):
        return "no memory was left for it"
    return str(error) if isinstance(error, FleetFitError) else f"{type(error).__name__}: {error}"


def main(source: TextIO, target: TextIO) -> None:
    """Measure what the source requests, and print the results to the target."""
    line = source.readline()
    if not line:  # its parent was stopped before it could ask
        return
    request = json.loads(line)
    share_s = float(request["share_s"])
    start_s = min(max(0.0, time.time() - float(request["at"])), share_s)  # of this process
    end = time.perf_counter() - start_s + share_s
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, float(request["end_s"]))  # its parent may be gone
    try:
        for result in measure(request, end):
            print(json.dumps(result), file=target, flush=True)
        print(json.dumps({"done": True}), file=target, flush=True)
    except Exception as error:
        with contextlib.suppress(OSError):
            print(json.dumps({"failed": describe_error(error)}), file=target, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)  # what a model prints is not a result
        main(sys.stdin, results)
