"""Made-up samples of a problem: for whatever asks what a model costs, and not what it learns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from fleetfit.data import Data
from fleetfit.errors import RunError
from fleetfit.layout import State, build_module, named_tensors, some_input
from fleetfit.seeds import isolate_rng
from fleetfit.submodel import Submodel
from fleetfit.training.job import run_job
from fleetfit.values import Device, Failure, Job, Problem

# ---- what was found out about a level ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """How long something takes.

    Attributes:
        median_s: The median in seconds.
        spread_s: Between the quartiles.
        count: How many times it was done.
    """

    median_s: float
    spread_s: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> "Timing":
        """Return the timing of so many times."""
        low, median, high = np.quantile(np.asarray(seconds), (0.25, 0.5, 0.75)).tolist()
        return Timing(median, high - low, len(seconds))


@dataclass(frozen=True)
class Found:
    """What was measured of a level; None: that was not measured.

    Attributes:
        step: A training step of one batch.
        latency: Inference of one sample with all exits.
        memory_bytes: Peak of a training step, beyond what the process had before: the state as it was received,
            parameters, gradients, momentum, the batch, activations, and what kernels take.
        process_bytes: The same with all that the process had before.
        energy_j: Joules of a training step; the machine's own, so nothing of what it takes when idle is left out.
        failed: Why measuring ended early, or "".
    """

    step: Timing | None = None
    latency: Timing | None = None
    memory_bytes: int | None = None
    process_bytes: int | None = None
    energy_j: float | None = None
    failed: str = ""


# ---- training steps with a stopwatch: the local training loop of every run, on samples that look at the clock ------

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
    with isolate_rng(torch.device("cpu")):
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


def random_data(problem: Problem, classes: int, samples: int, rng: torch.Generator) -> Data:
    """Return random training samples with labels of the problem's task.

    Args:
        problem: Says what a sample is, and which task its labels belong to.
        classes: Classes; of tokens to predict, of regression targets, of labels.
        samples: How many (N).
        rng: Draws them.

    Returns:
        x, float32 [N, ...] or int64 tokens [N, L], and y as `fleetfit.Data` says for the task; all of it is "train".
    """
    x = some_input(problem.architecture, problem.input_shape, samples, rng)
    labels = {
        "classification": lambda: torch.randint(classes, (samples,), generator=rng),
        "next_token": lambda: torch.randint(classes, tuple(x.shape), generator=rng),
        "regression": lambda: torch.randn(samples, classes, generator=rng),
        "multi_label": lambda: torch.randint(2, (samples, classes), generator=rng).float(),
    }
    y, splits = labels[problem.task.name](), {"train": torch.arange(samples)}
    tokens = getattr(problem.architecture, "tokens", 0)
    return Data("random", x, y, splits, classes, task=problem.task.name, vocabulary=tokens)
