"""Whether two values are the same to the last bit."""

from collections.abc import Mapping
from typing import Any

import torch

import fleetfit as ff


def has_same_bits(one: Any, other: Any) -> bool:
    """Return whether two values are the same to the last bit: tensors, states, and nests of them.

    Keys may come in another order. -0.0 is not 0.0, and a NaN is the same NaN.
    """
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        bits, other_bits = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(bits, other_bits)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(has_same_bits(one[key], other[key]) for key in one)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(has_same_bits, one, other))
    return bool(one == other)


def assert_same_bits(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that two states are the same to the last bit; the first tensor that differs is named."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert has_same_bits(actual[name], tensor), name


def have_same_state(run: ff.Run, other: ff.Run) -> bool:
    """Return whether two runs ended with the same bits."""
    return has_same_bits(run.server.state, other.server.state)
