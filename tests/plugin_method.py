"""A method from outside the package, with memory of clients and server; tests name it `plugin_method:counting`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.core import LocalResult
from fleetfit.method import (
    Aggregate,
    Device,
    Failure,
    Federation,
    Job,
    Loss,
    Method,
    Server,
    Update,
    outputs,
    take_mean,
)


def counting(pull: float = 0.01) -> Method:
    """Pull towards the mean logit remembered from the client's last accepted round; count updates on the server."""

    def loss(job: Job, device: Device) -> Loss:
        target = (device.memory["mean"] if device.memory else torch.zeros(4)).to(device.accelerator)
        assert (device.memory["rounds"] if device.memory else 0) <= job.round
        assert (job.memory_version == -1) == (device.memory is None)

        class Remembering:
            seen = torch.zeros(4, device=device.accelerator)

            def __call__(self, module: nn.Module, x: Any, y: Tensor) -> Tensor:
                logits = outputs(module, x)[-1]
                self.seen = self.seen + logits.detach().mean(0)
                return device.problem.task.loss(logits, y) + pull * ((logits - target) ** 2).mean()

        return Remembering()

    def remember(job: Job, device: Device, result: LocalResult) -> Any:
        rounds = device.memory["rounds"] + 1 if device.memory else 1
        return {"rounds": rounds, "mean": result.loss.seen.cpu(), "last": (job.round, None)}

    def report(job: Job, device: Device, result: LocalResult) -> dict[str, float]:
        return {"seen": float(result.loss.seen.sum())}

    def step(
        federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
    ) -> Server:
        after = take_mean(federation, server, aggregate, reports)
        seen = (server.memory or {"updates": 0})["updates"] + sum(isinstance(r, Update) for r in reports)
        return replace(after, memory={"updates": seen})

    return Method(make_loss=loss, update_client_memory=remember, report=report, step=step)


def reporting_levels() -> Method:
    """FedAvg whose updates have, as the metric "levels", their level and the sub-models of all levels."""

    def report(job: Job, device: Device, result: LocalResult) -> dict[str, Any]:
        return {"levels": [job.level, [[piece.sizes, list(piece.exits)] for piece in job.levels]]}

    return Method(report=report)


def killing(folder: str = "") -> Method:
    """FedAvg whose worker ends itself once, the first time that client 5 trains."""
    import os
    from pathlib import Path

    def adapt(job: Job, device: Device) -> Job:
        flag = Path(folder) / "died"
        if job.kind == "train" and job.client == 5 and not flag.exists():
            flag.touch()
            os._exit(9)
        return job

    return Method(adapt_job=adapt)


def always_killing() -> Method:
    """FedAvg whose worker ends itself whenever client 5 trains."""
    import os

    def adapt(job: Job, device: Device) -> Job:
        if job.kind == "train" and job.client == 5:
            os._exit(9)
        return job

    return Method(adapt_job=adapt)


def scribbling() -> Method:
    """FedAvg whose clients spoil the tensors that they were sent, once they have begun to train."""

    def loss(job: Job, device: Device) -> Loss:
        def value(module: nn.Module, x: Any, y: Tensor) -> Tensor:
            for tensor in job.state.values():
                tensor.add_(1000)
            return device.problem.task.loss(outputs(module, x)[-1], y)

        return value

    return Method(make_loss=loss)
