"""Runs of plain modules: same bits on every engine, resumed or not, with every method; and what does not fit."""

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_models import Flat, Grouped, Patches, Residual, Sequence
from sampling import some_quick
from support import Expected, raises
from support.bits import have_same_state
from support.verbs import run_verb
from tiny import spec_of, tiny_data
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.api.run import prepare
from fleetfit.config import load_experiment
from fleetfit.config.assemble.local import describe_training
from fleetfit.config.assemble.run import assemble
from fleetfit.config.dump import to_toml
from fleetfit.core import Local
from fleetfit.data import Data
from fleetfit.errors import ConfigError, DataError, FleetFitError, ModelError, RunError
from fleetfit.names import list_names
from fleetfit.training import initial_state
from fleetfit.training.frozen import BATCH, find_frozen_prefix

CLIENTS = 4
NAMED = {"name": "plain_models:Residual", "width": 8}


def describe(model: Any, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 1,
        "rounds": 2,
        "data": {"name": "tiny:tiny_data", "partition": {"kind": "dirichlet", "alpha": 1.0, "clients": CLIENTS}},
        "model": model,
        "local": {"lr": 0.05},
        "fleet": {"tolerance": 0.3, "groups": [{"budget": 0.5}, {"budget": 1.0}]},
        **changes,
    }


def make_data() -> Data:
    return tiny_data()


def run(table: dict[str, Any], out: Path, **more: Any) -> ff.Run:
    return ff.run(table, out=out, **more)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", [NAMED, {"name": "plain_models:Patches"}], ids=["residual", "patches"])
def test_workers_have_the_bits_of_local(model: dict[str, Any], engine: str, tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray", reason="the extra ray is not installed")
    ours = run(describe(model), tmp_path / "local")
    theirs = run(describe(model, engine={"name": engine, "workers": 2}), tmp_path / engine)
    assert have_same_state(ours, theirs) and ours.accuracy("local") == theirs.accuracy("local")


class Stop(Exception):
    pass


@pytest.mark.parametrize("model", [NAMED, Residual(8)], ids=["class", "instance"])
def test_a_resumed_run_equals_an_unbroken_one(model: Any, tmp_path: Path) -> None:
    def stop(report: Any) -> None:
        if report["round"] == 1:
            raise Stop

    whole = run(describe(model, rounds=3), tmp_path / "whole")
    with pytest.raises(Stop):
        run(describe(model, rounds=3), tmp_path / "broken", on_round=stop)
    again = {} if isinstance(model, dict) else {"model": model}
    resumed = ff.resume(tmp_path / "broken", **again)
    assert resumed.finished and have_same_state(whole, resumed)


def test_levels_stay_as_they_were_derived(tmp_path: Path) -> None:
    """A later version may derive other axes; a run that has begun keeps its own."""
    first = run(describe({**NAMED, "derive": {"axes": {"layers.*.conv1": "inner"}}}), tmp_path / "run")
    payload = json.loads((tmp_path / "run" / "derived.json").read_text())
    assert set(payload["axes"]) == {"stem", "inner", "classes"}
    loaded = ff.load(tmp_path / "run")
    assert loaded.assembly.federation.problem.architecture.axes == first.assembly.federation.problem.architecture.axes
    payload["format"] += 1
    (tmp_path / "run" / "derived.json").write_text(json.dumps(payload))
    with raises(ModelError, str(payload["format"]), str(payload["format"] - 1), key="derive.format"):
        _ = ff.load(tmp_path / "run").assembly


# ---- what is trained -------------------------------------------------------------------------------------------------

NO_TOKENS = "reefl"  # needs a backbone of tokens that runs block by block


@pytest.mark.parametrize(
    "method", some_quick([m for m in list_names("methods") if m != NO_TOKENS], ["fedavg", "scalefl", "adaptivefl"])
)
@pytest.mark.parametrize("model", [Residual(8), Flat()], ids=["exits", "one exit"])
def test_every_method_trains_a_plain_module(model: nn.Module, method: str, tmp_path: Path) -> None:
    table = describe(model, method=spec_of(method), rounds=1)
    if method == "feddf":
        table["data"]["server"] = {"name": "tiny:tiny_server_data"}
    finished = run(table, tmp_path / "run")
    assert not finished.metrics[0]["failures"] and 0 <= finished.accuracy("global") <= 1


@pytest.mark.parametrize(
    "peft",
    [
        {"name": "frozen"},
        {"name": "lora", "targets": ["*.qkv"], "rank": 2},
        {"name": "serial_adapter", "targets": ["*.mlp"], "rank": 2},
        {"name": "parallel_adapter", "targets": ["*.mlp"], "rank": 2},
        {"name": "ssf"},
    ],
    ids=lambda peft: str(peft["name"]),
)
def test_fine_tuning_leaves_the_instance_s_weights(peft: dict[str, Any], tmp_path: Path) -> None:
    """The backbone's tensors do not travel and stay as they were; classifiers and added ones are trained."""
    pytest.importorskip("peft" if peft["name"] == "lora" else "torch")
    net = Patches()
    finished = run(describe(net, peft=peft, rounds=1), tmp_path / "run")
    problem = finished.assembly.federation.problem
    own = {f"net.{name}": tensor for name, tensor in net.state_dict().items()}
    base = {name.replace(".base_layer", ""): tensor for name, tensor in problem.base.items()}
    assert base.keys() == own.keys() - {"net.head.weight", "net.head.bias"}
    assert all(torch.equal(base[name], own[name]) for name in base)
    assert {"net.head.weight", "heads.1.fc.weight"} <= finished.server.state.keys()


class Counted(Patches):
    """A module that counts the images on which it has begun."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.count += 0 if x.is_meta else len(x)
        return super().forward(x)


@pytest.mark.parametrize("method", ["heterofl", "depthfl"])
def test_further_epochs_do_not_run_a_frozen_module(method: str, tmp_path: Path) -> None:
    """Its classifiers are trained on what they read; the values differ by the rounding of another batch shape."""
    torch.manual_seed(0)
    net, counts, states = Counted(), [], []
    for epochs, features_bytes in ((2, 1e8), (9, 1e8), (9, 0)):
        begun = Counted.count
        table = describe(net, peft={"name": "frozen"}, method=method, local={"epochs": epochs, "lr": 0.05})
        table |= {"engine": {"feature_cache_bytes": features_bytes}, "evaluate": {"every": 0, "whole_test_set": False}}
        states.append(run(table, tmp_path / f"{epochs} {features_bytes}").server.state)
        counts.append(Counted.count - begun)
    assert counts[0] == counts[1] < counts[2]
    for name, tensor in states[1].items():
        torch.testing.assert_close(tensor, states[2][name], rtol=1e-3, atol=1e-4)
        assert not torch.equal(tensor, states[0][name])


@pytest.mark.parametrize(
    ("net", "trained", "is_frozen"),
    [
        (Patches(), ("heads.*", "net.head.*"), True),
        (Patches(), ("heads.*", "net.head.*", "net.norm.weight"), False),
        (Patches(), ("heads.*", "net.head.*", "net.blocks.0.*"), False),
        (Patches(), ("net.head.*",), False),
        (Residual(8), ("heads.*", "net.fc.*"), False),  # batch norms
    ],
)
def test_values_are_frozen_below_classifiers_alone(net: nn.Module, trained: tuple[str, ...], is_frozen: bool) -> None:
    derived = ff.derive(net, make_data())
    level = derived.build(derived.plan.axes, derived.positions)
    parameters = [p for name, p in level.named_parameters() if any(fnmatch(name, pattern) for pattern in trained)]
    x, other = torch.randn(2, BATCH, 1, 4, 4)
    assert (find_frozen_prefix(level, parameters, x, other) is not None) == is_frozen


def test_training_starts_from_the_instance(tmp_path: Path) -> None:
    net = Residual(8)
    problem = ff.run(describe(net, rounds=1), out=tmp_path / "run").assembly.federation.problem
    state = initial_state(problem, seed=5)
    own = dict(net.named_parameters())
    assert all(torch.equal(state[f"net.{name}"], tensor) for name, tensor in own.items())
    assert {name for name in state if not name.startswith("net.")} == {
        f"heads.{e}.{name}" for e in problem.exits[:-1] for name in ("norm.weight", "norm.bias", "fc.weight", "fc.bias")
    }


def test_new_weights_are_drawn_from_the_seed(tmp_path: Path) -> None:
    net = Residual(8)
    states = [
        ff.derive(net, make_data(), weights=weights).net.state_dict()["stem.weight"]
        for weights in ("instance", "new", "new")
    ]
    assert torch.equal(states[0], net.stem.weight) and torch.equal(states[1], states[2])
    assert not torch.equal(states[0], states[1])


def test_a_class_is_drawn_from_the_seed_of_the_run(tmp_path: Path) -> None:
    stems = []
    for seed in (1, 1, 2):
        problem = ff.plan(describe(NAMED, seed=seed)) and ff.load(run(describe(NAMED, seed=seed, rounds=1),
                          tmp_path / f"{len(stems)}").folder).assembly.federation.problem  # fmt: skip
        stems.append(problem.architecture.net.stem.weight)
    assert torch.equal(stems[0], stems[1]) and not torch.equal(stems[0], stems[2])


def test_few_exits_give_levels_by_width(tmp_path: Path) -> None:
    finished = run(describe(Flat(), rounds=1, method="scalefl"), tmp_path / "run")
    levels = finished.assembly.federation.levels
    assert [level.submodel.exits for level in levels] == [(1,)] * len(levels)
    assert levels[0].width < levels[-1].width == 1
    assert any("width" in note and "split" in note for note in finished.notes)
    assert not any("split" in note for note in run(describe(NAMED, rounds=1), tmp_path / "deep").notes)


SGD, ADAMW = Local(), Local(optimizer="adamw")


@pytest.mark.parametrize("norm", [[], [nn.BatchNorm2d(16)]], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ({}, ADAMW.replace(lr=0.005)),
        ({"epochs": 3}, ADAMW.replace(lr=0.005, epochs=3)),
        ({"optimizer": "adamw"}, ADAMW),
        ({"optimizer": "adamw", "lr": 0.03}, ADAMW.replace(lr=0.03)),
        ({"optimizer": "sgd"}, SGD.replace(clip_norm=1.0)),
        ({"lr": 0.3}, SGD.replace(lr=0.3, clip_norm=1.0)),
        ({"momentum": 0.5}, SGD.replace(momentum=0.5, clip_norm=1.0)),
        ({"clip_norm": 5.0}, SGD.replace(clip_norm=5.0)),
        ({"clip_norm": None, "lr": 0.1}, SGD),
        ({"clip_value": 2.0}, SGD.replace(clip_value=2.0)),
        ({"lr": 0.1, "momentum": 0.9, "nesterov": False, "weight_decay": 5e-4}, SGD),
    ],
)
def test_a_plain_module_has_a_recipe_of_its_own(
    norm: list[nn.Module], local: dict[str, Any], expected: Local, tmp_path: Path
) -> None:
    """It stands in config.toml, from which another run trains alike."""
    net = nn.Sequential(nn.Conv2d(1, 16, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    data = {"name": "digits", "partition": {"kind": "iid", "clients": 4}}
    fleet = {"groups": [{"budget": 0.5}, {"budget": 1.0}], "tolerance": 0.3}
    table = {"data": data, "fleet": fleet, "local": local, "method": {"name": "fedavg"}}
    new = prepare(load_experiment({**table, "model": {"name": net}}), tmp_path / "run")
    assert new.assembly.settings.local == expected
    chosen = describe_training(new.experiment)
    assert bool(chosen) == (("optimizer" not in local and expected.optimizer == "adamw") or expected.clip_norm == 1.0)
    assert ff.load(tmp_path / "run", model=net).assembly.settings.local == expected
    again = load_experiment(tmp_path / "run" / "config.toml", model=net)
    assert assemble(again).settings.local == expected


def test_recipes_depend_on_the_model() -> None:
    def find_local(model: Any, **sections: Any) -> Local:
        data = {"name": "digits", "partition": {"kind": "iid", "clients": 4}}
        table = {"data": data, "model": model, "fleet": {"groups": [{"budget": 1.0}]}, **sections}
        return assemble(load_experiment(table)).settings.local.at_round(1, 0)

    wide = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    small = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert find_local({"name": wide}) == ADAMW, "lr 0.001 from a million parameters on"
    assert find_local("cnn") == SGD and find_local({"name": small}, method="fedsgd") == SGD
    assert find_local({"name": "vit", "patch": 2}) == ADAMW


def test_a_resumed_comparison_keeps_its_recipe(tmp_path: Path) -> None:
    """A folder of before, in which a plain module was trained by SGD without clipping, is no other run."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    table = {
        "rounds": 1, "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}}, "model": {"name": net},
        "local": {"epochs": 1}, "compare": {
            "smallest_baseline": False, "row": [{"label": "a"}, {"label": "b", "method": {"name": "heterofl"}}]},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetfit.config.assemble.levels.choose_training", lambda experiment, *_: experiment)
        first = ff.compare(table, out=tmp_path / "out")
    text = next((tmp_path / "out").rglob("config.toml")).read_text()
    assert 'optimizer = "sgd"' in text and "clip_norm" not in text
    assert ff.compare(table, out=tmp_path / "out").table == first.table


@pytest.mark.parametrize("kind", ["file", "object", "exits"])
def test_a_comparison_of_a_plain_module_goes_on(tmp_path: Path, kind: str) -> None:
    """Its runs say which plan they were derived with; the file of the comparison does not."""
    (tmp_path / "net.py").write_text("from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), "
                                     "nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))\n")  # fmt: skip
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = {"name": module if kind == "object" else f"{tmp_path / 'net.py'}:net"}
    table = {
        "rounds": 1, "data": {"name": "digits", "partition": {"kind": "iid", "clients": 4}}, "local": {"epochs": 1},
        "model": {**model, **({"derive": {"exits": "none"}} if kind == "exits" else {})},
        "compare": {"smallest_baseline": False,
                    "row": [{"label": "a"}, {"label": "b", "method": {"name": "heterofl"}}]},
    }  # fmt: skip
    first, second = (ff.compare(table, out=tmp_path / "out") for _ in range(2))
    assert second.finished and second.table == first.table
    with raises(RunError, "none", "model.derive.exits", path="seed-0"):
        other = {"exits": "auto" if kind == "exits" else "none"}
        ff.compare({**table, "model": {**model, "derive": other}}, out=tmp_path / "out")


def test_next_tokens(tmp_path: Path) -> None:
    x = torch.randint(12, (120, 6), generator=torch.Generator().manual_seed(0))
    splits = {"train": torch.arange(100), "test": torch.arange(100, 120)}
    data = Data("tokens", x, x.roll(-1, 1), splits, 12, task="next_token", vocabulary=12)
    table = describe(Sequence(), method="heterofl", rounds=1)
    finished = ff.run(
        {**table, "data": {"name": data, "partition": {"kind": "iid", "clients": CLIENTS}}}, out=tmp_path / "run"
    )
    assert finished.accuracy("global") >= 0


# ---- what does not fit -----------------------------------------------------------------------------------------------

MISFITS: list[tuple[Any, Expected]] = [
    (Residual(8, classes=7), Expected("7", "4", kind=ModelError, key="model.derive.head")),
    (Sequence(), Expected(kind=ModelError, key="model.name")),
    (nn.Linear(3, 4), Expected(kind=ModelError, key="model.name")),
    ({"name": Residual(8), "width": 8}, Expected(kind=ConfigError, key="model.width")),
    ({"name": "plain_models:Residual", "widht": 8}, Expected(kind=ConfigError, key="model.widht")),
    ({"name": "cnn", "derive": {}}, Expected(kind=ConfigError, key="model.derive")),
    ({"name": Residual(8), "derive": {"exits": ["layer.0"]}}, Expected(kind=ModelError, key="derive.exits")),
    ({"name": Residual(8), "derive": {"head": "old"}}, Expected(kind=ConfigError, key="model.derive.head")),
]


@pytest.mark.parametrize(("model", "expected"), MISFITS)
def test_unfit_modules_are_refused(model: Any, expected: Expected, tmp_path: Path) -> None:
    with raises(FleetFitError, expected):
        run(describe(model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_reefl_leads_to_a_method_that_trains(tmp_path: Path) -> None:
    """`test_every_method_trains_a_plain_module` follows it."""
    with raises(ModelError, "scalefl", key="method.name"):
        run(describe(Patches(), method="reefl"), tmp_path / "run")


def test_a_new_classifier_on_request(tmp_path: Path) -> None:
    net = Residual(8, classes=7)
    derived = ff.derive(net, make_data(), head="new")
    assert derived.net.fc.out_features == 4 and net.fc.out_features == 7
    assert torch.equal(derived.net.stem.weight, net.stem.weight)


def test_a_new_classifier_is_made_in_each_process(tmp_path: Path) -> None:
    model = {"name": f"{Path(__file__)}:make_seven", "derive": {"head": "new"}}
    runs = [
        run(describe(model, rounds=1, engine={"name": engine}), tmp_path / engine) for engine in ("local", "processes")
    ]
    assert have_same_state(*runs)
    assert {tuple(out.shape) for out in runs[0].model()(make_data().batch(torch.arange(3))[0])} == {(3, 4)}


def make_seven() -> nn.Module:
    return Residual(8, classes=7)


def test_a_new_classifier_has_all_names_of_the_old_one() -> None:
    net = Residual(8, classes=7)
    net.head = net.fc
    new = ff.derive(net, make_data(), head="new").net
    assert new.head is new.fc and new.fc.out_features == 4 and net.head is net.fc


def test_an_instance_runs_on_the_local_engine_only(tmp_path: Path) -> None:
    with raises(ConfigError, "package.module:function", key="model"):
        run(describe(Residual(8), engine={"name": "processes", "workers": 1}), tmp_path / "run")


def test_another_class_under_the_name_is_refused(tmp_path: Path) -> None:
    """Such as on a node whose file has changed: keys and shapes are compared with the plan first."""
    from fleetfit.core import Problem

    spec = run(describe(NAMED, rounds=1), tmp_path / "run").assembly.federation.problem.spec
    assert spec is not None
    Problem.from_spec(spec)
    with raises(ModelError, "stem.weight", key="model.name"):
        Problem.from_spec({**spec, "model": {**spec["model"], "width": 16}})


# ---- the command line ------------------------------------------------------------------------------------------------


def test_check_model_shows_the_axes() -> None:
    text = run_verb("check-model", "plain_models:Residual", "--input-shape", "1,4,4", "--classes", "4", code=0).out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["stem", "1", "16", "1", "any"] in [row[:5] for row in rows]
    assert ["layers.*.conv1", "3", "16", "1", "any"] in [row[:5] for row in rows]


def test_the_task_of_a_language_model_is_named() -> None:
    command = ["check-model", "plain_models:Sequence", "--input-shape", "6", "--set", "model.vocabulary=12"]
    assert "--task next_token" in run_verb(*command, code=2).err
    run_verb(*command, "--task", "next_token", code=0)


@pytest.mark.parametrize(
    "arguments",
    [["--input-shape", "1,4,4", "--tolerance", "0.2"], ["--input-shape", "1,4,4", "--set", "model.width=32"]],
)
def test_plan_takes_a_class(arguments: list[str]) -> None:
    run_verb("plan", "--model", "plain_models:Residual", "--classes", "4", *arguments, code=0)


def test_a_wrong_shape_is_a_sentence() -> None:
    with raises(ModelError, key="model.name"):
        ff.derive(Residual(8), (torch.randn(40, 5), torch.randint(4, (40,))))
    assert "Traceback" not in run_verb("check-model", "plain_models:Residual", "--input-shape", "5", code=2).err


# ---- what takes long names its steps -------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetfit.anatomy.proof._PATIENCE_S", -1.0)


def list_steps(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("Deriving", "Proving", "fleetfit: Deriving"))]


def test_deriving_names_its_steps(impatient: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ff.derive(Residual(8), make_data(), progress=True)
    steps = list_steps(capsys.readouterr().err)
    assert all("Residual" in step for step in steps)
    assert any("stem" in step for step in steps) and any(step.startswith("Proving") for step in steps)
    ff.derive(Residual(8), make_data(), progress=False)
    assert not list_steps(capsys.readouterr().err)
    derived = run(describe(NAMED, rounds=1), tmp_path / "run", progress=True)
    err = capsys.readouterr().err
    assert len(list_steps(err)) >= len(steps)
    notes = derived.files.read_summary().notes
    assert notes and all(f"Note: {note}" in err for note in notes)


def test_the_verbs_name_the_steps(impatient: None, tmp_path: Path) -> None:
    toml = to_toml(load_experiment(describe(NAMED, rounds=1)))
    (tmp_path / "run.toml").write_text(toml)
    assert list_steps(run_verb("run", tmp_path / "run.toml", "--out", tmp_path / "run", code=0).out)
    printed = run_verb("check-model", "plain_models:Residual", "--input-shape", "1,8,8", code=0)
    assert list_steps(printed.err) and not list_steps(printed.out)


def test_quick_derivations_name_no_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fleetfit.anatomy.proof._PATIENCE_S", 600.0)
    ff.derive(Residual(8), make_data(), progress=True)
    assert not list_steps(capsys.readouterr().err)


def test_images_without_channels_are_refused(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.convolution(x).relu().mean((2, 3)))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 8, 20)).astype(np.float32), np.arange(60) % 2
    table: dict[str, Any] = {
        "rounds": 1,
        "data": {"name": (x, y), "partition": {"kind": "iid", "clients": 2}},
        "method": {"name": "fedavg"},
        "fleet": {"groups": [{"budget": 1.0}]},
        "local": {"epochs": 1, "max_steps": 1},
    }
    with raises(ModelError, Expected("(8, 20)", "x[:, None]"), key="model.name"):
        ff.run(table, model=Net(), out=tmp_path / "run")
    square = {**table, "data": {**table["data"], "name": (x[:, :, :8], y)}}
    with raises(DataError, Expected("[60, 8, 8]", "x[:, None]"), key="channels_last"):
        ff.run(square, model=Net(), out=tmp_path / "run")
    table["data"] |= {"name": (x[:, None], y)}
    assert ff.run(table, model=Net(), out=tmp_path / "run").finished


# ---- what a level returns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [Flat(), Grouped()], ids=["one exit", "exits that nobody trains"])
def test_a_run_with_one_exit_has_models_that_return_logits(net: nn.Module, tmp_path: Path) -> None:
    """The instance with the trained weights returns the same tensor."""
    done = run(describe(net, method={"name": "heterofl"}), tmp_path / "run")
    model: Any = done.model()
    net.load_state_dict(model.net.state_dict())
    x = torch.rand(3, 1, 4, 4)
    with torch.no_grad():
        assert torch.equal(model(x), net.eval()(x)) and done.model(level=1)(x).shape == (3, 4)


def test_levels_of_a_run_with_early_exits_return_lists(tmp_path: Path) -> None:
    """The level with one exit, too, so that [-1] is the last exit's logits at each level."""
    done = run(describe(Residual(width=8), method={"name": "scalefl"}), tmp_path / "run")
    x = torch.rand(3, 1, 4, 4)
    logits = [done.model(level)(x) for level in (1, 2)]
    assert [len(one) for one in logits] == [1, 2] and all(isinstance(one, list) for one in logits)
