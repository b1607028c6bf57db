"""Golden runs: three rounds of every method on the tiny model with one seed; the losses are in `losses.json`.

They say that a change changes nothing. Last bits differ between processors, and some methods turn them into visible
differences (a choice of teacher, the sign of a gradient that is zero but for rounding). So the runs are made in a
process of their own, in which every processor takes the same, slowest kernels, and numbers are compared to 1e-6,
relatively. A change that is meant to move them needs its reason in the commit; `PYTHONPATH=tests python
tests/golden/test_golden.py --write` writes the file anew.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import spec_of, tiny_federation

from fleetfit import names
from fleetfit.core import Evaluation, Local
from fleetfit.engines.local import local as local_engine
from fleetfit.evaluation import EvaluationScope
from fleetfit.rounds import Settings, run, start

FILE = Path(__file__).parent / "losses.json"
ALIKE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
"""Set before PyTorch is imported, these give the same kernels on every x86-64 processor."""
SETTINGS = Settings(
    3,
    Local(lr=0.05, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size=8, clip_norm=2.0),
    scope=EvaluationScope(Evaluation(batch_size=64), statistics_samples=120),
)
SPECS: dict[str, Mapping[str, Any]] = {
    **{name: spec_of(name) for name in names.list_names("methods")},
    **{
        f"scalefl, {kind}": {"name": "scalefl", "hooks": {"choose_channels": kind}}
        for kind in ("window", "rolling", "random")
    },
    "scalefl, strong distillation": {"name": "scalefl", "beta": 0.5, "temperature": 2.0},
    "scalefl, printed": {"name": "scalefl", "printed": True},
    "heterofl, original": {"name": "heterofl", "scaler": True, "masked": True},
    "fedavg, fedprox": {"name": "fedavg", "options": {"fedprox": {"mu": 0.1}}},
    "fedavg, fedavgm": {"name": "fedavg", "options": {"fedavgm": {}}},
    "scalefl, fedadam": {"name": "scalefl", "options": {"fedadam": {"lr": 0.01}}},
    "decoupled, fedyogi": {"name": "decoupled", "options": {"fedyogi": {"lr": 0.01}}},
    "scalefl, feddyn": {"name": "scalefl", "options": {"feddyn": {}}},
}
BY_SAMPLES = {"hooks": {"weigh": "by_samples"}}
BY_COUNT = {"hooks": {"weigh": "by_count"}}
SHARES = (3, 5, 7, 11, 13, 3)
"""Of the samples: clients have 12 to 52 of 168, those of one budget unequally many."""
UNEQUAL: dict[str, Mapping[str, Any]] = {
    "unequal shares: fedavg": {"name": "fedavg"},
    "unequal shares: fedavg, by count": {"name": "fedavg", **BY_COUNT},
    "unequal shares: scalefl": {"name": "scalefl"},
    "unequal shares: scalefl, by samples": {"name": "scalefl", **BY_SAMPLES},
    "unequal shares: heterofl": {"name": "heterofl"},
    "unequal shares: heterofl, by samples": {"name": "heterofl", **BY_SAMPLES},
    "unequal shares: depthfl": {"name": "depthfl"},
    "unequal shares: depthfl, by samples": {"name": "depthfl", **BY_SAMPLES},
    "unequal shares: adaptivefl": {"name": "adaptivefl"},
    "unequal shares: fedavg, feddyn": {"name": "fedavg", "options": {"feddyn": {}}},
    "unequal shares: scalefl, feddyn, by samples": {"name": "scalefl", "options": {"feddyn": {}}, **BY_SAMPLES},
    "unequal shares: decoupled, fedadam": {"name": "decoupled", "options": {"fedadam": {"lr": 0.01}}},
}
"""With weights by samples and by count, which are the same where shares are equal, and more dropout."""


def golden(name: str) -> dict[str, Any]:
    """Train, and return the losses of the rounds, the state's norm, and how many test images each level gets right."""
    if name in SPECS:
        federation, simulation = tiny_federation(SPECS[name], clients=6, cohort=4, dropout=0.1)
    else:
        federation, simulation = tiny_federation(UNEQUAL[name], clients=6, cohort=4, shares=SHARES, dropout=0.3)
    rounds = list(run(federation, local_engine(simulation), SETTINGS, start(federation)))
    state = rounds[-1].server.state
    length = sum(float((t.double() ** 2).sum()) for t in state.values()) ** 0.5
    right = rounds[-1].report["evaluate"]["static"]["test_levels"]
    return {
        "losses": [r.report["train"]["loss"] for r in rounds],
        "norm": length,
        "right": {k: round(v * 48) for k, v in right.items()},
    }


def everything() -> dict[str, Any]:
    """Run this file as a program, in the environment that makes processors alike, and return what it found."""
    command = [sys.executable, "-W", "error", __file__]
    paths = os.pathsep.join([str(FILE.parents[1]), str(FILE.parents[2])])
    done = subprocess.run(command, env={**os.environ, **ALIKE, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    return everything()


@pytest.mark.parametrize("name", [*SPECS, *UNEQUAL])
def test_losses_are_those_in_the_file(name: str, runs: Mapping[str, Any]) -> None:
    expected, result = json.loads(FILE.read_text())[name], runs[name]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert result["norm"] == pytest.approx(expected["norm"], rel=1e-6)
    assert result["right"] == pytest.approx(expected["right"], abs=1)  # an image may sit on the fence


def test_the_file_has_these_runs_and_no_others() -> None:
    assert list(json.loads(FILE.read_text())) == [*SPECS, *UNEQUAL]


@pytest.mark.parametrize("name", ["fedavg", "scalefl", "heterofl", "depthfl"])
def test_weights_by_samples_and_by_count_give_other_runs(name: str) -> None:
    """Else these runs would not notice one in the place of the other."""
    runs = json.loads(FILE.read_text())
    one, other = (runs[key] for key in UNEQUAL if key.startswith(f"unequal shares: {name}") and "feddyn" not in key)
    assert abs(one["losses"][-1] - other["losses"][-1]) > 1e-4 and abs(one["norm"] - other["norm"]) > 1e-4


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(everything(), indent=2) + "\n")
    else:
        torch.set_num_threads(1)
        print(json.dumps({name: golden(name) for name in [*SPECS, *UNEQUAL]}))
