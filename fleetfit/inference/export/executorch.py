"""Write one ExecuTorch file per level, lowered to XNNPACK. A method per segment lets a device stop early."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fleetfit.errors import ModelError
from fleetfit.inference.export.level import Graph, quiet_exporters, trace_program

FILE = "model.pte"
_PASSES_THROUGH = "is already in the inputs"
MOST = 8
"""Maximal batch size: memory is planned in advance. Above 15, lowering a convolution silently reduces the bound."""


def write_executorch(graphs: Sequence[Graph], folder: Path, most: int = MOST) -> Path:
    """Lower the graphs and write `model.pte`, whose methods have the graphs' names.

    Args:
        graphs: The graphs.
        folder: The folder of the file.
        most: Maximal batch size; 1: a fixed batch.

    Raises:
        ModelError: A graph cannot be lowered.
    """
    with quiet_exporters():
        programs = {graph.name: trace_program(graph, most=most) for graph in graphs}
        try:
            try:
                buffer = _lower(programs)
            except RuntimeError as error:
                if _PASSES_THROUGH not in str(error):
                    raise
                buffer = _lower(programs, with_copies=False)
        except Exception as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"ExecuTorch cannot lower this model: {first_line}") from error
    path = folder / FILE
    path.write_bytes(buffer)
    return path


def _lower(programs: Mapping[str, torch.export.ExportedProgram], with_copies: bool = True) -> bytes:
    """Return programs lowered to XNNPACK.

    Args:
        programs: By the name of the method.
        with_copies: Whether XNNPACK gets copies of tensors, too. It drops them, and refuses a part where a result is
            a copy of what another part reads: the tensor for the next segment, which the exit's layer norm reads.
    """
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    configs = [one for one in ALL_PARTITIONER_CONFIGS if with_copies or "clone" not in one.target_name]
    partitioners = {name: [XnnpackPartitioner(configs)] for name in programs}
    buffer: bytes = to_edge_transform_and_lower(programs, partitioner=partitioners).to_executorch().buffer
    return buffer


def run_executorch(path: Path, graphs: Sequence[Graph], x: Tensor, most: int = MOST) -> Tensor:
    """Return the logits [E, N, classes] by ExecuTorch's Python runtime, segment by segment.

    Batches have several sizes, to detect memory that is planned for only one size.

    Args:
        path: The program.
        graphs: The graphs of the program.
        x: Stored samples [N, ...].
        most: Maximal batch size.

    Raises:
        ModelError: The runtime fails.
    """
    first = [size for size in (1, 3) if size < most and size < len(x)]
    remaining = len(x) - sum(first)
    batches = []
    with quiet_exporters(), _silence_stderr():
        from executorch.runtime import Runtime

        try:
            program = Runtime.get().load_program(path)
            methods = [program.load_method(graph.name) for graph in graphs]
            for batch in x.split([*first, *[most] * (remaining // most), *[remaining % most] * (remaining % most > 0)]):
                carry, exits = [batch.contiguous()], []
                for method in methods:
                    logits, *carry = method.execute(carry)
                    exits.append(logits.clone())
                    carry = [tensor.clone() for tensor in carry]
                batches.append(torch.stack(exits) if len(methods) > 1 else torch.stack([exits[0], *carry]))
        except RuntimeError as error:
            raise ModelError(f"ExecuTorch cannot run its program of this model: {error}.") from error
    return torch.cat(batches, dim=1)


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Suppress the runtime's output about the processor. Errors are still raised."""
    sys.stderr.flush()
    original, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(null)
