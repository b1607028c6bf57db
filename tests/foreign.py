"""Models as other people write them, wrapped for FleetFit without an edit inside: what a proof of layouts must bear."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from zoo import CLASSES, Made

from fleetfit.layout import Axis, blocked, interleaved, segments

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


def fused(heads: Callable[[int], int] = lambda inner: inner // 8, granule: int = 8, declared: object = None) -> Made:
    """Attention by hand, its heads of eight channels; `heads` may say otherwise, and be wrong."""
    axes = {"dim": Axis(12), "inner": Axis(32, granule), "classes": CLASSES}

    def make(s: Sizes) -> nn.Module:
        return Tokens(s["dim"], FusedAttention(s["dim"], s["inner"], heads(s["inner"])), s["classes"])

    return Made(axes, make, {"*.qkv.*": declared or blocked(3)}, (5, 5))


def fused_by_head(declared: object, after: object = interleaved(8, dim=1)) -> Made:
    """The same with the number of heads as the axis: rows are (3, heads, 8)."""
    axes = {"heads": Axis(4), "classes": CLASSES}

    def make(s: Sizes) -> nn.Module:
        return Tokens(12, FusedAttention(12, 8 * s["heads"], s["heads"]), s["classes"])

    return Made(axes, make, {"*.qkv.*": declared, "*.proj.weight": after}, (5, 5))


class Multihead(nn.Module):
    """PyTorch's own attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x, x, need_weights=False)[0]


def multihead(heads: Callable[[int], int] = lambda dim: dim // 8) -> Made:
    axes = {"dim": Axis(32, 8), "classes": CLASSES}
    declared = {"*.in_proj_*": blocked(3)}
    return Made(axes, lambda s: Tokens(s["dim"], Multihead(s["dim"], heads(s["dim"])), s["classes"]), declared, (5, 5))


def encoder_layer(norm_first: bool = False) -> Made:
    """Two of PyTorch's encoder layers."""
    axes = {"dim": Axis(16, 4), "inner": Axis(10), "classes": CLASSES}

    def make(s: Sizes) -> nn.Module:
        dim = s["dim"]
        layers = [
            nn.TransformerEncoderLayer(dim, dim // 4, s["inner"], 0.1, "gelu", batch_first=True, norm_first=norm_first)
            for _ in range(2)
        ]
        return Tokens(dim, nn.Sequential(*layers), s["classes"])

    return Made(axes, make, {"*.in_proj_*": blocked(3)}, (5, 5))


class Llama(nn.Module):
    """RMS norms, a gated MLP, heads of a fixed number whose size is cut."""

    def __init__(self, dim: int, size: int, inner: int, classes: int) -> None:
        super().__init__()
        self.embed, self.norm1, self.norm2 = nn.Linear(5, dim), nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, 3 * size, bias=False) for _ in range(3))
        self.o = nn.Linear(3 * size, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.fc = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return self.fc((x + self.down(F.silu(gate) * up)).mean(1))


def llama() -> Made:
    axes = {"dim": Axis(12), "size": Axis(6), "inner": Axis(9), "classes": CLASSES}
    heads = {f"{name}.weight": blocked(3, dim=0) for name in "qkv"}
    declared = {**heads, "o.weight": blocked(3, dim=1), "gate_up.weight": blocked(2, dim=0)}
    return Made(axes, lambda s: Llama(s["dim"], s["size"], s["inner"], s["classes"]), declared, (5, 5))


class MixerBlock(nn.Module):
    """MLPs over tokens and over channels."""

    def __init__(self, tokens: int, dim: int, token_inner: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, token_inner), nn.GELU(), nn.Linear(token_inner, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


def mixer() -> Made:
    axes = {"dim": Axis(10), "token_inner": Axis(6), "inner": Axis(10), "classes": CLASSES}

    def make(s: Sizes) -> nn.Module:
        blocks = [MixerBlock(5, s["dim"], s["token_inner"], s["inner"]) for _ in range(2)]
        return Tokens(s["dim"], nn.Sequential(*blocks), s["classes"])

    return Made(axes, make, {}, (5, 5))


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
    return Made(axes, lambda s: GroupedResNet(s["first"], s["second"], s["classes"], groups), {}, (1, 6, 6))


class Unet(nn.Module):
    """Down, up, and a concatenation across."""

    def __init__(self, wide: int, deep: int, classes: int) -> None:
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(wide, deep, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(deep, wide, 2, stride=2)
        self.out = nn.Conv2d(2 * wide, wide, 3, padding=1)
        self.fc = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inc(x)
        x = torch.cat([x, self.up(self.down(x))], dim=1)
        return self.fc(F.relu(self.out(x)).mean((2, 3)))


def unet() -> Made:
    axes = {"wide": Axis(8), "deep": Axis(8), "classes": CLASSES}
    declared = {"out.weight": blocked(2, dim=1)}
    return Made(axes, lambda s: Unet(s["wide"], s["deep"], s["classes"]), declared, (1, 6, 6))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions."""

    def __init__(self, first: int, second: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU6())
        self.depthwise = nn.Conv2d(first, first, 3, padding=1, groups=first, bias=False)
        self.bn1, self.pointwise = nn.BatchNorm2d(first), nn.Conv2d(first, second, 1, bias=False)
        self.bn2, self.fc = nn.BatchNorm2d(second), nn.Linear(second * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.depthwise(self.stem(x))))
        return self.fc(F.adaptive_avg_pool2d(F.relu(self.bn2(self.pointwise(x))), 2).flatten(1))


def separable() -> Made:
    axes = {"first": Axis(8), "second": Axis(8), "classes": CLASSES}
    declared = {"fc.weight": interleaved(4)}
    return Made(axes, lambda s: Separable(s["first"], s["second"], s["classes"]), declared, (1, 6, 6))


class ChannelNorm(nn.Module):
    """A layer norm over the first dimension of a map, written out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - mean) / torch.sqrt(spread + 1e-6)) + self.bias[:, None, None]


class ConvNext(nn.Module):
    """A depthwise convolution, a norm over channels, two linear layers, a scale per channel, attention over space."""

    def __init__(self, dim: int, inner: int, classes: int) -> None:
        super().__init__()
        self.stem, self.dwconv = nn.Conv2d(1, dim, 2, stride=2), nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm, self.pw1, self.pw2 = ChannelNorm(dim), nn.Conv2d(dim, inner, 1), nn.Conv2d(inner, dim, 1)
        self.gamma = nn.Parameter(torch.ones(dim, 1, 1))
        self.spatial, self.fc = nn.Conv2d(2, 1, 3, padding=1), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.gamma * self.pw2(F.gelu(self.pw1(self.norm(self.dwconv(x)))))
        seen = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], dim=1)
        return self.fc(F.normalize((x * self.spatial(seen).sigmoid()).mean((2, 3)), dim=-1))


def convnext() -> Made:
    axes = {"dim": Axis(9), "inner": Axis(11), "classes": CLASSES}
    return Made(axes, lambda s: ConvNext(s["dim"], s["inner"], s["classes"]), {}, (1, 6, 6))


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
    return Made(axes, lambda s: Temporal(s["first"], s["second"], s["classes"]), {}, (5, 5))


class Recurrent(nn.Module):
    """Two layers of GRU, both directions of the second side by side."""

    def __init__(self, hidden: int, second: int, classes: int) -> None:
        super().__init__()
        self.first = nn.GRU(5, hidden, batch_first=True)
        self.second = nn.GRU(hidden, second, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * second, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(x)[0])[0].mean(1))


def recurrent() -> Made:
    axes = {"hidden": Axis(6), "second": Axis(6), "classes": CLASSES}
    declared = {"*_l0*": blocked(3, dim=0), "fc.weight": blocked(2, dim=1)}
    return Made(axes, lambda s: Recurrent(s["hidden"], s["second"], s["classes"]), declared, (4, 5))


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
    parts = segments(5, "a", "b")
    declared = {"fc.weight": parts, "norm.*": parts}
    return Made(axes, lambda s: Experts(s["a"], s["b"], s["classes"]), declared)


FOREIGN: Mapping[str, Callable[[], Made]] = {
    "fused attention": fused,
    "nn.MultiheadAttention": multihead,
    "nn.TransformerEncoderLayer": encoder_layer,
    "encoder layer, norms first": lambda: encoder_layer(norm_first=True),
    "heads of a fixed number": llama,
    "MLP-Mixer": mixer,
    "ResNet with group norms": grouped_resnet,
    "U-Net": unet,
    "depthwise separable": separable,
    "norm written out": convnext,
    "weight norm": temporal,
    "GRU": recurrent,
    "concatenation with a norm": experts,
}
