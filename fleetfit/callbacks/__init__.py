"""Callbacks of a run: `Callback`, the interface for trackers, and a report as plain numbers.

A callback sees the values of the run folder and nothing else, so values that `[privacy]` and `[secure]` withhold are
missing. It cannot change the bits of the run. `tensorboard` and `wandb` are built in; a user's own is named
`file.py:function` in a run file, or passed to `fleetfit.run(callbacks=[...])`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOOKS = ("on_start", "on_round", "on_evaluate", "on_end")
"""The methods of a callback, in the order in which they are called."""


@dataclass(frozen=True)
class RunStart:
    """The run of a callback, passed before the first round.

    Attributes:
        folder: The run folder.
        title: The name of the run: the folder's, or the row, setting and seed in a comparison.
        group: The name of the comparison's folder; empty for a single run.
        config: The resolved run file, as in `config.toml`.
        rounds: The number of rounds.
        done: The number of finished rounds; above 0 if a run is resumed.
    """

    folder: Path
    title: str
    group: str
    config: Mapping[str, Any]
    rounds: int
    done: int


class Callback:
    """The interface of callbacks; its methods do nothing. Any object with some of these methods is a callback, too.

    If one of them raises, the run prints the error with the callback's name, continues, and does not call it again. An
    error of FleetFit, such as `fleetfit.RunError`, stops the run, and so does Ctrl-C.
    """

    def on_start(self, start: RunStart) -> None:
        """Handle the start of a run, or its resumption."""

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Handle the report of a round: its line of `metrics.jsonl`, which is already written."""

    def on_evaluate(self, report: Mapping[str, Any]) -> None:
        """Handle an evaluated round, after `on_round`: the same line, whose `evaluate` has the columns."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Handle the end: `summary.json`, or None if the run stopped before its last round."""


_NOT_PLOTTED = ("round", "per_client")


def scalars(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a report, or of a summary, as a flat table.

    Args:
        report: A report, or a summary, as callbacks get it.

    Returns:
        Numbers by their path, such as `train/loss` or `evaluate/static/levels/1/local`; items of a list are counted
        from 1. `failures` is their number. The round, values of single clients and values other than numbers are left
        out.
    """
    return dict(_iter_numbers(report, ""))


def _iter_numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    name = path.rpartition("/")[2]
    if name in _NOT_PLOTTED:
        return
    if name == "failures" and isinstance(value, list):
        yield path, float(len(value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _iter_numbers(inner, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value, 1):
            yield from _iter_numbers(inner, f"{path}/{number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)
