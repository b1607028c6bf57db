"""Models that make tensors in `forward` and name neither device nor type are counted, proved, measured and trained."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import raises, run_verb
from torch import Tensor, nn
from zoo import CLASSES, Made, arrange, lstm

from fleetfit.anatomy import Axis, Segment, build_module, place_module
from fleetfit.anatomy.proof import check_layout
from fleetfit.architecture import Architecture, ExitModel
from fleetfit.core import Problem
from fleetfit.core.tasks import get_task
from fleetfit.cost import Conditions, get_latency, submodel_cost, training_memory
from fleetfit.cost.latency import measure_latency
from fleetfit.errors import ModelError
from fleetfit.machine import tensor_defaults
from fleetfit.submodel import full_submodel
from fleetfit.training import get_local_model

STEPS, FEATURES, WIDE = 4, 5, 6
HOST = torch.device("cpu")


class Recurrent(nn.Module):
    """Begins from states that `forward` makes: [layers, B, wide]."""

    def __init__(self, wide: int, classes: int, start: Callable[[int, int], Tensor], gru: bool = False) -> None:
        super().__init__()
        self.wide, self.start, self.gru = wide, start, gru
        self.net = (nn.GRU if gru else nn.LSTM)(FEATURES, wide, num_layers=2, batch_first=True)
        self.fc = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.start(len(x), self.wide)
        out = self.net(x, h) if self.gru else self.net(x, (h, self.start(len(x), self.wide)))
        return self.fc(out[0][:, -1])


def recurrent(start: Callable[[int, int], Tensor], gru: bool = False) -> Made:
    axes = {"wide": Axis(WIDE), "classes": CLASSES}
    return Made(axes, lambda s: Recurrent(s["wide"], s["classes"], start, gru), (STEPS, FEATURES))


class Layers(nn.Module):
    """Two layers with something of the model's own between them; h is [B, steps, wide]."""

    def __init__(self, wide: int, classes: int, between: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.up, self.fc = nn.Linear(FEATURES, wide), nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.between(self, self.up(x)).relu().mean(1))


def layers(between: Callable[[nn.Module, Tensor], Tensor]) -> Made:
    axes = {"wide": Axis(WIDE), "classes": CLASSES}
    return Made(axes, lambda s: Layers(s["wide"], s["classes"], between), (STEPS, FEATURES))


def causal(_: nn.Module, h: Tensor) -> Tensor:
    hidden = torch.ones(h.shape[1], h.shape[1]).triu(1).bool()
    return (torch.eye(h.shape[1]) @ h) + torch.zeros(h.shape[1], h.shape[1]).masked_fill(hidden, -1.0) @ h


GLOBAL = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as tutorials have it
MODELS = {
    "h0 and c0 of an LSTM": recurrent(lambda n, wide: torch.zeros(2, n, wide)),
    "h0 of a GRU": recurrent(lambda n, wide: torch.zeros(2, n, wide), gru=True),
    "h0 moved to a device of the file": recurrent(lambda n, wide: torch.zeros(2, n, wide).to(GLOBAL)),
    "h0 of torch.full": recurrent(lambda n, wide: torch.full((2, n, wide), 0.25)),
    "noise in training": layers(lambda m, h: h + 0.1 * torch.randn(h.shape) if m.training else h),
    "a mask drawn in training": layers(lambda m, h: h * (torch.rand(h.shape[0], 1, 1) < 0.9) if m.training else h),
    "positions": layers(lambda _, h: h + torch.arange(h.shape[1])[:, None] / h.shape[1]),
    "positions in real numbers": layers(lambda _, h: h * torch.linspace(0.5, 1.5, h.shape[1])[:, None]),
    "an identity matrix": layers(lambda _, h: torch.eye(h.shape[1]).expand(len(h), -1, -1) @ h),
    "a causal mask": layers(causal),
    "a number": layers(lambda _, h: h * torch.tensor(1.5) + torch.tensor([0.5])),
    "a place to write to": layers(lambda _, h: torch.empty(h.shape).copy_(h).index_fill(1, torch.tensor([0]), 0.0)),
}


@pytest.mark.parametrize("name", MODELS)
def test_own_tensors_are_proved(name: str) -> None:
    architecture = MODELS[name]
    report = check_layout(architecture, input_shape=architecture.input_shape)
    assert not report.not_proved and max([*report.cuts.values(), *report.permutation.values()]) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_own_tensors_are_counted_and_measured(name: str) -> None:
    architecture = MODELS[name]
    exits, sizes = (1,), {"wide": WIDE, "classes": 3}
    parameters = sum(p.numel() for p in build_module(architecture, sizes, exits).parameters())
    cost = submodel_cost(architecture, (sizes, exits), architecture.input_shape)
    assert cost.parameters == parameters and cost.multiply_adds > 0
    assert training_memory(architecture, sizes, exits, architecture.input_shape, 8) > 4 * 3 * parameters
    assert get_latency(architecture, sizes, exits, architecture.input_shape, Conditions()).median_s > 0


def test_lstm_with_own_state_costs_the_same() -> None:
    """By hand: each of 4 steps multiplies 4 gates by 5 features and 6 channels, then the classifier 6 by 3."""
    single = Made(
        {"hidden": Axis(6), "classes": CLASSES},
        lambda s: First(s["hidden"], s["classes"]),
        (STEPS, FEATURES),
    )
    costs = [submodel_cost(architecture, ({}, (1,)), (STEPS, FEATURES)) for architecture in (single, lstm())]
    assert costs[0] == costs[1]
    assert costs[0].multiply_adds == STEPS * 4 * 6 * (FEATURES + 6) + 6 * 3


class First(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.lstm, self.fc = nn.LSTM(FEATURES, hidden, batch_first=True), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(1, len(x), self.hidden)
        return self.fc(self.lstm(x, (h, h))[0][:, -1])


def test_wrong_layout_with_own_tensors_is_refused() -> None:
    architecture = recurrent(lambda n, wide: torch.zeros(2, n, wide))
    layout = architecture.infer()
    gates = {(name, 0): (Segment("wide", per=4),) for name in layout.tensors if name.startswith("net.")}
    with raises(ModelError, '"wide"'):
        check_layout(architecture, arrange(layout, gates), input_shape=architecture.input_shape)


def test_unused_tensors_are_found() -> None:
    """A bias that a mean over the steps takes away again."""

    class Shifted(Layers):
        def __init__(self, wide: int, classes: int) -> None:
            super().__init__(wide, classes, lambda m, h: torch.eye(h.shape[1]) @ (h - h.mean(1, keepdim=True)))

    architecture = Made(
        {"wide": Axis(WIDE), "classes": CLASSES}, lambda s: Shifted(s["wide"], s["classes"]), (STEPS, FEATURES)
    )
    assert check_layout(architecture, input_shape=architecture.input_shape).inert == ("up.bias",)


class Steps(ExitModel):
    """Blocks that each multiply by a matrix of their own making."""

    def __init__(self, wide: int, classes: int, exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        self.stem = nn.Linear(FEATURES, wide)
        self.blocks = nn.ModuleList(Turn(wide) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(wide, classes) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return self.stem(torch.eye(len(x)) @ x)


class Turn(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.fc = nn.Linear(wide, wide)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.eye(len(x)).flip(0) @ x).tanh()


class Several(Architecture):
    blocks = 3

    def __init__(self) -> None:
        self.axes = {"wide": Axis(WIDE), "classes": CLASSES}

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return Steps(axes["wide"], axes["classes"], exits)


def test_models_with_exits_are_proved_at_every_depth() -> None:
    report = check_layout(Several(), input_shape=(FEATURES,))
    assert max(report.cuts.values()) < 1e-12 and len(report.levels) == 4


class Norm(nn.Module):
    """Keeps the norm of a weight as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.ones(1))
        self.norm: Tensor

    def forward(self, w: Tensor) -> Tensor:
        if self.training:
            self.norm.copy_(w.detach().norm())
        return w / self.norm


def test_derived_state_is_found() -> None:
    def make(s: Mapping[str, int]) -> nn.Module:
        module = First(s["hidden"], s["classes"])
        nn.utils.parametrize.register_parametrization(module.fc, "weight", Norm())
        return module

    architecture = Made({"hidden": Axis(6), "classes": CLASSES}, make, (STEPS, FEATURES))
    with raises(ModelError, '"fc.parametrizations.weight.0.norm"'):
        check_layout(architecture, input_shape=architecture.input_shape)


# ---- check-model, plan, run and export agree -------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn
from fleetfit.architecture import Architecture, Axis

class Net(nn.Module):
    def __init__(self, h, classes):
        super().__init__()
        self.h = h
        self.lstm, self.fc = nn.LSTM(8, h, batch_first=True), nn.Linear(h, classes)
    def forward(self, x):
        x = x.squeeze(1)
        h0 = torch.zeros(1, x.shape[0], self.h{named})
        out, _ = self.lstm(x, (h0, h0))
        return self.fc(out[:, -1])

class Family(Architecture):
    blocks = 1
    def __init__(self, classes, h=24):
        self.axes = {{"h": Axis(h), "classes": Axis(classes, scaled=False)}}
    def build(self, axes, exits):
        return Net(axes["h"], axes["classes"])
"""
LINE = 13


def verbs(path: Path, out: Path) -> list[list[str]]:
    run = [f"--set=model.name={path}:Family", "--set=method.name=heterofl", "--set=fleet.tolerance=0.5"]
    few = ["--set=rounds=1", "--set=data.partition.clients=4", "--set=local.max_steps=2"]
    return [
        ["check-model", f"{path}:Family", "--input-shape", "1,8,8"],
        ["plan", "--model", f"{path}:Family", "--input-shape", "1,8,8", "--scaling", "width"],
        ["run", "--out", str(out), *run, *few],
    ]


def test_verbs_take_own_tensors(tmp_path: Path) -> None:
    path, out = tmp_path / "own.py", tmp_path / "out"
    path.write_text(MODEL.format(named=""))
    export = ["export", str(out), "--level", "1", "--out", str(tmp_path / "exported"), "--no-onnx"]
    for arguments in [*verbs(path, out), ["eval", str(out)], export]:
        run_verb(*arguments, code=0)


@pytest.mark.parametrize(
    "named", [", dtype=torch.float32", ", device='cpu'", ", dtype=torch.float16", ", device='cpu', dtype=torch.float32"]
)
def test_tensor_on_named_device_is_refused_with_line(named: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(MODEL.format(named=named))
    for arguments in verbs(path, tmp_path / "out"):
        if arguments[0] != "plan" or "device" in named:  # a plan computes nothing, so any type is well
            err = run_verb(*arguments, code=2).err
            assert f"line {LINE + 1} of own.py" in err
            assert "torch.zeros(..., device=x.device, dtype=x.dtype)" in err
    assert not (tmp_path / "out").exists()


def test_forward_that_reads_values_is_refused_with_line(tmp_path: Path) -> None:
    architecture = layers(lambda _, h: h * h.sum().item())
    with raises(ModelError, "test_own_tensors.py"):
        submodel_cost(architecture, ({}, (1,)), architecture.input_shape)


# ---- on an accelerator: the meta device stands for one ---------------------------------------------------------------

SEEN: list[str] = []


def noting(m: nn.Module, h: Tensor) -> Tensor:
    ones = torch.ones(h.shape[1], 1)
    SEEN.append(ones.device.type)
    return h * ones


def problem_of(architecture: Made) -> Problem:
    return Problem(architecture, architecture.input_shape, get_task("classification"), (1,))


@pytest.mark.parametrize("name", [name for name in MODELS if "device of the file" not in name])
def test_module_makes_tensors_on_its_accelerator(name: str) -> None:
    architecture = MODELS[name]
    problem = problem_of(architecture)
    module = get_local_model(problem, full_submodel(architecture.infer()), torch.device("meta")).module
    for training in (True, False):
        assert module.train(training)(torch.zeros(3, *architecture.input_shape, device="meta")).device.type == "meta"
    assert torch.zeros(1).device == HOST


def test_default_device_is_set_when_needed() -> None:
    sizes = {"wide": WIDE, "classes": 3}
    for between, wrapped in ((noting, True), (lambda _, h: h.new_ones(h.shape) * h, False), (lambda _, h: h, False)):
        architecture = layers(between)
        module = place_module(
            build_module(architecture, sizes, (1,)), torch.device("meta"), architecture, sizes, (1,), (4, 5)
        )
        assert ("forward" in vars(module)) is wrapped
        assert "forward" not in vars(
            place_module(build_module(architecture, sizes, (1,)), HOST, architecture, sizes, (1,), (4, 5))
        )


class Placed(nn.Module):
    """Words of 7 with a bias at each place."""

    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.words, self.places, self.fc = nn.Embedding(7, wide), nn.Embedding(9, wide), nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((self.words(x) + self.places(torch.arange(x.shape[1]))).mean(1))


class Words(Made):
    tokens = 7


def test_tokens_find_what_is_made_beside_them() -> None:
    sizes = {"wide": WIDE, "classes": 3}
    architecture = Words({name: Axis(size) for name, size in sizes.items()}, lambda s: Placed(s["wide"], s["classes"]))
    module = place_module(
        build_module(architecture, sizes, (1,)), torch.device("meta"), architecture, sizes, (1,), (9,)
    )
    assert "forward" in vars(module)


class Additions(ExitModel):
    """Each step makes a tensor of its own."""

    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.exits, self.wide = (1,), wide
        self.blocks, self.heads = nn.ModuleList([nn.Linear(wide, wide)]), nn.ModuleDict({"1": nn.Linear(wide, classes)})

    def start(self, x: Tensor) -> Tensor:
        return x[:, 0, :1] + torch.ones(1, self.wide)

    def segment(self, i: int, carry: Any) -> Any:
        return super().segment(i, carry + torch.ones(1, self.wide))

    def head(self, i: int, carry: Any) -> Tensor:
        return super().head(i, carry + torch.ones(1, self.wide))


def test_each_step_makes_tensors_on_its_accelerator() -> None:
    sizes = {"wide": WIDE, "classes": 3}
    architecture = Made(
        {name: Axis(size) for name, size in sizes.items()}, lambda s: Additions(s["wide"], s["classes"])
    )
    module: Any = place_module(
        build_module(architecture, sizes, (1,)), torch.device("meta"), architecture, sizes, (1,), (4, 5)
    )
    carry = module.start(torch.zeros(2, 4, 5, device="meta"))
    assert module.head(0, module.segment(0, carry)).shape == (2, 3)


def test_latency_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    architecture = layers(noting)
    measure_latency(
        architecture, {"wide": WIDE, "classes": 3}, (1,), architecture.input_shape, 1, torch.device("meta"), 0.01
    )
    assert "meta" in SEEN[-3:] and SEEN[-1] == "meta"


# ---- the defaults are as they were -----------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16])
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_defaults_hold_for_a_block_only(default: torch.dtype) -> None:
    with tensor_defaults("meta", torch.float64):
        assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float64, "meta")
        with tensor_defaults("cpu", torch.float32):
            assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float32, "cpu")
        with tensor_defaults():
            assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float64, "meta")
        with pytest.raises(ZeroDivisionError), tensor_defaults("cpu", torch.float16):
            1 / 0  # noqa: B018
        assert (torch.zeros(1).dtype, torch.zeros(1).device.type) == (torch.float64, "meta")
    assert (torch.zeros(1).dtype, torch.zeros(1).device) == (default, HOST)


def test_counting_and_proving_leave_the_defaults_alone(default: torch.dtype) -> None:
    for architecture in (MODELS["a causal mask"], layers(lambda _, h: h @ torch.zeros(2, 2))):  # the second fails
        for work in (
            lambda architecture=architecture: submodel_cost(architecture, ({}, (1,)), architecture.input_shape),
            lambda architecture=architecture: training_memory(
                architecture, {"wide": WIDE, "classes": 3}, (1,), architecture.input_shape, 3
            ),
        ):
            with contextlib.suppress(ModelError):
                work()
            assert (torch.zeros(1).dtype, torch.zeros(1).device) == (default, HOST)


def test_the_proof_leaves_the_defaults_alone() -> None:
    for architecture in (MODELS["a causal mask"], layers(lambda _, h: h @ torch.zeros(2, 2))):
        with contextlib.suppress(ModelError):
            check_layout(architecture, input_shape=architecture.input_shape, seed=3)
        assert (torch.zeros(1).dtype, torch.zeros(1).device) == (torch.float32, HOST)
