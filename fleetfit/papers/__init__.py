"""What stands in the papers, made with this package: their tables of sizes beside ours, and their figures of a run.

Tables: ScaleFL (CVPR 2023), Table 1 and Tables 6 to 9 of its appendix, and AdaptiveFL (DAC 2024), Table 1: split
ratios, parameters and multiply-adds; ReeFL (ICML 2024), Tables 1 and 2: what a client sends. `docs/paper-tables.md` has
all of them. Figures: samples by the exit where they left and what levels cost (`pictures`, ScaleFL), and where a vision
transformer looks (`attention`, ReeFL).

Everything here stands on the rest of the package, as somebody else's script would; nothing of it is imported there but
by the verbs that offer it (docs/adr/0013).
"""

import importlib
from typing import TYPE_CHECKING

from fleetfit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from fleetfit.papers.table import PaperTable

TABLES = {
    "table-1": "scalefl",
    "table-6": "scalefl",
    "table-7": "scalefl",
    "table-8": "scalefl",
    "table-9": "scalefl",
    "adaptivefl-table-1": "adaptivefl",
    "reefl-table-1": "reefl",
    "reefl-table-2": "reefl",
}
"""The module of each table, by the name that `fleetfit plan --paper` takes."""


def paper_table(name: str) -> "PaperTable":
    """Return a table by its name, such as "table-1".

    Raises:
        ConfigError: There is no such table.
    """
    if name not in TABLES:
        raise ConfigError(
            f'"{name}" is not a table of the papers; choose one of {", ".join(TABLES)}.{did_you_mean(name, TABLES)}',
            key="name",
        )
    module = importlib.import_module(f"fleetfit.papers.{TABLES[name]}")
    found: PaperTable = getattr(module, name.replace("-", "_"))()
    return found
