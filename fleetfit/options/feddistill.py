"""FedDistill+: clients share the mean output of each class (Jeong et al., 2018; a baseline of Zhu et al., ICML 2021).

A client adds up its outputs z(x) of training by class, and sends the mean output of each class that it has, its
prototype. The server averages those of the round's clients: P_c. A client's next loss is

    loss(z(x), y) + weight KL(softmax(P_y) || softmax(z(x))), averaged over the samples whose class has a P.

Outputs have one shape at all levels, so levels of any width and depth learn from each other. Each exit that has the
task's loss has this one, and adds its outputs. A class that no client of a round has keeps its P. Classification only.
Jeong et al. share no models, and leave a client's own prototypes out; here the method averages models, as Zhu et al.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fleetfit.aggregate import Aggregate
from fleetfit.core import Device, Federation, Job, LocalResult, Problem, Server
from fleetfit.errors import ConfigError, check_range
from fleetfit.hooks import ExtraShapes, Method, Reports
from fleetfit.hooks.movements import ExtraSums
from fleetfit.layout import State
from fleetfit.submodel import Submodel


def feddistill(weight: float = 1.0) -> Method:
    """Make the option.

    Args:
        weight: Weight of the divergence from the prototypes, from 0 on.
    """
    check_range("weight", weight, 0, closed=True)
    return Method(
        declare_extra=_declare_prototypes, report=_report_prototypes, make_aggregator=ExtraSums,
        update_server_memory=_store_prototypes, attach=lambda federation, server, client, submodel: {"prototypes":
        _load_prototypes(federation, server)}, adapt_task=lambda job, device: replace(device.problem.task,
        loss=_PrototypeLoss(job, device, weight)),
    )  # fmt: skip


def _declare_prototypes(problem: Problem, submodel: Submodel) -> ExtraShapes:
    if problem.task.name != "classification":
        raise ConfigError(f"feddistill needs a classification; the task is {problem.task.name}.", key="method.options")
    shapes = {"prototypes": (problem.output_size, problem.output_size + 1)}  # at the end of a row: 1 if it is one
    return ExtraShapes(down=shapes, up=shapes)


class _PrototypeLoss:
    """The task's loss and the divergence from the prototypes; adds up outputs by class, and counts them."""

    def __init__(self, job: Job, device: Device, weight: float) -> None:
        self._task, self._weight = device.problem.task, weight
        self._prototypes = device.put(job.extra["prototypes"])
        self.sums = torch.zeros_like(self._prototypes)

    def __call__(self, logits: Tensor, y: Tensor) -> Tensor:
        loss, rows = self._task.loss(logits, y), self._prototypes[y]
        if logits.requires_grad:  # not where early stopping measures this loss
            self.sums.index_add_(0, y, torch.cat([logits.detach(), torch.ones_like(logits[:, :1])], 1))
        if not bool((has := rows[:, -1] > 0).any()):
            return loss
        return loss + self._weight * self._task.divergence(rows[has, :-1], logits[has], 1.0, y[has])


def _report_prototypes(job: Job, device: Device, result: LocalResult) -> State:
    sums = result.task.loss.sums
    return {"prototypes": sums / sums[:, -1:].clamp_min(1)}


def _load_prototypes(federation: Federation, server: Server) -> Tensor:
    size = federation.problem.output_size
    return (server.memory or {}).get("prototypes", torch.zeros(size, size + 1))


def _store_prototypes(federation: Federation, server: Server, aggregate: Aggregate, reports: Reports) -> Server:
    sums, old = aggregate.extra.get("prototypes", torch.zeros(1, 1)), _load_prototypes(federation, server)
    new = torch.where(sums[:, -1:] > 0, sums / sums[:, -1:].clamp_min(1), old)
    return replace(server, memory={**(server.memory or {}), "prototypes": new})
