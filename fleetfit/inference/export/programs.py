"""Graphs become files: `torch.export` programs and ONNX, without anything of the machine that wrote them.

Both exporters leave stack traces with absolute paths in their files; they are taken out.
"""

import contextlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fleetfit.errors import MissingExtra, ModelError
from fleetfit.inference.export.graphs import Graph

OPSET = 20
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOST_SAID = 300  # characters of an exporter's own message


def need_onnx(what: str = "Writing ONNX") -> None:
    """Say which extra to install where ONNX is not there.

    Raises:
        MissingExtra: It is not.
    """
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")):
        raise MissingExtra("export", what)


def exported(graph: Graph, most: int | None = None) -> torch.export.ExportedProgram:
    """Trace a graph with `torch.export`, its batch free, and take the stack traces out.

    Args:
        graph: The graph.
        most: The largest size of what is free (samples, tokens); None: any.

    Raises:
        ModelError: It cannot be traced.
    """
    free = tuple({d: _free(size, most) for d, size in dims.items()} for dims in graph.dims)
    shapes = (free,) if graph.several else free
    with quiet(), _explained(graph, "torch.export"), torch.no_grad():
        try:
            program = torch.export.export(graph.module, graph.inputs, dynamic_shapes=shapes, strict=False)
        except Exception:  # reading the code follows more than running it: len(x), for one
            program = torch.export.export(graph.module, graph.inputs, dynamic_shapes=shapes, strict=True)
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


def _free(name: str, most: int | None) -> Any:
    return torch.export.Dim.DYNAMIC if most is None else torch.export.Dim(name, min=1, max=most)


def write_program(graph: Graph, path: Path) -> None:
    """Write a graph as a `torch.export` program (.pt2), which PyTorch loads without FleetFit.

    Raises:
        ModelError: It cannot be traced.
    """
    program = exported(graph)
    with quiet():
        try:
            torch.export.save(program, path)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(None, f"PyTorch could not write {path.name}: {str(error).partition(chr(10))[0]}") from None


def write_onnx(graph: Graph, path: Path) -> None:
    """Write a graph as one ONNX file; inputs are called input0, ..., what it returns `graph.results`.

    Raises:
        ModelError: It cannot be traced.
        MissingExtra: ONNX is not installed.
    """
    need_onnx()
    free = tuple(dict(dims) for dims in graph.dims)
    with quiet(), _explained(graph, "torch.onnx"), torch.no_grad():
        torch.onnx.export(
            graph.module, graph.inputs, path, dynamo=True, opset_version=OPSET, verbose=False, external_data=False,
            dynamic_shapes=(free,) if graph.several else free, output_names=list(graph.results),
            input_names=[f"input{i}" for i in range(len(graph.inputs))],
        )  # fmt: skip
    strip(path)


def strip(path: Path) -> None:
    """Take out of an ONNX file what is not needed to run it: stack traces, notes, inferred shapes."""
    import onnx

    found: Any = onnx.load(path)
    inner = found.graph
    for part in (found, inner, *inner.node, *inner.input, *inner.output, *inner.initializer, *found.functions):
        del part.metadata_props[:]
        part.doc_string = ""
    for function in found.functions:
        for node in function.node:
            del node.metadata_props[:]
    del inner.value_info[:]
    onnx.save(found, path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and log lines of the exporters to themselves: what matters is raised, and said in one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _explained(graph: Graph, what: str) -> Iterator[None]:
    try:
        yield
    except OSError:  # a full disk
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = " ".join(_COLOUR.sub("", str(cause)).split())[:_MOST_SAID] or type(cause).__name__
        raise ModelError(
            f"{what} cannot trace {graph.name} of this model: {said}. A forward pass whose steps depend on values of "
            "tensors cannot be exported."
        ) from error
