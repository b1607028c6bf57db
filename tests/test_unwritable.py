"""Full disks and folders that are only to be read: a sentence, and what was there before is as it was.

A full disk is a limit on the size of files, as `ulimit -f` sets it: whatever would be larger cannot be written.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from run_folders import TINY, settings, stopped_run

import fleetfit as ff

pytestmark = pytest.mark.slow

FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import fleetfit.cli.main, fleetfit.api.run, fleetfit.inference.export.folder
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from fleetfit.cli import main
main(sys.argv[2:])
"""
ONLY_READ = """
import ctypes, os, sys
if os.geteuid() == 0:  # to whom permissions mean nothing, until it gives up its capabilities
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
from fleetfit.cli import main
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run and one with rounds left."""
    root = tmp_path_factory.mktemp("runs")
    ff.run(settings(), out=root / "finished")
    stopped_run(settings("decoupled"), root / "stopped", after=2)
    (root / "run.toml").write_text(tomli_w.dumps({**TINY, "engine": {"name": "processes", "workers": 1}}))
    return root


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def run_unwritable(program: str, where: Path, limit: int, arguments: list[str]) -> str:
    """Run the command in a process of its own that cannot write, and return its sentence."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(limit), *arguments],
        capture_output=True, text=True, check=False, cwd=where, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("fleetfit: ")]
    assert "Traceback" not in done.stderr and "internal error" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["resume", "stopped", "-q"], "cannot be written"),
        (["calibrate", "finished"], "inference/level-3.json cannot be written"),
        (["export", "finished", "--no-onnx", "--out", "OUT"], "cannot be written"),
        (["pictures", "finished", "--out", "OUT"], "out/accuracy.png"),
        (["predict", "finished", "--out", "OUT"], "cannot write the predictions"),
        (["run", "run.toml", "--out", "OUT", "-q"], "the workers cannot be started"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_full_disk(place: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    before = content(place)
    words = [str(tmp_path / "out") if word == "OUT" else word for word in arguments]
    assert expected in run_unwritable(FULL, place, 300, words)
    after = content(place)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"stopped/.lock", "stopped/environment.json"} and not any(
        p.is_file() for p in tmp_path.rglob("*")
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="root gives up its rights by a call of Linux")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["resume", "stopped", "-q"], "stopped/metrics.jsonl cannot be written: you have no permission"),
        (["calibrate", "finished"], "level-3.json cannot be written: you have no permission"),
        (["export", "finished", "--no-onnx", "--out", "finished-export"], "cannot be written"),
        (["pictures", "finished"], "cannot write figures"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_folder_that_is_only_to_be_read(place: Path, arguments: list[str], expected: str) -> None:
    before, folders = content(place), [place, *(path for path in place.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert expected in run_unwritable(ONLY_READ, place, 0, arguments)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert content(place) == before
