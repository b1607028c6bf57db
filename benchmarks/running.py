"""Run parts one after the other, print each figure as it comes and one Markdown table at the end."""

import importlib
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import written
from benchmarks.machine import Watch, described, processor
from benchmarks.measuring import Figure, Options, shown
from fleetfit.machine import available_cores
from fleetfit.training.runtime import keep_freed_memory


@dataclass
class Measured:
    """What a part found.

    Attributes:
        part: Its name.
        figures: In the order in which they came.
        seconds: How long it took.
        machine: "quiet", or how busy others kept the machine.
        error: Why it ended early, or "".
    """

    part: str
    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0
    machine: str = ""
    error: str = ""


def run(parts: list[str], repetitions: int | None, quick: bool, check: bool, write: bool) -> int:
    """Run the parts and print the table; return the exit code: 1 where a part failed, or a check did."""
    torch.set_num_threads(1)
    keep_freed_memory()
    options = Options(repetitions or (5 if quick else 9), quick)
    known = written.read() if check else {}
    if check and not (parts := [part for part in parts if part in known]):
        print(f"bench-check: {written.FILE.name} has no figure of these parts; write them with --write.")
        return 1
    found = [_measured(part, options) for part in parts]
    print(f"\n{described()}; {time.strftime('%Y-%m-%d')}\n\n{table(found)}")
    for each in found:
        if each.figures and (own := getattr(_module(each.part), "table", None)):
            print(f"\n{own(each.figures)}")
    failed = [each for each in found if each.error]
    for each in failed:
        print(f"\n{each.part} failed: {each.error}")
    if write:
        for each in found:
            if not each.error:
                written.write(each.part, each.figures, f"{available_cores()} cores of {processor()}, {each.machine}")
        print(f"\nwritten down: {written.FILE}")
    if check:
        complaints, notes = written.compared({each.part: each.figures for each in found}, known, processor())
        print("\n".join(["", *(f"bench-check: {line}" for line in [*notes, *complaints])]))
        print(f"bench-check: {'FAILED' if complaints else 'passed'}")
        return 1 if complaints or failed else 0
    return 1 if failed else 0


def _measured(part: str, options: Options) -> Measured:
    """Run one part; an error in it does not take the figures of others with it."""
    found, watch, began = Measured(part), Watch(), time.perf_counter()
    try:
        for figure in _figures(part, options):
            found.figures.append(figure)
            print(f"{part}: {figure.line}", file=sys.stderr, flush=True)
    except Exception as error:
        traceback.print_exc()
        found.error = f"{type(error).__name__}: {error}"
    found.seconds, found.machine = time.perf_counter() - began, watch.verdict()
    print(f"{part}: {found.seconds:.0f} s, machine {found.machine}", file=sys.stderr, flush=True)
    return found


def _figures(part: str, options: Options) -> Iterator[Figure]:
    return _module(part).figures(options)


def _module(part: str) -> Any:
    return importlib.import_module(f"benchmarks.{part}")


def table(found: list[Measured]) -> str:
    """Return the figures as a Markdown table."""
    rows = ["| part | what | median | range | n | wanted | machine | more |", "|" + " --- |" * 8]
    for each in found:
        for f in each.figures:
            spread = f"{shown(f.low)}-{shown(f.high)}" if f.repetitions > 1 else ""
            cells = (each.part, f.name, f.text, spread, str(f.repetitions), f.target, each.machine, f.detail)
            rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(rows).replace("  |", " |")
