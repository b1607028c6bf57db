"""FleetFit computes in its own type and mode, whatever PyTorch's state is around a call; that state is as before."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling import some_quick
from support.bits import assert_same_bits, has_same_bits

import fleetfit as ff
from fleetfit.anatomy import infer_layout
from fleetfit.architecture import check_layout
from fleetfit.models.cnn import cnn
from fleetfit.models.mlp import mlp


@contextlib.contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def everything() -> Iterator[None]:
    with float64(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        yield


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "float64": float64,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "everything": everything,
}
ONE_EACH = some_quick(list(STATES), ["everything", "inference_mode"])
GIVEN: dict[str, Any] = {
    "rounds": 2, "data": {"name": "digits", "partition": {"clients": 6}}, "local": {"max_steps": 3},
    "cohort": {"count": 3}, "fleet": {"tolerance": 0.3},
    "evaluate": {"batch_norm": ["static", "batch"], "statistics_samples": 100},
}  # fmt: skip


def state() -> tuple[Any, ...]:
    return (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    return ff.run(GIVEN, out=tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.parametrize("kind", ONE_EACH)
def test_run_has_equal_bits(plain: ff.Run, tmp_path: Path, kind: str) -> None:
    """Training, evaluation, predictions and what is read again; each call in that state, and it stays as it was."""

    def ask(one: ff.Run) -> tuple[Any, ...]:
        return one.predict().probabilities, list(one.predict_exits()), one.best_exit(), one.evaluate()

    expected = ask(plain)
    with STATES[kind]():
        before = state()
        run = ff.run(GIVEN, out=tmp_path / "run")
        assert state() == before
        again = ff.load(tmp_path / "run")
        assert again.columns == run.columns == plain.columns
        for one in (run, again):
            results = ask(one)
            assert (
                np.array_equal(results[0], expected[0])
                and all(map(torch.equal, results[1], expected[1]))
                and results[2:] == expected[2:]
            )
        module = again.model(1)
        assert ff.plan(GIVEN).to_toml() == plain.plan.to_toml()
        assert again.calibrate(budget=0.9).policy == plain.calibrate(budget=0.9).policy
        assert state() == before
    assert has_same_bits(run.server.state, plain.server.state) and has_same_bits(again.server.state, plain.server.state)
    assert_same_bits(dict(module.named_parameters()), dict(plain.model(1).named_parameters()))


@pytest.mark.parametrize("kind", ONE_EACH)
def test_resumed_run_has_equal_bits(plain: ff.Run, tmp_path: Path, kind: str) -> None:
    class Stop(Exception):
        pass

    def stop(report: Mapping[str, Any]) -> None:
        raise Stop

    with STATES[kind](), pytest.raises(Stop):
        ff.run(GIVEN, out=tmp_path / "run", on_round=stop, checkpoint={"every": 1})
    with STATES["everything"]():
        assert_same_bits(ff.resume(tmp_path / "run").server.state, plain.server.state)


ROWS: dict[str, Any] = {**GIVEN, "rounds": 1, "model": {"name": "mlp", "hidden": 16},
                        "compare": {"row": [{"method": "scalefl"}, {"method": "heterofl"}]}}  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> ff.Comparison:
    return ff.compare(ROWS, out=tmp_path_factory.mktemp("compared") / "plain")


@pytest.mark.parametrize("kind", ONE_EACH)
def test_other_calls(compared: ff.Comparison, tmp_path: Path, kind: str) -> None:
    architecture = cnn(10, 1)
    x, y = np.random.default_rng(0).normal(0, 1, (80, 5)), np.arange(80) % 2
    with STATES[kind]():
        assert ff.compare(ROWS, out=tmp_path / "other").table.rows == compared.table.rows
        check_layout(architecture, infer_layout(architecture), input_shape=(1, 8, 8))
        own = mlp(2, (5,), hidden=16)
        tensors = (torch.tensor(x, device="cpu"), torch.tensor(y, device="cpu"))  # perhaps inference tensors
        run = ff.run(data=tensors, model=own, rounds=1, fleet={"tolerance": 0.3}, out=tmp_path / "own")
        run.export(tmp_path / "device", 1, forms=())
    assert run.accuracy("local") >= 0


@pytest.mark.parametrize("engine", ["local", "processes"])
@pytest.mark.parametrize("line", ["torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.bfloat16)"])
def test_a_plug_in_that_sets_the_default_type(tmp_path: Path, engine: str, line: str) -> None:
    """When it is imported; the run computes as with one that does not."""
    states = []
    for name, first in (("plain", ""), ("own", line)):
        (tmp_path / f"{name}.py").write_text(
            f"import torch\nfrom fleetfit.models.mlp import mlp\n{first}\n"
            "def net(classes, input_shape):\n    return mlp(classes, input_shape, hidden=16)\n"
        )
        table = {**GIVEN, "model": {"name": f"{tmp_path}/{name}.py:net"}, "engine": {"name": engine}}
        states.append(ff.run(table, out=tmp_path / name).server.state)
    assert has_same_bits(*states) and torch.get_default_dtype() == torch.float32
