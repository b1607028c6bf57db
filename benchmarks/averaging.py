"""How much of a round averaging takes, and what memory a round takes, as its cohort grows: 10, 100, 1,000 clients.

Averaging is what a round spends in the method's merge and step, without waiting for the updates that it draws.
"""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measuring import Figure, Options, of_many
from benchmarks.random_fleet import CNN, RESNET20, fleet
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, one_round, start
from fleetfit.training.devices import give_back_freed_memory
from fleetfit.values import Federation, Local

COHORTS = (10, 100, 1000)
STEP = Local(lr=0.05, batch_size=16, epochs=1)
CASES = {"cnn on 8x8": (replace(CNN, shape=(1, 8, 8)), COHORTS), "resnet20": (RESNET20, COHORTS[:2])}
"""Small images, for a short step; ResNet-20 with 1,000 clients would take minutes."""


def figures(options: Options) -> Iterator[Figure]:
    """Run rounds in which each client makes one step, so that averaging's share is as large as it can be."""
    for name, (kind, cohorts) in CASES.items():
        for cohort in cohorts:
            federation, simulation = fleet(kind, cohort, cohort, samples=16)
            spent = Spent()
            engine, watched, server = local(simulation), spent.watching(federation), start(federation)
            one_round(watched, engine, Settings(1, STEP), server)
            shares, peaks = [], []
            for _ in range(2 if cohort > 100 else 3 if options.quick else options.repetitions):
                spent.seconds, before = 0.0, resident_bytes(reset=True)
                began = time.process_time()
                one_round(watched, engine, Settings(1, STEP), server)
                shares.append(spent.seconds / (time.process_time() - began))
                peaks.append(resident_bytes(peak=True) - before)
            what = f"{name}, {cohort:,} clients of one step of 16 samples"
            yield of_many(f"{what}: averaging's share of a round", shares)
            yield of_many(f"{what}: memory above what is held between rounds", [p / 1e6 for p in peaks], unit="MB")


class Spent:
    """CPU seconds of merge and step, without those of the updates that they wait for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watching(self, federation: Federation) -> Federation:
        """Return the federation with a method that notes its seconds here."""
        method = federation.method

        def merge(federation: Any, server: Any, updates: Any, weight: Any) -> Any:
            began, self.waited = time.process_time(), 0.0
            found = method.merge(federation, server, self._waiting(updates), weight)
            self.seconds += time.process_time() - began - self.waited
            return found

        def step(*given: Any) -> Any:
            began = time.process_time()
            found = method.step(*given)
            self.seconds += time.process_time() - began
            return found

        return replace(federation, method=replace(method, merge=merge, step=step))

    def _waiting(self, updates: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.process_time()
            update = next(updates, None)
            self.waited += time.process_time() - began
            if update is None:
                return
            yield update


def resident_bytes(peak: bool = False, reset: bool = False) -> int:
    """Return this process's resident bytes, or their peak since the last reset (Linux)."""
    if reset:
        gc.collect()
        give_back_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")
    wanted = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(wanted):
            return int(line.split()[1]) * 1024
    raise OSError("the system does not tell the memory of a process.")
