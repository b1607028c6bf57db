"""The fleet's class frequencies, for which the server asks once, before the first round.

p is the mean of the smoothed class frequencies of one cohort: at most 1,000 clients, drawn from all that can be
reached. Each answer is validated, and a client that fails, or answers nonsense, is left out. One that lies moves p(c)
by at most 1 / n, with n answers. Without any answer p is uniform.

With secure aggregation the server sees the sum of at most 50 clients' frequencies, in steps of 4.8e-7, and no single
answer. It cannot validate one, so that a client that lies moves p(c) by about 2 / n.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetfit import messages
from fleetfit.core import FREQUENCIES, Evaluation, Failure, Federation, Job, RoundSums, Server
from fleetfit.engines.secure import LABEL_GRID
from fleetfit.evaluation import EvaluationScope, JobRunner, make_failure_record, make_job
from fleetfit.seeds import make_numpy_rng
from fleetfit.validation import find_sums_error, pair_jobs_with_replies, validate_reply

MAX_CLIENTS = 1000
MAX_SECURE_CLIENTS = 50
"""With secure aggregation, whose work grows with the square of the clients."""
_WHAT = "class frequencies"


@dataclass(frozen=True, eq=False)
class ClassFrequencies:
    """The fleet's class frequencies.

    Attributes:
        prior: p, one number above 0 for each class; they sum to 1.
        clients: Clients whose frequencies are in the mean.
        failures: The records of clients that were left out.
        bytes_down: Of the jobs; `bytes_up`: of the answers.
    """

    prior: tuple[float, ...]
    clients: int
    failures: Sequence[dict[str, Any]]
    bytes_down: int = 0
    bytes_up: int = 0

    def add_to_report(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report of the first round with the answers and the bytes."""
        return report | {
            "bytes_down": report["bytes_down"] + self.bytes_down,
            "bytes_up": report["bytes_up"] + self.bytes_up,
            "prior": {"clients": self.clients, "failures": list(self.failures)},
        }


def needs_class_frequencies(federation: Federation, server: Server, scope: EvaluationScope) -> bool:
    """Return whether method or evaluation need them, the server has not asked yet, and a client can be reached."""
    is_needed = federation.method.needs_prior or scope.evaluation.personal
    return is_needed and federation.classes > 0 and not server.prior and len(federation.reachable(server.round)) > 0


def ask_class_frequencies(federation: Federation, engine: JobRunner, server: Server) -> ClassFrequencies:
    """Ask clients for their class frequencies, and return the mean."""
    total = torch.zeros(federation.classes, dtype=torch.float64)
    clients, bytes_down, bytes_up, failures = 0, 0, 0, []
    layout = federation.problem.layout
    for job, reply in pair_jobs_with_replies(engine.run, iter_label_jobs(federation, server)):
        bytes_down += messages.job_size(job, layout)
        reply = validate_reply(reply, job, federation)
        if isinstance(reply, Failure):
            failures.append(make_failure_record(_WHAT, reply))
            continue
        bytes_up += messages.reply_size(reply, layout)
        total += reply.state[FREQUENCIES]
        clients += 1
    reason = failures[0]["reason"] if failures else ""
    return ClassFrequencies(_make_prior(total, clients, reason), clients, failures, bytes_down, bytes_up)


def sum_class_frequencies(federation: Federation, engine: Any, server: Server) -> ClassFrequencies:
    """Have clients add up their class frequencies by secure aggregation, and return the mean."""
    jobs = list(iter_label_jobs(federation, server, MAX_SECURE_CLIENTS))
    summed: RoundSums = engine.sum_labels(iter(jobs), federation.classes)
    lost = summed.lost or find_sums_error(summed, federation.classes, LABEL_GRID.most)
    total, clients = torch.zeros(federation.classes, dtype=torch.float64), 0
    for block in () if lost else summed.blocks:  # one, which all clients have
        total, clients = block.sums.clamp_min(1).double(), block.clients
    failures = [make_failure_record(_WHAT, report) for report in summed.reports if isinstance(report, Failure)]
    bytes_down = sum(report.bytes_down for report in summed.reports)
    bytes_up = sum(report.bytes_up for report in summed.reports)
    return ClassFrequencies(_make_prior(total, clients, lost or ""), clients, failures, bytes_down, bytes_up)


def iter_label_jobs(federation: Federation, server: Server, most: int = MAX_CLIENTS) -> Iterator[Job]:
    """Yield a job for each of the clients that are asked."""
    reachable = federation.reachable(server.round)
    rng = make_numpy_rng(federation.seed, "labels")
    chosen = rng.choice(reachable, min(most, len(reachable)), replace=False)
    for index, client in enumerate(sorted(chosen.tolist())):
        yield make_job("labels", federation, server, index, client, 0, {}, Evaluation(split="train"))


def _make_prior(total: Tensor, clients: int, reason: str) -> tuple[float, ...]:
    """Return the mean of some clients' frequencies; a uniform one, and the reason as a warning, without any."""
    if not clients:
        logging.getLogger("fleetfit").warning(
            "The class prior is relative to a uniform one, since no client has reported its class frequencies: %s",
            reason,
        )
        return (1 / len(total),) * len(total)
    return tuple((total / total.sum()).tolist())
