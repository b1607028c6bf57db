"""The same task on Flower's simulation, on pfl-research, and in a papers' loop: CPU seconds per round, start, memory.

FedAvg with one thread each: small CNN on the digits (40 clients of 32 samples, 8 in a round, five epochs in batches of
16), small CNN on images of 28x28 and ResNet-20 of 32x32 (100 clients of 100 and of 40 samples, 10 in a round, one epoch
in batches of 20). Every side runs in a process of its own and they take turns. A round is the mean of those after the
first; what comes before is the start. The loop evaluates every client after each round, as the papers' repositories do,
so it is compared with a run that evaluates by default, to its end; both have as many rounds as a default run, because
evaluation at the end weighs more the fewer there are. `make peers-env` installs pfl beside the package; without it,
Flower and the loop are compared.
"""

import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.measuring import Figure, Options, of_many, shown
from benchmarks.peers.observed import Seen, observe
from benchmarks.peers.task import Loaded, Task, make

HERE = Path(__file__).parent
APART = HERE.parents[1] / ".venv-peers" / "bin" / "python"
TASKS = {
    "cnn on digits": Task(
        "cnn", channels=1, side=8, samples=32, rounds=14, clients=40, cohort=8, batch_size=16, epochs=5, digits=True
    ),
    "cnn": Task("cnn", channels=1, side=28, samples=100, rounds=12),
    "resnet20": Task("resnet20", channels=3, side=32, samples=40, rounds=7),
}
WANTED = {
    "cnn on digits": {"Flower": 2.2},
    "cnn": {"Flower": 1.85, "pfl": 1.25, "papers' loop": 1.6},
    "resnet20": {"Flower": 1.85, "pfl": 1.2, "papers' loop": 1.8},
}
"""At least, by task."""
ALIKE, LEARNED = 0.15, 0.5
"""By how much accuracies on the test samples may differ, and what all must reach: so few rounds depend on the seed."""
OURS, PARALLEL = "exact", "exact, two processes"
EVALUATED, LOOP = "exact, evaluated", "papers' loop"
EVALUATED_ROUNDS = 30
"""As many as a default run has."""
ROUND, START, MEMORY = "a round", "start", "peak memory of all processes"


@dataclass(frozen=True)
class Turn:
    """What one side took in one turn, in CPU and wall seconds.

    Attributes:
        round: Of a round.
        start: Until the first round.
        peak_mb: Resident at once, summed over its processes.
        accuracy: Of the trained model.
    """

    round: tuple[float, float]
    start: tuple[float, float]
    peak_mb: float
    accuracy: float


def sides() -> dict[str, list[str]]:
    """Return the command of each side, without the folder; pfl only where it is installed."""
    found = {
        OURS: [sys.executable, "with_fleetfit.py", "local"],
        PARALLEL: [sys.executable, "with_fleetfit.py", "processes"],
        EVALUATED: [sys.executable, "with_fleetfit.py", "local", "auto"],
        LOOP: [sys.executable, "with_loop.py"],
        **({"Flower": [sys.executable, "with_flower.py"]} if importlib.util.find_spec("flwr") else {}),
    }
    if importlib.util.find_spec("blazefl"):  # it needs Python 3.12 or newer
        found["BlazeFL"] = [sys.executable, "with_blazefl.py"]
    python = sys.executable if importlib.util.find_spec("pfl") else str(APART) if APART.exists() else None
    if python is None:
        print("peers: pfl is not installed, so it is left out; see `make peers-env`", file=sys.stderr)
        return found
    return {**found, "pfl": [python, "with_pfl.py"]}


def figures(options: Options) -> Iterator[Figure]:
    """Let the sides take turns on each task."""
    for name, task in TASKS.items():
        turns: dict[str, list[Turn]] = {side: [] for side in sides()}
        for seed in range(2 if options.quick else min(options.repetitions, 5)):
            for side, command in sides().items():
                if side in (EVALUATED, LOOP):
                    run = replace(task, seed=seed, rounds=EVALUATED_ROUNDS)
                    turns[side].append(measured(command, run, run.rounds))
                else:  # without the last round, in which FleetFit evaluates
                    turns[side].append(measured(command, replace(task, seed=seed), task.rounds - 1))
                print(f"peers: {name}, {side}: {turns[side][-1]}", file=sys.stderr, flush=True)
        evaluated = {side: own for side, own in turns.items() if side in (EVALUATED, LOOP)}
        for alike in (evaluated, {side: own for side, own in turns.items() if side not in evaluated}):
            check_alike(name, alike)
        yield from compared(name, turns)


def table(found: list[Figure]) -> str:
    """Return what each side takes, as a Markdown table."""
    by_name = {figure.name: figure for figure in found}
    rows = ["| task | side | a round, CPU s | on the clock, s; accuracy | start, CPU s | on the clock | peak memory |",
            "|" + " --- |" * 7]  # fmt: skip
    for name in TASKS:
        for side in (OURS, PARALLEL, EVALUATED, LOOP, "Flower", "pfl", "BlazeFL"):
            three = [by_name.get(f"{name}, {side}: {what}") for what in (ROUND, START, MEMORY)]
            if all(three):
                a, b, c = (figure for figure in three if figure)
                cells = (name, side, shown(a.value), a.detail, shown(b.value), b.detail, c.text)
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def measured(command: list[str], task: Task, last: int) -> Turn:
    """Run one side once; its rounds are counted up to the `last`."""
    with tempfile.TemporaryDirectory(prefix="peers-") as place:
        folder = Path(place)
        make(task, folder)
        python, script, *more = command
        seen: Seen = observe([python, str(HERE / script), str(folder), *more], folder)
        if len(seen.rounds) != task.rounds:
            raise RuntimeError(f"{script} told of {len(seen.rounds)} rounds instead of {task.rounds}")
        return Turn(seen.per_round(last), seen.start(last), seen.peak_bytes / 1e6,
                    Loaded(folder).accuracy(folder / "last.npz"))  # fmt: skip


def check_alike(name: str, turns: dict[str, list[Turn]]) -> None:
    """Refuse sides that do not learn the same: then they do not do the same.

    Raises:
        RuntimeError: Mean accuracies are further apart than `ALIKE`, or one has learned too little.
    """
    found = {side: statistics.mean(turn.accuracy for turn in own) for side, own in turns.items()}
    if max(found.values()) - min(found.values()) > ALIKE or min(found.values()) < LEARNED:
        raise RuntimeError(f"{name}: the sides do not learn alike: {found}")


def compared(name: str, turns: dict[str, list[Turn]]) -> Iterator[Figure]:
    """Yield ratios to ours, and what each side takes."""
    for side, own in turns.items():
        if side in (OURS, PARALLEL, EVALUATED):
            continue
        ours = turns[EVALUATED if side == LOOP else OURS]
        cpu, wall = ([other.round[clock] / mine.round[clock] for other, mine in zip(own, ours, strict=True)]
                     for clock in (0, 1))  # fmt: skip
        what, wanted = f"{name}, {side} against exact, CPU seconds of a round", WANTED[name].get(side)
        yield of_many(what, cpu, better="higher", wanted=wanted, detail=f"wall {statistics.median(wall):.2f}")
    for side, own in turns.items():
        accuracy = statistics.mean(turn.accuracy for turn in own)
        wall_s = statistics.median(turn.round[1] for turn in own)
        start_s = statistics.median(turn.start[1] for turn in own)
        yield of_many(f"{name}, {side}: {ROUND}", [turn.round[0] for turn in own], unit="CPU s",
                      detail=f"{wall_s:.2f} s on the clock; accuracy {accuracy:.3f}")  # fmt: skip
        yield of_many(f"{name}, {side}: {START}", [turn.start[0] for turn in own], unit="CPU s",
                      detail=f"{start_s:.1f} s on the clock")  # fmt: skip
        yield of_many(f"{name}, {side}: {MEMORY}", [turn.peak_mb for turn in own], unit="MB")
