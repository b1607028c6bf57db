"""The order of places that a forward pass shows, against layouts by hand, each proved; what it does not show."""

from collections.abc import Callable, Mapping

import pytest
import torch
from support import raises
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import CLASSES, Made, flattened

from fleetfit.anatomy import Axis, Segment as S, infer_layout
from fleetfit.anatomy.growth import explain_by_growth
from fleetfit.anatomy.proof import check_layout
from fleetfit.errors import ModelError

Sizes = Mapping[str, int]
DIM = S("dim")


class Layers(nn.Module):
    """Linear layers of a sample of five numbers, or of tokens of five, and a forward over them."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.own = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def family(
    axes: Mapping[str, Axis],
    forward: Callable[[nn.Module, Tensor], Tensor],
    layers: Callable[[Sizes], dict[str, nn.Module]],
    shape: tuple[int, ...] = (5,),
) -> Made:
    return Made({**axes, "classes": CLASSES}, lambda s: Layers(forward, **layers(s)), shape)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads [B, heads, tokens, channels] side by side [B, tokens, heads x channels]; the scale is of no size."""
    return F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2)


def grouped_queries() -> Made:
    """Rows are the queries' heads, then the keys', then the values'; two queries share a key."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        heads = net.qkv(x).unflatten(-1, (-1, net.dim)).transpose(1, 2)
        n = heads.shape[1] // 4
        q, k, v = heads.split([2 * n, n, n], dim=1)
        return net.fc(net.out(attend(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))).mean(1))

    def layers(s: Sizes) -> dict[str, nn.Module]:
        n, d = s["kv"], s["dim"]
        return {"qkv": nn.Linear(5, 4 * n * d), "out": nn.Linear(2 * n * d, 5), "fc": nn.Linear(5, s["classes"])}

    def make(s: Sizes) -> nn.Module:
        net = Layers(forward, **layers(s))
        net.dim = s["dim"]
        return net

    return Made({"kv": Axis(3), "dim": Axis(8, 2), "classes": CLASSES}, make, (6, 5))


def stretched() -> Made:
    """A layer inside that is four times as wide, and follows no channel."""
    return family(
        {"h": Axis(6)},
        lambda net, x: net.fc(net.stem(x) + net.down(net.up(net.stem(x)).relu())),
        lambda s: {
            "stem": nn.Linear(5, s["h"]),
            "up": nn.Linear(s["h"], 4 * s["h"]),
            "down": nn.Linear(4 * s["h"], s["h"]),
            "fc": nn.Linear(s["h"], s["classes"]),
        },
    )


def gated() -> Made:
    """The same with a gate: the first half of the rows is multiplied by the second."""
    return family(
        {"h": Axis(6)},
        lambda net, x: net.fc(net.down(F.glu(net.up(net.stem(x))))),
        lambda s: {
            "stem": nn.Linear(5, s["h"]),
            "up": nn.Linear(s["h"], 4 * s["h"]),
            "down": nn.Linear(2 * s["h"], s["h"]),
            "fc": nn.Linear(s["h"], s["classes"]),
        },
    )


def four_groups() -> Made:
    """Four groups of a norm, of a convolution and of heads; the axis is the channels of one."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        tokens = net.conv(net.norm(net.stem(x))).flatten(2).transpose(1, 2)
        return net.fc(net.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))

    def layers(s: Sizes) -> dict[str, nn.Module]:
        c = 4 * s["wide"]
        return {
            "stem": nn.Conv2d(1, c, 3),
            "norm": nn.GroupNorm(4, c),
            "conv": nn.Conv2d(c, c, 3, groups=4),
            "attention": nn.MultiheadAttention(c, 4, batch_first=True),
            "fc": nn.Linear(c, s["classes"]),
        }

    return family({"wide": Axis(4)}, forward, layers, (1, 6, 6))


def fixed_groups() -> Made:
    """Two groups of a convolution over channels of the sample; the axis is the outputs of one."""
    return family(
        {"wide": Axis(6)},
        lambda net, x: net.fc(net.conv(x).relu().mean((2, 3))),
        lambda s: {
            "conv": nn.Conv2d(4, 2 * s["wide"], 3, padding=1, groups=2),
            "fc": nn.Linear(2 * s["wide"], s["classes"]),
        },
        (4, 5, 5),
    )


def crossed() -> Made:
    """An outer product, flattened: any order of the first layer's free places is right that the head has, too."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.head((net.la(x)[:, :, None] * net.lb(x)[:, None]).flatten(1))

    def layers(s: Sizes) -> dict[str, nn.Module]:
        a, b = s["a"], s["b"]
        return {"la": nn.Linear(5, 2 * a), "lb": nn.Linear(5, b), "head": nn.Linear(2 * a * b, s["classes"])}

    return family({"a": Axis(6), "b": Axis(4)}, forward, layers)


def looped() -> Made:
    """Pairs of channels, one after the other in a loop, so that each one more takes more operations."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.up(x)
        return net.fc(torch.cat([h[:, i : i + 2].tanh() for i in range(0, h.shape[1], 2)], dim=1))

    return family(
        {"pairs": Axis(4)},
        forward,
        lambda s: {"up": nn.Linear(5, 2 * s["pairs"]), "fc": nn.Linear(2 * s["pairs"], s["classes"])},
    )


BY_HAND = {
    "grouped queries": (grouped_queries, {
        ("qkv.weight", 0): (S("kv", within=(DIM, DIM)), S("kv", within=(DIM,)), S("kv", within=(DIM,))),
        ("out.weight", 1): (S("kv", within=(DIM, DIM)),),
    }),
    "stretched": (stretched, {("up.weight", 0): (S("h", per=4),), ("down.weight", 1): (S("h", per=4),)}),
    "gated": (gated, {("up.weight", 0): (S("h"),) * 4, ("down.weight", 1): (S("h"),) * 2}),
    "four groups": (four_groups, {
        ("norm.weight", 0): (S("wide"),) * 4,
        ("conv.weight", 1): (S("wide"),),
        ("attention.in_proj_weight", 0): (S("wide"),) * 12,
        ("attention.in_proj_weight", 1): (S("wide"),) * 4,
    }),
    "fixed groups": (fixed_groups, {("conv.weight", 0): (S("wide"),) * 2, ("fc.weight", 1): (S("wide"),) * 2}),
    "crossed": (crossed, {
        ("la.weight", 0): (S("a", per=2),), ("head.weight", 1): (S("a", within=(S("b"), S("b"))),)
    }),
    "looped": (looped, {("up.weight", 0): (S("pairs", per=2),), ("fc.weight", 1): (S("pairs", per=2),)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_pass_shows_the_order(name: str) -> None:
    make, expected = BY_HAND[name]
    architecture = make()
    layout = architecture.infer()
    assert {dim: layout.tensors[dim[0]].dims[dim[1]] for dim in expected} == expected
    report = check_layout(architecture, layout, input_shape=architecture.input_shape)
    assert not report.not_proved and max(report.cuts.values()) < 1e-9


def test_an_order_that_turns_around_is_refused() -> None:
    """A layer that follows the channels as they are, and another one backwards."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.stem(x)
        return net.fc(net.up(x) * torch.cat([h, h.flip(1)], dim=1))

    def layers(s: Sizes) -> dict[str, nn.Module]:
        h = s["h"]
        return {"stem": nn.Linear(5, h), "up": nn.Linear(5, 2 * h), "fc": nn.Linear(2 * h, s["classes"])}

    with raises(ModelError, '"up.weight"', '"h"', key="model"):
        family({"h": Axis(6)}, forward, layers).infer()


def test_heads_that_divide_nothing_are_explained() -> None:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in net.qkv(x).chunk(3, dim=-1))
        return net.fc(net.out(attend(q, k, v)).mean(1))

    def layers(s: Sizes) -> dict[str, nn.Module]:
        return {"qkv": nn.Linear(5, 3 * s["h"]), "out": nn.Linear(s["h"], 5), "fc": nn.Linear(5, s["classes"])}

    family({"h": Axis(12, 4)}, forward, layers, (6, 5)).infer()
    with raises(ModelError, '"qkv.weight"', '"h"', "granule", key="model"):
        family({"h": Axis(12)}, forward, layers, (6, 5)).infer()


def test_samples_that_the_model_does_not_accept_are_refused() -> None:
    with raises(ModelError, "(3, 6, 6)", "zoo.py"):
        infer_layout(flattened(), input_shape=(3, 6, 6))


def test_a_sum_with_a_products_growth_is_no_product() -> None:
    """a b + (a - 6)(b - 8) has a product's slopes at the full size, and none of its sizes elsewhere."""

    def layers(s: Sizes) -> dict[str, nn.Module]:
        n = s["a"] * s["b"] + (s["a"] - 6) * (s["b"] - 8)
        return {"up": nn.Linear(5, n), "fc": nn.Linear(n, s["classes"])}

    with raises(ModelError, '"up.weight"', "(70, 5)", "(72, 5)"):
        family({"a": Axis(6), "b": Axis(8, 2)}, lambda net, x: net.fc(net.up(x)), layers).infer()


def test_growth_alone_explains_one_axis() -> None:
    axes = {"h": Axis(8, 2), "g": Axis(4)}
    for size, growth, expected in (
        (5, {}, (S(None, 5),)),
        (8, {"h": 2}, (S("h"),)),
        (4, {"h": 1}, (S("h", per_granule=True),)),
        (16, {"h": 4}, None),
        (12, {"h": 2, "g": 1}, None),
    ):
        assert explain_by_growth(axes, "", size, growth) == expected
