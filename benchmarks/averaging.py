"""How much of a round averaging takes, and what memory a round takes, as its cohort grows: 10, 100, 1,000 clients.

Averaging is what a round spends on the method's aggregator and step, in CPU seconds.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.measuring import Figure, Options, of_many
from benchmarks.random_fleet import CNN, RESNET20, fleet
from fleetfit.core import Local
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, run_round, start
from fleetfit.rounds.timekeeper import Timekeeper
from fleetfit.training.runtime import trim_heap

COHORTS = (10, 100, 1000)
STEP = Local(lr=0.05, batch_size=16, epochs=1)
CASES = {"cnn on 8x8": (replace(CNN, shape=(1, 8, 8)), COHORTS), "resnet20": (RESNET20, COHORTS[:2])}
"""Small images, for a short step; ResNet-20 with 1,000 clients would take minutes."""


def figures(options: Options) -> Iterator[Figure]:
    """Run rounds in which each client makes one step, so that averaging's share is as large as it can be."""
    for name, (kind, cohorts) in CASES.items():
        for cohort in cohorts:
            federation, simulation = fleet(kind, cohort, cohort, samples=16)
            timer = Timekeeper(time.process_time)
            engine, server = local(simulation), start(federation)
            run_round(federation, engine, Settings(1, STEP), server, timer)
            shares, peaks = [], []
            for _ in range(2 if cohort > 100 else 3 if options.quick else options.repetitions):
                timer.read()
                before, began = resident_bytes(reset=True), time.process_time()
                run_round(federation, engine, Settings(1, STEP), server, timer)
                shares.append(timer.read()["averaging"] / (time.process_time() - began))
                peaks.append(resident_bytes(peak=True) - before)
            what = f"{name}, {cohort:,} clients of one step of 16 samples"
            yield of_many(f"{what}: averaging's share of a round", shares)
            yield of_many(f"{what}: memory above what is held between rounds", [p / 1e6 for p in peaks], unit="MB")


def resident_bytes(peak: bool = False, reset: bool = False) -> int:
    """Return this process's resident bytes, or their peak since the last reset (Linux)."""
    if reset:
        gc.collect()
        trim_heap()
        Path("/proc/self/clear_refs").write_text("5")
    wanted = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not tell the memory of a process.")
