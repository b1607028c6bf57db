"""What an author of a scalable model needs. docs/own-architecture.md shows its use."""

from fleetfit.anatomy import (
    Architecture as Architecture,
    Axis as Axis,
    ExitModel as ExitModel,
)
from fleetfit.anatomy.proof import check_layout as check_layout
