"""Vision transformer (ViT, DeiT) of any size, new or from a Hugging Face folder, with the exits of ReeFL.

Dosovitskiy et al., ICLR 2021; Touvron et al., ICML 2021. Square patches, a class token, learned positions, then blocks
of attention and MLP with the norms before them. A classifier may sit after any block: layer norm and a linear layer on
the class token; the last exit has the final norm and the classifier of the checkpoint, where it has them. With `head =
"pooler"` classifiers have a linear layer and tanh instead of the norm, with "linear" neither; both begin anew. A
checkpoint made for other image sizes gets its position table resized (bicubic); one for color reads gray images as if
repeated.

With `heads = "fixed"` a narrower model keeps all heads and makes them smaller, with the rounding of ReeFL's ScaleFL
(ICML 2024): floor for stream and MLP, attention up to a multiple of the heads (153 and 156 of 384 at width 0.4).

Differs from DeiT's training: no stochastic depth. A distilled DeiT keeps its second token but not its second
classifier: where it has two, all classifiers begin anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.anatomy import State, default_sizes
from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.models.pretrained import Checkpoint, TensorNames, read_config
from fleetfit.models.transformer import Encoder, EncoderFamily, HeadKind, Heads, TokenModule, build_encoder

_DEFAULTS = {"dropout": 0.0, "attention_dropout": 0.0, "eps": 1e-12, "norm_first": True}
_STEM = {
    "embeddings.patches": ("embeddings.patch_embeddings.projection",),
    "embeddings.class_token": ("embeddings.cls_token",),
    "embeddings.positions": ("embeddings.position_embeddings",),
}
_DISTILLATION_TOKEN = {"embeddings.distillation_token": ("embeddings.distillation_token",)}
_BLOCK = {  # in transformers 4 and 5
    "attention.query": ("encoder.layer.{}.attention.attention.query", "layers.{}.attention.q_proj"),
    "attention.key": ("encoder.layer.{}.attention.attention.key", "layers.{}.attention.k_proj"),
    "attention.value": ("encoder.layer.{}.attention.attention.value", "layers.{}.attention.v_proj"),
    "attention.out": ("encoder.layer.{}.attention.output.dense", "layers.{}.attention.o_proj"),
    "norm1": ("encoder.layer.{}.layernorm_before", "layers.{}.layernorm_before"),
    "norm2": ("encoder.layer.{}.layernorm_after", "layers.{}.layernorm_after"),
    "mlp.fc1": ("encoder.layer.{}.intermediate.dense", "layers.{}.mlp.fc1"),
    "mlp.fc2": ("encoder.layer.{}.output.dense", "layers.{}.mlp.fc2"),
}
_HEAD = {"norm": ("layernorm",), "fc": ("classifier",)}


class PatchEmbeddings(nn.Module):
    """Patches as tokens behind a class token (and a distillation token), positions, dropout."""

    def __init__(self, family: "Vit", hidden: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(family.image[0], hidden, family.patch, stride=family.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, hidden)) if family.distilled else None
        self.positions = nn.Parameter(torch.zeros(1, family.token_count, hidden))
        self.drop = nn.Dropout(family.encoder.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, tokens, hidden] of images [B, channels, height, width]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        first = [self.class_token] if self.distillation_token is None else [self.class_token, self.distillation_token]
        tokens = torch.cat([*(token.expand(x.shape[0], -1, -1) for token in first), patches], dim=1)
        return self.drop(tokens + self.positions)


class VitModule(TokenModule):
    """A module of patches."""

    embeddings: PatchEmbeddings


@dataclass(frozen=True)
class Vit(EncoderFamily):
    """The family of one set of sizes; made by `vit`, which explains the fields."""

    module_class = VitModule
    prefixes = ("vit.", "deit.")
    checkpoint_head = "norm"
    encoder: Encoder
    classes: int
    image: tuple[int, int, int]
    patch: int
    distilled: bool
    head: HeadKind
    checkpoint: str | None
    whole_depth: bool

    def __post_init__(self) -> None:
        stem = _STEM | (_DISTILLATION_TOKEN if self.distilled else {})
        object.__setattr__(self, "tensor_names", TensorNames(stem, _BLOCK, _HEAD))
        super().__post_init__()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[1] // self.patch, self.image[2] // self.patch

    @property
    def token_count(self) -> int:
        """Number of tokens: patches, the class token and the distillation token."""
        return self.grid[0] * self.grid[1] + 1 + self.distilled

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis; fixed heads have ceil(hidden / heads) channels each, at most all."""
        sizes = default_sizes(self.axes, width)
        if self.encoder.heads == "fixed":
            sizes["head"] = min(self.encoder.head_size, -(-sizes["hidden"] // self.encoder.attention_heads))
        return sizes

    def pretrained(self, exits: tuple[int, ...]) -> State:
        """Return the checkpoint's tensors by our names, with kernels and positions that fit our images."""
        state = dict(super().pretrained(exits))
        if not state:
            return state
        kernel, positions = state["embeddings.patches.weight"], state["embeddings.positions"]
        if self.image[0] == 1 != kernel.shape[1]:
            state["embeddings.patches.weight"] = kernel.sum(1, keepdim=True)  # as if gray were repeated in each color
        if positions.shape[1] != self.token_count:
            state["embeddings.positions"] = _resize_positions(positions, 1 + self.distilled, self.grid)
        return state

    def to_checkpoint(self, sizes: Mapping[str, int], last: int, state: State) -> Checkpoint:
        """Return a sub-model with its last exit only, in the form of `ViTForImageClassification` or DeiT's.

        Args:
            sizes: Size of each axis.
            last: Block count of the last exit.
            state: The tensors of a module with these sizes and that exit.

        Raises:
            ModelError: Its classifier is of another kind.
        """
        if self.head != "norm":
            raise ModelError(
                f'its [model] head is "{self.head}", but a ViT in transformers has a norm before its classifier.',
                key="head",
            )
        channels, height, width = self.image
        heads, size = self.encoder.heads_at(sizes)
        config = {
            "model_type": "deit" if self.distilled else "vit",
            "architectures": ["DeiTForImageClassification" if self.distilled else "ViTForImageClassification"],
            **self.encoder.config(sizes, last),
            "qkv_bias": self.encoder.bias,
            "image_size": height if height == width else [height, width],
            "patch_size": self.patch,
            "num_channels": channels,
        }
        if heads * size != sizes["hidden"]:
            config["head_dim"] = size  # transformers 5; 4 has none, and opens only what does without
        return Checkpoint(config, self.tensor_names.rename(state, last, f"{config['model_type']}."))

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        return PatchEmbeddings(self, axes["hidden"])


def _resize_positions(positions: Tensor, first: int, grid: tuple[int, int]) -> Tensor:
    """Resize a square grid of positions [1, first + side^2, hidden], without the first tokens, to another grid."""
    side = round((positions.shape[1] - first) ** 0.5)
    if side * side != positions.shape[1] - first:
        raise ModelError(
            f"the checkpoint's {positions.shape[1]} positions are not a square grid, so they cannot be resized."
        )
    old = positions[:, first:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
    new = F.interpolate(old, size=grid, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :first], new.flatten(2).transpose(1, 2)], dim=1)


def vit(
    classes: int = 1000,
    input_shape: tuple[int, ...] = (3, 224, 224),
    checkpoint: str | None = None,
    hidden: int | None = None,
    depth: int | None = None,
    attention_heads: int | None = None,
    intermediate: int | None = None,
    patch: int | None = None,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "norm",
) -> Vit:
    """Return a ViT family; ViT-B with patches of 16 by default.

    Args:
        classes: Classes; never cut.
        input_shape: (channels, height, width) of the images.
        checkpoint: A Hugging Face folder (config.json, model.safetensors) that gives sizes and initial weights.
        hidden: Width of the stream; 768 by default. With a checkpoint, only its sizes are accepted.
        depth: Blocks; 12 by default. With a checkpoint, at most its number of blocks, the first ones.
        attention_heads: Heads; one per 64 channels by default.
        intermediate: Width inside the MLP; four times `hidden` by default.
        patch: Side of a patch, which must divide height and width; 16 by default.
        dropout: Share dropped everywhere; the checkpoint's or 0 by default.
        heads: Width cuts "whole" heads, or the channels of each head, with their number "fixed".
        head: Kind of the classifiers: ViT's "norm", a "pooler" with tanh, or nothing before their "linear" layer.

    Raises:
        ModelError: Sizes do not fit each other, the images or the checkpoint.
    """
    config = None if checkpoint is None else read_config(checkpoint, ("vit", "deit"))
    sizes = {"hidden": hidden, "depth": depth, "attention_heads": attention_heads, "intermediate": intermediate}
    encoder = build_encoder(config, sizes, heads, dropout, _DEFAULTS)
    config = config or {}
    patch = _choose_patch(config, patch)
    return Vit(
        encoder,
        classes,
        _check_image(input_shape, patch, config.get("num_channels")),
        patch,
        distilled=config.get("model_type") == "deit",
        head=head,
        checkpoint=checkpoint,
        whole_depth=encoder.layers == int(config.get("num_hidden_layers", encoder.layers)),
    )


def _choose_patch(config: Mapping[str, Any], patch: int | None) -> int:
    """Return the side of a patch, of the checkpoint or of the key."""
    size = config.get("patch_size", 16)
    sides = set(size) if isinstance(size, list) else {size}
    if len(sides) != 1:
        raise ModelError(f"the checkpoint's patches are {size}, but only square ones are supported.")
    side = int(sides.pop())
    if patch is not None and config and patch != side:
        raise ModelError(
            f"patch = {patch} contradicts the checkpoint's patch_size {side}. Leave patch out.", key="patch"
        )
    return side if patch is None else patch


def _check_image(shape: tuple[int, ...], patch: int, channels: int | None) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ModelError(
            f"a ViT takes images (channels, height, width), got samples of shape {shape}.", key="input_shape"
        )
    if patch < 1 or shape[1] % patch or shape[2] % patch:
        raise ModelError(
            f"patches of {patch} do not divide images of {shape[1]}x{shape[2]}. Set [model] patch, or resize the data.",
            key="patch",
        )
    if channels not in (None, shape[0]) and shape[0] != 1:
        raise ModelError(
            f"the checkpoint takes images of {channels} channels, but these have {shape[0]}.", key="input_shape"
        )
    return shape[0], shape[1], shape[2]


def _make_deit(hidden: int) -> dict[str, int]:
    return {"hidden": hidden, "attention_heads": hidden // 64, "intermediate": 4 * hidden}


_DEIT = {"depth": 12, "patch": 16}
SIZES = {
    "deit_ti": Preset(
        "DeiT-Ti for images of 224x224: 12 blocks of width 192 with 3 heads, 5.7 M.", _make_deit(192), _DEIT
    ),
    "deit_s": Preset(
        "DeiT-S for images of 224x224: 12 blocks of width 384 with 6 heads, 22.1 M.", _make_deit(384), _DEIT
    ),
    "deit_b": Preset(
        "DeiT-B for images of 224x224: 12 blocks of width 768 with 12 heads, 86.6 M.", _make_deit(768), _DEIT
    ),
}
deit_ti, deit_s, deit_b = make_presets(vit, SIZES)
