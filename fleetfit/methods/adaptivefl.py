"""AdaptiveFL: a pool of sub-models, clients chosen by what they sent back, pruning on the device (DAC 2024).

Jia et al. Algorithms 1 and 2. Each slot of a round draws a model of the pool (`fleetfit.methods._pool`) and then a
client for it, by the rewards of `_reinforcement`. The client trains the largest model of the pool that is contained in
what it was sent and that it affords now; the server learns of its resources only by what comes back. It never gets a
budget: `needs_budgets` is false, and the clients it knows have none. Updates weigh by samples (Algorithm 2).

Differs from the paper: R_s is the settled reading of a garbled formula (see `_reinforcement.resource_reward`). The pool
is not nested (S_1 can be wider than M_p somewhere), so a device prunes only to models contained in what it has: one
that got M_3 and could hold S_1 sends S_3 back, and T_r[S_1] falls though S_1 fits. With `prune = "server"` it takes the
server's largest model that fits, as in the authors' code; what is sent then has what smaller models have beyond m_i,
too. A device that affords nothing declines: nothing comes back, its whole size is waste, its scores fall without
credit. Tables move after the round, no client gets two models in one round, and a device takes what costs up to
(1 + tolerance) of its budget, as in all methods here. The authors' code credits L_1 by another rule (`credit`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from fleetfit.aggregate import Aggregate
from fleetfit.cost import compute_cost
from fleetfit.errors import ConfigError
from fleetfit.method import Method
from fleetfit.methods._pool import PoolModel, around, pool, pool_levels
from fleetfit.methods._reinforcement import (
    Credit,
    Rewards,
    Tables,
    after_refusal,
    after_reply,
    after_sending,
    probabilities,
    reward,
)
from fleetfit.submodel import Submodel, move_state
from fleetfit.values import Device, Failure, Federation, Job, Problem, Server, Update

Models = Callable[[Problem], tuple[PoolModel, ...]]
"""From a problem to its pool."""


def adaptivefl(
    p: int | None = None,
    choose: Rewards = "CS",
    widths: Sequence[float] = (0.4, 0.66),
    starts: Sequence[int] | None = None,
    tau: int = 0,
    credit: Credit = "printed",
    prune: Literal["contained", "server"] = "contained",
) -> Method:
    """Make the method.

    Args:
        p: Models of each of the types S and M in the pool: 3 is the fine pool, 1 the coarse one; by default 3, or as
            many as the model's layers admit.
        choose: How clients are chosen for models: "CS" by curiosity and resources, "C" or "S" by one of them, "random"
            by chance; "greedy" by chance, and always the largest model.
        widths: r_w of S and of M.
        starts: I of S_p to S_1 and of M_p to M_1: how many layers are whole, ascending; by default chosen from the
            model.
        tau: The least I that is allowed.
        credit: What L_1 gains when a model comes back whole: p - 1 more, as "printed" in line 18, or p more if that
            model is L_1, as in the "authors'" code.
        prune: To which models a device shrinks: those "contained" in the one sent, or all smaller ones of the "server".
    """
    if starts is not None and (not starts or min(starts) < tau):
        raise ConfigError(
            f"adaptivefl's starts must be one or more, each at least tau = {tau}; got {list(starts)}.", key="starts"
        )
    make = partial(pool, p=p, widths=tuple(widths), starts=None if starts is None else tuple(starts))

    def models(problem: Problem) -> tuple[PoolModel, ...]:
        found = make(problem.architecture)
        least = min(model.whole for model in found if model.whole is not None)
        if least < tau:
            raise ConfigError(
                f"adaptivefl's pool keeps {least} layers whole, fewer than tau = {tau}: give starts.", key="starts"
            )
        return found

    assign = partial(slots, kind=choose, whole=prune == "server")
    return Method(
        levels=lambda problem, targets: pool_levels(problem, targets, models(problem)),
        choose=lambda federation, server, rng: [client for client, _, _ in assign(federation, server, rng)],
        assign=assign,
        adapt=partial(shrunk, models=models),
        observe=partial(learn, credit=credit),
        needs_budgets=False,
        replaces=("choose", "channels"),
    )


def slots(
    federation: Federation, server: Server, rng: np.random.Generator, kind: Rewards, whole: bool
) -> list[tuple[int, int, Submodel]]:
    """Draw a model for each slot, and a client for it (Algorithm 1 lines 6 to 8); `whole`: smaller ones fit in, too."""
    pieces = [level.submodel for level in federation.levels]
    tables, free = tables_of(federation, server), federation.reachable(server.round)
    found = []
    for _ in range(min(federation.cohort, len(free))):
        model = len(federation.levels) - 1 if kind == "greedy" else int(rng.integers(len(federation.levels)))
        client = int(rng.choice(free, p=probabilities(reward(tables, model, kind), free)))
        free = free[free != client]
        found.append((client, model, around(pieces[: model + 1]) if whole else pieces[model]))
    return found


def shrunk(job: Job, device: Device, models: Models) -> Job | None:
    """Shrink a job to the largest model of the pool, m_i at most, that it contains and the device affords now (3.2)."""
    if job.kind != "train" and not job.evaluation.own:
        return job
    problem = device.problem
    smaller = models(problem) if job.kind != "train" else models(problem)[: job.level + 1]
    found = [(i, m) for i, m in enumerate(smaller) if m.submodel.inside(job.submodel)]
    fitting = [(i, m) for i, m in found if device.affords(m.submodel)]
    if not fitting:
        return None
    index, model = max(
        fitting, key=lambda pair: compute_cost(problem.architecture, pair[1].submodel, problem.input_shape)
    )
    prefix = f"level{index + 1}/"
    return replace(
        job,
        submodel=model.submodel,
        state=move_state(problem.layout, job.state, job.submodel, model.submodel),
        statistics={k.removeprefix(prefix): v for k, v in job.statistics.items() if k.startswith(prefix)},
    )


def learn(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure], credit: Credit
) -> Server:
    """Move the tables by what was sent and what came back (Algorithm 1 lines 11 to 26)."""
    before, models = tables_of(federation, server), [level.submodel for level in federation.levels]
    chosen, scores = before.curiosity.copy(), before.resources.copy()
    for report in reports:
        c, model = report.client, report.level
        chosen[:, c] = after_sending(chosen[:, c], model, before.p)
        # a piece that is no model of the pool says nothing of it
        back = models.index(report.submodel) if isinstance(report, Update) and report.submodel in models else None
        if back is not None:
            chosen[:, c] = after_sending(chosen[:, c], back, before.p)
            scores[:, c] = after_reply(scores[:, c], model, back, credit)
        elif isinstance(report, Failure) and report.declined:
            scores[:, c] = after_refusal(scores[:, c], model)
    return replace(server, memory=Tables(chosen, scores).beside(server.memory))


def tables_of(federation: Federation, server: Server) -> Tables:
    """Return what the server learned so far."""
    return Tables.remembered(server.memory, (len(federation.levels) - 1) // 2, len(federation.clients))
