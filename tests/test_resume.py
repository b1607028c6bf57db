"""`resume` after kill -9 at any moment: the final state equals that of an unbroken run bit for bit.

A real process is killed at times spread evenly over the wall time of an unbroken run: while Python starts, between
rounds, while a checkpoint is written, while plots are drawn. The method keeps a memory on each client and one on the
server.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROUNDS = 30
RUN_FILE = f"""
seed = 3
rounds = {ROUNDS}
[data]
name = "{HERE}/tiny.py:tiny_data"
partition = {{ kind = "iid", clients = 9 }}
[model]
name = "{HERE}/tiny.py:tiny"
dropout = 0.2
[fleet]
levels = [0.3, 0.55, 1.0]
tolerance = 0.25
groups = [{{ budget = 0.3 }}, {{ budget = 0.55 }}, {{ budget = 1.0 }}]
[method]
name = "scalefl"
hooks.make_loss = "{HERE}/test_resume.py:remembering_loss"
hooks.update_client_memory = "{HERE}/test_resume.py:remember"
hooks.step = "{HERE}/test_resume.py:counting_step"
hooks.choose_channels = "random"
[local]
epochs = 2
batch_size = 8
lr = 0.05
momentum = 0.5
[cohort]
count = 4
[evaluate]
every = 10
statistics_samples = 60
batch_size = 32
[engine]
"""


# ---- the method: pulls each client to its own mean logit of the last time; the server counts updates
# ----------------------------


def remembering_loss(job: Any, device: Any) -> Any:
    target = device.memory["mean"].tanh() if device.memory else torch.zeros(4)

    class Remembering:
        seen = torch.zeros(4)

        def __call__(self, module: Any, x: Any, y: Any) -> Any:
            logits = module(x)[-1]
            self.seen = self.seen + logits.detach().mean(0)
            return device.problem.task.loss(logits, y) + 0.05 * ((logits - target) ** 2).mean()

    return Remembering()


def remember(job: Any, device: Any, result: Any) -> Any:
    times = device.memory["times"] + 1 if device.memory else 1
    return {"times": times, "mean": result.loss.seen, "rounds": (job.round, job.memory_version)}


def counting_step(federation: Any, server: Any, aggregate: Any, reports: Any) -> Any:
    from dataclasses import replace

    from fleetfit.hooks import take_mean

    memory = {
        "updates": (server.memory or {"updates": 0})["updates"] + len(reports),
        "coverage": aggregate.coverage["stem.bias"],
    }
    return replace(take_mean(federation, server, aggregate, reports), memory=memory)


# ---- running and killing -------------------------------------------------


_STARTED: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """End what a test has started, and close its pipes, also where the test has failed."""
    yield
    while _STARTED:
        process = _STARTED.pop()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
        process.wait(LIMIT_S)


def start_command(*arguments: Any) -> subprocess.Popen[bytes]:
    """Start the command line as a process of its own, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from fleetfit.cli import main; main()", *map(str, arguments), "--quiet"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _STARTED.append(process)
    return process


def rounds_reach(folder: Path, rounds: int) -> bool:
    return count_rounds(folder) >= rounds


def run_command(*arguments: Any) -> None:
    process = start_command(*arguments)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output.decode()


def kill_after(seconds: float, *arguments: Any) -> bool:
    """Run for so long, then kill -9; tell whether it was still running. The process alone dies, as in a crash: engine
    processes must notice by themselves."""
    process = start_command(*arguments)
    try:
        process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        return True
    return False


def final(folder: Path) -> tuple[dict[str, torch.Tensor], Any, list[Any]]:
    """Tensors of the last checkpoint, its structure, and the metrics without their times."""
    path = folder / "checkpoints" / f"round-{ROUNDS:06d}.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        structure = json.loads(file.metadata()["nest"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return tensors, structure, [{k: v for k, v in line.items() if k not in ("seconds", "seconds_of")} for line in lines]


def check_same_result(folder: Path, unbroken: Path) -> None:
    (tensors, structure, lines), (expected, expected_nest, expected_lines) = final(folder), final(unbroken)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name
    assert structure == expected_nest
    assert lines == expected_lines
    assert [line["round"] for line in lines] == list(range(1, ROUNDS + 1))
    assert (folder / "config.toml").read_text() == (unbroken / "config.toml").read_text()
    left = {p.name for p in folder.rglob("*") if p.name.endswith(".part")}
    assert not left
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (folder, unbroken))
    assert {k: v for k, v in ours.items() if "second" not in k} == {
        k: v for k, v in theirs.items() if "second" not in k
    }


class Unbroken:
    """A run that nothing interrupts, and how long it takes."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.file = folder / "run.toml"
        self.file.write_text(RUN_FILE + engine)
        self.folder = folder / "unbroken"
        began = time.perf_counter()
        run_command("run", self.file, "--out", self.folder)
        self.seconds = time.perf_counter() - began


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(tmp_path_factory.mktemp("local"), 'name = "local"')


def count_rounds(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def resume_or_run(run: Unbroken, folder: Path) -> None:
    """Resume; where the folder had not appeared yet, there is nothing to resume and the run is started."""
    if folder.exists():
        run_command("resume", folder)
    else:
        run_command("run", run.file, "--out", folder)


def test_the_run_has_memories_to_lose(unbroken: Unbroken) -> None:
    _, structure, lines = final(unbroken.folder)
    assert len(structure["clients"]) == 9 and all(
        "$t" in json.dumps(client["memory"]) for client in structure["clients"].values()
    )
    assert structure["server"]["memory"]["updates"] == ROUNDS * 4
    assert not any(line["failures"] for line in lines)


@pytest.mark.parametrize("part", [1, 2, 3, 4])
def test_killed_at_any_moment(unbroken: Unbroken, tmp_path: Path, part: int) -> None:
    """Kills at 1/5, 2/5, ... of the wall time."""
    folder = tmp_path / "run"
    kill_after(unbroken.seconds * part / 5, "run", unbroken.file, "--out", folder)
    resume_or_run(unbroken, folder)
    check_same_result(folder, unbroken.folder)


def test_killed_in_the_middle_again_and_again(unbroken: Unbroken, tmp_path: Path) -> None:
    """Killed after a quarter of the rounds, and each time again after a quarter more: by progress, not by the clock,
    so that each kill is in the middle of training however long Python takes to start.
    """
    folder, hits = tmp_path / "run", 0
    for quarter in (1, 2, 3):
        process = (
            start_command("resume", folder) if folder.exists() else start_command("run", unbroken.file, "--out", folder)
        )
        wait_until(functools.partial(rounds_reach, folder, quarter * ROUNDS // 4), process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
        hits += 0 < count_rounds(folder) < ROUNDS
    assert hits == 3
    resume_or_run(unbroken, folder)
    check_same_result(folder, unbroken.folder)
    resumed = json.loads((folder / "environment.json").read_text())["resumed"]
    assert len(resumed) == 3
    assert [r["round"] for r in resumed] == sorted(r["round"] for r in resumed)


def test_a_half_written_line_and_checkpoint_are_dropped(unbroken: Unbroken, tmp_path: Path) -> None:
    """What a kill between two writes leaves: a line without its checkpoint, half a line, a checkpoint beside its
    place.
    """
    folder = tmp_path / "run"
    process = start_command("run", unbroken.file, "--out", folder)
    wait_until(lambda: rounds_reach(folder, 5), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    newest = max((folder / "checkpoints").glob("round-*.safetensors"))
    (folder / "checkpoints" / ".round-000099.safetensors.part").write_bytes(newest.read_bytes()[:100])
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])  # the one before it is whole
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "lr": 0.0')
    resume_or_run(unbroken, folder)
    check_same_result(folder, unbroken.folder)


def test_with_worker_processes(unbroken: Unbroken, tmp_path: Path) -> None:
    """Once with engine processes: equal to the run on `local`, and the workers of the killed run end by themselves."""
    file, folder = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(RUN_FILE + 'name = "processes"\nworkers = 2\n')
    process = start_command("run", file, "--out", folder)
    wait_until(lambda: rounds_reach(folder, ROUNDS // 2), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)  # returns when the workers, which hold the same pipe, are gone too
    assert 0 < count_rounds(folder) < ROUNDS
    run_command("resume", folder)
    (tensors, structure, lines), (expected, expected_nest, expected_lines) = final(folder), final(unbroken.folder)
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[n], t) for n, t in expected.items())
    assert structure == expected_nest and lines == expected_lines


def test_a_finished_run_is_left_as_it_is(unbroken: Unbroken) -> None:
    before = {p: p.stat().st_mtime_ns for p in unbroken.folder.rglob("*") if p.is_file() and p.name != ".lock"}
    run_command("resume", unbroken.folder)
    assert {p: p.stat().st_mtime_ns for p in unbroken.folder.rglob("*") if p.is_file() and p.name != ".lock"} == before
