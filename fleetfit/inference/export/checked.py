"""Exported graphs beside the model in PyTorch: how far logits differ, how often the answer is the same."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetfit.errors import ModelError
from fleetfit.inference.export.graphs import Whole
from fleetfit.inference.export.shipped import Shipped

TOLERANCE = 1e-4
"""How far logits of a float export may be from the model's, relative to the larger of 1 and their size."""
_BATCH = 64


@dataclass(frozen=True)
class Variant:
    """What became of the model in one of its forms.

    Attributes:
        name: "pytorch", "float", "int8", "static-int8", "executorch".
        size_bytes: Of its files.
        accuracies: Of each exit [E]; () where there are no labels.
        agreement: Share of the samples for which each exit answers as in PyTorch [E]; () of a regression.
        difference: The largest difference of a logit.
        samples: How many samples were looked at.
        exits: How many exits there are.
    """

    name: str
    size_bytes: int
    accuracies: tuple[float, ...]
    agreement: tuple[float, ...]
    difference: float
    samples: int
    exits: int


def session(path: Path, threads: int = 1) -> Any:
    """Return an onnxruntime session on the processor, one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@torch.no_grad()
def in_torch(shipped: Shipped, x: Tensor) -> Tensor:
    """Return the logits [E, N, classes] of stored samples [N, ...], by the model itself."""
    whole = Whole(shipped).eval()
    return torch.cat([torch.stack(whole(part)) for part in x.split(_BATCH)], dim=1)


def in_whole(path: Path, x: Tensor) -> Tensor:
    """Return the logits [E, N, classes] by the ONNX graph with all exits."""
    run = session(path)
    name = run.get_inputs()[0].name
    parts = [np.stack(run.run(None, {name: part.numpy()})) for part in x.split(_BATCH)]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def in_segments(paths: Sequence[Path], x: Tensor) -> Tensor:
    """Return the logits [E, N, classes] by the ONNX segments, one after the other."""
    runs = [session(path) for path in paths]
    parts = []
    for part in x.split(_BATCH):
        carry, row = [part.numpy()], []
        for run in runs:
            logits, *carry = run.run(None, {a.name: c for a, c in zip(run.get_inputs(), carry, strict=True)})
            row.append(logits)
        parts.append(np.stack(row))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def compared(name: str, size_bytes: int, ours: Tensor, theirs: Tensor, labels: Tensor, task: str) -> Variant:
    """Compare logits [E, N, classes] with those of the model itself.

    Args:
        name: Of the variant.
        size_bytes: Of its files.
        ours: The model's.
        theirs: The variant's.
        labels: int64 [N], or empty.
        task: What is answered: labels of a multi-label task one by one; a regression has no answers to agree on.
    """
    several = task == "multi_label"
    answers, expected = (z > 0 if several else z.argmax(-1) for z in (theirs, ours))  # [E, N], or [E, N, L]
    same = (answers == expected).double().flatten(1).mean(1).tolist() if task != "regression" else []
    accuracies = (answers == labels).double().mean(1).tolist() if len(labels) == answers.shape[1] else []
    return Variant(
        name,
        size_bytes,
        tuple(accuracies),
        tuple(same),
        float((ours - theirs).abs().max()),
        answers.shape[1],
        len(ours),
    )


def must_equal(what: str, ours: Tensor, theirs: Tensor) -> None:
    """Refuse a float export that does not compute what the model does.

    Raises:
        ModelError: A logit differs by more than the tolerance.
    """
    scale = max(1.0, float(ours.abs().max()))
    off = float((ours - theirs).abs().max())
    if not math.isfinite(scale):
        raise ModelError("the model's logits are not finite: its training diverged. Train again, with a smaller lr.")
    if not off <= TOLERANCE * scale:
        raise ModelError(
            f"{what} does not compute what the model does: logits differ by up to {off:.2g}. The exporter may have "
            "fixed something that depends on the input; nothing was written."
        )
