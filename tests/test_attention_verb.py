"""`fleetfit attention`: draws a ReeFL run's model, and says in a sentence what it cannot draw."""

import shutil
from pathlib import Path

import pytest
from support import run_verb

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


def test_it_draws_into_the_run_folder_and_says_where(done: Path, tmp_path: Path) -> None:
    own = tmp_path / "run"
    shutil.copytree(done, own)
    before = {path.name for path in own.iterdir()}
    out = run_verb("attention", own, "--samples", 1, code=0).out
    assert out.split() == ["Drawn:", str(own / "plots" / "attention.png")]
    assert (own / "plots" / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in own.iterdir()} == before | {"plots"}


def test_out_says_file_and_format(done: Path, tmp_path: Path) -> None:
    run_verb("attention", done, "--samples", 1, "--out", tmp_path / "a.svg", code=0)
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples", "0"], "samples must be 1 to 32, got 0"),
        (["--samples", "33"], "samples must be 1 to 32, got 33"),
        (["--out", "picture.doc"], "--out must end in .png, .pdf or .svg; got picture.doc."),
        (["--out", "picture"], "got picture."),
        (["--out", "/nowhere/a.png"], "cannot write the image to /nowhere/a.png: No such file"),
    ],
)
def test_a_mistake_is_a_sentence(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_verb("attention", done, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not any(tmp_path.iterdir())


def test_no_run_folder_is_a_sentence(tmp_path: Path) -> None:
    assert run_verb("attention", tmp_path / "none")[::2] == (2, f"fleetfit: no such run folder: {tmp_path}/none.\n")


def test_a_model_without_ree_is_a_sentence(tmp_path: Path) -> None:
    err = run_verb("attention", trained(tmp_path, "method.name=depthfl"), code=2).err
    assert "need a model with Ree" in err


def test_without_matplotlib_it_is_a_sentence(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "is_available", lambda: False)
    err = run_verb("attention", done, code=2).err
    assert 'pip install "fleetfit[plots]"' in err
