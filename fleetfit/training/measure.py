"""Evaluation and statistics jobs: one forward pass yields every exit; sums over the inputs of batch-norm layers."""

from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.errors import RunError
from fleetfit.layout import State, batch_norms, outputs
from fleetfit.method import Method
from fleetfit.seeds import torch_rng
from fleetfit.submodel import Submodel
from fleetfit.training.local_model import local_model_of
from fleetfit.training.steps import joined
from fleetfit.values import Device, Failure, Job, Update


def _chosen(job: Job, device: Device) -> Tensor:
    """Return the samples of an evaluation or statistics job, in its order."""
    wanted = job.evaluation
    indices = device.data.split(wanted.split)
    if wanted.shuffle or wanted.samples is not None:
        indices = indices[torch.randperm(len(indices), generator=torch_rng(job.seed, "order"))]
    return indices if wanted.samples is None else indices[: wanted.samples]


@torch.no_grad()
def evaluate(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    """Score every exit in one pass.

    Metrics: n, the units that the task scores (samples, tokens, labels); per exit the sums of their hits ("correct")
    and of the samples' losses; the ensemble's hits.
    """
    task, wanted, indices = device.problem.task, job.evaluation, _chosen(job, device)
    piece = local_model_of(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    piece.module.eval()
    if wanted.norm == "static" and not job.statistics and batch_norms(piece.module):
        raise RunError("there are no batch-norm statistics for this level: no client could measure them")
    exits = len(job.submodel.exits)
    correct, loss = torch.zeros(exits, dtype=torch.float64), torch.zeros(exits)
    units, ensemble = 0, 0.0
    with with_statistics(piece.module, job.statistics if wanted.norm == "static" else {}):
        for batch in joined(indices, wanted.batch_size):
            x, y = device.data.batch(batch)
            y = device.put(y)
            logits = outputs(piece.module, device.put(x))
            hits = [task.hits(z, y) for z in logits]
            units += hits[0].numel()
            correct += torch.stack([h.sum(dtype=torch.float64) for h in hits]).cpu()
            loss += torch.stack([task.loss(z, y) * len(batch) for z in logits]).cpu()
            scores = torch.stack([task.scores(z) for z in logits]).mean(0)
            ensemble += float(task.hits(scores, y).sum(dtype=torch.float64))
    metrics = {"n": units, "correct": correct.tolist(), "loss": loss.tolist(), "ensemble": ensemble}
    return _measured(job, dispatched, {}, len(indices), metrics), device.memory


@torch.no_grad()
def statistics(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    """Sum the inputs of every batch-norm layer over some of the client's training data.

    The state holds, in float64 and per layer, `layer.sum` and `layer.squares` [C] and `layer.count` [1]; sums of
    clients add.
    """
    indices, wanted = _chosen(job, device), job.evaluation
    piece = local_model_of(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    piece.module.eval()  # without running statistics, batch norm uses the batch's own also here; dropout is off
    sums: dict[str, Tensor] = {}
    hooks = [norm.register_forward_pre_hook(_summing(name, sums)) for name, norm in batch_norms(piece.module).items()]
    try:
        for batch in joined(indices, wanted.batch_size):
            outputs(piece.module, device.put(device.data.batch(batch)[0]))
    finally:
        for hook in hooks:
            hook.remove()
    state = {name: value.cpu() for name, value in sums.items()}
    return _measured(job, dispatched, state, len(indices), {}), device.memory


def _measured(job: Job, dispatched: Submodel, state: State, n: int, metrics: dict[str, Any]) -> Update:
    return Update(job.round, job.index, job.client, job.level, dispatched, job.submodel, state, n, metrics)


def _summing(name: str, sums: dict[str, Tensor]) -> Any:
    def hook(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].transpose(0, 1).flatten(1)  # [C, B * positions]
        found = {"sum": x.sum(1, dtype=torch.float64), "squares": (x * x).sum(1, dtype=torch.float64),
                 "count": torch.tensor([x.shape[1]], dtype=torch.float64, device=x.device)}  # fmt: skip
        for key, value in found.items():
            place = f"{name}.{key}"
            sums[place] = sums[place] + value if place in sums else value

    return hook


class with_statistics:
    """Give a module's batch-norm layers static statistics for a while; with none, each batch uses its own.

    Statistics are `layer.mean` and `layer.var` [C] by layer name.
    """

    def __init__(self, module: nn.Module, statistics: State) -> None:
        self._norms, self._statistics = batch_norms(module), statistics

    def __enter__(self) -> None:
        if self._statistics:  # all of them are there before the first layer is changed
            found = [(n, self._on(n, f"{name}.mean"), self._on(n, f"{name}.var")) for name, n in self._norms.items()]
            for norm, mean, var in found:
                norm.track_running_stats = True
                norm.running_mean, norm.running_var = mean, var

    def _on(self, norm: nn.Module, name: str) -> Tensor:
        weight = norm.weight
        value = self._statistics[name].float()
        return value.to(weight.device) if isinstance(weight, Tensor) else value

    def __exit__(self, *error: Any) -> None:
        for norm in self._norms.values():
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = None
