"""ScaleFL's Table 8 (appendix): EfficientNet-B4 at 224x224."""

from fleetfit.models.inverted import efficientnet_b4
from fleetfit.report.papers.table import COLUMNS, PaperTable, Printed, rows_of

_EXITS = (22, 26, 30)

TABLE_8 = (
    Printed("4", "1.00", 1.00, 17.2, 1223.5, (32,)),
    Printed("3-w", "1.00", 0.70, 8.6, 613.3, (32,)),
    Printed("2-w", "1.00", 0.48, 4.2, 299.2, (32,)),
    Printed("1-w", "1.00", 0.33, 2.1, 148.8, (32,)),
    Printed("3-dw", "0.94", 0.82, 8.6, 799.6, _EXITS),
    Printed("2-dw", "0.81", 0.65, 4.5, 641.5, _EXITS[:2], fits=0.75),
    Printed("1-dw", "0.69", 0.65, 2.1, 534.1, _EXITS[:1], fits=0.75),
)


def table_8() -> PaperTable:
    """Return ScaleFL's Table 8: EfficientNet-B4 split along width only, and along depth and width."""
    return PaperTable(
        "ScaleFL, Table 8 (appendix): EfficientNet-B4 at 224x224, split along width only (w), along depth and width "
        "(dw)",
        COLUMNS,
        rows_of(efficientnet_b4(), (3, 224, 224), TABLE_8),
        (
            "The rows printed with s_w = 0.65 have the costs of 0.75. Exits after stages 5, 6 and 7: blocks 22, 26 and "
            "30 of 32.",
            "Level 4 and the rows split along width only leave the early classifiers out.",
        ),
    )
