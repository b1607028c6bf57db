"""Axes and segments of small modules, computed by hand: one or more modules for each rule of the labeled pass."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleetfit.anatomy.labels import FLATTENED, OF_SAMPLES
from fleetfit.anatomy.observe import observe
from fleetfit.layout import Segment as S

Dims = Mapping[tuple[str, int], tuple[S, ...]]


class Net(nn.Module):
    """Submodules and parameters by name, and what forward computes of them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


@dataclass(frozen=True)
class Case:
    """A module, and what its pass must find.

    `sizes` are all axes but the classes, `dims` the segments of some dimensions, `whole` words of the cause by the name
    that the axis would have.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    dims: Dims
    ordered: Collection[str] = ()
    whole: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    tokens: int = 0


def attend(net: Any, x: Tensor) -> Tensor:
    """Three heads of two channels, from one projection with rows (3, heads, 2)."""
    h = net.stem(x)
    q, k, v = net.qkv(h).view(*h.shape[:2], 3, -1, 2).permute(2, 0, 3, 1, 4)
    h = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    return net.head(net.out(h.transpose(1, 2).flatten(2)).mean(1))


def attend_interleaved(net: Any, x: Tensor) -> Tensor:
    """The same from rows (heads, 3, 2)."""
    h = net.stem(x)
    q, k, v = net.qkv(h).view(*h.shape[:2], -1, 3, 2).permute(3, 0, 2, 1, 4)
    h = F.scaled_dot_product_attention(q, k, v)
    return net.head(h.transpose(1, 2).flatten(2).mean(1))


def attend_by_einsum(net: Any, x: Tensor) -> Tensor:
    h = net.stem(x)
    q, k = (part(h).unflatten(-1, (-1, 2)) for part in (net.q, net.k))
    scores = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
    return net.head(torch.einsum("bhts,bshd->bthd", scores, net.v(h).unflatten(-1, (-1, 2))).flatten(2).mean(1))


def write_into_slice(net: Any, x: Tensor) -> Tensor:
    h = net.fc(x)
    h[:, :2] = net.other(x)
    return net.out(h)


def rotate(net: Any, x: Tensor) -> Tensor:
    """Neighbors of a channel are the parts of a complex number."""
    h = torch.view_as_complex(net.fc(x).unflatten(-1, (-1, 2)))
    return net.out(torch.view_as_real(h * torch.polar(torch.tensor(1.0), torch.tensor(0.5))).flatten(1))


def multiply_outer(net: Any, x: Tensor) -> Tensor:
    return net.out((net.a(x[:, :4])[:, :, None] * net.b(x)[:, None, :]).flatten(1))


def chain(
    compute: Callable[[Any, Tensor], Tensor], middle: nn.Module | None = None, wide: int = 6, out: int = 0
) -> Net:
    """Return `fc` of 4 to 6 channels, something between, and three classes."""
    parts = {"middle": middle} if middle is not None else {}
    return Net(compute, fc=nn.Linear(4, wide), **parts, out=nn.Linear(out or wide, 3))


def convolutions(middle: nn.Module, channels: int, out: int) -> nn.Module:
    """Return `conv` of 3 to some channels, something between, and three classes from the mean over places."""
    return Net(lambda net, x: net.out(net.middle(net.conv(x)).mean((2, 3))),
               conv=nn.Conv2d(3, channels, 1), middle=middle, out=nn.Linear(out, 3))  # fmt: skip


FC, CONV = S("fc"), S("conv")
VECTORS, IMAGES, SEQUENCES = (2, 4), (2, 3, 4, 4), (2, 5, 4)
CHAIN: Dims = {
    ("fc.weight", 0): (FC,),
    ("fc.bias", 0): (FC,),
    ("fc.weight", 1): (S(None, 4),),
    ("out.weight", 1): (FC,),
    ("out.weight", 0): (S("classes"),),
    ("out.bias", 0): (S("classes"),),
}

CASES: dict[str, Case] = {
    "a chain": Case(lambda: chain(lambda net, x: net.out(net.fc(x).relu())), VECTORS, {"fc": 6}, CHAIN),
    "a residual sum": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x) + net.middle(net.fc(x))), nn.Linear(6, 6)),
        VECTORS,
        {"fc": 6},
        {**CHAIN, ("middle.weight", 0): (FC,), ("middle.weight", 1): (FC,), ("middle.bias", 0): (FC,)},
    ),
    "a gate of one channel": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x) * net.middle(x)), nn.Linear(4, 1)), VECTORS, {"fc": 6}, CHAIN
    ),
    "concatenation": Case(
        lambda: Net(
            lambda net, x: net.out(torch.cat([net.a(x), x, net.b(x)], 1)),
            a=nn.Linear(4, 3),
            b=nn.Linear(4, 5),
            out=nn.Linear(12, 3),
        ),
        VECTORS,
        {"a": 3, "b": 5},
        {("out.weight", 1): (S("a"), S(None, 4), S("b"))},
    ),
    "a stack, whose parts have one size": Case(
        lambda: Net(
            lambda net, x: net.out(torch.stack([net.a(x), net.b(x)], 1).flatten(1)),
            a=nn.Linear(4, 5),
            b=nn.Linear(4, 5),
            out=nn.Linear(10, 3),
        ),
        VECTORS,
        {"a": 5},
        {("out.weight", 1): (S("a"), S("a")), ("b.weight", 0): (S("a"),)},
    ),
    "chunks that are multiplied": Case(
        lambda: chain(lambda net, x: net.out(torch.mul(*net.fc(x).chunk(2, -1))), wide=10, out=5),
        VECTORS,
        {"fc": 5},
        {("fc.weight", 0): (FC, FC), ("fc.bias", 0): (FC, FC), ("out.weight", 1): (FC,)},
    ),
    "a split in unequal parts": Case(
        lambda: Net(
            lambda net, x: net.out(net.a(net.fc(x).split([2, 5], 1)[0]) + net.b(net.fc(x).split([2, 5], 1)[1])),
            fc=nn.Linear(4, 7),
            a=nn.Linear(2, 6),
            b=nn.Linear(5, 6),
            out=nn.Linear(6, 3),
        ),
        VECTORS,
        {"fc": 2, "fc~2": 5, "a": 6},
        {
            ("fc.weight", 0): (FC, S("fc~2")),
            ("a.weight", 1): (FC,),
            ("b.weight", 1): (S("fc~2"),),
            ("b.weight", 0): (S("a"),),
        },
    ),
    "GLU": Case(
        lambda: chain(lambda net, x: net.out(F.glu(net.fc(x))), wide=10, out=5),
        VECTORS,
        {"fc": 5},
        {("fc.weight", 0): (FC, FC), ("out.weight", 1): (FC,)},
    ),
    "fused q, k and v": Case(
        lambda: Net(attend, stem=nn.Linear(4, 6), qkv=nn.Linear(6, 18), out=nn.Linear(6, 8), head=nn.Linear(8, 3)),
        SEQUENCES,
        {"stem": 6, "qkv": 3, "out": 8},
        {
            ("qkv.weight", 0): (S("qkv", 2),) * 3,
            ("qkv.bias", 0): (S("qkv", 2),) * 3,
            ("qkv.weight", 1): (S("stem"),),
            ("out.weight", 1): (S("qkv", 2),),
            ("head.weight", 1): (S("out"),),
        },
    ),
    "q, k and v beside each other in each head": Case(
        lambda: Net(attend_interleaved, stem=nn.Linear(4, 6), qkv=nn.Linear(6, 18), head=nn.Linear(6, 3)),
        SEQUENCES,
        {"stem": 6, "qkv": 3},
        {("qkv.weight", 0): (S("qkv", 6),), ("head.weight", 1): (S("qkv", 2),)},
    ),
    "heads by einsum": Case(
        lambda: Net(
            attend_by_einsum, stem=nn.Linear(4, 6), **{name: nn.Linear(6, 8) for name in "qkv"}, head=nn.Linear(8, 3)
        ),
        SEQUENCES,
        {"stem": 6, "q": 4},
        {**{(f"{name}.weight", 0): (S("q", 2),) for name in "qkv"}, ("head.weight", 1): (S("q", 2),)},
    ),
    "a parameter in einsum": Case(
        lambda: Net(
            lambda net, x: net.out(torch.einsum("bi,io->bo", x, net.w)),
            w=nn.Parameter(torch.randn(4, 6)),
            out=nn.Linear(6, 3),
        ),
        VECTORS,
        {"w": 6},
        {("w", 1): (S("w"),), ("w", 0): (S(None, 4),), ("out.weight", 1): (S("w"),)},
    ),
    "a product of parameters": Case(
        lambda: Net(
            lambda net, x: net.out(x @ (net.a @ net.b)),
            a=nn.Parameter(torch.randn(4, 2)),
            b=nn.Parameter(torch.randn(2, 6)),
            out=nn.Linear(6, 3),
        ),
        VECTORS,
        {"a": 2, "b": 6},
        {("a", 1): (S("a"),), ("b", 0): (S("a"),), ("b", 1): (S("b"),), ("out.weight", 1): (S("b"),)},
    ),
    "an ordinary convolution": Case(
        lambda: convolutions(nn.Conv2d(6, 5, 3), 6, 5),
        IMAGES,
        {"conv": 6, "middle": 5},
        {("middle.weight", 0): (S("middle"),), ("middle.weight", 1): (CONV,), ("out.weight", 1): (S("middle"),)},
    ),
    "a grouped convolution": Case(
        lambda: convolutions(nn.Conv2d(8, 12, 3, groups=4), 8, 12),
        IMAGES,
        {"conv": 4},
        {
            ("conv.weight", 0): (S("conv", 2),),
            ("middle.weight", 0): (S("conv", 3),),
            ("middle.weight", 1): (S(None, 2),),
            ("out.weight", 1): (S("conv", 3),),
        },
    ),
    "a depthwise convolution": Case(
        lambda: convolutions(nn.Conv2d(6, 6, 3, groups=6), 6, 6),
        IMAGES,
        {"conv": 6},
        {("conv.weight", 0): (CONV,), ("middle.weight", 0): (CONV,), ("middle.bias", 0): (CONV,)},
    ),
    "a depthwise convolution with two filters": Case(
        lambda: convolutions(nn.Conv2d(6, 12, 3, groups=6), 6, 12),
        IMAGES,
        {"conv": 6},
        {("middle.weight", 0): (S("conv", 2),), ("out.weight", 1): (S("conv", 2),)},
    ),
    "a transposed convolution": Case(
        lambda: convolutions(nn.ConvTranspose2d(6, 5, 2, 2), 6, 5),
        IMAGES,
        {"conv": 6, "middle": 5},
        {("middle.weight", 0): (CONV,), ("middle.weight", 1): (S("middle"),), ("middle.bias", 0): (S("middle"),)},
    ),
    "flattened places": Case(
        lambda: Net(lambda net, x: net.out(net.conv(x).flatten(1)), conv=nn.Conv2d(3, 5, 1), out=nn.Linear(80, 3)),
        IMAGES,
        {"conv": 5},
        {("out.weight", 1): (S("conv", 16),)},
    ),
    "flattened places, channels last": Case(
        lambda: Net(
            lambda net, x: net.out(net.conv(x).permute(0, 2, 3, 1).flatten(1)),
            conv=nn.Conv2d(3, 5, 1),
            out=nn.Linear(80, 3),
        ),
        IMAGES,
        {"conv": 5},
        {("out.weight", 1): (CONV,) * 16},
    ),
    "pixel shuffle": Case(
        lambda: convolutions(nn.PixelShuffle(2), 12, 3),
        IMAGES,
        {"conv": 3},
        {("conv.weight", 0): (S("conv", 4),), ("out.weight", 1): (CONV,)},
    ),
    "an embedding": Case(
        lambda: Net(lambda net, x: net.out(net.table(x).mean(1)), table=nn.Embedding(7, 6), out=nn.Linear(6, 3)),
        (2, 5),
        {"table": 6},
        {("table.weight", 0): (S(None, 7),), ("table.weight", 1): (S("table"),)},
        tokens=7,
    ),
    "a table of positions": Case(
        lambda: Net(
            lambda net, x: net.out((net.fc(x) + net.places).mean(1)),
            fc=nn.Linear(4, 6),
            places=nn.Parameter(torch.randn(1, 5, 6)),
            out=nn.Linear(6, 3),
        ),
        SEQUENCES,
        {"fc": 6},
        {("places", 2): (FC,), ("places", 1): (S(None, 5),)},
    ),
    "batch norm": Case(
        lambda: convolutions(nn.BatchNorm2d(6), 6, 6),
        IMAGES,
        {"conv": 6},
        {(f"middle.{name}", 0): (CONV,) for name in ("weight", "bias", "running_mean", "running_var")},
    ),
    "layer norm": Case(
        lambda: chain(lambda net, x: net.out(net.middle(net.fc(x))), nn.LayerNorm(6)),
        VECTORS,
        {"fc": 6},
        {("middle.weight", 0): (FC,), ("middle.bias", 0): (FC,)},
    ),
    "RMS norm": Case(
        lambda: chain(lambda net, x: net.out(net.middle(net.fc(x))), nn.RMSNorm(6)),
        VECTORS,
        {"fc": 6},
        {("middle.weight", 0): (FC,)},
    ),
    "group norm": Case(
        lambda: convolutions(nn.GroupNorm(3, 6), 6, 6),
        IMAGES,
        {"conv": 3},
        {
            ("conv.weight", 0): (S("conv", 2),),
            ("middle.weight", 0): (S("conv", 2),),
            ("out.weight", 1): (S("conv", 2),),
        },
    ),
    "group norm of one group": Case(
        lambda: convolutions(nn.GroupNorm(1, 6), 6, 6), IMAGES, {"conv": 6}, {("middle.weight", 0): (CONV,)}
    ),
    "instance norm": Case(
        lambda: convolutions(nn.InstanceNorm2d(6, affine=True), 6, 6),
        IMAGES,
        {"conv": 6},
        {("middle.weight", 0): (CONV,)},
    ),
    "a norm per head": Case(
        lambda: chain(lambda net, x: net.out(net.middle(net.fc(x).unflatten(-1, (-1, 3))).flatten(1)), nn.LayerNorm(3)),
        VECTORS,
        {"fc": 2},
        {("fc.weight", 0): (S("fc", 3),), ("middle.weight", 0): (S(None, 3),)},
    ),
    "PReLU": Case(
        lambda: chain(lambda net, x: net.out(net.middle(net.fc(x))), nn.PReLU(6)),
        VECTORS,
        {"fc": 6},
        {("middle.weight", 0): (FC,)},
    ),
    "weight norm": Case(
        lambda: Net(
            lambda net, x: net.out(net.fc(x)),
            fc=nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
            out=nn.Linear(6, 3),
        ),
        VECTORS,
        {"fc": 6},
        {
            ("fc.parametrizations.weight.original0", 0): (FC,),
            ("fc.parametrizations.weight.original1", 0): (FC,),
            ("fc.bias", 0): (FC,),
        },
    ),
    "an LSTM": Case(
        lambda: Net(
            lambda net, x: net.out(net.lstm(x)[0][:, -1]), lstm=nn.LSTM(4, 5, batch_first=True), out=nn.Linear(5, 3)
        ),
        SEQUENCES,
        {"lstm.weight_ih_l0": 5},
        {
            ("lstm.weight_ih_l0", 0): (S("lstm.weight_ih_l0"),) * 4,
            ("lstm.weight_hh_l0", 0): (S("lstm.weight_ih_l0"),) * 4,
            ("lstm.weight_hh_l0", 1): (S("lstm.weight_ih_l0"),),
            ("lstm.bias_hh_l0", 0): (S("lstm.weight_ih_l0"),) * 4,
            ("out.weight", 1): (S("lstm.weight_ih_l0"),),
        },
    ),
    "zeros beside channels": Case(
        lambda: chain(lambda net, x: net.out(F.pad(net.fc(x), (1, 2))), out=9),
        VECTORS,
        {"fc": 6},
        {("out.weight", 1): (S(None, 1), FC, S(None, 2))},
    ),
    "an index that repeats": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x)[:, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]), out=12),
        VECTORS,
        {"fc": 6},
        {("out.weight", 1): (S("fc", 2),)},
    ),
    "an index that exchanges": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x)[:, [1, 0, 2, 3, 4, 5]])),
        VECTORS,
        {},
        {("out.weight", 1): (S(None, 6),)},
        whole={"fc": (6, "order")},
    ),
    "places in the reverse order": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x).flip(1))),
        VECTORS,
        {},
        {("out.weight", 1): (S(None, 6),)},
        whole={"fc": (6, "order")},
    ),
    "a write into a slice": Case(
        lambda: Net(write_into_slice, fc=nn.Linear(4, 6), other=nn.Linear(4, 2), out=nn.Linear(6, 3)),
        VECTORS,
        {"fc": 2, "fc~2": 4, "other": 2},
        {("fc.weight", 0): (FC, S("fc~2")), ("out.weight", 1): (S("other"), S("fc~2"))},
    ),
    "complex numbers": Case(
        lambda: Net(rotate, fc=nn.Linear(4, 6), out=nn.Linear(6, 3)),
        VECTORS,
        {"fc": 3},
        {("fc.weight", 0): (S("fc", 2),), ("out.weight", 1): (S("fc", 2),)},
    ),
    "two axes flattened, the first larger": Case(
        lambda: Net(multiply_outer, a=nn.Linear(4, 3), b=nn.Linear(4, 5), out=nn.Linear(15, 3)),
        VECTORS,
        {"a": 3},
        {("out.weight", 1): (S("a", 5),)},
        whole={"b": (5, FLATTENED.cause)},
    ),
    "two axes flattened, the second larger": Case(
        lambda: Net(multiply_outer, a=nn.Linear(4, 3), b=nn.Linear(40, 5), out=nn.Linear(15, 3)),
        (2, 40),
        {"b": 5},
        {("out.weight", 1): (S("b"),) * 3},
        whole={"a": (3, FLATTENED.cause)},
    ),
    "softmax over channels": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x).softmax(-1))), VECTORS, {"fc": 6}, CHAIN
    ),
    "a cumulative sum": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x).cumsum(-1))), VECTORS, {"fc": 6}, CHAIN, ordered={"fc"}
    ),
    "a sum over channels": Case(
        lambda: Net(lambda net, x: net.out(net.fc(x).mean(1, keepdim=True)), fc=nn.Linear(4, 6), out=nn.Linear(1, 3)),
        VECTORS,
        {"fc": 6},
        {("fc.weight", 0): (FC,), ("fc.bias", 0): (FC,)},
    ),
    "channels times the samples": Case(
        lambda: Net(lambda net, x: net.out(net.fc(x) * x), fc=nn.Linear(4, 4), out=nn.Linear(4, 3)),
        VECTORS,
        {},
        {("fc.weight", 0): (S(None, 4),)},
        whole={"fc": (4, OF_SAMPLES.cause)},
    ),
    "a constant of the module": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x) * torch.arange(6.0))),
        VECTORS,
        {},
        {("out.weight", 1): (S(None, 6),)},
        whole={"fc": (6, "mul")},
    ),
    "a Fourier transform of channels": Case(
        lambda: chain(lambda net, x: net.out(torch.fft.fft(net.fc(x)).real)),
        VECTORS,
        {},
        {("out.weight", 1): (S(None, 6),)},
        whole={"fc": (6, "fft")},
    ),
    "sorted channels": Case(
        lambda: chain(lambda net, x: net.out(net.fc(x).sort(-1).values)),
        VECTORS,
        {},
        {("out.weight", 1): (S(None, 6),)},
        whole={"fc": (6, "sort")},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_and_segments_are_those_computed_by_hand(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    x = torch.randint(1, case.tokens, case.shape) if case.tokens else torch.randn(case.shape)
    observation = observe(case.make().eval(), x)
    units = observation.units
    assert units.sizes == {**case.sizes, "classes": 3}
    assert {dimension: units.segments[dimension] for dimension in case.dims} == case.dims
    assert units.ordered == set(case.ordered)
    assert observation.vocabulary == case.tokens
    assert units.whole.keys() == case.whole.keys()
    for axis, (size, cause) in case.whole.items():
        assert units.whole[axis][0] == size
        assert cause in units.whole[axis][1].cause


def test_a_reason_names_the_calling_line() -> None:
    net = chain(lambda net, x: net.out(torch.fft.fft(net.fc(x)).real))
    line = test_a_reason_names_the_calling_line.__code__.co_firstlineno + 1
    for module, prefix in ((net, ""), (nn.Sequential(net), "0.")):
        reason = observe(module.eval(), torch.randn(VECTORS)).units.whole[f"{prefix}fc"][1]
        assert (reason.module, reason.line) == (prefix.rstrip("."), f"test_labels.py:{line}")
        assert reason.cause == "torch.fft.fft"


def test_a_reason_has_no_line_where_only_pytorch_calls() -> None:
    net = nn.Sequential(nn.Conv1d(1, 6, 5), nn.LocalResponseNorm(2), nn.Flatten(), nn.Linear(6, 3))
    reason = observe(net.eval(), torch.randn(4, 1, 5)).units.whole["0"][1]
    assert reason[:2] == ("torch.nn.functional.local_response_norm", "1") and not reason.line
