"""AdaptiveFL: Algorithm 1 by hand, section 3.3's rewards by loops, pruning on devices, and a server without budgets."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import Expected, raises
from tiny import plain, tiny_data, tiny_federation, tiny_parts

from fleetfit.aggregate import Aggregate
from fleetfit.anatomy import outputs
from fleetfit.api.run import resume, run as run_file
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import (
    Clients,
    DeviceResources,
    Evaluation,
    Failure,
    Federation,
    Job,
    Problem,
    Server,
    Simulation,
    Update,
)
from fleetfit.core.tasks import classification
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError, PlanError
from fleetfit.evaluation import EvaluationScope, build_level_module, evaluate
from fleetfit.hooks import build
from fleetfit.messages import pack
from fleetfit.methods._pool import make_pool
from fleetfit.methods.adaptivefl import (
    Tables,
    compute_curiosity_reward,
    compute_probabilities,
    compute_resource_reward,
    compute_reward,
    count_model,
    credit_update,
    load_tables,
    lower_scores,
)
from fleetfit.models.vgg16 import vgg16
from fleetfit.planner import Targets
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.seeds import make_numpy_rng
from fleetfit.submodel import extract
from fleetfit.training import run_job

SETTINGS = Settings(
    2, plain(lr=0.05, batch_size=8), scope=EvaluationScope(Evaluation(batch_size=64), statistics_samples=60)
)
S3, S2, S1, M3, M2, M1, L1 = range(7)


# ---- the tables ------------------------------------------------------------------------------------------------------


def test_an_accepted_model_raises_larger_ones_too() -> None:
    """Lines 14 to 18 for M2 of p = 3: each model from M2 on gains 1, and L1 gains p - 1 = 2 more."""
    assert credit_update(np.ones(7), M2, M2).tolist() == [1, 1, 1, 1, 2, 2, 4]
    assert credit_update(np.ones(7), L1, L1).tolist() == [1, 1, 1, 1, 1, 1, 4]


def test_a_pruned_model_raises_smaller_ones() -> None:
    """Lines 20 to 25: S1 came back for L1. S1: 1 + 3 - 0, M3: 1 - 1, M2: max(1 - 2, 0), and so on.

    From scores of 5: S1 is 8, then 5 - 1, 5 - 2, 5 - 3, 5 - 4.
    """
    assert credit_update(np.ones(7), L1, S1).tolist() == [1, 1, 4, 0, 0, 0, 0]
    assert credit_update(np.full(7, 5.0), L1, S1).tolist() == [5, 5, 8, 4, 3, 2, 1]


def by_the_authors(scores: list[float], sent: int, back: int, p: int) -> list[float]:
    """A client's scores after a reply, as the authors' code moves them, with plain loops.

    Whole: each from `sent` on gains 1, and L_1 gains p more if it was the one. Pruned: as in lines 20 to 25.
    """
    changed_scores = list(scores)
    if sent == back:
        for t in range(sent, 2 * p + 1):
            changed_scores[t] += 1
        if sent == 2 * p:
            changed_scores[2 * p] += p
    else:
        changed_scores[back] += p
        for tau, t in enumerate(range(back, 2 * p + 1)):
            changed_scores[t] = max(changed_scores[t] - tau, 0)
    return changed_scores


@pytest.mark.parametrize("p", [1, 2, 3])
def test_authors_credit_l1_if_sent(p: int) -> None:
    """M2 accepted: L1 gains 1, where line 18 gives 3. L1 accepted: 4, where it gives 3. Pruned: alike."""
    rng = make_numpy_rng(p)
    for _ in range(40):
        scores = rng.integers(0, 9, size=2 * p + 1).astype(float)
        sent = int(rng.integers(2 * p + 1))
        back = int(rng.integers(sent + 1))
        assert credit_update(scores, sent, back, "authors").tolist() == by_the_authors(scores.tolist(), sent, back, p)
    assert credit_update(np.ones(7), M2, M2, "authors").tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert credit_update(np.ones(7), L1, L1, "authors").tolist() == [1, 1, 1, 1, 1, 1, 5]
    assert build({"name": "adaptivefl", "credit": "authors"}) != build({"name": "adaptivefl", "credit": "printed"})


def test_a_refusal_lowers_without_credit() -> None:
    """As lines 22 to 25 from m_i = M3 on: 5 - 0, 5 - 1, 5 - 2, 5 - 3."""
    assert lower_scores(np.full(7, 5.0), M3).tolist() == [5, 5, 5, 5, 4, 3, 2]


def test_the_curiosity_table_counts_types() -> None:
    """Lines 12 and 13: S3, S2, S1 are type S; L1 is type L."""
    column = np.ones(3)
    for model in (S3, S1, M2, L1, L1):
        column = count_model(column, model, 3)
    assert column.tolist() == [3, 2, 3]


def by_loops(scores: np.ndarray, model: int, client: int, p: int) -> float:
    """R_s as SPEC settles it, for one client with plain loops."""
    kinds = [list(range(p)), list(range(p, 2 * p)), [2 * p]]
    mine = next(kind for kind in kinds if model in kind)
    total = sum(scores[k][client] for k in range(2 * p + 1))
    return sum(sum(scores[t][client] for t in range(k, 2 * p + 1)) for k in mine) / len(mine) / total


@pytest.mark.parametrize("p", [1, 2, 3])
def test_resource_reward_is_the_formula(p: int) -> None:
    tables = Tables(np.ones((3, 4)), make_numpy_rng(p).integers(0, 9, size=(2 * p + 1, 4)) + 0.5)
    for model in range(2 * p + 1):
        expected = [by_loops(tables.resources, model, c, p) for c in range(4)]
        assert compute_resource_reward(tables, model) == pytest.approx(expected, rel=1e-12)


def test_rewards_by_hand() -> None:
    """Client 0 is new: R_s(M) of seven ones is (4 + 3 + 2) / 3 / 7 = 3/7, R_c = 1.

    Client 1 took L1 whole twice: scores 1, ..., 1, 7, so R_s(L1) = 7 / 13 above one half, and R_c(L) = 1 / sqrt(5).
    """
    scores = np.ones((7, 2))
    scores[:, 1] = credit_update(credit_update(scores[:, 1], L1, L1), L1, L1)
    chosen = np.ones((3, 2))
    chosen[2, 1] = 5
    tables = Tables(chosen, scores)
    assert compute_resource_reward(tables, M2)[0] == pytest.approx(3 / 7)
    assert compute_resource_reward(tables, L1) == pytest.approx([1 / 7, 7 / 13])
    assert compute_curiosity_reward(tables, L1) == pytest.approx([1, 5**-0.5])
    assert compute_reward(tables, L1, "CS") == pytest.approx([1 / 7, 0.5 * 5**-0.5])
    assert compute_reward(tables, L1, "C") == pytest.approx([1, 5**-0.5])
    assert compute_reward(tables, L1, "S") == pytest.approx([1 / 7, 0.5])
    assert compute_reward(tables, L1, "random").tolist() == [1, 1]


def test_clients_without_success_are_drawn_last() -> None:
    scores = np.ones((3, 3))
    scores[:, 1] = 0
    rewards = compute_reward(Tables(np.ones((3, 3)), scores), 0)
    assert compute_probabilities(rewards, np.arange(3)).tolist() == [0.5, 0, 0.5]
    assert compute_probabilities(rewards, np.array([1])).tolist() == [1]


# ---- slots -----------------------------------------------------------------------------------------------------------


def fleet(
    budgets: tuple[float, ...] = (0.2, 0.5, 1.0) * 2, cohort: int = 4, **method: Any
) -> tuple[Federation, Simulation]:
    """A small VGG-16 with a pool of seven on tiny images, and clients with these shares of its parameters."""
    spec = {"name": "adaptivefl", **method}
    arguments = {"classes": 4, "channels": 1, "input_shape": [1, 4, 4]}
    model = {"name": "vgg16", "base": 4, "wide": 16, "head_layers": 0}
    described = {"model": model, "given": arguments, "task": "classification", "exits": [15]}
    architecture = vgg16(classes=4, input_shape=(1, 4, 4), base=4, wide=16, head_layers=0)
    problem = Problem(architecture, (1, 4, 4), classification, (15,), spec=described)
    data = tiny_data()
    parts = tiny_parts(data, len(budgets))
    levels = tuple(build(spec).make_levels(problem, Targets((1.0,), (0.1,))))
    resources = DeviceResources({"parameters": np.array(budgets)}, np.full(len(budgets), 0.0))
    simulation = Simulation(problem, data, parts, resources)
    clients = Clients(np.array([len(part["train"]) for part in parts]))
    return Federation(problem, clients, levels, cohort, build(spec), spec, device=simulation.device(None)), simulation


def needs(federation: Federation) -> dict[str, float]:
    return {level.name: level.needs for level in federation.levels}


def test_the_levels_are_the_pool() -> None:
    federation, _ = fleet()
    assert [level.name for level in federation.levels] == ["S3", "S2", "S1", "M3", "M2", "M1", "L1"]
    pool = make_pool(federation.problem.architecture)
    assert [level.submodel for level in federation.levels] == [model.submodel for model in pool]
    assert [level.name for level in federation.levels if level.averaged] == ["S1", "M1", "L1"]
    assert [m.name for m in make_pool(federation.problem.architecture, p=1)] == ["S1", "M1", "L1"]


def test_each_slot_draws_a_model_and_a_client() -> None:
    federation, _ = fleet()
    server = start(federation)
    models: Counter[int] = Counter()
    for round in range(400):
        assignment = federation.method.assign(federation, server, make_numpy_rng(0, round))
        clients = [client for client, _, _ in assignment]
        assert len(set(clients)) == len(clients) == 4
        assert all(federation.levels[model].submodel == piece for _, model, piece in assignment)
        models.update(model for _, model, _ in assignment)
    assert all(abs(models[m] - 1600 / 7) < 5 * math.sqrt(1600 / 7) for m in range(7))  # uniform over the pool


@pytest.mark.parametrize(("kind", "share"), [("CS", 1 / 3), ("C", 1 / 3), ("S", 1 / 2), ("random", 1 / 2)])
def test_clients_are_drawn_by_their_reward(kind: str, share: float) -> None:
    """Two clients alike but for curiosity: one was chosen four times for each type, so its R_c is half as large."""
    federation, _ = fleet(budgets=(1.0, 1.0), cohort=1, selection=kind)
    chosen = torch.tensor([[1.0, 4.0]] * 3)
    memory = {"adaptivefl": {"curiosity": chosen, "resources": torch.ones(7, 2)}}
    server = replace(start(federation), memory=memory)
    draws = [federation.method.assign(federation, server, make_numpy_rng(1, r))[0][0] for r in range(3000)]
    assert np.mean(draws) == pytest.approx(share, abs=4 * math.sqrt(0.25 / 3000))


def test_greedy_always_sends_the_largest() -> None:
    federation, _ = fleet(selection="greedy")
    assignment = federation.method.assign(federation, start(federation), make_numpy_rng(0))
    assert {model for _, model, _ in assignment} == {L1}


# ---- pruning on the device -------------------------------------------------------------------------------------------


def sent_to(budget: float, model: int, federation: Federation, simulation: Simulation) -> Update | Failure:
    server = start(federation)
    piece = federation.levels[model].submodel
    state = extract(federation.problem.layout, server.state, piece)
    job = Job("train", 0, 1, 0, 0, piece, state, federation.method_spec, 3, model, plain(lr=0.05, batch_size=8))
    device = simulation.device(0)
    device.budgets = {"parameters": budget}
    return run_job(job, device)[0]


def test_a_device_trains_the_largest_contained_model() -> None:
    """For every model sent and budgets just above and below each cost, against a search over the pool."""
    federation, simulation = fleet()
    layout = federation.problem.layout
    count = [sum(math.prod(s) for s in layout.shapes(m.submodel.sizes, (15,)).values()) for m in federation.levels]
    share = [c / count[L1] for c in count]
    for model in range(7):
        actual = federation.levels[model].submodel
        for budget in [s * f for s in share for f in (0.999, 1.001)]:
            fits = [
                i
                for i, level in enumerate(federation.levels)
                if share[i] <= budget
                and all(set(level.submodel.channels[a]) <= set(actual.channels[a]) for a in layout.axes)
            ]
            reply = sent_to(budget, model, federation, simulation)
            if not fits:
                assert isinstance(reply, Failure) and reply.declined
            else:
                assert isinstance(reply, Update)
                assert reply.submodel == federation.levels[max(fits, key=lambda i: count[i])].submodel
                assert reply.dispatched == actual


def test_the_pool_is_not_nested() -> None:
    """S1 is whole for longer than M3, so that a device that got M3 cannot make S1 of it."""
    pool = {model.name: model.submodel for model in make_pool(vgg16())}
    assert not pool["S1"].is_part_of(pool["M3"]) and pool["S3"].is_part_of(pool["M3"])


def test_devices_take_the_largest_fitting_model() -> None:
    """The authors' rule, for every model sent and budgets around each cost: nothing of containment, m_i at most.

    What M3 is sent with has S1's further channels, and they are the server's.
    """
    federation, simulation = fleet(prune="server", budgets=(1.0,) * 20, cohort=20)
    layout = federation.problem.layout
    count = [sum(math.prod(s) for s in layout.shapes(m.submodel.sizes, (15,)).values()) for m in federation.levels]
    server = start(federation)
    sent = {model: piece for _, model, piece in federation.method.assign(federation, server, make_numpy_rng(3))}
    assert set(sent) == set(range(7))
    s1, m3 = (federation.levels[m].submodel for m in (S1, M3))
    assert s1.is_part_of(sent[M3]) and m3.is_part_of(sent[M3]) and not s1.is_part_of(m3)
    for model, piece in sent.items():
        state = extract(layout, server.state, piece)
        job = Job("train", 0, 1, 0, 0, piece, state, federation.method_spec, 3, model, plain(lr=0.0, batch_size=8))
        for budget in [c / count[L1] * f for c in count for f in (0.999, 1.001)]:
            device = simulation.device(0)
            device.budgets = {"parameters": budget}
            reply, _ = run_job(job, device)
            fits = [i for i in range(model + 1) if count[i] / count[L1] <= budget]
            if not fits:
                assert isinstance(reply, Failure) and reply.declined
                continue
            assert isinstance(reply, Update)
            best = federation.levels[max(fits, key=lambda i: count[i])].submodel
            assert reply.submodel == best
            expected = extract(layout, server.state, best)
            assert all(torch.equal(reply.state[name], tensor) for name, tensor in expected.items())
    _, report = run_round(federation, local_engine(simulation), SETTINGS, server)
    assert report["train"]["clients"] == 20 and not report["failures"]


def test_pruned_models_start_from_the_sent_one() -> None:
    """With a learning rate of nothing, what comes back is the small model's part of the server's state."""
    federation, simulation = fleet()
    server, small = start(federation), federation.levels[S3].submodel
    piece = federation.levels[L1].submodel
    state = extract(federation.problem.layout, server.state, piece)
    job = Job("train", 0, 1, 0, 0, piece, state, federation.method_spec, 3, L1, plain(lr=0.0, batch_size=8))
    reply, _ = run_job(job, simulation.device(0))  # affords 0.2
    assert isinstance(reply, Update) and reply.submodel == small
    for name, tensor in extract(federation.problem.layout, server.state, small).items():
        assert torch.equal(reply.state[name], tensor), name


# ---- rounds ----------------------------------------------------------------------------------------------------------


def test_replies_move_the_tables() -> None:
    """Everybody takes part; each client's columns follow from the model it got and the one it sent back."""
    federation, simulation = fleet(budgets=(0.2, 0.5, 1.0, 0.01), cohort=4)
    first = start(federation)
    slots = federation.method.assign(federation, first, make_numpy_rng(0, 0, "choose"))
    server, report = run_round(federation, local_engine(simulation), SETTINGS, first)
    chosen, scores = (server.memory["adaptivefl"][key].numpy() for key in ("curiosity", "resources"))
    sizes, back = needs(federation), 0.0
    for client, model, piece in slots:
        budget = (0.2, 0.5, 1.0, 0.01)[client]
        fits = [
            (level.needs, i)
            for i, level in enumerate(federation.levels)
            if level.needs <= budget and level.submodel.is_part_of(piece)
        ]
        column = count_model(np.ones(3), model, 3)
        if fits:
            index = max(fits)[1]
            back += max(fits)[0]
            assert chosen[:, client].tolist() == count_model(column, index, 3).tolist()
            assert scores[:, client].tolist() == credit_update(np.ones(7), model, index).tolist()
        else:
            assert chosen[:, client].tolist() == column.tolist()
            assert scores[:, client].tolist() == lower_scores(np.ones(7), model).tolist()
    total = sum(sizes[federation.levels[model].name] for _, model, _ in slots)
    assert report["waste"] == pytest.approx(1 - back / total, abs=1e-12)
    assert len(report["failures"]) == 1  # nobody can train with a hundredth


def test_an_update_outside_the_pool_counts_as_sent_only() -> None:
    """A device may send back any part of what it got; the server goes on, and learns nothing of its resources."""
    federation, _ = fleet()
    piece = federation.levels[L1].submodel
    odd = replace(piece, channels={**piece.channels, "layer3": range(1)})
    update = Update(0, 0, 2, L1, piece, odd, {}, 5, {})
    server = federation.method.update_server_memory(federation, start(federation), Aggregate({}, {}), [update])
    memory = server.memory["adaptivefl"]
    assert memory["curiosity"][:, 2].tolist() == [1, 1, 2] and bool((memory["resources"] == 1).all())


@pytest.mark.parametrize("flags", [{}, {"late": True}, {"absent": True}])
def test_a_failed_job_lowers_no_score(flags: dict[str, bool]) -> None:
    """A crash, a deadline that passed, a device that went away: T_c counts the sending; only a refusal moves T_r."""
    federation, _ = fleet()
    piece = federation.levels[M3].submodel
    for declined, expected in ((False, np.ones(7)), (True, lower_scores(np.ones(7), M3))):
        report = Failure(0, 0, 2, M3, piece, "gone", declined=declined, **flags)
        server = federation.method.update_server_memory(federation, start(federation), Aggregate({}, {}), [report])
        memory = server.memory["adaptivefl"]
        assert memory["curiosity"][:, 2].tolist() == [1, 2, 1]
        assert memory["resources"][:, 2].tolist() == expected.tolist()


def test_greedy_with_the_whole_fleet_is_all_large() -> None:
    """Everybody affords the full model and everybody takes part: FedAvg on the full model, bit for bit."""
    federation, simulation = fleet(budgets=(1.0,) * 5, cohort=5, selection="greedy")
    *_, mine = run(federation, local_engine(simulation), SETTINGS, start(federation))
    spec = {"name": "all_large"}
    method = build(spec)
    levels = tuple(method.make_levels(federation.problem, Targets((1.0,), (0.1,))))
    other = replace(federation, method=method, method_spec=spec, levels=levels)
    *_, theirs = run(other, local_engine(simulation), SETTINGS, start(other))
    for name, tensor in theirs.server.state.items():
        assert torch.equal(mine.server.state[name], tensor), name


def test_the_mean_weighs_by_samples() -> None:
    """Algorithm 2 line 6."""
    federation, _ = fleet()
    assert federation.method.weigh is build({"name": "fedavg"}).weigh


# ---- its Decoupled ---------------------------------------------------------------------------------------------------


def decoupled_fleet(cohort: int, **options: Any) -> tuple[Federation, Simulation]:
    """4 weak, 3 medium and 3 strong clients that tell what they afford, and AdaptiveFL's Decoupled."""
    share = needs(fleet()[0])
    budgets = (share["S1"],) * 4 + (share["M1"],) * 3 + (1.0,) * 3
    federation, simulation = fleet(budgets=budgets, cohort=cohort)
    spec = {"name": "decoupled", "scaling": "pool", "trained_by": "able", **options}
    method, clients = build(spec), federation.clients
    levels = tuple(method.make_levels(federation.problem, Targets((1.0,), (0.1,))))
    reporting = replace(clients, budget=np.array(budgets), tolerance=np.zeros(len(budgets)))
    return replace(federation, method=method, method_spec=spec, levels=levels, clients=reporting), simulation


def test_decoupled_trains_on_all_who_afford() -> None:
    """S1, M1 and L1 of the pool; a cohort for each, no client twice, and over the rounds everybody who is able."""
    federation, simulation = decoupled_fleet(cohort=2)
    ours = {model.name: model.submodel for model in make_pool(federation.problem.architecture)}
    assert [level.submodel for level in federation.levels] == [ours[name] for name in ("S1", "M1", "L1")]
    trained: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for round in range(200):
        slots = federation.method.assign(federation, Server({}, round), make_numpy_rng(1, round))
        assert Counter(level for _, level, _ in slots) == {0: 2, 1: 2, 2: 2}
        assert len({client for client, _, _ in slots}) == 6
        for client, level, piece in slots:
            assert piece == federation.levels[level].submodel
            trained[level].add(client)
    assert trained == {0: set(range(10)), 1: set(range(4, 10)), 2: {7, 8, 9}}
    *_, last = run(federation, local_engine(simulation), SETTINGS, start(federation))
    assert {name.split("/")[0] for name in last.server.state if "/" in name} == {"level1", "level2", "level3"}
    assert not last.report["failures"] and last.report["train"]["clients"] == 6


def test_decoupled_models_have_their_own_clients() -> None:
    federation, _ = decoupled_fleet(cohort=10, trained_by="own")
    slots = federation.method.assign(federation, Server({}), make_numpy_rng(1))
    assert sorted((client, level) for client, level, _ in slots) == [(c, (c >= 4) + (c >= 7)) for c in range(10)]


def test_selection_beside_cohorts_per_model_is_refused() -> None:
    spec = {"name": "decoupled", "trained_by": "able", "cohort": {"name": "size"}}
    with raises(ConfigError, key="cohort.selection"):
        build(spec)


# ---- a thousand rounds of the tables ---------------------------------------------------------------------------------


def thousand_rounds(credit: str) -> tuple[Tables, float, float]:
    """The full VGG-16's pool, 40 weak, 30 medium and 30 strong clients, ten a round, and nobody trains anything.

    Returns:
        The tables, how often L1 came back whole where it was sent, and in what share of the slots it was trained.
    """
    architecture = vgg16()
    problem = Problem(architecture, (3, 32, 32), classification, (15,))
    spec = {"name": "adaptivefl", "p": 3, "credit": credit}
    method = build(spec)
    levels = tuple(method.make_levels(problem, Targets((1.0,), (0.1,))))
    federation = Federation(problem, Clients(np.full(100, 500)), levels, 10, method, spec)
    budgets = np.array([0.25] * 40 + [0.5] * 30 + [1.0] * 30) * 1.1
    contained = [[small.submodel.is_part_of(large.submodel) for small in levels] for large in levels]
    server, sent, whole, trained = Server({}), 0, 0, 0
    for round in range(1000):
        server = replace(server, round=round)
        reports: list[Update | Failure] = []
        for client, model, piece in method.assign(federation, server, make_numpy_rng(7, round)):
            fits = [i for i in range(7) if contained[model][i] and levels[i].needs <= budgets[client]]
            back = max(fits)  # everybody affords S3, which all models contain
            reports.append(Update(round, 0, client, model, piece, levels[back].submodel, {}, 500, {}))
            sent, whole, trained = sent + (model == L1), whole + (model == back == L1), trained + (back == L1)
        server = method.update_server_memory(federation, server, Aggregate({}, {}), reports)
    return load_tables(federation, server.memory), whole / sent, trained / 10_000


@pytest.mark.slow
def test_each_rule_separates_strong_clients() -> None:
    """By the printed rule all who accept anything gain on L1: a medium client's R_s is four fifths of a strong one's.

    L1 then comes back whole 0.41 of the times that it is sent, and is trained in 6% of the slots. By the authors' rule
    the medium clients have under half of the strong ones' R_s, and L1 comes back whole 0.53 of the times.
    """
    shares_by_credit = {credit: thousand_rounds(credit) for credit in ("printed", "authors")}
    medium, strong = {}, {}
    for credit, (tables, _, _) in shares_by_credit.items():
        rewards = compute_resource_reward(tables, L1)
        medium[credit], strong[credit] = rewards[40:70].mean(), rewards[70:].mean()
    assert medium["printed"] / strong["printed"] == pytest.approx(0.8, abs=0.06)
    assert medium["authors"] / strong["authors"] < 0.55
    assert shares_by_credit["printed"][1] == pytest.approx(0.41, abs=0.03) and shares_by_credit["printed"][
        2
    ] == pytest.approx(0.06, abs=0.01)
    assert shares_by_credit["authors"][1] == pytest.approx(0.53, abs=0.03)


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_local_is_the_model_that_each_client_affords() -> None:
    """Each client's own model, built from the server's state, on its own test images."""
    federation, simulation = fleet()
    engine, server = local_engine(simulation), start(federation)
    columns, moments = evaluate(federation, engine, server, SETTINGS.scope)
    per_client = columns["static"]["per_client"]["local"]
    assert set(per_client) == {str(c) for c in range(6)}
    for client in range(6):
        budget = (0.2, 0.5, 1.0)[client % 3]
        level = max((m.needs, i) for i, m in enumerate(federation.levels) if m.needs <= budget)[1]
        module = build_level_module(federation, server, level, moments)
        data = simulation.device(client).data
        x, y = data.batch(data.split("test"))
        with torch.no_grad():
            right = (outputs(module, x)[-1].argmax(1) == y).double().mean()
        assert per_client[str(client)] == pytest.approx(float(right)), client
    assert columns["static"]["levels"]["L1"]["clients"] == 2
    tested = columns["static"]["test_levels"]
    assert set(tested) == {"3", "6", "7"}
    assert columns["static"]["avg"] == pytest.approx(np.mean(list(tested.values())))


# ---- the server never sees a budget ----------------------------------------------------------------------------------


def reachable(thing: Any, seen: set[int]) -> Iterator[Any]:
    """Yield everything that can be reached from an object: fields, items, attributes, what functions hold."""
    if id(thing) in seen or isinstance(thing, str | bytes | int | float | type(None) | type):
        return
    seen.add(id(thing))
    yield thing
    inner: list[Any] = []
    if dataclasses.is_dataclass(thing):
        inner += [getattr(thing, f.name) for f in dataclasses.fields(thing)]
    if isinstance(thing, Mapping):
        inner += [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set):
        inner += list(thing)
    elif isinstance(thing, functools.partial):
        inner += [thing.func, *thing.args, *thing.keywords.values()]
    elif callable(thing) and hasattr(thing, "__closure__"):
        inner += [cell.cell_contents for cell in thing.__closure__ or ()]
    inner += list(getattr(thing, "__dict__", {}).values())
    for part in inner:
        yield from reachable(part, seen)


RUN = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 9}},
    "fleet": {
        "groups": [
            {"budget": 0.2345, "fraction": 0.4},
            {"budget": 0.5678, "fraction": 0.3},
            {"budget": 1.0, "fraction": 0.3},
        ],
        "drift": {"sd": 0.2, "jump": 0.1},
    },
    "local": {"epochs": 1, "lr": 0.05},
    "cohort": {"fraction": 0.5},
}


def holds_budgets(federation: Federation) -> bool:
    for thing in reachable(federation, set()):
        numbers = thing if isinstance(thing, np.ndarray) else thing.numpy() if isinstance(thing, torch.Tensor) else None
        if isinstance(thing, DeviceResources) or (numbers is not None and np.isclose(numbers, 0.2345, atol=1e-6).any()):
            return True
    return False


def test_the_server_never_sees_a_budget() -> None:
    """Nothing that hooks of the server get leads to a budget; with a method that is told, it does."""
    mine = assemble(load_experiment({**RUN, "method": {"name": "adaptivefl"}}, []))
    assert mine.federation.clients.budget is None
    assert not holds_budgets(mine.federation)
    assert holds_budgets(assemble(load_experiment({**RUN, "method": {"name": "scalefl"}}, [])).federation)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"fleet": {"reports_budget": True}}, Expected("[fleet] reports_budget")),
        ({"method": {"name": "adaptivefl", "selection": "best"}}, Expected("selection", "best")),
        (
            {
                "method": {"name": "adaptivefl", "hooks": {"choose_clients": "uniform"}},
                "cohort": {"selection": "uniform"},
            },
            None,
        ),
    ],
)
def test_unfit_settings_are_refused(table: dict[str, Any], expected: Expected | None) -> None:
    changed = {**RUN, "method": {"name": "adaptivefl"}, **table}
    if expected is None:
        assemble(load_experiment(changed, []))
        return
    with raises(ConfigError, expected):
        assemble(load_experiment(changed, []))


@pytest.mark.parametrize("starts", [[], [-1, 3], [3, 1]])
def test_impossible_starts_are_refused(starts: list[int]) -> None:
    with raises(PlanError, str(starts), key="starts"):
        assemble(load_experiment({**RUN, "method": {"name": "adaptivefl", "starts": starts}}, []))


def test_a_run_goes_on_where_it_stopped(tmp_path: Any) -> None:
    """Tables are in the checkpoint, and budgets drift the same way: three rounds are two rounds and one more."""
    table = {**RUN, "rounds": 3, "method": {"name": "adaptivefl"}, "evaluate": {"every": 0}}
    whole = run_file(table, out=tmp_path / "whole").files.load_checkpoint()

    class Stop(Exception):
        pass

    def stop(report: Mapping[str, Any]) -> None:
        if report["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        run_file(table, out=tmp_path / "parts", on_round=stop)
    parts = resume(tmp_path / "parts").files.load_checkpoint()
    assert whole is not None and parts is not None
    assert whole["server"]["memory"]["adaptivefl"]["resources"].max() > 1
    assert pack(whole["server"]) == pack(parts["server"])


def test_tiny_models_have_a_coarse_pool() -> None:
    """All channels of the tiny model begin at its first block: one S, one M, and the full model."""
    federation, _ = tiny_federation({"name": "adaptivefl"})
    assert [level.name for level in federation.levels] == ["S1", "M1", "L1"]
