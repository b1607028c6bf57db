"""Exact and fast: the same bits wherever a fast run computes, what it says and writes down, and what it refuses."""

import contextlib
import itertools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import stopped_run
from support import Expected, raises
from support.bits import assert_same_bits, has_same_bits
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.api.run import dropped_key_notes, prepare
from fleetfit.config import load_experiment
from fleetfit.core import Problem
from fleetfit.core.arithmetic import PLAIN, Arithmetic, ShapeArithmetic, find_arithmetic
from fleetfit.errors import ConfigError
from fleetfit.submodel import full_submodel
from fleetfit.training import runtime
from fleetfit.training.local_model import LocalModel
from fleetfit.training.runtime import choose_arithmetic, has_bf16, prepare_model, view_in_format

HOST = torch.device("cpu")
BOTH = {"speed": "fast", "precision": "bf16", "memory_format": "channels_last"}  # on every machine, emulated or not
TABLE: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "validation": 0.1, "partition": {"kind": "iid", "clients": 6}, "augment": "shift"},
    "model": {"name": "cnn", "dropout": 0.1},
    "fleet": {"groups": [{"budget": 0.25}, {"budget": 1.0}]},
    "local": {"epochs": 1, "max_steps": 4, "patience": 1, "check_every": 2},
    "cohort": {"count": 3},
    "evaluate": {"every": 1, "clients": 2, "statistics_samples": 60},
    "engine": BOTH,
}


def laid(table: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    return {**table, **sections}


def trained(run: ff.Run) -> dict[str, Tensor]:
    return dict(run.server.state)


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    return ff.run(TABLE, out=tmp_path_factory.mktemp("fast") / "run")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    return ff.run(laid(TABLE, engine={}), out=tmp_path_factory.mktemp("exact") / "run")


# ---- the same bits -------------------------------------------------------------------------------------------------


SPEEDS: dict[str, Mapping[str, Any]] = {"fast": BOTH, "exact": {}}
"""`[engine]` of each; in "exact" this model is trained in one memory format and evaluated in another."""


@pytest.fixture(params=SPEEDS)
def speed(request: pytest.FixtureRequest) -> tuple[Mapping[str, Any], ff.Run]:
    """The engine section of a speed, and its run."""
    return SPEEDS[request.param], request.getfixturevalue(request.param)


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_engines_have_equal_bits(engine: str, speed: tuple[Mapping[str, Any], ff.Run], tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    section, expected = speed
    run = ff.run(laid(TABLE, engine={**section, "name": engine, "workers": 2}), out=tmp_path / "run")
    assert_same_bits(trained(run), trained(expected))
    assert run.columns == expected.columns


def test_resumed_run_has_equal_bits(speed: tuple[Mapping[str, Any], ff.Run], tmp_path: Path) -> None:
    section, expected = speed
    stopped_run(laid(TABLE, engine=section), tmp_path / "run", after=1)
    again = ff.resume(tmp_path / "run")
    assert_same_bits(trained(again), trained(expected))
    assert again.columns == expected.columns


def test_workers_have_equal_bits_with_other_shapes(tmp_path: Path) -> None:
    """AdaptiveFL's clients cut what they are sent, to shapes that are no level's."""
    table = laid(TABLE, method={"name": "adaptivefl"}, rounds=1, evaluate={"clients": 1, "batch_norm": ["batch"]})
    run = ff.run(table, out=tmp_path / "here")
    workers = ff.run(laid(table, engine={**BOTH, "name": "processes", "workers": 2}), out=tmp_path / "there")
    assert_same_bits(trained(run), trained(workers))


def test_fast_is_close_to_exact(fast: ff.Run, exact: ff.Run) -> None:
    ours, theirs = trained(fast), trained(exact)
    assert not has_same_bits(ours, theirs)
    gap = torch.cat([(ours[n] - theirs[n]).flatten() for n in ours]).norm()
    assert gap < 0.2 * torch.cat([tensor.flatten() for tensor in theirs.values()]).norm()


def test_states_are_contiguous_fp32(fast: ff.Run) -> None:
    for name, tensor in trained(fast).items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous(), name
    assert run_level(fast, ff.load(fast.folder))


def run_level(one: ff.Run, other: ff.Run) -> bool:
    """Tell whether the full models of two runs are plain fp32 modules that say the same."""
    x = torch.zeros(2, 1, 8, 8)
    a, b = (run.model()(x) for run in (one, other))
    return all(p.dtype == q.dtype == torch.float32 and torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_predictions_use_the_arithmetic_of_the_run(fast: ff.Run) -> None:
    assert fast.evaluate(evaluate={"clients": 2, "statistics_samples": 60})["static"] == fast.columns["static"]
    data = fast.assembly.data
    assert isinstance(data, ff.Data)
    images = data.batch(data.split("test"))[0]
    served, plain = list(fast.predict_exits())[-1], fast.model()(images)[-1]
    assert served.dtype == torch.float32
    torch.testing.assert_close(served, plain, rtol=0.1, atol=0.1)
    assert not torch.equal(served, plain), "predictions are computed as the run was"


# ---- what stands in the run folder ---------------------------------------------------------------------------------


def test_fast_run_stores_its_choice(fast: ff.Run, exact: ff.Run) -> None:
    table = tomllib.loads((fast.folder / "config.toml").read_text())
    assert table["engine"]["speed"] == "fast"
    assert table["recorded"]["computing"] == {"1": "bf16 channels_last", "2": "bf16 channels_last"}
    table = tomllib.loads((exact.folder / "config.toml").read_text())
    assert table["engine"]["speed"] == "exact" and "computing" not in table["recorded"]


def test_stored_choice_is_used(exact: ff.Run, tmp_path: Path) -> None:
    """As on another machine, where the rule might choose otherwise: what stands there counts."""
    table = laid(TABLE, engine={"speed": "fast"}, recorded={"computing": dict.fromkeys("12", "fp32 contiguous")})
    run = ff.run(table, out=tmp_path / "run")
    plain = ff.run(laid(TABLE, engine={"memory_format": "contiguous"}), out=tmp_path / "plain")
    assert_same_bits(trained(run), trained(plain))
    assert not has_same_bits(trained(exact)["blocks.0.conv.weight"], trained(plain)["blocks.0.conv.weight"])


# ---- bf16 that is emulated -----------------------------------------------------------------------------------------

HELD = "ONEDNN_MAX_CPU_ISA", "AVX2"


def images(tmp_path: Path, engine: Mapping[str, Any]) -> ff.Run:
    """Prepare a run on images that are large enough for bf16 to pay."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (120, 1, 16, 16), generator=rng, dtype=torch.uint8), torch.arange(120) % 3
    splits = {"train": torch.arange(90), "validation": torch.arange(90, 96), "test": torch.arange(96, 120)}
    data = ff.Data("squares", x, y, splits, 3, mean=(0.5,), std=(0.25,))
    table = laid(TABLE, data={"name": data, "partition": {"kind": "iid", "clients": 3}}, engine=engine)
    prepared = prepare(load_experiment(table), tmp_path / "run")
    prepared._take_engine().close()
    return prepared


def test_fast_avoids_emulated_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    able = has_bf16(HOST)
    settings = images(tmp_path / "a", {"speed": "fast"})
    assert set(settings.experiment.recorded.computing.values()) == {f"{'bf16' if able else 'fp32'} channels_last"}
    monkeypatch.setenv(*HELD)
    settings = images(tmp_path / "b", {"speed": "fast"})
    assert set(settings.experiment.recorded.computing.values()) == {"fp32 channels_last"}
    assert any("fp32" in note and "bf16" in note for note in settings.assembly.notes)


@pytest.mark.parametrize(
    ("flag", "expected"), [("avx512_bf16", True), ("amx_bf16", True), ("bf16", True), ("avx512_f", False)]
)
def test_bf16_is_a_capability_of_the_processor(flag: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: True, "amx_fp16": False, "sse": True})
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert has_bf16(HOST) == expected
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {flag: False})
    assert not has_bf16(HOST)


def test_explicit_bf16_is_emulated_with_note(fast: ff.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*HELD)
    settings = images(tmp_path, {"precision": "bf16"})
    assert any("bf16" in note and "slower" in note for note in settings.assembly.notes)
    again = ff.load(fast.folder)
    assert set(again.assembly.notes) - set(fast.assembly.notes), "this machine would compute otherwise"
    assert again.experiment.recorded.computing == fast.experiment.recorded.computing


# ---- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "model", "expected"),
    [
        ({"speed": "quick"}, "cnn", Expected('"exact"', '"fast"')),
        ({"precision": "fp16"}, "cnn", Expected('"fp32"', '"bf16"')),
        ({"memory_format": "nhwc"}, "cnn", Expected("memory_format")),
        ({"compile": "yes"}, "cnn", Expected("compile", "'yes'")),
        ({"memory_format": "channels_last"}, "mlp_2nn", Expected("memory_format")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refused_engine_keys(engine: Mapping[str, Any], model: str, expected: Expected, tmp_path: Path) -> None:
    table = laid(TABLE, model={"name": model}, engine={}, method={"name": "heterofl"})
    with raises(ConfigError, expected):
        ff.run(table, out=tmp_path / "run", engine=engine)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("computing", "expected"),
    [
        ({"9": "fp32 contiguous"}, Expected(9, key="recorded.computing")),
        (dict.fromkeys("12", "fp8 sideways"), Expected("'fp8 sideways'", "bf16")),
    ],
)
def test_a_recorded_computation_of_other_levels_is_refused(
    computing: Mapping[str, str], expected: Expected, tmp_path: Path
) -> None:
    table = laid(TABLE, method={"name": "heterofl"}, engine={"speed": "fast"}, recorded={"computing": computing})
    with raises(ConfigError, expected):
        ff.run(table, out=tmp_path / "run")


def test_kernels_need_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with raises(ConfigError, key="engine.compile"):
        ff.run(laid(TABLE, engine={"compile": True}), out=tmp_path / "run")


def test_finer_key_overrides_fast(tmp_path: Path) -> None:
    settings = images(tmp_path, {"speed": "fast", "precision": "fp32"})
    assert set(settings.experiment.recorded.computing.values()) == {"fp32 channels_last"}


def test_engine_override_keeps_speed(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[engine]\nspeed = "fast"\nprecision = "fp32"\n')
    experiment = load_experiment(file, ["engine.name=processes"])
    assert (experiment.engine.speed, experiment.engine.precision) == ("fast", "fp32")
    assert not dropped_key_notes(experiment)


# ---- modules -------------------------------------------------------------------------------------------------------


def problem_of(model: str, shape: tuple[int, ...], **settings: Any) -> Problem:
    arguments = {"classes": 10, "channels": shape[0], "input_shape": list(shape), "vocabulary": 50, "padding": 0}
    spec = {"model": {"name": model, **settings}, "given": arguments, "task": "classification", "exits": []}
    return Problem.from_spec(spec)


def computed(problem: Problem, arithmetic: Arithmetic) -> Problem:
    exits = problem.exits
    return problem.replace_arithmetic((ShapeArithmetic(problem.layout.full_sizes, exits, arithmetic),))


@pytest.mark.parametrize("model", ["cnn", "mobilenetv2", "resnet20"])
def test_memory_format_keeps_state(model: str) -> None:
    problem = problem_of(model, (3, 16, 16))
    full = problem.submodel(1.0, problem.exits)
    piece = LocalModel(computed(problem, Arithmetic(memory_format="channels_last")), full, HOST)
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=rng) for name, shape in piece.shapes.items()}
    piece.load(state)
    assert_same_bits(dict(piece.read()), state)
    weights = [p.weight for p in piece.module.modules() if isinstance(p, nn.Conv2d)]
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    assert all(w.untyped_storage().data_ptr() == piece.flat.untyped_storage().data_ptr() for w in weights)
    plain = LocalModel(problem, full, HOST)
    plain.load(state)
    x = torch.randn(4, 3, 16, 16, generator=rng)
    torch.testing.assert_close(piece.module.eval()(x), plain.module.eval()(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_flat_buffer_has_the_memory_format(memory_format: Any) -> None:
    """[o, c, h, w] is element ((o C + c) H + h) W + w, or ((o H + h) W + w) C + c with the channels last."""
    flat, (out, channels, height, width) = torch.arange(2 * 3 * 4 * 5), (2, 3, 4, 5)
    view = view_in_format(flat, (out, channels, height, width), memory_format == "channels_last")
    for o, c, h, w in itertools.product(*map(range, view.shape)):
        first = ((o * channels + c) * height + h) * width + w
        last = ((o * height + h) * width + w) * channels + c
        assert view[o, c, h, w] == (first if memory_format == "contiguous" else last)


def test_forward_is_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that doubles."""
    monkeypatch.setattr(runtime, "_compile", lambda forward: lambda x: 2 * forward(x))
    layer, x = nn.Linear(2, 1), torch.ones(3, 2)
    expected = 2 * layer(x)
    assert torch.equal(prepare_model(layer, Arithmetic(compile=True), HOST)(x), expected)


def test_linear_on_vectors_stays_fp32() -> None:
    """Biases included: a network of such layers gives the bits of fp32, though bf16 is what it computes in."""
    problem = problem_of("mlp_2nn", (1, 28, 28))
    full = problem.submodel(1.0, problem.exits)
    halved, plain = (LocalModel(p, full, HOST) for p in (computed(problem, Arithmetic(precision="bf16")), problem))
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=rng) * 0.1 for name, shape in plain.shapes.items()}
    x = torch.randn(4, 1, 28, 28, generator=rng)
    kinds = []
    for piece in (halved, plain):
        piece.load(state)
        kinds.append(piece.module.eval()(x))
    assert all(torch.equal(a, b) for a, b in zip(*kinds, strict=True))


@pytest.mark.skipif(not has_bf16(HOST), reason="oneDNN has no LSTM in bf16 on a CPU without its instructions")
def test_token_logits_are_fp32() -> None:
    """A classifier that sees a vector for each token computes in bf16; who asks for logits gets fp32."""
    problem = computed(problem_of("char_lstm", (20,)), Arithmetic(precision="bf16"))
    piece = LocalModel(problem, problem.submodel(1.0, problem.exits), HOST)
    (logits,) = piece.module.eval()(torch.randint(50, (2, 20)))
    assert logits.dim() == 3 and logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("model", "shape", "settings", "expected"),
    [
        ("resnet20", (3, 32, 32), {}, "bf16 channels_last"),
        ("resnet20", (3, 32, 32), {"norm": "group"}, "bf16 contiguous"),
        ("cnn", (1, 28, 28), {}, "bf16 channels_last"),
        ("cnn", (1, 8, 8), {}, "fp32 channels_last"),
        ("mobilenetv2", (3, 32, 32), {}, "fp32 channels_last"),
        ("vit", (3, 32, 32), {"hidden": 192, "depth": 2, "attention_heads": 3, "patch": 4}, "bf16 contiguous"),
        ("vit", (3, 32, 32), {"hidden": 48, "depth": 2, "attention_heads": 3, "patch": 4}, "bf16 contiguous"),
        ("vit", (3, 32, 32), {"hidden": 24, "depth": 2, "attention_heads": 3, "patch": 4}, "fp32 contiguous"),
        ("mlp_2nn", (1, 28, 28), {}, "fp32 contiguous"),
        ("char_lstm", (20,), {}, "bf16 contiguous"),
        ("char_lstm", (20,), {"hidden": 32}, "fp32 contiguous"),
    ],
    ids=str,
)
def test_choice_follows_the_layers(
    model: str, shape: tuple[int, ...], settings: Mapping[str, Any], expected: str
) -> None:
    problem = problem_of(model, shape, **settings)
    module = problem.architecture.build(problem.layout.full_sizes, problem.exits)
    expected = expected if has_bf16(HOST) else expected.replace("bf16", "fp32")
    assert str(choose_arithmetic(module, shape, HOST)) == expected


@pytest.mark.parametrize("able", [True, False])
def test_gpu_uses_bf16(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the GPU that computes; its host may have none, or another."""
    calls: list[torch.device] = []

    def entered(device: torch.device) -> contextlib.AbstractContextManager[None]:
        calls.append(device)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
    precision, device = "bf16" if able else "fp32", torch.device("cuda", 1)
    assert str(choose_arithmetic(nn.Linear(3, 2), (3,), device)) == f"{precision} contiguous"
    assert str(choose_arithmetic(nn.Conv2d(1, 2, 3), (1, 8, 8), device)) == (
        "bf16 channels_last" if able else "fp32 contiguous"
    )
    assert set(calls) == {device}


@pytest.mark.parametrize(("platform", "compiler"), [("darwin", "clang++"), ("linux", "g++")])
def test_missing_compiler_is_named(platform: str, compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with raises(ConfigError, compiler, key="engine.compile"):
        runtime.check_compiler(HOST)
    monkeypatch.setenv("CXX", "another++")
    with raises(ConfigError, key="engine.compile"):
        runtime.check_compiler(HOST)


def stepped(precision: str, dropout: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the last logits of a small BERT in training, and the gradient of their sum of squares.

    One of the texts is shorter than the others, and one shows nothing at all.
    """
    sizes = {"hidden": 48, "layers": 2, "attention_heads": 3, "max_positions": 16}
    problem = problem_of("bert", (16,), **sizes, dropout=dropout)
    full = full_submodel(problem.layout)
    how = ShapeArithmetic(problem.layout.full_sizes, problem.exits, Arithmetic(precision))  # type: ignore[arg-type]
    piece = LocalModel(problem.replace_arithmetic((how,)), full, HOST)
    rng = torch.Generator().manual_seed(1)
    piece.load({name: torch.randn(shape, generator=rng) * 0.4 for name, shape in piece.shapes.items()})
    x = torch.randint(1, 50, (6, 16), generator=rng)
    x[1, 9:], x[2] = 0, 0
    torch.manual_seed(seed)
    logits: Tensor = piece.module.train()(x)[-1]
    logits.square().sum().backward()
    return logits.detach(), piece.grad.clone()


def test_attention_in_bf16_trains_like_that_in_fp32() -> None:
    """It has steps of its own there: query, key and value in one product, padding left out, also of an empty text."""
    (half, gradient), (full, expected) = stepped("bf16", 0.0), stepped("fp32", 0.0)
    assert not torch.equal(half, full)
    assert (half - full).norm() < 0.02 * full.norm()
    assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_dropout_beside_bf16_is_seeded() -> None:
    (one, first), (two, second), (other, _) = stepped("bf16", 0.3), stepped("bf16", 0.3), stepped("bf16", 0.3, seed=1)
    assert torch.equal(one, two) and torch.equal(first, second)
    assert not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.001, 0.0, 1.0])
def test_dropout_beside_bf16_drops_its_share(share: float) -> None:
    """Of 200,000 elements as many as asked for, within five standard deviations, in the gradient the same ones; the
    others are scaled, so that the mean stays."""
    layer = prepare_model(nn.Sequential(nn.Dropout(share)), Arithmetic("bf16"), HOST)
    x = torch.full((200, 1000), 3.0, requires_grad=True)
    torch.manual_seed(0)
    y: Tensor = layer.train()(x)
    y.sum().backward()
    assert x.grad is not None and torch.equal(y == 0, x.grad == 0)
    dropped = float((y == 0).double().mean())
    assert abs(dropped - share) <= 5 * (share * (1 - share) / x.numel()) ** 0.5
    nonzero = y[y != 0]
    torch.testing.assert_close(
        nonzero, torch.full_like(nonzero, 3 / (1 - share) if share < 1 else 3), rtol=1e-4, atol=0
    )
    assert torch.equal(layer.eval()(x), x)


def test_unknown_shape_uses_nearest() -> None:
    small, large = Arithmetic(memory_format="channels_last"), Arithmetic("bf16")
    measured = (
        ShapeArithmetic({"a": 4, "classes": 3}, (1,), small),
        ShapeArithmetic({"a": 16, "classes": 3}, (1, 2), large),
    )
    assert find_arithmetic(measured, {"a": 16, "classes": 3}, (1, 2)) == large
    assert find_arithmetic(measured, {"a": 5, "classes": 3}, (1,)) == small
    assert find_arithmetic(measured, {"a": 12, "classes": 3}, (1, 2)) == large
    assert find_arithmetic(measured, {"a": 8, "classes": 3}, (2,)) == large  # nearer in depth, as near in width
    assert find_arithmetic((), {"a": 8}, (1,)) == PLAIN


def test_arithmetic_from_server_is_validated() -> None:
    good = ShapeArithmetic({"a": 4}, (1,), Arithmetic("bf16")).payload
    assert ShapeArithmetic.from_payload(json.loads(json.dumps(good))).payload == good
    for bad in (None, {}, {**good, "sizes": {"a": 0}}, {**good, "exits": []}, {**good, "exits": "12"},
                {**good, "how": "bf16"}, {**good, "how": 3}, {**good, "more": 1}):  # fmt: skip
        with pytest.raises(ConfigError):
            ShapeArithmetic.from_payload(bad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_compiled_kernels_train_alike(exact: ff.Run, tmp_path: Path) -> None:
    run = ff.run(laid(TABLE, engine={"compile": True}, model={"name": "cnn"}, rounds=1), out=tmp_path / "a")
    plain = ff.run(laid(TABLE, engine={}, model={"name": "cnn"}, rounds=1), out=tmp_path / "b")
    for name, tensor in trained(plain).items():
        torch.testing.assert_close(trained(run)[name], tensor, rtol=1e-2, atol=1e-3)
