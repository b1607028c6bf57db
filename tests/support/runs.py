"""Run folders, from numbers instead of files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import FleetRecord, RoundRecord, SummaryRecord


def make_run_record(
    summary: Mapping[str, Any], reports: Sequence[Any], class_counts: Sequence[Sequence[int]] = ()
) -> RunFolder:
    """Return the folder of a finished run."""
    return RunFolder(Path("run")).replace_contents(
        config={}, fleet=FleetRecord.load({"first": {"class_counts": list(class_counts) or None}}),
        rounds=list(map(RoundRecord.load, reports)), stored_summary=SummaryRecord.load(summary),
    )  # fmt: skip
