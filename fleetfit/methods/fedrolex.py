"""FedRolex: width-only sub-models whose channels roll over the model from round to round (Alam et al., NeurIPS 2022).

Differs from the authors' code: the window starts at the prefix in round 0 and moves forward; every element is
averaged over those who trained it, the norm and output layers too. Evaluation uses the prefix of each level.
"""

from dataclasses import replace

from fleetfit.hooks import Method
from fleetfit.methods.heterofl import heterofl
from fleetfit.submodel import rolling


def fedrolex(masked: bool = False) -> Method:
    """Make the method.

    Args:
        masked: Cross-entropy and average of the output layer over the client's own classes only.
    """
    return replace(heterofl(masked=masked), choose_channels=rolling)
