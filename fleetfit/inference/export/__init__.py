"""From a level's model to the files that a device needs."""

from fleetfit.inference.export.folder import FORMS, Export, Form, Variant, export
from fleetfit.inference.export.level import LevelModel

__all__ = ["FORMS", "Export", "Form", "LevelModel", "Variant", "export"]
