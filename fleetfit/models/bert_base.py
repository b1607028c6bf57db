"""BERT-base: 12 blocks of width 768 with 12 heads, 109.5 M parameters with 30,522 tokens."""

from fleetfit.models._head import HeadKind
from fleetfit.models._transformer import Heads
from fleetfit.models.bert import Bert, bert


def bert_base(
    classes: int = 2,
    input_shape: tuple[int, ...] = (128,),
    vocabulary: int = 30522,
    padding: int = -1,
    checkpoint: str | None = None,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "pooler",
) -> Bert:
    """Return `bert` with the sizes of BERT-base; the arguments are explained there."""
    return bert(
        classes,
        input_shape,
        vocabulary,
        padding,
        checkpoint,
        hidden=768,
        layers=12,
        attention_heads=12,
        intermediate=3072,
        dropout=dropout,
        heads=heads,
        head=head,
    )
