"""The one check of what comes back, on every engine, before it touches a state, a table or a column.

A reply may come from a device that is broken, old or hostile. Each field is looked at for its type before anything is
done with it; sizes are compared before anything is made of them; shapes are compared by equality, never by
broadcasting.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fleetfit.compression import DTYPES, decompress, rows_of
from fleetfit.errors import FleetFitError, RunError
from fleetfit.layout import Layout, batch_norms, build_module
from fleetfit.submodel import Submodel, check_shapes, finite
from fleetfit.values import Failure, Federation, Job, Problem, Update

_WORD = 200  # characters of a stranger's text that go into a report


def paired(
    run: Callable[[Iterator[Job]], Iterator[Update | Failure]], jobs: Iterable[Job]
) -> Iterator[tuple[Job, Update | Failure]]:
    """Yield each job with its reply, and hold an engine to its promise: one reply each, in the jobs' order.

    Raises:
        RunError: The engine gives more or fewer.
    """
    waiting: deque[Job] = deque()

    def noted() -> Iterator[Job]:
        for job in jobs:
            waiting.append(job)
            yield job

    for reply in run(noted()):
        if not waiting:
            raise RunError("the engine gave more replies than it was given jobs: one each, in the jobs' order.")
        yield waiting.popleft(), reply
    if waiting:
        raise RunError(f"the engine left {len(waiting)} jobs without a reply: one each, in the jobs' order.")


def examined(reply: Update | Failure, job: Job, federation: Federation) -> Update | Failure:
    """Return a reply that may be used: an update as it is, or a failure that says why it was refused.

    A failure comes back with the job's own numbers, whatever it says it answers.
    """
    spent = reply.multiply_adds if _count(reply.multiply_adds) else 0
    seconds = reply.simulated_s if _seconds(reply.simulated_s) else None
    flags = {}
    if isinstance(reply, Failure):
        reason = reply.reason if isinstance(reply.reason, str) else "none given"
        flags = {name: getattr(reply, name) is True for name in ("declined", "late", "absent")}
    else:
        wrong = problem_with(reply, job, federation)
        if wrong is None and reply.compressed:
            reply = decompress(reply, job, federation.problem.layout)
            wrong = problem_with(reply, job, federation)
        if wrong is None:
            return reply
        reason = f"its {'update' if job.kind == 'train' else 'answer'} was refused: {wrong}"
    return Failure(job.round, job.index, job.client, job.level, job.submodel, reason, multiply_adds=spent,
                   simulated_s=seconds, **flags)  # fmt: skip


def problem_with(update: Update, job: Job, federation: Federation) -> str | None:
    """Return what is wrong with an update, as a sentence, or None.

    It must answer this job; hold what its kind of job asks for, in the right types, shapes and numbers; be a piece of
    what was sent; and count no more training samples than the client has registered.
    """
    try:
        return _fields(update) or _answers(update, job, federation) or _KINDS[job.kind](update, job, federation)
    except (FleetFitError, ValueError) as error:
        return str(error)[:_WORD]
    except RecursionError:
        return "it is nested too deeply."
    except (TypeError, RuntimeError, OverflowError, AttributeError, KeyError, IndexError) as error:
        return f"it is malformed: {type(error).__name__}: {error}"[:_WORD]


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # neither infinite nor NaN


def _seconds(value: Any) -> bool:
    return value is None or (_number(value) and value >= 0)


def _shown(value: Any) -> str:
    return repr(value)[:_WORD] if isinstance(value, str | int | float | None) else type(value).__name__


# ---- what all kinds have in common -------------------------------------------------------------------------------


def _fields(update: Update) -> str | None:
    """Look at the types, so that everything after it may compare and count."""
    for name in ("round", "index", "num_examples", "multiply_adds"):
        if not _count(getattr(update, name)):
            return f"its {name} is {_shown(getattr(update, name))}, expected a whole number."
    if type(update.level) is not int:
        return f"its level is {_shown(update.level)}, expected a whole number."
    if not isinstance(update.client, int | None) or isinstance(update.client, bool):
        return f"its client is {_shown(update.client)}."
    if not _seconds(update.simulated_s):
        return f"its simulated_s is {_shown(update.simulated_s)}."
    if not all(isinstance(piece, Submodel) for piece in (update.submodel, update.dispatched)):
        return "it does not say what it contains."
    if not isinstance(update.metrics, Mapping) or not all(isinstance(key, str) for key in update.metrics):
        return "its metrics are no table."
    if not isinstance(update.compressed, str) or update.compressed not in ("", *DTYPES):
        return f"its state is compressed by {_shown(update.compressed)}, which is unknown here."
    return _tensors("state", update.state) or _tensors("scales", update.scales)


def _tensors(what: str, found: Any) -> str | None:
    if not isinstance(found, Mapping):
        return f"its {what} is no table of tensors."
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return f"{_shown(name)} of its {what} is {_shown(tensor)}, expected a tensor."
    return None


def _answers(update: Update, job: Job, federation: Federation) -> str | None:
    if (update.round, update.index) != (job.round, job.index):
        return f"it answers round {update.round}, job {update.index}, not round {job.round}, job {job.index}."
    if update.client != job.client or update.dispatched != job.submodel:
        return "it answers for another client, or another sub-model than it was sent."
    if update.level != job.level and not 0 <= update.level < len(federation.levels):
        return f"its level is {update.level}, of {len(federation.levels)}."
    return _strange(update.submodel, federation.problem.layout)


def _strange(piece: Submodel, layout: Layout) -> str | None:
    """Return why a sub-model is none of this model, without making anything of its size."""
    for axis, kept in piece.channels.items():
        size = layout.axes[axis].size if axis in layout.axes else 0
        ends = (kept.start, kept.stop - 1) if isinstance(kept, range) else kept[: size + 1]
        distinct = isinstance(kept, range) or (len(kept) <= size and len(set(kept)) == len(kept))
        if not len(ends) or min(ends) < 0 or max(ends) >= size or not len(kept) or not distinct:
            return "its sub-model keeps channels that the model does not have."
    if not piece.exits or not set(piece.exits) <= set(layout.exits) or tuple(sorted(set(piece.exits))) != piece.exits:
        return "its sub-model has exits that the model does not have."
    return None


# ---- kinds of jobs -----------------------------------------------------------------------------------------------


def _trained(update: Update, job: Job, federation: Federation) -> str | None:
    most = None if job.client is None else int(federation.clients.num_examples[job.client])
    if update.num_examples < 1 or (most is not None and update.num_examples > most):
        return f"it counts {update.num_examples} training samples; the client has {most}."
    if not update.submodel.inside(job.submodel):
        return "its sub-model is no piece of the one that it was sent."
    if not _number(update.metrics.get("loss")):
        return "it does not say its training loss, or a loss that is not finite."
    layout, piece = federation.problem.layout, update.submodel
    check_shapes(update.state, layout.shapes({a: len(c) for a, c in piece.channels.items()}, piece.exits))
    expected = DTYPES.get(update.compressed, torch.float32)
    for name, tensor in update.state.items():
        if tensor.dtype != expected:
            return f'"{name}" is {tensor.dtype}, expected {expected}.'
    if update.compressed:
        return _scaled(update)
    return None if finite(update.state) else "it has numbers that are not finite: its training diverged."


def _scaled(update: Update) -> str | None:
    """Look at the scales of a compressed state, whose own values are looked at once they are numbers again."""
    rows = {name: (rows_of(tuple(tensor.shape)),) for name, tensor in update.state.items()}
    check_shapes(update.scales, rows if update.compressed == "int8" else {})
    good = all(s.dtype == torch.float32 and bool((s >= 0).all()) and bool(s.isfinite().all())
               for s in update.scales.values())  # fmt: skip
    return None if good else "its scales are not finite numbers from 0 on."


def _evaluated(update: Update, job: Job, federation: Federation) -> str | None:
    metrics, piece = update.metrics, update.submodel
    if job.evaluation.own:
        federation.level_index(piece)  # raises where it is none
    elif piece != job.submodel:
        return "it has evaluated another sub-model than it was sent."
    correct = metrics.get("correct")
    if not _count(metrics.get("n")) or not _number(metrics.get("ensemble")):
        return "it does not say how many samples it has evaluated, and how well."
    if not isinstance(correct, list) or len(correct) != len(piece.exits) or not all(_number(c) for c in correct):
        return f"it has no score for each of {len(piece.exits)} exits."
    return None


def _summed(update: Update, job: Job, federation: Federation) -> str | None:
    if update.submodel != job.submodel:
        return "it has measured another sub-model than it was sent."
    if not update.state:
        return None  # a client without samples
    check_shapes(update.state, _sums(federation.problem, update.submodel))
    if not all(tensor.dtype == torch.float64 for tensor in update.state.values()):
        return "its sums are not in torch.float64."
    if not all(bool(torch.isfinite(tensor).all()) for tensor in update.state.values()):
        return "it has sums that are not finite."
    positive = (t for name, t in update.state.items() if not name.endswith(".sum"))
    return None if all(bool((tensor >= 0).all()) for tensor in positive) else "it has counts or squares below 0."


_KINDS = {"train": _trained, "evaluate": _evaluated, "statistics": _summed}


@lru_cache(maxsize=64)
def _sums(problem: Problem, piece: Submodel) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the sums over the batch-norm layers of a sub-model."""
    with torch.device("meta"):
        module = build_module(problem.architecture, {**problem.layout.full_sizes, **piece.sizes}, piece.exits)
    found: dict[str, tuple[int, ...]] = {}
    for name, norm in batch_norms(module).items():
        found |= {f"{name}.sum": (norm.num_features,), f"{name}.squares": (norm.num_features,), f"{name}.count": (1,)}
    return found
