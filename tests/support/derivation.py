"""Derived architectures of the bed's modules, each derived once in a process."""

import importlib.util
from functools import cache

import pytest
import torch
from bed import ENTRIES, Entry
from torch import nn

from fleetfit.anatomy.derive import DerivedArchitecture, derive_architecture
from fleetfit.errors import ModelError


def make_instance(name: str) -> nn.Module:
    """Return a new instance of the bed, in evaluation mode and with the same weights each time."""
    if name.startswith("hf_") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    torch.manual_seed(0)
    return ENTRIES[name].make().eval()


@cache
def derive_or_refuse(name: str) -> DerivedArchitecture | ModelError:
    """Return the derived architecture of a module of the bed, or the error that refuses it."""
    try:
        return derive_architecture(make_instance(name), ENTRIES[name].example())
    except ModelError as error:
        return error


def derive(name: str) -> tuple[Entry, DerivedArchitecture]:
    """Return a module of the bed with its derived architecture."""
    derived = derive_or_refuse(name)
    assert isinstance(derived, DerivedArchitecture), derived
    return ENTRIES[name], derived
