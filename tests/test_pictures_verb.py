"""`fleetfit pictures` draws the plots of a run, also of one that a comparison or a stop left without."""

from pathlib import Path

import pytest
from run_folders import TINY, stopped_run
from support import run_verb

import fleetfit as ff

pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")


def test_the_plots_of_a_run_are_drawn(tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped_run(TINY, run, 1)
    out = run_verb("pictures", run, code=0).out
    assert sorted(Path(line.removeprefix("Drawn: ")).name for line in out.splitlines()) == [
        "accuracy.png", "cost.png", "levels.png", "loss.png", "partition.png"
    ]  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (run / "plots").iterdir())
    run_verb("pictures", run, "--format", "svg", "--out", tmp_path / "drawn", code=0)
    assert "<svg" in (tmp_path / "drawn" / "accuracy.svg").read_text()


def test_the_plots_of_a_comparison_are_drawn(tmp_path: Path) -> None:
    ff.compare({**TINY, "compare": {"row": [{"label": "a"}]}}, out=tmp_path / "compared", progress=False)
    run_verb("pictures", tmp_path / "compared", "--format", "pdf", "--out", tmp_path / "drawn", code=0)
    assert {path.name for path in (tmp_path / "drawn").iterdir()} >= {"accuracy.pdf", "loss.pdf", "levels.pdf"}
    assert all(path.read_bytes().startswith(b"%PDF") for path in (tmp_path / "drawn").iterdir())


def test_mistakes_are_sentences(tmp_path: Path, without_plots: None) -> None:
    run = tmp_path / "run"
    stopped_run(TINY, run, 1)
    assert "pmg" in run_verb("pictures", run, "--format", "pmg", code=2).err
    assert "fleetfit[plots]" in run_verb("pictures", run, code=2).err
    (run / "metrics.jsonl").unlink()
    assert f"fleetfit resume {run}" in run_verb("pictures", run, code=2).err
    assert not (run / "plots").exists()
