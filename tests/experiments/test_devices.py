"""What the levels of a run are on a device, as results that the verdicts read."""

from pathlib import Path

import pytest

import fleetfit as ff
from experiments.devices import main
from experiments.verdicts.__main__ import ROOT
from experiments.verdicts.claims import contrasts, read
from fleetfit.config import load_experiment
from fleetfit.runs.comparison import read_results
from fleetfit.runs.environment import describe_environment

pytest.importorskip("onnxruntime")

SHORT = ["rounds=1", "local.epochs=1", "data.name=digits", "data.partition.kind=iid", "data.partition.clients=4",
         "fleet.groups=[{budget=0.25},{budget=1.0}]", "method.name=scalefl"]  # fmt: skip


@pytest.mark.slow
def test_every_claimed_number_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """But for the levels: this run has two, those of the claims are 2 and 4."""
    ff.run(load_experiment(None, SHORT), out=tmp_path / "run")
    main([str(tmp_path / "run"), "--setting", "x", "--record", str(tmp_path / "kept"), "--turns", "3"])
    results = read_results(tmp_path / "kept" / "devices.json")
    (run,) = results.runs
    assert (run.row, run.setting, run.seed) == ("ScaleFL", "x", 0)
    needed = {
        place.column.replace("level 2", "level 1").replace("level 4", "level 2")
        for table in read(ROOT / "experiments" / "claims.toml").table
        for claim in table.every
        for contrast in contrasts(table, claim)
        for place in (*contrast.plus, *contrast.minus)
        if f"experiments/{place.file}" == results.file
    }
    assert len(needed) == 9
    here = describe_environment()
    assert (results.commit, results.machine["processor"]) == (here["fleetfit_commit"], here["processor"])
    assert results.settings["data"]["partition"]["clients"] == 4
    assert needed <= set(run.final)
    assert run.final["parameters of level 1"] < run.final["parameters of level 2"]
    assert run.final["latency_ms of level 1"] > 0
    assert 0 <= run.final["accuracy with early exits"] <= 100
    with pytest.raises(SystemExit):
        main([str(tmp_path / "run"), str(tmp_path / "run"), "--record", str(tmp_path / "kept")])
    assert "0, 0" in capsys.readouterr().err
