"""Whether computing in bf16 bends gradients, or only adds noise to them.

    python -m experiments.gradient_error runs/COMPARISON/exact/seed-0

Takes the trained full state of a run and, level by level, the gradients of its loss on training batches: in fp32 with
the default memory format, in fp32 as "fast" lays memory out, and as "fast" computes. `error` is the root mean square of
the differences against fp32 as a share of the gradient's; `bias` the length of the mean difference as a share of the
mean gradient's, and `by chance` what that would be if errors of different batches had nothing to do with each other;
`batches` how much two batches' gradients differ, which is what training lives with anyway.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fleetfit as ff
from fleetfit.core.arithmetic import PLAIN, Arithmetic
from fleetfit.evaluation import build_level_module
from fleetfit.training.runtime import choose_arithmetic, prepare_model


def main(given: list[str] | None = None) -> None:
    """Measure a run's levels, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run folder")
    parser.add_argument("--batches", type=int, default=60, help="batches that the means are of")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    run = ff.load(options.run)
    print(f"{'level':>5} {'arithmetic':<22} {'error':>8} {'bias':>8} {'by chance':>10} {'batches':>8}")
    for number in range(1, len(run.assembly.federation.levels) + 1):
        for name, (error, bias, chance, batches) in errors_of(run, number, options.batches).items():
            print(f"{number:>5} {name:<22} {error:>8.4f} {bias:>8.4f} {chance:>10.4f} {batches:>8.4f}")


def errors_of(run: ff.Run, number: int, count: int) -> dict[str, tuple[float, float, float, float]]:
    """Return error, bias, bias by chance, and difference of batches, of a level's gradients by arithmetic."""
    federation, data = run.assembly.federation, run.assembly.data
    cpu = torch.device("cpu")

    def module(arithmetic: Arithmetic) -> nn.Module:
        return prepare_model(build_level_module(federation, run.server, number - 1, None).train(), arithmetic, cpu)

    fast = choose_arithmetic(module(PLAIN), federation.problem.input_shape, cpu)
    ways = {"fp32": PLAIN, f"fp32, {fast.memory_format}": replace(fast, precision="fp32"),
            f"{fast.precision}, {fast.memory_format}": fast}  # fmt: skip
    modules = {name: module(way) for name, way in ways.items()}
    train, rng = np.asarray(data.split("train")), np.random.default_rng(0)
    gradients: dict[str, list[Tensor]] = {name: [] for name in ways}
    for _ in range(count):
        x, y = data.batch(torch.from_numpy(rng.choice(train, run.experiment.local.batch_size, replace=False)))
        for name, one in modules.items():
            gradients[name].append(gradient(one, x, y))
    plain = torch.stack(gradients["fp32"])
    return {name: compared(plain, torch.stack(gradients[name])) for name in list(ways)[1:]}


def compared(plain: Tensor, other: Tensor) -> tuple[float, float, float, float]:
    """Return error, bias, bias by chance, and difference of batches, of gradients [batches, elements]."""
    size, mean = plain.square().sum(1).mean().sqrt(), plain.mean(0).norm()
    wrong, spread = other - plain, (plain - plain.mean(0)).square().sum(1).mean().sqrt()
    error = wrong.square().sum(1).mean().sqrt()
    chance = error / len(plain) ** 0.5
    return float(error / size), float(wrong.mean(0).norm() / mean), float(chance / mean), float(spread / size)


def gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the sum of all exits' losses, flat."""
    module.zero_grad()
    loss = torch.stack([F.cross_entropy(logits, y) for logits in module(x)]).sum()
    return torch.cat([part.reshape(-1) for part in torch.autograd.grad(loss, list(module.parameters()))])


if __name__ == "__main__":
    main()
