"""ScaleFL's Table 9 (appendix): BERT-base on a sentence of 64 tokens.

Its "#FLOPS" are no multiply-adds of 64 tokens. What is printed is, to the last digits, a sum of three counts: each
linear layer for one token only; both products of attention for all 64 tokens, but one of the two at the full width of
768 whatever s_w is; and two per number that a layer norm returns, for all 64 tokens. So the table has both: what the
paper counts, and the multiply-adds of the whole sentence.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fleetfit.cost import submodel_cost
from fleetfit.layout import build_module
from fleetfit.models.bert import Bert, bert_base
from fleetfit.report.papers.table import PaperTable, Printed, Value

_TOKENS = 64
_EXITS = (4, 6, 9)

TABLE_9 = (
    Printed("4", "1.00", 1.00, 109.5, 163.5, (12,)),
    Printed("3-w", "1.00", 0.70, 57.3, 106.2, (12,)),
    Printed("2-w", "1.00", 0.45, 27.1, 72.0, (12,)),
    Printed("1-w", "1.00", 0.30, 14.7, 22.3, (12,)),
    Printed("3-dw", "0.75", 0.75, 54.8, 85.3, _EXITS),
    Printed("2-dw", "0.50", 0.55, 26.1, 42.9, _EXITS[:2]),
    Printed("1-dw", "0.33", 0.40, 13.7, 22.2, _EXITS[:1]),
)


def table_9() -> PaperTable:
    """Return ScaleFL's Table 9: BERT-base split along width only, and along depth and width."""
    architecture = bert_base(classes=2, input_shape=(_TOKENS,), heads="fixed")
    rows: list[tuple[Value, ...]] = []
    for row in TABLE_9:
        cost = submodel_cost(architecture, (architecture.sizes(row.s_w), row.exits), (_TOKENS,))
        as_counted = counted_as_printed(architecture, row.s_w, row.exits, _TOKENS)
        rows.append((row.level, row.s_d, row.s_w, row.exits[-1], round(cost.parameters / 1e6, 2), row.parameters,
                     round(as_counted / 1e6, 1), row.multiply_adds, round(cost.multiply_adds / 1e6)))  # fmt: skip
    return PaperTable(
        "ScaleFL, Table 9 (appendix): BERT-base, split along width only (w) and along depth and width (dw)",
        ("level", "s_d", "s_w", "exit at block", "parameters (M)", "printed", "as the paper counts (M)", "printed",
         "multiply-adds (M)"),
        tuple(rows),
        (
            'All 12 heads are kept and made smaller (heads = "fixed"). Level 4 and the rows split along width only '
            "leave the early classifiers out.",
            "As the paper counts: linear layers for one token, attention for 64 (one of its two products at full width "
            "in every row), two per number of a layer norm. The last column is the multiply-adds of all 64 tokens.",
            "Row 1-w is printed with 22.3 M, which is what row 1-dw has; counted like the others it has 57.2 M.",
        ),
    )  # fmt: skip


def counted_as_printed(architecture: Bert, width: float, exits: Sequence[int], tokens: int) -> int:
    """Return what Table 9 prints as FLOPs of a sub-model; the module's docstring says what that is."""
    sizes, depth = architecture.sizes(width), exits[-1]
    hidden, full = sizes["hidden"], architecture.axes["hidden"].size
    with torch.device("meta"):
        module = build_module(architecture, sizes, tuple(exits))
    linear = sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
    products = depth * tokens**2 * (hidden + full)
    norms = (2 * depth + 1) * 2 * tokens * hidden
    return linear + products + norms
