"""The task that peers are given: the same models as ours, and a whole tree of processes is counted."""

import sys

import pytest
import torch

from benchmarks.peers import OURS, TASKS, Turn, check_alike, compared, table
from benchmarks.peers.observed import Seen, observe
from benchmarks.peers.task import Loaded, load, make, model_of, save
from fleetfit import names
from fleetfit.anatomy import build_module


@pytest.mark.parametrize("name", TASKS)
def test_the_plain_model_equals_ours(name, tmp_path):
    """The same parameters in the same order give the same logits, bit for bit."""
    task = TASKS[name]
    architecture = names.resolve("models", task.model)(classes=10, channels=task.channels)
    ours = build_module(architecture, architecture.sizes(1.0), (architecture.blocks,))
    plain = model_of(task)
    save(plain, tmp_path / "state.npz")
    load(ours, tmp_path / "state.npz")
    x = torch.randn(3, task.channels, task.side, task.side)
    (logits,) = ours(x)
    assert torch.equal(logits, plain(x))


@pytest.mark.parametrize(("name", "last", "test"), [("cnn on digits", 39, 1797 - 40 * 32), ("cnn", 99, 1000)])
def test_a_task_is_read_as_it_was_made(name, last, test, tmp_path):
    task = TASKS[name]
    make(task, tmp_path)
    loaded = Loaded(tmp_path)
    x, y = loaded.client(last)
    assert loaded.task == task
    assert x.shape == (task.samples, 1, task.side, task.side) and len(loaded.y) == loaded.trained + test
    assert torch.equal(y, loaded.y[last * task.samples : loaded.trained])
    assert abs(loaded.accuracy(tmp_path / "first.npz") - 0.1) < 0.15  # untrained: about as if drawn


def test_a_round_is_the_mean_of_those_after_the_first():
    """Rounds end after 10, 12, 16 and 90 CPU s; the last does not count: a round takes 3, and the start took 7."""
    side = Seen([(10.0, 20.0), (12.0, 21.0), (16.0, 23.0), (90.0, 99.0)])
    assert side.per_round(3) == (3.0, 1.5)
    assert side.start(3) == (7.0, 18.5)


BURN = "import time\nwhile time.process_time() < {}: pass\n"
FAMILY = f"""
import os, subprocess, sys, time
subprocess.run([sys.executable, "-c", {BURN.format(0.4)!r}])
middle = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
orphan = {BURN.format(0.6)!r} + "open('done', 'w').close()\\nimport time; time.sleep(600)"
subprocess.run([sys.executable, "-c", middle, orphan])
while not os.path.exists("done"): time.sleep(0.05)
os.write(int(os.environ["ROUNDS_FD"]), b".")
sys.exit(int(sys.argv[1]))
"""


def test_ended_children_and_orphans_are_counted(tmp_path):
    side = observe([sys.executable, "-c", FAMILY, "0"], tmp_path)
    assert len(side.rounds) == 1 and side.rounds[0][0] >= 1.0 - 0.03  # three processes, in ticks of 10 ms
    assert side.peak_bytes > 1_000_000


def test_a_side_that_fails_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"exited with 3"):
        observe([sys.executable, "-c", "import sys; print('why'); sys.exit(3)"], tmp_path)


def turn(cpu_s, accuracy=0.9):
    return Turn((cpu_s, 2 * cpu_s), (1.0, 1.0), 100.0, accuracy)


def test_ratios_are_of_turns_beside_each_other():
    """Flower takes 3 and 8 s where we take 1 and 2: quotients 3 and 4, median 3.5."""
    ratios = list(compared("cnn", {OURS: [turn(1), turn(2)], "Flower": [turn(3), turn(8)]}))
    ratio = ratios[0]
    assert (ratio.value, ratio.low, ratio.high, ratio.unit, ratio.better) == (3.5, 3.0, 4.0, "", "higher")
    assert all(figure.unit for figure in ratios[1:])
    row = [cell.strip() for cell in table(ratios).splitlines()[2].split("|")[1:-1]]
    assert (row[0], row[1], row[2], row[4], row[6]) == ("cnn", "exact", "1.500", "1.000", "100.0 MB")
    assert "3.00 s" in row[3] and "0.900" in row[3] and "1.0 s" in row[5]


@pytest.mark.parametrize("theirs", [0.7, 0.2])
def test_sides_that_learn_something_else_are_refused(theirs):
    with pytest.raises(RuntimeError, match="cnn"):
        check_alike("cnn", {OURS: [turn(1)], "Flower": [turn(1, theirs)]})
    check_alike("cnn", {OURS: [turn(1)], "Flower": [turn(1, 0.87)]})
