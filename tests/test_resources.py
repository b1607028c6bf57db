"""What devices afford, and how it moves; two more hooks of the server that chain."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import plain, tiny_federation

from fleetfit.aggregate import Aggregate
from fleetfit.core import DeviceResources, Drift, Failure, Federation, Server, Update
from fleetfit.engines.local import local
from fleetfit.hooks import Method, build
from fleetfit.rounds import Settings, run_round, start
from fleetfit.seeds import make_numpy_rng


def test_drift_is_the_formula() -> None:
    """z_t = 0.9 z_(t-1) + sqrt(1 - 0.81) sd n_t, times the u of the last jump, recomputed from the same draws."""
    drift = Drift(sd=0.3, jump=0.4, low=0.5)
    n, jumps, left = (make_numpy_rng(7, key, 3) for key in ("drift", "jumps", "left"))
    z, u, speeds = 0.0, 1.0, [1.0]
    for _ in range(40):
        z = 0.9 * z + math.sqrt(0.19) * 0.3 * n.normal()
        jumped, remaining = jumps.random() < 0.4, left.random()
        u = 0.5 + 0.5 * remaining if jumped else u
        speeds.append(math.exp(z) * u)
    assert [drift.factor(7, 3, t) for t in range(41)] == pytest.approx(speeds, rel=1e-12)


def test_drift_of_later_rounds_continues_earlier_ones() -> None:
    """Asked for round 200 first or last, a client's path is the same, and clients have paths of their own."""
    drift = Drift()
    late = drift.factor(1, 0, 200)
    assert [drift.factor(1, 0, t) for t in (0, 63, 64, 65, 200)][-1] == late
    assert drift.factor(1, 1, 200) != late != drift.factor(2, 0, 200)


def test_drift_has_its_standard_deviation_and_its_jumps() -> None:
    calm = np.log([Drift(sd=0.2, jump=0.0).factor(0, c, 60) for c in range(2000)])
    assert calm.std() == pytest.approx(0.2, rel=0.05) and abs(calm.mean()) < 0.02
    jumping = np.array([[Drift(sd=0.0, jump=0.25, low=0.5).factor(0, c, t) for t in (1, 2)] for c in range(2000)])
    assert (jumping[:, 0] < 1).mean() == pytest.approx(0.25, abs=0.03)
    assert jumping.min() >= 0.5


def test_resources_survive_a_message() -> None:
    resources = DeviceResources(
        {"parameters": np.array([0.25, 1.0])}, np.array([0.0, 0.2]), Drift(0.1, 0.2, 0.3), seed=5
    )
    restored = DeviceResources.from_payload(resources.payload)
    assert [restored.get_budgets(1, t) for t in range(9)] == [resources.get_budgets(1, t) for t in range(9)]
    assert restored.get_tolerance(1) == 0.2 and restored.drift == resources.drift


def test_a_device_affords_a_model_in_all_costs() -> None:
    """Blocks are alike, so that one of three with its head costs about a third of the parameters and multiply-adds."""
    federation, simulation = tiny_federation({"name": "scalefl"})
    whole, small = federation.levels[2].submodel, federation.levels[0].submodel
    device = simulation.device(2)
    assert device.affords(replace(whole, exits=(3,))) and device.affords(small)
    device.budgets = {"parameters": 0.3}
    assert not device.affords(whole) and device.affords(small)
    device.budgets = {"parameters": 0.3, "multiply_adds": 0.01}
    assert not device.affords(small)


def noting(name: str) -> Method:
    def note(federation: Federation, server: Server, update: Update) -> Mapping[str, Any]:
        return {name: float(next(iter(update.state.values())).sum())}

    def observe(
        federation: Federation, server: Server, aggregate: Aggregate, reports: Sequence[Update | Failure]
    ) -> Server:
        seen = [r.metrics[name] for r in reports if isinstance(r, Update)]
        return replace(server, memory={**(server.memory or {}), name: seen})

    return Method(annotate=note, update_server_memory=observe)


def test_observations_chain_beside_an_optimizer() -> None:
    """Two parts note each update while its state is there, and observe after FedAdam's step, whose memory stays."""
    spec = {"name": "scalefl", "options": {"fedadam": {}}}
    federation, simulation = tiny_federation(spec, norm=False)
    both = build({"name": "fedavg", "options": {}})
    from fleetfit.hooks.build import _add_option  # the spec names functions by path, and these have none

    both = _add_option(_add_option(federation.method, noting("a"), "a", set()), noting("b"), "b", set())
    federation = replace(federation, method=both)
    server, report = run_round(federation, local(simulation), Settings(2, plain()), start(federation))
    assert server.memory["a"] == server.memory["b"] and len(server.memory["a"]) == report["train"]["clients"]
    assert server.memory.keys() > {"a", "b"}
    server, _ = run_round(federation, local(simulation), Settings(2, plain()), server)
    assert server.memory.keys() > {"a", "b"}  # FedAdam keeps what others remember


def test_waste_is_bytes_of_failed_jobs() -> None:
    """Levels of the tiny model by hand: elements that came back over elements that were sent."""
    federation, simulation = tiny_federation({"name": "scalefl"}, clients=3, cohort=3)
    _, report = run_round(federation, local(simulation), Settings(1, plain()), start(federation))
    assert report["waste"] == 0.0
    nothing = {**simulation.parts[2], "train": simulation.parts[2]["train"][:0]}
    simulation = replace(simulation, parts=[*simulation.parts[:2], nothing])  # the one client of the full model
    _, report = run_round(federation, local(simulation), Settings(1, plain()), start(federation))
    layout = federation.problem.layout
    sizes = [
        sum(math.prod(s) for s in layout.shapes(level.submodel.sizes, level.submodel.exits).values())
        for level in federation.levels
    ]
    assert report["waste"] == pytest.approx(sizes[2] / sum(sizes))
