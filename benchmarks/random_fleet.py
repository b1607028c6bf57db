"""Federations on random images or tokens, for measuring: nothing is read, and any number of clients costs nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.config.assemble.engine import choose_computing
from fleetfit.config.schema import EngineSection, RecordedSection
from fleetfit.core import Clients, DeviceResources, Federation, Local, Problem, Simulation
from fleetfit.data import Data
from fleetfit.hooks import build
from fleetfit.hooks.levels import split_levels
from fleetfit.planner import Targets

LOCAL = Local(lr=0.05, momentum=0.9, weight_decay=5e-4, batch_size=16, epochs=1)
BUDGETS = (0.125, 0.25, 0.5, 1.0)
TOTAL = 4000
COHORT = 8
"""Clients of a round that is compared with another loop."""


@dataclass(frozen=True)
class Kind:
    """A model with the data that it is measured on.

    Attributes:
        model: The model section of a run file.
        shape: Of one sample.
        samples: Of each client.
        vocabulary: Above 0: samples are tokens.
    """

    model: Mapping[str, Any]
    shape: tuple[int, ...]
    samples: int
    vocabulary: int = 0


CNN = Kind({"name": "cnn"}, (1, 28, 28), 128)
RESNET20 = Kind({"name": "resnet20"}, (3, 32, 32), 64)
VIT = Kind({"name": "vit", "hidden": 128, "depth": 4, "attention_heads": 4, "patch": 4}, (3, 32, 32), 64)
BERT = Kind(
    {"name": "bert", "hidden": 128, "layers": 4, "attention_heads": 4, "max_positions": 64, "dropout": 0.1},
    (64,), 64, vocabulary=2000,
)  # fmt: skip
MOBILENETV2 = Kind({"name": "mobilenetv2"}, (3, 32, 32), 32)
EFFICIENTNET = Kind({"name": "efficientnet_b0"}, (3, 32, 32), 32)
KINDS = {
    "cnn": CNN,
    "resnet20": RESNET20,
    "mobilenetv2": MOBILENETV2,
    "efficientnet_b0": EFFICIENTNET,
    "small ViT": VIT,
    "small BERT": BERT,
}


class Parts(Sequence[dict[str, Tensor]]):
    """Splits of any number of clients, made when they are asked for."""

    def __init__(self, clients: int, samples: int, total: int, held_out: int = 0) -> None:
        self.clients, self.samples, self.total, self.held_out = clients, samples, total, held_out

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self.clients:
            raise IndexError(i)
        first = (i * self.samples) % (self.total - self.samples - self.held_out + 1)
        last, none = first + self.samples, torch.empty(0, dtype=torch.int64)
        return {
            "train": torch.arange(first, last),
            "validation": torch.arange(last, last + self.held_out),
            "test": none,
        }


def make_random_data(kind: Kind) -> Data:
    """Return samples that mean nothing: images with crops and flips, or tokens."""
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.integers(0, 10, size=TOTAL))
    nobody = torch.empty(0, dtype=torch.int64)
    splits = {"train": torch.arange(TOTAL), "validation": nobody, "test": nobody}
    if kind.vocabulary:
        x = torch.from_numpy(rng.integers(1, kind.vocabulary, size=(TOTAL, *kind.shape)))
        return Data("random", x, y, splits, 10, vocabulary=kind.vocabulary, padding=0)
    x = torch.from_numpy(rng.integers(0, 256, size=(TOTAL, *kind.shape), dtype=np.uint8))
    channels = kind.shape[0]
    return Data("random", x, y, splits, 10, mean=(0.5,) * channels, std=(0.25,) * channels, augment="crop-flip")


def fleet(
    kind: Kind, clients: int, cohort: int, samples: int | None = None, method: Mapping[str, Any] | None = None,
    budgets: Sequence[float] = BUDGETS, held_out: int = 0,
) -> tuple[Federation, Simulation]:  # fmt: skip
    """Return a federation of equal budget classes, ScaleFL unless another method is given."""
    samples, spec = kind.samples if samples is None else samples, dict(method or {"name": "scalefl"})
    data = make_random_data(kind)
    given = {"classes": 10, "channels": kind.shape[0], "input_shape": list(kind.shape),
             "vocabulary": kind.vocabulary, "padding": data.padding}  # fmt: skip
    problem = Problem.from_spec({"model": dict(kind.model), "given": given, "task": "classification", "exits": []})
    levels = split_levels(problem, Targets(tuple(budgets), (0.1,) * len(budgets)))
    problem = problem.replace_exits({e for level in levels for e in level.submodel.exits})
    # as a run does by default
    computing = choose_computing(EngineSection(), RecordedSection(), problem, levels, torch.device("cpu"))
    problem = problem.replace_arithmetic(computing.computed)
    each = np.tile(budgets, clients // len(budgets) + 1)[:clients]
    registered = Clients(np.full(clients, samples), each, np.full(clients, 0.15))
    federation = Federation(problem, registered, tuple(levels), cohort, build(spec), spec, 0)
    parts = Parts(clients, samples, TOTAL, held_out)
    return federation, Simulation(problem, data, parts, DeviceResources({"parameters": each}))


def given_slots(federation: Federation, slots: list[tuple[int, int]]) -> Callable[..., Any]:
    """Assign the same clients and levels in every round, so that nothing else differs."""
    found = [(client, level, federation.levels[level].submodel) for client, level in slots]
    return lambda *_: found
