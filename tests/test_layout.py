"""The layout read off a builder, against layouts written by hand; what is ambiguous or wrong is refused."""

import copy
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from support import Expected, raises
from torch import Tensor, nn
from zoo import CLASSES, Deep, Made, attention, concatenation, flattened, lstm, shared

from fleetfit.anatomy import (
    Architecture,
    Axis,
    ExitModel,
    HasSegments,
    Layout,
    Segment,
    TensorLayout,
    batch_norms,
    build_module,
    default_sizes,
    infer_layout,
    named_tensors,
    outputs,
    predictions,
)  # fmt: skip
from fleetfit.anatomy.hints import explain_errors
from fleetfit.errors import ModelError
from fleetfit.submodel import Submodel, get_slice_plan

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


def test_a_layout_by_hand_has_defaults() -> None:
    dims = ((S("a"),), (S(None, 5),))
    layout = Layout({"a": Axis(8)}, (1,), {"weight": TensorLayout(dims, None, None, True)})
    assert list(layout.aliases) == list(layout.base) == list(layout.frozen.tensors) == []
    assert layout.shapes({"a": 4}, (1,)) == {"weight": (4, 5)}
    assert S("a") == S("a", per=1, per_granule=False, within=())


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
    tensors = attention().infer().tensors
    assert tensors["qkv.weight"].dims == ((S("hidden"),) * 3, (S("hidden"),))
    assert tensors["per_head"].dims == ((S("hidden", per_granule=True),),)
    assert tensors["up.weight"].dims == ((S("inner"),), (S("hidden"),))
    assert attention().infer().shapes({"hidden": 8}, (1,))["per_head"] == (2,)


def test_interleaved_gates_and_segments() -> None:
    assert flattened().infer().tensors["fc.weight"].dims[1] == (S("wide", per=4),)
    assert lstm().infer().tensors["lstm.weight_hh_l0"].dims == ((S("hidden"),) * 4, (S("hidden"),))
    parts = concatenation(sizes=(4, 6)).infer().tensors["fc.weight"].dims[1]
    assert parts == (S(None, 5), S("a"), S("b"))


def linear(out: Callable[[int], int], granule: int = 1) -> Made:
    """One linear layer whose outputs are a function of the axis."""
    return Made({"h": Axis(8, granule)}, lambda s: nn.Linear(2, out(s["h"]), bias=False), (2,))


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (linear(lambda h: 3 * h), Expected('"weight"', 0, 24, '"h"', "input_shape")),
        (linear(lambda h: h * h), Expected('"weight"', 0, '"h"', 17, 19)),
        (linear(lambda h: 8 * ((h + 7) // 8)), Expected('"weight"', '"h"', 8, 0)),
        (linear(lambda h: 3 * (h // 2), granule=2), Expected('"weight"', 12, 3, '"h"', "2 channels")),
        (Made({"h": Axis(4)}, lambda s: nn.Sequential(*map(nn.Linear, [2] * s["h"], [2] * s["h"]))), Expected('"h"')),
        (Made({"h": Axis(4)}, lambda s: 1 / 0), Expected("Made.build", "{'h': 4}", "ZeroDivisionError")),
        (Made({"h": Axis(4)}, lambda s: [][s["h"] :].remove(0)), Expected("(1,)", "ValueError: list.remove")),
        (Made({"h": Axis(4)}, lambda s: next(iter([]))), Expected("(1,)", "StopIteration")),
        (Made({"h": Axis(4)}, lambda s: "text"), Expected("Made.build", "nn.Module", "str")),
    ],
)  # fmt: skip
def test_layouts_that_growth_cannot_explain_are_refused(architecture: Made, expected: Expected) -> None:
    with raises(ModelError, expected):
        infer_layout(architecture)


# ---- with which block or exit a tensor comes -------------------------------------------------------------------------


@dataclass(frozen=True)
class Staged(Architecture):
    """Six blocks named as others name them, built by a function of the depth and the exits."""

    make: Callable[[tuple[int, ...]], list[str]]
    axes: Mapping[str, Axis] = field(default_factory=lambda: {"a": Axis(4)})
    blocks: int = 6

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        root = nn.Module()
        for name in self.make(exits):
            part = root
            *path, last = name.split(".")
            for step in path:
                if not hasattr(part, step):
                    part.add_module(step, nn.Module())
                part = part.get_submodule(step)
            part.register_parameter(last, nn.Parameter(torch.zeros(axes["a"])))
        return root


def names_of(exits: tuple[int, ...]) -> list[str]:
    """Stages of two blocks with a layer between them, norms and classifiers by exit, a second layer of a GRU."""
    depth = exits[-1]
    return [
        "stem",
        *(f"stages.{i // 2}.blocks.{i % 2}.w" for i in range(depth)),
        *(f"down{i // 2}.w" for i in range(2, depth, 2)),
        *(["gru.second"] if depth > 3 else []),
        *(f"norms.{e}.w" for e in exits),
        *(f"classifiers.{k}.w" for k in range(len(exits))),
    ]


@pytest.mark.parametrize("exits", [(1, 2, 3, 4, 5, 6), (2, 4, 6), (3, 6), (2, 5, 6)])
def test_building_with_fewer_finds_blocks(exits: tuple[int, ...]) -> None:
    """Numbers that names do not tell come from models that end at other places, also between the chosen exits."""
    layout = infer_layout(Staged(names_of), exits)
    places = {name: (t.block, t.exit) for name, t in layout.tensors.items()}
    first = exits[0]
    for i in range(6):
        # what the shallowest models have, too, may be said to be of no block
        allowed = {(i, None), (None, None)} if i < min(first, 1) else {(i, None)}
        assert places[f"stages.{i // 2}.blocks.{i % 2}.w"] in allowed, i
    assert places["stem"] == (None, None)
    assert (places["down1.w"], places["down2.w"], places["gru.second"]) == ((2, None), (4, None), (3, None))
    for k, e in enumerate(exits):
        assert places[f"norms.{e}.w"] == places[f"classifiers.{k}.w"] == (None, e)
    for k in range(1, len(exits) + 1):
        assert set(layout.shapes({}, exits[:k])) == set(names_of(exits[:k]))
    with raises(ModelError, '"classifiers.0.w"'):
        layout.shapes({}, exits[-1:])


def test_tensors_with_usual_names_need_three_models() -> None:
    built: list[tuple[int, ...]] = []

    def make(exits: tuple[int, ...]) -> list[str]:
        built.append(exits)
        return [*(f"blocks.{i}.w" for i in range(exits[-1])), *(f"heads.{e}.w" for e in exits)]

    layout = infer_layout(Staged(make))
    assert set(built) == {(1, 2, 3, 4, 5, 6), (1,), (1, 2, 3), (6,)}
    assert [t.block for t in layout.tensors.values()][:6] == [0, 1, 2, 3, 4, 5]


def test_one_exit_has_all_blocks() -> None:
    architecture = Staged(lambda exits: ["blocks.7.w", "heads.0.w", "fc"], blocks=1)
    layout = infer_layout(architecture)
    assert set(layout.shapes({}, (1,))) == {"blocks.7.w", "heads.0.w", "fc"}
    assert layout.tensors["heads.0.w"].exit == 1


LATE = ["down", "aux"]


def late(exits: tuple[int, ...]) -> list[str]:
    """Only exits 4 and 6 are places: whether `down` is of block 4 or 5 is not told, nor whose `aux` is."""
    return [
        *(f"blocks.{i}.w" for i in range(exits[-1])),
        *(f"heads.{e}.w" for e in exits),
        *(LATE if exits[-1] > 4 else []),
    ]


def test_a_tensor_between_exits_is_of_the_last_block_that_fits() -> None:
    architecture = Staged(late)
    architecture.__dict__["positions"] = (4, 6)
    layout = infer_layout(architecture)
    assert (layout.tensors["down"].block, layout.tensors["aux"].exit) == (5, None)
    assert set(layout.shapes({}, (4,))) == set(late((4,)))


# ---- fixed groups ----------------------------------------------------------------------------------------------------

FIXED = Expected('"wide"', '4 * axes["wide"]')


class Mixed(nn.Module):
    """A group norm and a grouped convolution over as many channels as it is told."""

    def __init__(self, channels: int, groups: int, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.conv = nn.Conv2d(channels, channels, 3, groups=groups)
        self.attention = nn.MultiheadAttention(channels, width)


def test_fixed_groups_are_explained_by_building() -> None:
    architecture = Made({"wide": Axis(16)}, lambda s: Mixed(s["wide"], 4, 1))
    with raises(ModelError, "GroupNorm", "Mixed", "test_layout.py", FIXED):
        infer_layout(architecture)
    architecture = Made({"wide": Axis(16)}, lambda s: Mixed(s["wide"], 1, 8))
    with raises(ModelError, "MultiheadAttention", "Mixed", "test_layout.py", '8 * axes["wide"]'):
        infer_layout(architecture)
    architecture = Made({"wide": Axis(16)}, lambda s: nn.Conv2d(s["wide"], s["wide"], 3, groups=4))
    with raises(ModelError, "Conv2d", "test_layout.py", FIXED):
        infer_layout(architecture)


def test_fixed_groups_of_convolutions_are_explained() -> None:
    """16 channels in granules of 4: four to a group looks like one input channel per granule."""
    architecture = Made({"wide": Axis(16, 4)}, lambda s: Mixed(s["wide"], 4, 1))
    with raises(ModelError, '"conv.weight"', 1, "4 groups", "4 channels", "Axis(4)", FIXED):
        infer_layout(architecture)


def test_an_alias_is_left_out_and_remembered() -> None:
    layout = shared().infer()
    assert layout.aliases == {"down.weight": "up.weight"}
    assert "down.weight" not in layout.tensors


def test_base_tensors_are_left_out() -> None:
    assert "stem.weight" not in infer_layout(Deep(), base=["stem.weight"]).tensors


@pytest.mark.parametrize("exits", [(), (2, 1), (1, 1), (0, 3), (4,)])
def test_exits_must_be_positions_in_order(exits: tuple[int, ...]) -> None:
    with raises(ModelError, key="exits"):
        infer_layout(Deep(), exits)


def test_axes_must_be_whole_granules() -> None:
    for size, granule in ((0, 1), (4, 0), (6, 4)):
        with raises(ModelError, size, granule, key="granule"):
            Axis(size, granule)


def test_default_sizes_floor_to_whole_granules() -> None:
    axes = {"a": Axis(10), "heads": Axis(12, granule=4), "classes": CLASSES}
    assert default_sizes(axes, 0.7) == {"a": 7, "heads": 8, "classes": 3}
    assert default_sizes({"a": Axis(100)}, 0.29) == {"a": 29}  # 0.29 * 100 is 28.999999999999996 in floats
    assert default_sizes(axes, 0.01) == {"a": 1, "heads": 4, "classes": 3}
    assert default_sizes(axes, 1.0) == {"a": 10, "heads": 12, "classes": 3}
    for width in (0.0, 1.01, -1.0):
        with raises(ModelError, key="width"):
            default_sizes(axes, width)


def test_running_statistics_are_off_and_never_travel() -> None:
    architecture = Made({"h": Axis(4)}, lambda s: nn.Sequential(nn.Linear(2, s["h"]), nn.BatchNorm1d(s["h"])))
    module = build_module(architecture, {"h": 4}, (1,))
    norm = batch_norms(module)["1"]
    assert norm.running_mean is None
    assert norm.running_var is None
    assert norm.num_batches_tracked is None
    assert list(infer_layout(architecture).tensors) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    x = torch.randn(5, 2)
    torch.testing.assert_close(module.train()(x), module.eval()(x))  # the batch's own statistics in both


def test_floating_buffers_follow_the_parameters() -> None:
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
    for i, part in enumerate(module.blocks):
        h = part(h)
        if str(i + 1) in module.heads:
            expected.append(module.heads[str(i + 1)](h))
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(outputs(nn.Identity(), x), [x])


def test_cached_index_work_stays_behind_in_a_copy() -> None:
    layout = infer_layout(Deep())
    get_slice_plan(layout, Submodel({"a": range(2)}, (1,)))
    assert layout.slice_plans
    copied = copy.deepcopy(layout)
    assert not copied.slice_plans
    assert copied.tensors == layout.tensors


# ---- read once -----------------------------------------------------------------------------------------------------


def test_mutable_architectures_are_inferred_anew() -> None:
    """Equal values have one layout, of one reading; an object that is equal to itself only may be another by then."""

    class Plain(Architecture):
        axes, blocks = {"a": Axis(8), "classes": Axis(3, scaled=False)}, 1
        extra = 0

        def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
            return nn.Sequential(nn.Linear(5 + self.extra, axes["a"]), nn.Linear(axes["a"], axes["classes"]))

    plain = Plain()
    assert infer_layout(plain).shapes({}, (1,))["0.weight"] == (8, 5)
    plain.extra = 2
    assert infer_layout(plain).shapes({}, (1,))["0.weight"] == (8, 7)

    @dataclass(frozen=True)
    class Valued(Plain):
        extra: int = 0

    assert infer_layout(Valued(1)) is infer_layout(Valued(1)) is not infer_layout(Valued(1), base={"0.weight"})
    assert infer_layout(Valued(1)).shapes({}, (1,))["0.weight"] == (8, 6)
    assert infer_layout(Valued(2)).shapes({}, (1,))["0.weight"] == (8, 7)

    changed = Valued(1)
    object.__setattr__(changed, "axes", {"a": Axis(8, 2), "classes": Axis(3, scaled=False)})
    assert changed == Valued(1) and infer_layout(changed) is not infer_layout(Valued(1))


def test_an_architecture_may_keep_its_values_in_slots() -> None:
    """It need not inherit from anything: what it has and what it builds is what counts."""

    class Slim:
        __slots__ = ("axes", "blocks", "positions")

        def __init__(self) -> None:
            self.axes, self.blocks, self.positions = {"a": Axis(8)}, 1, (1,)

        def sizes(self, width: float) -> dict[str, int]:
            return default_sizes(self.axes, width)

        def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
            return nn.Linear(5, axes["a"])

    slim: Any = Slim()
    assert infer_layout(slim).shapes({"a": 2}, (1,)) == {"weight": (2, 5), "bias": (2,)}


# ---- runs of a module, segment by segment --------------------------------------------------------------------------


class Whole(nn.Module):
    """Three classifiers, and no segments."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = (1, 2, 3)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def test_the_last_prediction_needs_no_segments() -> None:
    module, x = Whole(), torch.randn(5, 4)
    (last,) = predictions(module, x, every=False)
    assert torch.equal(last, module.heads[2](x)) and not last.requires_grad
    with raises(ModelError, "Whole"):
        list(predictions(module, x))


class Carrying(ExitModel):
    def __init__(self) -> None:
        super().__init__()


def test_another_token_leaves_the_rest_of_the_carry() -> None:
    tokens, mask, more = torch.randn(2, 3, 4), torch.ones(2, 3), torch.zeros(1)
    token = torch.full((2, 4), 7.0)
    changed = Carrying().with_token((tokens, mask, more), token)
    assert len(changed) == 3 and changed[1] is mask and changed[2] is more
    assert torch.equal(changed[0][:, 0], token) and torch.equal(changed[0][:, 1:], tokens[:, 1:])


class Texts:
    tokens = 50


def explain(architecture: object, error: Exception) -> str:
    with pytest.raises(ModelError) as explained, explain_errors(architecture, (4,)):
        raise error
    return str(explained.value)


def test_failed_calls_are_explained_by_their_input() -> None:
    """PyTorch's embedding on real numbers, its linear layer on tokens, and what has nothing to do with either."""
    with pytest.raises(RuntimeError) as real_to_embedding:
        nn.Embedding(3, 2)(torch.rand(4))
    with pytest.raises(RuntimeError) as tokens_to_linear:
        nn.Linear(4, 2)(torch.tensor([1, 2, 3, 0]))
    assert "set self.tokens = vocabulary" in explain(object(), real_to_embedding.value)
    assert "50" in explain(Texts(), tokens_to_linear.value)
    for architecture, error in (
        (object(), IndexError("too many indices for a tensor of dimension 2")),
        (object(), tokens_to_linear.value),
        (Texts(), IndexError("indices")),
    ):
        assert "tokens" not in explain(architecture, error)


class Tied(Architecture):
    """Tokens, and an output that is tied to the embedding; `grow` has its shape, too, and is another tensor."""

    blocks = 1
    tokens = 20

    def __init__(self) -> None:
        self.axes = {"d": Axis(20), "classes": Axis(20, scaled=False)}

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        module = nn.Sequential()
        module.embed = nn.Embedding(20, axes["d"])
        module.grow = nn.Linear(axes["d"], axes["d"])
        module.out = nn.Linear(axes["d"], 20, bias=False)
        module.again = nn.Linear(axes["d"], 20, bias=False)
        module.out.weight = module.again.weight = module.embed.weight
        return module


def test_an_alias_is_the_same_tensor_under_any_name() -> None:
    layout = infer_layout(Tied())
    assert layout.aliases == {"out.weight": "embed.weight", "again.weight": "embed.weight"}


# ---- as plain values -------------------------------------------------------------------------------------------------

HEADS = Segment("head", within=(Segment("width"), Segment(None, 2)))
EVERYTHING = Layout(
    {"width": Axis(8, granule=2), "head": Axis(4)},
    (1, 3),
    {
        "a": TensorLayout(((Segment("width", per=3), Segment(None, 1)), (HEADS, Segment("width"))), None, None, True),
        "b": TensorLayout(((Segment("width", per_granule=True),),), 2, None, False),
        "heads.0": TensorLayout((), None, 1, True),
    },
    {"c": "a"},
    {"frozen": TensorLayout(((HEADS,),), 0, None, True)},
    frozenset({"heads.0"}),
)


def load_payload(payload: Any) -> Layout:
    return Layout.from_payload(payload, EVERYTHING.axes, EVERYTHING.exits)


def test_a_layout_comes_back_from_plain_values() -> None:
    payload = json.loads(json.dumps(EVERYTHING.to_payload()))
    again = load_payload(payload)
    assert [getattr(again, f.name) for f in fields(Layout)] == [getattr(EVERYTHING, f.name) for f in fields(Layout)]
    assert list(again.tensors) == list(EVERYTHING.tensors)


@pytest.mark.parametrize("payload", [
    None, 7, [], "layout", {}, {**EVERYTHING.to_payload(), "aliases": []}, {**EVERYTHING.to_payload(), "dims": None},
    {**EVERYTHING.to_payload(), "aliases": {"c": "absent"}}, {**EVERYTHING.to_payload(), "aliases": {"a": "b"}},
    {**EVERYTHING.to_payload(), "by_order": ["absent"]}, {**EVERYTHING.to_payload(), "base": 7},
    {**EVERYTHING.to_payload(), "base": [["a", [], 0, None, True]]}, {**EVERYTHING.to_payload(), "dims": []},
])  # fmt: skip
def test_a_damaged_layout_is_refused(payload: Any) -> None:
    with raises(ModelError, key="layout"):
        load_payload(payload)


@pytest.mark.parametrize("row", [
    ["a", [0], None, None], ["a", [9], None, None, True], ["a", [-1], None, None, True],
    ["a", [True], None, None, True], ["a", [0], -1, None, True], ["a", [0], None, "1", True], ["a", [0], None, None, 1],
    [7, [0], None, None, True], "a",
    ["a", 0, None, None, True], ["a", [0] * 99, None, None, True],
])  # fmt: skip
def test_a_damaged_tensor_is_refused(row: Any) -> None:
    with raises(ModelError, key="layout"):
        load_payload({**EVERYTHING.to_payload(), "tensors": [row], "aliases": {}, "by_order": []})


@pytest.mark.parametrize("segment", [
    ["absent", 1], [["width"], 1], ["width", -1], ["width", 0.5], ["width", True], ["width", 2**40], ["width"], [], 1,
    ["width", 1, True], ["width", 1, 1, []], ["width", 1, False, [["absent", 1]]], ["width", 1, False, 3],
    functools.reduce(lambda inner, _: ["head", 1, False, [inner]], range(5000), ["head", 1]),
])  # fmt: skip
def test_a_damaged_segment_is_refused(segment: Any) -> None:
    payload = EVERYTHING.to_payload()
    with raises(ModelError, key="layout"):
        load_payload({**payload, "dims": [*payload["dims"], [segment]]})
