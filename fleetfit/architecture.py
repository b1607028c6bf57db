"""What an author of a scalable model needs. docs/own-architecture.md shows its use."""

from fleetfit.check import check_layout as check_layout
from fleetfit.layout import (
    Architecture as Architecture,
    Axis as Axis,
    ExitModel as ExitModel,
    alias as alias,
    block as block,
    blocked as blocked,
    exit_after as exit_after,
    interleaved as interleaved,
    product as product,
    segments as segments,
)
