"""What can scale in a model: axes, declarations, and the layout inferred from an architecture's own builder.

A layout says for each tensor which stretch of which dimension belongs to which axis, and with which block or exit the
tensor comes and goes. It is read off the builder: `infer_layout` builds the model on the meta device with one axis
enlarged by one granule and by two, and looks at which dimensions moved. What growth alone cannot tell is declared by
the architecture.
"""

from fleetfit.layout.axes import (
    Architecture,
    Axis,
    Carry,
    Declaration,
    ExitModel,
    HasSegments,
    State,
    Wrapped,
    alias,
    block,
    blocked,
    default_sizes,
    exit_after,
    interleaved,
    outputs,
    predictions,
    product,
    segments,
    some_input,
    with_segments,
)
from fleetfit.layout.infer import batch_norms, build_module, explains, infer_layout, named_tensors
from fleetfit.layout.layout import Layout, Segment, TensorLayout
from fleetfit.layout.placed import place_module
from fleetfit.layout.undeclared import about_input, check_described, same_number

__all__ = [
    "Architecture",
    "Axis",
    "Carry",
    "Declaration",
    "ExitModel",
    "HasSegments",
    "Layout",
    "Segment",
    "State",
    "TensorLayout",
    "Wrapped",
    "about_input",
    "alias",
    "batch_norms",
    "block",
    "blocked",
    "build_module",
    "check_described",
    "default_sizes",
    "exit_after",
    "explains",
    "infer_layout",
    "interleaved",
    "named_tensors",
    "outputs",
    "place_module",
    "predictions",
    "product",
    "same_number",
    "segments",
    "some_input",
    "with_segments",
]
