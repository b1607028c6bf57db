"""ResNet-20 for small images: 9 blocks in three stages of 16, 32 and 64 channels."""

from fleetfit.models.blocks import Norm
from fleetfit.models.resnet import ResNet, resnet


def resnet20(
    classes: int = 10,
    channels: int = 3,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.0,
    head_layers: int = 3,
) -> ResNet:
    """Return `resnet` with depth 20; the arguments are explained there."""
    return resnet(classes, channels, 20, norm, group, dropout, head_layers)
