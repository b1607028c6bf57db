"""What is told of a run while it lasts: `Callback`, the one seam for trackers, and a report as plain numbers.

A callback sees what the run folder holds and nothing else: what `[privacy]` and `[secure]` withhold is not there. It
reads; whatever it does, the run has the same bits. `tensorboard` and `wandb` beside this file are two; anybody's own is
named `file.py:function` in a run file, or is an object given to `fleetfit.run(callbacks=[...])`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOOKS = ("on_start", "on_round", "on_evaluate", "on_end")
"""What a callback may have, in the order in which they are called."""


@dataclass(frozen=True)
class RunStart:
    """What a callback learns before the first round that it is told.

    Attributes:
        folder: The run folder.
        title: What the run is called: the folder's name, or the row, setting and seed in a comparison.
        group: The name of the comparison's folder; empty where the run is alone.
        config: The resolved run file, as in `config.toml`.
        rounds: How many there are in all.
        done: How many are done; above 0 where a run goes on.
    """

    folder: Path
    title: str
    group: str
    config: Mapping[str, Any]
    rounds: int
    done: int


class Callback:
    """What a run tells. Any object with some of these methods will do; this class has all of them, and does nothing.

    An exception in one of them is said with the callback's name, and the callback is left alone from then on; the run
    goes on. An error of FleetFit, such as `fleetfit.RunError`, stops the run with its sentence, and so does Ctrl-C.
    """

    def on_start(self, start: RunStart) -> None:
        """Hear that a run begins, or goes on."""

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Hear what a round did: its line of `metrics.jsonl`, which is written already."""

    def on_evaluate(self, report: Mapping[str, Any]) -> None:
        """Hear of a round that was evaluated, after `on_round`: the same line, whose `evaluate` has the columns."""

    def on_end(self, summary: Mapping[str, Any] | None) -> None:
        """Hear that it is over: `summary.json`, or None where the run stopped before its last round."""


_NOT_PLOTTED = ("round", "per_client")


def scalars(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a report, or of a summary, as trackers want them: one table without tables in it.

    Args:
        report: What a callback is told.

    Returns:
        Numbers by their place, such as `train/loss` or `evaluate/static/levels/1/local`; the exits of a list are
        counted from 1. Of `failures` it is how many there are. What is no number, the round, and what there is for each
        client are left out.
    """
    return dict(_numbers(report, ""))


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    name = place.rpartition("/")[2]
    if name in _NOT_PLOTTED:
        return
    if name == "failures" and isinstance(value, list):
        yield place, float(len(value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{place}/{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value, 1):
            yield from _numbers(inner, f"{place}/{number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, float(value)
