"""A run of tests that leaves something in the working tree fails, and says what."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import LIMIT_S

TESTS = """
from pathlib import Path


def test_tidy(tmp_path):
    (tmp_path / "own").write_text("x")


def test_untidy():
    if {untidy}:
        Path("stray.onnx").write_text("x")
        Path("tests/deep").mkdir()
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
@pytest.mark.parametrize("untidy", [True, False])
def test_files_left_behind_fail_the_run(tmp_path: Path, workers: list[str], untidy: bool) -> None:
    """In a plain tree, without git; with xdist, whose workers cannot tell what the others do."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(Path(__file__).with_name("support") / "tree.py", tmp_path / "tests" / "conftest.py")
    (tmp_path / "tests" / "test_it.py").write_text(TESTS.format(untidy=untidy))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "tests"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "2 passed" in process.stdout, process.stdout + process.stderr
    assert process.returncode == int(untidy)
    left = [line for line in process.stdout.splitlines() if line.startswith(str(tmp_path))]
    assert left == ([str(tmp_path / "stray.onnx"), f"{tmp_path / 'tests' / 'deep'}/"] if untidy else [])
