"""The memory format that the default speed chooses, by the shape of a sub-model."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Expected, raises
from support.bits import assert_same_bits, has_same_bits
from torch import nn

import fleetfit as ff
from fleetfit.core import Problem
from fleetfit.core.arithmetic import Arithmetic, ShapeArithmetic
from fleetfit.errors import ConfigError
from fleetfit.training import local_model
from fleetfit.training.local_model import LocalModel, get_local_model, lay_out
from fleetfit.training.memory_format import choose_format, find_view_error, is_unsafe_in_channels_last

HOST = torch.device("cpu")
BY_RULE = Arithmetic(memory_format="rule-1")
PLAIN, LAST = "contiguous", "channels_last"


def choose(module: nn.Module, training: bool, device: str = "cpu") -> str:
    return choose_format(BY_RULE, module, torch.device(device), training).memory_format


def convolutions(*channels: int, first: int = 3, **settings: Any) -> nn.Module:
    """Return 3x3 convolutions, the first of them of an image."""
    sizes = [first, *channels]
    return nn.Sequential(*(nn.Conv2d(a, b, 3, **settings) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("module", "training", "evaluation"),
    [
        (convolutions(16, 16, 16), LAST, LAST),
        (convolutions(8, 8, 8), LAST, LAST),
        (convolutions(17, 23, 31), LAST, LAST),
        (convolutions(9, 9, 9), PLAIN, PLAIN),
        (convolutions(4, 4, 4), PLAIN, PLAIN),
        (convolutions(16, 16, 16, first=1), LAST, PLAIN),
        (convolutions(16, 16, 9, 9, 9), PLAIN, PLAIN),  # one of four fills registers
        (convolutions(16, 16, 16, 9, 9), LAST, PLAIN),  # two of four
        (convolutions(16, 16, *[16] * 5, 9, 9, 9), LAST, PLAIN),  # six of nine
        (convolutions(16, 16, *[16] * 6, 9, 9, 9), LAST, LAST),  # seven of ten
        (nn.Sequential(convolutions(16, 16), nn.GroupNorm(2, 16)), PLAIN, PLAIN),
        (nn.Sequential(convolutions(6), nn.Conv2d(6, 6, 3, groups=6)), LAST, LAST),
        (nn.Sequential(convolutions(6), nn.Conv2d(6, 6, 3, groups=2)), PLAIN, PLAIN),
        (nn.Sequential(convolutions(16, 16, bias=False), convolutions(4, 4, first=16)), LAST, LAST),  # squeeze, excite
        (convolutions(16, 320, 320), PLAIN, PLAIN),
        (convolutions(16, 16, 16, 320), LAST, LAST),
        (nn.Sequential(convolutions(16, *[16] * 3), nn.Conv2d(4, 16, 1, stride=2)), PLAIN, LAST),
        (nn.Sequential(convolutions(16, *[16] * 3), nn.Conv2d(8, 16, 1, stride=2)), LAST, LAST),
        (nn.Sequential(nn.Conv2d(3, 128, 4, stride=4), nn.Linear(8, 8)), PLAIN, PLAIN),
        (nn.Sequential(nn.Conv1d(16, 16, 3), nn.Linear(8, 8)), PLAIN, PLAIN),
    ],
)
def test_rule_1(module: nn.Module, training: str, evaluation: str) -> None:
    assert (choose(module, True), choose(module, False)) == (training, evaluation)
    assert choose(module, True, "cuda") == choose(module, False, "cuda") == PLAIN


@pytest.mark.parametrize(("version", "expected"), [("2.12.1+cpu", PLAIN), ("2.13.0", LAST), ("3.0.0a0", LAST)])
def test_older_versions_of_pytorch_stay_plain(version: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert choose(convolutions(16, 16, 16), True) == expected


def test_a_set_format_is_kept() -> None:
    for chosen in (PLAIN, LAST):
        arithmetic = Arithmetic(memory_format=chosen)  # type: ignore[arg-type]
        assert choose_format(arithmetic, convolutions(4, 4), HOST, True) == arithmetic


# ---- local models --------------------------------------------------------------------------------------------------


def problem_of(model: str, shape: Sequence[int], **settings: Any) -> Problem:
    arguments = {"classes": 10, "channels": shape[0], "input_shape": list(shape), "vocabulary": 0, "padding": -1}
    spec = {"model": {"name": model, **settings}, "given": arguments, "task": "classification", "exits": []}
    problem = Problem.from_spec(spec)
    return problem.replace_arithmetic((ShapeArithmetic(problem.layout.full_sizes, problem.exits, BY_RULE),))


@pytest.mark.parametrize(("model", "width", "modules"), [("cnn", 1.0, 2), ("cnn", 0.25, 1), ("resnet20", 0.25, 1)])
def test_evaluation_may_build_a_second_module(model: str, width: float, modules: int) -> None:
    problem = problem_of(model, (1, 12, 12))
    submodel = problem.submodel(width, problem.exits)
    trained, evaluated = (get_local_model(problem, submodel, HOST, training=use) for use in (True, False))
    assert len({id(trained), id(evaluated)}) == modules
    assert get_local_model(problem, submodel, HOST, training=False) is evaluated
    assert trained.arithmetic.memory_format == choose(trained.module, True)
    assert evaluated.arithmetic.memory_format == choose(trained.module, False)


@pytest.mark.parametrize("model", ["resnet20", "mobilenetv2"])
def test_formats_compute_the_same_to_rounding(model: str) -> None:
    problem = problem_of(model, (3, 32, 32))
    submodel = problem.submodel(0.5, problem.exits)
    last, plain = (get_local_model(p, submodel, HOST) for p in (problem, problem.replace_arithmetic(())))
    assert last.arithmetic.memory_format == LAST and plain.arithmetic.memory_format == PLAIN
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.rand(shape, generator=rng) * 0.1 for name, shape in last.shapes.items()}
    x = torch.randn(4, 3, 32, 32, generator=rng)
    logits = []
    for local in (last, plain):
        local.load(state)
        logits.append(local.module.eval()(x)[-1])
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


def test_unsafe_convolutions_are_found_in_resnets() -> None:
    problem = problem_of("resnet20", (3, 32, 32))
    unsafe = [
        is_unsafe_in_channels_last(get_local_model(problem, problem.submodel(width, problem.exits), HOST).module)
        for width in (0.25, 0.5, 1.0)
    ]
    assert unsafe == [True, False, False]


# ---- runs ----------------------------------------------------------------------------------------------------------

TABLE: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}},
    "model": {"name": "resnet20"},
    "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]},
    "local": {"epochs": 1, "max_steps": 2},
    "cohort": {"count": 2},
    "evaluate": {"every": 1, "clients": 1, "statistics_samples": 20},
}


def state_of(run: ff.Run) -> dict[str, torch.Tensor]:
    return dict(run.server.state)


def test_a_run_records_its_rule(tmp_path: Path) -> None:
    run = ff.run(TABLE, out=tmp_path / "run")
    assert run.experiment.recorded.memory_format == "rule-1"
    assert 'memory_format = "rule-1"' in (run.folder / "config.toml").read_text()
    problem = run.assembly.federation.problem
    assert [one["how"] for one in json.loads(json.dumps(problem.spec))["computed"]] == ["fp32 rule-1"] * 2
    plain = ff.run(TABLE, out=tmp_path / "plain", engine={"memory_format": PLAIN})
    assert plain.assembly.federation.problem.computed == ()
    assert not has_same_bits(state_of(plain), state_of(run))


def test_tables_have_no_memory_format(tmp_path: Path) -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)).numpy()
    table = {"name": (x, x[:, 0] > 0), "partition": {"kind": "iid", "clients": 4}}
    new = ff.run(TABLE, out=tmp_path / "run", model={"name": "mlp"}, data=table, rounds=1)
    assert new.experiment.recorded.memory_format is None
    assert ff.load(new.folder, data=table["name"]).assembly.unused == ()


def test_a_rule_of_a_newer_version_is_refused() -> None:
    problem = problem_of("cnn", (1, 12, 12))
    spec = json.loads(json.dumps(problem.spec))
    spec["computed"][0]["how"] = "fp32 rule-2"
    with raises(ConfigError, Expected("rule-2", "rule-1", key="how")):
        Problem.from_spec(spec)


# ---- aligned parts, as on CUDA -------------------------------------------------------------------------------------


def test_parts_start_at_multiples() -> None:
    parts, size = lay_out({"a": (3,), "b": (2, 2), "c": (), "d": (5,)}, 4)
    assert [(part.start, part.stop) for part in parts.values()] == [(0, 3), (4, 8), (8, 9), (12, 17)] and size == 17
    parts, size = lay_out({"a": (3,), "b": (2, 2), "c": ()}, 1)
    assert [(part.start, part.stop) for part in parts.values()] == [(0, 3), (3, 7), (7, 8)] and size == 8


@pytest.mark.parametrize("memory_format", [PLAIN, LAST])
def test_aligned_weights_train_to_the_same_bits(memory_format: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("resnet20", (3, 8, 8))
    how = ShapeArithmetic(problem.layout.full_sizes, problem.exits, Arithmetic(memory_format=memory_format))
    problem = problem.replace_arithmetic((how,))
    submodel = problem.submodel(0.7, problem.exits)
    dense = LocalModel(problem, submodel, HOST)
    monkeypatch.setattr(local_model, "lay_out", lambda shapes, _: lay_out(shapes, 4))
    aligned = LocalModel(problem, submodel, HOST)
    assert len(aligned.flat) > len(dense.flat)
    assert all(p.storage_offset() % 4 == 0 for p in aligned.parameters.values())
    rng = torch.Generator().manual_seed(0)
    state = {name: 0.1 * torch.randn(shape, generator=rng) for name, shape in dense.shapes.items()}
    x, y = torch.randn(4, 3, 8, 8, generator=rng), torch.arange(4)
    for model in (dense, aligned):
        model.load(state)
        assert_same_bits(dict(model.read()), state)
        model.module.train()
        nn.functional.cross_entropy(model.module(x)[-1], y).backward()
        parameter = nn.Parameter(model.trained)
        parameter.grad = model.grad
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=1e-3).step()
    assert_same_bits(dict(aligned.read()), dict(dense.read()))
    assert not has_same_bits(dict(aligned.read()), state)


# ---- modules whose forward pass needs the plain format ---------------------------------------------------------------


class Viewing(nn.Module):
    """What many tutorials write: the images that the last convolution returns are viewed as vectors."""

    def __init__(self, flatten: bool = False) -> None:
        super().__init__()
        self.flatten = flatten
        self.convolutions = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3))
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolutions(x)
        return self.classifier(x.flatten(1) if self.flatten else x.view(x.size(0), -1))


OWN = {**TABLE, "model": {}, "fleet": {"groups": [{"budget": 0.5}, {"budget": 1.0}]}, "local": {"max_steps": 2}}


@pytest.mark.parametrize("speed", ["exact", "fast"])
def test_modules_with_views_stay_plain(tmp_path: Path, speed: str) -> None:
    net = Viewing()
    run = ff.run(OWN, model=net, out=tmp_path / "run", engine={"speed": speed})
    assert run.summary["failures"] == 0 and run.accuracy("global") is not None
    plain = ff.run(OWN, model=net, out=tmp_path / "plain", engine={"speed": speed, "memory_format": PLAIN})
    assert_same_bits(state_of(run), state_of(plain))
    assert all(one.arithmetic.memory_format == PLAIN for one in run.assembly.federation.problem.computed)


def test_a_module_without_views_follows_the_rule(tmp_path: Path) -> None:
    run = ff.run(OWN, model=Viewing(flatten=True), out=tmp_path / "run")
    assert {one.arithmetic for one in run.assembly.federation.problem.computed} == {BY_RULE}


class Picky(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not black images")


def test_any_error_of_a_forward_pass_counts() -> None:
    assert "not black images" in find_view_error(Picky(1, 4, 3), (1, 8, 8))
    assert find_view_error(Viewing(flatten=True), (1, 8, 8)) == "" != find_view_error(Viewing(), (1, 8, 8))


def test_views_refuse_channels_last(tmp_path: Path) -> None:
    with raises(ConfigError, key="engine.memory_format"):
        ff.run(OWN, model=Viewing(), out=tmp_path / "run", engine={"memory_format": LAST})
    assert not (tmp_path / "run").exists()
