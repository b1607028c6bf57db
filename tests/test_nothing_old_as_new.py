"""A number is printed where it was found: an accuracy in its round, an error after a temperature that was fitted."""

import importlib
import json
import re
from pathlib import Path

import pytest
import tomli_w
import torch
from run_folders import TINY
from support import run_verb

import fleetfit as ff


def test_neither_accuracy_nor_calibration_error(tmp_path: Path) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(tomli_w.dumps({**TINY, "rounds": 4, "evaluate": {"every": 2, "statistics_samples": 60}}))
    out = run_verb("run", file, "--out", folder, code=0).out
    shown = {line[0]: "local" in line for line in re.findall(r"round (\d/4 .*)", out)}
    assert shown == {"1": False, "2": True, "3": False, "4": True}

    plain = run_verb("calibrate", folder, code=0).out
    assert "calibration error %" in plain and "temperature" not in plain and "after it" not in plain
    errors = json.loads(run_verb("calibrate", folder, "--json", code=0).out)["calibration_errors"]
    assert all(before is not None and after is None for before, after in errors)
    fitted = run_verb("calibrate", folder, "--temperature", code=0).out
    assert "temperature" in fitted and "after it" in fitted
    errors = json.loads(run_verb("calibrate", folder, "--temperature", "--json", code=0).out)["calibration_errors"]
    assert all(after is not None for _, after in errors)


# ---- code that changed -----------------------------------------------------------------------------------------------

NET = """
from torch import nn
from {beside} import join
class Net(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, classes)
    def forward(self, x):
        return self.b(join(self.a(x)))
"""


@pytest.mark.parametrize("edited", ["net", "beside", "neither"])
@pytest.mark.parametrize("form", ["name", "instance"])
def test_code_that_changed_since_the_start_is_named(
    form: str, edited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At each opening of the run: to go on, to predict, to evaluate. A file that merely lies there is none of it."""
    net, beside = f"net_{form}_{edited}", f"beside_{form}_{edited}"
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = {"net": tmp_path / f"{net}.py", "beside": tmp_path / f"{beside}.py", "neither": tmp_path / "readme.py"}
    paths["net"].write_text(NET.replace("{beside}", beside))
    paths["beside"].write_text("def join(x):\n    return x.relu()\n")
    model = f"{paths['net']}:Net" if form == "name" else importlib.import_module(net).Net()
    objects = {"data": (torch.randn(60, 6), torch.arange(60) % 3)} | ({"model": model} if form == "instance" else {})
    sections = {"model": model, **objects, "method": {"name": "fedavg"}, "fleet": {"groups": [{"budget": 1.0}]}}
    ff.run(rounds=1, out=tmp_path / "run", progress=False, **sections)
    ff.load(tmp_path / "run", **objects)
    assert not caplog.messages
    with paths[edited].open("a") as file:
        file.write("# other\n")
    for open_run in (ff.load, ff.resume):
        open_run(tmp_path / "run", **objects)
        texts = [text for text in caplog.messages if str(paths[edited]) in text]
        assert bool(texts) == (edited != "neither") and not any(str(paths["neither"]) in text for text in texts)
        caplog.clear()
