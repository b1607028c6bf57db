"""BERT-Small: 4 blocks of width 512 with 8 heads, 28.8 M parameters with 30,522 tokens."""

from fleetfit.models._head import HeadKind
from fleetfit.models._transformer import Heads
from fleetfit.models.bert import Bert, bert


def bert_small(
    classes: int = 2,
    input_shape: tuple[int, ...] = (128,),
    vocabulary: int = 30522,
    padding: int = -1,
    checkpoint: str | None = None,
    dropout: float | None = None,
    heads: Heads = "whole",
    head: HeadKind = "pooler",
) -> Bert:
    """Return `bert` with the sizes of BERT-Small; the arguments are explained there."""
    return bert(
        classes,
        input_shape,
        vocabulary,
        padding,
        checkpoint,
        hidden=512,
        layers=4,
        attention_heads=8,
        intermediate=2048,
        dropout=dropout,
        heads=heads,
        head=head,
    )
