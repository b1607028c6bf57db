"""A plain CNN: every block has channels of its own, and its classifiers flatten what they see.

    fleetfit check-model examples/plain_cnn.py:PlainCnn --input-shape 1,8,8
    fleetfit run --set model.name=examples/plain_cnn.py:PlainCnn

In the flatten each channel owns the four neighbors that are left of its map; a forward pass shows it.
"""

from torch import nn

from fleetfit.architecture import Architecture, Axis, ExitModel


class Net(ExitModel):
    def __init__(self, before, widths, classes, exits):
        super().__init__()
        self.exits = exits
        self.blocks = nn.ModuleList()
        for after in widths[: exits[-1]]:
            self.blocks.append(nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()))
            before = after
        self.heads = nn.ModuleDict({str(e): self.head_of(widths[e - 1], classes) for e in exits})

    def head_of(self, channels, classes):
        return nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * channels, classes))

    def start(self, x):
        return x


class PlainCnn(Architecture):
    def __init__(self, classes, channels, widths=(16, 20, 24, 28, 32)):
        self.channels, self.blocks = channels, len(widths)
        self.axes = {f"conv{i}": Axis(n, block=i) for i, n in enumerate(widths)} | {
            "classes": Axis(classes, scaled=False)
        }

    def build(self, axes, exits):
        return Net(self.channels, [axes[f"conv{i}"] for i in range(self.blocks)], axes["classes"], exits)
