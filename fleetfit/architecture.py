"""What an author of a scalable model needs. docs/own-architecture.md shows its use."""

from fleetfit.check import check_layout as check_layout
from fleetfit.layout import (
    Architecture as Architecture,
    Axis as Axis,
    ExitModel as ExitModel,
)
