"""Run a command and watch its whole tree of processes: CPU seconds at the end of each round, and memory (Linux).

The watching is done by a process of its own, so that every process that descends from it is the command's, orphans too.
"""

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

_SUBREAPER = 36  # of prctl: orphans of our children become our children
LIMIT_S = 600.0


@dataclass
class Seen:
    """What a command took.

    Attributes:
        rounds: CPU and wall seconds since the start, at the end of each round.
        peak_bytes: The largest sum of resident bytes over its processes; what they share counts in each.
        error: Why it failed, or "".
    """

    rounds: list[tuple[float, float]] = field(default_factory=list)
    peak_bytes: int = 0
    error: str = ""

    def per_round(self, last: int) -> tuple[float, float]:
        """Return CPU and wall seconds of a round: of those after the first, up to the `last`."""
        (cpu, wall), (end_cpu, end_wall) = self.rounds[0], self.rounds[last - 1]
        return (end_cpu - cpu) / (last - 1), (end_wall - wall) / (last - 1)

    def start(self, last: int) -> tuple[float, float]:
        """Return CPU and wall seconds until the first round, as those of its end less those of a round."""
        cpu, wall = self.per_round(last)
        return self.rounds[0][0] - cpu, self.rounds[0][1] - wall


class Tree:
    """The processes that descend from this one, orphans too."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        self._before = _reaped_s()

    def cpu_s(self) -> float:
        """Return the CPU seconds of all of them since the beginning, those that have ended included."""
        total = _reaped_s() - self._before
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def resident_bytes(self) -> int:
        """Return the sum of their resident bytes."""
        total = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def end(self) -> None:
        """End what is left of them, and reap it."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _reaped_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def observe(command: list[str], place: Path) -> Seen:
    """Run a command, which writes a byte into the file descriptor `ROUNDS_FD` at the end of each round.

    Raises:
        RuntimeError: It failed, or took longer than the limit.
    """
    watcher = [sys.executable, __file__, str(place), *command]
    done = subprocess.run(watcher, stdout=subprocess.PIPE, text=True, check=True)
    seen = Seen(**json.loads(done.stdout))
    if seen.error:
        raise RuntimeError(f"{Path(command[1]).name} {seen.error}")
    return seen


def watched(command: list[str], place: Path) -> Seen:
    """Do the watching; all processes that descend from this one are taken for the command's, and ended."""
    reading, writing = os.pipe()
    seen, tree, began = Seen(), Tree(), time.perf_counter()
    env = {**os.environ, "ROUNDS_FD": str(writing), "OMP_NUM_THREADS": "1"}
    log = place / "output.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=place, env=env, pass_fds=(writing,), stdout=output, stderr=output,
                                   stdin=subprocess.DEVNULL)  # fmt: skip
    os.close(writing)

    def follow() -> None:
        while os.read(reading, 1):
            seen.rounds.append((tree.cpu_s(), time.perf_counter() - began))

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    while process.poll() is None and not seen.error:
        seen.peak_bytes = max(seen.peak_bytes, tree.resident_bytes())
        if time.perf_counter() - began > LIMIT_S:
            seen.error = f"took longer than {LIMIT_S:.0f} s"
        time.sleep(0.2)
    if process.returncode:
        seen.error = f"exited with {process.returncode}: ...{log.read_text(errors='replace')[-2000:]}"
    tree.end()
    follower.join()  # nobody is left who could write
    return seen


if __name__ == "__main__":
    print(json.dumps(asdict(watched(sys.argv[2:], Path(sys.argv[1])))))
