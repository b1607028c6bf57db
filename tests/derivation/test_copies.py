"""A device holds its level only: a module that is rebuilt from a spec has shapes alone, and the same levels."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from bed import ENTRIES
from plain_models import Patches
from support.bits import assert_same_bits
from support.derivation import derive_or_refuse, make_instance
from tiny import tiny_data
from torch import Tensor, nn

from fleetfit.anatomy.derive import (
    DerivedArchitecture,
    build_without_numbers,
    derive_architecture,
    restore_architecture,
)
from fleetfit.anatomy.observe import list_aliases
from fleetfit.core import Device, Job, Local, Problem, Update
from fleetfit.core.tasks import get_task
from fleetfit.errors import ModelError
from fleetfit.layout import Layout
from fleetfit.messages import pack, unpack
from fleetfit.submodel import extract
from fleetfit.training import initial_state, run_job
from fleetfit.training.local_model import LocalModel, initial_base

CPU = torch.device("cpu")
QUICK = {"vit_fused_qkv", "lstm_tied", "list_of_logits", "spectral_norm", "spectral_norm_by_hooks", "weight_norm",
         "weight_norm_by_hooks", "parametrized_symmetric", "unet", "column_embeddings", "mlp_batch_norm"}  # fmt: skip

NOT_TRAINED = {"multi_query"}  # no run begins with the infinite numbers of its table


def make_problem(architecture: DerivedArchitecture, example: Tensor) -> Problem:
    return Problem(architecture, tuple(example.shape[1:]), get_task("classification"), architecture.positions)


def assert_same_levels(whole: DerivedArchitecture, net: nn.Module, example: Tensor) -> None:
    """Compare the levels of an instance with those of one that was built without numbers."""
    plan = json.loads(json.dumps(whole.plan.to_payload()))
    ours, theirs = (make_problem(one, example) for one in (whole, restore_architecture(net, plan)))
    payload = json.loads(json.dumps(ours.layout.to_payload()))
    for layout in (theirs.layout, Layout.from_payload(payload, theirs.architecture.axes, theirs.exits)):
        assert list(ours.layout.complete.tensors.items()) == list(layout.complete.tensors.items())
        assert (ours.layout.aliases, ours.layout.base.keys()) == (layout.aliases, layout.base.keys())
    state, base = initial_state(ours, 0), initial_base(ours, 0)
    for width, exits in ((1.0, ours.exits), (0.5, ours.exits[:1])):
        piece, levels = ours.submodel(width, exits), []
        for problem in (ours, theirs):
            level = LocalModel(replace_base(problem, base), piece, CPU)
            level.load(extract(ours.layout, state, piece))
            levels.append(level)
        assert_same_bits(*(level.read() for level in levels))
        assert_same_bits(*(level.module.state_dict() for level in levels))
        assert list_aliases(levels[0].module) == list_aliases(levels[1].module)
        with torch.no_grad():
            logits = [level.module.eval()(example) for level in levels]
        assert_same_bits(*(dict(enumerate(some)) for some in logits))


def replace_base(problem: Problem, base: Any) -> Problem:
    return Problem(problem.architecture, problem.input_shape, problem.task, problem.exits, base=base)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.*norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENTRIES]
)
def test_modules_without_numbers_have_the_same_levels(name: str) -> None:
    derived = derive_or_refuse(name)
    if isinstance(derived, DerivedArchitecture) and name not in NOT_TRAINED:
        net = build_without_numbers(lambda: make_instance(name))
        assert_same_levels(derived, net, ENTRIES[name].example())


class NeedsNumbers(nn.Module):
    """Its constructor reads a parameter, or makes a buffer of one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(8, 16), nn.Linear(16, 4)
        nn.init.constant_(self.first.bias, 0.25)
        if kind == "number":
            self.shift = float(self.first.bias.sum())
        elif kind == "buffer":
            self.register_buffer("shift", self.first.bias.detach().sum(), persistent=False)
        else:
            self.shift = self.first.bias.detach().sum()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.first(x) + self.shift))
        return logits


@pytest.mark.parametrize("kind", ["number", "buffer", "tensor"])
def test_a_constructor_that_needs_numbers_gets_them(kind: str) -> None:
    torch.manual_seed(0)
    example, net = torch.randn(2, 8), build_without_numbers(lambda: NeedsNumbers(kind))
    assert all(parameter.is_meta for parameter in net.parameters())
    assert float(net.shift) == 4.0
    assert_same_levels(derive_architecture(NeedsNumbers(kind), example), net, example)


class Shared(nn.Module):
    """One parameter in two modules, and in a list; and a module that another thread makes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.rnn = nn.Linear(8, 8), nn.Linear(8, 8), nn.GRU(8, 8)
        self.listed = [nn.Parameter(torch.randn(8, 8))]
        self.a.weight = self.b.weight = self.rnn.weight_hh_l0 = self.listed[0]
        with ThreadPoolExecutor(1) as pool:
            self.others = [pool.submit(nn.Linear, 2, 2).result()]


def test_parameters_stay_the_same_objects() -> None:
    net = build_without_numbers(Shared)
    assert net.a.weight is net.b.weight is net.listed[0] is net.rnn._flat_weights[1]
    assert all(parameter.is_meta for parameter in net.parameters())
    assert not net.others[0].weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_errors_of_a_constructor_come_through() -> None:
    with pytest.raises(ZeroDivisionError):
        build_without_numbers(lambda: nn.Linear(1 // 0, 1))


CHILD = """
import json, sys
from pathlib import Path
from tiny import tiny_data
from fleetfit.core import Device, Job, Local
from fleetfit.hooks import rebuild_problem
from fleetfit.messages import pack, unpack
from fleetfit.training import run_job
folder = Path(sys.argv[1])
def peak():  # not ru_maxrss, which a child inherits from the process that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
def train(name):
    problem = rebuild_problem(json.loads((folder / f"{name}.json").read_text()))
    piece, state = problem.submodel(0.25, problem.exits[:1]), unpack((folder / name).read_bytes())
    job = Job("train", 0, 1, 0, 0, piece, state, {"name": "fedavg"}, seed=7, local=Local(lr=0.1))
    return problem, run_job(job, Device(problem, tiny_data()))[0].state
train("small")  # what is imported or made once
Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
before = peak()
problem, state = train("large")
(folder / "update").write_bytes(pack(state))
net = problem.architecture.net
print(json.dumps([peak() - before, sum(p.numel() for p in net.parameters() if not p.is_meta)]))
"""


def write_level(folder: Path, name: str, width: int) -> tuple[Problem, Job]:
    """Write the spec of a module and the state of its first level; return its problem and the level's job."""
    example = torch.zeros(2, 1, 4, 4)
    problem = make_problem(architecture := derive_architecture(Patches(width), example), example)
    spec = {
        "model": {"name": "plain_models:Patches", "width": width},
        "given": {"classes": 4, "input_shape": [1, 4, 4]},
        "task": "classification",
        "exits": list(problem.exits),
        "derived": architecture.plan.to_payload(),
    }
    piece = problem.submodel(0.25, problem.exits[:1])
    state = extract(problem.layout, initial_state(problem, 0), piece)
    (folder / f"{name}.json").write_text(json.dumps(spec))
    (folder / name).write_bytes(pack(state))
    return problem, Job("train", 0, 1, 0, 0, piece, state, {"name": "fedavg"}, seed=7, local=Local(lr=0.1))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc, which only Linux has")
def test_a_process_has_memory_for_its_level_only(tmp_path: Path) -> None:
    """A module of 105 MB is rebuilt and trained at a level of 2 MB, with the bits of one that has its numbers."""
    write_level(tmp_path, "small", 32)
    problem, job = write_level(tmp_path, "large", 1280)
    update, _ = run_job(job, Device(problem, tiny_data()))
    assert isinstance(update, Update)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rise, numbers = json.loads(done.stdout)
    assert numbers == 0
    assert rise < 60e6
    assert_same_bits(unpack((tmp_path / "update").read_bytes()), update.state)


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(8, 16, proj_size=4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


class Sampled(nn.Linear):
    """A layer of PyTorch with other parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        del self.weight
        self.mean = nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.mean, self.bias)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_layers_whose_sizes_are_in_other_parameters_come_to_an_end() -> None:
    """A linear layer without a weight is derived; an LSTM with projections may be refused."""
    with contextlib.suppress(ModelError):
        derive_architecture(Projected(), torch.randn(2, 5, 8))
    derived = derive_architecture(nn.Sequential(Sampled(6, 12), nn.ReLU(), nn.Linear(12, 3)), torch.randn(2, 6))
    assert [axis.size for axis in derived.axes.values() if axis.scaled] == [12]
