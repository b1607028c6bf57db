"""EfficientNet-B4 (Tan & Le, ICML 2019) as ScaleFL (CVPR 2023, 4.1) builds it, for 224x224 images: 32 blocks.

Inverted residual blocks with squeeze and excite to a quarter of a block's input, swish, drop-connect and dropout. With
exits after blocks 22, 26 and 30 (stages 5, 6 and 7) and widths 0.75, 0.75 and 0.82 it has the parameters and
multiply-adds of ScaleFL's Table 8, which prints 0.65, 0.65 and 0.82. An early exit is three 3x3 convolutions with norm
and ReLU and a sixth of the stream's channels, global average pooling and a linear layer; it may sit after any block.

Differs from the paper (Tan & Le), because ScaleFL's sizes need it: a stem of 32 channels instead of 48, the stage of
272 channels split in two with stride 2 both times (so the last map is 64 times smaller than the image, not 32), and no
convolution of 1792 channels before the classifier. Differs from ScaleFL's released code: dropout and drop-connect act
in training only.
"""

from fleetfit.models._inverted import Inverted, Stage
from fleetfit.models.blocks import Norm

_STAGES = (
    Stage(24, 2, 3, 1, 1),
    Stage(32, 4, 3, 2, 6),
    Stage(56, 4, 5, 2, 6),
    Stage(112, 6, 3, 2, 6),
    Stage(160, 6, 5, 1, 6),
    Stage(272, 4, 5, 2, 6),
    Stage(272, 4, 5, 2, 6),
    Stage(448, 2, 3, 1, 6),
)


def efficientnet_b4(
    classes: int = 1000,
    channels: int = 3,
    stride: int = 64,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.4,
    drop_connect: float = 0.2,
    head_layers: int = 3,
) -> Inverted:
    """Return the family of ScaleFL's EfficientNet-B4.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        stride: How many times smaller the last map is than the image, a power of two up to 64; less is for small
            images, and leaves out halvings from the first on.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before the last classifier.
        drop_connect: Share of samples whose branch is dropped in the last block; it grows from 0 with the block.
        head_layers: Convolutions in an early exit.

    Raises:
        ModelError: The stride is no power of two up to 64, the norm is unknown, or the group divides no stage.
    """
    return Inverted(
        classes,
        channels,
        stem=32,
        stages=_STAGES,
        multiplier=1.0,
        top=0,
        squeeze=4,
        activation="swish",
        norm=norm,
        group=group,
        stride=stride,
        dropout=dropout,
        drop_connect=drop_connect,
        head_layers=head_layers,
        tied=True,
    )
