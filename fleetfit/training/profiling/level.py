"""Profile a level: start the process that measures it, read its results, and end it after its time."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetfit.core import Local
from fleetfit.cost import Latency
from fleetfit.submodel import Submodel
from fleetfit.training.profiling.memory import ENVIRONMENT

_GRACE_S = 5.0  # the process ends itself this long after its time, if its parent is gone


@dataclass(frozen=True)
class Measurement:
    """The costs of a level; None: not measured.

    Attributes:
        step: A training step of one batch.
        latency: Inference of one sample with all exits.
        memory_bytes: Peak of a training step, beyond what the process had before: the received state, parameters,
            gradients, momentum, the batch, activations, and the memory of kernels.
        process_bytes: The same with all that the process had before.
        energy_j: Joules of a training step, of the whole machine and with what it takes when idle.
        failed: Why measuring ended early, or "".
    """

    step: Latency | None = None
    latency: Latency | None = None
    memory_bytes: int | None = None
    process_bytes: int | None = None
    energy_j: float | None = None
    failed: str = ""


@dataclass(frozen=True, eq=False)
class ProfileRequest:
    """The level to measure.

    Attributes:
        problem: The spec from which another process rebuilds the problem.
        method: The method's spec, whose loss is trained.
        submodel: The level's sub-model.
        level: Its index, 0 for the smallest.
        classes: Of the data.
        local: Settings of local training.
        batch_size: Samples of a training step.
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads that it computes with.
        most_bytes: Memory that the process may take beyond what it has at its start; None: no limit.
    """

    problem: Mapping[str, Any]
    method: Mapping[str, Any]
    submodel: Submodel
    level: int
    classes: int
    local: Local
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    most_bytes: int | None = None

    def to_json(self, share_s: float, limit_s: float) -> str:
        """Return the request as the process reads it; see `profile_level` for the times."""
        table = {key: value for key, value in vars(self).items() if key not in ("submodel", "local")}
        table |= {"sizes": self.submodel.sizes, "exits": list(self.submodel.exits), "local": self.local.dump()}
        return json.dumps({**table, "share_s": share_s, "end_s": limit_s + _GRACE_S, "at": time.time()})


def profile_level(request: ProfileRequest, share_s: float, limit_s: float) -> Measurement:
    """Measure one level in a process of its own.

    Args:
        request: What to measure.
        share_s: Seconds after which only the required repetitions are made.
        limit_s: Seconds after which the process is ended.

    Returns:
        The costs, and the reason if some are missing.
    """
    path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(request.threads), "PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-m", "fleetfit.training.profiling.process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
        process_group=0,  # a terminal's Ctrl-C goes to this process only
    ) as process:
        try:
            lines, _ = process.communicate(request.to_json(share_s, limit_s), limit_s)
            reason = _describe_exit(process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            lines, _ = process.communicate()
            reason = "the time is over (raise --limit-s)"
        finally:
            process.kill()
    results: dict[str, Any] = {}
    for line in lines.splitlines():
        results |= json.loads(line)
    if results.pop("done", False):
        reason = ""
    for key in results.keys() & {"step", "latency"}:
        results[key] = Latency(**results[key])
    return Measurement(**{"failed": reason, **results})


def _describe_exit(code: int) -> str:
    if code == -9:
        return "its process was killed, probably for lack of memory"
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
