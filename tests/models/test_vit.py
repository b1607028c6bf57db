"""ViT's structure and sizes, counted by hand; its layout; the DeiT counts of ReeFL."""

import math
from typing import Any

import pytest
import torch
from support import Expected, raises

from fleetfit import names
from fleetfit.anatomy import build_module, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.core import Problem
from fleetfit.core.tasks import classification
from fleetfit.cost import submodel_cost
from fleetfit.errors import ModelError
from fleetfit.models.vit import Vit, deit_s, vit
from fleetfit.training import initial_state

SHAPE = (1, 8, 12)
TINY: dict[str, Any] = {"hidden": 12, "depth": 3, "attention_heads": 3, "intermediate": 18, "patch": 4}
LEVELS = ((0.40, 4), (0.55, 6), (0.75, 9), (1.00, 12))  # width and depth of ReeFL's ScaleFL


def tiny(**keys: Any) -> Vit:
    return vit(**{"classes": 4, "input_shape": SHAPE, **TINY, **keys})


def part(architecture: Vit, sizes: dict[str, int], exits: tuple[int, ...], prefix: str) -> int:
    shapes = infer_layout(architecture, exits).shapes(sizes, exits)
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))


def test_deit_s_has_the_counts_of_reefl() -> None:
    """Patches 384 * 3 * 16^2 + 384, class token 384, positions 197 * 384; 12 blocks; norm and linear layer as head."""
    architecture = deit_s(100)
    full = architecture.sizes(1.0)
    assert part(architecture, full, (12,), "embeddings.") == 371_328
    assert {part(architecture, full, (12,), f"blocks.{i}.") for i in range(12)} == {1_774_464}
    assert part(architecture, full, (12,), "heads.12.norm") == 768
    assert {part(architecture, full, (6, 12), f"heads.{e}.") for e in (6, 12)} == {39_268}


@pytest.mark.parametrize(("name", "hidden", "heads"), [("ti", 192, 3), ("s", 384, 6), ("b", 768, 12)])
def test_named_sizes(name: str, hidden: int, heads: int) -> None:
    architecture = names.resolve("models", f"deit_{name}")()
    block = 4 * (hidden * hidden + hidden) + 8 * hidden * hidden + 5 * hidden + 4 * hidden
    total = 769 * hidden + hidden + 197 * hidden + 12 * block + 2 * hidden + 1000 * (hidden + 1)
    assert submodel_cost(architecture, ({}, (12,)), (3, 224, 224)).parameters == total
    assert f"{total / 1e6:.1f} M" in names.describe_entry("models", f"deit_{name}")
    assert architecture.encoder.attention_heads == heads and architecture.encoder.head_size == 64


def test_the_widths_and_bytes_of_reefl_s_scalefl() -> None:
    """ReeFL, Table 1, "ScaleFL", full fine-tuning: 34.91 MiB.

    Stream and MLP widths are floored, attention's is the stream's rounded up to a multiple of 6 heads. The paper
    counts a classifier after every block and the mean over four levels, in MiB of fp32.
    """
    architecture = deit_s(100, heads="fixed")
    level_sizes = [architecture.sizes(width) for width, _ in LEVELS]
    assert [s["hidden"] for s in level_sizes] == [153, 211, 288, 384]
    assert [6 * s["head"] for s in level_sizes] == [156, 216, 288, 384]
    assert [s["mlp"] for s in level_sizes] == [614, 844, 1152, 1536]
    layout = infer_layout(architecture, input_shape=(3, 224, 224))
    bytes_of = [
        4 * sum(math.prod(shape) for shape in layout.shapes(sizes, tuple(range(1, depth + 1))).values())
        for sizes, (_, depth) in zip(level_sizes, LEVELS, strict=True)
    ]
    assert sum(bytes_of) / 4 / 2**20 == pytest.approx(34.91, abs=0.005)
    module = build_module(architecture, level_sizes[0], (4,))
    assert tuple(module.get_parameter("blocks.0.attention.query.weight").shape) == (156, 153)


def test_whole_heads_leave_in_whole() -> None:
    architecture = deit_s(100)
    assert [architecture.sizes(width)["attention"] for width, _ in LEVELS] == [128, 192, 256, 384]
    assert architecture.sizes(0.01) == {"hidden": 3, "attention": 64, "mlp": 15, "classes": 100}


def test_multiply_adds_of_an_image() -> None:
    """Patches of 4 x 4 in 8 x 12 pixels: 6, and the class token; heads see the class token only."""
    architecture, tokens = tiny(), 7
    block = tokens * (4 * 12 * 12 + 2 * 12 * 18) + 2 * tokens * tokens * 12
    multiply_adds = submodel_cost(architecture, ({}, (1, 3)), SHAPE).multiply_adds
    assert multiply_adds == 6 * 16 * 12 + 3 * block + 2 * 12 * 4


def test_fixed_heads_have_the_full_scale() -> None:
    report = check_layout(tiny(heads="fixed"), input_shape=SHAPE)
    assert max([*report.permutation.values(), *report.cuts.values()]) < 1e-12
    assert report.numbers and not report.not_proved


@pytest.mark.parametrize(("shape", "patch"), [((3, 32, 32), 4), ((1, 28, 28), 7), ((1, 8, 12), 2), ((2, 4, 4), 4)])
def test_images_of_any_shape(shape: tuple[int, int, int], patch: int) -> None:
    architecture = tiny(input_shape=shape, patch=patch)
    module = build_module(architecture, architecture.sizes(0.5), (1, 3)).eval()
    places = shape[1] // patch * (shape[2] // patch) + 1
    assert tuple(module.get_parameter("embeddings.positions").shape) == (1, places, 6)
    assert [tuple(out.shape) for out in module(torch.randn(2, *shape))] == [(2, 4), (2, 4)]


def test_patches_keep_their_places() -> None:
    """A patch embedding is the kernel's product with its own pixels, row by row, behind the class token."""
    torch.manual_seed(0)
    module: Any = build_module(tiny(), tiny().sizes(1.0), (3,)).eval()
    stem = module.embeddings
    x = torch.randn(2, *SHAPE)
    with torch.no_grad():
        tokens = module.start(x)
        torch.testing.assert_close(tokens[1, 0], (stem.class_token + stem.positions)[0, 0])
        for row in range(2):
            for column in range(3):
                pixels = x[1, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                embedded = (stem.patches.weight * pixels).sum((1, 2, 3)) + stem.patches.bias
                at = 1 + 3 * row + column
                torch.testing.assert_close(tokens[1, at], embedded + stem.positions[0, at])


def test_a_block_norms_before_and_adds_after() -> None:
    module: Any = build_module(tiny(), tiny().sizes(1.0), (3,)).eval()
    block, x = module.blocks[0], torch.randn(2, 5, 12)
    with torch.no_grad():
        middle = x + block.attention(block.norm1(x))
        inner = block.mlp.fc1(block.norm2(middle))
        expected = middle + block.mlp.fc2(inner * 0.5 * (1 + torch.erf(inner / 2**0.5)))
        torch.testing.assert_close(block(x), expected)


def test_initial_parameters() -> None:
    """Linear layers, kernels and the single tokens are drawn, biases are zero, norms are the identity."""
    state = initial_state(Problem(tiny(hidden=48, patch=2), SHAPE, classification, (1, 3)), 0)
    matrices = {name for name, tensor in state.items() if tensor.dim() > 1}
    assert {"embeddings.class_token", "embeddings.positions", "embeddings.patches.weight"} < matrices
    assert all(0 < float(state[name].abs().max()) <= 0.04 for name in matrices)
    assert all(not state[name].any() for name in state.keys() - matrices if name.endswith("bias"))
    assert all(bool((state[name] == 1).all()) for name in state.keys() - matrices if name.endswith("weight"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"input_shape": (64,)}, Expected("(64,)", key="input_shape")),
        ({"patch": 5}, Expected(5, "8x12", key="patch")),
        ({"patch": 0}, Expected(0, key="patch")),
        ({"attention_heads": 5}, Expected("attention_heads", 12, 5, key="hidden")),
        ({"heads": "some"}, Expected('"whole"', '"fixed"', key="heads")),
    ],
)
def test_unfit_inputs_are_refused(keys: dict[str, Any], expected: Expected) -> None:
    with raises(ModelError, expected):
        tiny(**keys)
