"""Start the process that measures a level, take what it finds, and end it when its time is over."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from fleetfit.submodel import Submodel
from fleetfit.training.profiling.memory import ENVIRONMENT
from fleetfit.training.profiling.steps import Found, Timing
from fleetfit.values import Local

_END_S = 5.0  # a process that nobody ends outlives its time by so much


@dataclass(frozen=True, eq=False)
class ProfileRequest:
    """What is to be measured.

    Attributes:
        problem: The spec from which another process rebuilds the problem.
        method: The method's spec, whose loss is trained.
        piece: The level's sub-model.
        level: Its place, 0 for the smallest.
        classes: Of the data.
        local: Settings of local training.
        batch_size: Samples of a training step.
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads that it computes with.
        most_bytes: The process may take so much more than it has when it begins; None: as much as there is.
    """

    problem: Mapping[str, Any]
    method: Mapping[str, Any]
    piece: Submodel
    level: int
    classes: int
    local: Local
    batch_size: int
    device: str = "cpu"
    threads: int = 1
    most_bytes: int | None = None


def measured(asked: ProfileRequest, share_s: float, most_s: float) -> Found:
    """Measure one level in a process of its own.

    Args:
        asked: What to measure.
        share_s: Seconds after which nothing more is measured than is needed.
        most_s: Seconds after which the process is ended.

    Returns:
        What was found, and why it is not all, if it is not.
    """
    began = time.monotonic()
    with _later() as now, subprocess.Popen(
        [sys.executable, "-m", "fleetfit.training.profiling.process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(asked.threads), text=True, encoding="utf-8",
        process_group=0,  # a terminal's Ctrl-C is for this process alone, also while the other one still imports
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            now()
            _ask(process.stdin, asked, share_s, most_s)
            return _findings(lines, process, began + most_s)
        finally:
            process.kill()
            process.wait()
            reader.join()


@contextlib.contextmanager
def _later() -> Iterator[Callable[[], None]]:
    """Hold a Ctrl-C back until whoever ends the process that is being started knows it, and calls what is given."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield lambda: None
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))

    def now() -> None:
        signal.signal(signal.SIGINT, before)
        if came:
            came.clear()
            signal.raise_signal(signal.SIGINT)

    try:
        yield now
    finally:
        now()


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join([p for p in sys.path if p] + [str(Path.cwd())])
    return {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def _ask(pipe: IO[str], asked: ProfileRequest, share_s: float, most_s: float) -> None:
    nest = {
        **{key: value for key, value in vars(asked).items() if key not in ("piece", "local")},
        "sizes": asked.piece.sizes, "exits": list(asked.piece.exits), "local": asdict(asked.local),
        "share_s": share_s, "end_s": most_s + _END_S, "at": time.time(),
    }  # fmt: skip
    try:
        pipe.write(json.dumps(nest) + "\n")
        pipe.flush()
    except BrokenPipeError:  # it has ended, and why is found out below
        pass


def _read(pipe: IO[str], lines: "queue.Queue[str]") -> None:
    for line in pipe:
        lines.put(line)
    lines.put("")


def _findings(lines: "queue.Queue[str]", process: "subprocess.Popen[str]", until: float) -> Found:
    found = Found()
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return replace(found, failed="the time was over (more is had with --limit-s)")
        if not line:
            return replace(found, failed=_ended(process.wait()))
        told = json.loads(line)
        if "done" in told:
            return found
        for key in told.keys() & {"step", "latency"}:
            told[key] = Timing(**told[key])
        found = replace(found, **told)
        if found.failed:
            return found


def _ended(code: int) -> str:
    """Say how a process ended that has not said it itself."""
    if code == -9:
        return "its process was killed, as it happens where no memory is left"
    return f"its process ended by signal {-code}" if code < 0 else f"its process ended with exit code {code}"
