"""What share of a default run's time goes into other things than training, as `summary.json` tells it.

A default run is small: four clients of some 32 images train in a round, and an evaluation measures batch-norm
statistics of four levels on the training images of all forty, beside the test images. These cost about a quarter of
what ten rounds of training cost, in forward passes alone; larger data and cohorts change that.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fleetfit as ff
from benchmarks.measuring import Figure, Options, of_many
from fleetfit.report import drawing
from fleetfit.rounds.timekeeper import PARTS

DEFAULT: dict[str, Any] = {}
LARGER: dict[str, Any] = {"rounds": 10, "local": {"epochs": 10}, "cohort": {"fraction": 0.5}}
WANTED = {"evaluation": 0.1}


def figures(options: Options) -> Iterator[Figure]:
    """Run the default experiment, and one with a larger cohort, a few times."""
    drawing.is_available = lambda: False
    for name, experiment in {"a default run": DEFAULT, "one of 20 clients a round and 10 epochs": LARGER}.items():
        found = [_shares(experiment) for _ in range(1 if options.quick else 3)]
        for part in PARTS[1:]:  # the rest is training
            yield of_many(f"{part} in {name}, share of its rounds' wall seconds", [each[part] for each in found],
                          wanted=WANTED.get(part))  # fmt: skip


def _shares(experiment: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        summary = ff.run(experiment, out=Path(folder) / "run").summary
    return {part: summary["seconds_of"][part] / summary["seconds"] for part in PARTS}
