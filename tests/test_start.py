"""A run that begins where another one ended, whatever its method; and one that begins as a checkpoint folder."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support import raises
from support.bits import assert_same_bits, has_same_bits
from tiny import Tiny
from torch import nn

import fleetfit as ff
from fleetfit import rounds
from fleetfit.anatomy import Axis, State, default_sizes, infer_layout
from fleetfit.config import load_experiment
from fleetfit.core import Problem
from fleetfit.core.tasks import classification
from fleetfit.errors import ModelError, RunError
from fleetfit.runs.folder import RunFolder
from fleetfit.training import initial_state
from fleetfit.training.start import load_start

HERE = Path(__file__).parent
TINY: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": f"{HERE}/tiny.py:tiny_data", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": f"{HERE}/tiny.py:tiny"},
    "fleet": {"levels": [0.3, 0.55, 1.0], "tolerance": 0.25, "groups": [{"budget": 0.6}, {"budget": 1.0}]},
    "local": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "cohort": {"count": 3},
    "evaluate": {"every": 0, "statistics_samples": 60},
}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    """A model trained centrally: one client that holds all training data."""
    alone = {"partition": {"clients": 1}}
    return ff.run(
        TINY, out=tmp_path_factory.mktemp("runs") / "backbone", data=TINY["data"] | alone,
        method="fedavg", fleet={"groups": [{"budget": 1.0}]}, cohort={"count": 1},
    )  # fmt: skip


def first_state(run: ff.Run) -> State:
    return rounds.start(run.assembly.federation).state


def test_first_state_is_last_of_other_run(backbone: ff.Run, tmp_path: Path) -> None:
    run = ff.run(TINY, out=tmp_path / "run", init_from=backbone.folder, seed=7, method="fedavg")
    assert_same_bits(first_state(run), backbone.server.state)
    assert run.experiment.init_from == str(backbone.folder)
    assert any(f"{backbone.folder} after round 2." in note for note in run.notes)
    assert not has_same_bits(run.server.state, backbone.server.state)
    drawn = initial_state(backbone.assembly.federation.problem, 7)
    assert not has_same_bits(drawn, backbone.server.state), "the seeds give one state, so the test proves nothing"


def test_missing_classifiers_are_drawn(backbone: ff.Run, tmp_path: Path) -> None:
    """The backbone has the last exit only; ScaleFL adds early ones, drawn as without a start."""
    run = ff.run(TINY, out=tmp_path / "run", init_from=backbone.folder, method="scalefl")
    begun, theirs = first_state(run), backbone.server.state
    plain = ff.run(TINY, out=tmp_path / "plain", method="scalefl")
    drawn = first_state(plain)
    exits = run.assembly.federation.problem.exits
    assert len(exits) > 1
    for name, tensor in begun.items():
        assert torch.equal(tensor, theirs[name] if name in theirs else drawn[name]), name
    early = ", ".join(f"heads.{e}" for e in exits[:-1])
    assert any(f"{backbone.folder} after round 2;" in note and f": {early}." in note for note in run.notes)


def test_only_classifiers_of_other_classes_are_drawn(backbone: ff.Run, tmp_path: Path) -> None:
    data = TINY["data"] | {"classes": 7}
    run = ff.run(TINY, out=tmp_path / "run", init_from=backbone.folder, data=data, method="fedavg")
    begun, theirs = first_state(run), backbone.server.state
    assert {name for name in begun if not torch.equal(begun[name][:4], theirs[name][:4])} == {
        "heads.3.weight", "heads.3.bias",
    }  # fmt: skip
    assert tuple(begun["heads.3.weight"].shape) == (7, 8)
    assert any(f"{backbone.folder} after round 2;" in note and ": heads.3." in note for note in run.notes)


def test_decoupled_gives_its_largest_model(tmp_path: Path) -> None:
    apart = ff.run(TINY, out=tmp_path / "apart", method="decoupled", cohort={"count": 6})
    assert len({name.partition("/")[0] for name in apart.server.state if name.startswith("level")}) > 1
    run = ff.run(TINY, out=tmp_path / "run", init_from=apart.folder, method="fedavg")
    level = f"level{len(apart.assembly.federation.levels)}/"
    theirs = {name.removeprefix(level): t for name, t in apart.server.state.items() if name.startswith(level)}
    assert theirs and has_same_bits(first_state(run), theirs)
    assert not has_same_bits({n: apart.server.state[n] for n in theirs}, theirs), "the untrained start lies beside it"


def test_resume_without_start(backbone: ff.Run, tmp_path: Path) -> None:
    """Cut off after round 1 and taken up again, the start being gone: the same final state as in one go."""
    moved = tmp_path / "moved"
    shutil.copytree(backbone.folder, moved)
    whole = ff.run(TINY, out=tmp_path / "whole", init_from=moved, method="fedavg")

    class Stop(Exception):
        pass

    def after_one(report: Any) -> None:
        if report["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        ff.run(TINY, out=tmp_path / "cut", init_from=moved, method="fedavg", on_round=after_one)
    newest = RunFolder.open(tmp_path / "cut").checkpoints()[-1]
    newest.unlink()
    shutil.rmtree(moved)
    again = ff.resume(tmp_path / "cut")
    assert_same_bits(again.server.state, whole.server.state)
    assert any(str(moved) in note for note in again.notes)


def test_refused_starts(backbone: ff.Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with raises(RunError, "nowhere"):
        ff.run(TINY, out=out, init_from="nowhere")
    (tmp_path / "empty").mkdir()
    with raises(RunError, "config.toml"):
        ff.run(TINY, out=out, init_from=tmp_path / "empty")
    shutil.copytree(backbone.folder, tmp_path / "unborn")
    shutil.rmtree(tmp_path / "unborn" / "checkpoints")
    with raises(RunError, tmp_path / "unborn"):
        ff.run(TINY, out=out, init_from=tmp_path / "unborn")
    with raises(ModelError, "blocks.0.conv.weight", "[model]"):
        ff.run({"rounds": 1, "data": {"partition": {"clients": 8}}}, out=out, init_from=backbone.folder)
    vit = {"name": "vit", "hidden": 12, "depth": 2, "attention_heads": 3, "patch": 2}
    small = ff.run(TINY, out=tmp_path / "small", model=vit, method="fedavg")
    with raises(ModelError, "embeddings.class_token", "(1, 1, 12)", "(1, 1, 24)"):
        ff.run(TINY, out=out, init_from=small.folder, model=vit | {"hidden": 24}, method="fedavg")
    assert not out.exists()


@dataclass(frozen=True)
class Pretrained(Tiny):
    """The tiny model with a checkpoint of one value, which may lack some tensors."""

    value: float = 0.5
    lacking: str = "nothing"
    checkpoint = "mine"

    def pretrained(self, exits: tuple[int, ...]) -> dict[str, torch.Tensor]:
        shapes = infer_layout(Tiny(), exits).shapes({}, exits)
        return {n: torch.full(shape, self.value) for n, shape in shapes.items() if not n.startswith(self.lacking)}


def test_checkpoint_of_a_model_is_validated() -> None:
    """The last words of the note: the checkpoint, or what is drawn anew in its place."""

    def begin(**model: Any) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
        return load_start(Problem(Pretrained(**model), (1, 4, 4), classification, (1, 2, 3)))

    assert len(begin()[0]) == len(infer_layout(Tiny(), (1, 2, 3)).tensors)
    assert begin()[1][0].endswith("mine.") and begin(lacking="heads.2")[1][0].endswith(" heads.2.")
    for model, names in (
        ({"value": torch.nan}, []),
        ({"value": torch.inf}, []),
        ({"lacking": "stem"}, ["stem.weight"]),
    ):
        with raises(ModelError, "mine", *names, key="init_from"):
            begin(**model)


def test_custom_model_starts_from_run(tmp_path: Path) -> None:
    """An architecture need not inherit: what the other run lacks is drawn only where it says so."""

    class Plain:
        axes, blocks, positions = {"wide": Axis(8), "classes": Axis(4, scaled=False)}, 1, (1,)

        def __init__(self, bias: bool) -> None:
            self.bias = bias

        def sizes(self, width: float) -> dict[str, int]:
            return default_sizes(self.axes, width)

        def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
            wide = nn.Linear(16, axes["wide"], bias=self.bias)
            return nn.Sequential(nn.Flatten(), wide, nn.ReLU(), nn.Linear(axes["wide"], axes["classes"]))

    first, again, lacking = ({"model": cast(Any, Plain(bias)), "method": "fedavg"} for bias in (False, False, True))
    run = ff.run(TINY, out=tmp_path / "first", **first)
    assert_same_bits(first_state(ff.run(TINY, out=tmp_path / "again", init_from=run.folder, **again)), run.server.state)
    with raises(ModelError, "1.bias", "[model]"):
        ff.run(TINY, out=tmp_path / "lacking", init_from=run.folder, **lacking)


def test_start_path_is_relative_to_run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files" / "theirs").mkdir(parents=True)
    (tmp_path / "files" / "run.toml").write_text(
        'init_from = "theirs"\n[model]\nname = "bert"\ncheckpoint = "theirs"\n'
    )
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment("files/run.toml")
    assert experiment.init_from == experiment.model.settings["checkpoint"] == str(tmp_path / "files" / "theirs")
    (tmp_path / "files" / "run.toml").write_text('init_from = "elsewhere"\n')
    assert load_experiment("files/run.toml").init_from == "elsewhere"


def test_custom_architecture_with_checkpoint(tmp_path: Path) -> None:
    """`pretrained` is all it takes; what it leaves out is drawn."""
    from tiny import Tiny, tiny_data

    class Begun(Tiny):
        def pretrained(self, exits: tuple[int, ...]) -> State:
            assert exits == (3,)
            return {f"blocks.{i}.0.weight": torch.full((12, 8), 0.25) for i in range(3)} | REST

    plain = ff.run(TINY, out=tmp_path / "plain", method="fedavg", model=Tiny(), data={"name": tiny_data()})
    REST = {n: t for n, t in first_state(plain).items() if not n.endswith("0.weight")}
    run = ff.run(TINY, out=tmp_path / "run", method="fedavg", model=Begun(), data={"name": tiny_data()})
    begun = first_state(run)
    assert all(bool((begun[f"blocks.{i}.0.weight"] == 0.25).all()) for i in range(3))
    assert any("Begun" in note for note in run.notes)
