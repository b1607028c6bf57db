"""`fleetfit compare --jobs 2` against one run at a time, from beginning to end, in wall seconds."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import Figure, Options, ratio
from fleetfit.api import compare

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

        def compared(jobs: int) -> None:
            nonlocal done
            done += 1
            compare(place / "two.toml", out=place / str(done), jobs=jobs)

        yield ratio("two runs of the small CNN on digits, one at a time against --jobs 2, wall",
                    lambda: compared(1), lambda: compared(2), max(1, options.repetitions // 3), clock="wall",
                    better="higher", wanted=1.9)  # fmt: skip
