"""A number is printed where it was found: an accuracy in its round, an error after a temperature that was fitted."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w
from run_folders import TINY

from fleetfit.cli import main
from fleetfit.report import drawing


@pytest.fixture(autouse=True)
def without_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "available", lambda: False)
        yield


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    return out


def test_neither_accuracy_nor_calibration_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(tomli_w.dumps({**TINY, "rounds": 4, "evaluate": {"every": 2, "statistics_samples": 60}}))
    out = printed(capsys, "run", file, "--out", folder)
    shown = {line[0]: "local" in line for line in re.findall(r"round (\d/4 .*)", out)}
    assert shown == {"1": False, "2": True, "3": False, "4": True}

    plain = printed(capsys, "calibrate", folder)
    assert "calibration error %" in plain and "temperature" not in plain and "after it" not in plain
    errors = json.loads(printed(capsys, "calibrate", folder, "--json"))["calibration_errors"]
    assert all(before is not None and after is None for before, after in errors)
    fitted = printed(capsys, "calibrate", folder, "--temperature")
    assert "temperature" in fitted and "error after it %" in fitted
    errors = json.loads(printed(capsys, "calibrate", folder, "--temperature", "--json"))["calibration_errors"]
    assert all(after is not None for _, after in errors)
