"""From a level's model to files that a device needs, and nothing more."""

from fleetfit.inference.export.shipped import Shipped

__all__ = ["Shipped"]
