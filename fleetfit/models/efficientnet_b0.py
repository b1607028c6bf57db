"""EfficientNet-B0 (Tan & Le, ICML 2019, Table 1) with the exits of ScaleFL's B4: 16 blocks, 224x224 or small images.

Inverted residual blocks with squeeze and excite to a quarter of a block's input, swish, drop-connect and dropout. An
early exit is three 3x3 convolutions with norm and ReLU and a sixth of the stream's channels, global average pooling and
a linear layer; it may sit after any block. With `top = 1280` and 1000 classes it has the paper's 5.29 M parameters.

Differs from the paper: by default there is no convolution of 1280 channels before the classifier, as in ScaleFL's B4.
"""

from fleetfit.models._inverted import Inverted, Stage
from fleetfit.models.blocks import Norm

_STAGES = (
    Stage(16, 1, 3, 1, 1),
    Stage(24, 2, 3, 2, 6),
    Stage(40, 2, 5, 2, 6),
    Stage(80, 3, 3, 2, 6),
    Stage(112, 3, 5, 1, 6),
    Stage(192, 4, 5, 2, 6),
    Stage(320, 1, 3, 1, 6),
)


def efficientnet_b0(
    classes: int = 10,
    channels: int = 3,
    multiplier: float = 1.0,
    stride: int = 32,
    top: int = 0,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.2,
    drop_connect: float = 0.2,
    head_layers: int = 3,
) -> Inverted:
    """Return the family of EfficientNet-B0.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        multiplier: Times the paper's channels, to multiples of 8, the last 1x1 convolution aside.
        stride: How many times smaller the last map is than the image, a power of two up to 32; 8 is good for 32x32
            images. Halvings are left out from the first on.
        top: Channels of a 1x1 convolution before the last classifier, 1280 in the paper; 0: there is none.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before the last classifier.
        drop_connect: Share of samples whose branch is dropped in the last block; it grows from 0 with the block.
        head_layers: Convolutions in an early exit.

    Raises:
        ModelError: The stride is no power of two up to 32, the norm is unknown, or the group divides no stage.
    """
    return Inverted(
        classes,
        channels,
        stem=32,
        stages=_STAGES,
        multiplier=multiplier,
        top=top,
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
