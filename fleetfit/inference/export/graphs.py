"""A level's model as graphs, the whole and each segment by itself, and these as files without anything of this machine.

Exporters trace functions from tensors to tensors. Normalising and resizing are part of the graph, so that a device
hands over what its camera gives: uint8 images, or tokens. Between segments goes a carry, any nest of tensors; a segment
takes and gives them in a flat row.

Files are `torch.export` programs and ONNX. Both exporters leave stack traces with absolute paths in their files; they
are taken out.
"""

import contextlib
import importlib.util
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fleetfit.data import Data
from fleetfit.errors import MissingExtra, ModelError, format_cause
from fleetfit.inference.export.shipped import Shipped
from fleetfit.layout import HasSegments, outputs, with_segments

Dims = Mapping[int, str]
"""Which dimensions of a tensor change from call to call, by name."""
BATCH, TOKENS = "batch", "tokens"


class Prepared(nn.Module):
    """From stored samples to what a model gets: scale, shift, resize, as `Data.batch` does it."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, data: Any) -> None:
        super().__init__()
        scale, shift = data.normalisation if isinstance(data, Data) else (None, None)
        self.register_buffer("scale", None if scale is None else scale.cpu().clone(), persistent=False)
        self.register_buffer("shift", None if shift is None else shift.cpu().clone(), persistent=False)
        self.resize = data.resize if isinstance(data, Data) else None
        self.whole = data.vocabulary > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model gets [B, ...] of stored samples [B, ...]."""
        if self.whole:
            return x
        x = x.to(torch.float32)
        if self.scale is not None:
            x = x * self.scale
        if self.shift is not None:
            x = x + self.shift
        if self.resize is not None:
            x = F.interpolate(x, self.resize, mode="bilinear", antialias=False, align_corners=False)
        return x


class InUnit(nn.Module):
    """From a model's outputs to answers: of a regression, in the unit of the data's targets."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, data: Any) -> None:
        super().__init__()
        mean, std = data.target_scale if isinstance(data, Data) and data.task == "regression" else (None, None)
        self.register_buffer("scale", None if std is None else std.cpu().clone(), persistent=False)
        self.register_buffer("shift", None if mean is None else mean.cpu().clone(), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Return answers, of the same shape."""
        return logits if self.scale is None or self.shift is None else logits * self.scale + self.shift


class Whole(nn.Module):
    """The logits of every exit [B, classes], shallow to deep, of stored samples."""

    def __init__(self, shipped: Shipped) -> None:
        super().__init__()
        self.prepared, self.model, self.in_unit = Prepared(shipped.data), shipped.module, InUnit(shipped.data)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor for each exit."""
        return tuple(self.in_unit(logits) for logits in outputs(self.model, self.prepared(x)))


class FirstSegment(nn.Module):
    """From stored samples to the first exit: its logits, then the carry in a row."""

    def __init__(self, shipped: Shipped) -> None:
        super().__init__()
        self.prepared, self.model, self.in_unit = Prepared(shipped.data), shipped.module, InUnit(shipped.data)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return logits and carry."""
        model: Any = self.model
        carry = model.segment(0, model.start(self.prepared(x)))
        return self.in_unit(model.head(0, carry)), *_tensors(carry, last=len(model.exits) == 1)


class SegmentGraph(nn.Module):
    """From one exit's carry to the next exit: its logits, then the carry in a row, which the last one has none of."""

    def __init__(self, shipped: Shipped, exit: int, spec: TreeSpec) -> None:
        super().__init__()
        self.model, self.exit, self.spec, self.in_unit = shipped.module, exit, spec, InUnit(shipped.data)

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Return logits and carry."""
        model: Any = self.model
        carry = model.segment(self.exit, tree_unflatten(list(flat), self.spec))
        return self.in_unit(model.head(self.exit, carry)), *_tensors(carry, last=self.exit == len(model.exits) - 1)


def _tensors(carry: Any, last: bool) -> list[Tensor]:
    return [] if last else [_plain_strides(each) for each in tree_flatten(carry)[0]]


def _plain_strides(tensor: Tensor) -> Tensor:
    """Return a copy laid out row by row: a lowered program reads its inputs by the strides that it was traced with."""
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False)
class Graph:
    """A function that an exporter traces.

    Attributes:
        name: "model" for the whole, else "segment1", "segment2", ...
        module: The function.
        inputs: Example inputs, batch of two.
        dims: For each input, which dimensions change.
        results: Names of what it returns.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    dims: tuple[Dims, ...]
    results: tuple[str, ...]

    @property
    def several(self) -> bool:
        """Whether it takes any number of tensors, `*flat`."""
        return isinstance(self.module, SegmentGraph)


def whole_graph(shipped: Shipped, x: Tensor, free_tokens: bool = True) -> Graph:
    """Return the graph with every exit.

    Args:
        shipped: The model.
        x: Examples [2, ...] as they are stored.
        free_tokens: Whether samples of tokens may have any length; else they have that of the examples.
    """
    names = tuple(f"exit{i + 1}" for i in range(len(shipped.exits)))
    return Graph("model", Whole(shipped).eval(), (_plain_strides(x),), (_input_dims(shipped, free_tokens),), names)


@torch.no_grad()
def segment_graphs(shipped: Shipped, x: Tensor, free_tokens: bool = True) -> list[Graph]:
    """Return one graph for each exit; together they are the model, each picks up where the one before stopped.

    Args:
        shipped: The model.
        x: Examples [2, ...] as they are stored.
        free_tokens: Whether samples of tokens may have any length; else they have that of the examples.

    Raises:
        ModelError: The model cannot be run segment by segment.
    """
    model = with_segments(shipped.module)
    prepared = Prepared(shipped.data)
    found = [x]
    if shipped.takes_tokens and free_tokens:  # a second length tells which dimensions of a carry follow it
        found.append(x[:, : max(1, x.shape[1] // 2)])
    carries = [_carries(model, prepared(each)) for each in found]
    free: tuple[Dims, ...] = (_input_dims(shipped, free_tokens),)
    first = FirstSegment(shipped).eval()
    graphs = [Graph("segment1", first, (_plain_strides(x),), free, _results(carries[0], 0))]
    for i in range(1, len(shipped.exits)):
        flat, spec = tree_flatten(carries[0][i - 1])
        others = tree_flatten(carries[-1][i - 1])[0]
        dims = tuple(_dims(one, other) for one, other in zip(flat, others, strict=True))
        segment = SegmentGraph(shipped, i, spec).eval()
        given = tuple(_plain_strides(each) for each in flat)
        graphs.append(Graph(f"segment{i + 1}", segment, given, dims, _results(carries[0], i)))
    return graphs


def _carries(model: HasSegments, x: Tensor) -> list[Any]:
    carry, found = model.start(x), []
    for i in range(len(model.exits)):
        carry = model.segment(i, carry)
        odd = [p for p in tree_flatten(carry)[0] if not isinstance(p, Tensor) or not p.dim() or len(p) != len(x)]
        if odd and i < len(model.exits) - 1:
            raise ModelError(
                f"between its segments this model hands on a {type(odd[0]).__name__} that is no tensor with the batch "
                "first; keep what does not depend on the samples in the module."
            )
        found.append(carry)
    return found


def _results(carries: Sequence[Any], exit: int) -> tuple[str, ...]:
    count = 0 if exit == len(carries) - 1 else len(tree_flatten(carries[exit])[0])
    return "logits", *(f"next{i}" for i in range(count))


def _input_dims(shipped: Shipped, free_tokens: bool) -> Dims:
    free = free_tokens and shipped.takes_tokens and shipped.data.padding >= 0
    return {0: BATCH, 1: TOKENS} if free else {0: BATCH}


def _dims(one: Tensor, other: Tensor) -> Dims:
    changed = {d: TOKENS for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b}
    return {0: BATCH, **changed}


# ---- files -----------------------------------------------------------------------------------------------------------

OPSET = 20
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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
        most: Samples in a batch, at most, and then no sample is longer than the example; of 1 the batch is fixed. None:
            any number, of any length.

    Raises:
        ModelError: It cannot be traced.
    """
    inputs = graph.inputs if most != 1 else tuple(_plain_strides(each[:1]) for each in graph.inputs)
    free = tuple(_free_dims(each, dims, most) for each, dims in zip(inputs, graph.dims, strict=True))
    shapes = (free,) if graph.several else free
    with quiet(), _explained(graph, "torch.export"), torch.no_grad():
        try:
            program = torch.export.export(graph.module, inputs, dynamic_shapes=shapes, strict=False)
        except Exception:  # reading the code follows more than running it: len(x), for one
            program = torch.export.export(graph.module, inputs, dynamic_shapes=shapes, strict=True)
    for part in program.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


def _free_dims(example: Tensor, dims: Dims, most: int | None) -> dict[int, Any]:
    """Return what `torch.export` is told of the free dimensions of an input."""
    free = torch.export.Dim.DYNAMIC
    if most is None:
        return dict.fromkeys(dims, free)
    bounds = {d: most if name == BATCH else example.shape[d] for d, name in dims.items()}
    return {d: free(min=1, max=bound) for d, bound in bounds.items() if bound > 1}


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
        said = _COLOUR.sub("", format_cause(cause))
        raise ModelError(
            f"{what} cannot trace {graph.name} of this model: {said}. A forward pass whose steps depend on values of "
            "tensors cannot be exported."
        ) from error
