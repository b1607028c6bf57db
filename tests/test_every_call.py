"""Every public function is called in every way that docs/api.md and its docstring describe; none is forgotten."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from torch import nn

import fleetfit as ff
from fleetfit.anatomy import infer_layout
from fleetfit.api.run import Sections
from fleetfit.architecture import (
    Architecture,
    check_layout,
)
from fleetfit.callbacks import scalars
from fleetfit.config import load_experiment
from fleetfit.core import DataDescription
from fleetfit.errors import ConfigError
from fleetfit.method import (
    Aggregate,
    Submodel,
    Targets,
    Update,
    extract,
    get_movement,
    outputs,
    split_levels,
    take_mean,
)
from fleetfit.models.mlp import mlp
from fleetfit.runs.listing import clear_checkpoints

SECTIONS = {*Sections.__annotations__, "further", "unknown"} - {"callbacks"}
"""Those of a run file: tests/test_surface.py gives each of them."""
X = np.random.default_rng(0).normal(0, 1, (160, 6)).astype("f4")
Y = np.arange(160) % 3
TABLES: dict[str, Any] = {
    "rounds": 1, "model": {"name": "mlp", "hidden": 16}, "fleet": {"tolerance": 0.4}, "local": {"max_steps": 2},
}  # fmt: skip
ROWS = {"row": [{"method": {"name": "scalefl"}}, {"method": "heterofl"}], "smallest_baseline": False}
TOML = """
rounds = 1
model = { name = "mlp", hidden = 16 }
fleet = { tolerance = 0.4 }
local = { max_steps = 2 }
data = { path = "c.npz" }
"""
AUTHORS = (check_layout, outputs, extract,
           get_movement, split_levels, take_mean, scalars, clear_checkpoints)  # fmt: skip
FUNCTIONS = {name: getattr(ff, name) for name in ff.__all__ if inspect.isfunction(getattr(ff, name))}
FUNCTIONS |= {function.__name__: function for function in AUTHORS}
METHODS = {
    f"Run.{name}": member for name, member in inspect.getmembers(ff.Run, inspect.isfunction) if not name.startswith("_")
}


class Calls:
    """Calls functions, and notes which of their parameters were given."""

    def __init__(self) -> None:
        self.given: dict[str, set[str]] = {}

    def __call__(self, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        function = {**FUNCTIONS, **METHODS}[name]
        bound = inspect.signature(function).bind(*arguments, **keywords)
        self.given.setdefault(name, set()).update(bound.arguments)
        return function(*arguments, **keywords)


@pytest.fixture(scope="module")
def call() -> Calls:
    return Calls()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with arrays, a run file and the file of a comparison."""
    folder = tmp_path_factory.mktemp("calls")
    np.savez(folder / "c.npz", x=X, y=Y)
    (folder / "run.toml").write_text(TOML)
    (folder / "compare.toml").write_text(
        f"{TOML}compare.smallest_baseline = false\n"
        '[[compare.row]]\nmethod.name = "scalefl"\n[[compare.row]]\nmethod.name = "heterofl"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def done(call: Calls, place: Path) -> ff.Run:
    return call("run", place / "run.toml", out=place / "done")


def sources(place: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The ways to say what is run: a source, and keywords."""
    return {
        "path": (place / "run.toml", {}),
        "text": (str(place / "run.toml"), {}),
        "tables": ({**TABLES, "data": {"path": "c.npz"}}, {}),
        "an experiment": (load_experiment({**TABLES, "data": {"path": "c.npz"}}), {}),
        "keywords": (None, {**TABLES, "data": "c.npz"}),
        "objects": (None, {**TABLES, "data": (X, Y)}),
        "an instance": (None, {**TABLES, "data": (X, Y), "model": mlp(3, (6,), hidden=16)}),
        "a function": (None, {**TABLES, "data": (X, Y), "model": own}),
        "beside a file": (place / "run.toml", {"data": (X, Y), "name": "other"}),
    }


def own(classes: int, input_shape: tuple[int, ...]) -> Architecture:
    """An architecture of one's own, by its function."""
    return mlp(classes, input_shape, hidden=16)


WAYS = ["path", "text", "tables", "an experiment", "keywords", "objects", "an instance", "a function", "beside a file"]


@pytest.mark.parametrize("way", WAYS)
def test_run_and_plan(call: Calls, place: Path, way: str, tmp_path: Path) -> None:
    source, keywords = sources(place)[way]
    reports: list[Mapping[str, Any]] = []
    run = call("run", source, seed=7, out=tmp_path / "run", on_round=reports.append,
               callbacks=[reports.append], progress=False, **keywords)  # fmt: skip
    assert run.finished and len(reports) == 2 and run.experiment.seed == 7
    assert run.plan.to_toml() == call("plan", source, seed=7, **keywords).to_toml()


def test_the_defaults_are_a_run_too(call: Calls, tmp_path: Path) -> None:
    assert call("run", rounds=1, local={"max_steps": 1}, out=str(tmp_path / "run")).finished
    assert call("plan").levels


def test_resume_and_load(call: Calls, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(report: Mapping[str, Any]) -> None:
        raise Stop

    reports: list[Any] = []
    with pytest.raises(Stop):
        call("run", {**TABLES, "rounds": 2}, data=(X, Y), out=tmp_path / "run", on_round=stop)
    assert not call("load", tmp_path / "run", data=(X, Y)).finished
    run = call(
        "resume",
        str(tmp_path / "run"),
        on_round=reports.append,
        callbacks=[reports.append],
        progress=False,
        data=(X, Y),
    )
    assert run.finished and reports
    assert call("resume", tmp_path / "run", data=(X, Y)).finished
    longer = call(
        "resume",
        tmp_path / "run",
        rounds=3,
        fleet={"groups": [{"budget": 1.0}]},
        evaluate={"patience": None},
        checkpoint={"every": 3},
        data=(X, Y),
    )
    assert len(longer.metrics) == 3


def test_derive(call: Calls) -> None:
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    derived = call("derive", net, (X, Y), exits=["1"], heads="own", head="new", weights="new", axes={"0": "first"},
                   progress=False)  # fmt: skip
    assert derived.blocks == 2 and set(derived.axes) == {"first", "2", "classes"}


COMPARED = ["path", "text", "tables", "an experiment", "keywords", "objects", "beside a file", "beside tables"]


@pytest.mark.parametrize("way", COMPARED)
def test_compare(call: Calls, place: Path, way: str, tmp_path: Path) -> None:
    tables = {**TABLES, "compare": ROWS}
    source, keywords = {
        "path": (place / "compare.toml", {}),
        "text": (str(place / "compare.toml"), {}),
        "tables": ({**tables, "data": {"path": "c.npz"}}, {}),
        "an experiment": (load_experiment({**tables, "data": {"path": "c.npz"}}), {}),
        "keywords": (None, {**tables, "data": "c.npz"}),
        "objects": (None, {**tables, "data": (X, Y)}),
        "beside a file": (place / "compare.toml", {"data": (X, Y), "evaluate": {"split": "validation"}}),
        "beside tables": (tables, {"data": (X, Y)}),
    }[way]
    rounds: list[Any] = []
    comparison = call("compare", source, out=tmp_path / "compared", seed=7, against="heterofl",
                      jobs=1, on_run=lambda title, number, count, run: rounds.append,
                      on_progress=lambda progress: None, record=tmp_path / "kept", progress=False,
                      **keywords)  # fmt: skip
    assert comparison.finished and {row for row, _ in comparison.runs} == {"scalefl", "heterofl"} and len(rounds) == 2
    assert all(run.experiment.seed == 7 for runs in comparison.runs.values() for run in runs)
    split = "validation" if way == "beside a file" else "test"
    assert (
        comparison.runs["scalefl", ""][0].columns["static"]
        and comparison.runs["scalefl", ""][0].experiment.evaluate.split == split
    )
    assert list((tmp_path / "kept").glob("*.json"))
    again = call("compare", source, out=tmp_path / "compared", seed=7, **keywords)
    assert again.table.rows == comparison.table.rows  # nothing is run again
    if "objects" not in way and "beside" not in way:
        assert call("load_comparison", tmp_path / "compared").table.rows == comparison.table.rows


@pytest.mark.parametrize("alone", [True, False])
def test_rows_win_over_keywords(call: Calls, tmp_path: Path, alone: bool) -> None:
    rows = {"row": [{"method": "scalefl", "rounds": 1}, {"method": "heterofl"}], "smallest_baseline": False}
    tables = {**{k: v for k, v in TABLES.items() if k != "rounds"}, "compare": rows, "data": (X, Y)}
    more = {"out": tmp_path / "compared", "rounds": 3}
    comparison = call("compare", **tables, **more) if alone else call("compare", tables, **more)
    assert [run.experiment.rounds for runs in comparison.runs.values() for run in runs] == [1, 3]


def test_rows_of_a_comparison_take_objects(call: Calls, tmp_path: Path) -> None:
    rows = {"row": [{"label": "few", "data": (X[:90], Y[:90])}, {"label": "all", "data": (X, Y)}]}
    comparison = call("compare", {**TABLES, "compare": rows}, out=tmp_path / "compared")
    samples = {row: len(runs[0].assembly.data.x) for (row, _), runs in comparison.runs.items()}
    assert samples == {"few": 90, "all": 160}


def test_objects_stay_in_their_process(call: Calls, tmp_path: Path) -> None:
    with raises(ConfigError, "jobs = 2", "jobs = 1"):
        call("compare", {**TABLES, "compare": ROWS}, data=(X, Y), jobs=2, out=tmp_path / "compared")


def test_comparisons_of_objects_have_folders_of_their_own(
    call: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether an object is the one of before, so nothing of before is taken for it."""
    monkeypatch.chdir(tmp_path)
    folders = {call("compare", {**TABLES, "compare": ROWS}, data=(X + i, Y)).folder for i in range(2)}
    assert len(folders) == 2


def test_profile(call: Calls, place: Path, tmp_path: Path) -> None:
    facts = DataDescription("c", "classification", (6,), 3, 0, -1)
    lines: list[str] = []
    profile = call("profile", place / "run.toml", memory=2e9, step_s=9.0, latency_s=9.0, energy_j=None,
                   device="cpu", threads=1, limit_s=60.0, facts=facts,
                   out=tmp_path / "budget.toml", force=True, say=lines.append, seed=1,
                   local={"batch_size": 8}, fleet={"levels": [0.5, 1.0]})  # fmt: skip
    assert profile and lines and (tmp_path / "budget.toml").is_file()


def test_folders(call: Calls, done: ff.Run, tmp_path: Path) -> None:
    assert call("load", str(done.folder)).finished and call("load", done.folder).finished
    assert call("write_report", done.folder, str(done.folder), out=tmp_path / "page.html").is_file()
    assert call("write_report", done.folder).is_file()
    assert [one.folder for one in call("list_runs", done.folder.parent)] == [done.folder]
    assert call("list_runs", str(done.folder))
    assert isinstance(call("clear_checkpoints", done.folder, last=False, unfinished=True), list)


def test_a_run_is_asked(call: Calls, done: ff.Run, tmp_path: Path) -> None:
    data = done.assembly.data
    for level in (None, 1, "1"):
        result = call("Run.predict", done, X[:9], level=level, exit="last", split="test", client=None, batch_size=4)
        assert result.probabilities.shape == (9, 3)
        logits = list(call("Run.predict_exits", done, X[:9], level=level, split="test", client=None))
        assert logits[-1].argmax(1).tolist() == result.classes.tolist()
        module = call("Run.model", done, level)
        assert torch.equal(module(call("Run.prepare", done, X[:9], split="test", client=None))[-1], logits[-1])
        assert call("Run.best_exit", done, level, client=None) >= 1
    assert call("Run.best_exit", done, 1, 0) >= 1
    for kind, level, norm in (
        ("local", None, None),
        ("local", 1, "static"),
        ("global", None, None),
        ("full", None, None),
    ):
        assert 0 <= call("Run.accuracy", done, kind, level, norm) <= 1
    for budget, mode, measure in ((0.9, "budgeted", "max"), (1.0, "anytime", "entropy"), (0.9, "budgeted", "margin")):
        call("Run.calibrate", done, level=4, budget=budget, cost="multiply_adds", mode=mode, measure=measure,
             temperature=True, client=None, data=data)  # fmt: skip
    call("Run.export", done, tmp_path / "device", 1, forms=(), data=data, progress=False, prior="own")
    for sections in (
        {},
        {"evaluate": {"split": "validation"}},
        {"split": "validation", "batch_size": 8},
        {"data": (X, Y)},
        {"data": "c.npz"},
        {"data": Path("c.npz")},
    ):
        assert call("Run.evaluate", done, **sections)["static"]


def test_models_and_layouts(call: Calls) -> None:
    architecture = mlp(3, (6,), hidden=16)
    layout = infer_layout(architecture)
    level = Submodel({axis: range(size) for axis, size in layout.full_sizes.items()}, layout.exits)
    for inputs in ({"input_shape": (6,)}, {"example": torch.zeros(2, 6)}):
        report = call("check_layout", architecture, layout, [level], say=lambda what: None, seed=1, **inputs)
        assert call("check_layout", architecture, layout, [level], proved=report, **inputs) is report
    assert len(call("outputs", architecture.build(layout.full_sizes, layout.exits), torch.zeros(2, 6))) == len(
        layout.exits
    )
    state = dict(architecture.build(layout.full_sizes, layout.exits).state_dict())
    assert (
        call("extract", layout, {name: state[name] for name in layout.tensors}, level).keys() == layout.tensors.keys()
    )


def test_a_method_s_pieces(call: Calls, done: ff.Run) -> None:
    federation = done.assembly.federation
    targets = Targets((0.5, 1.0), (0.4, 0.4))
    for mode in ("both", "width", "depth"):
        for exits in ("all", "last"):
            assert len(call("split_levels", federation.problem, targets, scaling=mode, exits=exits)) == 2
    assert len(call("split_levels", federation.problem, targets, default="auto")) == 2
    size = done.server.state
    aggregate = Aggregate(
        {name: torch.ones_like(t) for name, t in size.items()}, {name: torch.ones_like(t) for name, t in size.items()}
    )
    after = call("take_mean", federation, done.server, aggregate, [])
    assert all(bool((t == 1).all()) for t in after.state.values())
    level = federation.levels[0].submodel
    state = extract(federation.problem.layout, done.server.state, level)
    update = Update(0, 0, 0, 0, level, level, {name: tensor + 1 for name, tensor in state.items()}, 1, {"loss": 1.0})
    movement = call("get_movement", federation, done.server, update)
    assert torch.allclose(movement, torch.ones(1), atol=1e-5)
    assert all(isinstance(value, float) for value in call("scalars", done.metrics[-1]).values())


def test_nothing_was_forgotten(call: Calls) -> None:
    """Runs last: each function was called, each of its parameters was given."""
    if len(call.given) < 5:
        pytest.skip("needs the other tests of this file")
    for name, function in {**FUNCTIONS, **METHODS}.items():
        parameters = inspect.signature(function).parameters.keys() - {"self"} - SECTIONS
        assert parameters <= call.given.get(name, set()), f"{name}: {parameters - call.given.get(name, set())}"
