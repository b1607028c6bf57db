"""Verbs that write, killed with -9 at several moments and run again: the result is the unbroken one.

Moments are found by what is on disk, not by the clock: the process is stopped at the n-th flush to disk or renaming and
then killed, so that each kill is in the middle of writing. Nothing half-written is taken for whole, and no part file is
left after success.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from run_folders import TINY, settings

import fleetfit as ff
from fleetfit.report import drawing

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
STOPS = """
import os, signal, sys
import fleetfit.cli.verbs, fleetfit.api.runs, fleetfit.inference.export.writing
at, said = int(sys.argv[1]), sys.argv[2]
count = 0
def counted(real):
    def call(*given, **named):
        global count
        count += 1
        if at and count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)
    return call
for name in ("fsync", "replace", "rename"):
    setattr(os, name, counted(getattr(os, name)))
from fleetfit.cli import main
try:
    main(sys.argv[3:])
finally:
    open(said, "w").write(str(count))
"""


def command(place: Path, at: int, *arguments: object) -> int:
    """Run the command in a process of its own, which kills itself at its n-th write; return how many there were.

    Args:
        place: Where it runs.
        at: At which; 0: it runs to its end.
        *arguments: Of the command line.

    Returns:
        How many there were; -1 where it was killed.
    """
    said = place / "said"
    done = subprocess.run(
        [sys.executable, "-c", STOPS, str(at), str(said), *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=place, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    if done.returncode == -signal.SIGKILL:
        return -1
    assert done.returncode == 0, done.stderr
    return int(said.read_text())


def result(place: Path) -> dict[str, Any]:
    """Return what a command left, but for times and names of folders."""
    found: dict[str, Any] = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if not path.is_file() or path.name in ("said", ".lock", "environment.json"):
            continue
        assert not path.name.endswith(".part") and ".part/" not in name, f"left behind: {name}"
        content: Any = path.read_bytes()
        if path.suffix in (".json", ".jsonl", ".toml", ".csv", ".md"):
            text = re.sub(r"killed-\d+|unbroken", "PLACE", content.decode())
            content = re.sub(r'"(seconds|time)": [^,}\n]+|took .*|\(\d+(\.\d+)? ?m?s\)', "", text)
        elif path.suffix in (".png", ".pt2", ".onnx"):
            content = bool(content)  # they hold names and times of their own
        found[name] = content
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, calibrated, and run files."""
    place = tmp_path_factory.mktemp("trained")
    tables = {**TINY, "rounds": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "available", lambda: False)
        ff.run(settings(), out=place / "run")
    (place / "run.toml").write_text(tomli_w.dumps(tables))
    (place / "rows.toml").write_text(tomli_w.dumps({**tables, "compare": {"row": [{"label": "a"}]}}))
    return place


VERBS: dict[str, list[str]] = {
    "run": ["run", "SOURCE/run.toml", "--out", "out", "-q"],
    "compare": ["compare", "SOURCE/rows.toml", "--out", "out", "-q"],
    "plan": ["plan", "SOURCE/run.toml", "--save", "plan.toml"],
    "calibrate": ["calibrate", "run"],
    "export": ["export", "run", "--no-onnx", "--out", "out"],
    "resume": ["resume", "run", "-q"],
}


def prepared(verb: str, trained: Path, place: Path) -> list[str]:
    """Make what a verb works on, and return its arguments."""
    place.mkdir()
    shutil.copytree(trained / "run", place / "run")
    if verb == "resume":  # of which all is left to do
        (place / "run" / "summary.json").unlink()
        (place / "run" / "metrics.jsonl").unlink()
        shutil.rmtree(place / "run" / "checkpoints")
    return [word.replace("SOURCE", str(trained)) for word in VERBS[verb]]


def again(verb: str, arguments: list[str], place: Path) -> list[str]:
    """Return what is typed after a kill: a run that has begun is gone on with."""
    return ["resume", "out", "-q"] if verb == "run" and (place / "out").exists() else arguments


@pytest.mark.parametrize("verb", VERBS)
def test_killed_while_it_writes(verb: str, trained: Path, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    writes = command(unbroken, 0, *prepared(verb, trained, unbroken))
    assert writes > 0, "it writes nothing for certain"
    expected = result(unbroken)
    first = {1} if verb in ("run", "resume", "export") else set()
    for at in sorted(first | {(writes + 1) // 2, writes} - {0}):
        place = tmp_path / f"killed-{at}"
        arguments = prepared(verb, trained, place)
        assert command(place, at, *arguments) == -1, f"killed at write {at} of {writes}"
        command(place, 0, *again(verb, arguments, place))
        assert result(place) == expected, f"killed at write {at} of {writes}"


def test_a_profile_is_old_or_new(trained: Path, tmp_path: Path) -> None:
    """What is measured differs from time to time, so only that the file is whole can be said."""
    arguments = ["profile", str(trained / "run.toml"), "--step-s", "100", "--memory", "4 GB", "--out", "budget.toml"]
    writes = command(tmp_path, 0, *arguments)
    old = (tmp_path / "budget.toml").read_text()
    for at in range(1, writes + 1):
        assert command(tmp_path, at, *arguments, "--force") == -1
        now = (tmp_path / "budget.toml").read_text()
        assert now == old or ("budget" in now and now.endswith("\n"))
        old = now
    command(tmp_path, 0, *arguments, "--force")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["budget.toml", "said"]


def test_a_run_killed_before_its_folder_leaves_nothing_after_the_next(trained: Path, tmp_path: Path) -> None:
    """The part of a folder that a killed process left goes with the next one that makes the same folder."""
    place = tmp_path / "killed-2"
    place.mkdir()
    arguments = ["run", trained / "run.toml", "--out", "out", "-q"]
    assert command(place, 2, *arguments) == -1
    assert not (place / "out").exists() and list(place.glob(".out*")), "killed before it was there"
    command(place, 0, *arguments)
    assert not list(place.glob(".*")) and json.loads((place / "out" / "summary.json").read_text())["rounds"] == 2
