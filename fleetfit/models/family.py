"""A family of models built from a stem, blocks and classifiers, and the shared layers of image models."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.anatomy import Architecture, Axis, Carry, ExitModel
from fleetfit.errors import ModelError
from fleetfit.factories import declare_unused

# ---- families --------------------------------------------------------------------------------------------------------


class FamilyModule(ExitModel):
    """The module of one sub-model; its names are those of the full model."""

    stem_name: ClassVar[str] = "stem"

    def __init__(self, family: "Family", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        self.register_module(self.stem_name, family._build_stem(axes))
        self.blocks = nn.ModuleList(family._build_block(axes, i) for i in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): family._build_head(axes, e) for e in exits})
        family._initialize(self)

    def start(self, x: Tensor) -> Carry:
        """Return the stem's output for samples [B, ...], or the samples without a stem."""
        stem = getattr(self, self.stem_name)
        return x if stem is None else stem(x)


class Family(Architecture):
    """A model family that is built part by part.

    A family is a frozen dataclass with the field `classes`. It has the number of its `blocks`, makes its axes and
    builds its parts, each from the size of every axis and the number of a block, or of blocks before a classifier.
    """

    module_class: ClassVar[type[FamilyModule]] = FamilyModule
    axes: Mapping[str, Axis]
    blocks: int
    classes: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", {**self._make_axes(), "classes": Axis(self.classes, scaled=False)})

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return self.module_class(self, axes, exits)

    def _make_axes(self) -> dict[str, Axis]:
        raise NotImplementedError

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module | None:
        return None

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        raise NotImplementedError

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        raise NotImplementedError

    def _initialize(self, module: nn.Module) -> None:
        """Draw the initial weights of a whole module; by default they are PyTorch's."""


# ---- families of convolutions ----------------------------------------------------------------------------------------

Norm = Literal["batch", "group"]
MakeNorm = Callable[[int], nn.Module]
"""Makes the norm of a number of channels."""
needs_group_norm = declare_unused("group", when=lambda values: values["norm"] == "batch", reason='norm is "batch"')
"""Decorator of the families whose `group` is that of the group norm."""


class ConvFamily(Family):
    """A family of convolutions with norms: `norm` is "batch" or "group", `group` the channels per group."""

    norm: Norm
    group: int

    @property
    def granule(self) -> int:
        """Channels that are kept or cut together: one with batch norm, a whole group with group norm.

        Raises:
            ModelError: The norm is unknown or the group empty.
        """
        if self.norm not in ("batch", "group"):
            raise ModelError(f'norm must be "batch" or "group", got {self.norm!r}.', key="norm")
        if self.group < 1:
            raise ModelError(
                f"group (channels per group of the group norm) must be at least 1, got {self.group}.", key="group"
            )
        return self.group if self.norm == "group" else 1

    def make_norm(self, channels: int) -> nn.Module:
        """Return batch norm, or group norm with a fixed number of channels per group, so that groups can be cut."""
        if self.norm == "batch":
            return nn.BatchNorm2d(channels)
        return nn.GroupNorm(channels // self.group, channels)

    def _initialize(self, module: nn.Module) -> None:
        initialize_kaiming(module)


def conv_norm_relu(
    before: int, after: int, kernel: int, stride: int = 1, norm: MakeNorm = nn.BatchNorm2d
) -> list[nn.Module]:
    """Return a convolution that keeps the map's size but for its stride, a norm and a ReLU, to put into a sequence."""
    return [
        nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False),
        norm(after),
        nn.ReLU(inplace=True),
    ]


def halve(x: Tensor) -> Tensor:
    """Return 2x2 max pooling of images [B, C, height, width], each side halved and rounded down.

    PyTorch's kernel for images with channels first notes where each maximum was and takes eight to thirty times as long
    as the largest of each two neighbors, twice. The numbers are the same; only training needs to know where.
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
        norm: MakeNorm = nn.BatchNorm2d,
        dropout: float = 0.0,
        inner: int | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for _ in range(layers):
            after = inner or channels
            steps += conv_norm_relu(channels, after, 3, stride, norm)
            channels = after
        self.body = nn.Sequential(*steps)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes] of feature maps [B, channels, height, width]."""
        return self.fc(self.drop(self.body(x).mean((2, 3))))


def initialize_kaiming(module: nn.Module) -> None:
    """Draw initial weights as He et al. (2015): normal by fan-in for convolutions and linear layers, biases zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear) and not layer.weight.is_meta:  # normal_ on meta imports for 1.5 s
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
