"""What each technique costs a client: a training step, and the client's whole round, with it against without it.

The client affords the whole model and trains on 64 samples (8 more are held out): two epochs in batches of 16, 8 steps.
That is a short round, so what comes once in a round weighs more here than in most. A step is from one training batch to
the next. Rounds with and without alternate, so that what slows the machine down falls on both.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import Figure, Options, of_many
from benchmarks.random_fleet import CNN, RESNET20, VIT, Kind, make_random_data
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Failure, Job, Update
from fleetfit.rounds import run_round, start
from fleetfit.training import run_job

CLIENTS, SAMPLES, HELD_OUT, EPOCHS = 4, 64, 8, 2
KINDS = {"cnn": CNN, "small ViT": VIT, "resnet20": RESNET20}
Tables = Mapping[str, Any]


@dataclass(frozen=True)
class Technique:
    """A technique as the tables of two run files: with it and without it.

    Attributes:
        name: What it is called.
        method: `[method]` with it.
        without: `[method]` without it.
        local: `[local]` with it.
        only: The models that can have it; all by default.
        each_step: Whether it comes in every step, and not once in a round or an epoch.
    """

    name: str
    method: Tables
    without: Tables
    local: Tables = field(default_factory=dict)
    only: tuple[str, ...] = tuple(KINDS)
    each_step: bool = True


FEDAVG = {"name": "fedavg"}
REEFL = {"name": "reefl", "weight": 0.0}
TECHNIQUES = (
    Technique("three early exits", {"name": "scalefl", "beta": 0.0}, FEDAVG),
    Technique("self-distillation (ScaleFL)", {"name": "scalefl"}, {"name": "scalefl", "beta": 0.0}),
    Technique("mutual distillation (DepthFL)", {"name": "depthfl", "alpha": 0.0, "ramp": 0},
              {"name": "depthfl", "alpha": 0.0, "weight": 0.0}),
    Technique("Ree (ReeFL)", REEFL, {**REEFL, "ree": False}, only=("small ViT",)),
    Technique("the best exit as teacher (ReeFL)", {"name": "reefl", "ramp": 0}, REEFL, only=("small ViT",)),
    Technique("FedDyn", {**FEDAVG, "options": {"feddyn": {"alpha": 0.1}}}, FEDAVG),
    Technique("FedProx", {**FEDAVG, "options": {"fedprox": {"mu": 0.01}}}, FEDAVG),
    Technique("compression to int8", FEDAVG, FEDAVG, {"compress": "int8"}, each_step=False),
    Technique("compression to float16", FEDAVG, FEDAVG, {"compress": "float16"}, each_step=False),
    Technique("early stopping, looking after every epoch", FEDAVG, FEDAVG, {"patience": EPOCHS + 1}, each_step=False),
)  # fmt: skip


def figures(options: Options) -> Iterator[Figure]:
    """Alternate a client's round with and without each technique."""
    for model, kind in list(KINDS.items())[: 2 if options.quick else None]:
        for technique in TECHNIQUES:
            if model in technique.only:
                yield from _compared(model, kind, technique, 2 * options.repetitions)


def _compared(model: str, kind: Kind, technique: Technique, repetitions: int) -> Iterator[Figure]:
    sides = client(kind, technique.method, technique.local), client(kind, technique.without, {})
    pairs = [[work() for work in sides] for _ in range(repetitions + 1)][1:]
    found = (
        {"a step": [[statistics.median(steps) for steps, _ in pair] for pair in pairs]} if technique.each_step else {}
    )
    found["a round"] = [[whole for _, whole in pair] for pair in pairs]
    for what, seconds in found.items():
        mine, plain = (statistics.median(column) * 1e3 for column in zip(*seconds, strict=True))
        yield of_many(_name(model, technique, what), [a / b for a, b in seconds],
                      detail=f"{mine:.2f} ms against {plain:.2f} ms")  # fmt: skip


def _name(model: str, technique: Technique, what: str) -> str:
    return f"{model}, {technique.name}: {what} with it against without"


def table(found: list[Figure]) -> str:
    """Return what each technique adds, a row for each, as a Markdown table."""
    by_name = {figure.name: figure for figure in found}
    columns = [(model, what) for model in KINDS for what in ("a step", "a round")]
    columns = [c for c in columns if any(_name(c[0], t, c[1]) in by_name for t in TECHNIQUES)]
    rows = [["adds to", *(f"{what} of {model}" for model, what in columns)], ["---"] * (1 + len(columns))]
    for technique in TECHNIQUES:
        figures = [by_name.get(_name(model, technique, what)) for model, what in columns]
        if any(figures):
            rows.append([technique.name, *(f"{f.value - 1:+.0%}" if f else "" for f in figures)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("  |", " |")


class TimedData:
    """A client's data that notes when each training batch is taken; without a generator it is no training batch."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.steps: list[float] = []
        self._last: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batch(self, indices: Tensor, rng: torch.Generator | None = None) -> Any:
        """Return the batch; note the CPU seconds since the one before it."""
        now = time.process_time()
        if rng is not None and self._last is not None:
            self.steps.append(now - self._last)
        self._last = None if rng is None else now
        return self._data.batch(indices, rng)


def client(kind: Kind, method: Tables, local: Tables) -> Callable[[], tuple[list[float], float]]:
    """Return what does the round of the client that affords most, with its memory of one before.

    It returns the CPU seconds of each step but the last, and of the round.
    """
    data = make_random_data(kind)
    ends = [CLIENTS * n for n in (SAMPLES, SAMPLES + HELD_OUT, SAMPLES + 2 * HELD_OUT)]
    train, held_out, test = (torch.arange(first, end) for first, end in zip([0, *ends], ends, strict=False))
    splits = {"train": train, "validation": held_out, "test": test}
    budgets = (1.0,) if method["name"] == "fedavg" else (0.25, 0.5, 0.75, 1.0)  # FedAvg's model is what all afford
    assembly = assemble(load_experiment({
        "rounds": 1,
        "model": dict(kind.model),
        "method": dict(method),
        "local": {"optimizer": "sgd", "epochs": EPOCHS, "batch_size": 16, "lr": 0.05, **local},
        "cohort": {"fraction": 1.0},
        "fleet": {"groups": [{"budget": budget} for budget in budgets], "tolerance": 0.3},
    }, data={"name": replace(data, splits=splits), "partition": {"kind": "iid", "clients": CLIENTS}}))  # fmt: skip
    kept = Jobs()
    run_round(assembly.federation, kept, assembly.settings, start(assembly.federation))
    job = max(kept.jobs, key=lambda job: job.level)
    assert assembly.simulation is not None
    simulation = assembly.simulation
    _, memory = _trained(job, simulation.device(job.client))

    def work() -> tuple[list[float], float]:
        device = simulation.device(job.client, memory)
        timed = TimedData(device.data)
        began = time.process_time()
        _trained(job, replace(device, data=timed))
        return timed.steps, time.process_time() - began

    return work


def _trained(job: Job, device: Any) -> tuple[Update, Any]:
    reply, memory = run_job(job, device)
    if isinstance(reply, Failure):
        raise RuntimeError(reply.reason)
    return reply, memory


class Jobs:
    """An engine that keeps the jobs, and does none."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, jobs: Iterator[Job]) -> Iterator[Failure]:
        for job in jobs:
            self.jobs.append(job)
            yield Failure.of(job, "it is done later")

    def commit_memory(self, update: Update) -> None:
        """Nothing comes back."""
