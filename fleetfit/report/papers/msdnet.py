"""ScaleFL's Table 7 (appendix): MSDNet-24."""

from fleetfit.models.msdnet import msdnet24
from fleetfit.report.papers.table import COLUMNS, PaperTable, Printed, rows_of

_EXITS = (15, 18, 21, 24)

TABLE_7 = (
    Printed("4", "1.00", 1.00, 2.64, 101.9, _EXITS),
    Printed("3-w", "1.00", 0.75, 1.33, 48.1, _EXITS),
    Printed("2-w", "1.00", 0.50, 0.66, 25.6, _EXITS),
    Printed("1-w", "1.00", 0.35, 0.30, 12.4, _EXITS),
    Printed("3-dw", "0.875", 0.85, 1.38, 59.7, _EXITS[:3]),
    Printed("2-dw", "0.75", 0.70, 0.64, 32.4, _EXITS[:2]),
    Printed("1-dw", "0.625", 0.65, 0.28, 15.8, _EXITS[:1]),
)


def table_7() -> PaperTable:
    """Return ScaleFL's Table 7: MSDNet-24 split along width only, and along depth and width."""
    return PaperTable(
        "ScaleFL, Table 7 (appendix): MSDNet-24, split along width only (w) and along depth and width (dw)",
        COLUMNS,
        rows_of(msdnet24(), (3, 32, 32), TABLE_7),
        (
            "Level 4 and the rows split along width only count all four classifiers, after layers 15, 18, 21 and 24.",
            "No width has both costs of row 1-w: 0.35 has its parameters, and 12.4 M multiply-adds need more of both.",
        ),
    )
