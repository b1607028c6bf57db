"""Uniformly at random, without replacement, among the clients that can take part (McMahan et al., AISTATS 2017)."""

from fleetfit.hooks import Method


def uniform() -> Method:
    """Make the selection, which is the default of every method."""
    return Method()
