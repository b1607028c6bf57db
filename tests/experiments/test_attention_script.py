"""The script of attention maps draws a ReeFL run's model, and prints in a sentence what it cannot draw."""

import shutil
from pathlib import Path

import pytest
from support import run_verb

from experiments.figures import attention, teachers
from fleetfit.report import drawing

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

TINY = """
rounds = 1
[data.partition]
kind = "iid"
clients = 4
[model]
name = "vit"
hidden = 8
depth = 2
attention_heads = 2
patch = 4
[fleet]
groups = [{ budget = 1.0 }]
[method]
name = "reefl"
[local]
epochs = 1
max_steps = 1
[cohort]
count = 1
[evaluate]
clients = 1
"""


def trained(folder: Path, *overrides: str) -> Path:
    """Train for a step, without plots; return the run folder."""
    (folder / "tiny.toml").write_text(TINY)
    sets = [part for override in overrides for part in ("--set", override)]
    run_verb("run", folder / "tiny.toml", "--out", folder / "run", "-q", *sets, code=0)
    return folder / "run"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("reefl"))


def test_it_draws_into_the_run_folder(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "run"
    shutil.copytree(done, own)
    before = {path.name for path in own.iterdir()}
    assert attention.main([str(own), "--samples", "1"]) == 0
    assert capsys.readouterr().out.split() == ["Drawn:", str(own / "plots" / "attention.png")]
    assert (own / "plots" / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in own.iterdir()} == before | {"plots"}
    assert attention.main([str(own), "--samples", "1", "--out", str(tmp_path), "--format", "svg"]) == 0
    assert "<svg" in (tmp_path / "attention.svg").read_text()


def test_teachers_of_a_run_are_drawn(done: Path, tmp_path: Path) -> None:
    assert teachers.main([str(done), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "teachers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("samples", [0, 33])
def test_a_mistake_is_a_sentence(done: Path, samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main([str(done), "--samples", str(samples)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and str(samples) in printed.err
    assert not (done / "plots").exists()


def test_a_model_without_ree_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main([str(trained(tmp_path, "method.name=depthfl"))]) == 2
    assert "Ree" in capsys.readouterr().err


def test_without_matplotlib_it_is_a_sentence(
    done: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drawing, "is_available", lambda: False)
    assert attention.main([str(done)]) == 2
    assert 'pip install "fleetfit[plots]"' in capsys.readouterr().err
