"""Pieces that the convolutional models share: norms, classifiers, the initial weights."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import declare_unused

Norm = Literal["batch", "group"]
needs_group_norm = declare_unused("group", when=lambda values: values["norm"] == "batch", reason='norm is "batch"')
"""Decorator of the families whose `group` is that of the group norm."""


def norm_layer(norm: Norm, channels: int, group: int) -> nn.Module:
    """Return batch norm, or group norm with a fixed number of channels per group, so that whole groups can be cut.

    Args:
        norm: "batch" or "group".
        channels: Channels of the input.
        group: Channels per group, for group norm.
    """
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(channels // group, channels)


def granule_of(norm: str, group: int) -> int:
    """Return how many channels come and go together: one with batch norm, a whole group with group norm.

    Raises:
        ModelError: The norm is unknown or the group empty.
    """
    if norm not in ("batch", "group"):
        raise ModelError(f'norm must be "batch" or "group", got {norm!r}.', key="norm")
    if group < 1:
        raise ModelError(f"group (channels per group of the group norm) must be at least 1, got {group}.", key="group")
    return group if norm == "group" else 1


def conv_norm_relu(
    before: int, after: int, kernel: int, stride: int = 1, norm: Norm = "batch", group: int = 1
) -> list[nn.Module]:
    """Return a convolution that keeps the map's size but for its stride, a norm and a ReLU, to put into a sequence."""
    return [
        nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False),
        norm_layer(norm, after, group),
        nn.ReLU(inplace=True),
    ]


def halved(x: Tensor) -> Tensor:
    """Return 2x2 max pooling of images [B, C, height, width], each side halved and rounded down.

    PyTorch's kernel for images with channels first notes where each maximum was and takes eight to thirty times as long
    as the largest of each two neighbours, twice. The numbers are the same; only training needs to know where.
    """
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and min(x.shape[-2:]) > 1
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if traced or not plain or torch.is_grad_enabled():
        return F.max_pool2d(x, 2)
    height, width = x.shape[-2] // 2 * 2, x.shape[-1] // 2 * 2
    rows = torch.maximum(x[..., 0:height:2, :width], x[..., 1:height:2, :width])
    return torch.maximum(rows[..., 0::2], rows[..., 1::2])


class Head(nn.Module):
    """A classifier: `layers` times (3x3 convolution, norm, ReLU), global average pooling, dropout, a linear layer.

    ScaleFL 4.1 calls its early exits "a 3-layer CNN"; `layers=0` is the usual last classifier. The convolutions have
    `inner` channels (by default those of the input) and the given stride.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        layers: int = 0,
        norm: Norm = "batch",
        group: int = 1,
        dropout: float = 0.0,
        inner: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for _ in range(layers):
            after = inner or channels
            steps += conv_norm_relu(channels, after, 3, stride, norm, group)
            channels = after
        self.body = nn.Sequential(*steps)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of feature maps [B, channels, height, width]."""
        logits: Tensor = self.fc(self.drop(self.body(x).mean((2, 3))))
        return logits


def kaiming(module: nn.Module) -> None:
    """Draw initial weights as He et al. (2015): normal by fan-in for convolutions and linear layers, biases zero."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear) and not part.weight.is_meta:  # normal_ on meta imports for 1.5 s
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
