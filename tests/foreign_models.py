"""Models as other people write them, their modules unedited, each wrapped by a few lines of an architecture.

They come in pairs: the module as it stands in many a repository, and what wraps it. `FOREIGN` has all of them with the
shape of a sample; `fleetfit check-model tests/foreign_models.py:NAME` takes any.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleetfit.architecture import Architecture, Axis

Sizes = Mapping[str, int]
Exits = tuple[int, ...]


def classes_of(classes: int) -> Axis:
    return Axis(classes, scaled=False)


class Pooled(nn.Sequential):
    """A classifier of a map [B, C, ...]."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# ---- 1. a vision transformer whose heads have a size of their own: fused rows are (3, heads, dim_head) ---------------


class HeadedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.to_qkv(self.norm(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attention = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out((attention @ v).transpose(1, 2).reshape(b, n, -1))


class VisionTransformer(nn.Module):
    def __init__(self, channels: int, side: int, dim: int, depth: int, heads: int, dim_head: int, mlp_dim: int) -> None:
        super().__init__()
        self.patchify = nn.Conv2d(channels, dim, 2, stride=2)
        self.pos_embedding = nn.Parameter(torch.randn(1, (side // 2) ** 2 + 1, dim) * 0.02)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    HeadedAttention(dim, heads, dim_head),
                    nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim)),
                ]
            )
            for _ in range(depth)
        )


class ViTWithExits(nn.Module):
    def __init__(self, vit: VisionTransformer, dim: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.vit = vit
        self.norms = nn.ModuleDict({str(e): nn.LayerNorm(dim) for e in exits})
        self.to_logits = nn.ModuleDict({str(e): nn.Linear(dim, classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.vit.patchify(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.vit.cls_token.expand(len(x), -1, -1), x], dim=1) + self.vit.pos_embedding
        logits = []
        for i, (attention, mlp) in enumerate(self.vit.layers):
            x = x + attention(x)
            x = x + mlp(x)
            if str(i + 1) in self.norms:
                logits.append(self.to_logits[str(i + 1)](self.norms[str(i + 1)](x[:, 0])))
        return logits


class ViT(Architecture):
    blocks = 4

    def __init__(self, classes: int, channels: int, input_shape: tuple[int, ...]) -> None:
        self.channels, self.side = channels, input_shape[-1]
        self.axes = {"dim": Axis(24), "heads": Axis(3), "mlp": Axis(32), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        vit = VisionTransformer(self.channels, self.side, axes["dim"], exits[-1], axes["heads"], 8, axes["mlp"])
        return ViTWithExits(vit, axes["dim"], axes["classes"], exits)


# ---- 2. torch's own encoder layers, whole heads, classifiers in a ModuleList -----------------------------------------


class TextEncoder(nn.Module):
    def __init__(self, vocabulary: int, d_model: int, nhead: int, feedforward: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, feedforward, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class TextExits(nn.Module):
    def __init__(self, text: TextEncoder, d_model: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.text, self.at = text, exits
        self.classifiers = nn.ModuleList(nn.Linear(d_model, classes) for _ in exits)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x, logits = self.text.embedding(tokens), []
        for i, layer in enumerate(self.text.encoder.layers):
            x = layer(x)
            if i + 1 in self.at:
                logits.append(self.classifiers[self.at.index(i + 1)](x.mean(1)))
        return logits


class Text(Architecture):
    blocks = 3

    def __init__(self, classes: int, vocabulary: int) -> None:
        self.tokens = vocabulary
        self.axes = {"d_model": Axis(32, granule=8), "feedforward": Axis(48), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        d_model = axes["d_model"]
        text = TextEncoder(self.tokens, d_model, d_model // 8, axes["feedforward"], exits[-1])
        return TextExits(text, d_model, axes["classes"], exits)


# ---- 3. a residual network with stages by name -----------------------------------------------------------------------


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, channels: int, widths: list[int]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = nn.Sequential(BasicBlock(widths[0], widths[0], 1), BasicBlock(widths[0], widths[0], 1))
        self.layer2 = nn.Sequential(BasicBlock(widths[0], widths[1], 2), BasicBlock(widths[1], widths[1], 1))
        self.layer3 = nn.Sequential(BasicBlock(widths[1], widths[2], 2), BasicBlock(widths[2], widths[2], 1))


class ResNetWithExits(nn.Module):
    """Layers after the last exit are taken away from the whole network."""

    def __init__(self, net: ResNet, widths: list[int], classes: int, exits: Exits) -> None:
        super().__init__()
        self.net, self.exits = net, exits
        for later in range(exits[-1] + 1, 4):
            delattr(net, f"layer{later}")
        for e in exits:
            self.add_module(f"fc{e}", Pooled(widths[e - 1], classes))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = F.relu(self.net.bn1(self.net.conv1(x))), []
        for i in range(1, self.exits[-1] + 1):
            x = self.net.get_submodule(f"layer{i}")(x)
            if i in self.exits:
                logits.append(self.get_submodule(f"fc{i}")(x))
        return logits


class Residual(Architecture):
    blocks = 3

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {f"layer{i + 1}": Axis(n, block=i) for i, n in enumerate((12, 16, 20))}
        self.axes["classes"] = classes_of(classes)

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        widths = [axes[f"layer{i}"] for i in (1, 2, 3)]
        return ResNetWithExits(ResNet(self.channels, widths), widths, axes["classes"], exits)


# ---- 4. a U-Net: a way down and up, concatenations, layers called dec1 -----------------------------------------------


def double_conv(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, channels: int, one: int, two: int, three: int, decoders: int) -> None:
        super().__init__()
        self.enc1, self.enc2, self.middle = double_conv(channels, one), double_conv(one, two), double_conv(two, three)
        if decoders > 0:
            self.up2, self.dec2 = nn.ConvTranspose2d(three, two, 2, stride=2), double_conv(2 * two, two)
        if decoders > 1:
            self.up1, self.dec1 = nn.ConvTranspose2d(two, one, 2, stride=2), double_conv(2 * one, one)


class UNetWithExits(nn.Module):
    """The way down is one block, each step up is another."""

    def __init__(self, net: UNet, widths: list[int], classes: int, exits: Exits) -> None:
        super().__init__()
        self.net, self.exits = net, exits
        self.out = nn.ModuleDict({str(e): Pooled(widths[e - 1], classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        net = self.net
        one = net.enc1(x)
        two = net.enc2(F.max_pool2d(one, 2))
        maps = [net.middle(F.max_pool2d(two, 2))]
        if self.exits[-1] > 1:
            maps.append(net.dec2(torch.cat([net.up2(maps[-1]), two], dim=1)))
        if self.exits[-1] > 2:
            maps.append(net.dec1(torch.cat([net.up1(maps[-1]), one], dim=1)))
        return [self.out[str(e)](maps[e - 1]) for e in self.exits]


class Unet(Architecture):
    blocks = 3

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {"one": Axis(8), "two": Axis(12), "three": Axis(16), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        one, two, three = (axes[name] for name in ("one", "two", "three"))
        net = UNet(self.channels, one, two, three, exits[-1] - 1)
        return UNetWithExits(net, [three, two, one], axes["classes"], exits)


# ---- 5. two recurrent layers by name ---------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, features: int, hidden: int, two_layers: bool) -> None:
        super().__init__()
        self.first = nn.GRU(features, hidden, batch_first=True)
        if two_layers:
            self.second = nn.GRU(hidden, hidden, batch_first=True)


class RecurrentExits(nn.Module):
    def __init__(self, net: Recurrent, hidden: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.net, self.exits = net, exits
        self.readouts = nn.ModuleDict({str(e): nn.Linear(hidden, classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [self.net.first(x.flatten(1, -2))[0]]
        if self.exits[-1] == 2:
            states.append(self.net.second(states[0])[0])
        return [self.readouts[str(e)](states[e - 1][:, -1]) for e in self.exits]


class Gru(Architecture):
    blocks = 2

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        self.features = input_shape[-1]
        self.axes = {"hidden": Axis(20), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        net = Recurrent(self.features, axes["hidden"], exits[-1] == 2)
        return RecurrentExits(net, axes["hidden"], axes["classes"], exits)


# ---- 6. ConvNeXt: stages.i.blocks.j, and a layer called down between stages ------------------------------------------


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(out)))).permute(0, 3, 1, 2)


class ConvNeXtStage(nn.Module):
    def __init__(self, before: int, dim: int, depth: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(before, dim, 2, stride=2)
        self.blocks = nn.ModuleList(ConvNeXtBlock(dim) for _ in range(depth))


class ConvNeXt(nn.Module):
    def __init__(self, channels: int, dims: list[int], depths: list[int]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            ConvNeXtStage(before, dim, n)
            for before, dim, n in zip([channels, *dims], dims, depths, strict=False)
            if n > 0
        )


class ConvNeXtExits(nn.Module):
    def __init__(self, net: ConvNeXt, dims: list[int], per_stage: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.net = net
        self.probes = nn.ModuleDict({str(e): Pooled(dims[(e - 1) // per_stage], classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        logits, done = [], 0
        for stage in self.net.stages:
            x = stage.down(x)
            for part in stage.blocks:
                x, done = part(x), done + 1
                if str(done) in self.probes:
                    logits.append(self.probes[str(done)](x))
        return logits


class Convnext(Architecture):
    blocks = 4

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {"dim0": Axis(12), "dim1": Axis(20, block=2), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        dims, depth = [axes["dim0"], axes["dim1"]], exits[-1]
        net = ConvNeXt(self.channels, dims, [min(2, depth), max(0, depth - 2)])
        return ConvNeXtExits(net, dims, 2, axes["classes"], exits)


# ---- 7. DenseNet: every layer reads all before it --------------------------------------------------------------------


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(before), nn.Conv2d(before, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], dim=1)


class DenseNet(nn.Module):
    def __init__(self, channels: int, stem: int, growth: list[int]) -> None:
        super().__init__()
        self.conv0 = nn.Conv2d(channels, stem, 3, padding=1)
        for i, own in enumerate(growth):
            self.add_module(f"denselayer{i + 1}", DenseLayer(stem + sum(growth[:i]), own))


class DenseExits(nn.Module):
    """Classifiers flatten a map of 2x2, so that each channel of the concatenation owns four features."""

    def __init__(self, net: DenseNet, widths: list[int], classes: int, exits: Exits) -> None:
        super().__init__()
        self.net, self.exits = net, exits
        for e in exits:
            self.add_module(f"classifier{e}", nn.Linear(4 * widths[e - 1], classes))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.net.conv0(x), []
        for i in range(1, self.exits[-1] + 1):
            x = self.net.get_submodule(f"denselayer{i}")(x)
            if i in self.exits:
                flat = F.adaptive_avg_pool2d(x, 2).flatten(1)
                logits.append(self.get_submodule(f"classifier{i}")(flat))
        return logits


class Dense(Architecture):
    blocks = 3

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {"stem": Axis(10)} | {f"grow{i}": Axis(6, block=i - 1) for i in (1, 2, 3)}
        self.axes["classes"] = classes_of(classes)

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        growth = [axes[f"grow{i}"] for i in range(1, exits[-1] + 1)]
        net = DenseNet(self.channels, axes["stem"], growth)
        widths = [axes["stem"] + sum(growth[: i + 1]) for i in range(len(growth))]
        return DenseExits(net, widths, axes["classes"], exits)


# ---- 8. inverted residuals with squeeze and excite -------------------------------------------------------------------


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, expanded: int, squeezed: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, expanded, 1, bias=False), nn.BatchNorm2d(expanded), nn.SiLU())
        depthwise = nn.Conv2d(expanded, expanded, 3, padding=1, groups=expanded, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(expanded), nn.SiLU())
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(expanded, squeezed, 1), nn.SiLU(), nn.Conv2d(squeezed, expanded, 1)
        )
        self.project = nn.Sequential(nn.Conv2d(expanded, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.depthwise(self.expand(x))
        return x + self.project(out * self.squeeze(out).sigmoid())


class MobileNet(nn.Module):
    def __init__(self, channels: int, width: int, expanded: int, squeezed: int, depth: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, 2, 1), *(InvertedResidual(width, expanded, squeezed) for _ in range(depth))
        )
        self.avgpool, self.classifier = nn.AdaptiveAvgPool2d(1), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class Mobile(Architecture):
    """A network with one classifier: width is cut, and depth is not."""

    blocks = 1

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {"width": Axis(12), "expanded": Axis(24, 4), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        expanded = axes["expanded"]
        return MobileNet(self.channels, axes["width"], expanded, expanded // 4, 3, axes["classes"])


# ---- 9. MLP-Mixer ----------------------------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int, inner_tokens: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Sequential(nn.Linear(tokens, inner_tokens), nn.GELU(), nn.Linear(inner_tokens, tokens))
        self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class MixerExits(nn.Module):
    def __init__(self, channels: int, tokens: int, sizes: Sizes, exits: Exits) -> None:
        super().__init__()
        dim, last = sizes["dim"], exits[-1]
        self.patch = nn.Conv2d(channels, dim, 2, stride=2)
        self.mixer = nn.Sequential(*(MixerBlock(tokens, dim, sizes["tokens"], sizes["inner"]) for _ in range(last)))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in exits)
        self.fcs = nn.ModuleList(nn.Linear(dim, sizes["classes"]) for _ in exits)
        self.at = exits

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.patch(x).flatten(2).transpose(1, 2), []
        for i, part in enumerate(self.mixer):
            x = part(x)
            if i + 1 in self.at:
                k = self.at.index(i + 1)
                logits.append(self.fcs[k](self.norms[k](x).mean(1)))
        return logits


class Mixer(Architecture):
    blocks = 4

    def __init__(self, classes: int, channels: int, input_shape: tuple[int, ...]) -> None:
        self.channels, self.places = channels, (input_shape[-1] // 2) ** 2
        self.axes = {"dim": Axis(16), "tokens": Axis(12), "inner": Axis(24), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return MixerExits(self.channels, self.places, axes, exits)


# ---- 10. a decoder of next tokens: grouped queries, rotary places, RMS norms, gated MLP, tied embeddings -------------


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    at = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)[:, None]
    angle = at / 100.0 ** (torch.arange(half, device=x.device, dtype=x.dtype) / half)
    one, two = x[..., :half], x[..., half:]
    return torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], dim=-1)


class GroupedAttention(nn.Module):
    def __init__(self, dim: int, kv_heads: int, per_group: int, head_dim: int) -> None:
        super().__init__()
        self.kv_heads, self.per_group, self.head_dim = kv_heads, per_group, head_dim
        self.wq = nn.Linear(dim, kv_heads * per_group * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(kv_heads * per_group * head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = rotated(self.wq(x).view(b, n, -1, self.head_dim).transpose(1, 2))
        k = rotated(self.wk(x).view(b, n, -1, self.head_dim).transpose(1, 2)).repeat_interleave(self.per_group, 1)
        v = self.wv(x).view(b, n, -1, self.head_dim).transpose(1, 2).repeat_interleave(self.per_group, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).reshape(b, n, -1))


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = GroupedAttention(dim, kv_heads, 2, 4)
        self.w1, self.w3 = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(out)) * self.w3(out))


class DecoderExits(nn.Module):
    def __init__(self, vocabulary: int, dim: int, kv_heads: int, inner: int, exits: Exits) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, kv_heads, inner) for _ in range(exits[-1]))
        self.norms = nn.ModuleDict({str(e): RMSNorm(dim) for e in exits})
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x, logits = self.tok_embeddings(tokens), []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if str(i + 1) in self.norms:
                logits.append(self.output(self.norms[str(i + 1)](x)))
        return logits


class Decoder(Architecture):
    blocks = 3

    def __init__(self, classes: int, vocabulary: int) -> None:
        self.tokens = vocabulary
        self.axes = {"dim": Axis(16), "kv_heads": Axis(3), "inner": Axis(20)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return DecoderExits(self.tokens, axes["dim"], axes["kv_heads"], axes["inner"], exits)


# ---- 11. fixed groups: ResNeXt's convolutions and group norms, always four -------------------------------------------


class GroupedBlock(nn.Module):
    def __init__(self, stream: int, mid: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(stream, mid, 1, bias=False)
        self.norm1 = nn.GroupNorm(groups, mid)
        self.conv2 = nn.Conv2d(mid, mid, 3, padding=1, groups=groups, bias=False)
        self.norm2 = nn.GroupNorm(groups, mid)
        self.conv3 = nn.Conv2d(mid, stream, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return x + self.conv3(F.relu(self.norm2(self.conv2(out))))


class GroupedExits(nn.Module):
    def __init__(self, channels: int, stream: int, mid: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, stream, 3, padding=1)
        self.trunk = nn.ModuleList(GroupedBlock(stream, mid, 4) for _ in range(exits[-1]))
        self.ends = nn.ModuleDict({f"after{e}": Pooled(stream, classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.stem(x), []
        for i, part in enumerate(self.trunk):
            x = part(x)
            if f"after{i + 1}" in self.ends:
                logits.append(self.ends[f"after{i + 1}"](x))
        return logits


class Grouped(Architecture):
    blocks = 3

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {"stream": Axis(16), "mid": Axis(5), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return GroupedExits(self.channels, axes["stream"], 4 * axes["mid"], axes["classes"], exits)


# ---- 12. VGG: one Sequential and a flatten ---------------------------------------------------------------------------


def vgg(channels: int, widths: list[int], hidden: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n in widths:
        layers += [nn.Conv2d(channels, n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        channels = n
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(4 * channels, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, classes)
    )


class Vgg(Architecture):
    blocks = 1

    def __init__(self, classes: int, channels: int) -> None:
        self.channels = channels
        self.axes = {"one": Axis(12), "two": Axis(16), "hidden": Axis(20), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return vgg(self.channels, [axes["one"], axes["two"]], axes["hidden"], axes["classes"])


# ---- 13. a gated causal convolution with weight norm -----------------------------------------------------------------


class GatedLayer(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.pad = dilation
        conv = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.conv = nn.utils.parametrizations.weight_norm(conv)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        return x + self.skip(value.tanh() * gate.sigmoid())


class WaveExits(nn.Module):
    def __init__(self, features: int, channels: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.inlet = nn.Conv1d(features, channels, 1)
        self.dilated = nn.ModuleList(GatedLayer(channels, 2**i) for i in range(exits[-1]))
        self.outlets = nn.ModuleDict({str(e): nn.Linear(channels, classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.inlet(x.flatten(1, -2).transpose(1, 2)), []
        for i, layer in enumerate(self.dilated):
            x = layer(x)
            if str(i + 1) in self.outlets:
                logits.append(self.outlets[str(i + 1)](x[..., -1]))
        return logits


class Wave(Architecture):
    blocks = 3

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        self.features = input_shape[-1]
        self.axes = {"channels": Axis(14), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return WaveExits(self.features, axes["channels"], axes["classes"], exits)


# ---- 14. a fixed number of heads that get narrower: torch's own attention, always four heads -------------------------


class FourHeads(nn.Module):
    def __init__(self, embed_dim: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.ff = nn.Sequential(nn.Linear(embed_dim, inner), nn.ReLU(), nn.Linear(inner, embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(x)
        x = x + self.attention(out, out, out, need_weights=False)[0]
        return x + self.ff(self.norm2(x))


class FixedExits(nn.Module):
    def __init__(self, features: int, embed_dim: int, inner: int, classes: int, exits: Exits) -> None:
        super().__init__()
        self.embed = nn.Linear(features, embed_dim)
        self.encoders = nn.ModuleList(FourHeads(embed_dim, inner) for _ in range(exits[-1]))
        self.taps = nn.ModuleDict({str(e): nn.Linear(embed_dim, classes) for e in exits})

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.embed(x.flatten(1, -2)), []
        for i, part in enumerate(self.encoders):
            x = part(x)
            if str(i + 1) in self.taps:
                logits.append(self.taps[str(i + 1)](x.mean(1)))
        return logits


class Fixed(Architecture):
    blocks = 2

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        self.features = input_shape[-1]
        self.axes = {"head": Axis(6), "inner": Axis(16), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return FixedExits(self.features, 4 * axes["head"], axes["inner"], axes["classes"], exits)


# ---- 15. heads and their channels both cut, rows (heads, 3, head_dim), one exit in the middle, told by a word --------


class FusedAttention(nn.Module):
    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.query_key_value = nn.Linear(hidden, heads * 3 * head_dim)
        self.dense = nn.Linear(heads * head_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.query_key_value(x).view(b, n, self.heads, 3, self.head_dim).unbind(3)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(self.head_dim)
        return self.dense(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


class FusedLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(hidden)
        self.attention = FusedAttention(hidden, heads, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.ln(x))


class FusedExits(nn.Module):
    """Four layers, exits after the second and the last; `bridge` leads from one half to the other."""

    def __init__(self, features: int, sizes: Sizes, exits: Exits) -> None:
        super().__init__()
        hidden, self.exits = sizes["hidden"], exits
        self.embed_in = nn.Linear(features, hidden)
        self.h = nn.ModuleList(FusedLayer(hidden, sizes["heads"], sizes["head_dim"]) for _ in range(exits[-1]))
        if exits[-1] > 2:
            self.bridge = nn.Linear(hidden, hidden)
        if 2 in exits:
            self.middle_score = nn.Linear(hidden, sizes["classes"])
        if 4 in exits:
            self.score = nn.Linear(hidden, sizes["classes"])

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.embed_in(x.flatten(1, -2)), []
        for i, layer in enumerate(self.h):
            x = layer(self.bridge(x) if i == 2 else x)
            if i == 1 and 2 in self.exits:
                logits.append(self.middle_score(x.mean(1)))
        return [*logits, self.score(x.mean(1))] if 4 in self.exits else logits


class Fused(Architecture):
    blocks, positions = 4, (2, 4)

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        self.features = input_shape[-1]
        self.axes = {"hidden": Axis(18), "heads": Axis(3), "head_dim": Axis(6, 2), "classes": classes_of(classes)}

    def build(self, axes: Sizes, exits: Exits) -> nn.Module:
        return FusedExits(self.features, axes, exits)


# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """One of them.

    Attributes:
        family: Makes the architecture of what it takes: classes, and of channels, input_shape and vocabulary some.
        input_shape: Shape of a sample.
        arguments: What is made up for it, where it takes tokens.
        task: What it learns.
    """

    family: Callable[..., Architecture]
    input_shape: tuple[int, ...] = (1, 8, 8)
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"channels": 1, "input_shape": (1, 8, 8)})
    task: str = "classification"

    def build_architecture(self, classes: int = 10) -> Architecture:
        """Make the architecture."""
        taken = self.family.__init__.__code__.co_varnames  # type: ignore[misc]
        return self.family(classes=classes, **{key: value for key, value in self.arguments.items() if key in taken})


WORDS = {"vocabulary": 30}
FOREIGN: dict[str, Foreign] = {
    **{f.__name__: Foreign(f) for f in (ViT, Residual, Unet, Gru, Convnext, Dense, Mobile, Mixer, Grouped, Vgg, Wave)},
    **{f.__name__: Foreign(f) for f in (Fixed, Fused)},
    "Text": Foreign(Text, (12,), WORDS),
    "Decoder": Foreign(Decoder, (12,), WORDS, "next_token"),
}
"""All of them by name."""
