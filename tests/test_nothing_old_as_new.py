"""A number is printed where it was found: an accuracy in its round, an error after a temperature that was fitted."""

import json
import re
from pathlib import Path

import tomli_w
from run_folders import TINY
from support import run_verb


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
    assert "temperature" in fitted and "error after it %" in fitted
    errors = json.loads(run_verb("calibrate", folder, "--temperature", "--json", code=0).out)["calibration_errors"]
    assert all(after is not None for _, after in errors)
