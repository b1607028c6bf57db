"""Predictions exit by exit: the numbers of the forward pass, nothing computed twice, nothing that is not needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import Expected, raises
from tiny import tiny_federation
from torch import nn

import fleetfit as ff
from fleetfit.anatomy import predictions
from fleetfit.errors import ConfigError, DataError, FleetFitError, ModelError
from fleetfit.evaluation import build_level_module
from fleetfit.rounds import start


class Counted(nn.Module):
    """Counts which parts of a module ran."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.exits, self.ran = inner, inner.exits, []

    def start(self, x: Any) -> Any:
        self.ran.append("start")
        return self.inner.start(x)

    def segment(self, i: int, carry: Any) -> Any:
        self.ran.append(f"segment{i}")
        return self.inner.segment(i, carry)

    def head(self, i: int, carry: Any) -> Any:
        self.ran.append(f"head{i}")
        return self.inner.head(i, carry)


@pytest.fixture
def module() -> nn.Module:
    federation, _ = tiny_federation({"name": "scalefl"}, norm=False)
    return build_level_module(federation, start(federation), 2, None)


def test_adaptive_predictions_equal_the_forward_pass(module: nn.Module) -> None:
    x, counted = torch.rand(5, 1, 4, 4), Counted(module)
    steps = predictions(counted, x)
    expected = module(x)
    sizes = []
    for i, logits in enumerate(steps):
        assert torch.equal(logits, expected[i]) and not logits.requires_grad
        sizes.append(list(counted.ran))
    assert sizes[0] == ["start", "segment0", "head0"]  # nothing beyond what the first prediction needs
    assert sizes[-1] == ["start", "segment0", "head0", "segment1", "head1", "segment2", "head2"]


def test_without_adaptive_only_the_last_classifier_runs(module: nn.Module) -> None:
    x, counted = torch.rand(5, 1, 4, 4), Counted(module)
    [logits] = predictions(counted, x, every=False)
    assert torch.equal(logits, module(x)[-1])
    assert counted.ran == ["start", "segment0", "segment1", "segment2", "head2"]


def test_the_modules_own_method(module: Any) -> None:
    x = torch.rand(3, 1, 4, 4)
    assert torch.equal(module.predict(x), module(x)[-1])
    assert [z.shape for z in module.predict_exits(x)] == [(3, 4)] * 3


def test_gradients_are_left_as_they_were(module: Any) -> None:
    steps = module.predict_exits(torch.rand(2, 1, 4, 4))
    next(steps)
    assert torch.is_grad_enabled()


def test_modules_without_segments_are_explained() -> None:
    class Plain(nn.Module):
        def forward(self, x: Any) -> Any:
            return [x]

    with raises(ModelError, "Plain"):
        predictions(Plain(), torch.zeros(1))


def test_a_run_predicts_at_every_level(tmp_path: Any) -> None:
    run = ff.run(
        {"rounds": 1, "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 4}},
         "model": {"name": "tiny:tiny"}, "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]},
         "evaluate": {"every": 0}}, out=tmp_path / "run",
    )  # fmt: skip
    data: Any = run.assembly.data
    x, _ = data.batch(data.split("test"))
    for level in (1, 2):
        with torch.no_grad():
            logits = run.model(level)(x)
        result = run.predict(level=level)
        torch.testing.assert_close(torch.from_numpy(result.probabilities), logits[-1].softmax(1))
        assert result.labels == logits[-1].argmax(1).tolist()
        for ours, theirs in zip(run.predict_exits(level=level), logits, strict=True):
            assert torch.equal(ours, theirs)
    best = run.best_exit(2)
    _, y = data.batch(data.split("validation"))
    everything = run.predict_exits(level=2, split="validation")
    accuracies = [float((logits.argmax(1) == y).double().mean()) for logits in everything]
    assert accuracies[best - 1] == max(accuracies) and accuracies.index(max(accuracies)) == best - 1
    assert 1 <= run.best_exit(2, client=3) <= len(run.model(2).exits)
    with raises(ConfigError, 0, 3):
        run.best_exit(2, client=4)
    wrong: tuple[tuple[Any, Expected], ...] = (
        (data.x[:, :, 1:], Expected("1, 3, 4]", "[N, 1, 4, 4]", kind=DataError, key="x")),
        (x, Expected("float32", "uint8", "run.model", kind=DataError, key="x")),
        (3, Expected("int", "DataFrame", kind=ConfigError, key="data")),
    )
    for samples, expected in wrong:
        for predict in (run.predict, run.predict_exits):
            with raises(FleetFitError, expected):
                predict(samples)
    for budget, mention in (
        (float("inf"), "inf"),
        ("1e400 M", "1e400"),
        (None, "None"),
    ):
        with raises(ConfigError, mention):
            run.calibrate(2, budget=budget)  # type: ignore[arg-type]


def test_the_default_level_is_the_largest_that_a_client_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No client has the full budget, so level 3 keeps parameters from the start."""
    run = ff.run(
        {"rounds": 1, "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 4}},
         "model": {"name": "tiny:tiny"}, "fleet": {"groups": [{"budget": 0.3}, {"budget": 0.6}], "tolerance": 0.5}},
        out=tmp_path / "run", progress=False,
    )  # fmt: skip
    data: Any = run.assembly.data
    rows = data.split("test")
    assert len(run.assembly.federation.levels) == 3
    assert run.predict().level == "2"
    other = run.evaluate(data=(data.x[rows], data.y[rows]))["static"]
    assert (
        list(other["levels"]) == ["1", "2"]
        and other["full"] == run.predict().accuracy == run.evaluate()["static"]["full"]
    )
    assert not caplog.records
    run.model(level=3)
    assert [record.args for record in caplog.records] == [("3",)]
