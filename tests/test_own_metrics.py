"""Metrics of one's own (`evaluate.metrics`): each client's from all its samples, against brute force on every level."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import TINY
from support import raises
from torch import Tensor

import fleetfit as ff
from fleetfit.api.results import find_accuracy
from fleetfit.callbacks import scalars
from fleetfit.core import Evaluation, Failure, Update
from fleetfit.errors import ConfigError
from fleetfit.evaluation import make_job
from fleetfit.messages import dump_job, load_job as job_again
from fleetfit.validation import validate_reply

METRICS = """
import torch

def f1(outputs, y):
    "Macro F1: no mean over samples or batches."
    predicted, scores = outputs.argmax(-1), []
    for c in range(outputs.shape[-1]):
        right = int(((predicted == c) & (y == c)).sum())
        both = int((predicted == c).sum()) + int((y == c).sum())
        scores += [2 * right / both] if both else []
    return sum(scores) / len(scores)

def rank(outputs, y):
    "Not a number for some clients."
    return torch.tensor(float("nan")) if int(y.sum()) % 2 else outputs.softmax(-1).max()

def text(outputs, y):
    return "much"
"""


def table(folder: Path, *metrics: str, **evaluate: Any) -> dict[str, Any]:
    (folder / "mine.py").write_text(METRICS)
    section = {"metrics": [f"{folder}/mine.py:{one}" for one in metrics], "every": 0, "batch_norm": ["static"]}
    return {**TINY, "model": {**TINY["model"], "norm": False}, "evaluate": {**section, **evaluate}}


def f1(outputs: Tensor, y: Tensor) -> float:
    """Macro F1 from precision and recall, with loops."""
    scores = []
    for c in range(outputs.shape[1]):
        pairs = [(int(row.argmax()) == c, int(label) == c) for row, label in zip(outputs, y, strict=True)]
        right, predicted, there = sum(a and b for a, b in pairs), sum(a for a, _ in pairs), sum(b for _, b in pairs)
        if not predicted and not there:
            continue
        precision, recall = right / predicted if predicted else 0.0, right / there if there else 0.0
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return sum(scores) / len(scores)


def compute_metric(run: ff.Run, level: int, indices: Tensor) -> list[float]:
    """Return the metric at each exit of a level's model on these samples."""
    x, y = run.assembly.simulation.data.batch(indices)  # type: ignore[union-attr]
    with torch.no_grad():
        return [f1(z, y) for z in run.model(level)(x)]


def mean(values: list[float]) -> Any:
    return pytest.approx(sum(values) / len(values), abs=1e-9)


@pytest.mark.parametrize("engine", ["local", pytest.param("processes", marks=pytest.mark.slow)])
def test_metric_means_follow_accuracy(engine: str, tmp_path: Path) -> None:
    """Batches of 3 samples, whose means would be another number."""
    run = ff.run(table(tmp_path, "f1", batch_size=3), out=tmp_path / "run", engine={"name": engine})
    columns = run.columns["static"]["metrics"]["f1"]
    parts = run.assembly.simulation.parts  # type: ignore[union-attr]
    level_of = [int(level) + 1 for level in run.assembly.federation.level_of]
    full = [compute_metric(run, 3, part["test"]) for part in parts]
    own = [compute_metric(run, level, part["test"]) for level, part in zip(level_of, parts, strict=True)]
    assert columns["global"] == mean([values[-1] for values in full])
    assert columns["exits"] == [mean([values[e] for values in full]) for e in range(3)]
    assert columns["local"] == mean([values[-1] for values in own])
    for level in (1, 2, 3):
        mine = [values for values, its in zip(own, level_of, strict=True) if its == level]
        assert columns["levels"][str(level)]["local"] == mean([values[-1] for values in mine])
        assert columns["levels"][str(level)]["exits"] == [mean([v[e] for v in mine]) for e in range(level)]
    whole = run.assembly.simulation.data.split("test")  # type: ignore[union-attr]
    assert columns["test_levels"] == {
        str(level): pytest.approx(compute_metric(run, level, whole)[-1]) for level in (1, 2, 3)
    }
    assert columns["test_exits"] == pytest.approx(compute_metric(run, 3, whole))
    assert scalars(run.metrics[-1])["evaluate/static/metrics/f1/local"] == columns["local"]


def test_error_of_accuracy_says_where_metrics_are() -> None:
    columns = {"static": {"local": 0.5, "levels": {"1": {"local": 0.5}}, "metrics": {"f1": {"local": 0.25}}}}
    for level in (None, 1):
        with raises(ConfigError, 'columns["static"]["metrics"]["f1"]', key="kind"):
            find_accuracy(columns, "f1", level, "static")


def test_metrics_change_no_result(tmp_path: Path) -> None:
    measured, plain = (
        ff.run(table(tmp_path, *which), out=tmp_path / name) for name, which in (("told", ["f1"]), ("plain", []))
    )
    assert all(torch.equal(measured.server.state[name], plain.server.state[name]) for name in plain.server.state)
    without = {key: value for key, value in measured.columns["static"].items() if key != "metrics"}
    assert without == plain.columns["static"]
    assert "metrics" not in (plain.folder / "config.toml").read_text()


def test_missing_value_is_not_in_mean(tmp_path: Path) -> None:
    run = ff.run(table(tmp_path, "rank", "f1"), out=tmp_path / "run", rounds=1)
    metrics = run.columns["static"]["metrics"]
    data, parts = run.assembly.simulation.data, run.assembly.simulation.parts  # type: ignore[union-attr]
    values, every = [], []
    for x, y in (data.batch(part["test"]) for part in parts):
        every.append(int(y.sum()) % 2)
        if not every[-1]:
            with torch.no_grad():
                values.append(float(run.model(3)(x)[-1].softmax(-1).max()))
    assert 0 < sum(every) < len(every), "some have a value, and some have none"
    assert metrics["rank"]["global"] == pytest.approx(sum(values) / len(values))
    assert metrics["f1"]["global"] is not None


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (["f1"], "is not a function"),
        (["mine.py:nothing"], 'has no "nothing"'),
        (["mine.py:f1", "mine.py:f1"], 'two functions have the name "f1"'),
    ],
)
def test_unknown_metric_is_refused(metrics: list[str], message: str, tmp_path: Path) -> None:
    tables = table(tmp_path)
    tables["evaluate"]["metrics"] = [str(tmp_path / one) if ":" in one else one for one in metrics]
    with pytest.raises(ConfigError) as caught:
        ff.run(tables, out=tmp_path / "run")
    assert message in str(caught.value) and not (tmp_path / "run").exists()


def test_metric_must_return_number(tmp_path: Path) -> None:
    run = ff.run(table(tmp_path, "text"), out=tmp_path / "run", rounds=1)
    reasons = {failure["reason"] for failure in run.columns["failures"]}
    assert reasons and all('mine.py:text"' in reason and " str" in reason for reason in reasons)


def test_reply_must_have_requested_metrics(tmp_path: Path) -> None:
    run = ff.run(table(tmp_path, "f1"), out=tmp_path / "run", rounds=1)
    federation, name = run.assembly.federation, f"{tmp_path}/mine.py:f1"
    layout = federation.problem.layout
    plain, job = (
        make_job("evaluate", federation, run.server, 0, 0, 0, {}, Evaluation(metrics=metrics))
        for metrics in ((), (name,))
    )
    assert "metrics" not in dump_job(plain, layout)["evaluation"]
    assert dump_job(job, layout)["evaluation"]["metrics"] == [name]
    assert job_again({**dump_job(plain, layout), "state": {}}, layout).evaluation.metrics == ()

    def reply(**own: Any) -> Any:
        metrics: Mapping[str, Any] = {"n": 2, "correct": [1.0], "ensemble": 1.0, **own}
        piece = job.submodel
        return validate_reply(Update(job.round, 0, 0, 0, piece, piece, {}, 2, dict(metrics)), job, federation)

    assert isinstance(reply(own={name: [0.5]}), Update) and isinstance(reply(own={name: [None]}), Update)
    wrong: list[Any] = [{}, {name: []}, {name: [float("nan")]}, {name: ["x"]}, {name: [0.5], "more": [0.5]}, 3]
    assert [isinstance(reply(own=one), Failure) for one in wrong] == [True] * len(wrong)
    assert isinstance(reply(), Failure)
