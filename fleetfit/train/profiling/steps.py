"""Training steps with a stopwatch: the local training loop of every run, on samples that look at the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fleetfit.data import Data
from fleetfit.errors import RunError
from fleetfit.layout import State, build_module, named_tensors
from fleetfit.seeds import own_randomness
from fleetfit.submodel import Submodel
from fleetfit.train.job import run_job
from fleetfit.values import Device, Failure, Job, Problem

_FOR_EVER = 10**9  # epochs; the watch says when to stop


class Enough(Exception):
    """Ends a training from within."""


def _ignored() -> None:
    return


@dataclass(frozen=True, eq=False, repr=False)
class Watched(Data):
    """Data that tell when a batch is asked for, which is when the step before it has ended."""

    watch: Callable[[], None] = _ignored

    def batch(self, indices: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Tell it, then return the batch."""
        self.watch()
        return super().batch(indices, rng)


def drawn(problem: Problem, piece: Submodel) -> State:
    """Return a sub-model's state as its own initialisation draws it, without ever holding the full model's."""
    layout = problem.layout
    with own_randomness(torch.device("cpu")):
        module = build_module(problem.architecture, {**layout.full_sizes, **piece.sizes}, piece.exits)
    found = {name: tensor.detach() for name, tensor, _ in named_tensors(module)}
    return {name: found[name] for name in layout.shapes(piece.sizes, piece.exits)}


def train(job: Job, problem: Problem, data: Data, accelerator: torch.device, watch: Callable[[], None]) -> None:
    """Run a job's training until the watch has had enough.

    Args:
        job: The training; its epochs do not matter.
        problem: What is trained.
        data: On what.
        accelerator: Where.
        watch: Called before every step, when all that came before is done; raises `Enough`.

    Raises:
        RunError: The training failed; the message is the reason.
    """

    def wait_and_watch() -> None:
        if accelerator.type == "cuda":
            torch.cuda.synchronize(accelerator)
        watch()

    watched = Watched(**{f.name: getattr(data, f.name) for f in fields(Data) if f.init}, watch=wait_and_watch)
    device = Device(problem, watched.to(accelerator), accelerator=accelerator)
    try:
        reply, _ = run_job(replace(job, local=replace(job.local, epochs=_FOR_EVER)), device)
    except Enough:
        return
    raise RunError(reply.reason if isinstance(reply, Failure) else "the training ended by itself")


def after(steps: int) -> Callable[[], None]:
    """Return a watch that has enough after so many steps."""
    left = iter(range(steps))

    def watch() -> None:
        if next(left, None) is None:
            raise Enough

    return watch


class Stopwatch:
    """A watch that notes when steps end: some to warm up, then at least a few, then until the time is over.

    Attributes:
        seconds: Of each step that counts.
        energy_j: Joules of all of them.
    """

    def __init__(
        self, until: float, joules: Callable[[], float] | None, fewest: int = 3, most: int = 200, warm_up: int = 2
    ) -> None:
        """Take when to stop by `time.perf_counter`, and what tells energy."""
        self.seconds: list[float] = []
        self.energy_j: float | None = None
        self._until, self._joules, self._fewest, self._most = until, joules, fewest, most
        self._before = warm_up
        self._last: float | None = None
        self._looked = self._first_j = 0.0

    def __call__(self) -> None:
        """Note that a step has ended.

        Raises:
            Enough: There are enough.
        """
        now = time.perf_counter()
        if self._before > 0:
            self._before -= 1
            return
        if self._last is not None:
            self.seconds.append(now - self._last)
        done = len(self.seconds)
        end = done >= self._most or (done >= self._fewest and now >= self._until)
        self._read(now, end)
        if end:
            raise Enough
        self._last = time.perf_counter()

    def _read(self, now: float, end: bool) -> None:
        """Look at the energy at the beginning, at the end, and ten times a second."""
        if self._joules is None:
            return
        if self._last is None:
            self._first_j, self._looked = self._joules(), now
        elif end:
            self.energy_j = self._joules() - self._first_j
        elif now - self._looked > 0.1:
            self._joules()
            self._looked = now
