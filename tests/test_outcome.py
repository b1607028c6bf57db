"""The last sentences of a run that has learned nothing, or whose jobs diverged."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleetfit as ff
from fleetfit.api.outcome import describe_outcome, find_chance
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.data import Data
from fleetfit.training.job import DIVERGED

RNG = np.random.default_rng(4)
X = RNG.normal(size=(200, 5)).astype("float32")
FEW: dict[str, Any] = {
    "rounds": 10,
    "progress": False,
    "local": {"max_steps": 2, "epochs": 1, "lr": 1e-4},
    "method": {"name": "fedavg"},
}


def make_tokens(y: list[list[int]]) -> Data:
    labels = torch.tensor(y)
    splits = {"train": torch.tensor([0]), "test": torch.arange(1, len(y))}
    return Data("tokens", torch.zeros_like(labels), labels, splits, 4, task="next_token", vocabulary=4)


def test_chance_is_the_best_constant_prediction() -> None:
    """Test labels 0, 1, 1, 1; of tokens -100 is not scored: 2 is 3 of 5; two labels are 1 in 1/4 and 1/2: 5/8."""
    splits = {"train": torch.arange(4), "test": torch.arange(4, 8)}
    four = Data("four", torch.zeros(8, 3), torch.tensor([2, 2, 2, 2, 0, 1, 1, 1]), splits, 3)
    assert find_chance(four) == 0.75
    assert find_chance(make_tokens([[0, 0, 0], [2, 2, -100], [1, 0, 2]])) == pytest.approx(3 / 5)
    numbers = Data("numbers", torch.zeros(8, 3), torch.zeros(8, 1), splits, 1, task="regression")
    assert find_chance(numbers) == 0.0
    labels = torch.tensor([[1.0, 1.0]] * 4 + [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert find_chance(Data("several", torch.zeros(8, 3), labels, splits, 2, task="multi_label")) == 0.625


@pytest.mark.parametrize(
    ("classes", "local", "global_", "rounds", "is_said"),
    [
        (4, 0.26, 0.25, 10, True),
        (4, 0.32, 0.31, 60, True),  # 0.25 + 0.1 * 0.75 = 0.325
        (4, 0.33, 0.25, 60, False),
        (4, 0.25, 0.40, 60, False),
        (4, 0.26, 0.25, 9, False),
        (2, 0.54, None, 20, True),
        (2, 0.56, None, 20, False),
        (2, None, None, 20, False),
    ],
)
def test_a_run_near_chance_names_keys(
    classes: int, local: float | None, global_: float | None, rounds: int, is_said: bool
) -> None:
    run = assemble(load_experiment(data=(X, np.arange(200) % classes)))
    summary: dict[str, Any] = {"local": local, "global": global_, "rounds": rounds, "score": "accuracy"}
    sentences = describe_outcome(run, summary)
    assert [("local.lr" in one, "local.clip_norm = 1.0" in one) for one in sentences] == [(True, True)] * is_said


def test_the_note_stands_at_the_end_of_the_run(tmp_path: Path) -> None:
    guessed = ff.run(data=(X, RNG.integers(0, 3, 200)), **FEW, out=tmp_path / "guessed")
    assert "local.lr" in guessed.notes[-1]
    target = ff.run(data=(X, RNG.normal(size=200)), **FEW, out=tmp_path / "regression")
    assert "local.lr" in target.notes[-1] and "R2" in target.notes[-1]
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    whole = {"rounds": 10, "method": {"name": "fedavg"}, "fleet": {"groups": [{"budget": 1.0}]}}
    learned = ff.run(data=(X, (X[:, 0] > 0).astype(int)), model=net, **whole, progress=False, out=tmp_path / "learned")
    assert learned.accuracy() > 0.8 and not any("local.lr below" in note for note in learned.notes)


@pytest.mark.parametrize(("local", "key"), [({}, "local.clip_norm = 1.0"), ({"clip_norm": 1.0}, '"adamw"')])
def test_diverged_jobs_are_counted(local: dict[str, Any], key: str) -> None:
    run = assemble(load_experiment(data=(X, np.arange(200) % 4), local=local))
    summary = {"local": 0.9, "global": 0.9, "rounds": 2, "score": "accuracy", "failure_reasons": {DIVERGED: 17, "x": 2}}
    (sentence,) = describe_outcome(run, summary)
    assert "17" in sentence and key in sentence
