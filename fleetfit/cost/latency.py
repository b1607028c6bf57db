"""How long one sample takes on this machine: warm-up, then the median and the spread of many passes, one thread.

Sub-models that are compared are measured in turn, a few passes of each at a time, so that other load on the machine
affects all of them alike.

A measured latency differs from run to run. `Conditions.measured` keeps it and a run records it, so that a resumed run
plans the same levels.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.anatomy import Architecture, batch_norms, build_module, explain_errors, make_input, place_module
from fleetfit.cost.count import Conditions, get_layout, submodel_cost
from fleetfit.cost.parts import Measure, Place, Profile, iter_parts
from fleetfit.machine import use_threads
from fleetfit.seeds import isolate_rng

_WARM_UP, _FEWEST, _MOST = 3, 9, 200
_PATIENCE_S = 1.0  # no further pass after these seconds
_TURN = 10  # passes of one sub-model before it is the next one's turn
_DIGITS = 7  # of recorded seconds: tenths of a microsecond


@dataclass(frozen=True)
class Latency:
    """The time of a pass, such as a forward pass of one sample with all exits.

    Attributes:
        median_s: Its median in seconds.
        spread_s: Between its quartiles.
        count: Number of passes; 0 for a recorded latency.
        processor_s: The median of the seconds in which the thread had a processor; None where that was not measured.
        processor_share: The share of the passes' time in which it had one: less than 1 on a busy machine.
    """

    median_s: float
    spread_s: float
    count: int = 0
    processor_s: float | None = None
    processor_share: float | None = None


@dataclass(frozen=True)
class TimedModel:
    """A sub-model whose latency is measured.

    Attributes:
        architecture: The model family.
        sizes: Size of every axis.
        exits: Its exits.
        input_shape: Shape of one sample.
    """

    architecture: Architecture
    sizes: Mapping[str, int]
    exits: tuple[int, ...]
    input_shape: tuple[int, ...]


def get_latency(
    architecture: Architecture,
    sizes: Mapping[str, int],
    exits: Sequence[int],
    input_shape: Sequence[int],
    conditions: Conditions,
) -> Latency:
    """Return the latency of a sub-model, measured now unless the conditions know it.

    Args:
        architecture: The model family.
        sizes: Size of every axis.
        exits: Its exits.
        input_shape: Shape of one sample.
        conditions: What was measured before; the new measurement is added.

    Raises:
        ModelError: The model cannot be built or does not accept the input.
    """
    key = f"latency_s {_make_key(architecture, sizes, exits, input_shape)}"
    if key not in conditions.measured:
        latency = measure_latency(architecture, sizes, exits, input_shape)
        conditions.measured[key] = [round(latency.median_s, _DIGITS), round(latency.spread_s, _DIGITS)]
    median, spread = conditions.measured[key]
    return Latency(median, spread)


def measure_latency(
    architecture: Architecture,
    sizes: Mapping[str, int],
    exits: Sequence[int],
    input_shape: Sequence[int],
    threads: int = 1,
    accelerator: torch.device | None = None,
    patience_s: float = _PATIENCE_S,
    prepared: Callable[[nn.Module], nn.Module] = lambda module: module,
) -> Latency:
    """Measure the latency of a sub-model with random weights.

    Args:
        architecture: The model family.
        sizes: Size of every axis.
        exits: Its exits.
        input_shape: Shape of one sample.
        threads: Threads that it computes with.
        accelerator: Where; the processor by default.
        patience_s: Seconds after which no further pass begins; a few run in any case.
        prepared: Applied to the module on its device, such as to set a precision.

    Raises:
        ModelError: The model cannot be built or does not accept the input.
    """
    module, x = _build_for_inference(architecture, sizes, tuple(exits), input_shape)
    if accelerator is not None:
        module, x = place_module(module, accelerator, architecture, sizes, tuple(exits), input_shape), x.to(accelerator)
    module = prepared(module)
    with explain_errors(architecture, input_shape):
        times = [sum(row.values()) for row in _time_passes(module, x, {}, threads, patience_s)]
    return summarize_passes(times)


def measure_latencies(
    models: Sequence[TimedModel], passes: int, threads: int = 1, on_passes: Callable[[int], None] = lambda done: None
) -> list[Latency]:
    """Measure the latencies of sub-models with random weights beside each other, a few passes of each in turn.

    Args:
        models: The sub-models; all of them are held in memory.
        passes: Counted passes of each; further ones warm up, at the beginning and in each turn.
        threads: Threads that they compute with.
        on_passes: Called after each turn with the number of passes done, of all sub-models together.

    Raises:
        ModelError: A model cannot be built or does not accept the input.
    """
    built = [_build_for_inference(model.architecture, model.sizes, model.exits, model.input_shape) for model in models]
    times: list[list[float]] = [[] for _ in models]
    processor: list[list[float]] = [[] for _ in models]
    with torch.no_grad(), use_threads(threads):
        for model, (module, x) in zip(models, built, strict=True):
            with explain_errors(model.architecture, model.input_shape):
                for _ in range(_WARM_UP):
                    module(x)
        for first in range(0, passes, _TURN):
            for i, (module, x) in enumerate(built):
                module(x)  # its weights come back into the caches
                for _ in range(min(_TURN, passes - first)):
                    before = time.thread_time()
                    times[i].append(_pass_s(module, x))
                    processor[i].append(time.thread_time() - before)
                on_passes(sum(map(len, times)))
    if threads > 1:  # the other threads' seconds are not this one's
        return [summarize_passes(own) for own in times]
    return [
        replace(summarize_passes(t), processor_s=float(np.median(p)), processor_share=sum(p) / sum(t))
        for t, p in zip(times, processor, strict=True)
    ]


def summarize_passes(times: Sequence[float]) -> Latency:
    """Return the latency of passes, given the seconds of each."""
    low, median, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return Latency(median, high - low, len(times))


def latency_s(architecture: Architecture, input_shape: tuple[int, ...], conditions: Conditions) -> Measure:
    """Estimate by parts: the median time of each block and classifier of the model with all exits."""
    layout = get_layout(architecture, input_shape)
    places: list[Place] = [(i, None) for i in range(architecture.blocks)]
    places += [(None, e) for e in layout.exits]

    def measure(sizes: Mapping[str, int]) -> Profile:
        key = f"latency_s by part {_make_key(architecture, sizes, layout.exits, input_shape)}"
        if key not in conditions.measured:
            module, x = _build_for_inference(architecture, sizes, layout.exits, input_shape)
            with explain_errors(architecture, input_shape):
                rows = _time_passes(module, x, dict(iter_parts(module)))
            medians = [float(np.median([row.get(place, 0.0) for row in rows])) for place in (None, *places)]
            conditions.measured[key] = [round(m, _DIGITS) for m in medians]
        rest, *others = conditions.measured[key]
        blocks, heads = others[: architecture.blocks], others[architecture.blocks :]
        return Profile(rest, blocks, dict(zip(layout.exits, heads, strict=True)))

    return measure


def _make_key(
    architecture: Architecture, sizes: Mapping[str, int], exits: Sequence[int], input_shape: Sequence[int]
) -> str:
    """Return the key of a sub-model; the number of parameters separates models with the same axes."""
    parameters = submodel_cost(architecture, (sizes, exits), input_shape).parameters
    axes = " ".join(f"{axis}={n}" for axis, n in sorted(sizes.items()))
    shape = "x".join(map(str, input_shape))
    return f"{axes} exits={','.join(map(str, exits))} input={shape} parameters={parameters}"


def _build_for_inference(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], input_shape: Sequence[int]
) -> tuple[nn.Module, Tensor]:
    with isolate_rng(torch.device("cpu")):
        module = build_module(architecture, sizes, exits).eval()
    for norm in batch_norms(module).values():  # static statistics, as where a model is used: one sample has no others
        norm.running_mean, norm.running_var = torch.zeros(norm.num_features), torch.ones(norm.num_features)
    return module, make_input(architecture, input_shape, 1, torch.Generator().manual_seed(0))


def _time_passes(
    module: nn.Module, x: Tensor, parts: Mapping[nn.Module, Place], threads: int = 1, patience_s: float = _PATIENCE_S
) -> list[dict[Place | None, float]]:
    """Run a module repeatedly; return the seconds of each part by pass, under None those outside of all parts."""
    row: dict[Place | None, float] = {}
    began: list[float] = []
    rows: list[dict[Place | None, float]] = []

    def leave(name: Place, *_: object) -> None:
        row[name] = row.get(name, 0.0) + time.perf_counter() - began.pop()

    with contextlib.ExitStack() as hooks, torch.no_grad(), use_threads(threads):
        for part, name in parts.items():
            hooks.enter_context(part.register_forward_pre_hook(lambda *_: began.append(time.perf_counter())))
            hooks.enter_context(part.register_forward_hook(partial(leave, name)))
        end = 0.0
        for i in range(-_WARM_UP, _MOST):
            row.clear()
            took = _pass_s(module, x)
            row[None] = took - sum(row.values())
            now = time.perf_counter()
            end = now + patience_s if i < 0 else end
            if i >= 0:
                rows.append(dict(row))
            if i >= _FEWEST - 1 and now > end:
                break
    return rows


def _pass_s(module: nn.Module, x: Tensor) -> float:
    start = time.perf_counter()
    module(x)
    if x.is_cuda:  # kernels run behind the host's back
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
