"""`compare --jobs N`: runs at the same time, each in its own process; the same bits, nothing lost."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import compare_text, raises, run_verb
from waiting import LIMIT_S, listening_to_ctrl_c, running, wait_until

import fleetfit as ff
from fleetfit.errors import ConfigError, RunError

HEAD = """
rounds = 3
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model.name = "tiny:tiny"
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
local.epochs = 1
cohort.count = 2
evaluate.every = 1
"""
ROWS = """
[[compare.row]]
method.name = "scalefl"
[[compare.row]]
method.name = "heterofl"
[[compare.row]]
method.name = "fedavg"
[compare.grid]
seed = [0, 1]
"""
HOOK = """
import os, signal, time
from pathlib import Path
import torch
from fleetfit.method import take_mean

FOLDER = Path(os.environ["MEETING"])

def noted(name):
    (FOLDER / name).write_text(str(os.getpid()))

def until(name):
    limit = time.monotonic() + 600
    while not (FOLDER / name).exists():
        assert time.monotonic() < limit
        time.sleep(0.002)

def meets(federation, server, aggregate, reports):
    mine, other = ("first", "second") if federation.cohort == 2 else ("second", "first")
    noted(mine)
    until(other)
    (FOLDER / f"threads of {mine}").write_text(str(torch.get_num_threads()))
    return take_mean(federation, server, aggregate, reports)

def waits(federation, server, aggregate, reports):
    if server.round == 1:
        noted(f"waits {federation.cohort}")
        until("open")
    return take_mean(federation, server, aggregate, reports)

def dies(federation, server, aggregate, reports):
    if server.round == 1 and federation.cohort == 2 and not (FOLDER / "died").exists():
        noted("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return take_mean(federation, server, aggregate, reports)
"""


def two_rows(hook: str) -> str:
    """Two rows with a hook, which tells them by their cohort."""
    return HEAD + "".join(
        f'[[compare.row]]\nlabel = "{label}"\ncohort.count = {count}\nmethod = {{ name = "fedavg", hooks = '
        f'{{ step = "hook.py:{hook}" }} }}\n'
        for label, count in (("two", 2), ("three", 3))
    )


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hook.py").write_text(HOOK)
    monkeypatch.setenv("MEETING", str(tmp_path))
    return tmp_path


def run_comparison(place: Path, text: str, out: str, jobs: int, **more: Any) -> ff.Comparison:
    return compare_text(place, text, out=out, jobs=jobs, **more)


def content(folder: Path) -> Mapping[str, bytes]:
    """All files of a comparison that do not say when it was, how long it took, or where it is."""
    kinds = ("*.safetensors", "config.toml", "plan.toml", "fleet.json", "table.md")
    files = {str(p.relative_to(folder)): p.read_bytes() for kind in kinds for p in sorted(folder.rglob(kind))}
    lines = (folder / "table.csv").read_text().splitlines()
    assert lines[0].endswith(",training_seconds,seconds")
    return files | {"table.csv": "\n".join(line.rsplit(",", 2)[0] for line in lines).encode()}


@pytest.mark.slow
def test_side_by_side_has_the_bits_of_one_after_the_other(place: Path) -> None:
    """Three rows, two seeds, a tuned value: all tables, configurations and checkpoints."""
    text = HEAD + ROWS + "[compare.tune]\nlocal.lr = [0.1, 0.01]\n"
    alone, beside = run_comparison(place, text, "alone", 1), run_comparison(place, text, "beside", 3)
    assert content(alone.folder) == content(beside.folder)
    assert len(content(alone.folder)) > 40
    assert list(alone.runs) == list(beside.runs) and alone.tuned == beside.tuned
    for one, other in zip(alone.runs.values(), beside.runs.values(), strict=True):
        assert [run.columns for run in one] == [run.columns for run in other]
    assert run_comparison(place, text, "beside", 1).table == beside.table, "and the one goes on where the other was"


FAST = (
    HEAD.replace('"tiny:tiny"', '"cnn"').replace("rounds = 3", "rounds = 2")
    + """
engine = { speed = "fast" }
compare.smallest_baseline = false
[[compare.row]]
method.name = "scalefl"
[[compare.row]]
label = "both in bf16"
method.name = "scalefl"
engine.precision = "bf16"
"""
)


def read_computing(folder: Path) -> dict[str, Mapping[str, str]]:
    """How each run of a comparison computes, by row."""
    configs = sorted(folder.rglob("config.toml"))
    return {config.parts[-3]: tomllib.loads(config.read_text())["recorded"]["computing"] for config in configs}


def test_fast_rows_choose_alike_side_by_side_and_when_they_go_on(place: Path) -> None:
    """Stopped in the middle, they go on side by side, and finished ones are found again."""
    alone = run_comparison(place, FAST, "alone", 1)
    both, tiny = read_computing(alone.folder)["both-in-bf16"], read_computing(alone.folder)["scalefl"]
    assert set(both.values()) == {"bf16 channels_last"} and set(tiny.values()) == {"fp32 channels_last"}

    class Stopped(Exception):
        pass

    def on_run(*event: Any) -> Any:
        def stop(report: Mapping[str, Any]) -> None:
            raise Stopped

        return stop

    with pytest.raises(Stopped):
        run_comparison(place, FAST, "beside", 2, on_run=on_run)
    assert read_computing(place / "beside").items() <= read_computing(alone.folder).items()
    assert not list((place / "beside").rglob("summary.json"))
    assert content(run_comparison(place, FAST, "beside", 2).folder) == content(alone.folder)
    assert run_comparison(place, FAST, "beside", 1).table == alone.table


def test_runs_go_at_the_same_time_with_one_thread_each(place: Path) -> None:
    """Each waits for the other, in every round's step: one after the other they would wait for ever.

    Both are there now, so alone they do not wait, and give the same bits.
    """
    beside = run_comparison(place, two_rows("meets"), "out", 2)
    assert {(place / f"threads of {name}").read_text() for name in ("first", "second")} == {"1"}
    assert (place / "first").read_text() != (place / "second").read_text(), "in two processes"
    assert content(beside.folder) == content(run_comparison(place, two_rows("meets"), "alone", 1).folder)


@pytest.mark.slow
def test_each_run_is_announced_and_its_rounds_are_told(place: Path) -> None:
    rounds_by_run: dict[str, list[int]] = {}

    def on_run(title: str, number: int, count: int, run: ff.Run) -> Any:
        assert count == 6 and not run.finished and isinstance(run.notes, tuple)
        rounds = rounds_by_run.setdefault(f"{number} {title}", [])
        return lambda report: rounds.append(report["round"])

    run_comparison(place, HEAD + ROWS, "out", 2, on_run=on_run)
    assert rounds_by_run == {f"{2 * i + seed + 1} {row}, seed {seed}": [1, 2, 3]
                     for i, row in enumerate(("scalefl", "heterofl", "fedavg")) for seed in (0, 1)}  # fmt: skip


@pytest.mark.slow
def test_a_killed_process_loses_its_own_run_alone(place: Path) -> None:
    """It is said once the others are done, and the same command goes on with it, to the bits of an unbroken run."""
    with raises(RunError, "two, seed 0", "signal 9"):
        run_comparison(place, two_rows("dies"), "out", 2)
    assert (place / "out/three/seed-0/summary.json").is_file()
    assert not (place / "out/two/seed-0/summary.json").is_file()
    again = run_comparison(place, two_rows("dies"), "out", 2)
    assert content(again.folder) == content(run_comparison(place, two_rows("dies"), "alone", 1).folder)


@pytest.mark.slow
def test_an_error_of_a_run_is_told_and_says_whose(place: Path) -> None:
    """The data can be had for the check, and no longer when the row is run."""
    (place / "gone.py").write_text(
        "from pathlib import Path\nimport tiny\nfrom fleetfit import DataError\n"
        "def gone(log):\n"
        "    if Path(log).exists():\n"
        "        raise DataError('the disk is gone.', key='data.log', path=log, row=3, column='x')\n"
        "    Path(log).touch()\n"
        "    return tiny.tiny_data()\n"
    )
    bad = (
        f'{{ name = "{place / "gone.py"}:gone", log = "{place / "log"}", partition = {{ kind = "iid", clients = 6 }} }}'
    )
    rows = f'[[compare.row]]\nmethod.name = "scalefl"\n[[compare.row]]\nmethod.name = "fedavg"\ndata = {bad}\n'
    with raises(RunError, "fedavg, seed 0: ", "disk", path=place / "out/fedavg/seed-0"):
        run_comparison(place, HEAD + rows, "out", 2)


@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_an_engine_with_workers_of_its_own_is_refused(place: Path, engine: str) -> None:
    text = HEAD + ROWS.replace('method.name = "heterofl"', f'method.name = "heterofl"\nengine.name = "{engine}"')
    with raises(ConfigError, "heterofl", engine, "--jobs 1", key="engine.name"):
        run_comparison(place, text, "out", 2)
    with raises(ConfigError, "scalefl", engine, key="engine.name"):
        run_comparison(place, HEAD + ROWS, "out", 2, overrides=[f"engine.name={engine}"])
    assert not (place / "out").exists()


def test_fewer_than_one_job_is_refused(place: Path) -> None:
    with raises(ConfigError, "--jobs", 0, key="jobs"):
        run_comparison(place, HEAD + ROWS, "out", 0)
    assert "--jobs" in run_verb("compare", place / "file.toml", "--jobs", 0, code=2).err


@pytest.mark.slow
def test_the_command_shows_all_runs_and_one_table(place: Path) -> None:
    (place / "file.toml").write_text(HEAD + ROWS)
    out = run_verb("compare", place / "file.toml", "--out", place / "out", "-j", 2, code=0).out
    for number, row in enumerate(("scalefl", "heterofl", "fedavg")):
        assert f"[{2 * number + 1}/6] {row}, seed 0  round 3/3" in out
    assert out.index("│ scalefl") < out.index("│ heterofl") < out.index("│ fedavg")
    runs = json.loads((place / "out/results.json").read_text())["runs"]
    assert [run["row"] for run in runs] == ["scalefl"] * 2 + ["heterofl"] * 2 + ["fedavg"] * 2


def prepare_command(place: Path) -> tuple[list[str], dict[str, Any]]:
    """A command that compares two rows, each of which waits in its second round, and how to start it."""
    (place / "file.toml").write_text(two_rows("waits"))
    command = [sys.executable, "-c", "from fleetfit.cli import main; main()", "compare", str(place / "file.toml"),
               "--out", str(place / "out"), "--jobs", "2"]  # fmt: skip
    paths = os.pathsep.join(p for p in sys.path if p)
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "preexec_fn": listening_to_ctrl_c,
           "cwd": place, "env": {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}}  # fmt: skip
    return command, how


def both_wait(place: Path) -> bool:
    return all((place / f"waits {n}").exists() for n in (2, 3))


def is_gone(place: Path, number: int) -> bool:
    """Whether a run's process is gone, or only its exit code is left."""
    try:
        status = Path(f"/proc/{(place / f'waits {number}').read_text()}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_or_a_kill_stops_all_and_loses_nothing(place: Path, how: signal.Signals) -> None:
    """Afterwards no process is left, and the same command goes on to the bits of an unbroken comparison."""
    command, settings = prepare_command(place)
    with running(command, **settings) as process:
        wait_until(lambda: both_wait(place), process)
        process.send_signal(how)
        _, err = process.communicate(timeout=LIMIT_S)
    if how == signal.SIGINT:
        assert process.returncode in (130, -signal.SIGINT), "a shell shows 130 for both"
        command = f"fleetfit compare {place / 'file.toml'} --out {place / 'out'} --jobs 2"
        assert err.splitlines()[-1].strip() == command
        assert is_gone(place, 2) and is_gone(place, 3), "nothing goes on behind the back of who stopped it"
    wait_until(lambda: is_gone(place, 2) and is_gone(place, 3))
    assert not list((place / "out").rglob("summary.json"))
    (place / "open").touch()
    again = run_comparison(place, two_rows("waits"), "out", 2)
    assert content(again.folder) == content(run_comparison(place, two_rows("waits"), "alone", 1).folder)
