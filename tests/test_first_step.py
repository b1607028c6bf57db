"""What a run has imported by its first training steps: PyTorch, and nothing that takes as long."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "sklearn", "scipy", "pandas", "matplotlib")
HOOK = f"""
import sys
from fleetfit import Method

def said():
    def remember(job, device, state, loss):
        with open({{file!r}}, "a") as file:
            file.write(str([name for name in {HEAVY} if name in sys.modules]) + "\\n")
        return None
    return Method(remember=remember)
"""


def fleetfit(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "fleetfit", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_a_run_has_only_what_it_needs_after_the_first_job(engine: str, tmp_path: Path) -> None:
    """A client's job has begun and ended, in this process and in a worker; digits, the small CNN and SGD."""
    seen, hook = tmp_path / "seen.txt", tmp_path / "hook.py"
    hook.write_text(HOOK.format(file=str(seen)))
    settings = {
        "method.name": f"{hook}:said", "engine.name": engine, "rounds": 1, "local.epochs": 1, "evaluate.every": 0,
        "data.partition.clients": 4, "evaluate.norms": ["static"],
    } | ({"engine.workers": 1} if engine == "processes" else {})  # fmt: skip
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    fleetfit("run", "--quiet", "--out", str(tmp_path / "run"), *given)
    found = seen.read_text().splitlines()
    assert found and set(found) == {"[]"}
