"""Latencies of the levels: what ScaleFL's appendix prints, and what `plan --latency` measures beside it."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from waiting import LIMIT_S, listening_to_ctrl_c, running

from fleetfit.cli import main
from fleetfit.cost import Latency, Timed, latency, submodel_cost
from fleetfit.papers import paper_table

# Milliseconds, copied from the last column of Tables 6 to 9.
PRINTED = {
    "table-6": {"4": 47.2, "3-w": 37.7, "2-w": 35.6, "1-w": 28.3, "3-dw": 39.2, "2-dw": 33.1, "1-dw": 27.9},
    "table-7": {"4": 46.6, "3-w": 42.1, "2-w": 34.9, "1-w": 31.6, "3-dw": 40.9, "2-dw": 37.8, "1-dw": 28.6},
    "table-8": {"4": 212.8, "3-w": 120.3, "2-w": 81.3, "1-w": 59.5, "3-dw": 146.9, "2-dw": 110.1, "1-dw": 103.9},
    "table-9": {"4": 155.9, "3-w": 84.5, "2-w": 44.8, "1-w": 32.9, "3-dw": 79.7, "2-dw": 26.6, "1-dw": 15.3},
}
SMALL = ("plan", "--model", "cnn", "--input-shape", "1,8,8")

Printed = tuple[list[list[str]], str, str]


@pytest.fixture
def fleetfit(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Call a verb that succeeds; return the table's rows, all of stdout and all of stderr."""

    def call(*arguments: str) -> Printed:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        found = capsys.readouterr()
        assert caught.value.code == 0, found.err
        lines = [line for line in found.out.splitlines() if line.startswith("│")]
        return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines], found.out, found.err

    return call


class Counter:
    """A clock that goes on by 2 s from look to look; a pass has two looks, and half of it belongs to the thread."""

    def __init__(self) -> None:
        self.looks = 0

    def perf_counter(self) -> float:
        self.looks += 1
        return 2.0 * self.looks

    def thread_time(self) -> float:
        return 0.5 * self.looks


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    made = Counter()
    monkeypatch.setattr(latency, "time", made)
    return made


@pytest.mark.parametrize("name", list(PRINTED))
def test_every_row_has_the_printed_latency(name: str, fleetfit: Callable[..., Printed], counter: Counter) -> None:
    """Also those that stand there twice. Nothing is measured where nobody asks for it."""
    rows, out, err = fleetfit("plan", "--paper", name)
    found = {row[0]: float(row[-1]) for row in rows}
    assert {level: ms for level, ms in found.items() if "as printed" not in level} == PRINTED[name]
    assert all(found[level] == PRINTED[name][level.removesuffix(", as printed")] for level in found)
    assert (counter.looks, err) == (0, "") and "easured" not in out


def test_table_1_prints_no_latencies() -> None:
    assert paper_table("table-1").printed_ms == ()


def test_a_tables_latencies_stand_beside_the_printed_ones_and_as_fractions() -> None:
    """Rows of Table 7, 10 ms for the first and 1 ms less for each: 0.9, 0.8 of it; printed are 42.1 of 46.6 ms."""
    table = paper_table("table-7")
    found = [Latency(0.010 - 0.001 * i, 0.0012, 5) for i in range(7)]
    shown = table.measured(found, ["Measured so."]).as_text()[0]
    assert shown.columns[-4:] == ("measured latency ± spread (ms)", "printed", "measured / full", "printed")
    assert [row[-4:] for row in shown.rows[:3]] == [
        ("10 ± 1.2", "46.6", "1.000", "1.000"), ("9 ± 1.2", "42.1", "0.900", "0.903"),
        ("8 ± 1.2", "34.9", "0.800", "0.749"),
    ]  # fmt: skip
    assert "Measured so." in shown.notes
    assert [row[:-4] for row in shown.rows] == [row[:-1] for row in table.as_text()[0].rows]


def test_plan_measures_the_rows_of_a_table(fleetfit: Callable[..., Printed], counter: Counter) -> None:
    """By the made-up clock each pass takes 2 s, 1 s of which the thread had a processor; so the machine was busy."""
    rows, out, err = fleetfit("plan", "--paper", "table-6", "--latency", "--passes", "2")
    assert len(rows) == 9
    assert [row[-4] for row in rows] == ["2000 ± 0"] * 9
    assert [float(row[-3]) for row in rows] == [PRINTED["table-6"][row[0].removesuffix(", as printed")] for row in rows]
    assert [row[-2] for row in rows] == ["1.000"] * 9
    assert [row[-1] for row in rows] == [f"{float(row[-3]) / 47.2:.3f}" for row in rows]
    assert re.search(rf"median of 2 passes of one sample.* 1 thread of .+, PyTorch {re.escape(torch.__version__)}", out)
    assert "the passes had a processor for 50% of their time" in out
    assert "; 2-w, as printed: 1.000; " in out
    assert err == "fleetfit: measuring 2 passes of 9 models.\n"
    assert counter.looks == 2 * 2 * 9


def test_the_pool_of_adaptivefl_is_measured_too(fleetfit: Callable[..., Printed], counter: Counter) -> None:
    rows, out, _ = fleetfit("plan", "--paper", "adaptivefl-table-1", "--latency", "--passes", "1")
    assert [(row[0], row[-2], row[-1]) for row in rows] == [
        (name, "2000 ± 0", "1.000") for name in ("L1", "M1", "M2", "M3", "S1", "S2", "S3")
    ]
    assert "The paper names no machine" not in out  # it prints no latencies


def test_plan_measures_the_levels_of_a_model(fleetfit: Callable[..., Printed]) -> None:
    without, out, _ = fleetfit(*SMALL)
    assert "measured" not in out
    without = [row for row in without if row[0]]  # exits may go on in a second line
    rows, out, err = fleetfit(*SMALL, "--latency", "--passes", "3")
    assert "measured / full" in out
    rows = [row for row in rows if row[0]]
    assert [row[:3] + row[4:6] + row[8:] for row in rows] == [row[:3] + row[4:] for row in without]
    assert rows[-1][7] == "1.000" and len(rows) == 4
    assert all(re.fullmatch(r"[0-9.]+ ± [0-9.e-]+", row[6]) for row in rows)
    assert "median of 3 passes" in out and err == "fleetfit: measuring 3 passes of 4 models.\n"


def test_a_method_without_the_full_model_is_measured_against_it(
    fleetfit: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg has one level, the smallest; here a parameter takes a microsecond."""

    def by_parameters(models: Sequence[Timed], *_: object) -> list[Latency]:
        counted = [submodel_cost(m.architecture, (m.sizes, m.exits), m.input_shape).parameters for m in models]
        return [Latency(1e-6 * number, 0.0, 1, 0.97e-6 * number, 0.97) for number in counted]

    monkeypatch.setattr("fleetfit.cost.latencies_in_turn", by_parameters)
    rows, out, err = fleetfit("plan", "--set", "method.name=fedavg", "--latency", "--passes", "7")
    [row] = rows
    assert row[7] == row[9] != "1.000"  # its latency and its parameters, as fractions of the full model's
    assert err == "fleetfit: measuring 7 passes of 2 models.\n" and "busy" not in out


def test_a_plan_is_saved_as_without_measuring(fleetfit: Callable[..., Printed], tmp_path: Path) -> None:
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
        assert started.stderr.readline() == "fleetfit: measuring 1,000,000,000 passes of 4 models.\n"
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=LIMIT_S)
    assert (started.returncode, out, err) == (130, "", "fleetfit: stopped. Nothing was written.\n")
