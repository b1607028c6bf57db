"""Export a level's model to files for devices."""

from fleetfit.inference.export.folder import (
    FORMS as FORMS,
    Export as Export,
    Form as Form,
    Variant as Variant,
    export as export,
)
from fleetfit.inference.export.level import LevelModel as LevelModel
