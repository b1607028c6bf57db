"""From a level's model to files that a device needs, and nothing more."""

from fleetfit.inference.export.checked import Variant
from fleetfit.inference.export.folder import FORMS, Export, export
from fleetfit.inference.export.shipped import Shipped

__all__ = ["FORMS", "Export", "Shipped", "Variant", "export"]
