"""ResNet-34 (He et al., CVPR 2016): 16 basic blocks in four stages of 64 to 512 channels, for small or large images."""

from fleetfit.models._resnet_four_stages import FourStages, Stem
from fleetfit.models.blocks import Norm


def resnet34(
    classes: int = 10,
    channels: int = 3,
    base: int = 64,
    stem: Stem = "small",
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.0,
    head_layers: int = 3,
) -> FourStages:
    """Return the family with three, four, six and three blocks in its stages; see `resnet18`.

    The arguments are explained there.
    """
    return FourStages(classes, channels, (3, 4, 6, 3), base, stem, norm, group, dropout, head_layers)
