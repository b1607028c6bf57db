"""Deriving leaves the instance and the process as they were, and comes to the same plan each time."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from bed import ENTRIES
from support.bits import has_same_bits
from support.derivation import derive, make_instance
from torch import Tensor, nn

from fleetfit.anatomy.derive import derive_architecture
from fleetfit.anatomy.fitting import SampleFacts, fit_instance
from fleetfit.cost import full_cost

SAMPLE = (
    "resnet_basic", "unet", "vit_fused_qkv", "gpt_tied", "grouped_heads_tied", "lstm", "spectral_norm",
    "weight_norm_by_hooks", "parametrized_symmetric", "lora", "list_of_logits", "variational", "auxiliary_classifier",
)  # fmt: skip


class Cached(nn.Module):
    """A module that keeps a table and counts its calls, as others do; some parts are in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.out = nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.calls, self.table, self.sizes = 0, None, [8, 8]
        self.drop.eval()
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.table is None:
            self.table = torch.ones(len(x), 1)
            self.length = len(x)
        self.sizes.append(len(x))
        return self.out(self.drop(self.norm(self.fc(x) * self.frozen)) * self.table)


def describe(value: Any) -> Any:
    """Return what a value is, so that a change of it or inside it is seen; others by identity."""
    if isinstance(value, Tensor):
        return (
            id(value),
            value._version,
            value.detach().clone(),
            value.requires_grad,
            value.is_leaf and value.grad is None,
        )
    if isinstance(value, dict):
        return {key: describe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [describe(inner) for inner in value]
    return value if isinstance(value, int | float | str | None) else id(value)


def describe_instance(net: nn.Module) -> dict[str, Any]:
    return {name: describe(vars(part)) for name, part in net.named_modules()}


def describe_randomness() -> list[Any]:
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 the global generator is what is watched
    return [torch.get_rng_state(), random.getstate(), json.dumps(numpy_state, default=lambda array: array.tolist())]


def add_hooks(net: nn.Module) -> None:
    net.register_forward_pre_hook(lambda *_: None)
    net.register_forward_hook(lambda *_: None)
    for part in [part for part in net.modules() if isinstance(part, nn.Linear)][-1:]:
        part.register_full_backward_hook(lambda *_: None)
    net.register_state_dict_post_hook(lambda *_: None)
    net.register_load_state_dict_post_hook(lambda *_: None)
    next(p for p in net.parameters() if p.requires_grad).register_hook(lambda gradient: None)


@pytest.mark.parametrize("name", [*SAMPLE, "cached"])
def test_nothing_of_the_instance_or_the_process_changes(name: str) -> None:
    net = Cached() if name == "cached" else make_instance(name)
    x = torch.randn(2, 5) if name == "cached" else ENTRIES[name].example()
    if name == "auxiliary_classifier":
        net.aux1.requires_grad_(False)
    next(net.children()).train()
    add_hooks(net)
    settings = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_num_threads(),
    )
    before, randomness, samples = describe_instance(net), describe_randomness(), x.clone()
    derived = derive_architecture(net, x)
    assert has_same_bits(describe_randomness(), randomness)
    derived.build(derived.plan.axes, derived.positions)
    assert has_same_bits(describe_instance(net), before)
    assert torch.equal(x, samples)
    now = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.backends.mkldnn.enabled, torch.get_num_threads())
    assert now == settings


def test_a_level_shares_no_tensor_with_the_instance() -> None:
    net = Cached()
    derived = derive_architecture(net, torch.randn(2, 5))
    level = derived.build(derived.plan.axes, derived.positions)
    with torch.no_grad():
        for tensor in level.state_dict().values():
            tensor.zero_()
    assert all(bool(p.any()) for p in (net.fc.weight, net.out.weight, net.frozen))


def test_a_later_change_of_the_instance_is_in_no_level() -> None:
    net = Cached()
    derived = derive_architecture(net, torch.randn(2, 5))
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.zero_()
    level = derived.build(derived.plan.axes, derived.positions)
    assert all(bool(p.any()) for p in (level.net.fc.weight, level.net.out.weight, level.net.frozen))


class Switched(nn.Module):
    """A module whose forward pass reads a buffer, and counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(5, 8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.out(self.up(x) @ self.up.weight @ self.up.weight.T if self.calls > 2 else self.up(x))


def test_buffers_that_forward_reads_stay() -> None:
    """Two products for the logits, and with the switch two more."""
    net = Switched()
    derived = derive_architecture(net, torch.randn(2, 5), exits="none")
    assert full_cost(derived, (5,)).multiply_adds == 5 * 8 + 8 * 3 + 2 * 5 * 8
    assert net.calls == 2 and derived.net.calls == 2


@pytest.mark.parametrize("name", SAMPLE[:-1])
def test_the_plan_is_the_same_each_time(name: str) -> None:
    random.seed(7)
    torch.manual_seed(7)
    net = make_instance(name)
    assert derive_architecture(net, ENTRIES[name].example()).plan == derive(name)[1].plan
    torch.manual_seed(99)
    other = ENTRIES[name].make().train()
    assert derive_architecture(other, ENTRIES[name].example()).plan == derive(name)[1].plan


@pytest.mark.slow
def test_the_plan_is_the_same_in_a_fresh_process() -> None:
    """Where sets of texts come in another order, too."""
    names = SAMPLE[:-1]
    code = (
        "import json, sys\n"
        "from support.derivation import derive\n"
        f"print(json.dumps([derive(name)[1].plan.to_payload() for name in {names!r}]))\n"
    )
    root = Path(__file__).parents[2]
    for seed in ("1", "2"):
        environment = {"PYTHONPATH": f"{root}:{root / 'tests'}", "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        payloads = json.loads(done.stdout.splitlines()[-1])
        assert payloads == [json.loads(json.dumps(derive(name)[1].plan.to_payload())) for name in names]


class Ruled(nn.Sequential):
    """A rule for linear weights alone, as many people write it."""

    def __init__(self, by_parts: bool) -> None:
        super().__init__(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        self._init_weights = self.draw if by_parts else self.draw_all

    def draw(self, part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 0.25)

    def draw_all(self) -> None:
        self.apply(self.draw)


@pytest.mark.parametrize("by_parts", [True, False])
def test_new_weights_are_new_where_the_models_rule_has_none(by_parts: bool) -> None:
    net = Ruled(by_parts)
    for parameter in net.parameters():
        nn.init.constant_(parameter, 7.0)
    new = cast(Any, fit_instance(net, SampleFacts((6,), 0, 3), "keep", "new", 0))
    assert bool((new[0].weight == 0.25).all()) and bool((new[1].weight == 1).all())
    assert not any(bool((tensor == 7).any()) for tensor in new.parameters())
