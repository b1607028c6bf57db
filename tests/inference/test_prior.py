"""A client's class frequencies from counts: the formula by hand, what is refused, and a run's export with them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises, run_verb
from support.attacks import TINY
from tiny import tiny_data

import fleetfit as ff
from fleetfit.core import DataDescription
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.inference.export.prior import make_offset
from fleetfit.method import outputs

LABELS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])
SPLITS = {"train": torch.arange(6), "test": torch.arange(6, 8)}
NAMED = Data("animals", torch.zeros(8, 2), LABELS, SPLITS, 3, class_names=("cat", "dog", "owl"))
FLEET = (0.5, 0.25, 0.25)
COUNTS = [4, 0, 3]


def offset_by_hand(counts: list[float], fleet: tuple[float, ...]) -> list[float]:
    """log((n_c + 1) / (n + C)) - log p(c); for 4, 0, 3 and three classes p_k is 5/10, 1/10, 4/10."""
    total = sum(counts) + len(counts)
    return [math.log((n + 1) / total) - math.log(p) for n, p in zip(counts, fleet, strict=True)]


@pytest.mark.parametrize(
    "counts",
    [COUNTS, tuple(COUNTS), np.array(COUNTS), torch.tensor(COUNTS), {"owl": 3, "cat": 4}, {"0": 4, "2": 3, "1": 0},
     {"cat": 4.0, "2": 3.0}],
    ids=str,
)  # fmt: skip
def test_counts_in_three_forms_give_the_offset(counts: Any) -> None:
    assert make_offset(counts, FLEET, NAMED, None).tolist() == pytest.approx(offset_by_hand(COUNTS, FLEET), rel=1e-6)
    expected = [math.log(0.5), math.log(0.1), math.log(0.4)]
    uniform = make_offset(counts, (), NAMED, None)
    assert (uniform - math.log(3)).tolist() == pytest.approx(expected, rel=1e-6)


def test_the_client_s_own_data_are_counted() -> None:
    """Its training samples, three of class 0, one of 1 and two of 2; without any, all samples."""
    assert make_offset("own", FLEET, NAMED, NAMED).tolist() == pytest.approx(offset_by_hand([3, 1, 2], FLEET), rel=1e-6)
    tests = NAMED.share({"test": torch.arange(8)})
    assert make_offset("own", FLEET, NAMED, tests).tolist() == pytest.approx(offset_by_hand([3, 1, 4], FLEET), rel=1e-6)
    with raises(ConfigError, "--data", key="prior"):
        make_offset("own", FLEET, NAMED, None)


WRONG: dict[str, Any] = {
    "too few": [1, 2], "too many": [1, 2, 3, 4], "negative": [1, -1, 2], "not a number": [1, math.nan, 2],
    "infinite": [1, math.inf, 2], "huge": [1, 10**400, 2], "text": [1, "2", 3], "a truth": [True, 1, 2], "none": None,
    "one number": 3, "an unknown class": {"cow": 3}, "a number beyond": {"3": 1}, "a negative in a table": {"cat": -1},
    "nested": [[1, 2, 3]],
}  # fmt: skip


@pytest.mark.parametrize("counts", WRONG.values(), ids=WRONG.keys())
def test_counts_that_do_not_fit_are_refused(counts: Any, tmp_path: Path) -> None:
    with raises(ConfigError, key="prior") as caught:
        make_offset(counts, FLEET, NAMED, None)
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(counts))
    with raises(ConfigError, key="prior", path=file) as in_a_file:
        make_offset(file, FLEET, NAMED, None)
    assert str(in_a_file.value) == f"{file}: {caught.value}"


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text("3, 4")
    with raises(ConfigError, key="prior", path=tmp_path / "counts.json"):
        make_offset(tmp_path / "counts.json", FLEET, NAMED, None)
    with raises(ConfigError, key="prior", path=tmp_path / "missing.json") as caught:
        make_offset(str(tmp_path / "missing.json"), FLEET, NAMED, None)
    assert str(caught.value).count("missing.json") == 1


def test_a_fleet_s_classes_have_numbers() -> None:
    description = DataDescription("d", "classification", (2,), 3)
    assert torch.equal(make_offset({"0": 4, "2": 3}, (), description, None), make_offset(COUNTS, (), NAMED, None))
    with raises(ConfigError, "cat", key="prior"):
        make_offset({"cat": 4}, (), description, None)


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_a_task_without_classes_is_refused(task: str) -> None:
    with raises(ConfigError, task, key="prior"):
        make_offset([1, 2], (), DataDescription("d", task, (2,), 2), None)


# ---- a run's export --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    """Of a run that has asked for the fleet's class frequencies."""
    table = {**TINY, "rounds": 1, "evaluate": {**TINY["evaluate"], "personal": True}}
    return ff.run(table, out=tmp_path_factory.mktemp("shipped") / "run")


def test_an_exports_offset_is_relative_to_the_fleet(run: ff.Run, tmp_path: Path) -> None:
    counts, level = [40, 0, 0, 5], 2
    run.export(tmp_path / "out", level, forms=(), prior=counts)
    data = tiny_data()
    x = data.stored(data.split("test"))
    logits = torch.export.load(tmp_path / "out" / "model.pt2").module()(x)
    assert run.server.prior
    expected = torch.tensor(offset_by_hand([*map(float, counts)], run.server.prior))
    plain = outputs(run.model(level), data.batch(data.split("test"))[0])
    for ours, theirs in zip(plain, logits, strict=True):
        assert torch.allclose(ours + expected, theirs, atol=1e-5)


def test_the_prior_comes_from_a_file_or_own_data(run: ff.Run, tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps({"0": 40, "3": 5}))
    common = ["export", run.folder, "--level", "1", "--no-onnx", "--out"]
    printed = run_verb(*common, tmp_path / "file", "--prior", tmp_path / "counts.json", code=0).out
    assert "reveal" in printed
    run.export(tmp_path / "same", 1, forms=(), prior=[40, 0, 0, 5])
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("file", "same")]
    assert configs[0] == configs[1]
    own = ["--prior", "own", "--data", "tiny:tiny_data"]
    run_verb(*common, tmp_path / "own", *own, code=0)
    data = tiny_data()
    labels = data.y[data.split("train")].tolist()
    expected = offset_by_hand([float(labels.count(c)) for c in range(4)], run.server.prior)
    added = json.loads((tmp_path / "own" / "config.json").read_text())["added_to_logits"]
    assert added == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert "reveal" not in run_verb(*common, tmp_path / "plain", code=0).out
    (tmp_path / "counts.json").write_text("[1, 2]")
    run_verb(*common, tmp_path / "wrong", "--prior", tmp_path / "counts.json", code=2)
    assert not (tmp_path / "wrong").exists()
