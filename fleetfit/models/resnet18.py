"""ResNet-18 (He et al., CVPR 2016): 8 basic blocks in four stages of 64 to 512 channels, for small or large images."""

from fleetfit.models._resnet_four_stages import FourStages, Stem
from fleetfit.models.blocks import Norm


def resnet18(
    classes: int = 10,
    channels: int = 3,
    base: int = 64,
    stem: Stem = "small",
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.0,
    head_layers: int = 3,
) -> FourStages:
    """Return the family with two, two, two and two blocks in its stages.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        base: Channels of the first stage; the later ones have 2, 4 and 8 times as many.
        stem: "small" for images of about 32x32: a 3x3 convolution. "large" for 224x224: a 7x7 convolution with stride 2
            and 3x3 max pooling with stride 2.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before each linear layer.
        head_layers: Convolutions in an early exit.

    Raises:
        ModelError: The stem or norm is unknown, or the group does not divide the stages.
    """
    return FourStages(classes, channels, (2, 2, 2, 2), base, stem, norm, group, dropout, head_layers)
