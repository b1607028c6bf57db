"""A model of Hugging Face `transformers`, made from its config: a ConvNeXt (Liu et al., CVPR 2022) of any size.

    fleetfit check-model examples/hugging_face_model.py:convnext --input-shape 1,8,8
    fleetfit run --set model.name=examples/hugging_face_model.py:convnext --set local.lr=0.05

The config takes its sizes from the axes, the library builds the model, and its layers become blocks. Nothing is loaded
or downloaded. An axis is one number in the config, so all layers of a stage share it.
"""

from torch import nn
from transformers import ConvNextConfig, ConvNextModel

from fleetfit.architecture import Architecture, Axis, ExitModel


class Classifier(nn.Module):
    def __init__(self, hidden, classes):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.fc(self.norm(x.mean((2, 3))))


class Net(ExitModel):
    """Embeddings, layers as blocks (the first of a stage with what halves the image), a classifier at each exit."""

    def __init__(self, config, classes, exits):
        super().__init__()
        self.exits = exits
        whole = ConvNextModel(config)
        blocks, hidden = [], []
        for stage, size in zip(whole.encoder.stages, config.hidden_sizes, strict=True):
            first, *others = stage.layers
            blocks += [nn.Sequential(*stage.downsampling_layer, first), *others]
            hidden += [size] * len(stage.layers)
        self.stem = whole.embeddings
        self.blocks = nn.ModuleList(blocks[: exits[-1]])  # a shallower model simply leaves the rest
        self.heads = nn.ModuleDict({str(e): Classifier(hidden[e - 1], classes) for e in exits})

    def start(self, x):
        return self.stem(x)


class ConvNext(Architecture):
    def __init__(self, classes, channels, hidden_sizes, depths):
        self.classes, self.channels, self.depths, self.blocks = classes, channels, depths, sum(depths)
        begins = [sum(depths[:i]) for i in range(len(depths))]
        self.axes = {f"stage{i}": Axis(n, block=begins[i]) for i, n in enumerate(hidden_sizes)}
        self.axes["classes"] = Axis(classes, scaled=False)

    def build(self, axes, exits):
        config = ConvNextConfig(
            num_channels=self.channels,
            hidden_sizes=[axes[f"stage{i}"] for i in range(len(self.depths))],
            depths=list(self.depths),
            num_stages=len(self.depths),
            patch_size=2,
            layer_scale_init_value=0.1,
        )
        return Net(config, axes["classes"], exits)


def convnext(
    classes: int, channels: int, hidden_sizes: tuple[int, ...] = (20, 28), depths: tuple[int, ...] = (3, 4)
) -> ConvNext:
    """Make the family; annotations are checked against the keys of a run file."""
    return ConvNext(classes, channels, hidden_sizes, depths)
