"""Training steps with a stopwatch: the local training of every run, on random samples that report each step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fleetfit.anatomy import State, build_module, make_input, named_tensors
from fleetfit.core import Device, Failure, Job, Problem
from fleetfit.data import Data
from fleetfit.errors import RunError
from fleetfit.seeds import isolate_rng
from fleetfit.submodel import Submodel
from fleetfit.training.job import run_job

_ENDLESS = 10**9  # epochs; `EnoughSteps` ends them


class EnoughSteps(BaseException):
    """Ends a training; no job takes it for a failure."""


@dataclass(frozen=True, eq=False, repr=False)
class WatchedData(Data):
    """Data that call a function before each batch, when the step before it has ended."""

    before_step: Callable[[], None] = lambda: None

    def batch(self, indices: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Call the function, then return the batch."""
        self.before_step()
        return super().batch(indices, rng)


def train_until(job: Job, problem: Problem, data: Data, accelerator: torch.device, watch: Callable[[], None]) -> None:
    """Run a job's training until `watch` ends it.

    Args:
        job: The training; its epochs are ignored.
        problem: The model and its task.
        data: The training data.
        accelerator: Where.
        watch: Called before every step, once the step before has ended; raises `EnoughSteps`.

    Raises:
        RunError: The training failed; the message is the reason.
    """

    def before_step() -> None:
        if accelerator.type == "cuda":
            torch.cuda.synchronize(accelerator)
        watch()

    watched = WatchedData(**{f.name: getattr(data, f.name) for f in fields(Data) if f.init}, before_step=before_step)
    device = Device(problem, watched.to(accelerator), accelerator=accelerator)
    try:
        reply, _ = run_job(replace(job, local=job.local.replace(epochs=_ENDLESS)), device)
    except EnoughSteps:
        return
    raise RunError(reply.reason if isinstance(reply, Failure) else "the training ended by itself")


def stop_after(steps: int) -> Callable[[], None]:
    """Return a watch that ends a training after a number of steps."""
    left = iter(range(steps))

    def watch() -> None:
        if next(left, None) is None:
            raise EnoughSteps

    return watch


class Stopwatch:
    """A watch that times steps after a warm-up: a few at least, then until its time is over.

    Attributes:
        seconds: Of each timed step.
        energy_j: Joules of all of them, or None.
    """

    def __init__(
        self, until: float, read_joules: Callable[[], float] | None, fewest: int = 3, most: int = 200, warm_up: int = 2
    ) -> None:
        """Time steps until a value of `time.perf_counter`, with the energy of `read_joules`."""
        self.seconds: list[float] = []
        self.energy_j: float | None = None
        self._until, self._read_joules, self._fewest, self._most = until, read_joules, fewest, most
        self._warm_up = warm_up
        self._step_began: float | None = None
        self._last_reading = self._first_j = 0.0

    def __call__(self) -> None:
        """Record the end of a step.

        Raises:
            EnoughSteps: No more steps are needed.
        """
        now = time.perf_counter()
        if self._warm_up > 0:
            self._warm_up -= 1
            return
        if self._step_began is not None:
            self.seconds.append(now - self._step_began)
        done = len(self.seconds)
        ends = done >= self._most or (done >= self._fewest and now >= self._until)
        if self._read_joules is not None:
            if self._step_began is None:
                self._first_j, self._last_reading = self._read_joules(), now
            elif ends:
                self.energy_j = self._read_joules() - self._first_j
            elif now - self._last_reading > 0.1:  # ten times a second
                self._read_joules()
                self._last_reading = now
        if ends:
            raise EnoughSteps
        self._step_began = time.perf_counter()


def draw_state(problem: Problem, submodel: Submodel) -> State:
    """Return a sub-model's state from its own initialization, without building the full model."""
    layout = problem.layout
    with isolate_rng(torch.device("cpu")):
        module = build_module(problem.architecture, {**layout.full_sizes, **submodel.sizes}, submodel.exits)
    tensors = {name: tensor.detach() for name, tensor, _ in named_tensors(module)}
    return {name: tensors[name] for name in layout.shapes(submodel.sizes, submodel.exits)}


def make_random_data(problem: Problem, classes: int, samples: int, rng: torch.Generator) -> Data:
    """Return random training samples with labels of the problem's task.

    Args:
        problem: Defines the shape of a sample and the task.
        classes: Classes; of tokens to predict, of regression targets, of labels.
        samples: Number of samples (N).
        rng: Draws them.

    Returns:
        x, float32 [N, ...] or int64 tokens [N, L], and y as `fleetfit.Data` has it for the task; all of it is "train".
    """
    x = make_input(problem.architecture, problem.input_shape, samples, rng)
    labels = {
        "classification": lambda: torch.randint(classes, (samples,), generator=rng),
        "next_token": lambda: torch.randint(classes, tuple(x.shape), generator=rng),
        "regression": lambda: torch.randn(samples, classes, generator=rng),
        "multi_label": lambda: torch.randint(2, (samples, classes), generator=rng).float(),
    }
    y, splits = labels[problem.task.name](), {"train": torch.arange(samples)}
    tokens = getattr(problem.architecture, "tokens", 0)
    return Data("random", x, y, splits, classes, task=problem.task.name, vocabulary=tokens)
