"""Channels-last against the plain memory format, fp32: a training step and an evaluation pass of many sub-models.

The rule of `fleetfit.training.memory_format` comes from these figures. Run as a program it measures on a device and
writes what a rule may look at as well, a line of JSON per sub-model:

    python -m benchmarks.formats [--device cuda] [--batch 16] [--out FILE] [model ...]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import Figure, Options
from fleetfit.anatomy import outputs
from fleetfit.core import Problem
from fleetfit.core.arithmetic import Arithmetic, MemoryFormat, ShapeArithmetic
from fleetfit.cost.count import count
from fleetfit.training.local_model import LocalModel
from fleetfit.training.memory_format import is_unsafe_in_channels_last

WIDTHS = (0.25, 0.35, 0.5, 0.7, 1.0)
FORMATS: tuple[MemoryFormat, ...] = ("contiguous", "channels_last")
MODELS: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
    "cnn": ({"name": "cnn"}, (1, 28, 28)),
    "fedavg_cnn": ({"name": "fedavg_cnn"}, (1, 28, 28)),
    "fedavg_cifar_cnn": ({"name": "fedavg_cifar_cnn"}, (3, 24, 24)),
    "resnet20": ({"name": "resnet20"}, (3, 32, 32)),
    "resnet20 16x16": ({"name": "resnet20"}, (3, 16, 16)),
    "resnet20 group norm": ({"name": "resnet20", "norm": "group"}, (3, 32, 32)),
    "resnet110": ({"name": "resnet110"}, (3, 32, 32)),
    "resnet18": ({"name": "resnet18"}, (3, 32, 32)),
    "vgg16": ({"name": "vgg16"}, (3, 32, 32)),
    "mobilenetv2": ({"name": "mobilenetv2"}, (3, 32, 32)),
    "efficientnet_b0": ({"name": "efficientnet_b0"}, (3, 32, 32)),
    "msdnet24": ({"name": "msdnet24"}, (3, 32, 32)),
    "vit": ({"name": "vit", "hidden": 128, "depth": 4, "attention_heads": 4, "patch": 4}, (3, 32, 32)),
}


def make_problem(model: Mapping[str, Any], shape: tuple[int, ...]) -> Problem:
    """Return the problem of a model of images with ten classes and two exits."""
    given = {"classes": 10, "channels": shape[0], "input_shape": list(shape), "vocabulary": 0, "padding": -1}
    problem = Problem.from_spec({"model": dict(model), "given": given, "task": "classification", "exits": []})
    blocks = problem.architecture.blocks
    return problem.replace_exits({max(1, blocks // 2), blocks})


def describe(problem: Problem, sizes: Mapping[str, int], exits: tuple[int, ...]) -> dict[str, Any]:
    """Return the convolutions (in, out, groups, kernel, stride, multiply-adds), multiply-adds, and kinds of norm."""
    module, counted = count(problem.architecture, sizes, exits, problem.input_shape)
    convolutions = [
        (p.in_channels, p.out_channels, p.groups, p.kernel_size[0], p.stride[0], counted.get(name, 0))
        for name, p in module.named_modules()
        if isinstance(p, nn.Conv2d)
    ]
    norms = sorted({type(p).__name__ for p in module.modules() if "Norm" in type(p).__name__})
    return {"convolutions": convolutions, "multiply_adds": sum(counted.values()), "norms": norms}


def is_unsafe(problem: Problem, width: float, exits: tuple[int, ...]) -> bool:
    """Tell whether a training step in channels-last may crash on AVX2."""
    model = LocalModel(problem, problem.submodel(width, exits), torch.device("cpu"))
    return is_unsafe_in_channels_last(model.module)


def make_steps(
    problem: Problem, width: float, exits: tuple[int, ...], device: torch.device, batch: int, evaluated: int
) -> dict[str, dict[MemoryFormat, Callable[[], None]]]:
    """Return a training step and an evaluation pass in each format."""
    submodel = problem.submodel(width, exits)
    steps: dict[str, dict[MemoryFormat, Callable[[], None]]] = {"train": {}, "evaluate": {}}
    for chosen in FORMATS:
        shape = ShapeArithmetic({**problem.layout.full_sizes, **submodel.sizes}, exits, Arithmetic("fp32", chosen))
        models = [LocalModel(problem.replace_arithmetic((shape,)), submodel, device) for _ in range(2)]
        for model in models:
            initial = {name: torch.randn(s) * 0.05 for name, s in model.shapes.items()}
            model.load({n: t.abs() + 0.5 if n.endswith("running_var") else t for n, t in initial.items()})
        x = torch.rand(max(batch, evaluated), *problem.input_shape, device=device)
        y = torch.randint(0, 10, (batch,), device=device)

        def train(model: LocalModel = models[0], x: torch.Tensor = x[:batch], y: torch.Tensor = y) -> None:
            model.module.train()
            model.grad.zero_()
            sum(nn.functional.cross_entropy(z, y) for z in outputs(model.module, x)).backward()
            model.trained.add_(model.grad, alpha=-1e-6)

        def evaluate(model: LocalModel = models[1], x: torch.Tensor = x[:evaluated]) -> None:
            model.module.eval()
            with torch.no_grad():
                outputs(model.module, x)

        steps["train"][chosen], steps["evaluate"][chosen] = train, evaluate
    return steps


def measure_formats(
    sides: Mapping[MemoryFormat, Callable[[], None]], device: torch.device, seconds: float
) -> tuple[float, float, float, float]:
    """Return channels-last over plain, alternating: the median, the lowest, the highest; and plain's milliseconds."""

    def time_calls(call: Callable[[], None], calls: int) -> float:
        cuda = device.type == "cuda"
        clock = time.perf_counter if cuda else time.process_time
        begin = clock()
        for _ in range(calls):
            call()
        if cuda:
            torch.cuda.synchronize(device)
        return (clock() - begin) / calls

    for call in sides.values():
        time_calls(call, 3)
    calls = max(1, round(seconds / 14 / time_calls(sides["contiguous"], 2)))
    pairs = [tuple(time_calls(sides[f], calls) for f in FORMATS) for _ in range(7)]
    ratios = [last / max(plain, 1e-9) for plain, last in pairs]
    return statistics.median(ratios), min(ratios), max(ratios), statistics.median(p for p, _ in pairs) * 1e3


def rows(
    names: list[str], device: torch.device, batch: int, seconds: float, widths: tuple[float, ...] = WIDTHS
) -> Iterator[dict[str, Any]]:
    """Measure sub-models by model and width, at full depth and, at half width, at half depth."""
    for name in names:
        problem = make_problem(*MODELS[name])
        pieces = [(width, problem.exits) for width in widths] + [(0.5, problem.exits[:1])]
        for width, exits in pieces:
            sizes = {**problem.layout.full_sizes, **problem.submodel(width, exits).sizes}
            steps = make_steps(problem, width, exits, device, batch, 128)
            row = {"model": name, "width": width, "exits": exits, "device": str(device), "batch": batch}
            if is_unsafe(problem, width, exits) and device.type == "cpu":
                row["train"] = None
                del steps["train"]
            for use, sides in steps.items():
                row[use] = measure_formats(sides, device, seconds)
            yield {**row, **describe(problem, sizes, exits)}


def figures(options: Options) -> Iterator[Figure]:
    """Yield the ratios of a training step and of an evaluation pass, model by model."""
    names = ["cnn", "resnet20", "mobilenetv2"] if options.quick else list(MODELS)
    for row in rows(names, torch.device("cpu"), 16, 0.5 * options.repetitions / 9):
        for use in ("train", "evaluate"):
            if row[use] is None:
                continue
            value, low, high, ms = row[use]
            depth = "" if len(row["exits"]) > 1 else ", half depth"
            name = f"{row['model']}, width {row['width']:g}{depth}, {use}: channels-last against plain"
            yield Figure(name, value, low, high, 7, detail=f"plain {ms:.1f} ms")


def main() -> None:
    """Measure and print as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.formats")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Path(options.out).open("a") as file:
        for row in rows(options.models or list(MODELS), torch.device(options.device), options.batch, options.seconds):
            print(json.dumps(row), file=file, flush=True)
            ratios = (f"{use} {row[use][0]:.2f}" for use in ("train", "evaluate") if row[use])
            print(row["model"], row["width"], row["exits"], *ratios, flush=True)


if __name__ == "__main__":
    main()
