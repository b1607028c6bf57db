"""`plan --latency`: how long one sample takes in each level."""

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import run_verb
from waiting import LIMIT_S, listening_to_ctrl_c, running

from fleetfit.cost import Latency, TimedModel, submodel_cost

SMALL = ("plan", "--model", "cnn", "--input-shape", "1,8,8")

Printed = tuple[list[list[str]], str, str]


def fleetfit(*arguments: str) -> Printed:
    """Call a verb that succeeds; return the table's rows, all of stdout and all of stderr."""
    _, out, err = run_verb(*arguments, code=0)
    lines = [line for line in out.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines], out, err


def test_plan_measures_the_levels_of_a_model() -> None:
    without, out, _ = fleetfit(*SMALL)
    assert "measured" not in out
    without = [row for row in without if row[0]]  # exits may go on in a second line
    rows, out, err = fleetfit(*SMALL, "--latency", "--passes", "3")
    assert "measured / full" in out
    rows = [row for row in rows if row[0]]
    assert [row[:3] + row[4:6] + row[8:] for row in rows] == [row[:3] + row[4:] for row in without]
    assert rows[-1][7] == "1.000" and len(rows) == 4
    assert all(re.fullmatch(r"[0-9.]+ ± [0-9.e-]+", row[6]) for row in rows)
    assert "3 passes" in out and re.findall(r"\d+", err) == ["3", "4"]


def test_latency_is_relative_to_the_full_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedAvg has one level, the smallest; here a parameter takes a microsecond."""

    def by_parameters(models: Sequence[TimedModel], *_: object) -> list[Latency]:
        counted = [submodel_cost(m.architecture, (m.sizes, m.exits), m.input_shape).parameters for m in models]
        return [Latency(1e-6 * number, 0.0, 1, 0.97e-6 * number, 0.97) for number in counted]

    monkeypatch.setattr("fleetfit.cost.measure_latencies", by_parameters)
    rows, out, err = fleetfit("plan", "--set", "method.name=fedavg", "--latency", "--passes", "7")
    [row] = rows
    assert row[7] == row[9] != "1.000"  # its latency and its parameters, as fractions of the full model's
    assert re.findall(r"\d+", err) == ["7", "2"] and "busy" not in out


def test_a_plan_is_saved_as_without_measuring(tmp_path: Path) -> None:
    texts = []
    for more in ([], ["--latency", "--passes", "1"]):
        fleetfit(*SMALL, "--save", str(tmp_path / "plan.toml"), *more)
        texts.append((tmp_path / "plan.toml").read_text(encoding="utf-8"))
    assert texts[0] == texts[1]


def test_ctrl_c_while_measuring_is_one_line() -> None:
    command = [sys.executable, "-m", "fleetfit", *SMALL, "--latency", "--passes", "1000000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with running(command, **pipes, preexec_fn=listening_to_ctrl_c) as started:
        assert started.stderr is not None
        assert "1,000,000,000" in started.stderr.readline()
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=LIMIT_S)
    assert (started.returncode, out, err.count("\n")) == (130, "", 1)
