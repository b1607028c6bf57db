"""Run folders and checkpoints as the first format wrote them are opened, evaluated and resumed, with the same figures.

`tests/data/format_1` holds two runs of four rounds that were stopped after the second: one whose clients remember much
(FedDyn's gradients, what compression has lost, losses), one with a base that is never trained (LoRA). `figures.json`
says what the program that wrote them made of them. The figures are taken in a process whose kernels are the same on
every x86-64 processor (see `golden/test_golden.py`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WRITTEN = HERE / "data" / "format_1"
ALIKE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
RUNS = ("memories", "base")
LATER = {"global_samples", "local_samples", "test_samples"}
"""Columns that the first format did not have."""


def figures_of(folder: Path) -> dict[str, Any]:
    """Open a run, evaluate it, go on to its end; the folder is written to."""
    import fleetfit as ff

    opened = ff.load(folder)
    found: dict[str, Any] = {"opened at": opened.server.round, "norms": norms(opened.server.state)}
    found["base"] = norms(opened.assembly.federation.problem.base)
    found["evaluated"] = then_known(opened.evaluate()["static"])
    resumed = ff.resume(folder)
    found["finished at"], found["norms after"] = resumed.server.round, norms(resumed.server.state)
    found["losses"] = [line["train"]["loss"] for line in resumed.metrics]
    found["by level"] = [line["train"]["by_level"] for line in resumed.metrics]
    found["measured"] = [then_known(line["evaluate"]["static"]) for line in resumed.metrics]
    return found


def then_known(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in columns.items() if name not in LATER}


def norms(state: Any) -> dict[str, float]:
    return {name: float(tensor.double().norm()) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("format 1")
    for name in RUNS:
        shutil.copytree(WRITTEN / name, place / name)
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, __file__, *(str(place / name) for name in RUNS)],
        env={**os.environ, **ALIKE, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_the_first_format_goes_on_as_before(name: str, found: dict[str, Any]) -> None:
    expected = json.loads((WRITTEN / "figures.json").read_text())[name]
    assert found[name].keys() == expected.keys()
    for key, figures in expected.items():
        assert close(found[name][key], figures), (key, found[name][key], figures)


def close(found: Any, expected: Any) -> bool:
    """Compare nests of numbers to 1e-6, relatively."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[key], value) for key, value in expected.items())
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return bool(found == pytest.approx(expected, rel=1e-6))


def test_they_are_of_the_first_format() -> None:
    files = [path for name in RUNS for path in (WRITTEN / name).rglob("*.safetensors")]
    assert len(files) == 3
    for path in files:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["__metadata__"]["format"] == "1"


if __name__ == "__main__":
    print(json.dumps({Path(folder).name: figures_of(Path(folder)) for folder in sys.argv[1:]}))
