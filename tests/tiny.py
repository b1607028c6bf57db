"""A tiny architecture, data set and federation for tests: three blocks, two scaled axes, dropout, batch norm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.anatomy import Architecture, Axis, ExitModel
from fleetfit.core import Clients, DeviceResources, Federation, Level, Local, Problem, Simulation
from fleetfit.core.tasks import classification
from fleetfit.data import Data, drop_labels
from fleetfit.hooks import apply_model_hook, build
from fleetfit.planner import Targets


def plain(lr: float = 0.1, epochs: int = 1, batch_size: int | Literal["all"] = 16, **settings: Any) -> Local:
    """Return settings of local training without momentum and decay, unless they are given, and of one epoch."""
    return Local(lr=lr, epochs=epochs, batch_size=batch_size, **{"momentum": 0.0, "weight_decay": 0.0, **settings})


class TinyNet(ExitModel):
    def __init__(self, sizes: Mapping[str, int], exits: tuple[int, ...], dropout: float, norm: bool) -> None:
        super().__init__()
        a, b = sizes["a"], sizes["b"]
        self.exits = exits
        self.stem = nn.Linear(16, a)

        def block() -> nn.Module:
            return nn.Sequential(
                nn.Linear(a, b),
                nn.BatchNorm1d(b) if norm else nn.Identity(),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(b, a),
                nn.ReLU(),
            )

        self.blocks = nn.ModuleList(block() for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(a, sizes["classes"]) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return self.stem(x.flatten(1))


@dataclass(frozen=True)
class Tiny(Architecture):
    dropout: float = 0.0
    norm: bool = True
    classes: int = 4

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"a": Axis(8), "b": Axis(12, granule=2), "classes": Axis(self.classes, scaled=False)}

    @property
    def blocks(self) -> int:
        return 3

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return TinyNet(axes, exits, self.dropout, self.norm)


def tiny(classes: int = 4, dropout: float = 0.0, norm: bool = True) -> Tiny:
    """The factory that run files name: `tests/tiny.py:tiny`."""
    return Tiny(dropout, norm, classes)


def tiny_data(n: int = 240, classes: int = 4, seed: int = 0) -> Data:
    """Images 1x4x4 of four kinds with noise."""
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=n)
    kinds = rng.integers(60, 190, size=(classes, 1, 4, 4))
    x = np.clip(kinds[y] + rng.normal(0, 25, size=(n, 1, 4, 4)), 0, 255).astype(np.uint8)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    cut = n // 5
    splits = {"test": order[:cut], "validation": order[cut : cut + n // 10], "train": order[cut + n // 10 :]}
    return Data("tiny", torch.from_numpy(x), torch.from_numpy(y), splits, classes, mean=(0.5,), std=(0.25,))


def tiny_server_data() -> Data:
    """The server's own data: other images of the same shape, without labels."""
    return drop_labels(tiny_data(100, seed=9))


QUICK: dict[str, dict[str, Any]] = {"feddf": {"steps": 6, "batch_size": 16, "check_every": 2, "patience": 4}}


def spec_of(name: str) -> dict[str, Any]:
    """A method's name, with settings under which it is quick enough for a test."""
    return {"name": name, **QUICK.get(name, {})}


def tiny_problem(exits: tuple[int, ...] = (1, 2, 3), **model: Any) -> Problem:
    arguments = {"classes": 4, "channels": 1, "input_shape": [1, 4, 4]}
    spec = {"model": {"name": "tiny:tiny", **model}, "given": arguments, "task": "classification", "exits": list(exits)}
    return Problem(tiny(**model), (1, 4, 4), classification, exits, spec=spec)


def tiny_parts(data: Data, clients: int) -> list[dict[str, Tensor]]:
    """Deal every split out in turn."""
    return [{name: indices[i::clients] for name, indices in data.splits.items()} for i in range(clients)]


def unequal_parts(data: Data, shares: Sequence[int]) -> list[dict[str, Tensor]]:
    """Deal every split out, to each client as many as its share says."""
    owners = torch.tensor([i for i, share in enumerate(shares) for _ in range(share)])
    turns = {name: owners[torch.arange(len(indices)) % len(owners)] for name, indices in data.splits.items()}
    return [{name: ids[turns[name] == i] for name, ids in data.splits.items()} for i in range(len(shares))]


def tiny_federation(
    method: Mapping[str, Any],
    clients: int = 6,
    cohort: int = 4,
    seed: int = 0,
    shares: Sequence[int] | None = None,
    **model: Any,
) -> tuple[Federation, Simulation]:
    """Three levels (width and depth) and clients of each; not planned, so that the test says what they are.

    A method whose server never learns a budget has levels of its own, and clients who told none. Clients have equally
    many samples, or unequal `shares` of them: only then do weights by samples and weights by count differ.
    """
    problem = apply_model_hook(tiny_problem(**model), method)
    data = tiny_data()
    parts = tiny_parts(data, clients) if shares is None else unequal_parts(data, shares)
    levels = (
        Level("1", problem.submodel(0.5, (1,)), 0.5, 0.2),
        Level("2", problem.submodel(0.75, (1, 2)), 0.75, 0.5),
        Level("3", problem.submodel(1.0, (1, 2, 3)), 1.0, 1.0),
    )
    counts = np.array([len(part["train"]) for part in parts])
    reported = np.array([(0.2, 0.5, 1.0)[i % 3] for i in range(clients)])
    built, registered = build(method), Clients(counts, reported)
    if not built.needs_budgets:
        registered = Clients(counts)
        levels = tuple(built.make_levels(problem, Targets((1.0,), (0.1,))))
    problem = problem.replace_levels(level.submodel for level in levels)
    simulation = Simulation(
        problem, data, parts, DeviceResources({"parameters": reported}), unlabeled=tiny_server_data()
    )
    device = simulation.device(None)
    return Federation(
        problem, registered, levels, cohort, built, method, seed, device, classes=data.classes
    ), simulation
