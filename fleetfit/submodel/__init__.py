"""Sub-models: which channels of each axis and which exits are kept; extract them, put them back, move between them.

ScaleFL 3.1.2 and Algorithm 2 (CVPR 2023): the layers behind the exit are removed and each hidden dimension keeps
floor(s_w * D) channels, the first ones by default. FedRolex (NeurIPS 2022): the kept channels roll over the axis.

Differs from the paper: channels are chosen per axis and not per matrix, so that a concatenated or stacked dimension
keeps the same channels in each of its stretches (the literal upper-left block is wrong there); rolling starts at
round 0 with the prefix and moves forward.

Speed: a state lives in one flat buffer. All index work of a (layout, sub-model) is done once, in a `Cut`: small
tensors are gathered by one flat index, tensors above `LARGE` elements by slices, so that the index never weighs more
than the model.
"""

from fleetfit.submodel.channels import prefix, random, rolling, window
from fleetfit.submodel.cut import LARGE, Cut, cut, narrowed
from fleetfit.submodel.flat import FlatState, flat_of, shapes_of
from fleetfit.submodel.piece import Channels, Submodel
from fleetfit.submodel.states import check_shapes, extract, finite, norm, put_back, recut, whole

__all__ = [
    "LARGE",
    "Channels",
    "Cut",
    "FlatState",
    "Submodel",
    "check_shapes",
    "cut",
    "extract",
    "finite",
    "flat_of",
    "narrowed",
    "norm",
    "prefix",
    "put_back",
    "random",
    "recut",
    "rolling",
    "shapes_of",
    "whole",
    "window",
]
