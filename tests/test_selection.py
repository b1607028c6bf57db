"""Client selection: probabilities against theory, greedy choices against brute force, memory, who is connected."""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises
from support.states import put_back
from tiny import plain, spec_of, tiny_federation

from fleetfit import names
from fleetfit.aggregate import Aggregate
from fleetfit.core import Availability, Failure, Federation, Server, Simulation, Update
from fleetfit.engines.local import local
from fleetfit.errors import ConfigError
from fleetfit.hooks import FEDAVG, Method, build
from fleetfit.hooks.movements import get_movement
from fleetfit.messages import pack
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.runs.checkpoints import read_checkpoint, write_checkpoint
from fleetfit.seeds import make_numpy_rng
from fleetfit.selection import diversity, rl
from fleetfit.selection._sampling import sample_by_weight, take_best
from fleetfit.submodel import Submodel, concat_state, extract, full_submodel

CHOICES = names.list_names("selection")
LOCAL = plain(lr=0.1, batch_size=8)
NOTHING = Aggregate({}, {})
WEIGHTS = np.array([1.0, 2.0, 3.0, 6.0])


def fleet(choice: str, clients: int = 6, cohort: int = 3, **keys: Any) -> tuple[Federation, Simulation]:
    return tiny_federation({"name": "scalefl", "cohort": {"name": choice, **keys}}, clients, cohort)


def registered(federation: Federation, **changes: Any) -> Federation:
    return replace(federation, clients=replace(federation.clients, **changes))


def chosen(federation: Federation, server: Server, draws: int = 1) -> list[list[int]]:
    rng = make_numpy_rng(0, "draws")
    return [federation.method.choose_clients(federation, server, rng) for _ in range(draws)]


def server_with(**memory: Any) -> Server:
    return Server({}, 0, {"choice": memory})


def shares(draws: list[list[int]], clients: int) -> np.ndarray:
    """How often each client is in a cohort."""
    return np.bincount([c for cohort in draws for c in cohort], minlength=clients) / len(draws)


def successive(weights: np.ndarray, count: int) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of clients drawn one after the other without replacement."""
    probabilities = {}
    for order in itertools.permutations(range(len(weights)), count):
        left, p = weights.sum(), 1.0
        for i in order:
            p, left = p * weights[i] / left, left - weights[i]
        probabilities[order] = p
    return probabilities


# ---- drawing -------------------------------------------------


def test_drawing_by_weight_is_one_after_the_other() -> None:
    """All twelve ordered pairs of four, each as often as the product of its two draws says."""
    rng, draws = make_numpy_rng(1, "pairs"), 40_000
    samples = [tuple(sample_by_weight(np.arange(4), WEIGHTS, 2, rng).tolist()) for _ in range(draws)]
    for pair, p in successive(WEIGHTS, 2).items():
        assert samples.count(pair) / draws == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / draws))
    assert sorted(sample_by_weight(np.arange(4), WEIGHTS, 9, rng)) == [0, 1, 2, 3]


def test_the_best_are_the_highest_and_equals_are_drawn() -> None:
    scores, rng = np.array([3.0, 1.0, math.inf, 3.0, 3.0]), make_numpy_rng(0, "best")
    draws = [sorted(take_best(np.arange(5) + 10, scores, 3, rng).tolist()) for _ in range(3000)]
    assert {tuple(f) for f in draws} == {(10, 12, 13), (10, 12, 14), (12, 13, 14)}
    for pair in ([10, 12, 13], [10, 12, 14], [12, 13, 14]):
        assert draws.count(pair) / 3000 == pytest.approx(1 / 3, abs=0.035)


# ---- size -------------------------------------------------


def test_size_draws_by_number_of_samples() -> None:
    federation, _ = fleet("size", 4, 2)
    federation = registered(federation, num_examples=WEIGHTS.astype(int))
    expected = np.zeros(4)
    for pair, p in successive(WEIGHTS, 2).items():
        expected[list(pair)] += p
    assert shares(chosen(federation, Server({}), 20_000), 4) == pytest.approx(expected, abs=0.015)


# ---- availability -------------------------------------------------


def test_availability_takes_those_chosen_least_often() -> None:
    """Times 2, 0, 1, 1, 5, 0 with client 5 away: 1 for sure, then two of 2, 3 - both - and never 4."""
    federation, _ = fleet("availability")
    federation = replace(federation, connected=lambda r: np.array([1, 1, 1, 1, 1, 0], dtype=bool))
    server = server_with(times=torch.tensor([2, 0, 1, 1, 5, 0], dtype=torch.int32))
    assert all(sorted(c) == [1, 2, 3] for c in chosen(federation, server, 20))
    federation = replace(federation, cohort=2)
    assert shares(chosen(federation, server, 2000), 6) == pytest.approx([0, 1, 0.5, 0.5, 0, 0], abs=0.05)


def test_availability_takes_turns() -> None:
    federation, simulation = fleet("availability", 6, 2)
    server, seen = start(federation), []
    for _ in range(3):
        before = server
        server, _ = run_round(federation, local(simulation), Settings(9, LOCAL), server)
        seen.append(server.memory["choice"]["times"].tolist())
        assert before.memory is None or before.memory["choice"]["times"].tolist() == seen[-2]  # values, not services
    assert [sum(times) for times in seen] == [2, 4, 6] and seen[-1] == [1] * 6


def test_a_client_that_fails_has_had_its_turn() -> None:
    federation, simulation = fleet("availability", 6, 6)
    simulation.parts[2]["train"] = simulation.parts[2]["train"][:0]
    server, report = run_round(federation, local(simulation), Settings(9, LOCAL), start(federation))
    assert report["failures"] and server.memory["choice"]["times"].tolist() == [1] * 6


# ---- loss -------------------------------------------------


def test_loss_takes_the_highest_candidates() -> None:
    """One of two candidates: client i is chosen where the other one, j, has the lower loss."""
    federation, _ = fleet("loss", 4, 1, candidates=2)
    federation = registered(federation, num_examples=WEIGHTS.astype(int))
    losses = [0.5, 2.0, math.inf, 1.0]
    expected = np.zeros(4)
    for pair, p in successive(WEIGHTS, 2).items():
        expected[max(pair, key=lambda i: losses[i])] += p
    server = server_with(losses=torch.tensor(losses))
    assert shares(chosen(federation, server, 20_000), 4) == pytest.approx(expected, abs=0.015)


def test_losses_are_those_of_the_last_report() -> None:
    federation, simulation = fleet("loss", 6, 3)
    server, losses = start(federation), {}
    for _ in range(4):
        rng = make_numpy_rng(federation.seed, server.round, "choose")
        cohort = federation.method.choose_clients(federation, server, rng)
        reports: list[Any] = []

        def noting(f: Federation, s: Server, u: Update, reports: list[Any] = reports) -> Mapping[str, Any]:
            reports.append((u.client, u.metrics["loss"]))
            return {}

        with_note = replace(federation, method=replace(federation.method, annotate=noting))
        server, _ = run_round(with_note, local(simulation), Settings(9, LOCAL), server)
        assert sorted(c for c, _ in reports) == sorted(cohort)
        losses |= dict(reports)
        stored = server.memory["choice"]["losses"].numpy()
        assert stored == pytest.approx([losses.get(c, math.inf) for c in range(6)])
    assert len(losses) == 6  # unknown losses count as highest, so everybody has been seen by now


# ---- rl -------------------------------------------------


def test_rewards_by_hand() -> None:
    """min(1/2, R_s) / sqrt(T_c): never chosen; three times, all well; eight times, of which two brought something."""
    assert rl.compute_rewards(np.array([0, 3, 8]), np.array([0, 3, 2])) == pytest.approx([0.5, 0.5 / 2, 0.3 / 3])


def test_rl_draws_by_reward() -> None:
    federation, simulation = fleet("rl", 6, 6)
    simulation.parts[4]["train"] = simulation.parts[4]["train"][:0]
    server = start(federation)
    for _ in range(3):
        server, _ = run_round(federation, local(simulation), Settings(9, LOCAL), server)
    memory = server.memory["choice"]
    assert memory["jobs"].tolist() == [3] * 6 and memory["successes"].tolist() == [3, 3, 3, 3, 0, 3]
    federation = replace(federation, cohort=1)
    expected = np.array([0.25, 0.25, 0.25, 0.25, 0.1, 0.25])
    assert shares(chosen(federation, server, 10_000), 6) == pytest.approx(expected / expected.sum(), abs=0.02)


# ---- diversity by classes -------------------------------------------------


def test_diversity_completes_the_classes() -> None:
    """Whoever is first, the second has the other classes."""
    federation, _ = fleet("diversity", 4, 2, candidates=4)
    federation = registered(federation, labels=np.array([[9, 9, 0, 0], [5, 4, 0, 0], [0, 0, 9, 9], [0, 0, 3, 2]]))
    pairs = {tuple(sorted(c)) for c in chosen(federation, Server({}), 200)}
    assert pairs == {(0, 2), (1, 3)}


@pytest.mark.parametrize("target", ["uniform", "all"])
def test_diversity_by_classes_is_greedy(target: Any) -> None:
    """Each step against all others, and the target "all" is that of those who can take part."""
    counts = make_numpy_rng(3, "counts").integers(0, 30, size=(12, 5))
    federation, _ = fleet("diversity", 12, 4)
    federation = registered(federation, labels=counts, num_examples=np.array([0, *[9] * 11]))
    aim = diversity.compute_target(federation, target)
    total = counts[1:].sum(0)
    assert aim == pytest.approx([0.2] * 5 if target == "uniform" else total / total.sum())
    chosen = diversity.match_target(counts, aim, 4)

    def off(rows: list[int]) -> float:
        pooled = sum(counts[r] for r in rows)
        return float(sum((pooled / pooled.sum() - aim) ** 2))

    assert chosen[0] == 0
    for i in range(1, 4):
        assert chosen[i] == min((r for r in range(12) if r not in chosen[:i]), key=lambda r: off([*chosen[:i], r]))


def test_reported_classes_need_no_sketch() -> None:
    federation, simulation = fleet("diversity")
    federation = registered(federation, labels=np.ones((6, 4), dtype=int))
    server, _ = run_round(federation, local(simulation), Settings(1, LOCAL), start(federation))
    assert server.memory is None


# ---- diversity by directions -------------------------------------------------


def pieces_of(federation: Federation) -> list[Submodel]:
    return [level.submodel for level in federation.levels]


def drawn_movement(federation: Federation, seed: int) -> Any:
    """A movement of the full model, as flat tensors by name."""
    rng = torch.Generator().manual_seed(seed)
    shapes = federation.problem.layout.shapes(federation.problem.layout.full_sizes, federation.problem.layout.exits)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def test_sketches_keep_angles_on_what_both_have() -> None:
    """With a bucket for every element nothing is lost: the distance is that of the parts that both sub-models have."""
    federation, _ = fleet("diversity")
    layout, pieces = federation.problem.layout, pieces_of(federation)
    moved = [drawn_movement(federation, s) for s in range(3)]
    parts = [extract(layout, m, p) for m, p in zip(moved, pieces, strict=True)]
    distances = diversity.compute_distances(
        torch.stack(
            [
                diversity.sketch_movement(federation, p, concat_state(m), 4096)
                for p, m in zip(pieces, parts, strict=True)
            ]
        )
    )
    for a, b in itertools.combinations(range(3), 2):  # levels are nested: the smaller one is what both have
        u, v = (concat_state(extract(layout, moved[i], pieces[a])).double() for i in (a, b))
        assert distances[a, b] == pytest.approx(float((u / u.norm() - v / v.norm()).norm()), rel=1e-6)
    assert np.array_equal(distances, distances.T) and np.array_equal(np.diag(distances), np.zeros(3))


def test_alike_in_the_shared_part_is_alike() -> None:
    federation, _ = fleet("diversity")
    layout, moved = federation.problem.layout, drawn_movement(federation, 0)
    rows = [
        diversity.sketch_movement(federation, p, concat_state(extract(layout, moved, p)), 64)
        for p in pieces_of(federation)
    ]
    assert diversity.compute_distances(torch.stack(rows)) == pytest.approx(0, abs=1e-6)
    away = diversity.compute_distances(torch.stack([rows[0], -rows[2], torch.zeros_like(rows[0])]))
    assert away[0, 1] == pytest.approx(2) and away[0, 2] == pytest.approx(math.sqrt(2))  # opposite; nothing in common


def test_a_sketch_s_dot_product_is_right_on_average() -> None:
    federation, _ = fleet("diversity")
    layout = federation.problem.layout
    u, v = drawn_movement(federation, 1), drawn_movement(federation, 2)
    v = {n: 0.6 * u[n] + 0.8 * v[n] for n in v}
    full, dots = full_submodel(layout), []
    for seed in range(400):
        other = replace(federation, seed=seed)
        dots.append(
            float(
                (
                    diversity.sketch_movement(other, full, concat_state(u), 16)
                    * diversity.sketch_movement(other, full, concat_state(v), 16)
                ).sum()
            )
        )
    true = float(sum((u[n] * v[n]).sum() for n in u))
    assert np.mean(dots) == pytest.approx(true, abs=4 * np.std(dots) / 20)
    lengths = [float(concat_state(m).norm()) for m in (u, v)]
    assert np.std(dots) < math.prod(lengths) * math.sqrt(2 / 16)


def test_movements_are_differences() -> None:
    """Also for a client that returns a smaller part than it got."""
    federation, _ = fleet("diversity")
    layout, server = federation.problem.layout, start(federation)
    sent, back = federation.levels[2].submodel, federation.levels[0].submodel
    moved = extract(layout, drawn_movement(federation, 5), back)
    state = {n: t + moved[n] for n, t in extract(layout, server.state, back).items()}
    update = Update(0, 0, 1, 0, sent, back, state, 9, {"loss": 1.0})
    assert get_movement(federation, server, update) == pytest.approx(concat_state(moved), abs=1e-6)


def test_facility_location_is_greedy() -> None:
    """Each step against all others in plain Python; the first one is the exact best single one."""
    points = make_numpy_rng(0, "points").normal(size=(14, 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    candidates = np.array([2, 3, 5, 7, 8, 11, 13])

    def cost(chosen: list[int]) -> float:
        return sum(min(distance[k, i] for i in chosen) for k in range(14))

    selected = diversity.facility_location(distance, candidates, 4)
    for i in range(4):
        left = [c for c in candidates.tolist() if c not in selected[:i]]
        assert selected[i] == min(left, key=lambda c: cost([*selected[:i], c]))


def test_representative_directions_are_chosen() -> None:
    """Two bundles of directions: one client of each; a client never seen comes before them."""
    federation, _ = fleet("diversity", 6, 2, candidates=6)
    rng = np.random.default_rng(0)
    ways = rng.normal(size=(2, 3 * 8))
    rows = torch.from_numpy((ways[[0, 0, 0, 1, 1, 1]] + 0.1 * rng.normal(size=(6, 24))).reshape(6, 3, 8)).float()
    everybody = server_with(clients=torch.tensor([4, 1, 0, 5, 3, 2]), directions=rows)
    assert all(len({4, 1, 0} & set(c)) == len({5, 3, 2} & set(c)) == 1 for c in chosen(federation, everybody, 20))
    all_but_one = server_with(clients=torch.tensor([4, 1, 0, 5, 3]), directions=rows[:5])
    assert all(c[0] == 2 and c[1] != 2 for c in chosen(federation, all_but_one, 20))


def test_clients_whose_direction_is_not_kept_get_their_share() -> None:
    """Directions of two of six clients, and no more are kept: two thirds of a cohort are among the other four."""
    federation, _ = fleet("diversity", 6, 3, candidates=6, kept=2)
    server = server_with(clients=torch.tensor([4, 1]), directions=torch.ones(2, 3, 8))
    draws = chosen(federation, server, 3000)
    assert all(len(set(c)) == 3 for c in draws)
    assert shares(draws, 6) == pytest.approx(np.full(6, 0.5), abs=0.04)


def test_the_newest_directions_are_kept() -> None:
    federation, simulation = fleet("diversity", 6, 3, kept=4, buckets=8)
    engine, server = local(simulation), start(federation)
    server, _ = run_round(federation, engine, Settings(9, LOCAL), server)
    first = server.memory["choice"]["clients"].tolist()
    server, _ = run_round(federation, engine, Settings(9, LOCAL), server)
    memory = server.memory["choice"]
    assert len(first) == 3 and len(memory["clients"]) == 4 and memory["directions"].shape == (4, 3, 8)
    assert set(memory["clients"].tolist()) - set(first) == set(range(6)) - set(first)  # never seen come first
    assert memory["clients"].tolist()[0] == first[-1]


# ---- all of them -------------------------------------------------


def coming(federation: Federation, simulation: Simulation, **keys: Any) -> tuple[Federation, Simulation]:
    """The same fleet, whose clients come and go."""
    there = Availability(len(federation.clients), **{"share": 0.5, "spread": 0.5, "rounds": 3.0, "leave": 0.2, **keys})
    simulation = replace(simulation, resources=replace(simulation.resources, availability=there))
    return replace(federation, connected=there.online), simulation


@pytest.mark.parametrize("choice", CHOICES)
def test_connected_clients_are_chosen_once(choice: str) -> None:
    federation, simulation = coming(*fleet(choice, 12, 4))
    assert federation.connected is not None
    engine, server = local(simulation), start(federation)
    for round in range(12):
        here = set(federation.able[federation.connected(round)[federation.able]].tolist())
        cohort = federation.method.choose_clients(federation, server, make_numpy_rng(round, "any"))
        assert set(cohort) <= here and len(set(cohort)) == len(cohort) == min(4, len(here))
        assert all(type(c) is int for c in cohort)
        server, report = run_round(federation, engine, Settings(12, LOCAL), server)
        assert report["online"] == len(here) and not [f for f in report["failures"] if not f["absent"]]
    nobody = replace(federation, connected=lambda r: np.zeros(12, dtype=bool))
    assert federation.method.choose_clients(nobody, server, make_numpy_rng(0)) == []
    assert federation.method.choose_clients(nobody, start(federation), make_numpy_rng(0)) == []


@pytest.mark.parametrize("kind", ["CS", "random", "greedy"])
def test_adaptivefl_chooses_among_the_connected(kind: str) -> None:
    federation, _ = tiny_federation({"name": "adaptivefl", "selection": kind}, 12, 8)
    federation = replace(federation, connected=lambda r: np.arange(12) % 3 == r % 3)
    server = start(federation)
    for round in range(3):
        chosen = federation.method.choose_clients(federation, replace(server, round=round), make_numpy_rng(round))
        assert sorted(chosen) == [c for c in range(12) if c % 3 == round]


@pytest.mark.parametrize("choice", CHOICES)
def test_memory_survives_a_checkpoint(choice: str, tmp_path: Path) -> None:
    """Six rounds at once, and three, a file, three more: the same bits."""
    federation, simulation = coming(*fleet(choice, 9, 3))
    settings = Settings(6, LOCAL)
    *_, unbroken = run(federation, local(simulation), settings, start(federation))
    server = start(federation)
    for _ in range(3):
        server, _ = run_round(federation, local(simulation), settings, server)
    write_checkpoint(tmp_path / "server", {"state": dict(server.state), "round": 3, "memory": server.memory})
    *_, resumed = run(federation, local(simulation), settings, Server(**read_checkpoint(tmp_path / "server")))
    assert pack(dict(resumed.server.state)) == pack(dict(unbroken.server.state))
    assert pack(resumed.server.memory) == pack(unbroken.server.memory)


def own_choice() -> Method:
    def choose(federation: Federation, server: Server, rng: np.random.Generator) -> list[int]:
        return [0]

    return Method(choose_clients=choose)


def test_a_method_that_chooses_refuses_another_choice() -> None:
    with raises(ConfigError, '"size"', '"choose_clients"', key="method.hooks.choose_clients"):
        build({"name": own_choice, "cohort": {"name": "size"}})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "loss", "candidates": -1}, Expected(0, -1, key="cohort.selection.candidates")),
        ({"name": "diversity", "buckets": 0}, Expected(1, 0, key="cohort.selection.buckets")),
        ({"name": "diversity", "kept": 1}, Expected(2, 1, key="cohort.selection.kept")),
        ({"name": "diversity", "target": "some"}, Expected('"uniform"', '"all"')),
        ({"name": "size", "candidates": 3}, Expected('"candidates"')),
    ],
)
def test_wrong_selections_are_refused(keys: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        build({"name": "fedavg", "cohort": keys})


def observing(choice: str) -> Callable[..., Server]:
    return build({"name": "fedavg", "cohort": {"name": choice}}).update_server_memory


@pytest.mark.parametrize("choice", ["availability", "loss", "rl"])
def test_memories_of_others_stay(choice: str) -> None:
    federation, _ = fleet(choice)
    server = Server({}, 0, {"first": {"a": torch.ones(2)}})
    piece = federation.levels[0].submodel
    reports = (Failure(0, 0, 1, 0, piece, "gone"), Update(0, 1, 2, 0, piece, piece, {}, 3, {"loss": 0.5}))
    after = observing(choice)(federation, server, NOTHING, reports)
    assert after.memory.keys() == {"first", "choice"} and after.memory["first"] is server.memory["first"]
    assert server.memory.keys() == {"first"}


def test_regions_are_the_elements_beyond_smaller_levels() -> None:
    """With a bucket for every element, a region's length is that of its own part of the movement."""
    federation, _ = fleet("diversity")
    layout, moved = federation.problem.layout, drawn_movement(federation, 9)
    rows = diversity.sketch_movement(federation, full_submodel(layout), concat_state(moved), 4096)
    zeros = {n: torch.zeros_like(t) for n, t in moved.items()}
    for level, (smaller, larger) in enumerate(itertools.pairwise([None, *pieces_of(federation)])):
        assert larger is not None
        own = extract(layout, moved, larger)
        if smaller is not None:
            inner = {n: torch.zeros_like(t) for n, t in extract(layout, zeros, smaller).items()}
            own = extract(layout, put_back(layout, put_back(layout, zeros, larger, own), smaller, inner), larger)
        assert float(rows[level].square().sum()) == pytest.approx(float(concat_state(own).square().sum()), rel=1e-5)


LEFT_OPEN = [
    name for name in names.list_names("methods") if build({"name": name}).choose_clients is FEDAVG.choose_clients
]


@pytest.mark.parametrize("method", LEFT_OPEN)
def test_directions_work_with_every_method(method: str) -> None:
    """A row for each that came back, with something in every level up to the client's own, and nothing beyond.

    Channels that a method draws or rolls may be in other levels, and need not be in each.
    """
    spec = {**spec_of(method), "cohort": {"name": "diversity"}}
    federation, simulation = tiny_federation(spec, 6, 6)
    server, report = run_round(federation, local(simulation), Settings(1, LOCAL), start(federation))
    memory, moved = server.memory["choice"], federation.method.choose_channels is FEDAVG.choose_channels
    assert len(memory["clients"]) == report["train"]["clients"]
    for client, rows in zip(memory["clients"].tolist(), memory["directions"], strict=True):
        full = [bool(row.any()) for row in rows]
        level = int(federation.level_of[client])
        assert full == [True] * (level + 1) + [False] * (2 - level) if moved else any(full)
