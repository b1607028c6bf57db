"""Models as other people write them, wrapped for FleetFit without an edit inside: what a proof of layouts must bear."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from zoo import CLASSES, Made

from fleetfit.layout import Axis

Sizes = Mapping[str, int]


# ---- attention -----------------------------------------------------------------------------------------------------


class FusedAttention(nn.Module):
    """Rows of the fused layer are (3, heads, channels of a head), as in most vision transformers."""

    def __init__(self, dim: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (inner // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * inner), nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1) * self.scale).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(b, n, -1))


class Tokens(nn.Module):
    """Tokens [B, L, 5], one layer of attention with a residual sum, a mean, a classifier."""

    def __init__(self, dim: int, attention: nn.Module, classes: int) -> None:
        super().__init__()
        self.embed, self.norm, self.attention = nn.Linear(5, dim), nn.LayerNorm(dim), attention
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.fc((x + self.attention(self.norm(x))).mean(1))


def fused(heads: Callable[[int], int] = lambda inner: inner // 8, granule: int = 8) -> Made:
    """Attention by hand, its heads of eight channels; `heads` may say otherwise, and be wrong."""
    axes = {"dim": Axis(12), "inner": Axis(32, granule), "classes": CLASSES}

    def make(s: Sizes) -> nn.Module:
        return Tokens(s["dim"], FusedAttention(s["dim"], s["inner"], heads(s["inner"])), s["classes"])

    return Made(axes, make, (5, 5))


def fused_by_head() -> Made:
    """The same with the number of heads as the axis: rows are (3, heads, 8)."""
    axes = {"heads": Axis(4), "classes": CLASSES}

    def make(s: Sizes) -> nn.Module:
        return Tokens(12, FusedAttention(12, 8 * s["heads"], s["heads"]), s["classes"])

    return Made(axes, make, (5, 5))


class Multihead(nn.Module):
    """PyTorch's own attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x, x, need_weights=False)[0]


def multihead(heads: Callable[[int], int] = lambda dim: dim // 8) -> Made:
    axes = {"dim": Axis(32, 8), "classes": CLASSES}
    return Made(axes, lambda s: Tokens(s["dim"], Multihead(s["dim"], heads(s["dim"])), s["classes"]), (5, 5))


# ---- convolutions --------------------------------------------------------------------------------------------------


class GroupedBlock(nn.Module):
    """A residual block with group norms of four channels each, and a projection where the stream widens."""

    def __init__(self, before: int, after: int, groups: Callable[[int], int]) -> None:
        super().__init__()
        self.conv1, self.gn1 = nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(groups(after), after)
        self.conv2, self.gn2 = nn.Conv2d(after, after, 3, padding=1, bias=False), nn.GroupNorm(groups(after), after)
        self.downsample = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.gn2(self.conv2(F.relu(self.gn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class GroupedResNet(nn.Module):
    def __init__(self, first: int, second: int, classes: int, groups: Callable[[int], int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, first, 3, padding=1)
        self.layers = nn.Sequential(GroupedBlock(first, first, groups), GroupedBlock(first, second, groups))
        self.fc = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def grouped_resnet(groups: Callable[[int], int] = lambda c: c // 4) -> Made:
    axes = {"first": Axis(16, 4), "second": Axis(16, 4), "classes": CLASSES}
    return Made(axes, lambda s: GroupedResNet(s["first"], s["second"], s["classes"], groups), (1, 6, 6))


# ---- the rest ------------------------------------------------------------------------------------------------------


class Temporal(nn.Module):
    """A temporal convolution with weight norms."""

    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.conv1 = weight_norm(nn.Conv1d(5, first, 3, padding=1))
        self.conv2 = weight_norm(nn.Conv1d(first, second, 3, padding=1))
        self.fc = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x.transpose(1, 2))))).mean(2))


def temporal() -> Made:
    axes = {"first": Axis(8), "second": Axis(8), "classes": CLASSES}
    return Made(axes, lambda s: Temporal(s["first"], s["second"], s["classes"]), (5, 5))


class Experts(nn.Module):
    """Inputs and two branches side by side, a softmax over channels, and a product of two streams."""

    def __init__(self, a: int, b: int, classes: int) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(5, a), nn.Linear(5, b), nn.Linear(5, a)
        self.norm, self.fc = nn.LayerNorm(5 + a + b), nn.Linear(5 + a + b, classes)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).tanh() * self.gate(x).sigmoid()
        return self.fc(self.norm(torch.cat([x, a, self.b(x).relu()], dim=1)))


def experts() -> Made:
    axes = {"a": Axis(8), "b": Axis(8), "classes": CLASSES}
    return Made(axes, lambda s: Experts(s["a"], s["b"], s["classes"]))


FOREIGN: Mapping[str, Callable[[], Made]] = {
    "fused attention": fused,
    "nn.MultiheadAttention": multihead,
    "ResNet with group norms": grouped_resnet,
    "weight norm": temporal,
    "concatenation with a norm": experts,
}
