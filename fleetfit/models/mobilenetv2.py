"""MobileNetV2 (Sandler et al., CVPR 2018, Table 2): 17 inverted residual blocks, for small images or 224x224.

ReLU6, no squeeze and excite, a last 1x1 convolution of 1280 channels. An early exit, which may sit after any block, is
`head_layers` 3x3 convolutions with norm and ReLU and a sixth of the stream's channels, global average pooling and a
linear layer (as in ScaleFL's EfficientNet, CVPR 2023). 3.50 M parameters with 1000 classes, 2.24 M with ten.

Differs from the paper: by default the first two halvings are left out (`stride = 8`), for images of about 32x32.
"""

from fleetfit.models._inverted import Inverted, Stage
from fleetfit.models.blocks import Norm

_STAGES = (
    Stage(16, 1, 3, 1, 1),
    Stage(24, 2, 3, 2, 6),
    Stage(32, 3, 3, 2, 6),
    Stage(64, 4, 3, 2, 6),
    Stage(96, 3, 3, 1, 6),
    Stage(160, 3, 3, 2, 6),
    Stage(320, 1, 3, 1, 6),
)


def mobilenetv2(
    classes: int = 10,
    channels: int = 3,
    multiplier: float = 1.0,
    stride: int = 8,
    top: int = 1280,
    norm: Norm = "batch",
    group: int = 2,
    dropout: float = 0.2,
    head_layers: int = 3,
) -> Inverted:
    """Return the family of MobileNetV2.

    Args:
        classes: Classes; never cut.
        channels: Channels of the images; never cut.
        multiplier: Times the paper's channels, to multiples of 8, the last 1x1 convolution aside.
        stride: How many times smaller the last map is than the image, a power of two up to 32: 8 for 32x32 images, 32
            for 224x224. Halvings are left out from the first on.
        top: Channels of the 1x1 convolution before the last classifier; 0: there is none.
        norm: "batch" or "group".
        group: Channels per group of the group norm, which are kept or cut together.
        dropout: Share of features dropped before the last classifier.
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
        squeeze=0,
        activation="relu6",
        norm=norm,
        group=group,
        stride=stride,
        dropout=dropout,
        drop_connect=0.0,
        head_layers=head_layers,
        tied=False,
    )
