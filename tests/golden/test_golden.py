"""Golden runs: three rounds of every method on the tiny model with one seed; the losses are in `losses.json`.

They say that a change changes nothing. Last bits differ between processors, so numbers are compared to 1e-6,
relatively. A change that is meant to move them needs its reason in the commit; `PYTHONPATH=tests python
tests/golden/test_golden.py` writes the file anew.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import spec_of, tiny_federation

from fleetfit import names
from fleetfit.engines.local import local as local_engine
from fleetfit.evaluate import Wanted
from fleetfit.rounds import Settings, run, start
from fleetfit.values import Evaluation, Local

FILE = Path(__file__).parent / "losses.json"
SETTINGS = Settings(
    3,
    Local(lr=0.05, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size=8, clip_norm=2.0),
    wanted=Wanted(Evaluation(batch_size=64), statistics_samples=120),
)
SPECS: dict[str, Mapping[str, Any]] = {
    **{name: spec_of(name) for name in names.available("methods")},
    **{
        f"scalefl, {kind}": {"name": "scalefl", "hooks": {"channels": kind}} for kind in ("window", "rolling", "random")
    },
    "scalefl, strong distillation": {"name": "scalefl", "beta": 0.5, "temperature": 2.0},
    "scalefl, printed": {"name": "scalefl", "printed": True},
    "heterofl, original": {"name": "heterofl", "scaler": True, "masked": True},
    "fedavg, fedprox": {"name": "fedavg", "plus": {"fedprox": {"mu": 0.1}}},
    "fedavg, fedavgm": {"name": "fedavg", "plus": {"fedavgm": {}}},
    "scalefl, fedadam": {"name": "scalefl", "plus": {"fedadam": {"lr": 0.01}}},
    "decoupled, fedyogi": {"name": "decoupled", "plus": {"fedyogi": {"lr": 0.01}}},
    "scalefl, feddyn": {"name": "scalefl", "plus": {"feddyn": {}}},
}


def golden(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Train, and return the losses of the rounds, the state's norm, and how many test images each level gets right."""
    federation, simulation = tiny_federation(spec, clients=6, cohort=4, dropout=0.1)
    rounds = list(run(federation, local_engine(simulation), SETTINGS, start(federation)))
    state = rounds[-1].server.state
    length = sum(float((t.double() ** 2).sum()) for t in state.values()) ** 0.5
    right = rounds[-1].report["evaluate"]["static"]["test_levels"]
    return {
        "losses": [r.report["train"]["loss"] for r in rounds],
        "norm": length,
        "right": {k: round(v * 48) for k, v in right.items()},
    }


@pytest.mark.parametrize("name", list(SPECS))
def test_losses_are_those_in_the_file(name: str) -> None:
    expected = json.loads(FILE.read_text())[name]
    found = golden(SPECS[name])
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-6)
    assert found["right"] == pytest.approx(expected["right"], abs=1)  # an image may sit on the fence


def test_the_file_has_these_runs_and_no_others() -> None:
    assert list(json.loads(FILE.read_text())) == list(SPECS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps({name: golden(spec) for name, spec in SPECS.items()}, indent=2) + "\n")
