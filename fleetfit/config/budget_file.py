"""A budget file: what one device affords, under `budget`, and perhaps how far a model may exceed it, `tolerance`.

`fleetfit profile` writes such files. A node's configuration and the groups of a run file name them instead of amounts.
"""

from pathlib import Path
from typing import Any

from fleetfit.config.checking import validated
from fleetfit.config.section import NotNegative, Positive, Section, Unit
from fleetfit.config.tables import read_table
from fleetfit.errors import ConfigError


class BudgetFile(Section):
    """What a budget file holds.

    Attributes:
        budget: What the device affords, as in `[fleet] groups`.
        tolerance: How far a model may exceed that, as a fraction of it; what names the file says it otherwise.
    """

    budget: Positive | Unit | dict[str, Positive | Unit]
    tolerance: NotNegative | None = None


def is_budget_file(budget: Any) -> bool:
    """Tell whether a budget is the name of a file and no amount."""
    return isinstance(budget, str) and budget.endswith(".toml")


def read_budget(path: Path) -> dict[str, Any]:
    """Return what a budget file says: `budget`, and `tolerance` where the file has one.

    Raises:
        ConfigError: The file cannot be read, or says something else.
    """
    try:
        found = validated(BudgetFile, read_table(path))
    except ConfigError as error:
        raise ConfigError(f"budget file {path}: {error}") from None
    return {"budget": found.budget} | ({} if found.tolerance is None else {"tolerance": found.tolerance})
