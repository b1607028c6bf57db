"""ExclusiveFL: only clients that afford the full model take part (baseline of ReeFL, ICML 2024).

It is FedAvg as it stands: the full model is the only level, and clients under it are reported and left out.
"""

from fleetfit.method import Method


def exclusivefl() -> Method:
    """Make the method."""
    return Method()
