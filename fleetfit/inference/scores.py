"""Compute the logits of each exit of a model, and the cost of reaching it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fleetfit.anatomy import Architecture, outputs, visit_exits
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError
from fleetfit.machine import use_threads

COSTS = ("multiply_adds", "latency_s")
"""The units of a budget."""
_BATCH_SIZE = 256
_WARM_UP = 3


@dataclass(frozen=True, eq=False)
class Scores:
    """The logits of each exit for the samples of a split.

    Attributes:
        logits: [E, N, classes], on the host.
        labels: int64 [N].
        indices: The samples' indices in the data set, int64 [N].
    """

    logits: Tensor
    labels: Tensor
    indices: Tensor

    @property
    def accuracies(self) -> list[float]:
        """The accuracy of each exit, from 0 to 1."""
        right = (self.logits.argmax(-1) == self.labels).double().mean(1)
        return [float(value) for value in right]


def compute_scores(module: nn.Module, data: Data, split: str = "test") -> Scores:
    """Run all exits of a module over a split, in one pass.

    Args:
        module: A module in eval mode.
        data: A classification data set.
        split: "test", "validation" or "train".

    Raises:
        ConfigError: The task is not a classification, so predictions have no confidence.
        DataError: The split is empty.
    """
    if data.task != "classification":
        raise ConfigError(
            f"early stopping by confidence needs one class per sample, but the task of {data.name} is {data.task}.",
            key="task",
        )
    indices = data.split(split)
    if not len(indices):
        raise DataError(
            f"{data.name} has no {split} samples. Choose another split, or set data.validation.", key="split"
        )
    logits, labels = [], []
    with torch.no_grad():
        for batch in indices.split(_BATCH_SIZE):
            x, y = data.batch(batch)
            logits.append(torch.stack(outputs(module, x)).float())
            labels.append(y)
    return Scores(torch.cat(logits, dim=1), torch.cat(labels), indices)


def exit_costs(
    architecture: Architecture, sizes: Mapping[str, int], exits: Sequence[int], input_shape: Sequence[int]
) -> list[float]:
    """Return the multiply-adds of a sample that stops at each exit [E], including all earlier classifiers."""
    return [
        float(submodel_cost(architecture, (sizes, tuple(exits[: i + 1])), input_shape).multiply_adds)
        for i in range(len(exits))
    ]


@torch.no_grad()
def measure_exit_latencies(module: nn.Module, x: Tensor, passes: int = 50) -> list[float]:
    """Return the median seconds until each exit's prediction [E] with one thread, including earlier classifiers.

    Args:
        module: In eval mode, with `start`, `segment` and `head`, or with `visit_exits`.
        x: One sample [1, ...], or a batch; seconds are those of the whole batch.
        passes: Number of measurements.

    Raises:
        ModelError: The module cannot be run exit by exit.
    """
    with use_threads(1):
        rows = [_measure_pass(module, x) for _ in range(_WARM_UP + passes)][_WARM_UP:]
    medians = np.median(rows, axis=0)
    return [float(value) for value in np.maximum.accumulate(medians)]


def _measure_pass(module: nn.Module, x: Tensor) -> list[float]:
    """Return the seconds until each exit's prediction [E]."""
    start, row = time.perf_counter(), []

    def visit(exit: int, logits: Tensor) -> bool:
        row.append(time.perf_counter() - start)
        return False

    visit_exits(module, x, visit)
    return row
