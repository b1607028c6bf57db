"""Run files for `fleetfit profile`."""

from typing import Any

from fleetfit.core import DataDescription

FACTS = DataDescription("made-up samples", "classification", (1, 4, 4), 4)
RATIOS = [0.25, 0.5, 1.0]
TABLES: dict[str, Any] = {
    "model": {"name": "tiny:tiny"}, "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 6}},
    "fleet": {"levels": RATIOS, "tolerance": 0.2, "groups": [{"budget": b} for b in RATIOS]},
}  # fmt: skip


def with_fleet(**fleet: Any) -> dict[str, Any]:
    return {**TABLES, "fleet": {**TABLES["fleet"], **fleet}}
