"""A loop as repositories of papers write it, in a process of its own: it has the allocator that Python programs have.

    python -m benchmarks.naive KIND     a round for each line that it reads; prints the seconds of each

`NaiveProcess` does that for a part. In the process of the parts freed memory is kept (`keep_freed_memory`), which such
repositories do not have.
"""

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops import BETA, TEMPERATURE, Slots
from benchmarks.measuring import Seconds
from benchmarks.random_fleet import COHORT, KINDS, LOCAL, fleet
from fleetfit.anatomy import build_module
from fleetfit.core import Federation, Simulation
from fleetfit.core.tasks import classification
from fleetfit.data import Data
from fleetfit.hooks.losses import self_distillation
from fleetfit.submodel import extract
from fleetfit.training import initial_state


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """One client's samples, made ready one by one: to float, cropped, flipped, normalized."""

    def __init__(self, data: Data, indices: Tensor) -> None:
        self.x, self.y = data.x[indices], data.y[indices]
        self.image = self.x.dtype == torch.uint8
        self.mean, self.std = (torch.tensor(v).view(-1, 1, 1) for v in (data.mean, data.std)) if self.image else (0, 1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if not self.image:
            return self.x[i], self.y[i]
        height, width = self.x.shape[-2:]
        image = F.pad(self.x[i].float().div(255), (4, 4, 4, 4))
        top, left = (int(torch.randint(0, 9, ())) for _ in range(2))
        image = image[:, top : top + height, left : left + width]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image - self.mean) / self.std, self.y[i]


class Naive:
    """A round as repositories of papers write it: every client's samples through a DataLoader, a deep copy of the model
    for each client, PyTorch's default optimizer, all updates kept, and averages of states padded with zeros.
    """

    def __init__(self, federation: Federation, simulation: Simulation) -> None:
        self.data, self.parts, problem = simulation.data, simulation.parts, federation.problem
        self.state: dict[str, Tensor] = dict(initial_state(problem, 0))
        self.models: list[nn.Module] = []
        for level in federation.levels:
            sizes = {**problem.layout.full_sizes, **level.submodel.sizes}
            self.models.append(build_module(problem.architecture, sizes, level.submodel.exits))
            cut = extract(problem.layout, self.state, level.submodel)
            found = self.part(self.models[-1])
            if found.keys() != cut.keys() or not all(torch.equal(found[name], cut[name]) for name in cut):
                raise ValueError("leading channels are not what this level trains: the naive loop cannot cut it.")

    def part(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the leading channels of the global state that a module has."""
        shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        return {name: self.state[name][_leading(shape)].clone() for name, shape in shapes.items()}

    def round(self, slots: Slots) -> None:
        updates = []
        for client, level in slots:
            module = copy.deepcopy(self.models[level])
            module.load_state_dict(self.part(module))
            self.train(module, client)
            updates.append(copy.deepcopy(module.state_dict()))
        self.state = self.average(updates)

    def train(self, module: nn.Module, client: int) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum,
                                    weight_decay=LOCAL.weight_decay)  # fmt: skip
        loader = DataLoader(Samples(self.data, self.parts[client]["train"]), batch_size=16, shuffle=True)
        module.train()
        for x, y in loader:
            optimizer.zero_grad()
            self_distillation(module(x), y, classification, BETA, TEMPERATURE).backward()
            optimizer.step()

    def average(self, updates: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        after = {}
        for name, old in self.state.items():
            total, count = torch.zeros_like(old), torch.zeros_like(old)
            for update in updates:
                if name in update:
                    here = _leading(update[name].shape)
                    padded, mask = torch.zeros_like(old), torch.zeros_like(old)
                    padded[here], mask[here] = update[name], 1
                    total, count = total + padded, count + mask
            after[name] = torch.where(count > 0, total / count.clamp(min=1), old)
        return after


def _leading(shape: Any) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


class NaiveProcess:
    """The naive loop on one kind of model, in a process of its own; a context.

    `round()` returns the seconds of one round, as a side of `measuring.ratio` does that is measured elsewhere.
    """

    def __init__(self, kind: str) -> None:
        self._command = [sys.executable, "-m", "benchmarks.naive", kind]

    def __enter__(self) -> "NaiveProcess":
        self._process = subprocess.Popen(self._command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, text=True)  # fmt: skip
        return self

    def round(self) -> Seconds:
        """Have a round done, and return its seconds.

        Raises:
            RuntimeError: The process has ended.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().split()
        if len(said) != 2:
            raise RuntimeError(f"the naive loop ended with {self._process.wait()}")
        return Seconds(*map(float, said))

    def __exit__(self, *error: Any) -> None:
        with self._process:  # closes its input, which ends it, and waits
            pass


def main(kind: str) -> None:
    """Do a round for each line on standard input."""
    torch.set_num_threads(1)
    federation, simulation = fleet(KINDS[kind], COHORT, COHORT)
    naive = Naive(federation, simulation)
    slots = [(client, int(federation.level_of[client])) for client in range(COHORT)]
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        naive.round(slots)
        print(time.process_time() - cpu, time.perf_counter() - wall, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
