"""Metrics of one's own: functions of all outputs and labels that a device has, at once, for each exit.

Most metrics are no means over samples (F1, AUROC, calibration error), so a device keeps the outputs of all its batches
and calls the function once; nothing is averaged over batches.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetfit import names
from fleetfit.errors import RunError


class Collected:
    """Outputs and labels of an evaluation, for metrics that are named by function."""

    def __init__(self, wanted: Sequence[str], exits: int) -> None:
        self.wanted, self.exits = tuple(wanted), exits
        self._functions = {name: names.resolve("metrics", name) for name in wanted}
        self._outputs: list[list[Tensor]] = [[] for _ in range(exits)]
        self._labels: list[Tensor] = []

    def add(self, outputs: Sequence[Tensor], labels: Tensor) -> None:
        """Take in a batch: the outputs of each exit [B, ...], and the labels [B, ...]."""
        if self._functions:
            for mine, new in zip(self._outputs, outputs, strict=True):
                mine.append(new.float().cpu())
            self._labels.append(labels.cpu())

    def values(self) -> Mapping[str, list[float | None]]:
        """Return each metric's value at each exit; None where it is no finite number, or there are no samples.

        Raises:
            RunError: A function returns no number.
        """
        if not self._labels:
            return {name: [None] * len(self._outputs) for name in self._functions}
        labels, outputs = torch.cat(self._labels), [torch.cat(one) for one in self._outputs]
        found = {}
        for name, function in self._functions.items():
            found[name] = [_number(name, function(one, labels)) for one in outputs]
        return found


def _number(name: str, value: Any) -> float | None:
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RunError(
            f'the metric "{name}" must return one number, got {type(value).__name__}', key="metric"
        ) from None
    return found if math.isfinite(found) else None
