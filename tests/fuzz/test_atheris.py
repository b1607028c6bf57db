"""Bytes of a fuzzer become cases of the suite, and where atheris is installed it leads them by coverage."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz import atheris_inputs
from fuzz.atheris_inputs import INPUTS

NEEDS: dict[str, list[str]] = {"run_files": [], "data_files": ["pyarrow", "PIL", "soundfile", "tokenizers"]}


@pytest.mark.parametrize("kind", NEEDS)
def test_bytes_become_cases(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages and folders are left out here: making them takes longer than all of these."""
    for package in NEEDS[kind]:
        pytest.importorskip(package)
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEETFIT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    delivered: list[str] = []
    real = atheris_inputs._of_hypothesis

    def make_target(strategy: Any, deliver: Callable[[Any], object]) -> Any:
        return real(strategy, lambda case: delivered.append(str(deliver(case))))

    monkeypatch.setattr(atheris_inputs, "_of_hypothesis", make_target)
    target, rng = INPUTS[kind][0](tmp_path), random.Random(0)
    for _ in range(40):
        target(rng.randbytes(rng.choice([500, 4000])))
        if len(delivered) >= 5:
            break
    assert len(delivered) >= 5 and len(set(delivered)) > 1, delivered


def test_errors_of_a_case_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that swallowed it would find nothing."""

    def wrong(path: Path, data: bytes) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("fuzz.test_run_files.outcome", wrong)
    target, rng = INPUTS["run_files"][0](tmp_path), random.Random(0)
    with pytest.raises(ZeroDivisionError):
        target(rng.randbytes(4000))


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_led_by_coverage(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed")
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.atheris_inputs", kind, "-runs=100"],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_missing_atheris_is_explained() -> None:
    try:
        import atheris  # noqa: F401
    except ImportError:
        with pytest.raises(SystemExit, match="atheris is not installed: pip install atheris"):
            atheris_inputs.main()
