"""The papers' tables of sizes beside what this package computes, as plain data that the command line prints.

ScaleFL (CVPR 2023), Table 1 and Tables 6 to 9 of its appendix, and AdaptiveFL (DAC 2024), Table 1: split ratios,
parameters and multiply-adds. ReeFL (ICML 2024), Tables 1 and 2: what a client sends. Some printed ratios do not give
the printed costs; such a row stands there twice, at the ratio that does and as printed. `docs/paper-tables.md` has all
of them.
"""

from collections.abc import Callable, Mapping

from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.report.papers.adaptivefl import adaptivefl_table_1
from fleetfit.report.papers.bert import table_9
from fleetfit.report.papers.efficientnet import table_8
from fleetfit.report.papers.msdnet import table_7
from fleetfit.report.papers.reefl import reefl_table_1, reefl_table_2
from fleetfit.report.papers.resnet import table_1, table_6
from fleetfit.report.papers.table import PaperTable, Printed, Value

TABLES: Mapping[str, Callable[[], PaperTable]] = {
    "table-1": table_1,
    "table-6": table_6,
    "table-7": table_7,
    "table-8": table_8,
    "table-9": table_9,
    "adaptivefl-table-1": adaptivefl_table_1,
    "reefl-table-1": reefl_table_1,
    "reefl-table-2": reefl_table_2,
}
"""Tables by the name that `fleetfit plan --paper` takes."""


def paper_table(name: str) -> PaperTable:
    """Return a table by its name, such as "table-1".

    Raises:
        ConfigError: There is no such table.
    """
    if name not in TABLES:
        raise ConfigError(
            f'"{name}" is no table of the papers; there is {", ".join(TABLES)}.{did_you_mean(name, TABLES)}'
        )
    return TABLES[name]()


__all__ = ["TABLES", "PaperTable", "Printed", "Value", "paper_table"]
