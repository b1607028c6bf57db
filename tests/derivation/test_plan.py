"""A plan comes back from its payload as it was; what is damaged or of another version is refused."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz.mutations import in_nest
from support import raises
from support.bits import assert_same_bits
from support.derivation import derive, make_instance

from fleetfit.anatomy.derive import DerivedArchitecture, DerivedPlan, restore_architecture
from fleetfit.anatomy.plan import FORMAT
from fleetfit.errors import ModelError

SAMPLE = (
    "mlp_batch_norm", "vit_fused_qkv", "lstm_tied", "list_of_logits", "resnet_cifar_option_a", "grouped_heads_tied",
    "shufflenet", "spectral_norm", "selective_scan", "column_embeddings", "unet",
)  # fmt: skip
FUZZED = ("vit_fused_qkv", "lstm_tied", "list_of_logits")


def make_payload(name: str) -> Any:
    """Return a payload as it travels."""
    return json.loads(json.dumps(derive(name)[1].plan.to_payload()))


@pytest.mark.parametrize("name", SAMPLE)
def test_a_plan_comes_back_as_it_was(name: str) -> None:
    plan = derive(name)[1].plan
    assert DerivedPlan.from_payload(make_payload(name)) == plan
    assert DerivedPlan.from_payload(make_payload(name)).to_payload() == plan.to_payload()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_plan_gives_other_instances_the_same_levels(name: str) -> None:
    _, derived = derive(name)
    restored = restore_architecture(make_instance(name), make_payload(name))
    half = {axis: n if axis == "classes" else (n + 1) // 2 for axis, n in derived.plan.axes.items()}
    states = []
    for architecture in (derived, restored):
        torch.manual_seed(2)
        states.append(architecture.build(half, architecture.positions).state_dict())
    assert_same_bits(*states)


@pytest.mark.parametrize("version", [FORMAT + 1, FORMAT - 1, None, "1", [FORMAT], -1, True, torch.ones(2)])
def test_another_version_is_refused_with_both_versions(version: Any) -> None:
    with raises(ModelError, repr(version), FORMAT, key="derive.format"):
        DerivedPlan.from_payload({**make_payload("vit_fused_qkv"), "format": version})


@pytest.mark.parametrize("payload", [None, 7, [], "plan", {}])
def test_other_payloads_are_refused(payload: Any) -> None:
    with raises(ModelError, FORMAT, key="derive.format"):
        DerivedPlan.from_payload(payload)


DAMAGE: dict[str, Callable[[Any], Any]] = {
    "a field is absent": lambda p: p.pop("numbers"),
    "an axis is absent": lambda p: p["axes"].pop(next(iter(p["axes"]))),
    "an axis of another size": lambda p: p["axes"].update({next(iter(p["axes"])): 7}),
    "a dimension that is not there": lambda p: p["segments"][0].__setitem__(1, 9),
    "segments of a tensor that is not there": lambda p: p["segments"][0].__setitem__(0, "nothing"),
    "an axis of an exit that is not there": lambda p: p["exits"][0].__setitem__(3, [["nothing", 32]]),
    "a dimension of an exit that is not there": lambda p: p["exits"][0].__setitem__(2, 5),
    "a number of another value": lambda p: p["numbers"][0].__setitem__(3, 1001),
    "a block behind the last exit": lambda p: p["blocks"].update({next(iter(p["blocks"])): 99}),
    "a block of a tensor that is not there": lambda p: p["blocks"].update({"nothing": 0}),
    "an order of an axis that is not there": lambda p: p["ordered"].append("nothing"),
    "a huge exit": lambda p: p["exits"][0].__setitem__(3, [[None, 2**34]]),
    "no classes": lambda p: p.update(classes=0),
    "a negative size": lambda p: p["tensors"].update(more=[-1]),
    "a truth as a size": lambda p: p["tensors"].update(more=[True]),
    "a size in a text": lambda p: p["tensors"].update(more=["8"]),
    "a text as a truth": lambda p: p.update(next_tokens="yes"),
    "half a channel": lambda p: p["segments"][0].__setitem__(2, [["blocks.0", 0.5]]),
    "very deep": lambda p: p.update(whole=json.loads("[" * 400 + "]" * 400)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(damage: str) -> None:
    payload = make_payload("vit_fused_qkv")
    assert payload["exits"]
    DAMAGE[damage](payload)
    with raises(ModelError, key="derive"):
        DerivedPlan.from_payload(payload)


def fuzz(name: str, seed: int) -> bool:
    """Damage a plan in one to three places; return whether it is refused. If not, its levels can be built."""
    rng = random.Random(f"{name} {seed}")
    payload = copy.deepcopy(make_payload(name))
    for _ in range(rng.randint(1, 3)):
        if payload:
            in_nest(payload, lambda most: rng.randint(0, most))
    refusal: ModelError | None = None
    try:
        plan = DerivedPlan.from_payload(payload)
        assert DerivedPlan.from_payload(json.loads(json.dumps(plan.to_payload()))) == plan
        restored = restore_architecture(derive(name)[1].net, payload)
        restored.build(plan.axes, restored.positions)
    except ModelError as error:
        refusal = error
    assert refusal is None or (str(refusal).isprintable() and len(str(refusal)) < 700), refusal
    return refusal is not None


@pytest.mark.parametrize("name", FUZZED)
def test_a_damaged_plan_is_refused_or_a_plan(name: str) -> None:
    assert sum(fuzz(name, seed) for seed in range(150)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_many_damaged_plans_are_refused_or_plans(name: str) -> None:
    for seed in range(1000, 3000):
        fuzz(name, seed)


def test_plans_of_other_modules_are_refused() -> None:
    with raises(ModelError, "layers.0.weight", key="model.name"):
        restore_architecture(make_instance("unet"), make_payload("mlp_batch_norm"))
    assert isinstance(restore_architecture(make_instance("unet"), make_payload("unet")), DerivedArchitecture)
