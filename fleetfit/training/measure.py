"""Evaluation and statistics jobs: one forward pass yields every exit; sums over the inputs of batch-norm layers."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fleetfit.errors import RunError
from fleetfit.layout import ExitModel, State, batch_norms, outputs
from fleetfit.method import Method
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import Submodel
from fleetfit.training.features import Feed, feed_of
from fleetfit.training.local_model import LocalModel, local_model_of
from fleetfit.training.one_pass import PassedScores, shared_scores
from fleetfit.training.own_metrics import Collected
from fleetfit.training.speed import uncompiled
from fleetfit.training.steps import joined
from fleetfit.values import Device, Failure, Job, Update


def _chosen(job: Job, device: Device) -> Tensor:
    """Return the samples of an evaluation or statistics job, in its order."""
    wanted = job.evaluation
    indices = device.data.split(wanted.split)
    if wanted.shuffle or wanted.samples is not None:
        indices = indices[torch.randperm(len(indices), generator=make_torch_rng(job.seed, "order"))]
    return indices if wanted.samples is None else indices[: wanted.samples]


def evaluate(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    """Score every exit in one pass.

    Metrics: n, the units that the task scores (samples, tokens, labels); the sum of their hits per exit ("correct"),
    and of the ensemble; per exit the sum of the samples' losses; "own": the metrics that were asked for, per exit.
    """
    return replace(_evaluated_alike([job], [device])[0], dispatched=dispatched), device.memory


def statistics(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    """Sum the inputs of every batch-norm layer over some of the client's training data.

    The state holds, in float64 and per layer, `layer.sum` and `layer.squares` [C] and `layer.count` [1]; sums of
    clients add.
    """
    return replace(_summed_alike([job], [device])[0], dispatched=dispatched), device.memory


# ---- jobs that differ in their client alone --------------------------------------------------------------------------


def measured_alike(jobs: Sequence[Job], devices: Sequence[Device]) -> list[Update]:
    """Run evaluation or statistics jobs that differ in client and seed alone; the model is made ready once."""
    return (_evaluated_alike if jobs[0].kind == "evaluate" else _summed_alike)(jobs, devices)


@torch.no_grad()
def _evaluated_alike(jobs: Sequence[Job], devices: Sequence[Device]) -> list[Update]:
    job, piece = jobs[0], _made_ready(jobs[0], devices[0])
    wanted = job.evaluation
    if wanted.norm == "static" and not job.statistics and batch_norms(piece.module):
        raise RunError("there are no batch-norm statistics for this level: no client could measure them")
    chosen = [_chosen(job, device) for job, device in zip(jobs, devices, strict=True)]
    first = devices[0].data
    alike = all(device.data.x is first.x and device.data.y is first.y for device in devices)
    feed = feed_of(devices[0], piece, job.submodel, training=False) if alike else Feed(devices[0], piece.module)
    with with_statistics(piece.module, job.statistics if wanted.norm == "static" else {}), feed.open():
        feed.ready(torch.cat(chosen))
        shared: Iterable[PassedScores | None] = repeat(None)
        if alike and len(jobs) > 1 and not wanted.metrics:
            shared = shared_scores(piece, devices[0], feed, chosen, wanted) or shared
        scores = [
            _scored(
                piece,
                device,
                feed if alike else Feed(device, piece.module),
                list(joined(indices, wanted.batch_size)),
                Collected(wanted.metrics, len(job.submodel.exits)),
                known,
            )
            for device, indices, known in zip(devices, chosen, shared, strict=False)
        ]
    return [_measured(*of_one, {}) for of_one in zip(jobs, chosen, scores, strict=True)]


def _scored(
    piece: LocalModel, device: Device, feed: Feed, batches: Sequence[Tensor], own: Collected, known: PassedScores | None
) -> dict[str, Any]:
    """Return the metrics of an evaluation in batches; `known`: what their samples have scored in a shared pass."""
    task, exits = device.problem.task, own.exits
    correct, loss = torch.zeros(exits, dtype=torch.float64), torch.zeros(exits)
    units, ensemble, at = 0, 0.0, 0
    for batch in batches:
        here = slice(at, at := at + len(batch))
        if known is not None and not bool(known.close[here].any()):
            hit = known.hits[here].sum(0, dtype=torch.float64)
            units, correct, ensemble = units + len(batch), correct + hit[:-1], ensemble + float(hit[-1])
            loss += known.losses[here].sum(0)
            continue
        x, y = feed.batch(batch)
        logits = outputs(piece.module, x)
        own.add(logits, y)
        hits = [task.hits(z, y) for z in logits]
        units += hits[0].numel()
        correct += torch.stack([h.sum(dtype=torch.float64) for h in hits]).cpu()
        loss += torch.stack([task.loss(z, y) * len(batch) for z in logits]).cpu()
        scores = torch.stack([task.scores(z) for z in logits]).mean(0)
        ensemble += float(task.hits(scores, y).sum(dtype=torch.float64))
    found = {"n": units, "correct": correct.tolist(), "loss": loss.tolist(), "ensemble": ensemble}
    return found | ({"own": own.values()} if own.wanted else {})


@torch.no_grad()
def _summed_alike(jobs: Sequence[Job], devices: Sequence[Device]) -> list[Update]:
    piece = _made_ready(jobs[0], devices[0])
    passes = _passes_of(piece.module)
    found = []
    with uncompiled(piece.arithmetic), passes.watched() as sums:  # compiled kernels call no hooks
        for job, device in zip(jobs, devices, strict=True):
            indices = _chosen(job, device)
            for batch in joined(indices, job.evaluation.batch_size):
                passes.run(device.put(device.data.batch(batch)[0]))
            found.append(_measured(job, indices, {}, sums.taken()))
    return found


def _made_ready(job: Job, device: Device) -> LocalModel:
    """Return the job's model; without running statistics, batch norm uses the batch's own also here; dropout is off."""
    piece = local_model_of(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    if piece.module.training:  # to walk through a model's parts takes as long as some batches
        piece.module.eval()
    return piece


def _measured(job: Job, indices: Tensor, metrics: dict[str, Any], state: State) -> Update:
    return Update(job.round, job.index, job.client, job.level, job.submodel, job.submodel, state, len(indices), metrics)


# ---- passes that sum the inputs of batch-norm layers, and end with the last of them --------------------------------


class _Sums:
    """Sums over the inputs of batch-norm layers, by layer: of the values, of their squares, and how many."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Tensor, Tensor, int]] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Add the inputs of a layer [B, C, ...]."""
        x = x.float().transpose(0, 1).flatten(1)  # [C, B * positions]
        total, squares, count = x.sum(1, dtype=torch.float64), (x * x).sum(1, dtype=torch.float64), x.shape[1]
        if name in self._found:
            before = self._found[name]
            total, squares, count = before[0] + total, before[1] + squares, before[2] + count
        self._found[name] = total, squares, count

    def taken(self) -> dict[str, Tensor]:
        """Return the sums on the host as a job's state has them, and begin anew."""
        found = {}
        for name, (total, squares, count) in self._found.items():
            found[f"{name}.sum"], found[f"{name}.squares"] = total.cpu(), squares.cpu()
            found[f"{name}.count"] = torch.tensor([count], dtype=torch.float64)
        self._found.clear()
        return found


class _AllSummed(Exception):
    """Ends a pass whose last batch norm has been reached."""


class _Passes:
    """Passes of a module that end with the input of its last batch norm; what comes after that changes no sum.

    The first one is whole, and shows in what order the layers run, and whether any is in a classifier.
    """

    def __init__(self, module: nn.Module) -> None:
        self._norms, self._module = batch_norms(module), ref(module)
        self._in_parts = isinstance(module, ExitModel) and type(module).forward is ExitModel.forward
        self._sums, self._ran = _Sums(), list[str]()
        self._last: list[str] | None = None
        self._body = self._first

    @contextlib.contextmanager
    def watched(self) -> Iterator[_Sums]:
        """Sum what the passes inside give to the layers."""
        hooks = [norm.register_forward_pre_hook(partial(self._reached, name)) for name, norm in self._norms.items()]
        try:
            yield self._sums
        finally:
            self._sums.taken()
            for hook in hooks:
                hook.remove()

    def run(self, x: Tensor) -> None:
        """Pass one batch."""
        self._ran.clear()
        with contextlib.suppress(_AllSummed):
            self._body(self._module(), x)

    def _reached(self, name: str, norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._sums.add(name, inputs[0])
        self._ran.append(name)
        if self._ran == self._last:
            raise _AllSummed

    def _first(self, module: Any, x: Tensor) -> None:
        in_heads = 0
        if self._in_parts:
            carry = module.start(x)
            for i in range(len(module.exits)):
                carry = module.segment(i, carry)
                before = len(self._ran)
                module.head(i, carry)
                in_heads += len(self._ran) - before
        else:
            outputs(module, x)
        self._body = self._below if self._in_parts and not in_heads else self._whole
        if set(self._ran) == self._norms.keys():  # else another batch may reach more
            self._last = list(self._ran)

    def _whole(self, module: Any, x: Tensor) -> None:
        outputs(module, x)

    def _below(self, module: Any, x: Tensor) -> None:
        carry = module.start(x)
        for i in range(len(module.exits)):
            carry = module.segment(i, carry)


_passes: WeakKeyDictionary[nn.Module, _Passes] = WeakKeyDictionary()


def _passes_of(module: nn.Module) -> _Passes:
    found = _passes.get(module)
    if found is None:
        found = _passes[module] = _Passes(module)
    return found


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
