"""Convolutional networks that are no plain ResNet: classics, mobile ones, branches, decoders, other norms."""

import math
from collections import OrderedDict

import torch
import torch.nn as nn
import torch.nn.functional as F

from bed.entry import Entry, images

# ---- classics --------------------------------------------------------------------------------------------------------


class LeNet5(nn.Module):
    """As many a course writes it."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, self.num_flat_features(x))
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)

    def num_flat_features(self, x):
        num_features = 1
        for s in x.size()[1:]:
            num_features *= s
        return num_features


class MnistNet(nn.Module):
    """Literal sizes in forward, too."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, kernel_size=5)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(800, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 800)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        x = self.fc2(x)
        return F.log_softmax(x, dim=1)


class AlexNet(nn.Module):
    """As in torchvision, smaller: literals, features and classifier."""

    def __init__(self, num_classes=10, dropout=0.5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.LocalResponseNorm(5),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(16, 48, kernel_size=3, padding=1, groups=2),
            nn.ReLU(inplace=True),
            nn.Conv2d(48, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((3, 3))
        self.classifier = nn.Sequential(
            nn.Dropout(p=dropout),
            nn.Linear(32 * 3 * 3, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(p=dropout),
            nn.Linear(64, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


cfgs = {"tiny": [8, "M", 16, "M", 32, 32, "M"], "small": [16, 16, "M", 32, 32, "M"]}


def make_layers(cfg, batch_norm=False):
    layers = []
    in_channels = 3
    for v in cfg:
        if v == "M":
            layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
        else:
            conv2d = nn.Conv2d(in_channels, v, kernel_size=3, padding=1)
            layers += [conv2d, nn.BatchNorm2d(v), nn.ReLU(True)] if batch_norm else [conv2d, nn.ReLU(True)]
            in_channels = v
    return nn.Sequential(*layers)


class VGG(nn.Module):
    """As in torchvision: a table of widths."""

    def __init__(self, features, in_features, hidden, num_classes=10):
        super().__init__()
        self.features = features
        self.classifier = nn.Sequential(
            nn.Linear(in_features, hidden), nn.ReLU(True), nn.Dropout(), nn.Linear(hidden, num_classes)
        )

    def forward(self, x):
        x = self.features(x)
        x = x.view(x.size(0), -1)
        return self.classifier(x)


# ---- mobile ----------------------------------------------------------------------------------------------------------


def _make_divisible(v, divisor=4, min_value=None):
    new_v = max(min_value or divisor, int(v + divisor / 2) // divisor * divisor)
    return new_v + divisor if new_v < 0.9 * v else new_v


class ConvBNReLU(nn.Sequential):
    def __init__(self, in_planes, out_planes, kernel_size=3, stride=1, groups=1, act=nn.ReLU6):
        super().__init__(
            nn.Conv2d(in_planes, out_planes, kernel_size, stride, (kernel_size - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out_planes),
            act(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio):
        super().__init__()
        assert stride in [1, 2]
        hidden_dim = round(inp * expand_ratio)
        self.use_res_connect = stride == 1 and inp == oup
        layers = []
        if expand_ratio != 1:
            layers.append(ConvBNReLU(inp, hidden_dim, kernel_size=1))
        layers.extend(
            [
                ConvBNReLU(hidden_dim, hidden_dim, stride=stride, groups=hidden_dim),
                nn.Conv2d(hidden_dim, oup, 1, 1, 0, bias=False),
                nn.BatchNorm2d(oup),
            ]
        )
        self.conv = nn.Sequential(*layers)

    def forward(self, x):
        if self.use_res_connect:
            return x + self.conv(x)
        else:
            return self.conv(x)


class MobileNetV2(nn.Module):
    """As in torchvision, with a width multiplier."""

    def __init__(self, num_classes=10, width_mult=1.0):
        super().__init__()
        input_channel, last_channel = 8, 64
        setting = [[1, 8, 1, 1], [4, 16, 2, 2], [4, 24, 2, 1]]  # t, c, n, s
        input_channel = _make_divisible(input_channel * width_mult)
        self.last_channel = _make_divisible(last_channel * max(0.25, width_mult))
        features = [ConvBNReLU(3, input_channel, stride=2)]
        for t, c, n, s in setting:
            output_channel = _make_divisible(c * width_mult)
            for i in range(n):
                features.append(InvertedResidual(input_channel, output_channel, s if i == 0 else 1, expand_ratio=t))
                input_channel = output_channel
        features.append(ConvBNReLU(input_channel, self.last_channel, kernel_size=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(self.last_channel, num_classes))

    def forward(self, x):
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, 1).reshape(x.shape[0], -1)
        return self.classifier(x)


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


def drop_connect(inputs, p, training):
    if not training:
        return inputs
    keep = 1 - p
    noise = keep + torch.rand([inputs.shape[0], 1, 1, 1], dtype=inputs.dtype, device=inputs.device)
    return inputs / keep * torch.floor(noise)


class MBConvBlock(nn.Module):
    def __init__(self, block_args, drop_rate):
        super().__init__()
        self._args = block_args
        inp, oup = block_args["input_filters"], block_args["input_filters"] * block_args["expand_ratio"]
        if block_args["expand_ratio"] != 1:
            self._expand_conv = nn.Conv2d(inp, oup, kernel_size=1, bias=False)
            self._bn0 = nn.BatchNorm2d(num_features=oup, momentum=0.01, eps=1e-3)
        k, s = block_args["kernel_size"], block_args["stride"]
        self._depthwise_conv = nn.Conv2d(
            in_channels=oup, out_channels=oup, groups=oup, kernel_size=k, stride=s, padding=k // 2, bias=False
        )
        self._bn1 = nn.BatchNorm2d(num_features=oup, momentum=0.01, eps=1e-3)
        squeezed = max(1, int(inp * block_args["se_ratio"]))
        self._se_reduce = nn.Conv2d(in_channels=oup, out_channels=squeezed, kernel_size=1)
        self._se_expand = nn.Conv2d(in_channels=squeezed, out_channels=oup, kernel_size=1)
        self._project_conv = nn.Conv2d(in_channels=oup, out_channels=block_args["output_filters"], kernel_size=1)
        self._bn2 = nn.BatchNorm2d(num_features=block_args["output_filters"], momentum=0.01, eps=1e-3)
        self._swish = Swish()
        self.drop_rate = drop_rate

    def forward(self, inputs):
        x = inputs
        if self._args["expand_ratio"] != 1:
            x = self._swish(self._bn0(self._expand_conv(inputs)))
        x = self._swish(self._bn1(self._depthwise_conv(x)))
        x_squeezed = F.adaptive_avg_pool2d(x, 1)
        x_squeezed = self._se_expand(self._swish(self._se_reduce(x_squeezed)))
        x = torch.sigmoid(x_squeezed) * x
        x = self._bn2(self._project_conv(x))
        if self._args["stride"] == 1 and self._args["input_filters"] == self._args["output_filters"]:
            x = drop_connect(x, p=self.drop_rate, training=self.training) + inputs
        return x


class EfficientNet(nn.Module):
    """As lukemelas's EfficientNet-PyTorch: dicts of arguments kept in the blocks."""

    def __init__(self, blocks_args, num_classes=10):
        super().__init__()
        first, last = blocks_args[0]["input_filters"], blocks_args[-1]["output_filters"]
        self._conv_stem = nn.Conv2d(3, first, kernel_size=3, stride=2, padding=1, bias=False)
        self._bn0 = nn.BatchNorm2d(first)
        self._blocks = nn.ModuleList([])
        for idx, args in enumerate(blocks_args):
            self._blocks.append(MBConvBlock(args, 0.1 * idx / len(blocks_args)))
        self._conv_head = nn.Conv2d(last, 4 * last, kernel_size=1, bias=False)
        self._bn1 = nn.BatchNorm2d(4 * last)
        self._avg_pooling = nn.AdaptiveAvgPool2d(1)
        self._dropout = nn.Dropout(0.2)
        self._fc = nn.Linear(4 * last, num_classes)
        self._swish = Swish()

    def extract_features(self, inputs):
        x = self._swish(self._bn0(self._conv_stem(inputs)))
        for block in self._blocks:
            x = block(x)
        return self._swish(self._bn1(self._conv_head(x)))

    def forward(self, inputs):
        x = self._avg_pooling(self.extract_features(inputs))
        x = x.flatten(start_dim=1)
        return self._fc(self._dropout(x))


def efficientnet(width=1.0):
    keys = ("input_filters", "output_filters", "expand_ratio", "kernel_size", "stride", "se_ratio")
    rows = [(8, 8, 1, 3, 1, 0.25), (8, 16, 4, 3, 2, 0.25), (16, 16, 4, 5, 1, 0.25)]
    rows = [(int(i * width), int(o * width), *rest) for i, o, *rest in rows]
    return EfficientNet([dict(zip(keys, row, strict=True)) for row in rows])


def channel_shuffle(x, groups):
    batchsize, num_channels, height, width = x.data.size()
    channels_per_group = num_channels // groups
    x = x.view(batchsize, groups, channels_per_group, height, width)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(batchsize, -1, height, width)


class ShuffleUnit(nn.Module):
    def __init__(self, inp, oup, stride):
        super().__init__()
        self.stride = stride
        branch_features = oup // 2
        if self.stride > 1:
            self.branch1 = nn.Sequential(
                nn.Conv2d(inp, inp, 3, stride, 1, bias=False, groups=inp), nn.BatchNorm2d(inp),
                nn.Conv2d(inp, branch_features, 1, bias=False), nn.BatchNorm2d(branch_features), nn.ReLU(inplace=True),
            )  # fmt: skip
        inner = inp if stride > 1 else branch_features
        self.branch2 = nn.Sequential(
            nn.Conv2d(inner, branch_features, 1, bias=False), nn.BatchNorm2d(branch_features), nn.ReLU(inplace=True),
            nn.Conv2d(branch_features, branch_features, 3, stride, 1, groups=branch_features),
            nn.BatchNorm2d(branch_features),
            nn.Conv2d(branch_features, branch_features, 1), nn.BatchNorm2d(branch_features), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x):
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    """As in torchvision."""

    def __init__(self, stages_out_channels=(8, 16, 32, 48), num_classes=10):
        super().__init__()
        first, *middle, last = stages_out_channels
        self.conv1 = nn.Sequential(nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        input_channels = first
        for name, output_channels in zip(["stage2", "stage3"], middle, strict=True):
            seq = [ShuffleUnit(input_channels, output_channels, 2), ShuffleUnit(output_channels, output_channels, 1)]
            setattr(self, name, nn.Sequential(*seq))
            input_channels = output_channels
        self.conv5 = nn.Sequential(nn.Conv2d(input_channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU())
        self.fc = nn.Linear(last, num_classes)

    def forward(self, x):
        x = self.conv5(self.stage3(self.stage2(self.conv1(x))))
        return self.fc(x.mean([2, 3]))


class GhostModule(nn.Module):
    def __init__(self, inp, oup, ratio=2, dw_size=3):
        super().__init__()
        self.oup = oup
        init_channels = math.ceil(oup / ratio)
        new_channels = init_channels * (ratio - 1)
        self.primary_conv = nn.Sequential(
            nn.Conv2d(inp, init_channels, 1, bias=False), nn.BatchNorm2d(init_channels), nn.ReLU(inplace=True)
        )
        self.cheap_operation = nn.Sequential(
            nn.Conv2d(init_channels, new_channels, dw_size, 1, dw_size // 2, groups=init_channels, bias=False),
            nn.BatchNorm2d(new_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        x1 = self.primary_conv(x)
        x2 = self.cheap_operation(x1)
        out = torch.cat([x1, x2], dim=1)
        return out[:, : self.oup, :, :]


class GhostNet(nn.Module):
    """Han et al. 2020: half of the channels are cheap copies."""

    def __init__(self, width=16, num_classes=10):
        super().__init__()
        self.conv_stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList([nn.Sequential(GhostModule(width, 2 * width), GhostModule(2 * width, width))] * 1)
        self.last = GhostModule(width, 2 * width)
        self.global_pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv_stem(x)))
        for block in self.blocks:
            x = x + block(x)
        x = self.global_pool(self.last(x))
        return self.classifier(x.view(x.size(0), -1))


class PartialConv(nn.Module):
    def __init__(self, dim, n_div=4):
        super().__init__()
        self.dim_conv3 = dim // n_div
        self.partial_conv3 = nn.Conv2d(self.dim_conv3, self.dim_conv3, 3, 1, 1, bias=False)

    def forward(self, x):
        out = torch.zeros_like(x)
        out[:, self.dim_conv3 :, :, :] = x[:, self.dim_conv3 :, :, :]
        out[:, : self.dim_conv3, :, :] = self.partial_conv3(x[:, : self.dim_conv3, :, :])
        return out


class FasterNet(nn.Module):
    """Chen et al. 2023: writes the convolved part back into a slice."""

    def __init__(self, embed_dim=16, depth=2, num_classes=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, embed_dim, kernel_size=4, stride=4, bias=False)
        self.mixers = nn.ModuleList([PartialConv(embed_dim) for _ in range(depth)])
        self.mlps = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(embed_dim, embed_dim * 2, 1, bias=False),
                    nn.BatchNorm2d(embed_dim * 2),
                    nn.GELU(),
                    nn.Conv2d(embed_dim * 2, embed_dim, 1, bias=False),
                )
                for _ in range(depth)
            ]
        )
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, x):
        x = self.patch_embed(x)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + mlp(mixer(x))
        return self.head(x.mean(dim=(-2, -1)))


# ---- branches --------------------------------------------------------------------------------------------------------


class _DenseLayer(nn.Module):
    def __init__(self, num_input_features, growth_rate, bn_size, drop_rate):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(num_input_features)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(num_input_features, bn_size * growth_rate, kernel_size=1, stride=1, bias=False)
        self.norm2 = nn.BatchNorm2d(bn_size * growth_rate)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(bn_size * growth_rate, growth_rate, kernel_size=3, stride=1, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def forward(self, inputs):
        bottleneck_output = self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))
        new_features = self.conv2(self.relu2(self.norm2(bottleneck_output)))
        if self.drop_rate > 0:
            new_features = F.dropout(new_features, p=self.drop_rate, training=self.training)
        return new_features


class _DenseBlock(nn.ModuleDict):
    def __init__(self, num_layers, num_input_features, bn_size, growth_rate, drop_rate):
        super().__init__()
        for i in range(num_layers):
            layer = _DenseLayer(num_input_features + i * growth_rate, growth_rate, bn_size, drop_rate)
            self.add_module("denselayer%d" % (i + 1), layer)

    def forward(self, init_features):
        features = [init_features]
        for _name, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class _Transition(nn.Sequential):
    def __init__(self, num_input_features, num_output_features):
        super().__init__()
        self.norm = nn.BatchNorm2d(num_input_features)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(num_input_features, num_output_features, kernel_size=1, stride=1, bias=False)
        self.pool = nn.AvgPool2d(kernel_size=2, stride=2)


class DenseNet(nn.Module):
    """As in torchvision."""

    def __init__(self, growth_rate=8, block_config=(2, 3), num_init_features=16, bn_size=2, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                [
                    ("conv0", nn.Conv2d(3, num_init_features, kernel_size=3, stride=2, padding=1, bias=False)),
                    ("norm0", nn.BatchNorm2d(num_init_features)),
                    ("relu0", nn.ReLU(inplace=True)),
                ]
            )
        )
        num_features = num_init_features
        for i, num_layers in enumerate(block_config):
            self.features.add_module(
                f"denseblock{i + 1}", _DenseBlock(num_layers, num_features, bn_size, growth_rate, 0)
            )
            num_features = num_features + num_layers * growth_rate
            if i != len(block_config) - 1:
                self.features.add_module(f"transition{i + 1}", _Transition(num_features, num_features // 2))
                num_features = num_features // 2
        self.features.add_module("norm5", nn.BatchNorm2d(num_features))
        self.classifier = nn.Linear(num_features, num_classes)

    def forward(self, x):
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        return self.classifier(torch.flatten(out, 1))


class BasicConv2d(nn.Module):
    def __init__(self, in_channels, out_channels, **kwargs):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Inception(nn.Module):
    def __init__(self, in_channels, ch1x1, ch3x3red, ch3x3, ch5x5red, ch5x5, pool_proj):
        super().__init__()
        self.branch1 = BasicConv2d(in_channels, ch1x1, kernel_size=1)
        self.branch2 = nn.Sequential(
            BasicConv2d(in_channels, ch3x3red, kernel_size=1), BasicConv2d(ch3x3red, ch3x3, kernel_size=3, padding=1)
        )
        self.branch3 = nn.Sequential(
            BasicConv2d(in_channels, ch5x5red, kernel_size=1), BasicConv2d(ch5x5red, ch5x5, kernel_size=3, padding=1)
        )
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(kernel_size=3, stride=1, padding=1), BasicConv2d(in_channels, pool_proj, kernel_size=1)
        )

    def _forward(self, x):
        return [self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)]

    def forward(self, x):
        return torch.cat(self._forward(x), 1)


class GoogLeNet(nn.Module):
    """As in torchvision; with `aux_logits`, a second classifier that runs in training mode alone."""

    def __init__(self, num_classes=10, aux_logits=False):
        super().__init__()
        self.aux_logits = aux_logits
        self.conv1 = BasicConv2d(3, 16, kernel_size=3, stride=2, padding=1)
        self.inception3a = Inception(16, 8, 4, 12, 4, 8, 4)
        self.inception3b = Inception(32, 16, 8, 16, 4, 8, 8)
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.inception4a = Inception(48, 16, 8, 24, 8, 16, 8)
        if aux_logits:
            self.aux1 = nn.Sequential(
                nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48 * 4, 32), nn.ReLU(), nn.Linear(32, num_classes)
            )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        x = self.conv1(x)
        x = self.inception3b(self.inception3a(x))
        x = self.maxpool3(x)
        aux1 = None
        if self.aux_logits and self.training:
            aux1 = self.aux1(x)
        x = self.inception4a(x)
        x = self.dropout(torch.flatten(self.avgpool(x), 1))
        x = self.fc(x)
        return x if aux1 is None else (x, aux1)


class Supervised(nn.Module):
    """BranchyNet's style (Teerapittayanon et al. 2016): a list of logits, one of each branch."""

    def __init__(self, channels=(16, 24, 32), num_classes=10):
        super().__init__()
        self.stages, self.heads = nn.ModuleList(), nn.ModuleList()
        prev = 3
        for c in channels:
            self.stages.append(
                nn.Sequential(
                    nn.Conv2d(prev, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(inplace=True), nn.MaxPool2d(2)
                )
            )
            self.heads.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, num_classes)))
            prev = c

    def forward(self, x):
        outputs = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            outputs.append(head(x))
        return outputs


# ---- decoders --------------------------------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    """(convolution => [BN] => ReLU) * 2"""

    def __init__(self, in_channels, out_channels, mid_channels=None):
        super().__init__()
        if not mid_channels:
            mid_channels = out_channels
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, mid_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(mid_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(mid_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels, bilinear=True):
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(in_channels, out_channels, in_channels // 2)
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
            self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        diff_y, diff_x = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    """As milesial's Pytorch-UNet; the mean of its map classifies."""

    def __init__(self, n_channels, n_classes, bilinear=False, c=8):
        super().__init__()
        factor = 2 if bilinear else 1
        self.inc = DoubleConv(n_channels, c)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(c, 2 * c))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * c, 4 * c // factor))
        self.up1 = Up(4 * c, 2 * c // factor, bilinear)
        self.up2 = Up(2 * c, c, bilinear)
        self.outc = nn.Conv2d(c, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x).mean(dim=[2, 3])


class AutoEncoder(nn.Module):
    """Transposed convolutions; a classifier sees the code and the reconstruction's error."""

    def __init__(self, latent=24, classes=10):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(True),
        )
        self.to_latent = nn.Linear(16 * 4 * 4, latent)
        self.from_latent = nn.Linear(latent, 16 * 4 * 4)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1), nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.classifier = nn.Linear(latent + 1, classes)

    def forward(self, x):
        h = self.encoder(x)
        z = self.to_latent(h.flatten(1))
        recon = self.decoder(F.relu(self.from_latent(z)).view(-1, 16, 4, 4))
        error = (recon - x).pow(2).mean(dim=(1, 2, 3)).unsqueeze(1)
        return self.classifier(torch.cat((z, error), 1))


class SubPixel(nn.Module):
    """Sub-pixel convolution (Shi et al. 2016), read out by pooling."""

    def __init__(self, channels=16, up=2, num_classes=10):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, channels, 5, 2, 2), nn.Tanh(), nn.Conv2d(channels, channels, 3, 1, 1))
        self.upsample = nn.Sequential(nn.Conv2d(channels, channels * up**2, 3, 1, 1), nn.PixelShuffle(up))
        self.refine = nn.Conv2d(channels, channels, 3, 1, 1)
        self.out = nn.Linear(channels, num_classes)

    def forward(self, x):
        x = self.upsample(torch.tanh(self.body(x)))
        return self.out(F.relu(self.refine(x)).mean((-1, -2)))


class SpaceToDepth(nn.Module):
    """Patches folded into channels by hand, in place of a stride."""

    def __init__(self, dim=12, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim * 4, dim * 2, 3, padding=1)
        self.fc = nn.Linear(dim * 2, num_classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        x = F.relu(self.conv2(x))
        return self.fc(x.mean((2, 3)))


# ---- other norms and activations -------------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps
        self.data_format = data_format
        self.normalized_shape = (normalized_shape,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, layer_scale_init_value=1e-6):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale_init_value * torch.ones(dim), requires_grad=True)

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        x = x.permute(0, 3, 1, 2)
        return input + x


class ConvNeXt(nn.Module):
    """As Meta's ConvNeXt, with layer scale."""

    def __init__(self, depths=(1, 2), dims=(16, 32), num_classes=10):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        self.downsample_layers.append(
            nn.Sequential(nn.Conv2d(3, dims[0], 4, 4), LayerNorm(dims[0], data_format="channels_first"))
        )
        for i in range(len(dims) - 1):
            self.downsample_layers.append(
                nn.Sequential(LayerNorm(dims[i], data_format="channels_first"), nn.Conv2d(dims[i], dims[i + 1], 2, 2))
            )
        self.stages = nn.ModuleList(
            nn.Sequential(*[ConvNeXtBlock(dim, 0.1) for _ in range(depth)])
            for dim, depth in zip(dims, depths, strict=True)
        )
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)

    def forward_features(self, x):
        for i in range(len(self.stages)):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.norm(x.mean([-2, -1]))

    def forward(self, x):
        return self.head(self.forward_features(x))


class InstanceNormNet(nn.Module):
    """Style transfer's blocks (Johnson et al. 2016): reflection padding, affine instance norm."""

    def __init__(self, ch=16, n_class=10):
        super().__init__()
        self.conv1 = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, ch, 3, 2), nn.InstanceNorm2d(ch, affine=True))
        self.conv2 = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(ch, ch, 3), nn.InstanceNorm2d(ch, affine=True))
        self.conv3 = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(ch, 2 * ch, 3, 2), nn.InstanceNorm2d(2 * ch, track_running_stats=True)
        )
        self.fc = nn.Linear(2 * ch, n_class)

    def forward(self, x):
        y = self.conv1(x).relu()
        y = y + self.conv2(y).relu()
        return self.fc(self.conv3(y).relu().mean(-1).mean(-1))


class PReLUNet(nn.Module):
    """One slope per channel, and the global maximum."""

    def __init__(self, width=16, classes=10):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.PReLU(width))
        self.layer2 = nn.Sequential(nn.Conv2d(width, width * 2, 3), nn.PReLU(width * 2), nn.MaxPool2d(2))
        self.fc = nn.Linear(width * 2, classes)

    def forward(self, x):
        x = self.layer2(self.layer1(x))
        x = torch.amax(x, dim=(2, 3))
        return self.fc(x)


class MaxoutConv(nn.Module):
    def __init__(self, in_channels, out_channels, pieces=2, **kw):
        super().__init__()
        self.out_channels, self.pieces = out_channels, pieces
        self.conv = nn.Conv2d(in_channels, out_channels * pieces, 3, padding=1, **kw)

    def forward(self, x):
        x = self.conv(x)
        n, _, h, w = x.shape
        return x.view(n, self.out_channels, self.pieces, h, w).max(dim=2)[0]


class MaxoutNet(nn.Module):
    """Goodfellow et al. 2013."""

    def __init__(self, num_classes=10):
        super().__init__()
        self.m1 = MaxoutConv(3, 12, stride=2)
        self.m2 = MaxoutConv(12, 24, pieces=3, stride=2)
        self.bn = nn.BatchNorm2d(24)
        self.fc = nn.Linear(24 * 16, num_classes)

    def forward(self, x):
        x = self.bn(self.m2(self.m1(x)))
        return self.fc(x.reshape(len(x), -1))


class BlurPool(nn.Module):
    def __init__(self, channels, filt_size=3, stride=2):
        super().__init__()
        self.stride, self.channels = stride, channels
        a = torch.tensor([1.0, 2.0, 1.0])
        filt = a[:, None] * a[None, :]
        filt = filt / torch.sum(filt)
        self.register_buffer("filt", filt[None, None, :, :].repeat((self.channels, 1, 1, 1)))
        self.pad = nn.ReflectionPad2d(1)

    def forward(self, inp):
        return F.conv2d(self.pad(inp), self.filt, stride=self.stride, groups=inp.shape[1])


class AntiAliased(nn.Module):
    """Zhang 2019: a fixed blur per channel, kept as a buffer."""

    def __init__(self, c=16, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, c, 3, padding=1), relu1=nn.ReLU(), blur1=BlurPool(c),
                conv2=nn.Conv2d(c, 2 * c, 3, padding=1, bias=False), bn2=nn.BatchNorm2d(2 * c), relu2=nn.ReLU(),
                blur2=BlurPool(2 * c),
            )
        )  # fmt: skip
        self.fc = nn.Linear(2 * c, num_classes)

    def forward(self, x):
        return self.fc(F.adaptive_max_pool2d(self.features(x), 1).squeeze(3).squeeze(2))


class GatedConv(nn.Module):
    """Gated linear units over channels, pooled by a learned map."""

    def __init__(self, width=16, num_classes=10):
        super().__init__()
        self.conv_a = nn.Conv2d(3, 2 * width, 3, 2, 1)
        self.conv_b = nn.Conv2d(width, 2 * width, 3, 1, 1)
        self.glu = nn.GLU(dim=1)
        self.where = nn.Conv2d(width, 1, 1)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x):
        x = self.glu(self.conv_a(x))
        x = x + F.glu(self.conv_b(x), dim=1)
        a = self.where(x).flatten(2).softmax(-1)
        return self.fc((x.flatten(2) * a).sum(-1))


ENTRIES = [
    Entry("lenet", LeNet5, images(1, 28)),
    Entry("literal_view", MnistNet, images(1, 28)),
    Entry("alexnet", AlexNet, images(side=32)),
    Entry("vgg", lambda: VGG(make_layers(cfgs["tiny"]), 32 * 2 * 2, 48), images()),
    Entry("vgg_batch_norm", lambda: VGG(make_layers(cfgs["small"], batch_norm=True), 512, 32), images()),
    Entry("mobilenet_v2", MobileNetV2, images(), narrow=lambda f: MobileNetV2(width_mult=f)),
    Entry("efficientnet", efficientnet, images(), narrow=efficientnet),
    Entry("shufflenet", ShuffleNetV2, images()),
    Entry("ghostnet", GhostNet, images()),
    Entry("slice_writes", FasterNet, images(), narrow=lambda f: FasterNet(int(16 * f))),
    Entry("densenet", DenseNet, images(), narrow=lambda f: DenseNet(int(8 * f), num_init_features=int(16 * f))),
    Entry("inception", GoogLeNet, images()),
    Entry(
        "auxiliary_classifier", lambda: GoogLeNet(aux_logits=True), images(),
        limit="parameters that the example in evaluation mode does not use",
    ),
    Entry("list_of_logits", Supervised, images()),
    Entry("unet", lambda: UNet(3, 10), images(), narrow=lambda f: UNet(3, 10, c=int(8 * f))),
    Entry("unet_bilinear", lambda: UNet(1, 5, bilinear=True), images(1)),
    Entry("autoencoder", AutoEncoder, images(1)),
    Entry("pixel_shuffle", SubPixel, images()),
    Entry("space_to_depth", SpaceToDepth, images()),
    Entry("convnext", ConvNeXt, images(), narrow=lambda f: ConvNeXt(dims=(int(16 * f), int(32 * f)))),
    Entry("instance_norm", InstanceNormNet, images()),
    Entry("prelu", PReLUNet, images()),
    Entry("maxout", MaxoutNet, images()),
    Entry("blur_pool", AntiAliased, images()),
    Entry("gated_convolution", GatedConv, images()),
]  # fmt: skip
