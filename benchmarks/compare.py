"""`fleetfit compare --jobs 2` against one run at a time, from beginning to end: wall seconds, and all CPU seconds."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import Figure, Options, Seconds, alternate, of_many, quotients, shown
from fleetfit.api.comparison import compare

FILE = """
rounds = {rounds}
data = {{ name = "digits", partition = {{ kind = "iid", clients = 8 }} }}
method.name = "scalefl"
evaluate.every = 0
[compare.grid]
seed = [0, 1]
"""


def figures(options: Options) -> Iterator[Figure]:
    """Compare two seeds of ScaleFL on digits, long enough that the start of the processes counts little."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "two.toml").write_text(FILE.format(rounds=40 if options.quick else 150))
        done = 0

        def compared(jobs: int) -> Seconds:
            nonlocal done
            done += 1
            cpu, wall = _cpu_s(), time.perf_counter()
            compare(place / "two.toml", out=place / str(done), jobs=jobs)
            return Seconds(_cpu_s() - cpu, time.perf_counter() - wall)

        pairs = list(alternate(lambda: compared(1), lambda: compared(2), max(1, options.repetitions // 3)))
        for clock, column, wanted in (("wall", 1, 1.9), ("CPU", 0, None)):
            values = [pair[column] for pair in pairs]
            detail = f"{shown(values[-1][0])} s against {shown(values[-1][1])} s"
            yield of_many(f"two runs of the small CNN on digits, one at a time against --jobs 2, {clock}",
                          quotients(values), detail=detail, better="higher", wanted=wanted)  # fmt: skip


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
