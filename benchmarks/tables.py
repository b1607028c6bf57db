"""Reading a CSV file of 1,000,000 rows, 15 columns of numbers and 5 of texts, against pyarrow's reader on one thread.

Ours is what the loader of tables does to a file: the layout, the cells, the kind of every column, numbers as float64
and texts as codes. Each reading is a process of its own with the same imports. CPU seconds are those of the reading
alone, and memory is the rise of the process's peak while it reads (Linux).
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.csv

from benchmarks.measuring import Figure, Options, Seconds, Step, alternate, amount, of_many, quotients, shown

READING = """
import json, sys, time
from pathlib import Path
import pyarrow.compute, pyarrow.csv
from fleetfit.data.files.table import detect_columns, read_sheet

def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1000

open("/proc/self/clear_refs", "w").write("5")  # the peak from here on; ru_maxrss has the parent's in it
before, cpu, wall = memory("VmRSS"), time.process_time(), time.perf_counter()
if sys.argv[1] == "ours":
    found = detect_columns(read_sheet(Path(sys.argv[2])))
else:
    found = pyarrow.csv.read_csv(sys.argv[2], pyarrow.csv.ReadOptions(use_threads=False))
print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, memory("VmHWM") - before]))
"""


def figures(options: Options) -> Iterator[Figure]:
    """Read one file in turn by both."""
    rows = 100_000 if options.quick else 1_000_000
    memory: dict[str, list[float]] = {"ours": [], "pyarrow": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.csv"
        write_table(path, rows)
        repetitions = max(3, options.repetitions // 2)
        pairs = list(alternate(*(_reading(side, path, memory) for side in memory), repetitions))
        size = path.stat().st_size / 1e6
    cpu = [seconds for seconds, _ in pairs]
    ours, theirs = (float(np.median(column)) for column in zip(*cpu, strict=True))
    detail = f"{shown(ours)} s against {shown(theirs)} s; {rows:,} rows, {size:,.0f} MB"
    name = "a CSV of 15 columns of numbers and 5 of texts, against pyarrow on one thread"
    yield of_many(f"{name}, CPU", quotients(cpu), wanted=3, detail=detail)
    growth = list(zip(memory["ours"], memory["pyarrow"], strict=True))
    ours, theirs = (float(np.median(column)) for column in zip(*growth, strict=True))
    yield of_many(f"{name}, peak memory", quotients(growth), wanted=2,
                  detail=f"{shown(ours)} MB against {shown(theirs)} MB")  # fmt: skip
    yield amount("CPU microseconds for each row", 1e6 * min(seconds for seconds, _ in cpu) / rows, "us")


def write_table(path: Path, rows: int) -> None:
    """Write measurements, counts with gaps, categories, and texts of which nearly every one is different."""
    rng = np.random.default_rng(0)
    columns = {f"measure{i}": rng.standard_normal(rows).round(6) for i in range(10)}
    columns |= {
        f"count{i}": pyarrow.array(rng.integers(0, 10_000, rows), mask=rng.random(rows) < 0.02) for i in range(5)
    }
    words = np.array([f"{a}{b}" for a in ("north", "south", "east", "west") for b in range(250)])
    for i, kinds in enumerate((2, 20, 300, 1000)):
        columns[f"category{i}"] = words[rng.integers(0, kinds, rows)]
    columns["remark"] = np.char.add("device ", rng.integers(0, 1 << 30, rows).astype(str))
    pyarrow.csv.write_csv(pyarrow.table(columns), path)


def _reading(side: str, path: Path, memory: dict[str, list[float]]) -> Step:
    def read() -> Seconds:
        command = [sys.executable, "-c", READING, side, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        cpu, wall, grown = json.loads(done.stdout)
        memory[side].append(grown)
        return Seconds(cpu, wall)

    return read
