"""Residual convolutional networks, each as one of the many repositories writes it."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from bed.entry import Entry, images

# ---- torchvision: layer1 ... layer4, _make_layer, downsample ---------------------------------------------------------


def conv3x3(in_planes, out_planes, stride=1, groups=1, dilation=1):
    return nn.Conv2d(
        in_planes, out_planes, kernel_size=3, stride=stride, padding=dilation, groups=groups, bias=False,
        dilation=dilation,
    )  # fmt: skip


def conv1x1(in_planes, out_planes, stride=1):
    return nn.Conv2d(in_planes, out_planes, kernel_size=1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes, planes, stride=1, downsample=None, groups=1, base_width=64):
        super().__init__()
        self.conv1 = conv3x3(inplanes, planes, stride)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = downsample
        self.stride = stride

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes, planes, stride=1, downsample=None, groups=1, base_width=64):
        super().__init__()
        width = int(planes * (base_width / 64.0)) * groups
        self.conv1 = conv1x1(inplanes, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv3x3(width, width, stride, groups)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv1x1(width, planes * self.expansion)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """As in torchvision."""

    def __init__(self, block, layers, num_classes=10, width=8, groups=1, width_per_group=64):
        super().__init__()
        self.inplanes = width
        self.groups = groups
        self.base_width = width_per_group
        self.conv1 = nn.Conv2d(3, self.inplanes, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(self.inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._make_layer(block, width, layers[0])
        self.layer2 = self._make_layer(block, width * 2, layers[1], stride=2)
        self.layer3 = self._make_layer(block, width * 4, layers[2], stride=2)
        self.layer4 = self._make_layer(block, width * 8, layers[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width * 8 * block.expansion, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, nn.BatchNorm2d):
                nn.init.constant_(m.weight, 1)
                nn.init.constant_(m.bias, 0)

    def _make_layer(self, block, planes, blocks, stride=1):
        downsample = None
        if stride != 1 or self.inplanes != planes * block.expansion:
            downsample = nn.Sequential(
                conv1x1(self.inplanes, planes * block.expansion, stride), nn.BatchNorm2d(planes * block.expansion)
            )
        layers = [block(self.inplanes, planes, stride, downsample, self.groups, self.base_width)]
        self.inplanes = planes * block.expansion
        for _ in range(1, blocks):
            layers.append(block(self.inplanes, planes, groups=self.groups, base_width=self.base_width))
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)


# ---- CIFAR: a shortcut without parameters, by padding channels -------------------------------------------------------


class LambdaLayer(nn.Module):
    def __init__(self, lambd):
        super().__init__()
        self.lambd = lambd

    def forward(self, x):
        return self.lambd(x)


class CifarBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1, option="A"):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            if option == "A":
                self.shortcut = LambdaLayer(
                    lambda x: F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, planes // 4, planes // 4), "constant", 0)
                )
            elif option == "B":
                self.shortcut = nn.Sequential(
                    nn.Conv2d(in_planes, planes, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(planes)
                )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class CifarResNet(nn.Module):
    """ResNet-20 and the like for CIFAR, with option A or B of He et al. 2016."""

    def __init__(self, num_blocks, num_classes=10, option="A"):
        super().__init__()
        self.in_planes = 8
        self.option = option
        self.conv1 = nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = self._make_layer(8, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(16, num_blocks[1], stride=2)
        self.layer3 = self._make_layer(32, num_blocks[2], stride=2)
        self.linear = nn.Linear(32, num_classes)

    def _make_layer(self, planes, num_blocks, stride):
        layers = []
        for s in [stride] + [1] * (num_blocks - 1):
            layers.append(CifarBlock(self.in_planes, planes, s, self.option))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.avg_pool2d(out, out.size()[3])
        out = out.view(out.size(0), -1)
        return self.linear(out)


# ---- pre-activation, GroupNorm ---------------------------------------------------------------------------------------


def norm(channels, num_groups=4):
    return nn.GroupNorm(num_groups, channels)


class PreActBlock(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.n1, self.c1 = norm(c_in), nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.n2, self.c2 = norm(c_out), nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        if stride != 1 or c_in != c_out:
            self.skip = nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.n1(x))
        shortcut = self.skip(h) if hasattr(self, "skip") else x
        h = self.c1(h)
        return self.c2(F.relu(self.n2(h))) + shortcut


class PreActResNet(nn.Module):
    """As federated repositories write it: GroupNorm in place of BatchNorm."""

    def __init__(self, widths=(16, 32, 64), num_classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList(
            [PreActBlock(a, b, s) for a, b, s in zip((widths[0], *widths), widths, (1, 2, 2), strict=False)]
        )
        self.norm = norm(widths[-1])
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


# ---- wide, in nested Sequentials -------------------------------------------------------------------------------------


# ---- weight standardization ------------------------------------------------------------------------------------------


class StdConv2d(nn.Conv2d):
    def forward(self, x):
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class BiTUnit(nn.Module):
    def __init__(self, cin, cout=None, cmid=None, stride=1):
        super().__init__()
        cout = cout or cin
        cmid = cmid or cout // 4
        self.gn1 = nn.GroupNorm(4, cin)
        self.conv1 = StdConv2d(cin, cmid, 1, bias=False)
        self.gn2 = nn.GroupNorm(4, cmid)
        self.conv2 = StdConv2d(cmid, cmid, 3, stride, 1, bias=False)
        self.gn3 = nn.GroupNorm(4, cmid)
        self.conv3 = StdConv2d(cmid, cout, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        if stride != 1 or cin != cout:
            self.downsample = StdConv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        out = self.relu(self.gn1(x))
        residual = x
        if hasattr(self, "downsample"):
            residual = self.downsample(out)
        out = self.conv1(out)
        out = self.conv2(self.relu(self.gn2(out)))
        out = self.conv3(self.relu(self.gn3(out)))
        return out + residual


class BiT(nn.Module):
    """Big Transfer (Kolesnikov et al. 2020): weight standardization and GroupNorm, widths times a factor."""

    def __init__(self, block_units=(1, 2), width_factor=1, head_size=10):
        super().__init__()
        wf = width_factor
        self.root = nn.Sequential()
        self.root.add_module("conv", StdConv2d(3, int(16 * wf), 3, 1, 1, bias=False))
        self.root.add_module("pool", nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential()
        cin = int(16 * wf)
        for i, units in enumerate(block_units, 1):
            cout = int(32 * 2 ** (i - 1) * wf)
            stage = nn.Sequential()
            for u in range(1, units + 1):
                stage.add_module(f"unit{u:02d}", BiTUnit(cin, cout, stride=2 if u == 1 and i > 1 else 1))
                cin = cout
            self.body.add_module(f"block{i}", stage)
        self.head = nn.Sequential()
        self.head.add_module("gn", nn.GroupNorm(4, cin))
        self.head.add_module("relu", nn.ReLU(inplace=True))
        self.head.add_module("avg", nn.AdaptiveAvgPool2d(output_size=1))
        self.head.add_module("conv", nn.Conv2d(cin, head_size, kernel_size=1, bias=True))

    def forward(self, x):
        x = self.head(self.body(self.root(x)))
        assert x.shape[-2:] == (1, 1)
        return x[..., 0, 0]


# ---- Res2Net: a hierarchy of splits ----------------------------------------------------------------------------------


class Bottle2neck(nn.Module):
    def __init__(self, inplanes, planes, scale=4):
        super().__init__()
        width = planes // scale
        self.conv1 = nn.Conv2d(inplanes, width * scale, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width * scale)
        self.nums = scale - 1
        self.convs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(self.nums)])
        self.bns = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(self.nums)])
        self.conv3 = nn.Conv2d(width * scale, inplanes, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(inplanes)
        self.relu = nn.ReLU(inplace=True)
        self.scale, self.width = scale, width

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        spx = torch.split(out, self.width, 1)
        for i in range(self.nums):
            sp = spx[i] if i == 0 else sp + spx[i]
            sp = self.relu(self.bns[i](self.convs[i](sp)))
            out = sp if i == 0 else torch.cat((out, sp), 1)
        out = torch.cat((out, spx[self.nums]), 1)
        return self.relu(self.bn3(self.conv3(out)) + x)


class Res2Net(nn.Module):
    """Gao et al. 2019."""

    def __init__(self, channels=24, planes=32, depth=2, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.Sequential(*(Bottle2neck(channels, planes) for _ in range(depth)))
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


# ---- RepVGG: three branches, one of them a norm alone ----------------------------------------------------------------


# ---- CBAM and ECA: attention over channels ---------------------------------------------------------------------------


class ChannelAttention(nn.Module):
    def __init__(self, in_planes, ratio=4):
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.max_pool = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Sequential(
            nn.Conv2d(in_planes, in_planes // ratio, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(in_planes // ratio, in_planes, 1, bias=False),
        )
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return self.sigmoid(self.fc(self.avg_pool(x)) + self.fc(self.max_pool(x)))


class SpatialAttention(nn.Module):
    def __init__(self, kernel_size=7):
        super().__init__()
        self.conv1 = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        avg_out = torch.mean(x, dim=1, keepdim=True)
        max_out, _ = torch.max(x, dim=1, keepdim=True)
        return self.sigmoid(self.conv1(torch.cat([avg_out, max_out], dim=1)))


class ECA(nn.Module):
    def __init__(self, channel, gamma=2, b=1):
        super().__init__()
        t = int(abs((math.log(channel, 2) + b) / gamma))
        k = t if t % 2 else t + 1
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv1d(1, 1, kernel_size=k, padding=int(k / 2), bias=False)

    def forward(self, x):
        y = self.avg_pool(x)
        y = self.conv(y.squeeze(-1).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-1)
        return x * y.sigmoid().expand_as(x)


class CBAM(nn.Sequential):
    def __init__(self, channel):
        super().__init__()
        self.ca, self.sa = ChannelAttention(channel), SpatialAttention()

    def forward(self, x):
        x = self.ca(x) * x
        return self.sa(x) * x


class AttentiveCNN(nn.Module):
    """CBAM (Woo et al. 2018) or ECA (Wang et al. 2020) after each residual pair."""

    def __init__(self, attention, channels=16, blocks=2, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        for i in range(blocks):
            setattr(self, f"block{i}", self.block(channels))
            setattr(self, f"attention{i}", attention(channels))
        self.blocks = blocks
        self.classifier = nn.Linear(channels, num_classes)

    def block(self, c):
        return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x):
        x = self.conv(x)
        for i in range(self.blocks):
            x = F.relu(x + getattr(self, f"attention{i}")(getattr(self, f"block{i}")(x)))
        return self.classifier(x.mean([-2, -1]))


# ---- selective kernels -----------------------------------------------------------------------------------------------


class SKConv(nn.Module):
    def __init__(self, features, branches=2, r=2, L=8):
        super().__init__()
        d = max(int(features / r), L)
        self.convs = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(features, features, 3, padding=1 + i, dilation=1 + i, bias=False),
                    nn.BatchNorm2d(features),
                    nn.ReLU(inplace=False),
                )
                for i in range(branches)
            ]
        )
        self.fc = nn.Linear(features, d)
        self.fcs = nn.ModuleList([nn.Linear(d, features) for _ in range(branches)])
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        feas = torch.stack([conv(x) for conv in self.convs], dim=1)
        fea_s = feas.sum(dim=1).mean(-1).mean(-1)
        fea_z = self.fc(fea_s)
        attention = self.softmax(torch.stack([fc(fea_z) for fc in self.fcs], dim=1))
        return (feas * attention.unsqueeze(-1).unsqueeze(-1)).sum(dim=1)


class SKNet(nn.Module):
    """Li et al. 2019."""

    def __init__(self, width=16, class_num=10):
        super().__init__()
        self.basic_conv = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width))
        self.stage_1 = nn.Sequential(nn.Conv2d(width, width * 2, 1), nn.BatchNorm2d(width * 2), SKConv(width * 2))
        self.stage_2 = nn.Sequential(nn.Conv2d(width * 2, width * 2, 1), nn.ReLU(), SKConv(width * 2))
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.classifier = nn.Linear(width * 2, class_num)

    def forward(self, x):
        fea = self.stage_2(self.stage_1(self.basic_conv(x)))
        return self.classifier(torch.squeeze(torch.squeeze(self.pool(fea), -1), -1))


ENTRIES = [
    Entry(
        "resnet_basic", lambda: ResNet(BasicBlock, [1, 1, 1, 1]), images(side=32),
        narrow=lambda f: ResNet(BasicBlock, [1, 1, 1, 1], width=int(8 * f)),
    ),
    Entry(
        "resnet_bottleneck", lambda: ResNet(Bottleneck, [2, 1, 1, 1]), images(side=32),
        narrow=lambda f: ResNet(Bottleneck, [2, 1, 1, 1], width=int(8 * f)),
    ),
    Entry(
        "resnext", lambda: ResNet(Bottleneck, [1, 2, 1, 1], width=8, groups=4, width_per_group=16), images(side=32),
        narrow=lambda f: ResNet(Bottleneck, [1, 2, 1, 1], width=int(8 * f), groups=4, width_per_group=16),
    ),
    Entry("resnet_cifar_option_a", lambda: CifarResNet([1, 2, 1]), images()),
    Entry("resnet_cifar_option_b", lambda: CifarResNet([2, 1, 1], option="B"), images()),
    Entry(
        "resnet_group_norm", PreActResNet, images(),
        narrow=lambda f: PreActResNet([int(w * f) for w in (16, 32, 64)]),
    ),
    Entry("weight_standardization", BiT, images(), narrow=lambda f: BiT(width_factor=f)),
    Entry("res2net", Res2Net, images(), narrow=lambda f: Res2Net(int(24 * f), int(32 * f))),
    Entry("cbam", lambda: AttentiveCNN(CBAM), images()),
    Entry("eca", lambda: AttentiveCNN(ECA), images()),
    Entry("selective_kernel", SKNet, images(), narrow=lambda f: SKNet(int(16 * f))),
]  # fmt: skip
