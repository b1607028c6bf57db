"""Run one job: the only place that runs local SGD, evaluation and batch-norm statistics.

Modules are built once per shape and kept; a job copies tensors in and reads an update out. All parameters of a module lie in
one flat buffer, and so do their gradients, so that clearing, clipping and the fused optimiser are one kernel each.

Every tensor of a sub-model counts as trained: weight decay also reaches parameters that the loss never used.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fleetfit.errors import FleetFitError, RunError
from fleetfit.layout import State, batch_norms, build_module, named_tensors, outputs
from fleetfit.method import Method, build
from fleetfit.seeds import seed_of, torch_rng
from fleetfit.submodel import Submodel, extract, finite, flat_of, whole
from fleetfit.values import Device, Failure, Job, Local, Problem, Update

# ---- modules, one per shape ---------------------------------------------------------------------------------------------------


class Workpiece:
    """A module of one shape whose parameters are views of one flat buffer.

    Attributes:
        module: The module.
        flat: All travelling tensors [size], in the layout's order: trained parameters first.
        trained: The part of `flat` that is trained.
        grad: Gradients of `trained`.
    """

    def __init__(self, problem: Problem, submodel: Submodel, accelerator: torch.device) -> None:
        """Build the module."""
        layout = problem.layout
        self.shapes = layout.shapes(submodel.sizes, submodel.exits)
        sizes = {**layout.full_sizes, **submodel.sizes}
        with _own_randomness(accelerator):
            self.module = build_module(problem.architecture, sizes, submodel.exits).to(accelerator)
        found = {name: (tensor, is_parameter) for name, tensor, is_parameter in named_tensors(self.module)}
        _check_built(found, self.shapes, layout.aliases, problem.base)
        self.flat = torch.empty(sum(_count(s) for s in self.shapes.values()), device=accelerator)
        count = sum(_count(s) for name, s in self.shapes.items() if layout.tensors[name].trainable)
        self.trained, self.grad = self.flat[:count], torch.zeros(count, device=accelerator)
        at = 0
        for name, shape in self.shapes.items():
            here = slice(at, at := at + _count(shape))
            tensor, is_parameter = found[name]
            tensor.data = self.flat[here].view(shape)
            if is_parameter:
                tensor.grad = self.grad[here].view(shape)
        self._load_base(problem, found)

    def _load_base(self, problem: Problem, found: Mapping[str, tuple[Tensor, bool]]) -> None:
        for name, value in problem.base.items():
            if name in found:
                found[name][0].requires_grad_(False).data.copy_(value)

    def load(self, state: State) -> None:
        """Copy a state in."""
        self.flat.copy_(flat_of({name: state[name] for name in self.shapes}))

    def read(self) -> State:
        """Return the state, a copy on the host."""
        flat = self.flat.detach().to("cpu", copy=True)
        pieces = flat.split([_count(s) for s in self.shapes.values()])
        return {name: piece.view(s) for (name, s), piece in zip(self.shapes.items(), pieces, strict=True)}


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _check_built(found: Mapping[str, Any], shapes: Mapping[str, Any], aliases: Mapping[str, str], base: State) -> None:
    built = {name: tuple(t.shape) for name, (t, _) in found.items() if name not in aliases and name not in base}
    if built != dict(shapes):
        odd = [n for n in sorted(built.keys() | shapes.keys()) if built.get(n) != shapes.get(n)]
        first = odd[0]
        raise RunError(f'the builder and the layout disagree on "{first}": built {built.get(first)}, expected '
                       f"{shapes.get(first)}. Run `fleetfit check-model` on this model.")  # fmt: skip


_workpieces: WeakKeyDictionary[Problem, dict[Any, Workpiece]] = WeakKeyDictionary()


def workpiece(problem: Problem, submodel: Submodel, accelerator: torch.device) -> Workpiece:
    """Return the module of a sub-model's shape, built once per process."""
    kept = _workpieces.setdefault(problem, {})
    key = (tuple(sorted(submodel.sizes.items())), submodel.exits, accelerator)
    if key not in kept:
        kept[key] = Workpiece(problem, submodel, accelerator)
    return kept[key]


class _own_randomness:  # noqa: N801, reads as a statement
    """Leave torch's global generators as they were."""

    def __init__(self, accelerator: torch.device) -> None:
        devices = [accelerator] if accelerator.type == "cuda" else []
        self._fork = torch.random.fork_rng(devices=devices)

    def __enter__(self) -> None:
        self._fork.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._fork.__exit__(*error)


def initial_state(problem: Problem, seed: int) -> State:
    """Return the full model's first state, drawn by its own initialisation from a seed."""
    with _own_randomness(torch.device("cpu")):
        torch.manual_seed(seed_of(seed, "initial"))
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    found = {name: tensor.detach().float() for name, tensor, _ in named_tensors(module)}
    full = {name: found[name] for name in problem.layout.tensors}
    return extract(problem.layout, full, whole(problem.layout))


# ---- a job --------------------------------------------------------------------------------------------------------------------


def run_job(job: Job, device: Device) -> tuple[Update | Failure, Any]:
    """Run one job on a device.

    Returns:
        The update, or a failure that says why; and what the client remembers if the update is accepted.
    """
    try:
        method = build(job.method)
        adapted = method.adapt(job, device)
        if adapted is None:
            return _failure(job, "declined: the client cannot afford any part of what it was sent"), device.memory
        work = {"train": _train, "evaluate": _evaluate, "statistics": _statistics}[adapted.kind]
        with _own_randomness(device.accelerator):
            return work(adapted, device, method, job.submodel)
    except FleetFitError as error:
        return _failure(job, str(error)), device.memory
    except (ValueError, RuntimeError) as error:  # a module that cannot take this data: the client's, not the run's end
        return _failure(job, f"{type(error).__name__}: {error}"), device.memory


def _failure(job: Job, reason: str) -> Failure:
    return Failure(job.round, job.index, job.client, job.level, job.submodel, reason)


def _train(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    indices = device.data.split("train")
    if not len(indices):
        return _failure(job, "the client has no training data"), device.memory
    piece = workpiece(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    loss, penalty = method.loss(job, device), method.penalty(job, device)
    torch.manual_seed(seed_of(job.seed, "torch"))  # after module and loss are built: building draws from it
    piece.module.train()
    mean_loss, steps = _local_sgd(job, device, piece, loss, penalty, indices)
    state = piece.read()
    if not finite(state) or mean_loss != mean_loss or abs(mean_loss) == float("inf"):
        return _failure(job, "its training diverged: the loss or the weights are not finite"), device.memory
    memory = method.remember(job, device, state, loss)
    sent, state = method.reply(job, device, state)
    extra = loss.metrics() if hasattr(loss, "metrics") else {}
    metrics = {"loss": mean_loss, "steps": steps, **extra}
    return Update(
        job.round, job.index, job.client, job.level, dispatched, sent, state, len(indices), metrics
    ), memory  # fmt: skip


def _local_sgd(
    job: Job, device: Device, piece: Workpiece, loss: Any, penalty: Any, indices: Tensor
) -> tuple[float, int]:
    """Run the local epochs; return the mean loss per sample and the number of steps."""
    local, rng = job.local, torch_rng(job.seed, "batches")
    parameter = nn.Parameter(piece.trained)
    parameter.grad = piece.grad
    optimiser = torch.optim.SGD(
        [parameter], lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay, fused=True
    )
    total, seen, steps = torch.zeros((), device=device.accelerator), 0, 0
    for batch in _batches(indices, local, rng):
        x, y = device.data.batch(batch, rng)
        x, y = _on(x, device), _on(y, device)
        piece.grad.zero_()
        value = loss(piece.module, x, y)
        (value if penalty is None else value + penalty(piece.module)).backward()
        if local.clip_norm is not None:
            _clip(piece.grad, local.clip_norm)
        optimiser.step()
        total += value.detach() * len(batch)
        seen, steps = seen + len(batch), steps + 1
    return total.item() / max(seen, 1), steps


def _clip(grad: Tensor, largest: float) -> None:
    norm = torch.linalg.vector_norm(grad)
    grad.mul_(torch.clamp(largest / (norm + 1e-6), max=1.0))


def _batches(indices: Tensor, local: Local, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield each epoch's batches in a seeded order; a last batch of one sample joins the batch before it."""
    size = local.batch_size or len(indices)
    for _ in range(local.epochs):
        order = indices[torch.randperm(len(indices), generator=rng)]
        yield from joined(order, size)


def joined(order: Tensor, size: int) -> Iterator[Tensor]:
    """Yield batches of `size`; a single last sample joins the batch before it."""
    at, n = 0, len(order)
    while at < n:
        end = n if n - at - size == 1 else min(at + size, n)
        yield order[at:end]
        at = end


def _on(tensor: Tensor, device: Device) -> Tensor:
    return tensor if tensor.device == device.accelerator else tensor.to(device.accelerator, non_blocking=True)


# ---- evaluation and statistics --------------------------------------------------------------------------------------------------


def _some(job: Job, device: Device) -> Tensor:
    """Return the samples of an evaluation or statistics job, in its order."""
    wanted = job.evaluation
    indices = device.data.split(wanted.split)
    if wanted.shuffle or wanted.samples is not None:
        indices = indices[torch.randperm(len(indices), generator=torch_rng(job.seed, "order"))]
    return indices if wanted.samples is None else indices[: wanted.samples]


@torch.no_grad()
def _evaluate(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    """Count correct predictions of every exit in one forward pass; metrics: n, correct, loss (sums per exit), ensemble, best."""
    task, wanted, indices = device.problem.task, job.evaluation, _some(job, device)
    piece = workpiece(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    piece.module.eval()
    exits = len(job.submodel.exits)
    correct, loss = torch.zeros(exits), torch.zeros(exits)
    ensemble = 0
    with with_statistics(piece.module, job.statistics if wanted.norm == "static" else {}):
        for batch in joined(indices, wanted.batch_size):
            x, y = device.data.batch(batch)
            y = _on(y, device)
            logits = outputs(piece.module, _on(x, device))
            correct += torch.stack([task.hits(z, y).sum() for z in logits]).cpu()
            loss += torch.stack([task.loss(z, y) * len(batch) for z in logits]).cpu()
            scores = torch.stack([task.scores(z) for z in logits]).mean(0)
            ensemble += int(task.hits(scores, y).sum())
    metrics = {"n": len(indices), "correct": [int(c) for c in correct], "loss": loss.tolist(), "ensemble": ensemble}
    return Update(
        job.round, job.index, job.client, job.level, dispatched, job.submodel, {}, len(indices), metrics
    ), device.memory  # fmt: skip


@torch.no_grad()
def _statistics(job: Job, device: Device, method: Method, dispatched: Submodel) -> tuple[Update | Failure, Any]:
    """Sum the inputs of every batch-norm layer over some of the client's training data.

    The state holds, in float64 and per layer, `layer.sum` and `layer.squares` [C] and `layer.count` [1]; sums of clients add.
    """
    indices, wanted = _some(job, device), job.evaluation
    piece = workpiece(device.problem, job.submodel, device.accelerator)
    piece.load(job.state)
    piece.module.eval()  # without running statistics, batch norm uses the batch's own also here; dropout is off
    sums: State = {}
    hooks = [
        norm.register_forward_pre_hook(_summing(name, sums)) for name, norm in batch_norms(piece.module).items()
    ]
    try:
        for batch in joined(indices, wanted.batch_size):
            outputs(piece.module, _on(device.data.batch(batch)[0], device))
    finally:
        for hook in hooks:
            hook.remove()
    state = {name: value.cpu() for name, value in sums.items()}
    return Update(
        job.round, job.index, job.client, job.level, dispatched, job.submodel, state, len(indices), {}
    ), device.memory  # fmt: skip


def _summing(name: str, sums: State) -> Any:
    def hook(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].transpose(0, 1).flatten(1)  # [C, B * positions]
        found = {"sum": x.sum(1, dtype=torch.float64), "squares": (x * x).sum(1, dtype=torch.float64),
                 "count": torch.tensor([x.shape[1]], dtype=torch.float64, device=x.device)}  # fmt: skip
        for key, value in found.items():
            place = f"{name}.{key}"
            sums[place] = sums[place] + value if place in sums else value

    return hook


class with_statistics:  # noqa: N801, reads as a statement
    """Give a module's batch-norm layers static statistics for a while; with none, each batch uses its own.

    Statistics are `layer.mean` and `layer.var` [C] by layer name.
    """

    def __init__(self, module: nn.Module, statistics: State) -> None:
        self._norms, self._statistics = batch_norms(module), statistics

    def __enter__(self) -> None:
        if self._statistics:
            for name, norm in self._norms.items():
                norm.track_running_stats = True
                norm.running_mean = self._on(norm, f"{name}.mean")
                norm.running_var = self._on(norm, f"{name}.var")

    def _on(self, norm: nn.Module, name: str) -> Tensor:
        weight = norm.weight
        value = self._statistics[name].float()
        return value.to(weight.device) if isinstance(weight, Tensor) else value

    def __exit__(self, *error: Any) -> None:
        for norm in self._norms.values():
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = None
