"""Validate replies, sums of updates, and jobs that a node gets.

A reply may come from a device that is broken, old or hostile, and a job from such a server. The type of a field is
checked before its value, a size before anything of that size is made, and shapes must be equal. Sums of a client must
be possible for its number of samples. An error makes the reply a failure with a reason; nothing is raised.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fleetfit.aggregate import SummedBlock
from fleetfit.errors import FleetFitError, RunError, format_exception, one_line
from fleetfit.layout import batch_norms, build_module, make_input, outputs
from fleetfit.layout.meta import on_meta
from fleetfit.messages import LIGHTER, decompress, scale_shapes
from fleetfit.submodel import Submodel, check_shapes, compute_norm, find_mismatch, get_slice_plan
from fleetfit.values import FREQUENCIES, Evaluation, Failure, Federation, Job, Problem, RoundSums, Update

_WORD = 200  # characters of a stranger's text that go into a sentence,
_REASON = 500  # and of a whole reason
_NAME = 100  # characters of what a metric is called
_METRICS = 10_000  # numbers and texts in an update's metrics,
_DEEP = 8  # and how deep they nest
_MOST_COUNTED = 1e15  # of a number in a table that is summed over clients
_MOST_UNITS = 2**53  # above it, floats do not count
_NEAR_ONE = 1e-6  # how far frequencies may be from it in sum
_LARGEST = torch.finfo(torch.float32).max


def pair_jobs_with_replies(
    run: Callable[[Iterator[Job]], Iterator[Update | Failure]], jobs: Iterable[Job]
) -> Iterator[tuple[Job, Update | Failure]]:
    """Yield each job with its reply, and check that the engine yields exactly one reply per job, in job order.

    Raises:
        RunError: The engine yields more or fewer.
    """
    waiting: deque[Job] = deque()

    def iter_jobs() -> Iterator[Job]:
        for job in jobs:
            waiting.append(job)
            yield job

    for reply in run(iter_jobs()):
        if not waiting:
            raise RunError(
                "the engine gave more replies than it was given jobs: one each, in the jobs' order.", key="engine"
            )
        yield waiting.popleft(), reply
    if waiting:
        raise RunError(
            f"the engine left {len(waiting)} jobs without a reply: one each, in the jobs' order.", key="engine"
        )


def validate_reply(
    reply: Update | Failure, job: Job, federation: Federation, norms: dict[int, float] | None = None
) -> Update | Failure:
    """Return a valid update as it is, or a failure with the reason of its rejection; never raises.

    A failure gets the job's own numbers, and its reason in one line.

    Args:
        reply: The reply, whatever it holds.
        job: The job that it answers.
        federation: The server's view.
        norms: Gets the Euclidean norm of a training update's state, by job index.
    """
    try:
        return _validate(reply, job, federation, {} if norms is None else norms)
    except Exception as error:
        return reject(job, f"it could not be validated: {format_exception(error)}")


def reject(job: Job, reason: str, **numbers: Any) -> Failure:
    """Return the failure for a reply that is not used."""
    kind = "update" if job.kind == "train" else "answer"
    return Failure.of(job, one_line(f"its {kind} was refused: {reason}", _REASON), **numbers)


def _validate(reply: Update | Failure, job: Job, federation: Federation, norms: dict[int, float]) -> Update | Failure:
    numbers = {
        "multiply_adds": reply.multiply_adds if _is_count(reply.multiply_adds) else 0,
        "simulated_s": reply.simulated_s if _are_seconds(reply.simulated_s) else None,
    }
    if isinstance(reply, Failure):
        text = one_line(reply.reason, _REASON) if isinstance(reply.reason, str) else ""
        flags = {name: getattr(reply, name) is True for name in ("declined", "late", "absent")}
        return Failure.of(job, text or "none given", **numbers, **flags)
    reason = find_update_error(reply, job, federation, norms)
    if reason is None and reply.compressed:
        reply = decompress(reply, job, federation.problem.layout)
        reason = find_update_error(reply, job, federation, norms)
    return reply if reason is None else reject(job, reason, **numbers)


def find_update_error(
    update: Update, job: Job, federation: Federation, norms: dict[int, float] | None = None
) -> str | None:
    """Return the error of an update, as a sentence, or None.

    An update must answer its job; hold what this kind of job asks for, in valid types, shapes and numbers; be a part of
    the sub-model that was sent; and count no more training samples than the client has registered.

    Args:
        update: The update.
        job: The job that it answers.
        federation: The server's view.
        norms: As of `validate_reply`.
    """
    try:
        reason = (
            _find_type_error(update)
            or _find_job_mismatch(update, job, federation)
            or _KINDS[job.kind](update, job, federation)
        )
        return reason or _find_divergence(update, job, {} if norms is None else norms)
    except FleetFitError as error:
        return one_line(str(error))
    except RecursionError:
        return "it is nested too deeply."
    except Exception as error:
        return f"it is malformed: {format_exception(error)}"


def find_sums_error(summed: RoundSums, size: int, most: int) -> str | None:
    """Return the error of a round's sums, as a sentence, or None.

    Args:
        summed: The sums of the round.
        size: Elements of the full model.
        most: The largest number that an element's movement may be.
    """
    seen = torch.zeros(size, dtype=torch.bool)
    for number, block in enumerate(summed.blocks, 1):
        reason = _find_block_error(block, size, most)
        if reason is None and bool(seen[block.places].any()):
            reason = "has elements of another."
        if reason is not None:
            return f"block {number} of its sums {reason}"
        seen[block.places] = True
    return None


def _find_block_error(block: SummedBlock, size: int, most: int) -> str | None:
    parts = (block.places, block.sums, block.counts)
    if any(part.dtype != torch.int64 or part.shape != (len(block.places),) for part in parts):
        return "is not as many whole numbers as it has elements."
    if not len(block.places) or block.places.min() < 0 or block.places.max() >= size:
        return "has elements that the model does not have."
    if block.counts.min() < 0 or block.counts.max() > block.clients:
        return f"counts more clients than the {block.clients} that are in it: some were sent other states, or lie."
    if bool((block.sums.abs() > most * block.counts).any()):
        return (
            f"is beyond what {block.clients} clients within the range can add up to: some were sent other states, or "
            "masks are left in it."
        )
    return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) < 1e300  # neither infinite nor NaN


def _are_seconds(value: Any) -> bool:
    return value is None or (_is_number(value) and value >= 0)


def _format_value(value: Any) -> str:
    """Return a stranger's value in a few words; a number of thousands of digits has no text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a number of more than 64 bits"
    return one_line(repr(value)) if isinstance(value, str | int | float | None) else type(value).__name__


# ---- all kinds of jobs -------------------------------------------------------------------------------------------


def _find_type_error(update: Update) -> str | None:
    """Check the types, so that later checks can compare and count."""
    for name in ("round", "index", "num_examples", "multiply_adds"):
        if not _is_count(getattr(update, name)):
            return f"its {name} is {_format_value(getattr(update, name))}, expected a whole number."
    if type(update.level) is not int:
        return f"its level is {_format_value(update.level)}, expected a whole number."
    if not isinstance(update.client, int | None) or isinstance(update.client, bool):
        return f"its client is {_format_value(update.client)}."
    if not _are_seconds(update.simulated_s):
        return f"its simulated_s is {_format_value(update.simulated_s)}."
    if not all(isinstance(one, Submodel) for one in (update.submodel, update.dispatched)):
        return "it does not say what it contains."
    if not isinstance(update.metrics, Mapping) or not all(isinstance(key, str) for key in update.metrics):
        return "its metrics are not a table."
    reason = _MetricsChecker().find_error(update.metrics)
    if reason is not None:
        return reason
    if not isinstance(update.compressed, str) or update.compressed not in ("", *LIGHTER):
        return f"its state is compressed by {_format_value(update.compressed)}, which is unknown here."
    return (
        _find_tensor_error("state", update.state)
        or _find_tensor_error("scales", update.scales)
        or _find_untrained_error(update)
    )


def _find_untrained_error(update: Update) -> str | None:
    """Check the names of tensors that no gradient reached: tensors of the state, each once."""
    names = update.untrained
    if not isinstance(names, tuple) or len(names) > len(update.state) or not all(isinstance(n, str) for n in names):
        return "untrained is not a list of its tensors."
    if len(set(names)) < len(names) or not update.state.keys() >= set(names):
        return "untrained names tensors that are not in its state, or one twice."
    return None


def _find_tensor_error(what: str, tensors: Any) -> str | None:
    if not isinstance(tensors, Mapping):
        return f"its {what} is not a table of tensors."
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return f"{_format_value(name)} of its {what} is {_format_value(tensor)}, expected a tensor."
    return None


class _MetricsChecker:
    """Checks the metrics of one update."""

    def __init__(self) -> None:
        self._seen = 0

    def find_error(self, value: Any, depth: int = 0) -> str | None:
        self._seen += 1
        if self._seen > _METRICS or depth > _DEEP:
            return f"its metrics are more than {_METRICS} values, or nested more than {_DEEP} deep."
        if isinstance(value, Mapping):
            if not all(_is_metric_name(key) for key in value):
                return f"its metrics have names that are not printable text of at most {_NAME} characters, or numbers."
            if any(type(n) in (int, float) and not abs(n) <= _MOST_COUNTED for n in value.values()) and depth:
                return "its metrics have a table with numbers that cannot be added up."
        elif isinstance(value, str):
            return None if len(value) <= _REASON else "its metrics have a text that is too long."
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            return "its metrics have a number of more than 64 bits."
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return next((reason for one in inner if (reason := self.find_error(one, depth + 1)) is not None), None)


def _is_metric_name(key: Any) -> bool:
    if isinstance(key, str):
        return 0 < len(key) <= _NAME and key.isprintable()
    return type(key) is int and abs(key) < 2**53


def _find_job_mismatch(update: Update, job: Job, federation: Federation) -> str | None:
    if (update.round, update.index) != (job.round, job.index):
        return f"it answers round {update.round}, job {update.index}, not round {job.round}, job {job.index}."
    if update.client != job.client or update.dispatched != job.submodel:
        return "it answers for another client, or another sub-model than it was sent."
    if update.level != job.level:
        return f"its level is {_format_value(update.level)}, of a job at level {job.level}."
    return find_mismatch(federation.problem.layout, update.submodel)


# ---- kinds of jobs -----------------------------------------------------------------------------------------------


def _find_training_error(update: Update, job: Job, federation: Federation) -> str | None:
    most = None if job.client is None else int(federation.clients.num_examples[job.client])
    if update.num_examples < 1 or (most is not None and update.num_examples > most):
        return f"it counts {update.num_examples} training samples; the client has {most}."
    if not update.submodel.inside(job.submodel):
        return "its sub-model is not a part of the one that it was sent."
    loss = update.metrics.get("loss")
    if not _is_number(loss) or abs(loss) > _LARGEST:
        return "it does not say its training loss, or a loss that is not finite."
    check_shapes(update.state, get_slice_plan(federation.problem.layout, update.submodel).shapes)  # whole granules, too
    expected = LIGHTER.get(update.compressed, torch.float32)
    for name, tensor in update.state.items():
        if tensor.dtype != expected:
            return f'"{name}" is {tensor.dtype}, expected {expected}.'
    return _find_scale_error(update) if update.compressed else None


def _find_divergence(update: Update, job: Job, norms: dict[int, float]) -> str | None:
    """Check that a trained state is finite, by its norm, which is kept."""
    if job.kind != "train" or update.compressed:
        return None
    norms[job.index] = compute_norm(update.state)
    if math.isfinite(norms[job.index]):
        return None
    return (
        "it has numbers that are not finite, or so large that the square of their norm is not: its training diverged."
    )


def _find_scale_error(update: Update) -> str | None:
    """Check the scales of a compressed state; its values are checked after decompression."""
    check_shapes(update.scales, scale_shapes(update.state) if update.compressed == "int8" else {})
    good = all(s.dtype == torch.float32 and bool((s >= 0).all()) and bool(s.isfinite().all())
               for s in update.scales.values())  # fmt: skip
    return None if good else "its scales are not finite numbers from 0 on."


def _find_evaluation_error(update: Update, job: Job, federation: Federation) -> str | None:
    metrics, submodel = update.metrics, update.submodel
    if job.evaluation.own:
        federation.level_index(submodel)  # raises where it is none
    elif submodel != job.submodel:
        return "it has evaluated another sub-model than it was sent."
    n, correct, ensemble = metrics.get("n"), metrics.get("correct"), metrics.get("ensemble")
    if not _is_count(n) or n > _MOST_UNITS or not _is_number(ensemble):
        return "it does not say how many samples it has evaluated, and how well."
    if not isinstance(correct, list) or len(correct) != len(submodel.exits) or not all(_is_number(c) for c in correct):
        return f"it has no score for each of {len(submodel.exits)} exits."
    # of a regression a hit is at most 1 and may be far below 0; of all other tasks it is between 0 and 1
    least = -math.inf if federation.problem.task.name == "regression" else 0.0
    if not all(least <= hits <= n for hits in (*correct, ensemble)):
        return f"it scores {_format_value(max(correct, key=abs))} of {n}: more than there are, or below 0."
    personal = metrics.get("personal")
    if job.evaluation.personal and not (_is_number(personal) and 0 <= personal <= n):
        return f"it scores {_format_value(personal)} personal predictions of {n}."
    return _find_metric_error(metrics.get("own", {}), job.evaluation.metrics, len(submodel.exits))


def _find_metric_error(values: Any, names: Sequence[str], exits: int) -> str | None:
    """Check the values of the user's own metrics: a number or None for each exit of each metric."""
    if not isinstance(values, Mapping) or set(values) != set(names):
        return "it does not have the metrics that it was asked for."
    for name, by_exit in values.items():
        is_valid = isinstance(by_exit, list) and len(by_exit) == exits
        if not is_valid or not all(value is None or _is_number(value) for value in by_exit):
            return f'it has no number for each of {exits} exits of the metric "{_format_value(name)}".'
    return None


def _find_statistics_error(update: Update, job: Job, federation: Federation) -> str | None:
    if update.submodel != job.submodel:
        return "it has measured another sub-model than it was sent."
    n, most = update.num_examples, job.evaluation.samples
    if job.client is not None and job.evaluation.split == "train":
        registered = int(federation.clients.num_examples[job.client])
        most = registered if most is None else min(most, registered)
    if most is not None and n > most:
        return f"it has measured {n} samples; it was asked for at most {most}."
    if not n and not update.state:
        return None  # a client without samples
    positions = _count_norm_inputs(federation.problem, update.submodel)
    check_shapes(update.state, {f"{name}.{key}": (size,) for name, (width, _) in positions.items()
                                for key, size in (("sum", width), ("squares", width), ("count", 1))})  # fmt: skip
    if not positions:
        return None  # a level that ends before the first norm
    if not all(tensor.dtype == torch.float64 for tensor in update.state.values()):
        return "its sums are not in torch.float64."
    if not bool(torch.isfinite(torch.cat([tensor.flatten() for tensor in update.state.values()])).all()):
        return "it has sums that are not finite."
    if _are_plausible(update.state, positions, n):
        return None
    reasons = (_find_implausible_sum(update.state, name, n, each) for name, (_, each) in positions.items())
    return next((reason for reason in reasons if reason is not None), None)


def _are_plausible(sums: Mapping[str, Tensor], positions: Mapping[str, tuple[int, int | None]], n: int) -> bool:
    """Return True if all layers, checked at once, are plausible; False where `_find_implausible_sum` has to decide."""
    if any(each is None for _, each in positions.values()):
        return False
    total, squares = (torch.cat([sums[f"{name}.{key}"] for name in positions]) for key in ("sum", "squares"))
    counts = [n * (each or 0) for _, each in positions.values()]
    if torch.cat([sums[f"{name}.count"] for name in positions]).tolist() != counts or not min(counts) > 0:
        return False
    widths = torch.tensor([width for width, _ in positions.values()])
    count = torch.tensor(counts, dtype=torch.float64).repeat_interleave(widths)
    fine = (squares >= 0) & _has_variance(total, squares, count) & (squares <= count * _LARGEST)
    return max(counts) < _MOST_UNITS and bool(fine.all())


def _has_variance(total: Tensor, squares: Tensor, count: Tensor | float) -> Tensor:
    """Return for each channel whether (sum x)^2 <= n sum x^2, up to the precision and range of float32."""
    return total * total <= count * (squares * (1 + 1e-5) + count * 1e-37)


def _find_implausible_sum(sums: Mapping[str, Tensor], name: str, n: int, positions: int | None) -> str | None:
    """Return why n samples cannot give these sums over the inputs of a batch-norm layer, or None.

    Args:
        sums: `.sum` and `.squares` [C] and `.count` [1], by name of the layer.
        name: Of the layer.
        n: Samples.
        positions: Inputs of one sample in each channel, or None where the shapes do not tell.
    """
    total, squares, count = (sums[f"{name}.{key}"] for key in ("sum", "squares", "count"))
    counted = float(count)
    right = counted == n * positions if positions is not None else counted >= n and counted == int(counted)
    if not right or not 0 < counted < _MOST_UNITS:
        return f'it counts {counted:g} inputs of "{name}", for {n} samples.'
    if not bool((squares >= 0).all()):
        return f'it has sums of squares below 0 for "{name}".'
    if not bool(_has_variance(total, squares, counted).all()):
        return f'it has sums for "{name}" whose variance would be below 0.'
    if not bool((squares <= counted * _LARGEST).all()):
        return f'it has sums for "{name}" whose variance is not finite.'
    return None


def _find_labels_error(update: Update, job: Job, federation: Federation) -> str | None:
    if update.state.keys() != {FREQUENCIES}:
        return "it has other tensors than the frequencies of its classes."
    return find_prior_error(update.state[FREQUENCIES], federation.classes)


def find_prior_error(prior: Tensor, classes: int) -> str | None:
    """Return why a tensor does not have the frequency of each class, as a sentence, or None."""
    if tuple(prior.shape) != (classes,) or prior.dtype != torch.float64:
        return f"its frequencies are {prior.dtype} {list(prior.shape)}, expected torch.float64 [{classes}]."
    if not bool((prior > 0).all()) or not abs(float(prior.sum()) - 1) <= _NEAR_ONE:
        return "its frequencies are not numbers above 0 that sum to 1."
    return None


_KINDS = {
    "train": _find_training_error, "evaluate": _find_evaluation_error, "statistics": _find_statistics_error,
    "labels": _find_labels_error,
}  # fmt: skip


def _identity(x: Tensor) -> Tensor:
    return x


@lru_cache(maxsize=64)
def _count_norm_inputs(problem: Problem, submodel: Submodel) -> dict[str, tuple[int, int | None]]:
    """Return each batch-norm layer's channels, and how many inputs of each channel a sample gives it.

    The latter is read off a pass on the meta device; None for a layer, or a model, that does not tell.
    """
    batch = 2
    with on_meta():
        module = build_module(problem.architecture, {**problem.layout.full_sizes, **submodel.sizes}, submodel.exits)
        x = make_input(problem.architecture, problem.input_shape, batch)
    norms, seen = batch_norms(module), dict[str, int]()

    def counting(name: str) -> Callable[..., None]:
        def hook(norm: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[name] = seen.get(name, 0) + inputs[0].numel() // inputs[0].shape[1]

        return hook

    for name, norm in norms.items():
        norm.register_forward_pre_hook(counting(name))
        norm.forward = _identity  # type: ignore[assignment, method-assign]  # PyTorch takes long over a norm's shape
    try:
        with torch.no_grad(), on_meta():
            outputs(module.eval(), x)
    except Exception:  # a module that cannot be run without numbers
        seen = {}
    each = {name: divmod(count, batch) for name, count in seen.items()}
    return {name: (norm.num_features, each[name][0] if name in each and not each[name][1] else None)
            for name, norm in norms.items()}  # fmt: skip


# ---- jobs that a node gets ---------------------------------------------------------------------------------------


def find_job_error(job: Job, problem: Problem) -> str | None:
    """Return the error of a job that a node got, as a sentence, or None.

    A job must be of a known kind, with a sub-model of this problem and a state that fits it, and settings in range.
    """
    try:
        return _find_field_error(job) or _find_settings_error(job.evaluation) or _find_content_error(job, problem)
    except FleetFitError as error:
        return one_line(str(error))
    except Exception as error:
        return f"it is malformed: {format_exception(error)}"


def _find_field_error(job: Job) -> str | None:
    if job.kind not in _KINDS:
        return f"it asks for {_format_value(job.kind)}, which is unknown here."
    for name in ("round", "rounds", "index", "client", "seed", "level"):
        if not _is_count(getattr(job, name)):
            return f"its {name} is {_format_value(getattr(job, name))}, expected a whole number."
    if type(job.memory_version) is not int or not -1 <= job.memory_version < 2**63:
        return f"its memory_version is {_format_value(job.memory_version)}."
    if not isinstance(job.method, Mapping):
        return "it names no method."
    if job.prior and (reason := find_prior_error(torch.tensor(job.prior, dtype=torch.float64), len(job.prior))):
        return reason
    return _find_tensor_error("state", job.state) or _find_tensor_error("statistics", job.statistics)


def _find_settings_error(evaluation: Evaluation) -> str | None:
    words: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (evaluation.norm, ("static", "batch")),
        (evaluation.split, ("test", "validation", "train")),
        (evaluation.scope, ("local", "global")),
    )
    for value, choices in words:
        if not isinstance(value, str) or value not in choices:
            return f"it has {_format_value(value)}, expected one of {', '.join(map(str, choices))}."
    if not _is_count(evaluation.batch_size) or not evaluation.batch_size:
        return f"its batch_size is {_format_value(evaluation.batch_size)}, expected a whole number above 0."
    if evaluation.samples is not None and not _is_count(evaluation.samples):
        return f"its samples is {_format_value(evaluation.samples)}, expected a whole number."
    if not all(isinstance(name, str) for name in evaluation.metrics):
        return "the names of metrics are not text."
    flags = (evaluation.shuffle, evaluation.own, evaluation.personal)
    return None if all(isinstance(flag, bool) for flag in flags) else "its flags are not true or false."


def _find_content_error(job: Job, problem: Problem) -> str | None:
    reason = find_mismatch(problem.layout, job.submodel)
    if reason is not None:
        return reason
    if job.kind == "labels":
        return "it sends tensors, and asks for classes alone." if job.state or job.statistics else None
    check_shapes(job.state, get_slice_plan(problem.layout, job.submodel).shapes)
    for name, tensor in (*job.state.items(), *job.statistics.items()):
        if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
            return f'"{one_line(name)}" has numbers that are not finite torch.float32.'
    if job.statistics and not job.evaluation.own:  # otherwise those of all levels, for the device to choose from
        norms = _count_norm_inputs(problem, job.submodel)
        check_shapes(job.statistics, {f"{name}.{key}": (width,) for name, (width, _) in norms.items()
                                      for key in ("mean", "var")})  # fmt: skip
        if any(bool((t < 0).any()) for name, t in job.statistics.items() if name.endswith(".var")):
            return "it has a variance below 0."
    return None
