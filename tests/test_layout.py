"""The layout read off a builder, against layouts written by hand; what is ambiguous or wrong is refused."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import CLASSES, Deep, Made, attention, concatenation, flattened, lstm, shared

from fleetfit.errors import ModelError
from fleetfit.layout import (
    Axis,
    ExitModel,
    HasSegments,
    Segment,
    TensorLayout,
    alias,
    batch_norms,
    blocked,
    build_module,
    default_sizes,
    infer_layout,
    named_tensors,
    outputs,
    segments,
)  # fmt: skip
from fleetfit.submodel import Submodel, cut

S = Segment


def test_layout_of_stacked_blocks_by_hand() -> None:
    layout = infer_layout(Deep(), (1, 3))
    a, five, classes = (S("a"),), (S(None, 5),), (S("classes"),)
    expected = {
        "stem.weight": TensorLayout((a, five), None, None, True),
        "stem.bias": TensorLayout((a,), None, None, True),
        **{f"blocks.{i}.0.weight": TensorLayout((a, a), i, None, True) for i in range(3)},
        **{f"blocks.{i}.0.bias": TensorLayout((a,), i, None, True) for i in range(3)},
        **{f"heads.{e}.weight": TensorLayout((classes, a), None, e, True) for e in (1, 3)},
        **{f"heads.{e}.bias": TensorLayout((classes,), None, e, True) for e in (1, 3)},
    }
    assert layout.tensors == expected
    assert layout.exits == (1, 3)
    assert layout.full_sizes == {"a": 6, "classes": 3}


def test_shapes_of_a_sub_model() -> None:
    layout = infer_layout(Deep(), (1, 3))
    assert layout.shapes({"a": 2}, (1,)) == {
        "stem.weight": (2, 5),
        "stem.bias": (2,),
        "blocks.0.0.weight": (2, 2),
        "blocks.0.0.bias": (2,),
        "heads.1.weight": (3, 2),
        "heads.1.bias": (3,),
    }


def test_stacked_and_per_granule_dimensions() -> None:
    tensors = infer_layout(attention()).tensors
    assert tensors["qkv.weight"].dims == ((S("hidden"),) * 3, (S("hidden"),))
    assert tensors["per_head"].dims == ((S("hidden", per_granule=True),),)
    assert tensors["up.weight"].dims == ((S("inner"),), (S("hidden"),))
    assert infer_layout(attention()).shapes({"hidden": 8}, (1,))["per_head"] == (2,)


def test_interleaved_gates_and_segments() -> None:
    assert infer_layout(flattened()).tensors["fc.weight"].dims[1] == (S("wide", per=4),)
    assert infer_layout(lstm()).tensors["lstm.weight_hh_l0"].dims == ((S("hidden"),) * 4, (S("hidden"),))
    parts = infer_layout(concatenation(sizes=(4, 6))).tensors["fc.weight"].dims[1]
    assert parts == (S(None, 5), S("a"), S("b"))


def test_segments_by_pattern_follow_the_axes_order() -> None:
    class Four(nn.Module):
        def __init__(self, s: dict[str, int]) -> None:
            super().__init__()
            self.fc = nn.Linear(sum(s.values()) + 2, 1)

    axes = {"g1": Axis(2), "stem": Axis(3), "g2": Axis(4)}
    made = Made(axes, lambda s: Four(dict(s)), {"fc.weight": segments("stem", 2, "g*")})
    assert infer_layout(made).tensors["fc.weight"].dims[1] == (S("stem"), S(None, 2), S("g1"), S("g2"))


def linear(out: Callable[[int], int], declared: dict[str, object] | None = None, granule: int = 1) -> Made:
    """One linear layer whose outputs are a function of the axis."""
    return Made({"h": Axis(8, granule)}, lambda s: nn.Linear(2, out(s["h"]), bias=False), declared or {})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (linear(lambda h: 3 * h), r'"weight", dimension 0 of size 24 has 3 elements per channel.*blocked\(3\)'),
        (linear(lambda h: 3 * h, {"weight": blocked(2)}), r"declared: blocked\(2\)"),
        (linear(lambda h: h + 3), r'moves with "h" and is not a multiple of one axis.*segments'),
        (linear(lambda h: h * h), r'one more granule of axis "h" adds 17, the next one 19'),
        (linear(lambda h: 8 * ((h + 7) // 8)), "adds 8, the next one 0"),
        (linear(lambda h: 3 * (h // 2), granule=2), "neither one per granule nor a whole number"),
        (linear(lambda h: h + 3, {"weight": segments("h", 4)}), r"adds up to 12 and grows by \{'h': 1\}"),
        (linear(lambda h: h, {"weight": blocked(2, dim=1)}), "dimension 1 of size 2 is declared blocked, but"),
        (concatenation(segments("a", "b")), "adds up to 12"),
        (Made({"h": Axis(4)}, lambda s: nn.Sequential(*[nn.Linear(2, 2)] * (s["h"] // 4))), "under two names"),
        (Made({"h": Axis(4)}, lambda s: nn.Sequential(*map(nn.Linear, [2] * s["h"], [2] * s["h"]))), "changes which"),
        (Made({"h": Axis(4)}, lambda s: 1 / 0), "Made.build failed for axes {'h': 4}.*division by zero"),
        (Made({"h": Axis(4)}, lambda s: "text"), "must return an nn.Module, got str"),
        (shared(declared=False), r'declare \{"down.weight": alias\("up.weight"\)\}'),
    ],
)  # fmt: skip
def test_what_is_ambiguous_or_wrong_is_refused(made: Made, message: str) -> None:
    if "under two names" in message:
        layer = nn.Linear(2, 2)
        made = Made({"h": Axis(4)}, lambda s: nn.ModuleList([layer, layer]))
    with pytest.raises(ModelError, match=message):
        infer_layout(made)


def test_an_alias_is_left_out_and_remembered() -> None:
    layout = infer_layout(shared())
    assert layout.aliases == {"down.weight": "up.weight"}
    assert "down.weight" not in layout.tensors
    assert alias("x").parts == ("x",)


def test_base_tensors_are_left_out() -> None:
    assert "stem.weight" not in infer_layout(Deep(), base=["stem.weight"]).tensors


@pytest.mark.parametrize("exits", [(), (2, 1), (1, 1), (0, 3), (4,)])
def test_exits_must_be_positions_in_order(exits: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="exits must be block counts among"):
        infer_layout(Deep(), exits)


def test_axes_must_be_whole_granules() -> None:
    for size, granule in ((0, 1), (4, 0), (6, 4)):
        with pytest.raises(ModelError, match=f"an axis of size {size}"):
            Axis(size, granule)


def test_default_sizes_floor_to_whole_granules() -> None:
    axes = {"a": Axis(10), "heads": Axis(12, granule=4), "classes": CLASSES}
    assert default_sizes(axes, 0.7) == {"a": 7, "heads": 8, "classes": 3}
    assert default_sizes({"a": Axis(100)}, 0.29) == {"a": 29}  # 0.29 * 100 is 28.999999999999996 in floats
    assert default_sizes(axes, 0.01) == {"a": 1, "heads": 4, "classes": 3}
    assert default_sizes(axes, 1.0) == {"a": 10, "heads": 12, "classes": 3}
    for width in (0.0, 1.01, -1.0):
        with pytest.raises(ModelError, match="a width must be"):
            default_sizes(axes, width)


def test_running_statistics_are_off_and_never_travel() -> None:
    made = Made({"h": Axis(4)}, lambda s: nn.Sequential(nn.Linear(2, s["h"]), nn.BatchNorm1d(s["h"])))
    module = build_module(made, {"h": 4}, (1,))
    norm = batch_norms(module)["1"]
    assert norm.running_mean is None
    assert norm.running_var is None
    assert norm.num_batches_tracked is None
    assert list(infer_layout(made).tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    x = torch.randn(5, 2)
    torch.testing.assert_close(module.train()(x), module.eval()(x))  # the batch's own statistics in both


def test_floating_buffers_are_averaged_after_the_parameters() -> None:
    class Buffered(nn.Module):
        def __init__(self, h: int) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(h))
            self.register_buffer("count", torch.zeros(1, dtype=torch.long))
            self.register_buffer("scratch", torch.ones(h), persistent=False)
            self.fc = nn.Linear(2, h)

    layout = infer_layout(Made({"h": Axis(4)}, lambda s: Buffered(s["h"])))
    assert list(layout.tensors) == ["fc.weight", "fc.bias", "scale"]
    assert [t.trainable for t in layout.tensors.values()] == [True, True, False]
    assert [name for name, _, _ in named_tensors(Buffered(3))] == ["fc.weight", "fc.bias", "scale"]


def test_forward_is_segments_and_heads() -> None:
    """Eqs. 3 and 4, one block after the other by hand."""
    module = build_module(Deep(), {"a": 6, "classes": 3}, (1, 3))
    assert isinstance(module, ExitModel)
    assert isinstance(module, HasSegments)
    x = torch.randn(4, 5)
    h = module.stem(x)
    expected: list[Tensor] = []
    for i, block in enumerate(module.blocks):
        h = block(h)
        if str(i + 1) in module.heads:
            expected.append(module.heads[str(i + 1)](h))
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(outputs(nn.Identity(), x), [x])


def test_cached_index_work_stays_behind_in_a_copy() -> None:
    layout = infer_layout(Deep())
    cut(layout, Submodel({"a": range(2)}, (1,)))
    assert layout.cuts
    copied = copy.deepcopy(layout)
    assert not copied.cuts
    assert copied.tensors == layout.tensors
