"""A secure round against the plain mean of the same updates: CPU of all parties, bytes, by number of clients."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.measuring import Figure, Options, amount, ratio
from benchmarks.random_fleet import KINDS, fleet
from fleetfit.aggregate import Mean, average_sums
from fleetfit.core import Job, Update
from fleetfit.engines.local import ClientMemories
from fleetfit.engines.secure import SecureEngine
from fleetfit.messages import job_size, reply_size
from fleetfit.rounds import start
from fleetfit.secure import Quantizer, SecureRules, SecureRun
from fleetfit.submodel import concat_state, get_slice_plan

CLIENTS = (10, 20, 60)


class _Trained(ClientMemories):
    """An engine whose clients have trained."""

    def __init__(self, updates: list[Update]) -> None:
        super().__init__()
        self.updates = updates

    def run(self, jobs: Iterator[Job]) -> Iterator[Update]:
        """Yield the updates."""
        return (self.updates[job.index] for job in jobs)

    def close(self) -> None:
        """Do nothing."""


def figures(options: Options) -> Iterator[Figure]:
    """Add the updates of cohorts of four levels up, masked and plain."""
    federation, _ = fleet(KINDS["cnn"], 8, cohort=8, samples=16)
    server, layout = start(federation), federation.problem.layout
    full = concat_state(server.state)
    for clients in CLIENTS[: 2 if options.quick else None]:
        updates, jobs = [], []
        for i in range(clients):
            piece = federation.levels[3 - 4 * i // clients].submodel
            compiled = get_slice_plan(layout, piece)
            sent = compiled.gather(full)
            moved = sent + 0.01 * torch.randn(compiled.size, generator=torch.Generator().manual_seed(i))
            updates.append(Update(0, i, i, 0, piece, piece, compiled.views(moved), 16, {"loss": 1.0}))
            jobs.append(Job("train", 0, 1, i, i, piece, compiled.views(sent), {"name": "scalefl"}, i))
        found: list[Any] = []

        def masked(updates: Any = updates, jobs: Any = jobs, found: list[Any] = found) -> None:
            engine = SecureEngine(_Trained(updates), layout, SecureRun(SecureRules(3, 0.67), Quantizer(1.0, 20)))
            summed = engine.sums(iter(jobs), server.state)
            average_sums(layout, server.state, summed.blocks, summed.step)
            found[:] = [summed]

        def plain(updates: Any = updates) -> None:
            mean = Mean(layout)
            for update in updates:
                mean.add(update.submodel, update.state, 1.0)
            mean.result()

        size = f"cnn ({full.numel() / 1e3:.1f}k parameters), {clients} clients of four levels"
        yield ratio(f"{size}: all parties of a secure round against the plain mean", masked, plain,
                    3 if options.quick else options.repetitions)  # fmt: skip
        reports = found[0].reports
        assert not found[0].lost, found[0].lost
        plain_up = [reply_size(u, layout) for u in updates]
        plain_down = [job_size(job, layout) for job in jobs]
        for title, index in (("largest level", 0), ("smallest level", clients - 1)):
            yield amount(f"{size}: up, {title}, plain", plain_up[index] / 1e3, "KB")
            yield amount(f"{size}: up, {title}, secure", reports[index].bytes_up / 1e3, "KB")
            yield amount(f"{size}: further down, {title}", (reports[index].bytes_down - plain_down[index]) / 1e3, "KB")
