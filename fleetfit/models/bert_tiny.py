"""BERT-Tiny: 2 blocks of width 128 with 2 heads, 4.4 M parameters with 30,522 tokens."""

from fleetfit.models._head import HeadKind
from fleetfit.models._transformer import Heads
from fleetfit.models.bert import Bert, bert


def bert_tiny(
    classes: int = 2,
    input_shape: tuple[int, ...] = (128,),
    vocabulary: int = 30522,
    padding: int = -1,
    checkpoint: str | None = None,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "pooler",
) -> Bert:
    """Return `bert` with the sizes of BERT-Tiny; the arguments are explained there."""
    return bert(
        classes,
        input_shape,
        vocabulary,
        padding,
        checkpoint,
        hidden=128,
        layers=2,
        attention_heads=2,
        intermediate=512,
        dropout=dropout,
        heads=heads,
        head=head,
    )
