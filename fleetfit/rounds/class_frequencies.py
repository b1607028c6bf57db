"""The fleet's class frequencies, for which the server asks once, before the first round.

p is the mean of the smoothed class frequencies of one cohort: at most 1,000 clients, drawn from all that can be
reached. Each answer is validated, and a client that fails, or answers nonsense, is left out. One that lies moves p(c)
by at most 1 / n, with n answers. Without any answer p is uniform.

With secure aggregation the server sees the sum of at most 50 clients' frequencies, in steps of 4.8e-7, and no single
answer. It cannot validate one, so that a client that lies moves p(c) by about 2 / n.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.core import FREQUENCIES, Evaluation, Failure, Federation, Job, RoundSums, Server, Update
from fleetfit.engines.base import Engine
from fleetfit.engines.secure import LABEL_GRID
from fleetfit.evaluation import make_failure_record, make_job
from fleetfit.rounds.round import Settings
from fleetfit.seeds import make_numpy_rng
from fleetfit.validation import find_sums_error, pair_jobs_with_replies, validate_and_measure

MAX_CLIENTS = 1000
MAX_SECURE_CLIENTS = 50
"""With secure aggregation, whose work grows with the square of the clients."""


@dataclass(frozen=True, eq=False)
class _ClassFrequencies:
    prior: tuple[float, ...]  # p, one number above 0 for each class; they sum to 1
    clients: int  # whose frequencies are in the mean
    failures: Sequence[dict[str, Any]]  # the records of clients that were left out
    bytes_down: int  # of the jobs
    bytes_up: int  # of the answers

    def add_to_report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the first round with the answers and the bytes."""
        return report | {
            "bytes_down": report["bytes_down"] + self.bytes_down,
            "bytes_up": report["bytes_up"] + self.bytes_up,
            "prior": {"clients": self.clients, "failures": list(self.failures)},
        }


def learn_prior(
    federation: Federation, engine: Any, settings: Settings, server: Server
) -> tuple[Server, _ClassFrequencies | None]:
    """Return the server with the fleet's class frequencies, and these if it had to ask for them.

    It asks once, in the first round in which a client can be reached, if method or evaluation need the frequencies;
    with `[privacy]` it asks no client.
    """
    is_needed = federation.method.needs_prior or settings.scope.evaluation.personal
    if server.prior or not is_needed or settings.privacy is not None or not federation.classes:
        return server, None
    if not len(federation.reachable(server.round)):
        return server, None
    ask = ask_class_frequencies if settings.secure is None else sum_class_frequencies
    frequencies = ask(federation, engine, server)
    return replace(server, prior=frequencies.prior), frequencies


def ask_class_frequencies(federation: Federation, engine: Engine, server: Server) -> _ClassFrequencies:
    """Ask clients for their class frequencies, and return the mean."""
    total, replies = torch.zeros(federation.classes, dtype=torch.float64), list[Update | Failure]()
    for job, reply in pair_jobs_with_replies(engine.run, iter_label_jobs(federation, server)):
        reply = validate_and_measure(reply, job, federation)
        if isinstance(reply, Update):
            total += reply.state[FREQUENCIES]
            reply = replace(reply, state={})
        replies.append(reply)
    return _summarize(federation, total, replies)


def sum_class_frequencies(federation: Federation, engine: Any, server: Server) -> _ClassFrequencies:
    """Have clients add up their class frequencies by secure aggregation, and return the mean."""
    summed: RoundSums = engine.sum_labels(iter_label_jobs(federation, server, MAX_SECURE_CLIENTS), federation.classes)
    lost = summed.lost or find_sums_error(summed, federation.classes, LABEL_GRID.most)
    total = torch.zeros(federation.classes, dtype=torch.float64)
    for block in () if lost else summed.blocks:  # one, which all clients have
        total += block.sums.clamp_min(1)
    return _summarize(federation, total, summed.reports, lost)


def iter_label_jobs(federation: Federation, server: Server, most: int = MAX_CLIENTS) -> Iterator[Job]:
    """Yield a job for each of the clients that are asked."""
    reachable = federation.reachable(server.round)
    rng = make_numpy_rng(federation.seed, "labels")
    chosen = rng.choice(reachable, min(most, len(reachable)), replace=False)
    for index, client in enumerate(sorted(chosen.tolist())):
        yield make_job("labels", federation, server, index, client, 0, {}, Evaluation(split="train"))


def _summarize(
    federation: Federation, total: Tensor, replies: Sequence[Update | Failure], lost: str | None = None
) -> _ClassFrequencies:
    """Return the mean of the clients' frequencies from their sum; a uniform one, with a warning, if it has none."""
    failures = [
        make_failure_record(federation, "class frequencies", reply) for reply in replies if isinstance(reply, Failure)
    ]
    clients = len(replies) - len(failures)
    if not total.any():
        clients, total = 0, torch.ones_like(total)
        logging.getLogger("fleetfit").warning(
            "The class prior is relative to a uniform one, since no client has reported its class frequencies: %s",
            lost or "".join(failure["reason"] for failure in failures[:1]),
        )
    down, up = (sum(getattr(reply, name) for reply in replies) for name in ("bytes_down", "bytes_up"))
    return _ClassFrequencies(tuple((total / total.sum()).tolist()), clients, failures, down, up)
