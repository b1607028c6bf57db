"""The bed's modules do what they would do in their own repositories: run, learn, and come in other widths."""

import importlib.util
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from bed import ENTRIES, Entry
from torch import Tensor, nn

NO_GRADIENT = {
    "data_branch": {"dark"},  # the example takes the other branch
}
"""Submodules whose parameters a training step does not reach."""

NARROW = [name for name, entry in ENTRIES.items() if entry.narrow]


@pytest.fixture(autouse=True)
def _random_state() -> None:
    torch.manual_seed(0)


def make(name: str) -> tuple[Entry, nn.Module]:
    if name.startswith("hf_") and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return ENTRIES[name], ENTRIES[name].make()


def get_logits(output: Any) -> list[Tensor]:
    """Return the logits of each exit of whatever a module returns."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [output["logits"]]
    return list(output) if isinstance(output, list | tuple) else [output.logits]


def find_idle_parameters(module: nn.Module) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad and p.grad is None}


def test_the_bed_is_large_enough() -> None:
    own = [name for name in ENTRIES if not name.startswith("hf_")]
    assert len(own) >= 45
    assert len(ENTRIES) - len(own) >= 11
    assert len(NARROW) >= 10


@pytest.mark.parametrize("name", ENTRIES)
def test_a_module_classifies_its_example(name: str) -> None:
    entry, module = make(name)
    x = entry.example()
    assert x.dtype == (torch.int64 if entry.tokens else torch.float32)
    assert not entry.tokens or int(x.max()) < entry.tokens
    with torch.no_grad():
        exits = get_logits(module.eval()(x))
    for logits in exits:
        assert logits.dim() == (3 if entry.next_tokens else 2)
        assert len(logits) == 2
        assert logits.shape[-1] > 1
        assert logits.isfinite().all()
        assert logits.std() > 0
    assert torch.equal(x, entry.example())


@pytest.mark.parametrize("name", ENTRIES)
def test_each_trainable_parameter_gets_a_gradient(name: str) -> None:
    entry, module = make(name)
    exits = get_logits(module.train()(entry.example()))
    torch.stack([logits.log_softmax(-1)[..., 0].mean() for logits in exits]).sum().backward()
    idle = find_idle_parameters(module)
    assert {parameter.split(".")[0] for parameter in idle} == NO_GRADIENT.get(name, set())


@pytest.mark.parametrize("name", NARROW)
def test_half_the_width_builds_and_runs(name: str) -> None:
    entry, module = make(name)
    assert entry.narrow is not None
    half = entry.narrow(0.5).eval()
    full = {key: value.shape for key, value in module.state_dict().items()}
    assert {key: value.shape for key, value in entry.narrow(1).state_dict().items()} == full
    shapes = {key: value.shape for key, value in half.state_dict().items()}
    assert shapes.keys() == full.keys()
    assert all(a <= b for key in full for a, b in zip(shapes[key], full[key], strict=True))
    assert sum(map(torch.numel, half.parameters())) < 0.7 * sum(map(torch.numel, module.parameters()))
    with torch.no_grad():
        x = entry.example()
        assert get_logits(half(x))[-1].shape == get_logits(module.eval()(x))[-1].shape
