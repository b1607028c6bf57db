"""Robust averages over unequal sub-models: each formula by plain loops, who is left out, and real attacks."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Expected, aggregate_updates, raises
from support.attacks import CORE, FULL, LAYOUT, MIDDLE, PROBLEM, SENT, TINY as ATTACKED, elements, make_job, make_update
from tiny import tiny_federation
from torch import Tensor

import fleetfit as ff
from fleetfit.aggregate import Aggregate
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Server, Update
from fleetfit.errors import ConfigError
from fleetfit.hooks import build
from fleetfit.hooks.movements import Movements
from fleetfit.options._order_statistics import ceil_share, floor_share, make_network, select_ranks, take_median
from fleetfit.options.krum import compute_scores
from fleetfit.options.outliers import measure_movements
from fleetfit.rounds import start
from fleetfit.submodel import Submodel, concat_state, extract

FEDERATION = replace(tiny_federation({"name": "scalefl"})[0], problem=PROBLEM)
SERVER = Server(SENT)


def near(piece: Submodel, seed: int, index: int, size: float = 1.0, untrained: tuple[str, ...] = ()) -> Update:
    """Return an update that moves every element by `size` and some noise; untrained tensors stay as they were sent."""
    job = make_job(piece, index)
    noise = make_update(piece, seed, job).state
    state = {n: t if n in untrained else t + size * (1 + 0.2 * noise[n]) for n, t in job.state.items()}
    return replace(make_update(piece, seed, job), state=extract_like(state, piece), untrained=untrained)


def extract_like(state: dict[str, Tensor], piece: Submodel) -> Any:
    from fleetfit.submodel import get_slice_plan

    return get_slice_plan(LAYOUT, piece).views(torch.cat([t.flatten() for t in state.values()]))


def mixed(untrained: tuple[str, ...] = ()) -> list[Update]:
    """Two updates of the core, three of the middle sub-model, four of the full one."""
    pieces = [CORE] * 2 + [MIDDLE] * 3 + [FULL] * 4
    return [near(p, 10 + i, i, untrained=untrained if p == FULL else ()) for i, p in enumerate(pieces)]


def by_element(updates: list[Update]) -> dict[Any, dict[int, float]]:
    """Return the movement of each element by client, without what did not count."""
    sent, table = elements(SENT), {}
    for i, update in enumerate(updates):
        for place, number in elements(update.state).items():
            if place[0] not in update.untrained:
                table.setdefault(place, {})[i] = number - sent[place]
    return table


# ---- rows side by side -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 14))
def test_the_network_puts_the_same_where_sorting_does(count: int) -> None:
    """By the 0-1 principle: all columns of zeros and ones, of every number of ones; then numbers."""
    columns = torch.tensor(list(itertools.product([0.0, 1.0], repeat=count))[:: max(1, 2**count // 512)]).T
    numbers = torch.cat([columns, torch.randn(count, 200)], 1).contiguous()
    expected = numbers.sort(0).values
    for first in range(count):
        last = count - first
        if first < last:
            ranks = torch.stack(select_ranks(numbers.clone(), first, last))
            assert torch.equal(ranks, expected[first:last])
            assert len(make_network(count, first, last)) <= len(make_network(count, 0, count))
    half = (expected[(count - 1) // 2] + expected[count // 2]) / 2
    torch.testing.assert_close(take_median(numbers.clone()), half)


@pytest.mark.parametrize("untrained", [(), ("heads.3.weight", "heads.3.bias")])
@pytest.mark.parametrize("chunk", [7, 64, 1 << 15])
def test_chunks_hold_each_element_once(untrained: tuple[str, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetfit.hooks.movements._CHUNK", chunk)
    updates = mixed(untrained)
    expected = by_element(updates)
    places = list(elements(SENT))
    seen = torch.zeros(len(places))
    numbers = torch.arange(len(places))
    for part in Movements(LAYOUT, SERVER, updates).chunks():
        for column, at in enumerate(part.read(numbers).tolist()):
            seen[at] += 1
            row = {member: float(part.rows[k, column]) for k, member in enumerate(part.members)}
            assert row == pytest.approx(expected[places[at]], abs=1e-5)
    assert seen.tolist() == [float(place in expected) for place in places]


def test_norms_are_those_of_the_movements() -> None:
    updates = mixed()
    _, norms = measure_movements(Movements(LAYOUT, SERVER, updates), len(updates), 4)
    for norm, update in zip(norms.tolist(), updates, strict=True):
        sent = concat_state(extract(LAYOUT, SENT, update.submodel))
        assert norm == pytest.approx(float((concat_state(update.state) - sent).norm()), rel=1e-5)


# ---- the options, by plain loops -------------------------------------------------------------------------------------


def given_on(option: dict[str, Any], updates: list[Update]) -> dict[int | None, Update]:
    method = build({"name": "scalefl", "options": option})
    return {u.client: u for u in method.filter_updates(FEDERATION, SERVER, updates)}


def median(values: list[float]) -> float:
    values = sorted(values)
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2


def ratios(updates: list[Update], least: int = 4, few: int = 32) -> dict[int, float]:
    """Return each client's largest distance from the median as a multiple of its block's median one.

    In a block of n < few elements it counts sqrt(n / few) times.
    """
    blocks: dict[tuple[int, ...], list[dict[int, float]]] = {}
    for moves in by_element(updates).values():
        blocks.setdefault(tuple(moves), []).append(moves)
    largest = dict.fromkeys(range(len(updates)), 0.0)
    for members, rows in blocks.items():
        if len(members) < least:
            continue
        center = [median(list(row.values())) for row in rows]
        far = {k: sum((row[k] - c) ** 2 for row, c in zip(rows, center, strict=True)) ** 0.5 for k in members}
        for k in members:
            largest[k] = max(largest[k], far[k] / median(list(far.values())) * min(1, len(rows) / few) ** 0.5)
    return largest


def test_outliers_by_block_distance() -> None:
    """One of the full sub-model moves 1.6 times as far, and at each threshold those above it are left out."""
    updates = [*mixed()[:-1], near(FULL, 30, 8, 1.6)]
    expected = ratios(updates)
    assert sorted(expected, key=lambda k: expected[k])[-1] == 8
    cuts = sorted(expected.values())
    for threshold in ((a + b) / 2 for a, b in itertools.pairwise(cuts) if a > 1 and b - a > 1e-3):
        updates_kept = given_on({"outliers": {"threshold": threshold}}, updates)
        assert set(updates_kept) == {k for k, r in expected.items() if r <= threshold}
    assert 8 not in given_on({"outliers": {}}, updates) and len(given_on({"outliers": {}}, updates)) == 8


def test_kept_updates_are_clipped_to_the_median() -> None:
    updates = mixed()
    sent = [concat_state(extract(LAYOUT, SENT, u.submodel)) for u in updates]
    norms = [float((concat_state(u.state) - s).norm()) for u, s in zip(updates, sent, strict=True)]
    limit = median(norms)
    updates_kept = given_on({"outliers": {"threshold": 100.0}}, updates)
    assert len(updates_kept) == 9 and max(norms) > 1.1 * limit
    for k, update in enumerate(updates):
        moved = float((concat_state(updates_kept[k].state) - sent[k]).norm())
        assert moved == pytest.approx(min(norms[k], limit), rel=1e-4)
        if norms[k] <= limit:
            assert updates_kept[k] is update


def test_outliers_beyond_the_core_are_left_out() -> None:
    updates = mixed()
    for hostile in (8,):
        bad = near(FULL, 40, hostile)
        core = elements(extract(LAYOUT, SENT, CORE)).keys()
        sent = elements(SENT)
        state = {n: t.clone() for n, t in bad.state.items()}
        for (name, at), number in elements(bad.state).items():
            if (name, at) not in core:
                state[name][at] = sent[name, at] - 10 * (number - sent[name, at])
        updates[hostile] = replace(bad, state=extract_like(state, FULL))
    assert set(given_on({"outliers": {}}, updates)) == set(range(8))


def test_blocks_of_few_clients_are_not_judged() -> None:
    """Three of the full sub-model: what only they cover judges nobody, unless `least` is 3."""
    updates = [near(CORE, 10 + i, i) for i in range(6)] + [near(FULL, 20 + i, 6 + i) for i in range(3)]
    core = elements(extract(LAYOUT, SENT, CORE)).keys()
    state = {n: t.clone() for n, t in updates[8].state.items()}
    for name, at in elements(updates[8].state):
        if (name, at) not in core:
            state[name][at] += 50.0
    updates[8] = replace(updates[8], state=extract_like(state, FULL))
    assert 8 in given_on({"outliers": {}}, updates)
    assert 8 not in given_on({"outliers": {"min_clients": 3}}, updates)


def liar(index: int, tensor: str, by: float) -> Update:
    """Return an update that moves one tensor, and says of all others that no gradient reached them."""
    job = make_job(FULL, index)
    state = {n: t + by if n == tensor else t for n, t in job.state.items()}
    untrained = tuple(n for n in job.state if n != tensor)
    return replace(make_update(FULL, 1, job), state=extract_like(state, FULL), untrained=untrained)


@pytest.mark.parametrize("tensor", ["heads.1.bias", "stem.weight"])
def test_claiming_little_training_hides_no_attacker(tensor: str) -> None:
    """Its block has a few elements, which all others cover, too."""
    others = mixed()[:-1]
    assert 8 not in given_on({"outliers": {}}, [*others, liar(8, tensor, 50.0)])
    assert set(given_on({"outliers": {}}, [*others, liar(8, tensor, 1.0)])) == set(range(9))


def test_krum_ignores_declared_untrained_tensors() -> None:
    updates = [*mixed()[:-2], near(FULL, 50, 7, -3.0), liar(8, "none of them", 0.0)]
    assert set(given_on({"krum": {}}, updates)) == set(range(7))


@pytest.mark.parametrize("most", [1 << 8, 1 << 14])
def test_as_many_coverages_as_there_are_clients(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventy clients, each of which says something else of what it has trained."""
    monkeypatch.setattr("fleetfit.hooks.movements._MOST", most)
    names = list(SENT)
    coverages = [tuple(n for i, n in enumerate(names) if (k * 2654435761 >> i) & 1) for k in range(1, 71)]
    assert len(set(coverages)) == 70
    updates = [near(FULL, 10 + k, k, untrained=untrained) for k, untrained in enumerate(coverages)]
    expected, places, seen = by_element(updates), list(elements(SENT)), 0
    for part in Movements(LAYOUT, SERVER, updates).chunks():
        for column, at in enumerate(part.read(torch.arange(len(places))).tolist()):
            seen += 1
            row = {member: float(part.rows[k, column]) for k, member in enumerate(part.members)}
            assert row == pytest.approx(expected[places[at]], abs=1e-5)
    assert seen == len(expected)
    assert len(given_on({"outliers": {"threshold": 50.0}}, updates)) == 70


def test_the_order_of_untrained_names_does_not_matter() -> None:
    one, two = ("heads.3.weight", "heads.3.bias"), ("heads.3.bias", "heads.3.weight")
    updates = [near(FULL, 10 + k, k, untrained=one if k % 2 else two) for k in range(4)]
    assert {part.block for part in Movements(LAYOUT, SERVER, updates).chunks()} == {1}


@pytest.mark.parametrize(("share", "count", "below", "above"), [(0.07, 100, 7, 7), (0.29, 100, 29, 29), (0.3, 7, 2, 3)])
def test_shares_round_exactly(share: float, count: int, below: int, above: int) -> None:
    assert (floor_share(share, count), ceil_share(share, count)) == (below, above)


def test_no_movements_and_no_updates() -> None:
    still = [replace(u, state=extract(LAYOUT, SENT, u.submodel)) for u in mixed()]
    assert len(given_on({"outliers": {}}, still)) == 9
    for option in ("outliers", "krum"):
        assert given_on({option: {}}, []) == {}


def test_a_moving_client_among_unmoved_ones_stays() -> None:
    """Three of the five that cover the rest of the full sub-model move nothing there."""
    updates = [near(CORE, 10 + i, i) for i in range(6)] + [near(FULL, 20 + i, 6 + i) for i in range(5)]
    core, sent = elements(extract(LAYOUT, SENT, CORE)).keys(), elements(SENT)
    for idle in (6, 7, 8):
        state = {n: t.clone() for n, t in updates[idle].state.items()}
        for name, at in elements(state).keys() - core:
            state[name][at] = sent[name, at]
        updates[idle] = replace(updates[idle], state=extract_like(state, FULL))
    assert {9, 10} <= set(given_on({"outliers": {}}, updates))


def merged(share: float, updates: list[Update]) -> Aggregate:
    method = build({"name": "scalefl", "options": {"trimmed_mean": {"fraction": share}}})
    return aggregate_updates(FEDERATION, SERVER, updates, method.make_aggregator, method.weigh)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.34, 0.5])
def test_the_trimmed_mean_of_each_element(share: float) -> None:
    updates = mixed(("heads.3.weight",))
    aggregate = merged(share, updates)
    sent, mean, coverage = elements(SENT), elements(aggregate.mean), elements(aggregate.coverage)
    expected = by_element(updates)
    for place, number in coverage.items():
        assert number == len(expected.get(place, {}))
        if number:
            moves = sorted(expected[place].values())
            ends = min(int(share * len(moves)), (len(moves) - 1) // 2)
            middle = moves[ends : len(moves) - ends]
            assert mean[place] == pytest.approx(sent[place] + sum(middle) / len(middle), abs=1e-4)


def test_a_score_of_krum_is_of_the_nearest_others() -> None:
    """On a line at 0, 1, 3 and 10, with two neighbors: 1 + 9, 1 + 4, 4 + 9, 49 + 81."""
    line = torch.tensor([0.0, 1.0, 3.0, 10.0], dtype=torch.float64)
    apart = (line[:, None] - line[None]) ** 2
    assert compute_scores(apart, 2).tolist() == [10.0, 5.0, 13.0, 130.0]


def test_krum_keeps_near_neighbors() -> None:
    """Nine clients, two expected hostile: scores are over the five nearest, and seven count."""
    updates = [*mixed()[:-2], near(FULL, 50, 7, -3.0), near(FULL, 51, 8, 4.0)]
    moves = {p: m for p, m in by_element(updates).items() if len(m) == 9}
    apart = [[sum((m[i] - m[j]) ** 2 for m in moves.values()) for j in range(9)] for i in range(9)]
    scores = {i: sum(sorted(apart[i][:i] + apart[i][i + 1 :])[:5]) for i in range(9)}
    expected = set(sorted(scores, key=lambda i: scores[i])[:7])
    assert expected == set(range(7))
    assert set(given_on({"krum": {}}, updates)) == expected
    order = set(sorted(scores, key=lambda i: scores[i])[:6])
    if len(updates) - 3 - 2 == 4:
        four = {i: sum(sorted(apart[i][:i] + apart[i][i + 1 :])[:4]) for i in range(9)}
        order = set(sorted(four, key=lambda i: four[i])[:6])
    assert set(given_on({"krum": {"fraction": 0.3}}, updates)) == order
    assert len(given_on({"krum": {"fraction": 0.4}}, updates[:4])) == 4, "too few to judge"


# ---- against real attacks --------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {**ATTACKED, "rounds": 4}


def accuracy(out: Path, attack: dict[str, Any], plus: dict[str, Any]) -> ff.Run:
    table = {**TINY, "method": {"name": "scalefl", "options": plus}, **({"attack": attack} if attack else {})}
    return ff.run(table, out=out)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> float:
    return accuracy(tmp_path_factory.mktemp("clean") / "a", {}, {}).accuracy(kind="global")


@pytest.mark.parametrize("kind", ["sign_flip", "noise", "beyond_core"])
def test_outliers_keeps_the_accuracy(kind: str, clean: float, tmp_path: Path) -> None:
    attack = {"kind": kind, "fraction": 0.2, "among": [2] if kind == "beyond_core" else "each"}
    run = accuracy(tmp_path / "a", attack, {"outliers": {}})
    assert clean > 0.8
    assert run.accuracy(kind="global") > clean - 0.15
    assert run.summary["hostile_excluded"] == 1.0
    assert run.summary["honest_excluded_1"] < 0.2 and run.summary["honest_excluded"] < 0.2
    hostile = set(json.loads((tmp_path / "a" / "fleet.json").read_text())["hostile"])
    assert hostile <= {f["client"] for f in run.metrics[0]["failures"]}


def test_krum_and_trimmed_mean_bound_an_attack(clean: float, tmp_path: Path) -> None:
    for name in ("krum", "trimmed_mean"):
        plus = {name: {"fraction": 0.3}}
        run = accuracy(tmp_path / name, {"kind": "sign_flip", "fraction": 0.2, "among": "each"}, plus)
        assert run.accuracy(kind="global") > clean - 0.25, name


@pytest.mark.parametrize("option", ["outliers", "krum", "trimmed_mean"])
def test_the_same_bits_on_other_engines(option: str, tmp_path: Path) -> None:
    table = {**TINY, "rounds": 1, "local": {"epochs": 1}, "method": {"name": "fedrolex", "options": {option: {}}}}
    here = ff.run(table, out=tmp_path / "local")
    there = ff.run(table, engine={"name": "processes", "workers": 1}, out=tmp_path / "processes")
    a, b = (run.checkpoint["server"].state for run in (here, there))
    assert all(torch.equal(a[name], b[name]) for name in a)


PROFILES = {"groups": [{"budget": 0.5, "profile": "phone"}, {"budget": 1.0, "profile": "phone"}]}
REFUSED: list[tuple[dict[str, Any], Expected]] = [
    (
        {"method": {"name": "feddropout", "options": {"outliers": {}}}},
        Expected("method.options.outliers", 'channels = "prefix"', '"rolling"'),
    ),
    (
        {"method": {"name": "scalefl", "hooks": {"choose_channels": "window"}, "options": {"krum": {}}}},
        Expected("method.options.krum"),
    ),
    ({"method": {"name": "decoupled", "options": {"outliers": {}}}}, Expected("method.options.outliers")),
    (
        {"method": {"name": "decoupled", "options": {"trimmed_mean": {}}}},
        Expected('"make_aggregator"', key="method.hooks.make_aggregator"),
    ),
    ({"cohort": {"count": 3}, "method": {"options": {"outliers": {}}}}, Expected("method.options.outliers", 3)),
    ({"cohort": {"count": 3}, "method": {"options": {"krum": {}}}}, Expected("method.options.krum", 3)),
    (
        {"cohort": {"count": 5}, "method": {"options": {"outliers": {"min_clients": 10}}}},
        Expected("method.options.outliers", 5, 10),
    ),
    (
        {"cohort": {"count": 8}, "method": {"options": {"krum": {"fraction": 0.4}}}},
        Expected("method.options.krum", 8, 15),
    ),
    (
        {"cohort": {"count": 4, "over_selection": 1.0}, "method": {"options": {"krum": {}}}, "fleet": PROFILES},
        Expected("method.options.krum", 4, 5),
    ),
    (
        {"cohort": {"count": 8, "quorum": 0.5}, "method": {"options": {"krum": {}}}, "fleet": PROFILES},
        Expected("method.options.krum", 4, 5),
    ),
    (
        {"cohort": {"count": 4}, "method": {"options": {"trimmed_mean": {}}}},
        Expected("method.options.trimmed_mean", 4, 5),
    ),
    (
        {"method": {"options": {"outliers": {"threshold": 0.5}}}},
        Expected(1, key="method.options.outliers.threshold"),
    ),
    (
        {"method": {"options": {"trimmed_mean": {"fraction": 0.6}}}},
        Expected(0, key="method.options.trimmed_mean.fraction"),
    ),
]


@pytest.mark.parametrize(("change", "expected"), REFUSED)
def test_incomparable_updates_are_refused(change: dict[str, Any], expected: Expected) -> None:
    with raises(ConfigError, expected):
        assemble(load_experiment({**TINY, **change}))


@pytest.mark.parametrize(("count", "plus"), [(3, {"outliers": {"min_clients": 3}}),
                                             (3, {"trimmed_mean": {"fraction": 0.5}}), (5, {"krum": {}})])  # fmt: skip
def test_as_few_as_the_keys_allow_are_enough(count: int, plus: dict[str, Any]) -> None:
    assert (
        assemble(load_experiment({**TINY, "cohort": {"count": count}, "method": {"options": plus}})).federation.cohort
        == count
    )


def test_untold_levels_of_adaptivefl_are_compared_too(tmp_path: Path) -> None:
    table = {**TINY, "rounds": 2, "method": {"name": "adaptivefl", "options": {"outliers": {}}},
             "attack": {"kind": "sign_flip", "fraction": 0.2}}  # fmt: skip
    run = ff.run(table, out=tmp_path / "a")
    assert len({level for report in run.metrics for level in report["received"]["sent"]["honest"]}) > 1
    assert run.summary["hostile_excluded"] == 1.0 and run.summary["honest_excluded"] < 0.2


def test_the_start_is_not_written_to() -> None:
    federation, server = FEDERATION, start(FEDERATION)
    before = concat_state(server.state).clone()

    for option in ("outliers", "krum", "trimmed_mean"):
        method = build({"name": "scalefl", "options": {option: {}}})
        if option == "trimmed_mean":
            aggregate_updates(federation, server, mixed(), method.make_aggregator, method.weigh)
        else:
            list(method.filter_updates(federation, server, mixed()))
        assert torch.equal(concat_state(server.state), before)
