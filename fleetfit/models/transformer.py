"""What models of tokens share: attention, the encoder block, its axes, the classifiers, how parameters begin."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.layout import Axis, Declaration, blocked

Heads = Literal["whole", "fixed"]
"""What width cuts: whole heads, or the channels of each, with their number fixed."""
HeadKind = Literal["linear", "pooler", "norm"]
"""What stands before a classifier's linear layer: nothing, a layer with tanh (BERT's pooler), or a norm (ViT's)."""
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_HEAD_SIZE = 64  # channels per head of every BERT and DeiT, where the number of heads is not said
_PROJECTIONS = ("query", "key", "value")


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

    def declared(self) -> Mapping[str, Declaration]:
        """Return what growth cannot tell: with fixed heads, a channel of the axis is one channel of each head."""
        if self.heads == "whole":
            return {}
        stacked = blocked(self.attention_heads, dim=0)
        return {
            **{f"*.attention.{name}.*": stacked for name in _PROJECTIONS},
            "*.attention.out.weight": blocked(self.attention_heads, dim=1),
        }

    @property
    def size_dependent(self) -> str:
        """Why a narrow model computes something else than the masked full one, if it does."""
        return "" if self.heads == "whole" else "attention is divided by the root of the head's size, which width cuts"

    def heads_at(self, axes: Mapping[str, int]) -> tuple[int, int]:
        """Return how many heads a model of these sizes has, and the channels of each."""
        if self.heads == "whole":
            return axes["attention"] // self.head_size, self.head_size
        return self.attention_heads, axes["head"]

    def config(self, axes: Mapping[str, int], layers: int) -> dict[str, Any]:
        """Return what the config.json of a checkpoint says of a model of these sizes and so many blocks."""
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

    def block(self, axes: Mapping[str, int]) -> "Block":
        """Return one block of these sizes."""
        return Block(self, axes)


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

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return [B, tokens, hidden].

        Args:
            x: Tokens [B, tokens, hidden].
            seen: Which tokens may be looked at, bool [B, 1, 1, tokens]; all by default.
        """
        query, key, value = self._projected(x)
        dropped = self.dropout if self.training else 0.0
        mixed = attend(query, key, value, seen, dropped)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return query, key and value [B, heads, tokens, head_size]: one product where training computes in bf16."""
        layers = (self.query, self.key, self.value)
        if _halved(x) and all(type(layer) is nn.Linear for layer in layers):  # LoRA's are others
            weight = torch.cat([layer.weight for layer in layers])
            bias = None if self.query.bias is None else torch.cat([layer.bias for layer in layers])
            joined = F.linear(x, weight, bias).unflatten(-1, (3, -1, self.head_size))
            return joined.permute(2, 0, 3, 1, 4).unbind(0)
        return tuple(layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in layers)


def _halved(x: Tensor) -> bool:
    """Tell whether training computes products of matrices in bf16 on a CPU, where each conversion weighs."""
    return x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, dropped: float) -> Tensor:
    """Return scaled dot-product attention [B, heads, tokens, head_size].

    Training in bf16 on a CPU has its own steps: products in bf16, the softmax in fp32. The backward pass of torch's
    kernel there is five times slower in bf16 than in fp32.
    """
    if not _halved(query):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropped)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * query.shape[-1] ** -0.5
    if seen is not None:  # a sample that shows nothing attends to zeros
        scores, value = scores.masked_fill(~seen, _UNSEEN), value.masked_fill(~seen.transpose(-1, -2), 0.0)
    shares = scores.softmax(-1)
    return torch.matmul(dropout(shares, dropped) if dropped else shares, value)


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
    drawn = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = (drawn[:count] >= below - _STEPS // 2).view(x.shape)
    return x * (kept * torch.tensor(_STEPS / (_STEPS - below), dtype=x.dtype))


class Mlp(nn.Module):
    """Two layers with an activation between them."""

    def __init__(self, hidden: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.activation = _ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden] of [..., hidden]."""
        found: Tensor = self.fc2(self.activation(self.fc1(x)))
        return found


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

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return tokens [B, tokens, hidden]; the arguments are those of `Attention`."""
        if self.norm_first:
            x = x + self.drop(self.attention(self.norm1(x), seen))
            return x + self.drop(self.mlp(self.norm2(x)))
        x = self.norm1(x + self.drop(self.attention(x, seen)))
        found: Tensor = self.norm2(x + self.drop(self.mlp(x)))
        return found


class TokenHead(nn.Module):
    """A classifier on the class token.

    Attributes:
        kind: What stands before its linear layer.
    """

    def __init__(
        self, kind: HeadKind, hidden: int, classes: int, norm: Callable[[int], nn.Module], dropout: float = 0.0
    ) -> None:
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
        logits: Tensor = self.fc(self.drop(token))
        return logits


def check_head(kind: str) -> None:
    """Refuse a kind that there is not.

    Raises:
        ModelError: There is no such kind.
    """
    if kind not in get_args(HeadKind):
        raise ModelError(f'head must be "linear", "pooler" or "norm", got {kind!r}.', key="head")


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Draw initial parameters as BERT and ViT do: normal, cut off at two deviations; biases zero.

    By inverting the distribution function: `nn.init.trunc_normal_` takes ten times as long.

    Args:
        module: Its matrices, kernels, tables and single tokens are drawn; norms stay at one and zero.
        std: Standard deviation.
    """
    norms = {
        id(p) for part in module.modules() if isinstance(part, (nn.LayerNorm, nn.RMSNorm)) for p in part.parameters()
    }
    for parameter in module.parameters():
        if parameter.is_meta or id(parameter) in norms:
            continue
        if parameter.dim() > 1:
            drawn = parameter.data.uniform_(-math.erf(2**0.5), math.erf(2**0.5))  # the mass within two deviations
            drawn.erfinv_().mul_(std * 2**0.5)
        else:
            nn.init.zeros_(parameter)


def table(rows: int, columns: int) -> nn.Embedding:
    """Return an embedding whose values are not drawn yet: drawing them twice takes its time at full size."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


# ---- sizes, from a checkpoint or from keys -------------------------------------------------------------------------

_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_CONFIG = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "depth": "num_hidden_layers",
    "attention_heads": "num_attention_heads",
    "intermediate": "intermediate_size",
}  # keys of a model section, and what a Hugging Face config.json calls them


def encoder_of(
    config: Mapping[str, Any] | None,
    given: Mapping[str, int | None],
    heads: Heads,
    dropout: float | None,
    usual: Mapping[str, Any],
) -> Encoder:
    """Return the encoder of a checkpoint's config, or of keys.

    Args:
        config: The config.json of a checkpoint, if there is one.
        given: hidden, layers or depth, attention_heads and intermediate; None where the user did not say.
        heads: Which heads a narrower model keeps.
        dropout: All dropouts, or None for the checkpoint's or the usual ones.
        usual: The family's `dropout`, `attention_dropout`, `eps` and `norm_first`.

    Raises:
        ModelError: Keys contradict the checkpoint, or the heads do not divide the width.
    """
    sizes = _from_keys(given) if config is None else _from_config(config, given)
    config = config or {}
    head_size = config.get("head_dim") or sizes["hidden"] // sizes["attention_heads"]
    if "head_dim" not in config and sizes["hidden"] % sizes["attention_heads"]:
        raise ModelError(
            f"hidden must be a multiple of attention_heads, got {sizes['hidden']} and {sizes['attention_heads']}.",
            key="hidden",
        )
    drops = (
        (config.get("hidden_dropout_prob", usual["dropout"]),
         config.get("attention_probs_dropout_prob", usual["attention_dropout"]))
        if dropout is None else (dropout, dropout)
    )  # fmt: skip
    return Encoder(
        **sizes,
        head_size=int(head_size),
        heads=heads,
        dropout=float(drops[0]),
        attention_dropout=float(drops[1]),
        eps=float(config.get("layer_norm_eps", usual["eps"])),
        activation=str(config.get("hidden_act", "gelu")),
        bias=bool(config.get("qkv_bias", True)),
        norm_first=usual["norm_first"],
    )


def _from_keys(given: Mapping[str, int | None]) -> dict[str, int]:
    hidden = given["hidden"] or _SIZES["hidden_size"]
    return {
        "hidden": hidden,
        "layers": given.get("layers") or given.get("depth") or _SIZES["num_hidden_layers"],
        "attention_heads": given["attention_heads"] or max(1, hidden // _HEAD_SIZE),
        "intermediate": given["intermediate"] or 4 * hidden,
    }


def _from_config(config: Mapping[str, Any], given: Mapping[str, int | None]) -> dict[str, int]:
    found = {theirs: int(config.get(theirs, usual)) for theirs, usual in _SIZES.items()}
    for key, value in given.items():
        theirs = _CONFIG[key]
        if value is None or value == found[theirs]:
            continue
        fewer = theirs == "num_hidden_layers"
        if not fewer or value > found[theirs]:
            raise ModelError(
                f"{key} = {value} contradicts the checkpoint, whose {theirs} is {found[theirs]}; leave {key} out"
                + (", or take fewer." if fewer else "."),
                key=key,
            )
        found[theirs] = value
    return dict(zip(("hidden", "layers", "attention_heads", "intermediate"), found.values(), strict=True))
