"""The script of early exits: what it draws of a run, where, and which notes explain what it cannot draw."""

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fleetfit as ff
from experiments.figures import early_exits
from experiments.figures.early_exits import PictureOptions, draw_pictures
from fleetfit.data import Data
from fleetfit.report import drawing

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

TINY = Path(__file__).parents[1] / "tiny.py"
SECTIONS: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": f"{TINY}:tiny_data", "partition": {"kind": "iid", "clients": 4}},
    "model": {"name": f"{TINY}:tiny"},
    "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]},
    "method": {"name": "scalefl"},
    "local": {"epochs": 1, "lr": 0.05},
    "cohort": {"count": 4},
    "checkpoint": {"every": 1},
}
ALL = ["accuracy-cost", "exits-0", "exits-1", "exits-2", "exits-3", "stopping"]


def draw(folder: Path, *options: object, code: int = 0) -> str:
    """Call the script; return what it printed to stdout, or to stderr after an error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert early_exits.main([str(folder), *map(str, options)]) == code, err.getvalue()
    return err.getvalue() if code else out.getvalue()


def trained(folder: Path, **sections: Any) -> Path:
    return ff.run(out=folder, **(SECTIONS | sections)).folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def own(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "run"))


def test_one_command_draws_everything_and_writes_nothing_else(own: Path) -> None:
    before = {p for p in own.rglob("*") if p.is_file()}
    drawn = [Path(line.removeprefix("Drawn: ")) for line in draw(own).splitlines()]
    assert sorted(path.stem for path in drawn) == ALL
    assert all(path.parent == own / "plots" and path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert {p for p in own.rglob("*") if p.is_file()} == before | set(drawn)


def test_options(done: Path, tmp_path: Path) -> None:
    draw(
        done, "--level", 2, "--budget", 1, "--cost", "latency_s", "--measure", "margin", "--temperature", "--class", 2,
        "--share", 1, "--out", tmp_path / "drawn", "--format", "svg",
    )  # fmt: skip
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert names == {f"{name}.svg" for name in ("accuracy-cost", "exits-2", "stopping")}
    assert not (done / "plots").exists()


def test_without_a_budget_the_saved_calibration_is_followed(own: Path) -> None:
    run = ff.load(own)
    saved = run.calibrate(2, budget=0.9, measure="entropy")
    figures = draw_pictures(ff.load(own), PictureOptions()).figures
    labels = [str(line.get_label()) for line in figures["stopping"].axes[0].lines]
    assert any(f"{100 * saved.test.accuracy:.2f}%" in label for label in labels if label.startswith("budget"))
    share = saved.budget / saved.costs[-1]
    assert f"({100 * share:.0f}% " in figures["exits-0"].get_suptitle()
    assert str(own / "inference/level-2.json") in draw(own, "--class", 0)
    other = draw_pictures(ff.load(own), PictureOptions(budget=1.0)).figures["exits-0"].get_suptitle()
    assert "(100% " in other
    assert json.loads((own / "inference/level-2.json").read_text())["budget"] == saved.budget, "it is still the same"


def test_a_calibration_of_another_state_is_refused(own: Path) -> None:
    ff.load(own).calibrate(2, budget=0.9)
    path = own / "inference" / "level-2.json"
    numbers = json.loads(path.read_text())
    path.write_text(json.dumps(numbers | {"accuracies": [0.0] * len(numbers["accuracies"])}))
    assert "level-2.json" in draw(own, code=2)
    del numbers["curve"]
    path.write_text(json.dumps(numbers))
    err = draw(own, code=2)
    assert "level-2.json" in err and "curve" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--budget", "nan"), ("--budget", "much"), ("--cost", "latency"), ("--measure", "maxx"), ("--class", "33"),
     ("--share", "0"), ("--level", "9"), ("--out", "/dev/null/x")],
)  # fmt: skip
def test_a_mistake_is_a_sentence(done: Path, option: str, value: str) -> None:
    err = draw(done, option, value, code=2)
    assert err.count("\n") == 1 and value in err
    assert not (done / "plots").exists()


# ---- what cannot be drawn --------------------------------------


def with_data(done: Path, data: Data) -> ff.Run:
    run = ff.load(done)
    run.__dict__["assembly"] = replace(run.assembly, data=data)
    return run


def test_samples_that_are_no_images_are_left_out(done: Path) -> None:
    data = ff.load(done).assembly.data
    assert isinstance(data, Data)
    assert isinstance(data.x, torch.Tensor)
    run = with_data(done, replace(data, x=data.x.flatten(1).float(), mean=(), std=()))
    run._models["2"] = Reshaped(run.model())
    drawn = draw_pictures(run, PictureOptions())
    assert sorted(drawn.figures) == sorted(["accuracy-cost", "stopping"])
    timed = [line for line in drawn.figures["accuracy-cost"].axes[1].lines if line.get_label() != "level 1"][-2]
    assert [bool(ms > 0) for ms in timed.get_xdata()] == [False, True], "only the whole can be timed"
    (note,) = drawn.notes
    assert "tiny" in note and "[16]" in note


class Reshaped(torch.nn.Module):
    """A module that takes flat samples."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x.view(-1, 1, 4, 4))


def test_another_task_has_no_early_stopping(done: Path) -> None:
    data = ff.load(done).assembly.data
    assert isinstance(data, Data)
    hot = torch.nn.functional.one_hot(data.y, 4)
    drawn = draw_pictures(with_data(done, replace(data, y=hot, task="multi_label")), PictureOptions())
    assert sorted(drawn.figures) == sorted(["accuracy-cost"])
    (note,) = drawn.notes
    assert "tiny" in note and "multi_label" in note


def test_a_level_with_one_exit_and_a_set_without_validation_have_none(done: Path) -> None:
    one = draw_pictures(ff.load(done), PictureOptions(level=1))
    assert len(one.notes) == 1 and "level 1" in one.notes[0]
    data = ff.load(done).assembly.data
    assert isinstance(data, Data)
    bare = replace(data, splits={**data.splits, "validation": torch.arange(0)})
    (note,) = draw_pictures(with_data(done, bare), PictureOptions()).notes
    assert "tiny" in note and "validation" in note


def test_early_stopping_of_an_unfinished_run_is_drawn(own: Path) -> None:
    (own / "summary.json").unlink()
    draw(own, "--class", 1)
    assert sorted(path.stem for path in (own / "plots").iterdir()) == ["accuracy-cost", "exits-1", "stopping"]


def test_levels_without_clients_are_named(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ff.load(done)
    columns = run.columns
    columns["static"]["levels"]["1"] = {"local": None}
    monkeypatch.setattr(ff.Run, "columns", columns)
    drawn = draw_pictures(run, PictureOptions())
    assert len(drawn.notes) == 1 and drawn.notes[0].endswith("level 1.")
    axes = drawn.figures["accuracy-cost"].axes[0]
    assert [line.get_label() for line in axes.lines if str(line.get_label()).startswith("level")] == ["level 2"]


def test_a_missing_matplotlib_is_said_before_anything_is_computed(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "is_available", lambda: False)
    monkeypatch.setattr(early_exits, "_draw_stopping", lambda *_: pytest.fail("it computes"))
    err = draw(done, code=2)
    assert 'pip install "fleetfit[plots]"' in err
