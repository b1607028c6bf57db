"""Records of runs, from numbers instead of a folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit.runs.read import RunRecord
from fleetfit.runs.schema import EnvironmentRecord, FleetRecord, NodesRecord, RoundRecord, SummaryRecord


def make_run_record(
    summary: Mapping[str, Any], reports: Sequence[Any], class_counts: Sequence[Sequence[int]] = ()
) -> RunRecord:
    """Return the record of a finished run."""
    return RunRecord(
        folder=Path("run"), config={}, config_text="", environment=EnvironmentRecord(), nodes=NodesRecord(),
        fleet=FleetRecord.load({"first": {"class_counts": list(class_counts) or None}}),
        rounds=list(map(RoundRecord.load, reports)), plan=None, stored_summary=SummaryRecord.load(summary), problems=(),
    )  # fmt: skip
