"""A level's model for devices, and its graphs as `torch.export` programs: the whole model and each segment.

Exporters trace functions from tensors to tensors. Normalizing and resizing are part of the graph, so a device passes
uint8 images from its camera, or tokens. A segment passes its carry, any nested structure of tensors, to the next one as
a flat list.

Stack traces with absolute paths, which exporters leave in their files, are removed.
"""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fleetfit.anatomy import (
    Architecture,
    HasSegments,
    VisitsExits,
    make_input,
    outputs,
    require_segments,
    visit_exits,
)
from fleetfit.core import DataDescription
from fleetfit.data import AbsentData, Data
from fleetfit.data.transform import Transform
from fleetfit.errors import ConfigError, ModelError, format_cause
from fleetfit.inference.stopping import Policy

_SAMPLES, _LOGITS = 1000, 20_000_000
_DRAWN = 8


@dataclass(frozen=True, eq=False)
class LevelModel:
    """A level's model with the data for writing files.

    Attributes:
        level: The level's name, "1" for the smallest.
        architecture: The model family, as the method made it (a recurrent exit, LoRA).
        sizes: The size of every axis.
        exits: Block counts of its exits, shallow to deep.
        module: The module, in eval mode, with static batch-norm statistics re-estimated for this level.
        data: Where validation and test samples come from; of a real fleet only the description from its nodes.
        policy: The policy of early stopping, if the level is calibrated.
        facts: Facts for the model card: method, model, rounds, costs; empty where unknown.
        offset: Added to the logits of every exit [C], such as a client's log class frequencies; None for nothing.
        transform: How samples are prepared; None: as `data`, and by the nodes of a fleet without a transform.
    """

    level: str
    architecture: Architecture
    sizes: Mapping[str, int]
    exits: tuple[int, ...]
    module: nn.Module
    data: Data | DataDescription
    policy: Policy | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    offset: Tensor | None = None
    transform: Transform | None = None

    @property
    def own_data(self) -> Data:
        """The data themselves.

        Raises:
            ConfigError: They are on the nodes of a fleet.
        """
        if isinstance(self.data, DataDescription):
            raise ConfigError(
                "this run's data are on the nodes of a fleet, and this command needs data: name a data set like "
                "theirs with --data (from Python: data=...).",
                key="data",
            )
        return self.data

    @cached_property
    def prepared(self) -> Data | DataDescription:
        """The facts of prepared samples: normalization, names of classes, tokenizer, scale of targets."""
        return self.data if self.transform is None else self.transform.describe("")

    @property
    def prepared_data(self) -> Data:
        """The same of a level that has them.

        Raises:
            ConfigError: The nodes of a fleet prepared their samples by themselves.
        """
        if isinstance(self.prepared, DataDescription):
            raise ConfigError(
                "the nodes of this fleet prepared their samples by themselves, and this form needs to know how: name a "
                "data set like theirs with --data (from Python: data=...).",
                key="data",
            )
        return self.prepared

    @property
    def takes_tokens(self) -> bool:
        """Whether samples are token ids."""
        return self.data.vocabulary > 0

    @property
    def has_samples(self) -> bool:
        """Whether there are samples: those of a fleet are on its nodes, and others may be gone."""
        return isinstance(self.data, Data) and not isinstance(self.data, AbsentData)

    @property
    def split(self) -> str:
        """The split on which forms are compared: test, or the next one that has samples; "drawn" without data."""
        data = self.data
        if not isinstance(data, Data) or not self.has_samples:
            return "drawn"
        return next((name for name in ("test", "validation", "train") if len(data.split(name))), "test")

    @property
    def sample_count(self) -> int:
        """Number of samples for comparing forms: a thousand, fewer if the logits would fill the memory."""
        positions = self.data.sample_shape[0] if self.data.task == "next_token" else 1
        return max(2, min(_SAMPLES, _LOGITS // (len(self.exits) * self.data.classes * positions)))

    def samples(self, split: str, count: int) -> tuple[Tensor, Tensor]:
        """Return samples as they are stored, and labels: evenly spread over a split; without data, drawn samples.

        Args:
            split: "test", "validation" or "train".
            count: Their number, or all if the split has fewer.
        """
        data = self.data
        if not isinstance(data, Data) or not self.has_samples:
            return self._draw(torch.Generator().manual_seed(0)), torch.empty(0, dtype=torch.int64)
        indices = data.split(split)
        count = min(count, len(indices))
        indices = indices[torch.arange(count) * len(indices) // max(1, count)]
        return data.stored(indices), data.labels(indices)

    def _draw(self, rng: torch.Generator) -> Tensor:
        """Return eight samples as they are stored: uniform bytes, tokens, or normal numbers before normalization."""
        facts = self.prepared
        if not isinstance(facts, Data) or facts.vocabulary:
            return make_input(self.architecture, facts.sample_shape, _DRAWN, rng)
        shape = (_DRAWN, *facts.x.shape[1:])
        if facts.x.dtype == torch.uint8:
            return torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        x, (scale, shift) = torch.randn(shape, generator=rng), facts.normalization
        x = x if scale is None or shift is None else (x - shift) / scale
        return x.to(facts.x.dtype)


# ---- functions to trace ----------------------------------------------------------------------------------------------


class Preprocessing(nn.Module):
    """From stored samples to a model's inputs: scale, shift, resize, as `Data.batch` does it."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, data: Any) -> None:
        super().__init__()
        scale, shift = data.normalization if isinstance(data, Data) else (None, None)
        self.register_buffer("scale", None if scale is None else scale.cpu().clone(), persistent=False)
        self.register_buffer("shift", None if shift is None else shift.cpu().clone(), persistent=False)
        self.resize = data.resize if isinstance(data, Data) else None
        self.takes_tokens = data.vocabulary > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return a model's inputs [B, ...] of stored samples [B, ...]."""
        if self.takes_tokens:
            return x
        x = x.to(torch.float32)
        if self.scale is not None:
            x = x * self.scale
        if self.shift is not None:
            x = x + self.shift
        if self.resize is not None:
            x = F.interpolate(x, self.resize, mode="bilinear", antialias=False, align_corners=False)
        return x


class Rescaling(nn.Module):
    """From a model's outputs to answers: of a regression, in the unit of the data's targets; logits with an offset."""

    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, model: LevelModel) -> None:
        super().__init__()
        data, std, shift = model.prepared, None, model.offset
        if isinstance(data, Data) and data.task == "regression":
            shift, std = data.target_scale
        self.register_buffer("scale", None if std is None else std.cpu().clone(), persistent=False)
        self.register_buffer("shift", None if shift is None else shift.cpu().clone(), persistent=False)

    def forward(self, logits: Tensor) -> Tensor:
        """Return answers, of the same shape."""
        scaled = logits if self.scale is None else logits * self.scale
        return scaled if self.shift is None else scaled + self.shift


class AllExits(nn.Module):
    """The logits of every exit [B, classes], shallow to deep, of stored samples."""

    def __init__(self, model: LevelModel) -> None:
        super().__init__()
        self.preprocess, self.model, self.rescale = Preprocessing(model.prepared), model.module, Rescaling(model)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor for each exit."""
        return tuple(self.rescale(logits) for logits in outputs(self.model, self.preprocess(x)))

    def visit(self, x: Tensor) -> list[Tensor]:
        """Return the same from a model that visits its exits, each before what is behind it."""
        logits: list[Tensor] = []

        def add(i: int, z: Tensor) -> bool:
            logits.append(self.rescale(z))
            return False

        visit_exits(self.model, self.preprocess(x), add)
        return logits


class FirstSegment(nn.Module):
    """From stored samples to the first exit: its logits, then the carry as a list."""

    def __init__(self, model: LevelModel) -> None:
        super().__init__()
        self.preprocess, self.model, self.rescale = Preprocessing(model.prepared), model.module, Rescaling(model)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return logits and carry."""
        model: Any = self.model
        carry = model.segment(0, model.start(self.preprocess(x)))
        return self.rescale(model.head(0, carry)), *_flatten_carry(carry, is_last=len(model.exits) == 1)


class NextSegment(nn.Module):
    """From one exit's carry to the next exit: its logits, then the carry as a list; the last segment has no carry."""

    def __init__(self, model: LevelModel, exit: int, spec: TreeSpec) -> None:
        super().__init__()
        self.model, self.exit, self.spec, self.rescale = model.module, exit, spec, Rescaling(model)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return logits and carry."""
        model: Any = self.model
        carry = model.segment(self.exit, tree_unflatten(list(tensors), self.spec))
        is_last = self.exit == len(model.exits) - 1
        return self.rescale(model.head(self.exit, carry)), *_flatten_carry(carry, is_last)


def _flatten_carry(carry: Any, is_last: bool) -> list[Tensor]:
    return [] if is_last else [_copy_row_major(tensor) for tensor in tree_flatten(carry)[0]]


def _copy_row_major(tensor: Tensor) -> Tensor:
    """Return a row-major copy: a lowered program reads its inputs with the strides of tracing."""
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- graphs ----------------------------------------------------------------------------------------------------------

Dims = Mapping[int, str]
"""The variable dimensions of a tensor, by name."""
BATCH, TOKENS = "batch", "tokens"


@dataclass(frozen=True, eq=False)
class Graph:
    """A function for an exporter to trace.

    Attributes:
        name: "model" for the whole, else "segment1", "segment2", ...
        module: The function.
        inputs: Example inputs, batch of two.
        dims: For each input, its variable dimensions.
        results: Names of the results.
    """

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    dims: tuple[Dims, ...]
    results: tuple[str, ...]

    @property
    def is_variadic(self) -> bool:
        """Whether it takes any number of tensors."""
        return isinstance(self.module, NextSegment)

    @property
    def has_free_tokens(self) -> bool:
        """Whether samples may have any number of tokens."""
        return TOKENS in self.dims[0].values()


def make_whole_graph(model: LevelModel, x: Tensor, free_tokens: bool = True) -> Graph:
    """Return the graph with every exit.

    Args:
        model: The model.
        x: Stored examples [2, ...].
        free_tokens: Whether samples of tokens may have any length; otherwise they have that of the examples.

    Raises:
        ModelError: A model that visits its exits cannot be traced.
    """
    names = tuple(f"exit{i + 1}" for i in range(len(model.exits)))
    module, x, dims = AllExits(model).eval(), _copy_row_major(x), _list_dims(model, free_tokens)
    if not isinstance(model.module, VisitsExits):
        return Graph("model", module, (x,), (dims,), names)
    with quiet_exporters(), explain_failure("model", "make_fx"):
        from fleetfit.inference.export.exit_graphs import trace_exits  # sympy takes half a second

        return Graph("model", trace_exits(module, AllExits.visit, x, tuple(dims)), (x,), (dims,), names)


@torch.no_grad()
def make_segment_graphs(model: LevelModel, x: Tensor, free_tokens: bool = True) -> list[Graph]:
    """Return one graph per exit. Each continues after the previous one.

    Args:
        model: The model.
        x: Stored examples [2, ...].
        free_tokens: Whether samples of tokens may have any length; otherwise they have that of the examples.

    Raises:
        ModelError: The model cannot be run segment by segment.
    """
    if isinstance(model.module, VisitsExits):
        return _split_whole_graph(model, x, free_tokens)
    module, preprocess = require_segments(model.module), Preprocessing(model.prepared)
    carries = shorter = _compute_carries(module, preprocess(x))
    if model.takes_tokens and free_tokens:  # a second length shows which dimensions of a carry depend on it
        shorter = _compute_carries(module, preprocess(x[:, : max(1, x.shape[1] // 2)]))
    results = [("logits", *(f"next{i}" for i in range(len(tree_flatten(carry)[0])))) for carry in carries[:-1]]
    results.append(("logits",))
    first = FirstSegment(model).eval()
    graphs = [Graph("segment1", first, (_copy_row_major(x),), (_list_dims(model, free_tokens),), results[0])]
    for i in range(1, len(model.exits)):
        tensors, spec = tree_flatten(carries[i - 1])
        dims = tuple(
            {0: BATCH} | {d: TOKENS for d, (a, b) in enumerate(zip(tensor.shape, other.shape, strict=True)) if a != b}
            for tensor, other in zip(tensors, tree_flatten(shorter[i - 1])[0], strict=True)
        )
        inputs = tuple(map(_copy_row_major, tensors))
        graphs.append(Graph(f"segment{i + 1}", NextSegment(model, i, spec).eval(), inputs, dims, results[i]))
    return graphs


def _split_whole_graph(model: LevelModel, x: Tensor, free_tokens: bool) -> list[Graph]:
    """Return the graphs between the exits of a model without segments.

    Raises:
        ModelError: It cannot be traced, or what crosses an exit has no row for each sample.
    """
    from fleetfit.inference.export.exit_graphs import split_at_exits

    parts = split_at_exits(trace_program(make_whole_graph(model, x, free_tokens)))
    carry, rows = [_copy_row_major(x)], [_copy_row_major(x[1:])]
    graphs = []
    for i, part in enumerate(parts):
        dims = tuple({d: TOKENS if d else BATCH for d in free} for free in part.free)
        logits, *following = part.module(*carry)
        row_logits, *rows = part.module(*rows)
        if not torch.allclose(logits[1:], row_logits, rtol=1e-4, atol=1e-4):
            raise ModelError(f"behind exit {i} rows of its tensors are not those of single samples.")
        results = ("logits", *(f"next{j}" for j in range(len(following))))
        graphs.append(Graph(f"segment{i + 1}", part.module, tuple(carry), dims, results))
        carry, rows = following, [tensor[1:] for tensor in following]
    return graphs


def _compute_carries(module: HasSegments, x: Tensor) -> list[Any]:
    carry, carries = module.start(x), []
    for i in range(len(module.exits)):
        carry = module.segment(i, carry)
        wrong = [p for p in tree_flatten(carry)[0] if not isinstance(p, Tensor) or not p.dim() or len(p) != len(x)]
        if wrong and i < len(module.exits) - 1:
            raise ModelError(
                f"between its segments this model passes a {type(wrong[0]).__name__} that is not a tensor with the "
                "batch first. Keep values that do not depend on the samples in the module."
            )
        carries.append(carry)
    return carries


def has_free_tokens(model: LevelModel) -> bool:
    """Return whether its samples may have any number of tokens."""
    return model.takes_tokens and model.data.padding >= 0


def _list_dims(model: LevelModel, free_tokens: bool) -> Dims:
    """Return the variable dimensions of samples."""
    return {0: BATCH, 1: TOKENS} if free_tokens and has_free_tokens(model) else {0: BATCH}


# ---- tracing ---------------------------------------------------------------------------------------------------------

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def trace_program(graph: Graph, most: int | None = None) -> torch.export.ExportedProgram:
    """Trace a graph with `torch.export`, its batch free, and remove the stack traces.

    Args:
        graph: The graph.
        most: Maximal batch size, with samples no longer than the example; 1: a fixed batch. None: any number and
            length.

    Raises:
        ModelError: The graph cannot be traced.
    """
    inputs = graph.inputs if most != 1 else tuple(_copy_row_major(tensor[:1]) for tensor in graph.inputs)
    free = torch.export.Dim.DYNAMIC
    dims: list[dict[int, Any]] = []
    for tensor, names in zip(inputs, graph.dims, strict=True):
        bounds = {d: most if name == BATCH else tensor.shape[d] for d, name in names.items()}
        dims.append(
            dict.fromkeys(names, free)
            if most is None
            else {d: free(min=1, max=bound) for d, bound in bounds.items() if bound is not None and bound > 1}
        )
    shapes = (tuple(dims),) if graph.is_variadic else tuple(dims)
    with quiet_exporters(), explain_failure(graph.name, "torch.export"), torch.no_grad():
        try:
            program = torch.export.export(graph.module, inputs, dynamic_shapes=shapes, strict=False)
        except Exception:  # strict tracing supports more than non-strict, such as len(x)
            program = torch.export.export(graph.module, inputs, dynamic_shapes=shapes, strict=True)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


def write_program(graph: Graph, path: Path) -> None:
    """Write a graph as a `torch.export` program (.pt2), which PyTorch loads without FleetFit.

    Raises:
        ModelError: The graph cannot be traced.
    """
    program = trace_program(graph)
    with quiet_exporters():
        try:
            torch.export.save(program, path)
        except RuntimeError as error:  # error of torch for a full disk
            raise OSError(None, f"PyTorch could not write {path.name}: {str(error).partition(chr(10))[0]}") from None


@contextlib.contextmanager
def quiet_exporters() -> Iterator[None]:
    """Suppress warnings and log lines of exporters. Failures are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def explain_failure(name: str, exporter: str) -> Iterator[None]:
    """Raise an exporter's failure as a `ModelError` with its root cause."""
    try:
        yield
    except (OSError, ModelError):  # a full disk; already explained
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        message = _COLOR.sub("", format_cause(cause))
        raise ModelError(
            f"{exporter} cannot trace {name} of this model: {message}. Remove steps of the forward pass that "
            "depend on values of tensors."
        ) from error
