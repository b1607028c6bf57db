"""AdaptiveFL: a pool of sub-models, clients chosen by what they sent back, pruning on the device (DAC 2024).

Jia et al. Algorithms 1 and 2. Each slot of a round draws a model of the pool (`fleetfit.methods._pool`) and then a
client for it, by rewards from two tables (section 3.3). The client trains the largest model of the pool that is
contained in the one it was sent and that it affords now; the server learns of its resources only from its update. It
never gets a budget: `needs_budgets` is false. Updates weigh by samples (Algorithm 2). Models are numbered as in the
pool, from S_p (0) to L_1 (2p).

Differs from the paper: R_s is our reading of a garbled formula (see `compute_resource_reward`). The pool is not nested
(S_1 can be wider than M_p somewhere), so a device prunes only to models contained in the one it has: one that got M_3
and could hold S_1 sends S_3 back, and T_r[S_1] falls though S_1 fits. With `prune = "server"` it takes the server's
largest model that fits, as in the authors' code; the server then also sends the elements that smaller models have
beyond m_i. A device that affords no model declines: nothing comes back, its whole size is waste, its scores fall
without credit. Tables move after the round, no client gets two models in one round, and a device takes a model that
costs up to (1 + tolerance) of its budget, as in all methods here. The threshold tau of I is no key: it is the least of
`starts`. The authors' code credits L_1 by another rule (`credit`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fleetfit.aggregate import Aggregate
from fleetfit.core import Device, Failure, Federation, Job, Problem, Server, Update
from fleetfit.cost import compute_cost
from fleetfit.hooks import Method, Reports, Slot
from fleetfit.methods._pool import PoolModel, make_pool, make_pool_levels, unite
from fleetfit.submodel import move_state

Models = Callable[[Problem], tuple[PoolModel, ...]]
"""From a problem to its pool."""
Floats = npt.NDArray[np.float64]
Rewards = Literal["CS", "C", "S", "random", "greedy"]
Credit = Literal["printed", "authors"]
"""L_1's gain beyond one when a model comes back whole: p - 1 (line 18), or p, and only if it was L_1."""

SUCCESS_CAP = 0.5
"""Above this success rate the curiosity decides (section 3.3)."""


def adaptivefl(
    p: int | None = None,
    selection: Rewards = "CS",
    widths: Sequence[float] = (0.4, 0.66),
    starts: Sequence[int] | None = None,
    credit: Credit = "printed",
    prune: Literal["contained", "server"] = "contained",
) -> Method:
    """Make the method.

    Args:
        p: Models of each of the types S and M in the pool: 3 is the fine pool, 1 the coarse one; by default 3, or as
            many as the model's layers admit.
        selection: How clients are chosen for models: "CS" by curiosity and resources, "C" or "S" by one of them,
            "random" by chance; "greedy" by chance, and always the largest model.
        widths: r_w of S and of M.
        starts: I of S_p to S_1 and of M_p to M_1: how many layers are whole, ascending; by default chosen from the
            model.
        credit: What L_1 gains when a model comes back whole: p - 1 more, as "printed" in line 18, or p more if that
            model is L_1, as in the "authors'" code.
        prune: To which models a device shrinks: those "contained" in the one sent, or all smaller ones of the "server".
    """

    def make_models(problem: Problem) -> tuple[PoolModel, ...]:
        return make_pool(problem.architecture, p, widths, starts)

    assign = partial(assign_models, rule=selection, sends_union=prune == "server")
    return Method(
        make_levels=lambda problem, targets: make_pool_levels(problem, targets, make_models(problem)),
        choose_clients=lambda federation, server, rng: [client for client, _, _ in assign(federation, server, rng)],
        assign=assign,
        adapt_job=partial(shrink_job, make_models=make_models),
        update_server_memory=partial(update_tables, credit=credit),
        needs_budgets=False,
        unused_hooks=("choose_clients", "choose_channels"),
        check_memory=check_memory,
    )


def assign_models(
    federation: Federation, server: Server, rng: np.random.Generator, rule: Rewards, sends_union: bool
) -> list[Slot]:
    """Draw a model for each slot, and a client for it (Algorithm 1 lines 6 to 8).

    With `sends_union` the client gets all smaller models, too.
    """
    submodels = [level.submodel for level in federation.levels]
    tables, free = load_tables(federation, server.memory), federation.reachable(server.round)
    slots = []
    for _ in range(min(federation.cohort, len(free))):
        model = len(submodels) - 1 if rule == "greedy" else int(rng.integers(len(submodels)))
        client = int(rng.choice(free, p=compute_probabilities(compute_reward(tables, model, rule), free)))
        free = free[free != client]
        slots.append(Slot(client, model, unite(submodels[: model + 1]) if sends_union else submodels[model]))
    return slots


def shrink_job(job: Job, device: Device, make_models: Models) -> Job | None:
    """Shrink a job to the largest model of the pool, m_i at most, that it contains and the device affords now (3.2)."""
    if job.kind != "train" and not job.evaluation.own:
        return job
    problem = device.problem
    pool = make_models(problem) if job.kind != "train" else make_models(problem)[: job.level + 1]
    contained = [(i, m.submodel) for i, m in enumerate(pool) if m.submodel.is_part_of(job.submodel)]
    affordable = [(i, submodel) for i, submodel in contained if device.affords(submodel)]
    if not affordable:
        return None
    index, submodel = max(affordable, key=lambda pair: compute_cost(problem.architecture, pair[1], problem.input_shape))
    prefix = f"level{index + 1}/"
    return replace(
        job,
        submodel=submodel,
        state=move_state(problem.layout, job.state, job.submodel, submodel),
        statistics={k.removeprefix(prefix): v for k, v in job.statistics.items() if k.startswith(prefix)},
    )


def update_tables(
    federation: Federation, server: Server, aggregate: Aggregate, reports: Reports, credit: Credit
) -> Server:
    """Move the tables by the models that were sent and those that came back (Algorithm 1 lines 11 to 26)."""
    before, models = load_tables(federation, server.memory), [level.submodel for level in federation.levels]
    curiosity, resources = before.curiosity.copy(), before.resources.copy()
    for report in reports:
        c, model = report.client, report.level
        curiosity[:, c] = count_model(curiosity[:, c], model, before.p)
        # a sub-model outside the pool gives no credit and no blame
        back = models.index(report.submodel) if isinstance(report, Update) and report.submodel in models else None
        if back is not None:
            curiosity[:, c] = count_model(curiosity[:, c], back, before.p)
            resources[:, c] = credit_update(resources[:, c], model, back, credit)
        elif isinstance(report, Failure) and report.declined:
            resources[:, c] = lower_scores(resources[:, c], model)
    tables = {"curiosity": torch.from_numpy(curiosity), "resources": torch.from_numpy(resources)}
    return replace(server, memory={**(server.memory or {}), _NAME: tables})


def check_memory(federation: Federation, memory: Mapping[str, Any]) -> None:
    """Check that the tables have a finite score of each client."""
    if _NAME in memory:
        tables = load_tables(federation, memory)
        for name, table in vars(tables).items():
            if table.shape[1] != tables.curiosity.shape[1] or not np.isfinite(table).all():
                raise ValueError(f"{_NAME}/{name} is {list(table.shape)}, or has scores that are not finite")


# ---- the tables and the rewards (section 3.3) ------------------------------------------------------------------------

_NAME = "adaptivefl"  # in the server's memory


@dataclass(frozen=True, eq=False)
class Tables:
    """What the server learned of its clients from what it sent and what came back.

    Attributes:
        curiosity: T_c: how often each client was chosen for a type of model [3, K]; types S, M, L.
        resources: T_r: the training score of each client on each model of the pool [2p + 1, K].
    """

    curiosity: Floats
    resources: Floats

    @property
    def p(self) -> int:
        """Models of each of the types S and M."""
        return len(self.resources) // 2


def load_tables(federation: Federation, memory: Mapping[str, Any] | None) -> Tables:
    """Return the tables in the server's memory; a new client has ones, as all before the first round (lines 1, 2)."""
    clients, stored = len(federation.clients), (memory or {}).get(_NAME)
    new = Tables(np.ones((3, clients)), np.ones((len(federation.levels), clients)))
    if not stored:
        return new
    count = stored["curiosity"].shape[1]
    tables = [np.concatenate([stored[name].numpy(), getattr(new, name)[:, count:]], axis=1) for name in vars(new)]
    return Tables(*tables)


def get_type(model: int, p: int) -> int:
    """Return the type of a model: 0 for S, 1 for M, 2 for L."""
    return min(model // p, 2)


def compute_resource_reward(tables: Tables, model: int) -> Floats:
    """Return R_s(m_i, c) of every client [K].

    The mean, over the models k of m_i's type, of the sum of T_r from k up to L_1, divided by the sum of T_r over the
    whole pool; 0 for a client whose scores are all 0.
    """
    kind, p = get_type(model, tables.p), tables.p
    tails = np.cumsum(tables.resources[::-1], axis=0)[::-1]  # [k, c]: the sum from k up
    own = tails[p * kind : p * kind + p] if kind < 2 else tails[2 * p :]
    total = tails[0]
    return np.divide(own.mean(axis=0), total, out=np.zeros_like(total), where=total > 0)


def compute_curiosity_reward(tables: Tables, model: int) -> Floats:
    """Return R_c(m_i, c) = 1 / sqrt(T_c[type(m_i)][c]) of every client [K]."""
    return 1 / np.sqrt(tables.curiosity[get_type(model, tables.p)])


def compute_reward(tables: Tables, model: int, rule: Rewards = "CS") -> Floats:
    """Return R(m_i, c) = min(0.5, R_s) R_c of every client [K], or one of its factors, or ones."""
    reward = np.ones(tables.resources.shape[1])
    if rule in ("CS", "S"):
        reward = np.minimum(SUCCESS_CAP, compute_resource_reward(tables, model))
    return reward * compute_curiosity_reward(tables, model) if rule in ("CS", "C") else reward


def compute_probabilities(rewards: Floats, free: npt.NDArray[np.int64]) -> Floats:
    """Return P(m_i, c) = R(m_i, c) / sum_j R(m_i, j) over the clients that are free; equal where all rewards are 0."""
    total = rewards[free].sum()
    return rewards[free] / total if total > 0 else np.full(len(free), 1 / len(free))


def count_model(curiosity: Floats, model: int, p: int) -> Floats:
    """Return a client's column of T_c [3] after a model was sent to it, or came back from it (lines 12 and 13)."""
    column = curiosity.copy()
    column[get_type(model, p)] += 1
    return column


def credit_update(scores: Floats, model: int, back: int, credit: Credit = "printed") -> Floats:
    """Return a client's column of T_r [2p + 1] after model `back` came back for `model` (lines 14 to 26)."""
    p = len(scores) // 2
    column = scores.copy()
    if model == back:
        column[model:] += 1
        if credit == "printed":
            column[-1] += p - 1
        elif model == 2 * p:
            column[-1] += p
        return column
    column[back] += p
    return lower_scores(column, back)


def lower_scores(scores: Floats, start: int) -> Floats:
    """Return scores from a model on lowered by 0, 1, 2, ..., but not below 0 (lines 21 to 25).

    For a client that declined, `start` is the model that it was sent: lines 22 to 25, without credit.
    """
    column = scores.copy()
    column[start:] = np.maximum(column[start:] - np.arange(len(scores) - start), 0)
    return column
