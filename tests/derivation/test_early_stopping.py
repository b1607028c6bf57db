"""Levels of a plain module stop early by a hook: the numbers are those of the same net with segments."""

import copy
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises, run_verb
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import Architecture, Axis, ExitModel, predictions
from fleetfit.anatomy.derive import DerivedArchitecture, derive_architecture
from fleetfit.anatomy.exits import ExitHead
from fleetfit.anatomy.proof.explain import describe_exits
from fleetfit.core.arithmetic import Arithmetic
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.inference import (
    Policy,
    calibrate,
    compute_scores,
    exit_costs,
    measure_exit_latencies,
    stop_early,
)
from fleetfit.training.runtime import prepare_model

CLASSES, SHAPE, STEM, HIDDEN, EXITS = 4, (1, 6, 6), 8, 12, (1, 2, 3, 4)
POLICIES = [(0.3, 0.28, 0.3, 0.0), (0.0, 0.0, 0.0, 0.0), (2.0, 2.0, 2.0, 0.0), (2.0, 0.0, 2.0, 0.0)]


class Block(nn.Module):
    def __init__(self, stem: int, hidden: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(stem, hidden, 3, padding=1), nn.BatchNorm2d(hidden)
        self.down = nn.Conv2d(hidden, stem, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.norm(self.up(x)).relu_())).relu_()


class Plain(nn.Module):
    """A network without a thought of exits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, STEM, 3)
        self.blocks = nn.Sequential(*[Block(STEM, HIDDEN) for _ in range(4)])
        self.fc = nn.Linear(STEM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Written(ExitModel):
    """The same, with segments."""

    def __init__(self, stem: int, hidden: list[int], exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        self.stem = nn.Conv2d(1, stem, 3)
        self.blocks = nn.ModuleList(Block(stem, hidden[i]) for i in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): ExitHead(stem, CLASSES, 1, False) for e in exits if e < 4})
        self.fc = nn.Linear(stem, CLASSES)

    def start(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def head(self, i: int, carry: Tensor) -> Tensor:
        logits: Tensor = self.fc(carry.mean((2, 3))) if self.exits[i] == 4 else self.heads[str(self.exits[i])](carry)
        return logits


class WrittenArchitecture(Architecture):
    blocks = 4

    def __init__(self) -> None:
        self.axes = {"stem": Axis(STEM)} | {f"blocks.{i}.up": Axis(HIDDEN) for i in range(4)}

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return Written(axes["stem"], [axes[f"blocks.{i}.up"] for i in range(4)], exits)


@pytest.fixture(scope="module")
def architecture() -> DerivedArchitecture:
    torch.manual_seed(0)
    return derive_architecture(Plain(), torch.randn(2, *SHAPE))


@pytest.fixture(scope="module")
def data() -> Data:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(120, *SHAPE, generator=rng), torch.randint(CLASSES, (120,), generator=rng)
    indices = torch.arange(120)
    return Data("d", x, y, {"train": indices[:40], "validation": indices[40:80], "test": indices[80:]}, CLASSES)


def build_pair(architecture: DerivedArchitecture, width: float, exits: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a level of the derived module, and the net with segments of the same tensors."""
    torch.manual_seed(1)
    level = architecture.build(architecture.sizes(width), exits).eval()
    for tensor in level.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.2 * torch.rand_like(tensor))
    written = WrittenArchitecture().build(WrittenArchitecture().sizes(width), exits).eval()
    state = {name.removeprefix("net."): tensor for name, tensor in level.state_dict().items()}
    written.load_state_dict(state, strict=exits[-1] == 4)
    return level, written


class Counter:
    """Counts the runs of a level's blocks and classifiers."""

    def __init__(self, level: nn.Module) -> None:
        self.ran: list[str] = []
        for name, part in level.named_modules():
            if isinstance(part, Block | ExitHead) or name == "net.fc":
                part.register_forward_pre_hook(lambda *_, name=name: self.ran.append(name.removeprefix("net.")))


PATH = ["blocks.0", "heads.1", "blocks.1", "heads.2", "blocks.2", "heads.3", "blocks.3", "fc"]


@pytest.mark.parametrize(("width", "exits"), [(1.0, EXITS), (0.5, (1, 2)), (0.5, (2, 4)), (0.75, (4,))])
def test_levels_equal_the_net_with_segments(
    architecture: DerivedArchitecture, data: Data, width: float, exits: tuple[int, ...]
) -> None:
    level, written = build_pair(architecture, width, exits)
    ours, theirs = compute_scores(level, data), compute_scores(written, data)
    assert torch.equal(ours.logits, theirs.logits) and ours.accuracies == theirs.accuracies
    sizes = WrittenArchitecture().sizes(width)
    costs = exit_costs(architecture, {**architecture.sizes(1.0), **sizes}, exits, SHAPE)
    assert costs == exit_costs(WrittenArchitecture(), sizes, exits, SHAPE)
    for ours_z, theirs_z in zip(predictions(level, data.x[:3]), predictions(written, data.x[:3]), strict=True):
        assert torch.equal(ours_z, theirs_z)


@pytest.mark.parametrize("thresholds", POLICIES)
@pytest.mark.parametrize("batch", [1, 40])
def test_samples_stop_where_those_of_segments_do(
    architecture: DerivedArchitecture, data: Data, thresholds: tuple[float, ...], batch: int
) -> None:
    level, written = build_pair(architecture, 0.5, EXITS)
    for x in data.x[:40].split(batch):
        ours, theirs = stop_early(level, x, Policy(thresholds)), stop_early(written, x, Policy(thresholds))
        assert torch.equal(ours.exits, theirs.exits)
        assert torch.allclose(ours.logits, theirs.logits, atol=1e-6)


def test_calibration_is_that_of_segments(architecture: DerivedArchitecture, data: Data) -> None:
    level, written = build_pair(architecture, 0.5, EXITS)
    costs = exit_costs(WrittenArchitecture(), WrittenArchitecture().sizes(0.5), EXITS, SHAPE)
    ours, theirs = (
        calibrate("1", *(compute_scores(module, data, split) for split in ("validation", "test")), costs,
                  0.6 * costs[-1], temperature=True).numbers()
        for module in (level, written)
    )  # fmt: skip
    assert ours == theirs and len(set(ours["test"]["shares"])) > 1


@pytest.mark.parametrize("exit", range(4))
def test_nothing_runs_behind_the_exit_of_a_sure_sample(architecture: DerivedArchitecture, exit: int) -> None:
    level, _ = build_pair(architecture, 0.5, EXITS)
    counter, thresholds = Counter(level), tuple(0.0 if i >= exit else 2.0 for i in range(4))
    stopped = stop_early(level, torch.randn(1, *SHAPE), Policy(thresholds))
    assert stopped.exits.tolist() == [exit]
    assert counter.ran == PATH[: 2 * exit + 2]


def test_a_batch_runs_to_its_last_exit(architecture: DerivedArchitecture, data: Data) -> None:
    level, _ = build_pair(architecture, 1.0, EXITS)
    x = data.x[:40]
    first = ff.inference.confidence(next(predictions(level, x))).sort().values
    counter = Counter(level)
    stopped = stop_early(level, x, Policy((float(first[20]), 0.0, 0.0, 0.0)))
    assert sorted(set(stopped.exits.tolist())) == [0, 1]
    assert counter.ran == PATH[:4]


def test_a_policy_of_other_exits_is_refused(architecture: DerivedArchitecture) -> None:
    level, _ = build_pair(architecture, 0.5, (1, 2, 4))
    with raises(ConfigError, 2, 3, key="policy"):
        stop_early(level, torch.zeros(1, *SHAPE), Policy((0.5, 0.0)))


@pytest.mark.parametrize(("exits", "ran"), [(EXITS, [*PATH[::2], "fc"]), ((1, 3), [*PATH[0:6:2], "heads.3"])])
def test_the_last_exit_alone_costs_no_other_classifier(
    architecture: DerivedArchitecture, exits: tuple[int, ...], ran: list[str]
) -> None:
    level, _ = build_pair(architecture, 0.5, exits)
    x = torch.randn(3, *SHAPE)
    counter = Counter(level)
    [last] = predictions(level, x, every=False)
    assert counter.ran == ran and not last.requires_grad
    with torch.no_grad():
        expected = level(x)
    assert len(expected) == len(exits) and torch.equal(last, expected[-1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which torch.compile hides
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_levels_stop_where_others_do(
    architecture: DerivedArchitecture, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    level, _ = build_pair(architecture, 0.5, EXITS)
    compiled = prepare_model(copy.deepcopy(level), Arithmetic(compile=True), torch.device("cpu"))
    x, policy = torch.randn(5, *SHAPE), Policy((2.0, 0.0, 0.0, 0.0))
    for _ in range(2):
        torch.testing.assert_close(compiled(x), level(x))
        torch.testing.assert_close([*predictions(compiled, x)], [*predictions(level, x)])
        torch.testing.assert_close([*predictions(compiled, x, every=False)], [level(x)[-1].detach()])
        stopped, expected = stop_early(compiled, x, policy), stop_early(level, x, policy)
        assert torch.equal(stopped.exits, expected.exits)
        torch.testing.assert_close(stopped.logits, expected.logits)
    for module in (level, compiled):
        torch.stack([logits.square().mean() for logits in module.train()(x)]).sum().backward()
    for ours, theirs in zip(compiled.parameters(), level.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


# ---- exit by exit --------------------------------------------------------------------------------------------------


def test_predictions_compute_no_block_twice(architecture: DerivedArchitecture) -> None:
    level, _ = build_pair(architecture, 0.5, EXITS)
    x = torch.randn(3, *SHAPE)
    with torch.no_grad():
        expected = level(x)
    counter, threads = Counter(level), threading.active_count()
    steps = predictions(level, x)
    for i, logits in enumerate(steps):
        assert torch.equal(logits, expected[i]) and not logits.requires_grad
        assert counter.ran == PATH[: 2 * i + 2]
    assert threading.active_count() == threads and torch.is_grad_enabled()


def test_a_caller_that_stops_saves_the_rest(architecture: DerivedArchitecture) -> None:
    level, _ = build_pair(architecture, 0.5, EXITS)
    counter, threads = Counter(level), threading.active_count()
    steps = predictions(level, torch.randn(3, *SHAPE))
    next(steps)
    del steps
    assert threading.active_count() == threads
    assert counter.ran == PATH[:2]
    assert not level.net.blocks[0]._forward_hooks


def test_errors_of_forward_reach_the_caller(architecture: DerivedArchitecture) -> None:
    level, _ = build_pair(architecture, 0.5, EXITS)
    level.net.blocks[1] = nn.Linear(99, 1)
    steps = predictions(level, torch.randn(3, *SHAPE))
    next(steps)
    with raises(RuntimeError, 99):
        next(steps)


def test_latencies_rise_from_exit_to_exit(architecture: DerivedArchitecture) -> None:
    level, _ = build_pair(architecture, 0.5, EXITS)
    latencies = measure_exit_latencies(level, torch.randn(1, *SHAPE), passes=5)
    assert len(latencies) == 4 and latencies == sorted(latencies) and latencies[0] > 0


def test_half_precision_ends_behind_each_exit(architecture: DerivedArchitecture) -> None:
    level, _ = build_pair(architecture, 0.5, EXITS)
    forward, dtypes = level.forward, []

    def run(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return forward(x)

    level.forward = run
    level.visit_exits(torch.randn(3, *SHAPE), lambda i, z: bool(dtypes.append(z.dtype)))
    assert dtypes == [torch.float32] * 4


def test_the_check_tells_that_a_level_can_stop(architecture: DerivedArchitecture) -> None:
    level, written = build_pair(architecture, 1.0, EXITS)

    class Listed(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return list(written(x))

    assert not any("cannot stop" in line for line in describe_exits(architecture, level))
    assert any("cannot stop" in line for line in describe_exits(architecture, Listed()))


# ---- a run ---------------------------------------------------------------------------------------------------------


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)])
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))
"""


def test_a_run_calibrates_predicts_and_stops(tmp_path: Path) -> None:
    """`best` is the exit of the highest validation accuracy; nobody stops behind it."""
    path, out = tmp_path / "net.py", tmp_path / "run"
    path.write_text(NET)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(160, 1, 6, 6)).astype("float32"), np.arange(160) % 4
    np.savez(tmp_path / "data.npz", x=x + y[:, None, None, None], y=y)
    run = ff.run(
        model=f"{path}:Net", data={"path": str(tmp_path / "data.npz")}, rounds=2, out=out, local={"max_steps": 4},
        method="scalefl",
    )  # fmt: skip
    calibration = run.calibrate(budget=0.8)
    assert calibration.test.cost <= 0.9 * calibration.costs[-1]
    samples = torch.from_numpy(x[:5])
    exits = list(run.predict_exits(x[:5]))
    assert len(exits) == len(calibration.costs) > 1
    assert torch.equal(run.model()(samples)[-1], exits[-1])
    assert run.predict(x[:5]).classes.tolist() == exits[-1].argmax(1).tolist()
    for options in ([], ["--adaptive"], ["--stop"], ["--best-exit"]):
        assert run_verb("predict", str(out), *options).code == 0, options
