"""The layout of a model: axes, declarations, and their inference from an architecture's own builder.

A layout gives the axis of each stretch of each dimension, and the block or exit of each tensor. `infer_layout` reads it
off the builder: it builds the model on the meta device with one axis enlarged by one granule and by two, and sees which
dimensions grow. Where growth has several explanations, the architecture declares one.
"""

from fleetfit.layout.axes import (
    Architecture,
    ArchitectureWrapper,
    Axis,
    Carry,
    Declaration,
    ExitModel,
    HasSegments,
    State,
    VisitsExits,
    alias,
    block,
    blocked,
    default_sizes,
    exit_after,
    interleaved,
    make_input,
    outputs,
    predictions,
    product,
    require_segments,
    segments,
    unwrap,
    validate_architecture,
    visit_exits,
)
from fleetfit.layout.hints import explain_errors, find_fixed_groups
from fleetfit.layout.infer import (
    batch_norms,
    build_module,
    evaluate_kept_norms,
    explains,
    infer_layout,
    keep_statistics,
    named_tensors,
)
from fleetfit.layout.layout import Layout, Segment, TensorLayout
from fleetfit.layout.placement import place_module
from fleetfit.layout.weight_norms import has_norms, list_vectors, settle_norms

__all__ = [
    "Architecture",
    "ArchitectureWrapper",
    "Axis",
    "Carry",
    "Declaration",
    "ExitModel",
    "HasSegments",
    "Layout",
    "Segment",
    "State",
    "TensorLayout",
    "VisitsExits",
    "alias",
    "batch_norms",
    "block",
    "blocked",
    "build_module",
    "default_sizes",
    "evaluate_kept_norms",
    "exit_after",
    "explain_errors",
    "explains",
    "find_fixed_groups",
    "has_norms",
    "infer_layout",
    "interleaved",
    "keep_statistics",
    "list_vectors",
    "make_input",
    "named_tensors",
    "outputs",
    "place_module",
    "predictions",
    "product",
    "require_segments",
    "segments",
    "settle_norms",
    "unwrap",
    "validate_architecture",
    "visit_exits",
]
