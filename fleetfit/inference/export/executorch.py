"""One ExecuTorch file for a level, lowered to XNNPACK: a method for each segment, so that a device can stop early."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fleetfit.errors import MissingExtra, ModelError
from fleetfit.inference.export.graphs import Graph, exported, quiet

FILE = "model.pte"
MOST = 8
"""Samples in a batch, at most: memory is planned ahead. Above 15, lowering a convolution silently lowers the bound."""


def need() -> None:
    """Say which extra to install where ExecuTorch is not there.

    Raises:
        MissingExtra: It is not.
    """
    if importlib.util.find_spec("executorch") is None:
        raise MissingExtra("executorch", "Writing .pte files")


def write(graphs: Sequence[Graph], folder: Path, most: int = MOST) -> Path:
    """Lower the graphs and write `model.pte`; its methods have the graphs' names.

    Args:
        graphs: The graphs.
        folder: Where to.
        most: Samples in a batch, at most; of 1 the batch is fixed.

    Raises:
        MissingExtra: ExecuTorch is not installed.
        ModelError: A graph cannot be lowered.
    """
    need()
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        programs = {graph.name: exported(graph, most=most) for graph in graphs}
        try:
            lowered = to_edge_transform_and_lower(
                programs, partitioner={name: [XnnpackPartitioner()] for name in programs}
            )
            buffer = lowered.to_executorch().buffer
        except Exception as error:
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"ExecuTorch cannot lower this model: {said}") from error
    path = folder / FILE
    path.write_bytes(buffer)
    return path


def run(path: Path, graphs: Sequence[Graph], x: Tensor, most: int = MOST) -> Tensor:
    """Return the logits [E, N, classes] by ExecuTorch's Python runtime, a segment after the other.

    The batches have several sizes: memory that is planned for one of them shows at the others.

    Args:
        path: The program.
        graphs: The graphs that it was made of.
        x: Samples as they are stored [N, ...].
        most: Samples in a batch, at most.

    Raises:
        ModelError: The runtime refuses them.
    """
    first = [size for size in (1, 3) if size < most and size < len(x)]
    rest = len(x) - sum(first)
    parts = []
    with quiet(), _silent():
        from executorch.runtime import Runtime

        try:
            program = Runtime.get().load_program(path)
            methods = [program.load_method(graph.name) for graph in graphs]
            for part in x.split([*first, *[most] * (rest // most), *[rest % most] * (rest % most > 0)]):
                carry, row = [part.contiguous()], []
                for method in methods:
                    logits, *carry = method.execute(carry)
                    row.append(logits.clone())
                    carry = [each.clone() for each in carry]
                parts.append(torch.stack(row) if len(methods) > 1 else torch.stack([row[0], *carry]))
        except RuntimeError as error:
            raise ModelError(f"ExecuTorch cannot run what it made of this model: {error}.") from error
    return torch.cat(parts, dim=1)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what the runtime writes about the processor off the terminal; errors are raised all the same."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
