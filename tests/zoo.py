"""Small purpose-made architectures, right ones and ones with a flaw that a check must find."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.anatomy import Architecture, Axis, ExitModel, Layout, Segment, infer_layout

Sizes = Mapping[str, int]
CLASSES = Axis(3, scaled=False)


@dataclass(frozen=True, eq=False)
class Made(Architecture):
    """One block, one exit, made by a function of the sizes."""

    axes: Mapping[str, Axis]
    make: Callable[[Sizes], nn.Module]
    input_shape: tuple[int, ...] = (5,)
    blocks: int = 1

    def infer(self) -> Layout:
        return infer_layout(self, input_shape=self.input_shape)

    def build(self, axes: Sizes, exits: tuple[int, ...]) -> nn.Module:
        return self.make(axes)


def arrange(layout: Layout, dims: Mapping[tuple[str, int], tuple[Segment, ...]]) -> Layout:
    """Return a layout in which some dimensions are arranged otherwise."""
    tensors = dict(layout.tensors)
    for (name, d), segments in dims.items():
        own = tensors[name].dims
        tensors[name] = replace(tensors[name], dims=(*own[:d], segments, *own[d + 1 :]))
    return replace(layout, tensors=tensors)


class Attention(nn.Module):
    """Tokens [B, L, 5] through pre-norm attention (fused q, k, v; heads of 4 channels) and a feed-forward part."""

    def __init__(self, hidden: int, inner: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(5, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.per_head = nn.Parameter(torch.ones(hidden // 4))
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v) * self.per_head[:, None, None]
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return self.fc((h + self.down(F.gelu(self.up(self.norm2(h))))).mean(1))


def attention(granule: int = 4) -> Made:
    axes = {"hidden": Axis(12, granule), "inner": Axis(7), "classes": CLASSES}
    return Made(axes, lambda s: Attention(s["hidden"], s["inner"], s["classes"]), (6, 5))


class Heads(nn.Module):
    """Tokens [B, L, 5] through attention whose fused rows are (q, k, v; heads; channels of a head)."""

    def __init__(self, heads: int, head_dim: int, classes: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv, self.out = nn.Linear(5, 3 * heads * head_dim), nn.Linear(heads * head_dim, 5)
        self.fc = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*fused, scale=0.5)  # of no size, so that narrow heads compute the same
        return self.fc((x + self.out(mixed.transpose(1, 2).flatten(2))).mean(1))


def heads() -> Made:
    """Heads of a fixed size come and go; rows are (3, heads, 4)."""
    axes = {"heads": Axis(4), "classes": CLASSES}
    return Made(axes, lambda s: Heads(s["heads"], 4, s["classes"]), (6, 5))


def two_axes() -> Made:
    """Heads come and go, and their channels; rows are (3, heads, channels of a head)."""
    axes = {"heads": Axis(4), "head_dim": Axis(6, 2), "classes": CLASSES}
    return Made(axes, lambda s: Heads(s["heads"], s["head_dim"], s["classes"]), (6, 5))


class Gates(nn.Module):
    """An LSTM over [B, L, 5]; its four gates are stacked."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, hidden, batch_first=True), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


def lstm() -> Made:
    axes = {"hidden": Axis(6), "classes": CLASSES}
    return Made(axes, lambda s: Gates(s["hidden"], s["classes"]), (4, 5))


class Branches(nn.Module):
    """The input and two branches side by side."""

    def __init__(self, a: int, b: int, classes: int) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(5, a), nn.Linear(5, b), nn.Linear(5 + a + b, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([x, self.a(x).relu(), self.b(x).tanh()], dim=1))


def concatenation(sizes: tuple[int, int] = (6, 6)) -> Made:
    axes = {"a": Axis(sizes[0]), "b": Axis(sizes[1]), "classes": CLASSES}
    return Made(axes, lambda s: Branches(s["a"], s["b"], s["classes"]))


class Convolution(nn.Module):
    """A convolution, a norm, something in between, pooling, a classifier; `between` sees the features."""

    def __init__(self, channels: int, classes: int, norm: nn.Module, between: nn.Module, pooled: int = 1) -> None:
        super().__init__()
        self.conv, self.norm, self.between = nn.Conv2d(1, channels, 3, padding=1), norm, between
        self.pooled, self.fc = pooled, nn.Linear(channels * pooled**2, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu()
        return self.fc(F.adaptive_avg_pool2d(h * self.between(h), self.pooled).flatten(1))


class Squeeze(nn.Module):
    """Squeeze and excite."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, squeezed), nn.Linear(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]


class One(nn.Module):
    """No gate."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones((), dtype=x.dtype)


def squeeze(own_axis: bool = True, granule: int = 1) -> Made:
    axes = {"wide": Axis(8, granule), "narrow": Axis(2), "classes": CLASSES}
    if not own_axis:
        del axes["narrow"]

    def make(s: Sizes) -> nn.Module:
        c = s["wide"]
        return Convolution(c, s["classes"], nn.BatchNorm2d(c), Squeeze(c, s["narrow"] if own_axis else max(1, c // 4)))

    return Made(axes, make, (1, 6, 6))


def grouped(groups: int | None = None) -> Made:
    """Group norm with two channels per group; with `groups`, a fixed number of groups, whose members then change."""

    def make(s: Sizes) -> nn.Module:
        c = s["wide"]
        return Convolution(c, s["classes"], nn.GroupNorm(groups or c // 2, c), One())

    return Made({"wide": Axis(8, 2), "classes": CLASSES}, make, (1, 6, 6))


def flattened() -> Made:
    def make(s: Sizes) -> nn.Module:
        return Convolution(s["wide"], s["classes"], nn.BatchNorm2d(s["wide"]), One(), pooled=2)

    return Made({"wide": Axis(6), "classes": CLASSES}, make, (1, 6, 6))


class Normed(nn.Module):
    """A layer with a norm over its channels."""

    def __init__(self, hidden: int, classes: int, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.fc = nn.Linear(5, hidden), norm, nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.up(x)).tanh())


def normed(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> Made:
    axes = {"hidden": Axis(8), "classes": CLASSES}
    return Made(axes, lambda s: Normed(s["hidden"], s["classes"], norm(s["hidden"])))


class Sum(nn.Module):
    """A residual sum: the branch must have the stream's channels."""

    def __init__(self, stream: int, branch: int, classes: int) -> None:
        super().__init__()
        self.stem, self.inner, self.branch = nn.Linear(5, stream), nn.Linear(stream, 4), nn.Linear(4, branch)
        self.fc = nn.Linear(stream, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.fc(h + self.branch(self.inner(h).relu()))


def residual(tied: bool = True) -> Made:
    """A residual stream; untied, its branch has an axis of its own, of the same size at full width."""
    axes = {"stream": Axis(8), "classes": CLASSES} | ({} if tied else {"branch": Axis(8)})
    return Made(axes, lambda s: Sum(s["stream"], s["stream" if tied else "branch"], s["classes"]))


class Shared(nn.Module):
    """One matrix under two names."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, hidden, bias=False), nn.Linear(5, hidden, bias=False)
        self.down.weight = self.up.weight
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.up(x) * self.down(x))


def shared() -> Made:
    axes = {"hidden": Axis(6), "classes": CLASSES}
    return Made(axes, lambda s: Shared(s["hidden"], s["classes"]))


class Stack(ExitModel):
    """Linear blocks; `absent` tells whether blocks behind the last exit are left out, as they must be."""

    def __init__(self, sizes: Sizes, exits: tuple[int, ...], count: int) -> None:
        super().__init__()
        self.exits, a = exits, sizes["a"]
        self.stem = nn.Linear(5, a)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(a, a), nn.ReLU()) for _ in range(count))
        self.heads = nn.ModuleDict({str(e): nn.Linear(a, sizes["classes"]) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return self.stem(x)


@dataclass(frozen=True)
class Deep(Architecture):
    """Three blocks; with `keeps_all` it builds all of them for every sub-model."""

    keeps_all: bool = False
    axes: Mapping[str, Axis] = field(default_factory=lambda: {"a": Axis(6), "classes": CLASSES}, compare=False)
    blocks: int = 3

    def build(self, axes: Sizes, exits: tuple[int, ...]) -> nn.Module:
        return Stack(axes, exits, 3 if self.keeps_all else exits[-1])


RIGHT: dict[str, Callable[[], Made]] = {
    "attention": attention,
    "heads": heads,
    "heads and their channels": two_axes,
    "lstm": lstm,
    "concatenation": concatenation,
    "squeeze": squeeze,
    "group norm": grouped,
    "flatten": flattened,
    "layer norm": normed,
    "rms norm": lambda: normed(nn.RMSNorm),
    "residual": residual,
    "shared": shared,
}
