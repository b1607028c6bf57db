"""What a run's levels are as exported files: size, latency of one sample, memory, accuracy; what stopping early saves.

    python -m benchmarks ship runs/ship

Each level is calibrated (budget 0.6 of its last exit's multiply-adds, with temperatures) and exported. One sample at a
time, one thread: all forms of all levels take turns, so that whatever else the machine does falls on all alike; the
figures are the median of 1,000 turns and the distance between its quartiles.
"""

import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fleetfit as ff
from fleetfit.api.inference import prepare_export
from fleetfit.inference.export.onnx import open_session

TURNS, BUDGET = 1000, 0.6
_BATCH = 256
MEMORY = """
import sys
import numpy, onnxruntime

def told(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
x = numpy.load(sys.argv[2])[:1]
open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
before = told("VmRSS")
run = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
for _ in range(20):
    run.run(None, {run.get_inputs()[0].name: x})
print((told("VmHWM") - before) / 1000, told("VmHWM") / 1000)
"""
Work = Callable[[np.ndarray], Any]


def ship(folder: str) -> None:
    """Export every level of a run, measure, and print one Markdown table for the levels and one for the exits."""
    run = ff.load(folder)
    names = [level.name for level in run.assembly.federation.levels]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ship-") as place:
        exports = {name: _exported(run, name, Path(place) / name) for name in names}
        x, y = prepare_export(run, names[-1], None).samples("test", 10**6)
        np.save(Path(place) / "x.npy", x[:256].numpy())
        works = {key: work for name in names for key, work in _works(run, name, Path(place) / name).items()}
        times = quartiles_ms(works, x[:256].numpy())
        memory = {name: _memory(Path(place), name) for name in names}
        stopped = {name: stopping(Path(place) / name, x.numpy(), y.numpy()) for name in names}
    _print_levels(run, names, exports, times, memory)
    _print_stopping(names, times, stopped)


def _exported(run: ff.Run, name: str, out: Path) -> Any:
    if len(run.model(name).exits) > 1:
        costs = run.calibrate(name, budget=1.0).costs
        run.calibrate(name, budget=max(BUDGET, 1.02 * costs[0] / costs[-1]), temperature=True)
    return run.export(out, name, ["int8", "static-int8"])


def _works(run: ff.Run, name: str, out: Path) -> dict[tuple[str, str], Work]:
    module, whole = run.model(name), {}
    data = run.assembly.data
    for form, file in (("float", "model.onnx"), ("int8", "model.int8.onnx"), ("static-int8", "model.static-int8.onnx")):
        opened = open_session(out / file)
        key = opened.get_inputs()[0].name
        whole[form] = lambda x, opened=opened, key=key: opened.run(None, {key: x})
    model = loader(out)
    scale, shift = data.normalization

    def in_pytorch(x: np.ndarray) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(x).float().mul_(scale).add_(shift))

    found: dict[str, Work] = {"pytorch": in_pytorch, **whole}
    found["segments, all"] = lambda x: model.predict(x, stop=False)
    found["segments, stopping"] = lambda x: model.predict(x, stop=True)
    return {(name, form): work for form, work in found.items()}


def loader(out: Path) -> Any:
    return runpy.run_path(str(out / "run.py"))["Model"](out)


def quartiles_ms(
    works: dict[tuple[str, str], Work], x: np.ndarray, turns: int = TURNS
) -> dict[tuple[str, str], np.ndarray]:
    """Return quartiles of the milliseconds of one sample."""
    rows: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for turn in range(-20, turns):
        sample = x[turn % len(x)][None]
        for key, work in works.items():
            began = time.perf_counter()
            work(sample)
            if turn >= 0:
                rows[key].append(1000 * (time.perf_counter() - began))
    return {key: np.quantile(row, (0.25, 0.5, 0.75)) for key, row in rows.items()}


def _memory(place: Path, name: str) -> list[float]:
    """Return how many MB a process grows by at most when it opens and runs the float graph, and its peak (Linux)."""
    given = [sys.executable, "-c", MEMORY, str(place / name / "model.onnx"), str(place / "x.npy")]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    return [float(number) for number in done.stdout.split()]


def stopping(out: Path, x: np.ndarray, y: np.ndarray) -> tuple[float, float, list[float]]:
    """Return accuracy at the last exit and when stopping, and the shares that leave."""
    model = loader(out)
    parts = [x[i : i + _BATCH] for i in range(0, len(x), _BATCH)]
    whole = np.concatenate([model.predict(part, stop=False)[0] for part in parts])
    classes, exits = (
        np.concatenate(found) for found in zip(*(model.predict(p, stop=True) for p in parts), strict=True)
    )
    shares = [float((exits == e).mean()) for e in range(1, int(exits.max()) + 1)]
    return float((whole == y).mean()), float((classes == y).mean()), shares


def _print_levels(run: ff.Run, names: list[str], exports: Any, times: Any, memory: Any) -> None:
    _row(
        "level", "parameters", "form", "kB", "ms (quartiles apart)", "accuracy %", "same answer %", "largest difference"
    )
    _row(*["---"] * 8)
    for name in names:
        size = sum(p.numel() for p in run.model(name).parameters())
        for each in exports[name].variants:
            low, median, high = times[name, each.name]
            took = f"{median:.2f} ({high - low:.2f})"
            right, same = f"{100 * each.accuracies[-1]:.2f}", f"{100 * min(each.agreement):.1f}"
            size_kb, off = f"{each.size_bytes / 1000:.0f}", f"{each.difference:.1e}"
            _row(name, f"{size:,}", each.name, size_kb, took, right, same, off)
    said = "; ".join(f"level {name}: {grown:.1f} of {peak:.0f}" for name, (grown, peak) in memory.items())
    print(f"\nPeak memory to open and run the float graph, MB, of the process's peak: {said}")


def _print_stopping(names: list[str], times: Any, stopped: Any) -> None:
    print()
    _row("level", "whole graph ms", "segments, all ms", "stopping ms", "accuracy % of all", "stopping", "leave %")
    _row(*["---"] * 7)
    for name in names:
        spent = [f"{times[name, form][1]:.2f}" for form in ("float", "segments, all", "segments, stopping")]
        full, when, shares = stopped[name]
        leave = " ".join(f"{100 * share:.0f}" for share in shares)
        _row(name, *spent, f"{100 * full:.2f}", f"{100 * when:.2f}", leave)


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")
