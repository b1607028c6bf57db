"""DeiT-S for images of 224x224: 12 blocks of width 384 with 6 heads, 22.1 M."""

from fleetfit.models._head import HeadKind
from fleetfit.models._transformer import Heads
from fleetfit.models.vit import Vit, vit


def deit_s(
    classes: int = 1000,
    input_shape: tuple[int, ...] = (3, 224, 224),
    checkpoint: str | None = None,
    depth: int = 12,
    patch: int = 16,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "norm",
) -> Vit:
    """Return `vit` with the width and heads of DeiT-S; the arguments are explained there."""
    return vit(classes, input_shape, checkpoint, 384, depth, 6, 1536, patch, dropout, heads, head)
