"""MSDNet-24 (Huang et al., ICLR 2018) as in ScaleFL (CVPR 2023): 24 layers, 3 scales, 16 channels, growth 6."""

from fleetfit.models.blocks import Norm
from fleetfit.models.msdnet import Msdnet, msdnet


def msdnet24(classes: int = 10, channels: int = 3, norm: Norm = "batch", group: int = 2) -> Msdnet:
    """Return `msdnet` with 24 layers; the arguments are explained there."""
    return msdnet(classes, channels, layers=24, norm=norm, group=group)
