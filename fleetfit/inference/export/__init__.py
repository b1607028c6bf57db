"""Export a level's model to files for devices."""

from fleetfit.inference.export.folder import FORMS, Export, Form, Variant, export
from fleetfit.inference.export.level import LevelModel

__all__ = ["FORMS", "Export", "Form", "LevelModel", "Variant", "export"]
