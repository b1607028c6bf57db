"""BERT (Devlin et al., NAACL 2019) of any size, new or from a Hugging Face folder, with the exits of ScaleFL (4.1).

Token, position and type embeddings, then blocks of attention and MLP. A classifier may sit after any block: a pooler of
its own (linear layer and tanh on the first token), dropout and one linear layer; the last exit has the pooler and the
classifier of the checkpoint, where it has them. With `head = "norm"` classifiers have a layer norm for the pooler (as
all have in ReeFL's comparison), with "linear" neither; both begin anew. Padding is masked in attention. All tokens are
of type 0.

With `heads = "fixed"` a narrower model keeps all heads and makes them smaller, as the sizes of ScaleFL's Table 9 need:
hidden and MLP widths are floored to a multiple of the heads (300, 420, 576, 768 of 768).

Differs from the paper: ScaleFL's code passes no attention mask; ours masks padding. Its code cuts the stream behind the
first exit at other channels than before it; here one set of channels serves all blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Axis, State
from fleetfit.models.pretrained import Checkpoint, TensorNames, read_config
from fleetfit.models.transformer import (
    Encoder,
    EncoderFamily,
    HeadKind,
    Heads,
    TokenHead,
    TokenModule,
    build_encoder,
    make_embedding,
)

_TYPES = 2
_DEFAULTS = {"dropout": 0.1, "attention_dropout": 0.1, "eps": 1e-12, "norm_first": False}
_NAMES = TensorNames(
    stem={
        "embeddings.tokens": ("embeddings.word_embeddings",),
        "embeddings.positions": ("embeddings.position_embeddings",),
        "embeddings.types": ("embeddings.token_type_embeddings",),
        "embeddings.norm": ("embeddings.LayerNorm",),
    },
    block={
        "attention.query": ("encoder.layer.{}.attention.self.query",),
        "attention.key": ("encoder.layer.{}.attention.self.key",),
        "attention.value": ("encoder.layer.{}.attention.self.value",),
        "attention.out": ("encoder.layer.{}.attention.output.dense",),
        "norm1": ("encoder.layer.{}.attention.output.LayerNorm",),
        "mlp.fc1": ("encoder.layer.{}.intermediate.dense",),
        "mlp.fc2": ("encoder.layer.{}.output.dense",),
        "norm2": ("encoder.layer.{}.output.LayerNorm",),
    },
    head={"pooler": ("pooler.dense",), "fc": ("classifier",)},
)


class Embeddings(nn.Module):
    """Token, position and type embeddings, norm, dropout."""

    def __init__(self, family: "Bert", hidden: int) -> None:
        super().__init__()
        self.padding = family.padding
        self.tokens = make_embedding(family.vocabulary, hidden)
        self.positions = make_embedding(family.max_positions, hidden)
        self.types = make_embedding(family.types, hidden)
        self.norm = nn.LayerNorm(hidden, eps=family.encoder.eps)
        self.drop = nn.Dropout(family.encoder.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, L, hidden] of token ids [B, L]."""
        embedded = self.tokens(x) + (self.positions.weight[: x.shape[1]] + self.types.weight[0])
        return self.drop(self.norm(embedded))


class BertModule(TokenModule):
    """A module whose carry is the tokens, and which of them are not padding."""

    embeddings: Embeddings

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embedded tokens [B, L, hidden] and bool [B, L], false for padding, of ids [B, L]."""
        return self.embeddings(x), x != self.embeddings.padding

    def segment(self, i: int, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Run the blocks after exit i-1 up to exit i."""
        x, real = carry
        visible = real[:, None, None] if self.embeddings.padding >= 0 else None
        for b in range(self.exits[i - 1] if i else 0, self.exits[i]):
            x = self.blocks[b](x, visible)
        return x, real


@dataclass(frozen=True)
class Bert(EncoderFamily):
    """The family of one set of sizes; made by `bert`, which explains the fields."""

    module_class = BertModule
    tensor_names = _NAMES
    prefixes = ("bert.",)
    checkpoint_head = "pooler"
    encoder: Encoder
    classes: int
    vocabulary: int
    max_positions: int
    types: int
    padding: int
    head: HeadKind
    head_dropout: float
    checkpoint: str | None
    whole_depth: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.vocabulary)
        super().__post_init__()

    def _make_axes(self) -> dict[str, Axis]:
        return self.encoder.axes(self.encoder.attention_heads if self.encoder.heads == "fixed" else 1)

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        return Embeddings(self, axes["hidden"])

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        norm = partial(nn.LayerNorm, eps=self.encoder.eps)
        return TokenHead(self.head, axes["hidden"], axes["classes"], norm, self.head_dropout)

    def to_checkpoint(self, sizes: Mapping[str, int], last: int, state: State) -> Checkpoint:
        """Return a sub-model with its last exit only, in the form of `BertForSequenceClassification`.

        Args:
            sizes: Size of each axis.
            last: Block count of the last exit.
            state: The tensors of a module with these sizes and that exit.

        Raises:
            ModelError: BERT's config cannot express these sizes.
        """
        hidden, (heads, size) = sizes["hidden"], self.encoder.heads_at(sizes)
        if heads * size != hidden:
            raise ModelError(
                f"{heads} heads of {size} channels do not add up to its width of {hidden}: in transformers each head "
                'of a BERT has hidden / heads channels. Set [model] heads = "fixed", so that every level fits.',
                key="heads",
            )
        if not self.encoder.bias:
            raise ModelError(
                "its query, key and value have no biases, but a BERT in transformers has them.", key="bias"
            )
        if self.head != "pooler":
            raise ModelError(
                f'its classifier is of the kind [model] head = "{self.head}", that of a BERT in transformers has a '
                "pooler.",
                key="head",
            )
        config = {
            "model_type": "bert",
            "architectures": ["BertForSequenceClassification"],
            **self.encoder.config(sizes, last),
            "classifier_dropout": self.head_dropout,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_positions,
            "type_vocab_size": self.types,
            "pad_token_id": self.padding if self.padding >= 0 else None,
        }
        return Checkpoint(config, self.tensor_names.rename(state, last, self.prefixes[0]))


def bert(
    classes: int = 2,
    input_shape: tuple[int, ...] = (128,),
    vocabulary: int = 30522,
    padding: int = -1,
    checkpoint: str | None = None,
    hidden: int | None = None,
    layers: int | None = None,
    attention_heads: int | None = None,
    intermediate: int | None = None,
    max_positions: int | None = None,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "pooler",
) -> Bert:
    """Return a BERT family; BERT-base by default.

    Args:
        classes: Classes; never cut.
        input_shape: (L,): tokens of one sample, at most `max_positions`.
        vocabulary: Number of token ids.
        padding: The token id of padding, which attention masks; -1 for none.
        checkpoint: A Hugging Face folder (config.json, model.safetensors) that gives sizes and initial weights.
        hidden: Width of the stream; 768 by default. With a checkpoint, only its sizes are accepted.
        layers: Blocks; 12 by default. With a checkpoint, at most its number of blocks, the first ones.
        attention_heads: Heads; one per 64 channels by default.
        intermediate: Width inside the MLP; four times `hidden` by default.
        max_positions: Rows of the position table; 512 by default.
        dropout: Share dropped everywhere; the checkpoint's or 0.1 by default.
        heads: Width cuts "whole" heads, or the channels of each head, with their number "fixed".
        head: Kind of the classifiers: BERT's "pooler", a layer "norm", or nothing before their "linear" layer.

    Raises:
        ModelError: Sizes do not fit each other, the inputs or the checkpoint.
    """
    config = None if checkpoint is None else read_config(checkpoint, ("bert",))
    sizes = {"hidden": hidden, "layers": layers, "attention_heads": attention_heads, "intermediate": intermediate}
    config = config or {}
    position_type = config.get("position_embedding_type") or "absolute"
    if position_type != "absolute" or config.get("is_decoder"):
        raise ModelError(
            f"{checkpoint}: only encoders with absolute positions are read, not decoders or {position_type} ones.",
            path=checkpoint,
        )
    encoder = build_encoder(config or None, sizes, heads, dropout, _DEFAULTS)
    rows, positions = int(config.get("vocab_size", vocabulary)), int(config.get("max_position_embeddings", 512))
    if max_positions is not None and config and max_positions != positions:
        raise ModelError(
            f"max_positions = {max_positions} contradicts the checkpoint's {positions}. Leave it out.",
            key="max_positions",
        )
    positions = max_positions or positions
    if len(input_shape) != 1 or input_shape[0] > positions:
        raise ModelError(
            f"BERT takes at most {positions} token ids per sample, of shape (L,), got samples of shape {input_shape}. "
            "Use text data, and cut them to that length.",
            key="data.length",
        )
    if vocabulary < 1 or vocabulary > rows:
        raise ModelError(
            f"BERT needs token ids below {rows}, got a vocabulary of {vocabulary}"
            + ("; real-valued inputs have none." if vocabulary < 1 else ": use the checkpoint's own tokenizer."),
            key="data.vocabulary",
        )
    head_dropout = config.get("classifier_dropout") if dropout is None else None
    return Bert(
        encoder,
        classes,
        rows,
        positions,
        types=int(config.get("type_vocab_size", _TYPES)),
        padding=padding,
        head=head,
        head_dropout=encoder.dropout if head_dropout is None else float(head_dropout),
        checkpoint=checkpoint,
        whole_depth=encoder.layers == int(config.get("num_hidden_layers", encoder.layers)),
    )


def _make_size(hidden: int, layers: int, attention_heads: int) -> dict[str, int | None]:
    """Return the keys of a size; positions are 512, or the checkpoint's."""
    return {
        "hidden": hidden,
        "layers": layers,
        "attention_heads": attention_heads,
        "intermediate": 4 * hidden,
        "max_positions": None,
    }


SIZES = {
    "bert_tiny": Preset(
        "BERT-Tiny: 2 blocks of width 128 with 2 heads, 4.4 M parameters with 30,522 tokens.", _make_size(128, 2, 2)
    ),
    "bert_small": Preset(
        "BERT-Small: 4 blocks of width 512 with 8 heads, 28.8 M parameters with 30,522 tokens.", _make_size(512, 4, 8)
    ),
    "bert_base": Preset(
        "BERT-base: 12 blocks of width 768 with 12 heads, 109.5 M parameters with 30,522 tokens.",
        _make_size(768, 12, 12),
    ),
}
bert_tiny, bert_small, bert_base = make_presets(bert, SIZES)
