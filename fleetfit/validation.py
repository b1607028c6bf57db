"""Validate replies, sums of updates, and jobs that a node gets.

A reply may come from a device that is broken, old or hostile, and a job from such a server. Types and ranges of all
fields are checked first, by a schema that follows from the dataclass. Then shapes must be equal, and sums of a client
possible for its number of samples. An error makes the reply a failure with a reason; nothing is raised.
"""

import math
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Annotated, Any

import pydantic
import torch
from pydantic import ConfigDict, Field, InstanceOf, PlainValidator
from torch import Tensor

from fleetfit.aggregate import SummedBlock
from fleetfit.anatomy import State, batch_norms, build_module, make_input, outputs
from fleetfit.anatomy.meta import on_meta
from fleetfit.core import FREQUENCIES, Evaluation, Failure, Federation, Job, Local, Problem, RoundSums, Update
from fleetfit.core.section import Count
from fleetfit.errors import FleetFitError, RunError, format_exception, one_line
from fleetfit.hooks import build
from fleetfit.messages import LIGHTER, decompress, job_size, reply_size, scale_shapes
from fleetfit.submodel import Submodel, check_shapes, compute_norm, find_mismatch, get_slice_plan, make_flat_state
from fleetfit.submodel.state import Shapes

_REASON = 500  # characters of a stranger's reason, or of a text in metrics
_NAME = 100  # characters of what a metric is called
_METRICS = 10_000  # numbers and texts in an update's metrics,
_DEEP = 8  # and how deep they nest
_MAX_COUNTED = 1e15  # of a number in a table that is summed over clients
_MAX_UNITS = 2**53  # above it, floats do not count
_NEAR_ONE = 1e-6  # how far frequencies may be from it in sum
_LARGEST = torch.finfo(torch.float32).max


# ---- schemas -------------------------------------------------------------------------------------------------------


def _check_tensors(tensors: Any) -> Any:
    if not isinstance(tensors, Mapping):
        raise ValueError("not a table of tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ValueError(f"{_format_value(name)} is {_format_value(tensor)}, expected a tensor")
    return tensors


def _check_metrics(metrics: Any) -> Any:
    """Check sizes, names and numbers of nested metrics."""
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise ValueError("not a table by name")
    waiting, seen = [(metrics, 0)], 0
    while waiting:
        (value, depth), seen = waiting.pop(), seen + 1
        if seen > _METRICS or depth > _DEEP:
            raise ValueError(f"more than {_METRICS} values, or nested more than {_DEEP} deep")
        if isinstance(value, Mapping):
            if not all(map(_is_metric_name, value)):
                raise ValueError(f"names are not printable text of at most {_NAME} characters, or numbers")
            if depth and any(type(n) in (int, float) and not abs(n) <= _MAX_COUNTED for n in value.values()):
                raise ValueError("a table has numbers that cannot be added up")
        elif isinstance(value, str) and len(value) > _REASON:
            raise ValueError("a text is too long")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("a number has more than 64 bits")
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        waiting += [(each, depth + 1) for each in inner]
    return metrics


def _is_metric_name(key: Any) -> bool:
    if isinstance(key, str):
        return 0 < len(key) <= _NAME and key.isprintable()
    return type(key) is int and abs(key) < 2**53


Whole = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
Seconds = Annotated[float, Field(ge=0, lt=1e300)]
E = typing.TypeVar("E")
Listed = Annotated[list[E], Field(fail_fast=True)]
_STRICT = ConfigDict(strict=True, arbitrary_types_allowed=True)
_SCHEMAS: Mapping[Any, Any] = {
    int: Whole, int | None: Whole | None, float | None: Seconds | None,
    State: Annotated[Any, PlainValidator(_check_tensors)],
    Submodel: InstanceOf[Submodel], Local: InstanceOf[Local], Evaluation: InstanceOf[Evaluation],
    tuple[str, ...]: Annotated[tuple[str, ...], Field(fail_fast=True)],
    tuple[float, ...]: Annotated[tuple[Number, ...], Field(fail_fast=True)],
    tuple[Submodel, ...]: Any, Mapping[str, Any]: Annotated[Any, PlainValidator(_check_metrics)],
}  # fmt: skip
"""What a field of a type must be, where that is more than the type."""


def _make_schema(dataclass: type, **fields: Any) -> type[pydantic.BaseModel]:
    """Return the strict schema of a dataclass, with other types for some fields."""
    hints = typing.get_type_hints(dataclass)
    types: dict[str, Any] = {name: (fields.get(name, _SCHEMAS.get(hint, hint)), ...) for name, hint in hints.items()}
    return pydantic.create_model(dataclass.__name__, __config__=_STRICT, **types)


class _Scores(pydantic.BaseModel):
    """The metrics of an evaluation."""

    model_config = _STRICT
    n: Annotated[int, Field(ge=0, le=_MAX_UNITS)]
    correct: Listed[Number]
    ensemble: Number
    personal: Number | None = None
    own: dict[str, Listed[Number | None]] = Field({})


def _find_error(schema: type[pydantic.BaseModel], values: Mapping[str, Any]) -> str | None:
    """Return the first error of values as a sentence, or None."""
    try:
        schema.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "value_error":
            return one_line(f"its {name}: {first['msg'].removeprefix('Value error, ')}.", _REASON)
        if first["type"] == "missing":
            return f"its {name} is missing."
        expected = one_line(first["msg"].removeprefix("Input should be "), 60)
        return one_line(f"its {name} is {_format_value(first['input'])}, expected {expected}.", _REASON)
    return None


def _format_value(value: Any) -> str:
    """Return a stranger's value in a few words; a number of thousands of digits has no text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "a number of more than 64 bits"
    return one_line(repr(value)) if isinstance(value, str | int | float | None) else type(value).__name__


# ---- replies -------------------------------------------------------------------------------------------------------


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


def validate_and_measure(
    reply: Update | Failure, job: Job, federation: Federation, norms: dict[int, float] | None = None
) -> Update | Failure:
    """Return a reply as validation passes it, with its bytes counted; never raises.

    Args:
        reply: The reply, whatever it holds.
        job: The job that it answers.
        federation: The server's view.
        norms: Gets the norm of a training update's state, by job index.
    """
    result = validate_reply(reply, job, federation, norms)
    bytes_up = 0
    if not (isinstance(result, Failure) and result.absent):
        try:
            bytes_up = reply_size(reply, federation.problem.layout)
        except Exception as error:  # no client can have sent it
            if isinstance(result, Update):
                result = reject(job, f"it has no bytes: {format_exception(error)}")
    return replace(result, bytes_down=job_size(job, federation.problem.layout), bytes_up=bytes_up)


def reject(job: Job, reason: str, **numbers: Any) -> Failure:
    """Return the failure for a reply that is not used."""
    kind = "update" if job.kind == "train" else "answer"
    return Failure.of(job, one_line(f"its {kind} was refused: {reason}", _REASON), **numbers)


def _validate(reply: Update | Failure, job: Job, federation: Federation, norms: dict[int, float]) -> Update | Failure:
    work, seconds = reply.multiply_adds, reply.simulated_s
    numbers = {
        "multiply_adds": work if type(work) is int and 0 <= work < 2**63 else 0,
        "simulated_s": seconds if isinstance(seconds, int | float) and 0 <= seconds < 1e300 else None,
    }
    if isinstance(reply, Failure):
        text = one_line(reply.reason, _REASON) if isinstance(reply.reason, str) else ""
        flags = {name: getattr(reply, name) is True for name in ("declined", "late", "absent")}
        return Failure.of(job, text or "none given", **numbers, **flags)
    reason = find_update_error(reply, job, federation, norms)
    if reason is None and reply.compressed:
        reply = decompress(reply, job, federation.problem.layout)
        reason = find_update_error(reply, job, federation, norms)
    if reason is not None:
        return reject(job, reason, **numbers)
    if job.kind != "train":
        return reply
    state = make_flat_state(federation.problem.layout, reply.submodel, reply.state)
    return reply if state is reply.state else replace(reply, state=state)


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
            _find_error(_UPDATE, vars(update))
            or _find_untrained_error(update)
            or _find_job_mismatch(update, job, federation)
            or find_extra_error(update.extra, _get_extra_shapes(federation.method, federation.problem, job)[1])
            or _KINDS[job.kind](update, job, federation)
        )
        return reason or _find_divergence(update, job, {} if norms is None else norms)
    except FleetFitError as error:
        return one_line(str(error))
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


# ---- a reply to any kind of job --------------------------------------------------------------------------------------


def _find_untrained_error(update: Update) -> str | None:
    """Check the names of tensors that no gradient reached: tensors of the state, each once."""
    names = set(update.untrained)
    if len(names) == len(update.untrained) and update.state.keys() >= names:
        return None
    return "its untrained names tensors that are not in its state, or one twice."


def _find_job_mismatch(update: Update, job: Job, federation: Federation) -> str | None:
    if (update.round, update.index) != (job.round, job.index):
        return f"it answers round {update.round}, job {update.index}, not round {job.round}, job {job.index}."
    if update.client != job.client or update.dispatched != job.submodel:
        return "it answers for another client, or another sub-model than it was sent."
    if update.level != job.level:
        return f"its level is {_format_value(update.level)}, of a job at level {job.level}."
    return find_mismatch(federation.problem.layout, update.submodel)


def _get_extra_shapes(method: Any, problem: Problem, job: Job) -> tuple[Shapes, Shapes]:
    return method.declare_extra(problem, job.submodel) if job.kind == "train" else ({}, {})


# ---- kinds of jobs -----------------------------------------------------------------------------------------------


def _find_training_error(update: Update, job: Job, federation: Federation) -> str | None:
    most = None if job.client is None else int(federation.clients.num_examples[job.client])
    if update.num_examples < 1 or (most is not None and update.num_examples > most):
        return f"it counts {update.num_examples} training samples; the client has {most}."
    if not update.submodel.is_part_of(job.submodel):
        return "its sub-model is not a part of the one that it was sent."
    loss: Any = update.metrics.get("loss")
    if type(loss) not in (int, float) or not abs(loss) <= _LARGEST:
        return "its loss is missing, or not a finite number."
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


def find_extra_error(tensors: State, shapes: Shapes) -> str | None:
    """Return why tensors beside a state are not those that the method declares, as a sentence, or None."""
    if tensors.keys() != shapes.keys():
        return one_line(f"its extra tensors are {sorted(tensors)}; its method declares {sorted(shapes)}.", _REASON)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]) or tensor.dtype != torch.float32:
            actual, expected = list(tensor.shape), list(shapes[name])
            return f'its extra tensor "{name}" is {tensor.dtype} {actual}, expected torch.float32 {expected}.'
        if not bool(torch.isfinite(tensor).all()):
            return f'its extra tensor "{name}" has numbers that are not finite.'
    return None


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
    reason = _find_error(_Scores, metrics)
    if reason is not None:
        return reason
    n, correct, exits, own = metrics["n"], metrics["correct"], len(submodel.exits), metrics.get("own", {})
    if len(correct) != exits:
        return f"it has {len(correct)} scores for {exits} exits."
    # of a regression a hit is at most 1 and may be far below 0; of all other tasks it is between 0 and 1
    least = -math.inf if federation.problem.task.name == "regression" else 0.0
    if not all(least <= hits <= n for hits in (*correct, metrics["ensemble"])):
        return f"it scores {_format_value(max(correct, key=abs))} of {n}: more than there are, or below 0."
    personal = metrics.get("personal")
    if job.evaluation.personal and (personal is None or not 0 <= personal <= n):
        return f"it scores {_format_value(personal)} personal predictions of {n}."
    if set(own) != set(job.evaluation.metrics) or any(len(by_exit) != exits for by_exit in own.values()):
        return f"it does not have the metrics that it was asked for, with a number for each of {exits} exits."
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
    return _find_implausible_sum(update.state, positions, n)


def _find_implausible_sum(
    sums: Mapping[str, Tensor], positions: Mapping[str, tuple[int, int | None]], n: int
) -> str | None:
    """Return why n samples cannot give these sums of batch norms, `.sum` and `.squares` [C], `.count` [1]; or None."""
    counts = torch.cat([sums[f"{name}.count"] for name in positions])
    for (name, (_, each)), counted in zip(positions.items(), counts.tolist(), strict=True):
        right = counted == n * each if each is not None else counted >= n and counted == int(counted)
        if not right or not 0 < counted < _MAX_UNITS:
            return f'it counts {counted:g} inputs of "{name}", for {n} samples.'
    total, squares = (torch.cat([sums[f"{name}.{key}"] for name in positions]) for key in ("sum", "squares"))
    layer = torch.arange(len(counts)).repeat_interleave(torch.tensor([width for width, _ in positions.values()]))
    count = counts[layer]
    checks = (
        ("sums of squares below 0", squares >= 0),
        # (sum x)^2 <= n sum x^2, up to the precision and range of float32
        ("sums whose variance is below 0", total * total <= count * (squares * (1 + 1e-5) + count * 1e-37)),
        ("sums whose variance is not finite", squares <= count * _LARGEST),
    )
    for fault, fine in checks:
        if not bool(fine.all()):
            return f'it has {fault} for "{[*positions][int(layer[~fine][0])]}".'
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
_UPDATE = _make_schema(Update, level=int)  # compared with the job's
_JOB = _make_schema(
    Job, client=Whole, memory_version=Annotated[int, Field(ge=-1, lt=2**63)], method=InstanceOf[dict[str, Any]]
)
_EVALUATION = _make_schema(Evaluation, batch_size=Count)


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

    def count_inputs(name: str, norm: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[name] = seen.get(name, 0) + inputs[0].numel() // inputs[0].shape[1]

    for name, norm in norms.items():
        norm.register_forward_pre_hook(partial(count_inputs, name))
        norm.forward = lambda x: x  # type: ignore[assignment]  # PyTorch takes long over a norm's shape
    try:
        with torch.no_grad(), on_meta():
            outputs(module.eval(), x)
    except Exception:  # a module that cannot be run without numbers
        seen = {}
    each = {name: divmod(count, batch) for name, count in seen.items()}
    return {name: (norm.num_features, each[name][0] if name in each and not each[name][1] else None)
            for name, norm in norms.items()}  # fmt: skip


def get_statistics_shapes(problem: Problem, submodel: Submodel) -> Shapes:
    """Return the shapes of a sub-model's static batch-norm statistics: `layer.mean` and `layer.var` [C]."""
    widths = {name: width for name, (width, _) in _count_norm_inputs(problem, submodel).items()}
    return {f"{name}.{key}": (width,) for name, width in widths.items() for key in ("mean", "var")}


# ---- jobs that a node gets ---------------------------------------------------------------------------------------


def find_job_error(job: Job, problem: Problem) -> str | None:
    """Return the error of a job that a node got, as a sentence, or None.

    A job must be of a known kind, with a sub-model of this problem and a state that fits it, and settings in range.
    """
    try:
        return (
            _find_error(_JOB, vars(job))
            or _find_error(_EVALUATION, vars(job.evaluation))
            or _find_content_error(job, problem)
            or find_extra_error(job.extra, _get_extra_shapes(build(job.method), problem, job)[0])
        )
    except FleetFitError as error:
        return one_line(str(error))
    except Exception as error:
        return f"it is malformed: {format_exception(error)}"


def _find_content_error(job: Job, problem: Problem) -> str | None:
    reason = find_mismatch(problem.layout, job.submodel)
    if reason is not None:
        return reason
    if job.prior and (reason := find_prior_error(torch.tensor(job.prior, dtype=torch.float64), len(job.prior))):
        return reason
    if job.kind == "labels":
        return "it sends tensors, and asks for classes alone." if job.state or job.statistics else None
    check_shapes(job.state, get_slice_plan(problem.layout, job.submodel).shapes)
    for name, tensor in (*job.state.items(), *job.statistics.items()):
        if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
            return f'"{one_line(name)}" has numbers that are not finite torch.float32.'
    if job.statistics and not job.evaluation.own:  # otherwise those of all levels, for the device to choose from
        check_shapes(job.statistics, get_statistics_shapes(problem, job.submodel))
        if any(bool((t < 0).any()) for name, t in job.statistics.items() if name.endswith(".var")):
            return "it has a variance below 0."
    return None
