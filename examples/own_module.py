"""A plain CNN, as it would be without FleetFit: no base class, its sizes are numbers in the code.

    fleetfit check-model examples/own_module.py:Net --input-shape 1,8,8
    fleetfit run examples/own_module.toml

FleetFit finds the channels of each layer and the blocks after which a classifier may sit.
"""

from torch import nn


class Net(nn.Module):
    def __init__(self, classes, channels):
        super().__init__()
        self.stem = self.convolution(channels, 16)
        self.blocks = nn.Sequential(*(self.convolution(16 + 4 * i, 20 + 4 * i) for i in range(5)))
        self.classifier = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * 36, classes))

    def convolution(self, before, after):
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x):
        return self.classifier(self.blocks(self.stem(x)))
