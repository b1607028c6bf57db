"""The jobs of an evaluation: which client or test set is measured at which level, and with which settings."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from fleetfit.core import Evaluation, Failure, Federation, Job, Server
from fleetfit.core.section import Norm
from fleetfit.core.work import Kind, Split
from fleetfit.evaluation.levels import Statistics, find_known_levels, find_top_level, get_level_state
from fleetfit.evaluation.scope import EvaluationPart, EvaluationScope
from fleetfit.layout import State
from fleetfit.seeds import derive_seed, make_numpy_rng

OWN = -1
"""In a tag: the level that the device itself chooses, if the server does not know it."""


class Tag(NamedTuple):
    """An evaluation job.

    Attributes:
        norm: Batch-norm policy.
        split: Of the data.
        level: 0-based, or `OWN`.
        client: None for the server's own test set.
        scope: In the job's settings.
        is_own: Whether it measures the client's own level.
    """

    norm: Norm
    split: Split
    level: int
    client: int | None
    scope: Literal["local", "global"]
    is_own: bool = False


def iter_tags(federation: Federation, server: Server, scope: EvaluationScope, norms: Sequence[Norm]) -> Iterator[Tag]:
    """Yield the jobs level by level and scope by scope, so that neighbors share a state and are run together.

    A client at the largest level has one "global" job for both columns, unless devices adapt jobs, perhaps by scope.
    """
    top, split, known = find_top_level(federation), scope.evaluation.split, find_known_levels(federation, server, scope)
    ids, adapts = _draw_clients(federation, scope), "adapt_job" in federation.method.own_hooks
    for norm in norms:
        for level in range(top, -1, -1):
            own = [client for client in ids if known[client] == level]
            if level == top:
                for client in ids if scope.beyond else own:
                    yield Tag(norm, split, level, client, "global", not adapts and bool(known[client] == level))
            if level != top or adapts:
                yield from (Tag(norm, split, level, client, "local", True) for client in own)
            if scope.whole and federation.device is not None and (federation.levels[level].averaged or level == top):
                yield Tag(norm, split, level, None, "global")
        if scope.beyond and not federation.method.needs_budgets:
            yield from (Tag(norm, split, OWN, client, "local", True) for client in ids)
        if scope.whole and split == "test" and norm == norms[0]:
            yield from (Tag(norm, "validation", top, client, "global") for client in ids)


def _draw_clients(federation: Federation, scope: EvaluationScope) -> Sequence[int]:
    """Return the clients of an evaluation; those of a part are the same each time, and as many of each level as fit."""
    ids: Sequence[int] = range(len(federation.clients))
    if scope.clients is not None and scope.clients < len(ids):
        ids = sorted(
            make_numpy_rng(federation.seed, "evaluate").choice(len(ids), scope.clients, replace=False).tolist()
        )
    count = None if scope.part is None else scope.part.clients
    if count is None or count >= len(ids):
        return ids
    order: list[int] = make_numpy_rng(federation.seed, "evaluate.part").permutation(ids).tolist()
    if federation.method.needs_budgets:  # without, the levels that the server knows change
        order.sort(key=lambda client: federation.level_of[client])
    return sorted(order[(2 * i + 1) * len(ids) // (2 * count)] for i in range(count))


def iter_jobs(
    federation: Federation, server: Server, scope: EvaluationScope, tags: Sequence[Tag], statistics: Statistics
) -> Iterator[Job]:
    """Yield the job of each tag."""
    last, top, part = -1, find_top_level(federation), scope.part or EvaluationPart()
    state: State = {}
    all_moments = {f"level{i + 1}/{name}": t for i, moments in statistics.items() for name, t in moments.items()}
    for index, (norm, split, tag_level, client, tag_scope, _) in enumerate(tags):
        chooses = tag_level == OWN
        level = top if chooses else tag_level
        if level != last:
            last, state = level, get_level_state(federation, server, level)
        # also of the server's test set, which shares a pass with the clients
        personal = scope.evaluation.personal and split == scope.evaluation.split
        samples = scope.samples if client is None else part.client_samples
        settings = replace(scope.evaluation, norm=norm, split=split, samples=samples, own=chooses, scope=tag_scope,
                           personal=personal)  # fmt: skip
        moments = {} if norm != "static" else all_moments if chooses else statistics.get(level)
        job = make_job("evaluate", federation, server, index, client, level, state, settings, moments)
        if samples is not None:  # the same samples in all rounds
            owner = () if client is None else (client,)
            job = replace(job, seed=derive_seed(federation.seed, "evaluate.samples", split, *owner))
        yield job


def make_job(
    kind: Kind, federation: Federation, server: Server, index: int, client: int | None, level: int, state: State,
    settings: Evaluation, statistics: State | None = None,
) -> Job:  # fmt: skip
    """Make a job for a client, or for the server's own device."""
    seed = derive_seed(federation.seed, server.round, kind, settings.split, -1 if client is None else client)
    prior = server.prior if settings.personal else ()
    return Job(
        kind, server.round, server.round, index, client, federation.levels[level].submodel, state,
        federation.method_spec, seed, level, evaluation=settings, statistics=statistics or {}, prior=prior,
    )  # fmt: skip


def make_failure_record(federation: Federation, what: str, failure: Failure) -> dict[str, Any]:
    """Return the record of a failed job in a report."""
    return {"client": failure.client, "level": federation.numbers[failure.level], "reason": f"{what}: {failure.reason}"}
