"""What a device does in an evaluation: it scores every exit in one forward pass, or sums the inputs of batch norm.

The server's side, which makes these jobs and the columns of their replies, is `fleetfit.evaluation`.
"""

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fleetfit import names
from fleetfit.anatomy import batch_norms, outputs
from fleetfit.core import Device, Job, Update
from fleetfit.errors import NO_STATISTICS, RunError
from fleetfit.seeds import make_torch_rng
from fleetfit.training.batch_norm import get_batch_norm_sums, use_statistics
from fleetfit.training.batches import iter_batches, limit_batch
from fleetfit.training.features import BatchLoader, make_batch_loader
from fleetfit.training.labels import compute_class_frequencies, compute_offset
from fleetfit.training.local_model import LocalModel, get_local_model
from fleetfit.training.runtime import disable_compiled_kernels
from fleetfit.training.shared_pass import SampleScores, score_in_shared_pass


@torch.no_grad()
def score_jobs(jobs: Sequence[Job], devices: Sequence[Device]) -> list[Update]:
    """Run evaluation jobs that differ in client and seed only; the model is loaded once.

    Metrics: n, the units that the task scores (samples, tokens, labels); the sum of their hits per exit ("correct"),
    and of the ensemble; "own": the user's metrics, per exit; "personal": the hits of the last exit with
    log p_k - log p added to its logits, of the same pass.
    """
    job, device, model = jobs[0], devices[0], _load_model(jobs[0], devices[0])
    evaluation, data = job.evaluation, device.data
    if evaluation.norm == "static" and not job.statistics and batch_norms(model.module):
        raise RunError(NO_STATISTICS)
    samples = [_select_samples(job, device) for job, device in zip(jobs, devices, strict=True)]
    offsets = [
        compute_offset(compute_class_frequencies(device.data), job.prior).to(device.accelerator)
        for job, device in zip(jobs, devices, strict=True)
        if evaluation.personal
    ]
    same_data = all(device.data.x is data.x and device.data.y is data.y for device in devices)
    if same_data:
        loader = make_batch_loader(device, model, job.submodel, training=False)
    else:
        loader = BatchLoader(device, model.module)
    updates = []
    with use_statistics(model.module, job.statistics if evaluation.norm == "static" else {}), loader.open():
        loader.prepare(torch.cat(samples))
        shared = None
        if same_data and len(jobs) > 1 and not evaluation.metrics:
            shared = score_in_shared_pass(model, device, loader, samples, evaluation, offsets)
        rows = zip(jobs, devices, samples, shared or repeat(None), offsets or repeat(None), strict=False)
        for job, device, indices, scores, offset in rows:
            own_loader = loader if same_data else BatchLoader(device, model.module)
            size = limit_batch(evaluation.batch_size, device, len(job.submodel.exits))
            batches = list(iter_batches(indices, size))
            metrics = _score(model, device, own_loader, batches, job, scores, offset)
            updates.append(Update.of(job, {}, len(indices), metrics=metrics))
    return updates


@torch.no_grad()
def sum_batch_norm_inputs(job: Job, device: Device) -> Update:
    """Sum the inputs of every batch-norm layer over some of the client's training data.

    The state holds, in float64 and per layer, `layer.sum` and `layer.squares` [C] and `layer.count` [1]; sums of
    clients add.
    """
    model, indices = _load_model(job, device), _select_samples(job, device)
    sums = get_batch_norm_sums(model.module)
    with disable_compiled_kernels(model.arithmetic), sums.watch():  # compiled kernels call no hooks
        for batch in iter_batches(indices, job.evaluation.batch_size):
            sums.run(device.put(device.data.batch(batch)[0]))
        return Update.of(job, sums.take(), len(indices))


def _load_model(job: Job, device: Device) -> LocalModel:
    """Return the job's model without dropout. Batch norm uses the batch's own statistics unless static ones are set."""
    model = get_local_model(device.problem, job.submodel, device.accelerator, training=False)
    model.load(job.state)
    if model.module.training:  # a walk through a model's parts takes as long as some batches
        model.module.eval()
    return model


def _select_samples(job: Job, device: Device) -> Tensor:
    evaluation = job.evaluation
    indices = device.data.split(evaluation.split)
    if evaluation.shuffle or evaluation.samples is not None:
        indices = indices[torch.randperm(len(indices), generator=make_torch_rng(job.seed, "order"))]
    return indices if evaluation.samples is None else indices[: evaluation.samples]


def _score(
    model: LocalModel,
    device: Device,
    loader: BatchLoader,
    batches: Sequence[Tensor],
    job: Job,
    shared: SampleScores | None,
    offset: Tensor | None,
) -> dict[str, Any]:
    """Return the metrics of an evaluation in batches; personal predictions add the offset [C] to the logits."""
    task, exits = device.problem.task, len(job.submodel.exits)
    functions = {name: names.resolve("metrics", name) for name in job.evaluation.metrics}
    answers: list[list[Tensor]] = []  # by batch: labels and outputs, for metrics that are not means over samples
    correct = torch.zeros(exits, dtype=torch.float64)
    units, ensemble, personal, start = 0, 0.0, 0.0, 0
    for batch in batches:
        scores = None if shared is None else shared.select(slice(start, start + len(batch)))
        start += len(batch)
        if scores is not None and not bool(scores.undecided.any()):
            sums = scores.hits.sum(0, dtype=torch.float64)
            units, correct, ensemble = units + len(batch), correct + sums[:-1], ensemble + float(sums[-1])
            personal += 0.0 if scores.personal is None else float(scores.personal.sum())
            continue
        x, y = loader.load(batch)
        logits = outputs(model.module, x)
        if functions:
            answers.append([y.cpu(), *(z.float().cpu() for z in logits)])
        hits = [task.hits(z, y) for z in logits]
        units += hits[0].numel()
        correct += torch.stack([h.sum(dtype=torch.float64) for h in hits]).cpu()
        if offset is not None:
            personal += float(task.hits(logits[-1] + offset, y).sum(dtype=torch.float64))
        mean_scores = torch.stack([task.scores(z) for z in logits]).mean(0)
        ensemble += float(task.hits(mean_scores, y).sum(dtype=torch.float64))
    metrics: dict[str, Any] = {"n": units, "correct": correct.tolist(), "ensemble": ensemble}
    metrics |= {} if offset is None else {"personal": personal}
    if functions:
        metrics["own"] = {name: [None] * exits for name in functions}
    if answers:
        labels, *predictions = (torch.cat(batches) for batches in zip(*answers, strict=True))
        for name, function in functions.items():
            metrics["own"][name] = [_convert_to_number(name, function(output, labels)) for output in predictions]
    return metrics


def _convert_to_number(metric: str, value: Any) -> float | None:
    """Return a user's metric, or None if it is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RunError(
            f'the metric "{metric}" must return one number, got {type(value).__name__}', key="metric"
        ) from None
    return number if math.isfinite(number) else None
