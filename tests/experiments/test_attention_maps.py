"""Attention maps: the whole map recomputed by loops over samples, heads and tokens, with every fine-tuning mode."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Expected, raises
from torch import Tensor, nn

from experiments.figures.attention import attention_maps
from fleetfit.anatomy import Architecture, build_module, named_tensors, outputs
from fleetfit.errors import ModelError
from fleetfit.models.bert import bert
from fleetfit.models.ree import recurrent
from fleetfit.models.vim import vim
from fleetfit.models.vit import Vit, vit
from fleetfit.peft.lora import lora
from fleetfit.peft.serial_adapter import serial_adapter
from fleetfit.peft.ssf import ssf

SHAPE = (1, 4, 6)  # 2 x 3 patches
HEADS = 2


def backbone(distilled: bool = False) -> Vit:
    return replace(vit(5, SHAPE, hidden=8, depth=3, attention_heads=HEADS, patch=2), distilled=distilled)


def module_of(architecture: Architecture, exits: tuple[int, ...] = (1, 3)) -> Any:
    module = build_module(architecture, architecture.sizes(1.0), exits).eval()
    rng = torch.Generator().manual_seed(2)
    for _, tensor, _ in named_tensors(module):  # nothing at zero or one
        tensor.data = 0.5 * torch.randn(tensor.shape, generator=rng)
    return module


# ---- by loops -------------------------------------------------


def linear(layer: Any, x: Tensor) -> Tensor:
    """What a linear layer says of one token, with what LoRA or SSF put beside or behind it."""
    base = getattr(layer, "base_layer", layer)
    weight, put = base.weight, dict(layer.named_parameters())
    if "lora_A.default.weight" in put:
        weight = weight + 2.0 * put["lora_B.default.weight"] @ put["lora_A.default.weight"]  # alpha / rank = 2
    return scaled(layer, weight @ x + base.bias)


def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
    spread = torch.sqrt(((x - x.mean()) ** 2).mean() + layer.eps)
    return scaled(layer, (x - x.mean()) / spread * layer.weight + layer.bias)


def scaled(layer: nn.Module, x: Tensor) -> Tensor:
    """SSF: a factor and a term per channel."""
    put: Any = dict(layer.named_children()).get("tuning")
    return x if put is None else x * put.scale + put.shift


def whole_map(block: Any, tokens: list[Tensor]) -> list[list[float]]:
    """The attention map [tokens, tokens] of one sample, the mean over heads."""
    normed = [norm(block.norm1, t) for t in tokens]
    query, key = ([linear(layer, t) for t in normed] for layer in (block.attention.query, block.attention.key))
    size = len(query[0]) // HEADS
    result = [[0.0] * len(tokens) for _ in tokens]
    for h in range(HEADS):
        own = slice(h * size, (h + 1) * size)
        for i in range(len(tokens)):
            powers = [math.exp(float(query[i][own] @ key[j][own]) / math.sqrt(size)) for j in range(len(tokens))]
            for j in range(len(tokens)):
                result[i][j] += powers[j] / sum(powers) / HEADS
    return result


def by_loops(module: Any, images: Tensor, stops: tuple[int, ...], first: int = 1, modulate: bool = True) -> Tensor:
    """Eqs. 7 to 9 after each of these blocks, [3, B, stops, patches]; the forward pass is written out once more."""
    tokens, queue, places, columns = module.backbone.embeddings(images), [], [], []
    for number, block in enumerate(module.backbone.blocks, 1):
        entered, tokens = tokens, block(tokens)
        if number not in stops:
            continue
        z = tokens[:, 0]
        places.append(number)
        m0, ml = module.ree([*queue, z], places)
        columns.append([
            [whole_map(block, [a[b], *entered[b, 1:]])[0][first:] for b in range(len(images))]
            for a in (entered[:, 0], ml, m0 + z)
        ])  # fmt: skip
        queue.append(ml if modulate else z)
        if modulate:
            tokens = torch.cat([ml[:, None], tokens[:, 1:]], dim=1)
    return torch.tensor(columns).permute(1, 2, 0, 3)


def plain(architecture: Architecture) -> Architecture:
    return architecture


def thin(architecture: Architecture) -> Architecture:
    return lora(architecture, rank=2, alpha=4.0, targets=("*.query", "*.key", "*.value"))


@pytest.mark.parametrize("tuned", [plain, thin, ssf, serial_adapter])
def test_the_maps_are_equations_7_to_9(tuned: Callable[..., Architecture]) -> None:
    if tuned is thin:
        pytest.importorskip("peft", reason="the extra `peft` is not installed")
    module = module_of(recurrent(tuned(backbone()), SHAPE))
    images = torch.randn(2, *SHAPE)
    with torch.no_grad():
        maps, expected = attention_maps(module, images), by_loops(module, images, (1, 2, 3))
    assert maps.maps.shape == (3, 2, 3, 6)
    torch.testing.assert_close(maps.maps, expected, atol=1e-5, rtol=1e-4)
    assert (maps.blocks, maps.grid, maps.exits) == ((1, 2, 3), (2, 3), (1, 3))


@pytest.mark.parametrize(
    ("settings", "stops"), [({"modulate": False}, (1, 2, 3)), ({"at": "exits"}, (1, 3))], ids=["unmodulated", "exits"]
)
def test_the_variants_have_the_maps_of_what_they_compute(settings: Any, stops: tuple[int, ...]) -> None:
    module = module_of(recurrent(backbone(), SHAPE, **settings))
    images = torch.randn(1, *SHAPE)
    with torch.no_grad():
        maps, expected = attention_maps(module, images), by_loops(module, images, stops, 1, "modulate" not in settings)
    torch.testing.assert_close(maps.maps, expected, atol=1e-5, rtol=1e-4)
    assert maps.blocks == stops


def test_a_distillation_token_is_looked_at_but_is_no_patch() -> None:
    module = module_of(recurrent(backbone(distilled=True), SHAPE))
    images = torch.randn(1, *SHAPE)
    with torch.no_grad():
        maps, expected = attention_maps(module, images), by_loops(module, images, (1, 2, 3), first=2)
    torch.testing.assert_close(maps.maps, expected, atol=1e-5, rtol=1e-4)


def test_the_model_is_left_as_it_was_and_its_logits_come_along() -> None:
    module = module_of(recurrent(backbone(), SHAPE))
    images = torch.randn(2, *SHAPE)
    maps = attention_maps(module, images)
    assert not maps.maps.requires_grad
    torch.testing.assert_close(list(maps.logits), [z.detach() for z in outputs(module, images)])
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (backbone(), Expected(key="method")),
        (recurrent(backbone(), SHAPE, ree=False), Expected(key="method")),
        (recurrent(vim(3, SHAPE, depth=3, hidden=8, patch=2, state=2), SHAPE), Expected(key="model")),
        (recurrent(bert(3, (7,), vocabulary=11, hidden=12, layers=3, attention_heads=3, max_positions=8), (7,)),
         Expected(key="model")),
    ],
)  # fmt: skip
def test_a_model_without_such_maps_is_a_sentence(architecture: Architecture, expected: Expected) -> None:
    module = build_module(architecture, architecture.sizes(1.0), (3,)).eval()
    with raises(ModelError, expected):
        attention_maps(module, torch.zeros(1, *SHAPE))
