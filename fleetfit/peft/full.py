"""Everything is trained."""

from fleetfit.anatomy import Architecture


def full(architecture: Architecture) -> Architecture:
    """Return the architecture as it is.

    Args:
        architecture: The model family.
    """
    return architecture
