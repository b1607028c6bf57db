"""How soon something happens: the first training step, a list, help; each beside `python -c "import torch"`.

Each is a process of its own, and its seconds are from the start of that process on: CPU seconds are the process's own.
The first step is where the first gradient is asked for; the process ends there.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import Figure, Options, Seconds, Step, alternate, amount, of_many, quotients, shown

# Ends the process at the first training step, whatever would have come behind it.
FIRST_STEP = """
import os, sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Steps(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch._tensor":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def ending(module):
            run(module)
            module.Tensor.backward = lambda *_, **__: os._exit(17)
        spec.loader.exec_module = ending
        return spec

sys.meta_path.insert(0, Steps())
from fleetfit.cli import main
main(sys.argv[1:])
"""
REACHED = 17  # the exit code of a process that came to its first step
IMPORT = [sys.executable, "-c", "import torch"]
FLEETFIT = [sys.executable, "-m", "fleetfit"]
WANTED = {"the first training step of a default run": 1.25}
RESNET = ["--set", "model.name=resnet20"]


def figures(options: Options) -> Iterator[Figure]:
    """Start each a few times, alternating with an import of torch."""
    runs = [sys.executable, "-c", FIRST_STEP, "run", "--quiet"]
    for name, command, wanted_s in (
        ("the first training step of a default run", runs, 2.5),
        ("the first training step of ResNet-20 on digits", [*runs, *RESNET], None),
        ("fleetfit list models", [*FLEETFIT, "list", "models"], 0.6),
        ("fleetfit --help", [*FLEETFIT, "--help"], 0.2),
    ):
        pairs = list(alternate(_started(command), _started(IMPORT), max(3, options.repetitions // 2)))
        walls = [ours for _, (ours, _) in pairs]
        cpu = of_many(
            f"{name}, against an import of torch", quotients([cpu for cpu, _ in pairs]),
            detail=f"wall {shown(sum(walls) / len(walls))} s", wanted=WANTED.get(name),
        )  # fmt: skip
        yield cpu
        yield amount(f"{name}, the quickest of {len(walls)}", min(walls), "s", wanted=wanted_s)


def _started(command: list[str]) -> Step:
    def start() -> Seconds:
        with tempfile.TemporaryDirectory() as folder:  # where `runs/` goes
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, cwd=folder, env=_environment())
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != (REACHED if FIRST_STEP in command else 0):
            raise RuntimeError(f"{command[-3:]} ended with {done.returncode}")
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Seconds(used, time.perf_counter() - began)

    return start


def _environment() -> dict[str, str]:
    users = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**users, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
