"""FedDF: width only, and the server distills what it received into the global model (Lin et al., NeurIPS 2020).

Levels and clients are those of `heterofl` without its options. The student starts from each round's coverage mean, and
all received models teach it on unlabeled data (`[data] server`): the loss on a batch is
KL(softmax(mean_k teacher_k(x) / T) || softmax(student(x) / T)) T^2, minimized with Adam along a cosine, gradients cut
at norm 5. The state with the least divergence on held-out data is kept; it may be the mean itself.
Distillation is part of the aggregation: options that optimize on the server start from its result.

The server holds all models of a round at once, cohort x model, and a step costs a forward pass of each of them.

Differs from the paper: it has one student per architecture; here the levels' models are parts of one model, so each
level's model is a student and their losses are averaged. Distilling the full model alone makes the others worse
(docs/methods.md has the numbers). Stopping early looks at the divergence from the teachers, not at the accuracy on
labeled data: there are no labels. Batch norm uses each batch's own statistics, in teachers and students, since no
running statistics are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.aggregate import Aggregate, apply_mean
from fleetfit.anatomy import outputs
from fleetfit.core import Device, Federation, Job, Local, Server, Update
from fleetfit.core.tasks import NOT_SCORED
from fleetfit.errors import ConfigError, check_range
from fleetfit.factories import declare_unused
from fleetfit.hooks import CoverageMean, Method, weigh_equally
from fleetfit.hooks.levels import split_levels
from fleetfit.hooks.losses import declare_temperature
from fleetfit.seeds import derive_seed
from fleetfit.submodel import FlatState, Submodel, concat_state, full_submodel, get_shapes
from fleetfit.training import SharedSubmodel, get_local_model, iter_batches, run_on_server

CLIP_NORM = 5.0


@declare_temperature
@declare_unused(
    *("temperature", "lr", "batch_size", "check_every", "patience"),
    when=lambda values: values["steps"] == 0,
    reason="steps = 0 leaves the mean as it is",
)
def feddf(
    steps: int = 10_000,
    temperature: float = 1.0,
    lr: float = 1e-3,
    batch_size: int = 64,
    check_every: int = 100,
    patience: int = 10,
) -> Method:
    """Make the method.

    Args:
        steps: Steps of distillation after each round, at most; 0 leaves the mean as it is, which is HeteroFL.
        temperature: Softens the distributions that are compared.
        lr: Adam's learning rate at the first step.
        batch_size: Unlabeled samples per step.
        check_every: Steps between two looks at the held-out part of the server's data.
        patience: Looks without a lower divergence after which it stops; 10 are the paper's 1,000 steps.
    """
    check_range("temperature", temperature, 0)
    check_range("steps", steps, 0, closed=True)
    check_range("lr", lr, 0)
    for name, number in (("batch_size", batch_size), ("check_every", check_every), ("patience", patience)):
        check_range(name, number, 1, closed=True)
    base = Method(make_levels=partial(split_levels, scaling="width"), weigh=weigh_equally)
    if not steps:
        return base
    local = Local(lr=lr, epochs=steps, batch_size=batch_size, clip_norm=CLIP_NORM, max_steps=steps, patience=patience,
                  check_every=check_every, optimizer="adam", schedule_in_round="cosine")  # fmt: skip
    return replace(
        base, make_aggregator=partial(DistilledMean, local=local, temperature=temperature), needs_server_data=True
    )


class DistilledMean:
    """The mean of a round's updates, into which they are distilled; keeps all of them."""

    def __init__(self, federation: Federation, server: Server, local: Local, temperature: float) -> None:
        self._federation, self._server = federation, server
        self._local, self._temperature = local, temperature
        self._mean = CoverageMean(federation, server)
        self._teachers: list[Update] = []

    def add(self, update: Update, weight: float) -> None:
        """Add an update, and keep it as a teacher."""
        self._mean.add(update, weight)
        self._teachers.append(update)

    def result(self) -> Aggregate:
        """Return the distilled mean; every element counts as trained."""
        aggregate, federation, server = self._mean.result(), self._federation, self._server
        if not self._teachers:
            return aggregate
        layout = federation.problem.layout
        students = [level.submodel for level in federation.levels if level.submodel != full_submodel(layout)]
        loss = partial(Distillation, teachers=self._teachers, students=students, temperature=self._temperature)
        method = Method(make_loss=loss, report=lambda job, device, result: result.loss.get_metrics())
        job = Job(
            "train", server.round, server.round + 1, 0, None, full_submodel(layout),
            apply_mean(server.state, aggregate), {"name": method},
            derive_seed(federation.seed, server.round, "distil"), local=self._local,
        )  # fmt: skip
        update = run_on_server(job, get_server_device(federation))
        coverage = concat_state(aggregate.coverage)
        covered = FlatState(torch.where(coverage > 0, coverage, 1.0), get_shapes(aggregate.coverage))
        return Aggregate(update.state, covered, metrics=update.metrics)


def get_server_device(federation: Federation) -> Device:
    """Return the server's device with the unlabeled data.

    Raises:
        ConfigError: There are none.
    """
    device = federation.device
    if device is None or device.unlabeled is None:
        raise ConfigError(
            'feddf distills on data of the server: set [data] server, such as { name = "cifar100" }.', key="data.server"
        )
    return replace(device, data=device.unlabeled.to(device.accelerator))


_BATCH = 128
_ROOM = 1 << 26  # teachers' logits on held-out data that are kept, in numbers


class Distillation:
    """The mean divergence of the students, the full model and some of its parts, from their teachers' mean."""

    def __init__(
        self, job: Job, device: Device, teachers: Sequence[Update], students: Sequence[Submodel], temperature: float
    ) -> None:
        """Move the teachers to the device.

        Args:
            job: The server's job.
            device: The server's device, with the unlabeled data.
            teachers: Updates, each with its own sub-model.
            students: Sub-models that learn along with the full model.
            temperature: Softens the distributions.
        """
        problem, accelerator = device.problem, device.accelerator
        self._device, self._temperature = device, temperature
        self._teachers = [
            (
                get_local_model(problem, update.submodel, accelerator, "teacher"),
                FlatState(concat_state(update.state).to(accelerator), get_shapes(update.state)),
            )
            for update in teachers
        ]
        for model, _ in self._teachers:
            model.module.eval()
        self._students = [SharedSubmodel(device, job.submodel, submodel) for submodel in students]
        self._held_out: dict[int, Tensor] = {}
        self._room = _ROOM
        self._no_labels = torch.empty(0, device=accelerator)
        self._divergences: list[float] = []

    def __call__(self, module: nn.Module, x: Any, y: Tensor) -> Tensor:
        """Return the loss on a batch; `y` holds no labels and is not used."""
        return self._compute_divergence(self.compute_teacher_logits(x), module, x)

    @torch.no_grad()
    def compute_teacher_logits(self, x: Tensor) -> Tensor:
        """Return the mean of the teachers' logits, in eval mode."""
        total: Tensor | None = None
        for model, state in self._teachers:
            model.load(state)
            logits = outputs(model.module, x)[-1]
            total = logits.clone() if total is None else total.add_(logits)
        assert total is not None
        return total.div_(len(self._teachers))

    def _compute_divergence(self, teacher: Tensor, module: nn.Module, x: Tensor) -> Tensor:
        task = self._device.problem.task
        y = self._no_labels
        if task.name == "next_token":  # padding teaches nothing
            y = torch.where(x == self._device.data.padding, NOT_SCORED, 0)
        divergences = [task.divergence(teacher, z, self._temperature, y) for z in self.compute_logits(module, x)]
        return torch.stack(divergences).mean()

    def compute_logits(self, module: nn.Module, x: Tensor) -> list[Tensor]:
        """Return the logits of the full model and of its parts, which share its parameters."""
        return [outputs(module, x)[-1], *(student(module, x)[-1] for student in self._students)]

    def held_out(self, module: nn.Module) -> float:
        """Return the divergence on the held-out data; the teachers' logits are kept, up to `_ROOM` numbers."""
        data, total = self._device.data, 0.0
        indices = data.split("validation")
        for i, batch in enumerate(iter_batches(indices, _BATCH)):
            x = self._device.put(data.batch(batch)[0])
            teacher = self._held_out.get(i)
            if teacher is None:
                teacher = self.compute_teacher_logits(x)
                if teacher.numel() <= self._room:
                    self._held_out[i], self._room = teacher, self._room - teacher.numel()
            total += float(self._compute_divergence(teacher, module, x)) * len(batch)
        self._divergences.append(total / len(indices))
        return self._divergences[-1]

    def get_metrics(self) -> dict[str, float]:
        """Return the divergence on held-out data before the first step, and that of the best state."""
        divergences = self._divergences
        return {"before": divergences[0], "after": min(divergences)} if divergences else {}
