"""FedDF: width only, and the server distils what it received into the global model (Lin et al., NeurIPS 2020).

Levels and clients are those of `heterofl` without its options. After each round's coverage mean, which is where the
student starts, all received models teach it on data that nobody has labelled (`[data] server`): the loss on a batch is
KL(softmax(mean_k teacher_k(x) / T) || softmax(student(x) / T)) T^2, minimised with Adam along a cosine, gradients cut
at norm 5. The divergence on held-out data is watched, and the best state is kept, the mean itself included.
Distillation is part of the aggregation: options that optimise on the server start from its result.

The server holds all models of a round at once, cohort x model, and a step costs a forward pass of each of them.

Differs from the paper: it has one student per architecture; here the levels' models are pieces of one model, so each
level's piece is a student and their losses are averaged. Distilling the full model alone makes the pieces worse
(docs/methods.md has the numbers). Stopping early looks at the divergence from the teachers, not at the accuracy on
labelled data: there are no labels. Batch norm uses each batch's own statistics, in teachers and students, since no
running statistics are kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from fleetfit.aggregate import Aggregate, apply_mean
from fleetfit.errors import ConfigError, check_range
from fleetfit.factories import declare_unused
from fleetfit.levels import split_levels
from fleetfit.losses import check_temperature
from fleetfit.method import CoverageMean, Method, by_count
from fleetfit.methods._distillation import Distillation
from fleetfit.seeds import derive_seed
from fleetfit.submodel import FlatState, Submodel, concat_state, full_submodel, get_shapes
from fleetfit.training import run_on_server
from fleetfit.values import Device, Federation, Job, Local, Server, Update

CLIP_NORM = 5.0


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
    patience: int = 1000,
) -> Method:
    """Make the method.

    Args:
        steps: Steps of distillation after each round, at most; 0 leaves the mean as it is, which is HeteroFL.
        temperature: Softens the distributions that are compared.
        lr: Adam's learning rate at the first step.
        batch_size: Unlabelled samples per step.
        check_every: Steps between two looks at the held-out part of the server's data.
        patience: Stop after so many steps without a lower divergence there.
    """
    check_temperature(temperature)
    check_range("steps", steps, 0, closed=True)
    check_range("lr", lr, 0)
    for name, number in (("batch_size", batch_size), ("check_every", check_every), ("patience", patience)):
        check_range(name, number, 1, closed=True)
    base = Method(levels=partial(split_levels, mode="width"), weight=by_count)
    if not steps:
        return base
    local = Local(lr, steps, batch_size, clip_norm=CLIP_NORM, max_steps=steps, patience=patience,
                  check_every=check_every, optimiser="adam", schedule_in_round="cosine")  # fmt: skip
    return replace(base, aggregate=partial(DistilledMean, local=local, temperature=temperature), own_data=True)


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
        job = Job(
            "train", server.round, server.round + 1, 0, None, full_submodel(layout),
            apply_mean(server.state, aggregate), teaching(self._teachers, students, self._temperature),
            derive_seed(federation.seed, server.round, "distil"), local=self._local,
        )  # fmt: skip
        update = run_on_server(job, device_with_data(federation))
        coverage = concat_state(aggregate.coverage)
        covered = FlatState(torch.where(coverage > 0, coverage, 1.0), get_shapes(aggregate.coverage))
        return Aggregate(update.state, covered, metrics=update.metrics)


def teaching(teachers: Sequence[Update], students: Sequence[Submodel], temperature: float) -> Mapping[str, Method]:
    """Return the spec of the server's own job: FedAvg with the distillation as its loss."""
    return {"name": Method(loss=partial(Distillation, teachers=teachers, students=students, temperature=temperature))}


def device_with_data(federation: Federation) -> Device:
    """Return the server's device, whose data are now the unlabelled ones.

    Raises:
        ConfigError: It has none.
    """
    device = federation.device
    if device is None or device.unlabelled is None:
        raise ConfigError(
            'feddf distils on data of the server: set [data] server, such as { name = "cifar100" }.', key="data.server"
        )
    return replace(device, data=device.unlabelled.to(device.accelerator))
