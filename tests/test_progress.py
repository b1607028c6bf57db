"""What a person sees of a run while it lasts: lines, bars, notebooks, `fleetfit watch`, and tables in notebooks."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from rich.console import Console
from run_folders import TINY, Stopped, stopped_run
from support import raises, run_verb
from tiny import tiny_data
from torch import nn
from waiting import LIMIT_S, running, wait_until

import fleetfit as ff
from fleetfit.api import progress
from fleetfit.api.comparison.plan import is_running
from fleetfit.cli import run as verbs
from fleetfit.errors import RunError
from fleetfit.markup import html_table
from fleetfit.methods.scalefl import scalefl
from fleetfit.report.text import format_bytes
from fleetfit.rounds.report import LEFT_OUT
from fleetfit.runs.comparison import list_planned_runs
from fleetfit.runs.folder import RunFolder

QUICK: dict[str, Any] = {**TINY, "evaluate": {"every": 2, "statistics_samples": 60, "batch_norm": ["static"]}}


def report(number: int, **changes: Any) -> dict[str, Any]:
    fields = {"round": number, "train": {"loss": 1.25, "clients": 4}, "failures": [{"client": 1}], "bytes_down": 1000,
             "bytes_up": 500, "seconds": 3.0}  # fmt: skip
    return {**fields, **changes}


EVALUATED = {"static": {"local": 0.5, "global": 0.25, "levels": {"1": {"local": 0.4}, "2": {"local": 0.6}}}}
WITHHELD = {"train": {"loss": None, "clients": None}, "failures": [], "bytes_down": None, "bytes_up": None,
            "privacy": {"epsilon": 2.5, "delta": 0.001}}  # fmt: skip


def make_description(rounds: int = 4) -> Any:
    return types.SimpleNamespace(rounds=rounds, evaluate=types.SimpleNamespace(batch_norm=["static"]))


# ---- lines -----------------------------------------------------------------------------------------------------------


def test_each_round_has_a_line_and_each_evaluation_one_of_levels(capsys: pytest.CaptureFixture[str]) -> None:
    """3 s a round: after two of four rounds 6 s are left. Bytes are those of all rounds, both ways."""
    shown = progress.RoundProgress("", make_description())
    shown(report(1, failures=[]))
    shown(report(2, evaluate=EVALUATED))
    shown(report(4, train={"loss": None, "clients": 1}))
    assert capsys.readouterr().out.splitlines() == [
        "round 1/4  loss 1.250  4 clients  1.5 kB sent  9.0 s left",
        "round 2/4  loss 1.250  local 50.00%  global 25.00%  4 clients, 1 failed  3.0 kB sent  6.0 s left",
        "  by level: 1 40.00%  2 60.00%",
        "round 4/4  loss -  1 client, 1 failed  4.5 kB sent",
    ]


def test_each_reason_of_failures_is_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a notebook; of many reasons, such as those with a number in them, the first."""
    shown = progress.RoundProgress("", make_description())
    failed = [
        {"client": 3, "reason": "IndexError: 7 (mine.py:4)"},
        {"client": 5, "reason": "IndexError: 7 (mine.py:4)"},
    ]
    shown(report(1, failures=failed))
    first = capsys.readouterr().out.splitlines()
    assert len(first) == 2 and "client 3" in first[0] and "IndexError: 7 (mine.py:4)" in first[0]
    shown(report(2, failures=[*failed, {"client": None, "reason": "<late>"}]))
    second = capsys.readouterr().out.splitlines()
    assert len(second) == 2 and "<late>" in second[0] and "3 failed" in second[1]
    html = progress.format_html("a", shown.facts)
    assert html.count("IndexError: 7") == 1 and "&lt;late&gt;" in html
    shown(report(3, failures=[{"client": 1, "reason": f"step {number}"} for number in range(99)]))
    assert len(capsys.readouterr().out.splitlines()) < 9


def test_failures_of_an_evaluation_are_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.RoundProgress("", make_description())
    for number in (1, 2):
        failures = [{"client": 3, "level": 1, "reason": "evaluation: IndexError: 7"}]
        shown(report(number, failures=[], evaluate={**EVALUATED, "failures": failures}))
    lines = capsys.readouterr().out.splitlines()
    assert "client 3" in lines[0] and sum("IndexError: 7" in line for line in lines) == 1


def test_checkpoints_that_take_long_are_noted_once(capsys: pytest.CaptureFixture[str]) -> None:
    def show(seconds: float, saving: float) -> str:
        shown = progress.RoundProgress("", make_description())
        for number in (1, 2, 3):
            shown(report(number, failures=[], seconds=seconds, seconds_of={"checkpoints": saving}))
        return capsys.readouterr().out

    text = show(20.0, 8.0)
    assert text.count("Note: ") == 1 and "40%" in text and "checkpoint.every" in text
    assert "Note: " not in show(20.0, 3.9) and "Note: " not in show(6.0, 3.0)


def test_what_the_method_leaves_out_has_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.RoundProgress("", make_description())
    shown(report(1, failures=[{"client": 1, "reason": LEFT_OUT}, {"client": 2, "reason": LEFT_OUT}]))
    shown(report(2, failures=[{"client": 1, "reason": LEFT_OUT}, {"client": 2, "reason": "late"}]))
    first, note, second = capsys.readouterr().out.splitlines()
    assert "2 left out" in first and "failed" not in first
    assert "client 2" in note and "1 failed, 1 left out" in second


def test_measured_and_trained_clients_are_distinguished(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in a notebook; the last evaluation is of all clients."""
    shown = progress.RoundProgress("", make_description())
    shown(report(1, evaluate={**EVALUATED, "partial": {"clients": 11, "samples": 150}}))
    first = capsys.readouterr().out.splitlines()[0]
    accuracies = "local 50.00%  global 25.00% (on 11 clients)"
    assert first == f"round 1/4  loss 1.250  {accuracies}  4 trained, 1 failed  1.5 kB sent  9.0 s left"
    html = progress.format_html("a", shown.facts)
    assert "4 trained" in html and "(on 11 clients)" in html and "4 clients" not in html
    shown(report(4, evaluate=EVALUATED))
    last = capsys.readouterr().out.splitlines()[0]
    assert "4 clients" in last and "(on" not in last


def test_what_is_withheld_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = progress.RoundProgress("a", make_description())
    columns = {"local": None, "global": None, "avg": 0.5, "full": 0.25,
               "levels": {"1": {"local": None}, "2": {"local": None}}}  # fmt: skip
    shown(report(1, **WITHHELD, evaluate={"static": columns}))
    line = "a  round 1/4  epsilon 2.50 at delta 0.001  avg 50.00%  full 25.00%  9.0 s left\n"
    assert capsys.readouterr().out == line
    html = progress.format_html("a", shown.facts)
    assert not re.search("loss|cohort|sent|client|level", html)


def test_a_bar_keeps_the_last_accuracy_and_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns nothing is wrapped: what is too long is cut."""
    monkeypatch.setattr(sys, "stdout", Terminal())
    shown = progress.RoundProgress("a title that is much longer than anybody wants to read " * 2, make_description())
    bar = shown._bars
    assert bar is not None
    shown(report(1))
    shown(report(2, evaluate=EVALUATED))
    shown(report(3))
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for line in bar.get_renderables():
        console.print(line)
    shown.close()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 4 and max(map(len, lines)) <= 80 and re.search("3/4 +3.0 s left", lines[0])
    assert [line.strip() for line in lines[1:]] == [
        "loss 1.250  4 clients, 1 failed  4.5 kB sent", "local 50.00%  global 25.00%  (round 2)",
        "by level: 1 40.00%  2 60.00%",
    ]  # fmt: skip


def test_parallel_runs_have_a_line_each_and_one_remaining_time() -> None:
    bar = progress.make_bars()
    one, other = (
        progress.RoundProgress(f"[{i}/2] a row, seed {i}", make_description(), bar, lambda: "9 s left of all")
        for i in (1, 2)
    )
    one(report(1))
    other(report(2, evaluate=EVALUATED))
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for line in bar.get_renderables():
        console.print(line)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert re.fullmatch(r"\[1/2\] a row, seed 1 .* 1/4 loss 1.250 +9.0 s left *", lines[0])
    assert re.fullmatch(r"\[2/2\] a row, seed 2 .* 2/4 local 50.00% +6.0 s left *", lines[1])
    assert lines[2].strip().startswith("9 s left") and len(lines) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_counted_work_has_a_line_now_and_then_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step each second and a line every 3 s; none at the end."""
    clock = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    lines: list[str] = []
    with progress.TaskProgress("Counting", 8, lines.append, line_s=3, stream=io.StringIO()) as task:
        assert task.time_left == ""
        for i in range(1, 9):
            task.update(i, lambda: str(task._done))
    assert lines == ["3", "6"] and task.time_left == ""


def test_counted_work_has_a_bar_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress, "_REDRAW_S", 0.0)
    screen = Terminal()
    with progress.TaskProgress("Counting [sheep]", 8, pytest.fail, line_s=0, stream=screen) as task:
        task.update(5, lambda: "")
        assert task.time_left.endswith(" left")
    assert "Counting [sheep]" in screen.getvalue() and "5/8" in screen.getvalue()


# ---- scripts -------------------------------------------------------------------------------------------------------

ROUND = re.compile(r"round (\d)/3")


def test_a_script_prints_progress_on_stderr_unless_disabled(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ff.run(QUICK, out=tmp_path / "quiet", progress=False)
    assert capfd.readouterr() == ("", "")
    run = ff.run(
        rounds=3,
        data={"partition": {"clients": 8}},
        local={"max_steps": 1},
        out=tmp_path / "shown",
    )
    out, err = capfd.readouterr()
    lines = err.splitlines()
    numbers = [i for i, line in enumerate(lines) if ROUND.match(line)]
    assert out == "" and [ROUND.match(lines[i])[1] for i in numbers] == ["1", "2", "3"]  # type: ignore[index]
    assert run.notes and all(f"Note: {note}" in lines[: numbers[0]] for note in run.notes)
    assert numbers[0] > len(run.notes) + 1, "a line before what takes the first seconds, and the folder"
    assert lines[-1] not in [lines[i] for i in numbers] and f"{tmp_path}/shown" in err, "and one before the plots"


def test_a_script_on_a_terminal_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr: what a script prints is its own."""
    monkeypatch.setenv("TERM", "xterm-256color")
    screen, printed = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", printed)
    ff.run(QUICK, out=tmp_path / "run")
    shown = screen.getvalue()
    assert "3/3" in shown and "\u2501" in shown and not ROUND.search(shown) and printed.getvalue() == ""
    assert screen.getvalue().endswith("\n") and shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0


def test_a_comparison_of_a_script_has_its_runs_and_rounds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = {**QUICK, "rounds": 1, "compare": {"row": [{"label": "a"}, {"label": "b"}], "smallest_baseline": False}}
    ff.compare(table, out=tmp_path / "quiet", progress=False)
    assert capfd.readouterr() == ("", "")
    ff.compare(table, out=tmp_path / "shown")
    out, err = capfd.readouterr()
    assert out == "" and re.search(r"\[1/2\] a, seed 3  round 1/1(.*\n)+\[2/2\] b, seed 3  round 1/1", err)
    seen: list[str] = []
    ff.compare(table, out=tmp_path / "own", on_run=lambda title, *_: seen.append(title))
    assert seen == ["a, seed 3", "b, seed 3"] and "round 1/1" not in capfd.readouterr().err


def test_derivations_and_exports_of_a_script_name_their_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = ff.run(QUICK, out=tmp_path / "run", progress=False)
    run.export(tmp_path / "silent", 1, forms=(), progress=False)
    assert capfd.readouterr() == ("", "")
    run.export(tmp_path / "shown", 1, forms=())
    out, err = capfd.readouterr()
    assert out == "" and "safetensors" in err


def _interrupt(report: Mapping[str, Any]) -> None:
    if report["round"] == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("sections", "arguments"),
    [
        ({}, ""),
        ({"data": lambda: tiny_data()}, ", data=..."),
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 4)),
          "data": lambda: (torch.randn(60, 1, 8, 8), torch.arange(60) % 4)}, ", data=..., model=..."),
    ],
    ids=["names", "data", "model"],
)  # fmt: skip
def test_ctrl_c_ends_a_script_with_the_call_that_continues_it(
    sections: Mapping[str, Any], arguments: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The call stands on a line of its own; run as it is there, it ends the run. So does the script that runs again."""
    objects = {name: make() for name, make in sections.items()}
    tables = {key: value for key, value in QUICK.items() if key not in objects and not (objects and key == "fleet")}
    if "model" in objects:
        tables |= {"method": {"name": "fedavg"}, "fleet": {"groups": [{"budget": 1.0}]}}
    elif objects:
        tables |= {"fleet": QUICK["fleet"]}
    call = f'ff.resume("{tmp_path / "run"}"{arguments})'
    with pytest.raises(KeyboardInterrupt) as end:
        ff.run(tables, **objects, out=tmp_path / "run", on_round=_interrupt, progress=False)
    assert isinstance(end.value, SystemExit) and end.value.code == 130, "the interpreter prints no traceback"
    assert capfd.readouterr().err.splitlines()[-1].strip() == call
    with raises(RunError, f"\n    {call}", path=tmp_path / "run"):
        ff.run(tables, **objects, out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        ff.resume(tmp_path / "run", **objects, on_round=lambda report: _interrupt({"round": 2}))
    assert capfd.readouterr().err.splitlines()[-1].strip() == call
    assert ff.resume(tmp_path / "run", **objects).finished
    with raises(RunError, f"\n    {call.replace('resume', 'load')}\n", f"\n    {call}", path=tmp_path / "run"):
        ff.run(tables, **objects, out=tmp_path / "run")


def test_ctrl_c_before_the_first_round_and_in_a_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetfit.api.run.prepare", interrupt)
        with pytest.raises(SystemExit):
            ff.run(QUICK, out=tmp_path / "run")
    assert "ff." not in capfd.readouterr().err and not (tmp_path / "run").exists()
    table = {**QUICK, "rounds": 1, "compare": {"row": [{"label": "a"}, {"label": "b"}], "smallest_baseline": False}}
    with pytest.raises(SystemExit):
        ff.compare(table, out=tmp_path / "both", on_run=interrupt)
    assert capfd.readouterr().err.splitlines()[-1].strip() == f'ff.compare(..., out="{tmp_path / "both"}")'
    assert ff.compare(table, out=tmp_path / "both").finished


def test_ctrl_c_does_not_end_an_interactive_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt) as end:
        ff.run(QUICK, out=tmp_path / "run", on_round=_interrupt, progress=False)
    assert not isinstance(end.value, SystemExit) and f'ff.resume("{tmp_path / "run"}")' in str(end.value)


@pytest.mark.slow
def test_a_script_that_gets_ctrl_c_exits_with_130(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('import fleetfit as ff\nff.run(rounds=5000, out="r")\n')
    with running([sys.executable, script], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as work:
        wait_until(lambda: (tmp_path / "r/metrics.jsonl").exists(), work)
        work.send_signal(signal.SIGINT)
        assert work.wait(LIMIT_S) == 130 and work.stderr is not None
        err = work.stderr.read()
    assert "Traceback" not in err and err.endswith('\n    ff.resume("r")\n')


@pytest.mark.slow
def test_ipython_prints_an_error_without_traceback(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    cells = ["import fleetfit as ff", "ff.run(rounds='many')", "print('====')", "%env FLEETFIT_TRACEBACK=1", "%tb"]
    script = ("from IPython.core.interactiveshell import InteractiveShell\nshell = InteractiveShell.instance()\n"
              f"for cell in {cells!r}: shell.run_cell(cell)\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    error, again = done.stdout.split("====")
    assert "'many'" in error and "Traceback" not in error and "load.py" not in error
    assert "'many'" in again and "load.py" in again


def test_a_notebook_prints_a_traceback_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RunError("three 3"), ff.ConfigError("four", key="rounds"), ff.MissingExtra("x", "Five")):
        with pytest.raises(ff.FleetFitError) as caught:
            raise error
        assert str(error) in "".join(caught.value._render_traceback_())
        assert "test_progress.py" not in "".join(caught.value._render_traceback_())
        with monkeypatch.context() as patch:
            patch.setenv("FLEETFIT_TRACEBACK", "1")
            assert "test_progress.py" in "".join(caught.value._render_traceback_())


# ---- notebooks -------------------------------------------------------------------------------------------------------


class Cell:
    """Stands for IPython: what a cell shows, and each time that it is written anew."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.handles = 0

    def display(self, html: str, display_id: bool) -> "Cell":
        self.handles += 1
        return self

    def update(self, html: str) -> None:
        self.shown.append(html)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    display_cell = Cell()
    shows = types.ModuleType("IPython.display")
    shows.__dict__.update(HTML=lambda html: html, display=display_cell.display)
    python = types.ModuleType("IPython")
    python.__dict__.update(get_ipython=lambda: types.SimpleNamespace(kernel=1), display=shows)
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", shows)
    return display_cell


def test_a_notebook_updates_one_output(cell: Cell, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ff.run(QUICK, out=tmp_path / "run")
    assert cell.handles == 1 and len(cell.shown) == 4
    assert "round 0/3" in cell.shown[0] and 'value="3" max="3"' in cell.shown[-1] and "by level: 1 " in cell.shown[-1]
    capfd.readouterr()
    ff.run(QUICK, out=tmp_path / "quiet", progress=False)
    assert cell.handles == 1 and capfd.readouterr().out == ""


def test_a_notebook_shows_the_runs_of_a_comparison_in_one_output(cell: Cell, tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    rows = [{"label": "<b>a</b>"}, {"label": "c"}]
    file.write_text(tomli_w.dumps({**QUICK, "rounds": 1, "compare": {"row": rows, "smallest_baseline": False}}))
    comparison = ff.compare(file, out=tmp_path / "both")
    assert cell.handles == 1
    assert "[1/2] &lt;b&gt;a&lt;/b&gt;, seed 3 · round 1/1" in cell.shown[1] and "[2/2] c" in cell.shown[-1]
    html = comparison._repr_html_()
    assert "&lt;b&gt;a&lt;/b&gt;" in html and "<b>a</b>" not in html and str(comparison.folder) in html


def test_runs_and_plans_are_tables_in_a_notebook(tmp_path: Path) -> None:
    stopped_run(QUICK, tmp_path / "run", 2)
    html = ff.load(tmp_path / "run")._repr_html_()
    assert 'value="2" max="3"' in html and "(round 2)" in html and " left" not in html
    run = ff.resume(tmp_path / "run")
    html = run._repr_html_()
    assert "local accuracy %" in html and f"{100 * run.accuracy('global'):.2f}" in html
    plan = ff.plan(QUICK)
    for one, line in zip(plan.levels, str(plan).splitlines()[1:], strict=True):
        assert f"{one.parameters:,}" in line and f"{one.parameters:,}" in plan._repr_html_()
    (run.folder / "summary.json").write_text("{}")
    assert "damaged" in ff.load(run.folder)._repr_html_()


def test_text_in_tables_is_escaped_and_groups_span_their_columns() -> None:
    html = html_table(("<i>", "b", "c"), [("<script>", "&", "x")], "<t>", ["<n>"], [("", 1), ("<g>", 2)])
    assert not re.search("<(i|script|t|n|g)>", html) and 'colspan="2"' in html and "&lt;g&gt;" in html
    assert "color:" not in html.replace("rgba", "")
    assert html_table(("a",), [], groups=[("", 1)]).count("<tr>") == 1


# ---- watch -----------------------------------------------------------------------------------------------------------


def watch(folder: Path, *options: str) -> str:
    return run_verb("watch", folder, *options, code=0).out


def test_a_run_that_is_finished_or_was_stopped_is_said_to_be(tmp_path: Path) -> None:
    stopped_run(QUICK, tmp_path / "run", 2)
    output = watch(tmp_path / "run")
    assert output.startswith("round 2/3") and "by level: 1 " in output
    assert f"fleetfit resume {tmp_path}/run" in output
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    watch(tmp_path / "run")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    run = ff.resume(tmp_path / "run")
    output = watch(tmp_path / "run")
    assert output.startswith(f"{run.folder} is finished.") and "local accuracy %" in output


def test_a_resumed_run_shows_the_traffic_of_all_its_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is that of a watcher, also if the run goes back to an earlier checkpoint."""
    folder = tmp_path / "run"
    stopped_run({**QUICK, "rounds": 4, "checkpoint": {"every": 2}}, folder, 3)
    capsys.readouterr()
    ff.resume(folder)
    shown = re.findall(r"round (\d)/4 .* ([\d.]+ kB) sent", capsys.readouterr().err)
    sent = [one["bytes_down"] + one["bytes_up"] for one in ff.load(folder).metrics]
    assert shown == [("3", format_bytes(sum(sent[:3]))), ("4", format_bytes(sum(sent)))]


def test_a_run_on_objects_is_followed_without_them(tmp_path: Path) -> None:
    """Its files are enough; the advice is the call that passes the object again."""
    folder = tmp_path / "run"
    stopped_run({**QUICK, "method": scalefl()}, folder, 2)
    with raises(RunError, key="method"):
        ff.load(folder).predict()
    output = watch(folder, "--once")
    assert output.startswith("round 2/3") and f'ff.resume("{folder}", method=...)' in output
    ff.resume(folder, method=scalefl(), progress=False)
    assert watch(folder).startswith(f"{folder} is finished.")


def test_a_run_that_is_at_work_is_followed_to_its_end(tmp_path: Path) -> None:
    """Rounds are written as another process would, one at each look; the watcher sees each of them, in order."""
    whole = ff.run(QUICK, out=tmp_path / "whole")
    lines = (whole.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    run = tmp_path / "run"
    shutil.copytree(whole.folder, run)
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text(lines[0])
    looks = iter([*lines[1:], None])

    def meanwhile(seconds: float) -> None:
        line = next(looks)
        if line is None:
            shutil.copy(whole.folder / "summary.json", run)
            return
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line)

    with pytest.MonkeyPatch.context() as patch, RunFolder(run).hold():
        patch.setattr(verbs.time, "sleep", meanwhile)
        assert is_running(run)
        output = watch(run)
        assert "was resumed" not in output
    assert [line.split("  ")[0] for line in output.splitlines() if line.startswith("round")] == [
        "round 1/3", "round 2/3", "round 3/3"
    ]  # fmt: skip
    assert output.startswith(f"Watching {run}") and "Run folder: " in output and "resume" not in output
    assert not is_running(run)


def test_ctrl_c_leaves_the_run_alone_and_once_looks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_run(QUICK, tmp_path / "run", 1)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with RunFolder(tmp_path / "run").hold():
        assert "is running, after round 1 of 3" in watch(tmp_path / "run", "--once")
        monkeypatch.setattr(verbs.time, "sleep", interrupted)
        err = run_verb("watch", tmp_path / "run", code=130).err
    assert f"stopped watching; {tmp_path}/run continues." in err


def test_a_comparison_is_watched_with_the_runs_that_are_to_come(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text(
        tomli_w.dumps({**QUICK, "compare": {"row": [{"label": "a"}, {"label": "c"}], "smallest_baseline": False}})
    )

    def stops(title: str, number: int, count: int, run: ff.Run) -> Any:
        assert is_running(tmp_path / "both")

        def on_round(report: Mapping[str, Any]) -> None:
            if number == 2 and report["round"] == 2:
                raise Stopped

        return on_round

    with pytest.raises(Stopped):
        ff.compare(file, out=tmp_path / "both", on_run=stops)
    assert not is_running(tmp_path / "both")
    assert [one.title for one in list_planned_runs(tmp_path / "both")] == ["a, seed 3", "c, seed 3"]
    output = watch(tmp_path / "both")
    assert "[1/2] a, seed 3: finished." in output and "[2/2] c, seed 3  round 2/3" in output
    assert "1 of 2 runs" in output and "fleetfit compare" in output
    ff.compare(file, out=tmp_path / "both")
    assert "2 of 2 runs" in watch(tmp_path / "both")


@pytest.mark.parametrize("document", [{"runs": [{"place": "../x", "title": "a"}]}, {"runs": 3}, []])
def test_a_damaged_list_of_runs_is_refused(document: Any, tmp_path: Path) -> None:
    (tmp_path / "runs.json").write_text(json.dumps(document))
    with raises(RunError, tmp_path / "runs.json"):
        verbs.watch(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert str(tmp_path) in run_verb("watch", tmp_path, code=2).err


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
def test_another_process_is_watched_until_it_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps({**QUICK, "rounds": 5000}))
    fleetfit, run = [sys.executable, "-m", "fleetfit"], tmp_path / "run"
    with running([*fleetfit, "run", file, "--out", run, "--quiet"], stdout=subprocess.DEVNULL) as work:
        wait_until(lambda: (run / "metrics.jsonl").exists(), work)
        with running([*fleetfit, "watch", run], stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            lines = [watcher.stdout.readline() for _ in range(4)]
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(LIMIT_S) == 130
        assert sum(line.startswith("round ") for line in lines) >= 2 and work.poll() is None
        with running([*fleetfit, "watch", run], stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            work.kill()
            rest = watcher.stdout.read()
    assert f"fleetfit resume {run}" in rest
