"""The layout of a model: its axes, and its inference from an architecture's own builder.

A layout gives the axis of each stretch of each dimension, and the block or exit of each tensor. `infer_layout` reads it
off the builder: it builds the model on the meta device with one axis larger by a granule, and sees which dimensions
grow; a build with all axes larger by two shows that they grow evenly. Where growth has several explanations, a forward
pass shows which is right.
"""

from fleetfit.anatomy.architecture import (
    Architecture as Architecture,
    ArchitectureWrapper as ArchitectureWrapper,
    Carry as Carry,
    ExitModel as ExitModel,
    HasSegments as HasSegments,
    VisitsExits as VisitsExits,
    default_sizes as default_sizes,
    make_input as make_input,
    outputs as outputs,
    predictions as predictions,
    require_segments as require_segments,
    unwrap as unwrap,
    validate_architecture as validate_architecture,
    visit_exits as visit_exits,
)
from fleetfit.anatomy.hints import explain_errors as explain_errors, find_fixed_groups as find_fixed_groups
from fleetfit.anatomy.infer import (
    batch_norms as batch_norms,
    build_module as build_module,
    evaluate_kept_norms as evaluate_kept_norms,
    find_classifiers as find_classifiers,
    infer_layout as infer_layout,
    keep_statistics as keep_statistics,
    named_tensors as named_tensors,
)
from fleetfit.anatomy.placement import place_module as place_module
from fleetfit.anatomy.weight_norms import (
    has_norms as has_norms,
    list_vectors as list_vectors,
    settle_norms as settle_norms,
)
from fleetfit.layout import (
    Axis as Axis,
    Layout as Layout,
    Segment as Segment,
    State as State,
    TensorLayout as TensorLayout,
    get_length as get_length,
)
