"""DeiT-Ti for images of 224x224: 12 blocks of width 192 with 3 heads, 5.7 M."""

from fleetfit.models._head import HeadKind
from fleetfit.models._transformer import Heads
from fleetfit.models.vit import Vit, vit


def deit_ti(
    classes: int = 1000,
    input_shape: tuple[int, ...] = (3, 224, 224),
    checkpoint: str | None = None,
    depth: int = 12,
    patch: int = 16,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "norm",
) -> Vit:
    """Return `vit` with the width and heads of DeiT-Ti; the arguments are explained there."""
    return vit(classes, input_shape, checkpoint, 192, depth, 3, 768, patch, dropout, heads, head)
