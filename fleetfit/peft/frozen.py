"""Only the classifiers are trained; the backbone stays as it began, and does not travel."""

from fleetfit.anatomy import Architecture
from fleetfit.peft._tuned import Tuned


def frozen(architecture: Architecture) -> Architecture:
    """Freeze all but the classifiers, and what a method adds to the model.

    Args:
        architecture: The model family.
    """
    return Tuned(architecture, ())
