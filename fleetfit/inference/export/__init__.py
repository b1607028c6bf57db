"""Export a level's model to files for devices."""

from fleetfit.inference.export.folder import (
    Export as Export,
    export as export,
)
from fleetfit.inference.export.level import LevelModel as LevelModel
