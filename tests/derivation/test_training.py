"""Modules whose training differs from their evaluation, or that are not finished: they train, or are refused before."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fleetfit as ff
from fleetfit.anatomy.derive import derive_architecture
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.config.assemble.model import build_problem
from fleetfit.core import Problem, check_rebuildable
from fleetfit.cost import training_memory
from fleetfit.errors import ConfigError, ModelError, NoUsableUpdates

FLEET = {"groups": [{"budget": 0.4}, {"budget": 1.0}], "tolerance": 0.4}
COMPILING = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
EXITS = ["blocks.0", "blocks.1", "blocks.2"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Blocks(nn.Module):
    """A stream with four blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def call(self, i: int, x: Tensor) -> Tensor:
        out: Tensor = self.blocks[i](x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(len(self.blocks)):
            x = self.call(i, x)
        out: Tensor = self.head(x)
        return out


class Recomputing(Blocks):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def call(self, i: int, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.blocks[i], x, use_reentrant=self.use_reentrant)
        return out


class Dropping(Blocks):
    """Layer drop. A test says which blocks are dropped."""

    dropped: tuple[int, ...] | None = None

    def call(self, i: int, x: Tensor) -> Tensor:
        if self.training and (torch.rand([]) < 0.3 if self.dropped is None else i in self.dropped):
            return x
        return super().call(i, x)


class FailingInTraining(Blocks):
    def call(self, i: int, x: Tensor) -> Tensor:
        if self.training:
            raise TypeError("this has no training mode")
        return super().call(i, x)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out


def make_rows() -> tuple[Any, Any]:
    y = np.arange(90) % 3
    return (np.random.default_rng(0).normal(size=(90, 6)) + y[:, None]).astype("float32"), y


def run(net: Any, out: Path) -> ff.Run:
    return ff.run(model=net, data=make_rows(), rounds=1, fleet=FLEET, progress=False, out=out)


# ---- torch.utils.checkpoint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("exits", [(1, 2, 3, 4), (1, 2), (4,)])
def test_recomputed_blocks_have_the_gradients_of_others(use_reentrant: bool, exits: tuple[int, ...]) -> None:
    x, gradients = torch.randn(5, 6), []
    for net in (Recomputing(use_reentrant), Blocks()):
        level = derive_architecture(net, x[:2], EXITS).build({}, exits)
        for i, head in enumerate(level.heads.values()):
            nn.init.constant_(head.fc.weight, 0.1 * (i + 1))
            nn.init.zeros_(head.fc.bias)
        torch.stack([logits.square().sum() for logits in level.train()(x)]).sum().backward()
        gradients.append({name: p.grad for name, p in level.named_parameters()})
    ours, theirs = gradients
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert gradient is not None and torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_blocks_are_counted_and_trained(use_reentrant: bool, tmp_path: Path) -> None:
    trained = run(Recomputing(use_reentrant), tmp_path / "checkpoint")
    assert trained.summary["failures"] == 0
    assert trained.accuracy("local") == run(Blocks(), tmp_path / "plain").accuracy("local")
    sizes = derive_architecture(Blocks(), torch.randn(2, 6)).plan.axes
    memory = [
        training_memory(derive_architecture(net, torch.randn(2, 6), EXITS), sizes, (2, 4), (6,), 8)
        for net in (Recomputing(use_reentrant), Blocks())
    ]
    assert memory[0] == memory[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_own_training_of_a_person_still_recomputes(use_reentrant: bool) -> None:
    net, ran = Recomputing(use_reentrant), 0

    def count(*_: Any) -> None:
        nonlocal ran
        ran += 1

    derive_architecture(net, torch.randn(2, 6)).build({}, (1,))(torch.randn(2, 6))
    net.blocks[1].register_forward_pre_hook(count)
    net(torch.randn(2, 6)).sum().backward()
    assert ran == 2


# ---- layer drop ----------------------------------------------------------------------------------------------------


def test_an_exit_whose_block_is_dropped_is_the_next_one() -> None:
    x, net = torch.randn(5, 6), Dropping()
    level = derive_architecture(net, x[:2], EXITS).build({}, (1, 2, 4))
    level.net.dropped = (0, 1)
    first, second, last = level.train()(x)
    assert torch.equal(first, last) and torch.equal(second, last)
    assert torch.equal(last, level.net.head(level.net.blocks[3](level.net.blocks[2](level.net.stem(x)))))


def test_the_last_exit_reads_the_stream_where_its_block_is_dropped() -> None:
    x, net = torch.randn(5, 6), Dropping()
    level = derive_architecture(net, x[:2], EXITS).build({}, (1, 2))
    level.net.dropped = (1,)
    first, second = level.train()(x)
    stream = level.net.blocks[0](level.net.stem(x))
    assert torch.equal(first, level.heads["1"](stream)) and torch.equal(second, level.heads["2"](stream))


def test_layer_drop_trains_and_its_memory_is_counted(tmp_path: Path) -> None:
    assert run(Dropping(), tmp_path).summary["failures"] == 0
    derived = {kind: derive_architecture(kind(), torch.randn(2, 6), EXITS) for kind in (Dropping, Blocks)}
    ours, theirs = (training_memory(one, one.plan.axes, (2, 4), (6,), 8) for one in derived.values())
    assert abs(ours - theirs) < 100  # the random numbers


def test_a_job_that_fails_in_any_way_does_not_end_the_run(tmp_path: Path) -> None:
    with raises(NoUsableUpdates, "TypeError", "no training mode"):
        run(FailingInTraining(), tmp_path)


# ---- lazy and compiled modules -------------------------------------------------------------------------------------


def test_lazy_layers_get_their_sizes_from_the_data(tmp_path: Path) -> None:
    net = Lazy()
    assert run(net, tmp_path / "run").summary["failures"] == 0
    assert (net.first.in_features, net.norm.num_features, net.training) == (6, 16, True)
    again = Lazy()
    ff.derive(again, make_rows(), progress=False)
    assert torch.equal(net.first.weight, again.first.weight)


def test_lazy_layers_that_do_not_take_the_data_are_refused() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(5, 3))
    with raises(ModelError, 6, key="model.name"):
        ff.derive(net, make_rows(), progress=False)


@COMPILING
@pytest.mark.parametrize("name", ["make_lazy", "make_compiled"])
def test_other_processes_rebuild_them(name: str) -> None:
    experiment = load_experiment(data=make_rows(), model={"name": f"{Path(__file__)}:{name}"})
    problem = build_problem(experiment, build_data(experiment.data))
    assert problem.spec is not None
    rebuilt = Problem.from_spec(copy.deepcopy(problem.spec))
    assert rebuilt.layout.tensors == problem.layout.tensors


@pytest.mark.parametrize("kind", ["seeded", "buffer", "attribute", "unsaved", "order", "array"])
def test_constants_that_each_process_would_draw_anew_are_refused(kind: str) -> None:
    experiment = load_experiment(data=make_rows(), model={"name": f"{Path(__file__)}:Projecting", "kind": kind})
    problem = build_problem(experiment, build_data(experiment.data))
    if kind in ("seeded", "buffer"):
        check_rebuildable(problem, "nodes")
    else:
        with raises(ConfigError, "order" if kind == "order" else "features", key="model.name"):
            check_rebuildable(problem, "nodes")


class Projecting(nn.Module):
    """Random features of rows, kept in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0) if kind in ("seeded", "order") else None
        features = torch.randn(6, 16, generator=rng)
        self.register_buffer("order", torch.randperm(6) if kind == "order" else torch.arange(6))
        if kind in ("buffer", "unsaved"):
            self.register_buffer("features", features, persistent=kind == "buffer")
        else:
            self.features = features.numpy() if kind == "array" else features
        self.body = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x[:, self.order] @ torch.as_tensor(self.features).to(x))


def make_lazy() -> nn.Module:
    return Lazy()


def make_compiled() -> nn.Module:
    return torch.compile(Blocks())  # type: ignore[return-value]


@COMPILING
def test_a_compiled_module_is_derived_from_the_module_inside() -> None:
    derived = ff.derive(make_compiled(), make_rows(), progress=False)
    assert derived.plan == ff.derive(Blocks(), make_rows(), progress=False).plan


@COMPILING
def test_a_compiled_part_is_refused_before_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Blocks()
    net.blocks[1] = torch.compile(net.blocks[1])  # type: ignore[assignment]
    monkeypatch.setattr(Block, "forward", None)  # it is not called
    with raises(ModelError, "blocks.1", key="model"):
        ff.derive(net, make_rows(), progress=False)
