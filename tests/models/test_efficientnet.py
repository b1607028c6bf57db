from typing import Any

import pytest
import torch
from proofs import built, get_shapes, proven, trains, whole_before
from torch import nn

from fleetfit.anatomy import build_module, infer_layout
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.models.inverted import Inverted, Stage, drop_connect, efficientnet_b0, efficientnet_b4

LARGE = (3, 224, 224)
EXITS = (22, 26, 30, 32)
# channels, blocks, kernel, expansion
B4 = ((24, 2, 3, 1), (32, 4, 3, 6), (56, 4, 5, 6), (112, 6, 3, 6), (160, 6, 5, 6), (272, 4, 5, 6), (272, 4, 5, 6),
      (448, 2, 3, 6))  # fmt: skip


@pytest.mark.parametrize(
    ("width", "exits", "parameters", "multiply_adds"),
    [
        (1.00, (32,), 17.2, 1223.5),
        (0.70, (32,), 8.6, 613.3),
        (0.48, (32,), 4.2, 299.2),
        (0.33, (32,), 2.1, 148.8),
        (0.82, EXITS[:3], 8.6, 799.6),
        (0.75, EXITS[:2], 4.5, 641.5),  # printed as 0.65
        (0.75, EXITS[:1], 2.1, 534.1),  # printed as 0.65
    ],
)
def test_scalefl_s_table_8(width: float, exits: tuple[int, ...], parameters: float, multiply_adds: float) -> None:
    """In millions. Parameters are printed to a tenth of a million, so the rounding is allowed for beside the 1%."""
    architecture = efficientnet_b4()
    cost = submodel_cost(architecture, (architecture.sizes(width), exits), LARGE)
    assert cost.parameters / 1e6 == pytest.approx(parameters, rel=0.01, abs=0.05)
    assert cost.multiply_adds / 1e6 == pytest.approx(multiply_adds, rel=1e-3)


def test_printed_widths_of_levels_1_and_2_do_not_fit() -> None:
    architecture = efficientnet_b4()
    cost = submodel_cost(architecture, (architecture.sizes(0.65), (22,)), LARGE)
    assert cost.parameters / 1e6 < 0.8 * 2.1
    assert cost.multiply_adds / 1e6 < 0.8 * 534.1


def count_parameters(width: float, exits: tuple[int, ...], classes: int) -> int:
    """B4's parameters, term by term: what is derived comes from the narrowed stream."""
    before = int(32 * width)
    total, i = 27 * before + 2 * before, 0
    for channels, blocks, kernel, expansion in B4:
        after = int(channels * width)
        for _ in range(blocks):
            if i == exits[-1]:
                return total
            inside, squeezed = expansion * before, before // 4
            total += (before * inside + 2 * inside) * (expansion > 1)
            total += kernel**2 * inside + 2 * inside
            total += 2 * inside * squeezed + squeezed + inside
            total += inside * after + 2 * after
            before, i = after, i + 1
            if i == 32:
                total += after * classes + classes
            elif i in exits:
                n = after // 6
                total += 9 * (after * n + 2 * n * n) + 6 * n + n * classes + classes
    return total


@pytest.mark.parametrize(("width", "exits"), [(1.0, EXITS), (0.61, (5, 22)), (0.3, (1, 32))])
def test_sizes_by_hand(width: float, exits: tuple[int, ...]) -> None:
    architecture = efficientnet_b4(7)
    cost = submodel_cost(architecture, (architecture.sizes(width), exits), LARGE)
    assert cost.parameters == count_parameters(width, exits, 7)


def test_b0_has_the_paper_s_size() -> None:
    """5.29 M parameters, 0.39 G multiply-adds (Tan & Le, Table 2)."""
    cost = full_cost(efficientnet_b0(1000, top=1280), LARGE)
    assert cost.parameters == 5_288_548
    assert cost.multiply_adds == pytest.approx(0.39e9, rel=0.02)


STAGES = (Stage(8, 1, 3, 1, 1), Stage(16, 2, 3, 2, 6), Stage(16, 2, 5, 2, 6), Stage(24, 2, 3, 1, 6))


def small(**keys: Any) -> Inverted:
    settings: dict[str, Any] = {
        "width_multiplier": 1.0, "top": 0, "squeeze": 4, "activation": "swish", "norm": "batch", "group": 2,
        "stride": 8, "dropout": 0.0, "drop_connect": 0.0, "head_layers": 3, "tied": True,
    }  # fmt: skip
    return Inverted(4, 2, 8, STAGES, **settings | keys)


@pytest.mark.parametrize("keys", [{}, {"norm": "group"}, {"tied": False, "top": 10}, {"head_layers": 0}], ids=str)
def test_the_layout_is_proven(keys: dict[str, Any]) -> None:
    proven(small(**keys), (2, 16, 16), (1, 3, 4, 6, 7))


@pytest.mark.slow
def test_the_layout_of_b0_is_proven() -> None:
    proven(efficientnet_b0(5, stride=4), (3, 8, 8), (3, 8, 13, 16))


def test_it_trains() -> None:
    trains(small(drop_connect=0.1, head_layers=0), (2, 16, 16), (3, 5, 7))


def test_channels_follow_the_narrowed_stream() -> None:
    sizes = efficientnet_b4().sizes(0.33)
    assert [sizes[f"stage{s}"] for s in (1, 5, 8)] == [7, 52, 147]
    assert (sizes["expand_stage1"], sizes["squeeze_stage1"], sizes["squeeze_stem"]) == (42, 1, 2)
    assert (sizes["expand_stage5"], sizes["exit5"]) == (312, 8)


def test_blocks_of_one_stream_share_channels() -> None:
    tied, free = small(), small(tied=False)
    assert {p.expand for p in tied.block_specs} == {
        "",
        "expand_stage1",
        "expand_stage2",
        "expand_stage3",
        "expand_stage4",
    }
    assert [spec.expand for spec in free.block_specs] == ["", *(f"expand{i}" for i in range(1, 7))]
    assert get_shapes(built(tied, tied.sizes(0.6), (7,))) == get_shapes(built(free, free.sizes(0.6), (7,)))


def test_blocks_before_i_stay_whole() -> None:
    architecture = small(tied=False)
    sizes = whole_before(architecture, 3, 0.5)
    assert [sizes[f"stage{s}"] for s in (1, 2, 3, 4)] == [8, 16, 8, 12]
    assert [sizes[f"expand{i}"] for i in range(1, 7)] == [48, 96, 48, 48, 48, 72]
    assert [sizes[f"squeeze{i}"] for i in range(7)] == [2, 2, 4, 2, 2, 2, 3]
    layout = infer_layout(architecture, (7,))
    assert get_shapes(built(architecture, sizes, (7,))) == layout.shapes(sizes, (7,))


def test_an_input_is_added_inside_a_stage_only() -> None:
    """Stages 2 and 3 are equally wide, and with stride 1 their maps too: by place, not by shape."""
    module = built(small(stride=1), small(stride=1).sizes(1.0), (7,))
    assert [block.adds for block in module.blocks] == [False, False, True, False, True, False, True]


def test_drop_connect_drops_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.ones(4000, 2, 3, 3)
    y = drop_connect(x, 0.25)
    assert {round(v, 6) for v in y.unique().tolist()} == {0.0, round(1 / 0.75, 6)}
    assert torch.equal(y, y[:, :1, :1, :1].expand_as(y))  # whole samples
    assert float(y.mean()) == pytest.approx(1, abs=0.03)


def test_drop_connect_and_dropout_act_in_training_only() -> None:
    architecture = small(drop_connect=0.5, dropout=0.4)
    module = build_module(architecture, architecture.sizes(1.0), (3, 7))
    assert [block.dropped for block in module.blocks] == pytest.approx([0.5 * i / 7 for i in range(7)])
    assert {n: m.p for n, m in module.named_modules() if isinstance(m, nn.Dropout)} == {
        "heads.3.drop": 0.0,
        "heads.7.drop": 0.4,
    }
    x = torch.randn(6, 2, 16, 16)
    assert torch.equal(module.eval()(x)[-1], module(x)[-1])
    module.train()
    torch.manual_seed(1)
    first = module(x)[-1]
    assert not torch.equal(first, module(x)[-1])
    torch.manual_seed(1)  # they know only torch's global generator, which a job seeds
    assert torch.equal(first, module(x)[-1])


@pytest.mark.parametrize(("stride", "side"), [(64, 1), (8, 8), (2, 32)])
def test_small_images_need_a_smaller_stride(stride: int, side: int) -> None:
    architecture = efficientnet_b4(4, 3, stride=stride)
    with torch.device("meta"):
        module = build_module(architecture, architecture.sizes(0.1), (32,)).eval()
        carry = module.segment(0, module.start(torch.empty(2, 3, 64, 64)))
    assert carry.shape[2:] == (side, side)


@pytest.mark.parametrize("side", [32, 7])
def test_it_takes_images_of_any_size(side: int) -> None:
    architecture = efficientnet_b0(4, 1, width_multiplier=0.25, stride=8)
    module = build_module(architecture, architecture.sizes(1.0), (9, 16)).eval()
    assert [tuple(z.shape) for z in module(torch.randn(2, 1, side, side))] == [(2, 4)] * 2


def test_blocks_compute_what_transformers_computes() -> None:
    """B0's blocks and 1x1 convolution with the same weights in Hugging Face's EfficientNet, strides left out.

    Its strided convolutions pad on one side only, as TensorFlow does, so the stem is left out too.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.EfficientNetConfig(
        num_labels=5,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        strides=[1] * 7,
        batch_norm_eps=1e-5,
    )
    theirs = transformers.EfficientNetModel(config).eval().encoder
    architecture = efficientnet_b0(5, top=1280, stride=1)
    module = architecture.build(architecture.sizes(1.0), (16,)).eval()
    ours = nn.Sequential(*module.blocks, module.heads["16"][0])
    torch.manual_seed(0)
    own_state = {n: t for n, t in ours.state_dict().items() if t.is_floating_point()}
    their_state = {n: t for n, t in theirs.state_dict().items() if t.is_floating_point()}
    assert [tuple(t.shape) for t in own_state.values()] == [
        tuple(t.shape) for t in their_state.values()
    ]  # one order in both
    for mine, other in zip(own_state.values(), their_state.values(), strict=True):
        other.copy_(
            torch.rand_like(other) + 0.5 if other.dim() < 2 else torch.randn_like(other) / other[0].numel() ** 0.5
        )
        mine.copy_(other)
    x = torch.randn(2, 32, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).last_hidden_state, rtol=1e-4, atol=1e-4)
