"""A small DenseNet (Huang et al., CVPR 2017): each block's channels are put beside all that came before.

    fleetfit check-model examples/concatenation.py:DenseNet --input-shape 1,8,8
    fleetfit run --set model.name=examples/concatenation.py:DenseNet

Dimensions hold several axes side by side; a forward pass shows their order.
"""

import torch
from torch import nn
from torch.nn import functional as F

from fleetfit.architecture import Architecture, Axis, ExitModel


class Grow(nn.Module):
    """A norm and a convolution over all channels so far, whose own few are put behind them."""

    def __init__(self, before, own):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(before), nn.Conv2d(before, own, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], dim=1)


class Net(ExitModel):
    def __init__(self, channels, stem, grown, classes, exits):
        super().__init__()
        self.exits = exits
        self.stem = nn.Conv2d(channels, stem, 3, padding=1, bias=False)
        before = [stem + sum(grown[:i]) for i in range(exits[-1] + 1)]
        self.blocks = nn.ModuleList(Grow(before[i], grown[i]) for i in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): Classifier(before[e], classes) for e in exits})

    def start(self, x):
        return self.stem(x)


class Classifier(nn.Module):
    def __init__(self, before, classes):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm2d(before), nn.Linear(before, classes)

    def forward(self, x):
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


class DenseNet(Architecture):
    def __init__(self, classes, channels, stem=16, growth=12, blocks=5):
        self.channels, self.blocks = channels, blocks
        grown = {f"grow{i}": Axis(growth, block=i) for i in range(blocks)}
        self.axes = {"stem": Axis(stem), **grown, "classes": Axis(classes, scaled=False)}

    def build(self, axes, exits):
        grown = [axes[f"grow{i}"] for i in range(self.blocks)]
        return Net(self.channels, axes["stem"], grown, axes["classes"], exits)
