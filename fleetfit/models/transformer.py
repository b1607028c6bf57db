"""Shared parts of token models: families of encoders, attention, blocks, classifiers, initial parameters."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Axis, State
from fleetfit.models.family import Family, FamilyModule, MakeNorm
from fleetfit.models.pretrained import TensorNames, read_tensors

Heads = Literal["whole", "fixed"]
"""The parts that width cuts: whole heads, or the channels of each, with their number fixed."""
HeadKind = Literal["linear", "pooler", "norm"]
"""The layer before a classifier's linear one: none, a linear one with tanh (BERT's pooler), or a norm (ViT's)."""
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_HEAD_SIZE = 64  # channels per head of every BERT and DeiT: the default


@dataclass(frozen=True)
class Encoder:
    """The sizes and the arithmetic of a stack of equal blocks.

    Attributes:
        hidden: Width of the stream.
        layers: Blocks.
        attention_heads: Heads of the full model.
        head_size: Channels per head of the full model.
        intermediate: Width inside the MLP.
        heads: "whole": a narrower model has fewer heads. "fixed": it has all heads, with fewer channels each.
        dropout: Share dropped after embeddings, attention and MLP.
        attention_dropout: Share of attention weights dropped.
        eps: Of the layer norms.
        activation: Of the MLP.
        bias: Whether query, key and value have biases.
        norm_first: Norms before attention and MLP (ViT), or after the sums (BERT).
    """

    hidden: int
    layers: int
    attention_heads: int
    head_size: int
    intermediate: int
    heads: Heads
    dropout: float
    attention_dropout: float
    eps: float
    activation: str
    bias: bool
    norm_first: bool

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "attention_heads", "head_size", "intermediate"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}.", key=name)
        if self.heads not in ("whole", "fixed"):
            raise ModelError(f'heads must be "whole" or "fixed", got {self.heads!r}.', key="heads")
        if self.activation not in _ACTIVATIONS:
            raise ModelError(
                f'the activation must be one of {", ".join(_ACTIVATIONS)}, got "{self.activation}".', key="activation"
            )

    def axes(self, granule: int = 1) -> dict[str, Axis]:
        """Return the axes that all blocks share: hidden, attention (or head) and mlp.

        Args:
            granule: Of hidden and mlp.
        """
        if self.heads == "whole":
            attention = {"attention": Axis(self.attention_heads * self.head_size, granule=self.head_size)}
        else:
            attention = {"head": Axis(self.head_size)}
        return {"hidden": Axis(self.hidden, granule), **attention, "mlp": Axis(self.intermediate, granule)}

    @property
    def size_dependent(self) -> str:
        """Why a narrow model differs from the masked full model, if it does."""
        return "" if self.heads == "whole" else "attention is divided by the root of the head size, which width cuts"

    def heads_at(self, axes: Mapping[str, int]) -> tuple[int, int]:
        """Return the number of heads of a model with these sizes, and the channels of each."""
        if self.heads == "whole":
            return axes["attention"] // self.head_size, self.head_size
        return self.attention_heads, axes["head"]

    def config(self, axes: Mapping[str, int], layers: int) -> dict[str, Any]:
        """Return the entries of a checkpoint's config.json for a model of these sizes and number of blocks."""
        return {
            "hidden_size": axes["hidden"],
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads_at(axes)[0],
            "intermediate_size": axes["mlp"],
            "hidden_act": self.activation,
            "hidden_dropout_prob": self.dropout,
            "attention_probs_dropout_prob": self.attention_dropout,
            "layer_norm_eps": self.eps,
        }


class Attention(nn.Module):
    """Multi-head self-attention; query, key and value are layers of their own."""

    def __init__(self, encoder: Encoder, axes: Mapping[str, int]) -> None:
        super().__init__()
        self.head_size = encoder.head_size if encoder.heads == "whole" else axes["head"]
        width = axes["attention"] if encoder.heads == "whole" else encoder.attention_heads * self.head_size
        self.query = nn.Linear(axes["hidden"], width, bias=encoder.bias)
        self.key = nn.Linear(axes["hidden"], width, bias=encoder.bias)
        self.value = nn.Linear(axes["hidden"], width, bias=encoder.bias)
        self.out = nn.Linear(width, axes["hidden"])
        self.dropout = encoder.attention_dropout

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return [B, tokens, hidden].

        Args:
            x: Tokens [B, tokens, hidden].
            visible: Mask of visible tokens, bool [B, 1, 1, tokens]; all by default.
        """
        query, key, value = self._project(x)
        mixed = attend(query, key, value, visible, self.dropout if self.training else 0.0)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return query, key and value [B, heads, tokens, head_size]: one product where training computes in bf16."""
        layers = (self.query, self.key, self.value)
        if _is_bf16_training(x) and all(type(layer) is nn.Linear for layer in layers):  # LoRA replaces the layers
            weight = torch.cat([layer.weight for layer in layers])
            bias = None if self.query.bias is None else torch.cat([layer.bias for layer in layers])
            stacked = F.linear(x, weight, bias).unflatten(-1, (3, -1, self.head_size))
            return stacked.permute(2, 0, 3, 1, 4).unbind(0)
        return tuple(layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in layers)


def _is_bf16_training(x: Tensor) -> bool:
    """Return whether training computes products of matrices in bf16 on a CPU, where conversions take time."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, share: float) -> Tensor:
    """Return scaled dot-product attention [B, heads, tokens, head_size], a share of its weights dropped.

    Training in bf16 on a CPU has its own steps: products in bf16, the softmax in fp32. The backward pass of torch's
    kernel there is five times slower in bf16 than in fp32.
    """
    if not _is_bf16_training(query):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=share)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    if visible is not None:  # a sample without visible tokens attends to zeros
        scores, value = scores.masked_fill(~visible, _UNSEEN), value.masked_fill(~visible.transpose(-1, -2), 0.0)
    weights = scores.softmax(-1)
    return torch.matmul(dropout(weights, share) if share else weights, value)


_UNSEEN = -1e30
_STEPS = 2**16


def dropout(x: Tensor, share: float) -> Tensor:
    """Drop a share of the elements, in steps of 1/65,536, and scale up the others, as `F.dropout` does in training.

    Four elements' chances come from one random number: torch draws one for each, which takes a fourth of a training
    step of a small BERT.
    """
    below, count = round(share * _STEPS), x.numel()
    if not 0 < below < _STEPS or abs(below / _STEPS - share) > 0.01 * share or not x.is_contiguous():
        return F.dropout(x, share)
    numbers = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    mask = (numbers[:count] >= below - _STEPS // 2).view(x.shape)
    return x * (mask * torch.tensor(_STEPS / (_STEPS - below), dtype=x.dtype))


class Mlp(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, hidden: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden] of [..., hidden]."""
        return self.fc2(self.activation(self.fc1(x)))


class Block(nn.Module):
    """Attention and a two-layer MLP, each with a residual sum and a layer norm."""

    def __init__(self, encoder: Encoder, axes: Mapping[str, int]) -> None:
        super().__init__()
        hidden, inner = axes["hidden"], axes["mlp"]
        self.norm1 = nn.LayerNorm(hidden, eps=encoder.eps)
        self.attention = Attention(encoder, axes)
        self.norm2 = nn.LayerNorm(hidden, eps=encoder.eps)
        self.mlp = Mlp(hidden, inner, encoder.activation)
        self.drop = nn.Dropout(encoder.dropout)
        self.norm_first = encoder.norm_first

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """Return tokens [B, tokens, hidden]; the arguments are those of `Attention`."""
        if self.norm_first:
            x = x + self.drop(self.attention(self.norm1(x), visible))
            return x + self.drop(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop(self.attention(x, visible)))
        return self.norm2(x + self.drop(self.mlp(x)))


class TokenHead(nn.Module):
    """A classifier on the class token.

    Attributes:
        kind: The layer before its linear one.
    """

    def __init__(self, kind: HeadKind, hidden: int, classes: int, norm: MakeNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        if kind == "norm":
            self.norm = norm(hidden)
        elif kind == "pooler":
            self.pooler = nn.Linear(hidden, hidden)
        self.fc, self.drop = nn.Linear(hidden, classes), nn.Dropout(dropout)

    def forward(self, token: Tensor) -> Tensor:
        """Return logits [B, classes] of class tokens [B, hidden]."""
        if self.kind == "norm":
            token = self.norm(token)
        elif self.kind == "pooler":
            token = self.pooler(token).tanh()
        return self.fc(self.drop(token))


def check_head(kind: str) -> None:
    """Check the kind of the classifiers.

    Raises:
        ModelError: The kind is unknown.
    """
    if kind not in get_args(HeadKind):
        raise ModelError(f'head must be "linear", "pooler" or "norm", got {kind!r}.', key="head")


def initialize(module: nn.Module, std: float = 0.02) -> None:
    """Draw initial parameters as BERT and ViT do: normal, truncated at two deviations; biases zero.

    By inverting the distribution function: `nn.init.trunc_normal_` takes ten times as long.

    Args:
        module: Its matrices, kernels, tables and single tokens are drawn; norms stay at one and zero.
        std: Standard deviation.
    """
    norms = {
        id(p) for layer in module.modules() if isinstance(layer, nn.LayerNorm | nn.RMSNorm) for p in layer.parameters()
    }
    for parameter in module.parameters():
        if parameter.is_meta or id(parameter) in norms:
            continue
        if parameter.dim() > 1:
            quantiles = parameter.data.uniform_(-math.erf(2**0.5), math.erf(2**0.5))  # the mass within two deviations
            quantiles.erfinv_().mul_(std * 2**0.5)
        else:
            nn.init.zeros_(parameter)


def make_embedding(rows: int, columns: int) -> nn.Embedding:
    """Return an embedding whose values are not drawn yet: drawing them twice takes time at full size."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


# ---- families of encoders --------------------------------------------------------------------------------------------


class TokenModule(FamilyModule):
    """A module whose classifiers look at the class token."""

    stem_name = "embeddings"

    def head(self, i: int, carry: Any) -> Tensor:
        """Return the logits [B, classes] of exit i."""
        return super().head(i, self.token(carry))


class EncoderFamily(Family):
    """A family of equal blocks of attention and MLP, new or from a checkpoint.

    Attributes:
        tensor_names: Our names, and those of a checkpoint.
        prefixes: Prefixes of names in a checkpoint.
        checkpoint_head: The kind of classifier that a checkpoint has.
    """

    tensor_names: TensorNames
    prefixes: ClassVar[tuple[str, ...]]
    checkpoint_head: ClassVar[HeadKind]
    encoder: Encoder
    head: HeadKind
    checkpoint: str | None
    whole_depth: bool

    def __post_init__(self) -> None:
        check_head(self.head)
        object.__setattr__(self, "blocks", self.encoder.layers)
        object.__setattr__(self, "size_dependent", self.encoder.size_dependent)
        super().__post_init__()

    def pretrained(self, exits: tuple[int, ...]) -> State:
        """Return the checkpoint's tensors by our names; those of its classifier only at full depth."""
        if self.checkpoint is None:
            return {}
        has_head = self.whole_depth and self.head == self.checkpoint_head
        heads = self.tensor_names.map_head(self.blocks) if has_head else {}
        return read_tensors(
            self.checkpoint, self.tensor_names.map_trunk(self.blocks) | heads, self.prefixes, optional=heads
        )

    def _make_axes(self) -> dict[str, Axis]:
        return self.encoder.axes()

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        return Block(self.encoder, axes)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        return TokenHead(self.head, axes["hidden"], axes["classes"], partial(nn.LayerNorm, eps=self.encoder.eps))

    def _initialize(self, module: nn.Module) -> None:
        initialize(module)


# ---- sizes, from a checkpoint or from keys -------------------------------------------------------------------------

_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_CONFIG = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "depth": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "intermediate": "intermediate_size",
}  # keys of a model section, and their names in a Hugging Face config.json


def build_encoder(
    config: Mapping[str, Any] | None,
    keys: Mapping[str, int | None],
    heads: Heads,
    dropout: float | None,
    defaults: Mapping[str, Any],
) -> Encoder:
    """Return the encoder of a checkpoint's config, or of keys.

    Args:
        config: The config.json of a checkpoint, if there is one.
        keys: hidden, layers or depth, attention_heads and intermediate; None for the default.
        heads: Which heads a narrower model keeps.
        dropout: All dropouts, or None for the checkpoint's or the default ones.
        defaults: The family's `dropout`, `attention_dropout`, `eps` and `norm_first`.

    Raises:
        ModelError: Keys contradict the checkpoint, or the heads do not divide the width.
    """
    for key, value in keys.items():
        if value is not None and value < 1:
            raise ModelError(f"{key} must be at least 1, got {value}.", key=key)
    sizes = _read_sizes(keys) if config is None else _read_config_sizes(config, keys)
    config = config or {}
    head_size = config.get("head_dim") or sizes["hidden"] // sizes["attention_heads"]
    if "head_dim" not in config and sizes["hidden"] % sizes["attention_heads"]:
        raise ModelError(
            f"hidden must be a multiple of attention_heads, got {sizes['hidden']} and {sizes['attention_heads']}.",
            key="hidden",
        )
    dropouts = (
        config.get("hidden_dropout_prob", defaults["dropout"]),
        config.get("attention_probs_dropout_prob", defaults["attention_dropout"]),
    )
    if dropout is not None:
        dropouts = (dropout, dropout)
    return Encoder(
        **sizes,
        head_size=int(head_size),
        heads=heads,
        dropout=float(dropouts[0]),
        attention_dropout=float(dropouts[1]),
        eps=float(config.get("layer_norm_eps", defaults["eps"])),
        activation=str(config.get("hidden_act", "gelu")),
        bias=bool(config.get("qkv_bias", True)),
        norm_first=defaults["norm_first"],
    )


def _read_sizes(keys: Mapping[str, int | None]) -> dict[str, int]:
    hidden = keys["hidden"] or _SIZES["hidden_size"]
    return {
        "hidden": hidden,
        "layers": keys.get("layers") or keys.get("depth") or _SIZES["num_hidden_layers"],
        "attention_heads": keys["attention_heads"] or max(1, hidden // _HEAD_SIZE),
        "intermediate": keys["intermediate"] or 4 * hidden,
    }


def _read_config_sizes(config: Mapping[str, Any], keys: Mapping[str, int | None]) -> dict[str, int]:
    sizes = {entry: int(config.get(entry, default)) for entry, default in _SIZES.items()}
    for key, value in keys.items():
        entry = _CONFIG[key]
        if value is None or value == sizes[entry]:
            continue
        may_be_less = entry == "num_hidden_layers"
        if not may_be_less or value > sizes[entry]:
            raise ModelError(
                f"{key} = {value} contradicts the checkpoint, whose {entry} is {sizes[entry]}. Leave {key} out"
                + (", or take fewer." if may_be_less else "."),
                key=key,
            )
        sizes[entry] = value
    return dict(zip(("hidden", "layers", "attention_heads", "intermediate"), sizes.values(), strict=True))
