"""Eq. 1 against plain loops over all pairs; budgets to levels; clients to levels; plans saved and read again."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support import Expected, check_error, raises

from fleetfit.cost import WIDTHS, Conditions, Grid, compute_cost, cost_grid
from fleetfit.errors import ConfigError, PlanError
from fleetfit.models.cnn import cnn
from fleetfit.models.resnet import resnet
from fleetfit.planner import (
    LevelShape,
    Plan,
    Targets,
    as_fractions,
    assign,
    convert_budgets,
    find_shapes,
    make_plan,
    make_targets,
    search,
)  # fmt: skip

CIFAR = (3, 32, 32)
QUARTERS = Targets((0.125, 0.25, 0.5, 1.0), (0.1,) * 4)


def pairs(splits: tuple[LevelShape, ...]) -> list[tuple[int, float]]:
    return [(s.depth, s.width) for s in splits]


# ---- Eq. 1 -----------------------------------------------------------------------------------------------------------


def by_loops(grid: Grid, targets: Targets, mode: str, further: Grid | None = None) -> list[tuple[int, float]] | None:
    """Try every choice of depths and widths; costs, limits and order of preference written out as the rule says."""
    smaller, full = len(targets.ratios) - 1, grid.full
    depths = [p for p in grid.positions if p < grid.blocks]
    best = None
    for chosen in combinations(range(len(depths)), smaller):
        for widths in product(range(len(grid.widths)), repeat=smaller):
            if list(widths) != sorted(widths) or (mode == "depth" and any(grid.widths[w] != 1 for w in widths)):
                continue
            gap = off = 0.0
            for level, (row, column) in enumerate(zip(chosen, widths, strict=True)):
                cost = grid.trunk[row, column] + sum(grid.heads[r, column] for r in chosen[: level + 1])
                relative = cost / (targets.ratios[level] * full) - 1
                if abs(relative) > targets.tolerances[level] + 1e-9 or (targets.strict and relative > 1e-9):
                    break
                if further is not None:
                    other = further.trunk[row, column] + sum(further.heads[r, column] for r in chosen[: level + 1])
                    slack = 0 if targets.strict else targets.tolerances[level]
                    if other > (1 + slack) * targets.ceilings["size_bytes"][level] * further.full + 1e-9:
                        break
                off += abs(relative)
                gap += abs(depths[row] / grid.blocks - grid.widths[column]) if mode == "both" else 0
            else:
                key = (round(gap, 9), round(off, 9), -sum(depths[r] for r in chosen))
                if best is None or key < best[0]:
                    best = key, [(depths[r], grid.widths[w]) for r, w in zip(chosen, widths, strict=True)]
    return None if best is None else [*best[1], (grid.blocks, 1.0)]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Small grids of whole numbers, in which costs grow with width and depth, and ties happen."""
    positions = draw(st.sampled_from([(1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 6), (1, 2, 3, 4, 5)]))
    widths = draw(st.sampled_from([(0.5, 1.0), (0.25, 0.5, 1.0), (0.4, 0.6, 0.8, 1.0)]))
    steps = draw(st.lists(st.integers(1, 9), min_size=len(positions), max_size=len(positions)))
    heads = draw(st.lists(st.integers(0, 4), min_size=len(positions), max_size=len(positions)))
    square = np.array(widths) ** draw(st.sampled_from([1, 2]))
    trunk = np.cumsum(steps)[:, None] * square
    return Grid("parameters", positions[-1], positions, widths, trunk, np.array(heads)[:, None] * np.array(widths))


@given(
    grid=grids(),
    count=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    scaling=st.sampled_from(["both", "depth"]),
    strict=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_search_equals_plain_loops(grid: Grid, count: int, seed: int, scaling: str, strict: bool) -> None:
    rng = np.random.default_rng(seed)
    ratios = tuple(sorted(set(rng.uniform(0.05, 0.95, count).round(2).tolist())))
    tolerances = tuple(rng.choice([0.1, 0.3, 0.6], len(ratios) + 1).tolist())
    targets = Targets((*ratios, 1.0), tolerances, strict=strict)
    expected = by_loops(grid, targets, scaling)
    if expected is None:
        with raises(PlanError, f"{targets.ratios[0]:.3g}"):
            search(grid, targets, scaling)
        return
    solution = search(grid, targets, scaling)
    assert pairs(solution) == expected
    for level, split in enumerate(solution[:-1]):
        assert split.exits == tuple(d for d, _ in expected[: level + 1])
        assert split.share == pytest.approx(grid.estimate(split.width, split.exits) / grid.full)
    assert solution[-1] == LevelShape(grid.blocks, 1.0, tuple(d for d, _ in expected), 1.0)


@given(
    grid=grids(),
    count=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    scaling=st.sampled_from(["both", "depth"]),
    strict=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_search_respects_further_costs(grid: Grid, count: int, seed: int, scaling: str, strict: bool) -> None:
    """The further cost is another grid of the same shape; its ceilings shut out some pairs, and sometimes all."""
    rng = np.random.default_rng(seed)
    shape = grid.trunk.shape
    trunk = np.cumsum(rng.integers(1, 9, shape), axis=0) * np.array(grid.widths)
    further = Grid("size_bytes", grid.blocks, grid.positions, grid.widths, trunk, rng.integers(0, 3, shape) * 1.0)
    ratios = tuple(sorted(set(rng.uniform(0.05, 0.95, count).round(2).tolist())))
    tolerances = tuple(rng.choice([0.1, 0.3, 0.6], len(ratios) + 1).tolist())
    ceilings = {"size_bytes": (*rng.choice([0.2, 0.5, 0.8, np.inf], len(ratios)).tolist(), np.inf)}
    targets = Targets((*ratios, 1.0), tolerances, strict=strict, ceilings=ceilings)
    expected = by_loops(grid, targets, scaling, further)
    if expected is None:
        with raises(PlanError, "size_bytes"):
            search(grid, targets, scaling, further={"size_bytes": further})
        return
    solution = search(grid, targets, scaling, further={"size_bytes": further})
    assert pairs(solution) == expected
    for split in solution[:-1]:
        assert split.further["size_bytes"] == pytest.approx(further.estimate(split.width, split.exits) / further.full)
    assert solution[-1].further == {"size_bytes": 1.0}


def estimated(grid: Grid, wrong: float) -> Grid:
    """The same costs as an estimate: what is measured is up to `wrong` times as much, the more the narrower."""

    def measure(width: float, exits: tuple[int, ...]) -> float:
        return grid.estimate(width, exits) * (1 + (wrong - 1) * (1 - width))

    return replace(grid, measure=measure)


@pytest.mark.parametrize("wrong", [1.0, 1.3, 2.0, 0.6])
def test_levels_are_measured_where_costs_are_estimates(wrong: float) -> None:
    """However wrong the parts are, the levels that come out have the costs that were asked for."""
    grid = estimated(cost_grid(resnet(depth=20), CIFAR), wrong)
    for split, ratio in zip(search(grid, QUARTERS)[:-1], QUARTERS.ratios, strict=False):
        assert split.share == pytest.approx(grid.compute(split.width, split.exits) / grid.full)
        assert abs(split.share / ratio - 1) <= 0.1 + 1e-9
    other = estimated(cost_grid(resnet(depth=20), CIFAR, "size_bytes"), wrong)
    ceilings = (0.2, 0.3, 0.5, np.inf)
    targets = replace(QUARTERS, ceilings={"size_bytes": ceilings})
    for split, ceiling in zip(search(grid, targets, further={"size_bytes": other})[:-1], ceilings, strict=False):
        assert split.further["size_bytes"] <= 1.1 * ceiling + 1e-9
        assert split.further["size_bytes"] == other.compute(split.width, split.exits) / other.full


def test_the_full_models_cost_corrects_no_other_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """cost(M) is without the early heads that the full model's estimate has: their ratio is no error of an estimate."""
    used: list[LevelShape] = []
    searching = import_module("fleetfit.planner.search")  # the package has a function of that name
    plainly = searching._corrections

    def corrections(grid: Grid, primary: bool, seen: Sequence[LevelShape]) -> Any:
        used.extend(seen)
        return plainly(grid, primary, seen)

    monkeypatch.setattr(searching, "_corrections", corrections)
    grid = estimated(cost_grid(resnet(depth=20), CIFAR), 2.0)
    assert search(grid, QUARTERS)[-1].depth == grid.blocks
    assert used and all(split.depth < grid.blocks for split in used)


def test_measurements_that_never_agree_are_an_error() -> None:
    grid = cost_grid(resnet(depth=20), CIFAR)

    def measure(width: float, exits: tuple[int, ...]) -> float:
        return 0.375 * grid.full  # whatever is asked for: half as much again as the target

    with raises(PlanError, "parameters", 8):
        search(replace(grid, measure=measure), Targets((0.25, 1.0), (0.1, 0.1)))


def test_each_level_needs_a_ceiling() -> None:
    with raises(PlanError, 0, "size_bytes", key="ceilings"):
        replace(QUARTERS, ceilings={"size_bytes": (1.0,) * 3})


def test_ceilings_without_a_solution_are_named() -> None:
    grids = {cost: cost_grid(resnet(depth=20), CIFAR, cost) for cost in ("parameters", "multiply_adds")}
    targets = replace(QUARTERS, ceilings={"multiply_adds": (0.01, 0.01, 0.01, np.inf)})
    with raises(PlanError, "multiply_adds", 1):
        search(grids["parameters"], targets, further={"multiply_adds": grids["multiply_adds"]})


def test_ties_are_broken_by_shallower_small_levels() -> None:
    """Blocks 1 and 4 cost what blocks 2 and 3 cost, and are as deep in all: a complete tie."""
    grid = Grid("parameters", 5, (1, 2, 3, 4, 5), (1.0,), np.array([[1.0], [3], [4], [5], [8]]),
                np.array([[4.0], [2], [4], [1], [3]]))  # fmt: skip
    targets = Targets((0.55, 0.92, 1.0), (0.3, 0.3, 0.3))
    assert pairs(search(grid, targets, "depth")) == by_loops(grid, targets, "depth") == [(1, 1.0), (4, 1.0), (5, 1.0)]


def test_resnet_20_needs_a_joint_search() -> None:
    """Alone, r_1 takes 6 blocks at 0.65, after which nothing deeper is near 0.25; together 4, 5 and 6 blocks fit."""
    grid = cost_grid(resnet(depth=20), CIFAR)
    assert pairs(search(grid, Targets((0.125, 1.0), (0.1, 0.1)))) == [(6, 0.65), (9, 1.0)]
    after = [grid.estimate(w, (6, d)) / grid.full for d in (7, 8) for w in WIDTHS if w >= 0.65 and d < 9]
    assert min(abs(share / 0.25 - 1) for share in after) > 0.1
    solution = search(grid, QUARTERS)
    assert pairs(solution) == [(4, 0.75), (5, 0.79), (6, 0.91), (9, 1.0)]
    # One step wider keeps the same channels in all three, and so costs the same, but its pairs are farther apart.
    wider = search(grid, QUARTERS, depths=(4, 5, 6), widths=(0.76, 0.80, 0.92))
    assert [s.share for s in wider] == [s.share for s in solution]
    for split, ratio in zip(wider[:-1], QUARTERS.ratios, strict=False):
        assert abs(split.share / ratio - 1) <= 0.1


def test_resnet_110_at_the_papers_exits() -> None:
    """All of Table 1 is within the tolerance of Eq. 1, and Eq. 1 itself finds pairs that are closer."""
    grid = cost_grid(resnet(), CIFAR)
    table = search(grid, QUARTERS, depths=(36, 42, 48), widths=(0.70, 0.70, 0.75))
    assert [round(s.share, 3) for s in table] == [0.121, 0.269, 0.501, 1.0]
    assert all(abs(s.share / r - 1) <= 0.1 for s, r in zip(table, QUARTERS.ratios, strict=True))
    solution = search(grid, QUARTERS)
    assert pairs(solution) == [(36, 0.69), (40, 0.74), (45, 0.83), (54, 1.0)]
    assert solution[-1].exits == (36, 40, 45, 54)
    given_depths = search(grid, QUARTERS, depths=(36, 42, 48))
    assert [s.depth for s in given_depths] == [36, 42, 48, 54]
    assert all(abs(s.share / r - 1) <= 0.1 for s, r in zip(given_depths, QUARTERS.ratios, strict=True))


def test_width_only_is_nearest_at_full_depth() -> None:
    grid = cost_grid(resnet(), CIFAR)
    solution = search(grid, QUARTERS, "width")
    assert all(s.exits == (54,) for s in solution)
    for split, ratio in zip(solution[:-1], QUARTERS.ratios, strict=False):
        shares = [grid.estimate(w, (54,)) / grid.full for w in WIDTHS]
        assert split.share == min(shares, key=lambda s: abs(s - ratio))
        assert abs(split.share / ratio - 1) <= 0.1


def test_depth_only_keeps_all_channels() -> None:
    solution = search(cost_grid(resnet(), CIFAR), QUARTERS, "depth")
    assert [s.width for s in solution] == [1.0] * 4
    assert [s.depth for s in solution] == [24, 34, 40, 54]


@pytest.mark.parametrize("cost", ["parameters", "multiply_adds"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_default_fleet_fits_the_small_cnn(cost: str, norm: str) -> None:
    for mode in ("both", "width", "depth"):
        if (cost, mode) != ("multiply_adds", "depth"):  # half of its multiply-adds are in the first blocks
            assert len(search(cost_grid(cnn(norm=norm), (1, 8, 8), cost), QUARTERS, mode)) == 4


def test_strict_stays_under_every_budget() -> None:
    grid = cost_grid(resnet(), CIFAR)
    solution = search(grid, Targets(QUARTERS.ratios, QUARTERS.tolerances, strict=True))
    assert all(s.share <= r for s, r in zip(solution, QUARTERS.ratios, strict=True))
    assert any(s.share > r for s, r in zip(search(grid, QUARTERS), QUARTERS.ratios, strict=True))


def test_nothing_fits_names_the_nearest() -> None:
    grid = cost_grid(resnet(depth=20), CIFAR)
    with pytest.raises(PlanError) as caught:
        search(grid, QUARTERS, "depth")
    check_error(caught.value, "level 2", "4 of 9", 0.236, 0.25, 0.37)
    search(grid, Targets(QUARTERS.ratios, (0.37,) * 4), "depth")
    with pytest.raises(PlanError):
        search(grid, Targets(QUARTERS.ratios, (0.36,) * 4), "depth")


def test_more_levels_than_depths() -> None:
    ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)
    with raises(PlanError, 6, 5):
        search(cost_grid(cnn(), (1, 8, 8)), Targets(ratios, (0.1,) * 7))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"depths": (1, 2)}, Expected(4, 3, 2, key="depths")),
        ({"widths": (0.5,)}, Expected(4, 3, key="widths")),
        ({"depths": (3, 2, 4)}, Expected(key="depths")),
        ({"depths": (2, 3, 6)}, Expected("[1, 2, 3, 4, 5]", key="depths")),
        ({"widths": (0.5, 0.4, 0.6)}, Expected(key="widths")),
        ({"widths": (0.5, 0.505, 0.6)}, Expected(0.01, key="widths")),
        ({"scaling": "height"}, Expected('"both"', '"width"', '"depth"', key="scaling")),
    ],
)
def test_given_depths_and_widths_are_checked(options: dict, expected: Expected) -> None:
    with raises(PlanError, expected):
        search(cost_grid(cnn(), (1, 8, 8)), QUARTERS, **options)


# ---- budgets to levels -----------------------------------------------------------------------------------------------


def test_few_distinct_budgets_are_a_level_each() -> None:
    budgets = [0.25, 1.0, 0.125, 0.5, 0.5, 2.0]
    assert make_targets(budgets).ratios == (0.125, 0.25, 0.5, 1.0)
    assert make_targets([1.0, 1.0]).ratios == (1.0,)


@pytest.mark.parametrize("clients", [5_000, 10_007, 50_000, 1_000_000])
def test_clustering_survives_missed_budgets(clients: int) -> None:
    """Half have 0.25, half 1, and seven clients something between."""
    budgets = np.where(np.arange(clients) % 2 == 0, 0.25, 1.0)
    budgets[: 7 * 2 : 2] = np.linspace(0.30, 0.36, 7)
    assert make_targets(budgets).ratios == (0.25, 1.0)
    assert make_targets(np.where(np.arange(clients) == 7, 0.5, 0.25)).ratios[-1] == 1.0


def test_many_budgets_are_clustered() -> None:
    rng = np.random.default_rng(0)
    groups = [0.1, 0.3, 1.0]
    budgets = np.concatenate([g * np.exp(rng.uniform(0, 0.2, 400)) for g in groups])
    targets = make_targets(budgets)
    assert len(targets.ratios) == 3
    assert targets.ratios[:2] == (budgets[:400].min(), budgets[400:800].min())  # r_l = min of the cluster
    assert targets.ratios[-1] == 1.0  # r_L = 1
    assert targets == make_targets(budgets[::-1])


def test_a_full_model_without_clients_is_a_level() -> None:
    assert make_targets([0.25, 0.5]).ratios == (0.25, 0.5, 1.0)
    assert make_targets([0.25, 0.95]).ratios == (0.25, 1.0)  # within its tolerance


def test_halving_goes_down_to_the_smallest_client() -> None:
    for smallest, expected in ((1.0, 1), (0.5, 2), (0.46, 2), (0.45, 3), (0.125, 4), (1e-6, 8)):
        ratios = make_targets([smallest, 1.0], "halving").ratios
        assert ratios == tuple(0.5**i for i in reversed(range(expected))), smallest


def test_ratios_may_be_given() -> None:
    assert make_targets([0.1, 1.0], [0.2, 0.4]).ratios == (0.2, 0.4, 1.0)
    assert make_targets([0.1, 1.0], [0.2, 1]).ratios == (0.2, 1.0)
    for wrong in ([0.4, 0.2], [0.0, 0.5], [0.5, 1.5], [0.3, 0.3]):
        with raises(PlanError, key="ratios"):
            make_targets([0.1, 1.0], wrong)


def test_a_levels_tolerance_is_its_smallest() -> None:
    budgets, slack = [0.25, 0.25, 0.5, 1.0], [0.3, 0.2, 0.05, 0.1]
    assert make_targets(budgets, "cluster", slack).tolerances == (0.2, 0.05, 0.1)
    assert make_targets(budgets, [0.25, 0.5, 0.75], slack).tolerances == (0.2, 0.05, 0.05, 0.1)  # nobody at 0.75


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([],), Expected(key="budgets")),
        (([0.0],), Expected(key="budgets")),
        (([0.5, -1.0],), Expected(key="budgets")),
        (([float("nan")],), Expected(key="budgets")),
        (([float("inf")],), Expected(key="budgets")),
        (([1.0], "thirds"), Expected('"cluster"', '"halving"', key="levels")),
        (([1.0], "cluster", -0.1), Expected(0, -0.1, key="tolerance")),
    ],
)
def test_invalid_budgets_are_refused(arguments: tuple[Any, ...], expected: Expected) -> None:
    with raises(PlanError, expected):
        make_targets(*arguments)


def test_budgets_above_one_are_absolute() -> None:
    assert as_fractions([0.5, 1.0, 500, 2000], 1000).tolist() == [0.5, 1.0, 0.5, 2.0]


def test_a_ceiling_is_the_smallest_budget() -> None:
    budgets, bytes_ = [0.25, 0.25, 0.5, 1.0], [0.4, 0.3, np.inf, 1.0]
    targets = make_targets(budgets, further={"size_bytes": bytes_})
    assert targets.ratios == (0.25, 0.5, 1.0)
    assert targets.ceilings == {"size_bytes": (0.3, np.inf, 1.0)}
    halves = make_targets(budgets, "halving", further={"size_bytes": bytes_})
    assert halves.ratios == (0.25, 0.5, 1.0) and halves.ceilings == targets.ceilings


def test_the_full_model_is_a_level_without_clients() -> None:
    assert make_targets([0.25, 0.95], further={"size_bytes": [1.0, 1.0]}).ratios == (0.25, 1.0)
    assert make_targets([0.25, 0.95], further={"size_bytes": [1.0, 0.5]}).ratios == (0.25, 0.95, 1.0)


COSTS_OF_M = {"parameters": 1000.0, "memory_bytes": 4e6, "latency_s": 0.05}


def test_budgets_name_several_costs() -> None:
    stated: list[Any] = [0.5, {"parameters": 250, "memory_bytes": 2e6}, {"latency_s": "20 ms", "parameters": 1.0}]
    budgets = convert_budgets(stated, "parameters", COSTS_OF_M.__getitem__)
    assert list(budgets) == ["parameters", "memory_bytes", "latency_s"]
    assert budgets["parameters"].tolist() == [0.5, 0.25, 1.0]
    assert budgets["memory_bytes"].tolist() == [np.inf, 0.5, np.inf]
    assert budgets["latency_s"].tolist() == pytest.approx([np.inf, np.inf, 0.4])


@pytest.mark.parametrize(
    ("amount", "cost", "fraction"),
    [("2 MB", "memory_bytes", 0.5), ("200kB", "memory_bytes", 0.05), ("0.1 s", "latency_s", 2.0),
     ("500 us", "latency_s", 0.01), ("0.1 K", "parameters", 0.1), ("1e-6 G", "parameters", 1.0)],
)  # fmt: skip
def test_amounts_with_a_unit_are_absolute(amount: str, cost: str, fraction: float) -> None:
    budgets = convert_budgets([{"parameters": 1.0, cost: amount}], "parameters", COSTS_OF_M.__getitem__)
    assert budgets[cost].tolist() == pytest.approx([fraction])


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ({"memory_bytes": 0.5}, Expected(1, "memory_bytes", key="budgets")),
        ({}, Expected(1, key="budgets")),
        (
            {"parameters": 1.0, "memory_bytes": "2 ms"},
            Expected("memory_bytes", key="budget"),
        ),
        ({"parameters": 1.0, "latency_s": "fast"}, Expected('"20 ms"', '"fast"', key="budget")),
        ({"parameters": 1.0, "latency_s": "1.2.3 ms"}, Expected(key="budget")),
        ({"parameters": 1.0, "latency_s": -1.0}, Expected(0, key="budgets")),
        ("0 K", Expected(0, key="budgets")),
    ],
)
def test_invalid_budgets_in_several_costs_are_refused(budget: Any, expected: Expected) -> None:
    with raises(PlanError, expected):
        convert_budgets([budget], "parameters", COSTS_OF_M.__getitem__)


# ---- clients to levels -----------------------------------------------------------------------------------------------


@given(
    clients=st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 1)), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.01, 1), min_size=1, max_size=5).map(sorted),
)
def test_clients_get_the_largest_tolerable_level(clients: list[tuple[float, float]], costs: list[float]) -> None:
    budgets, slack = zip(*clients, strict=True)
    expected = [max((i for i, c in enumerate(costs) if c <= (1 + e) * b * (1 + 1e-9)), default=-1) for b, e in clients]
    assert assign(budgets, slack, costs).tolist() == expected


@given(
    clients=st.lists(
        st.tuples(st.floats(0.01, 2), st.floats(0, 1), st.floats(0.01, 2), st.just(np.inf) | st.floats(0.01, 2)),
        min_size=1,
        max_size=20,
    ),
    levels=st.lists(st.tuples(*[st.floats(0.01, 1)] * 3), min_size=1, max_size=5),
)
def test_all_costs_of_a_level_must_fit(clients: list[Any], levels: list[Any]) -> None:
    """Further costs need not grow from level to level: it is the largest level that fits, not the last that did."""
    columns, costs = list(zip(*clients, strict=True)), list(zip(*levels, strict=True))
    expected = [
        max((i for i, needed in enumerate(levels) if all(c <= (1 + e) * b * (1 + 1e-9)
             for c, b in zip(needed, (first, *rest), strict=True))), default=-1)
        for first, e, *rest in clients
    ]  # fmt: skip
    further = [(columns[2], costs[1]), (columns[3], costs[2])]
    assert assign(columns[0], columns[1], costs[0], further).tolist() == expected


def test_the_experiments_own_clients_fit_table_1() -> None:
    """Levels that cost 0.121, 0.269 and 0.501 of the model: budgets of exactly 1/4 and 1/2 need the tolerance."""
    costs = [0.1215, 0.2691, 0.5008, 1.0]
    assert assign([0.125, 0.25, 0.5, 1.0], 0.1, costs).tolist() == [0, 1, 2, 3]
    assert assign([0.125, 0.25, 0.5, 1.0], 0.0, costs).tolist() == [0, 0, 1, 3]
    assert assign([0.1, 0.12], [0.1, 0.1], costs).tolist() == [-1, 0]


def test_a_limit_met_exactly_is_met() -> None:
    assert assign([0.125], 0.1, [0.1375]).tolist() == [0]  # 0.125 * 1.1 is a bit less in floats


def test_a_million_clients() -> None:
    budgets = np.random.default_rng(0).choice([0.01, 0.125, 0.25, 0.5, 1.0], 10**6)
    plan = make_plan(cnn(), (1, 8, 8), budgets, how=[0.125, 0.25, 0.5])
    assert [level.clients for level in plan.levels] == [int((budgets == b).sum()) for b in (0.125, 0.25, 0.5, 1.0)]
    assert len(plan.left_out) == int((budgets == 0.01).sum())
    assert plan.left_out[0] == str(int(np.flatnonzero(budgets == 0.01)[0]))


# ---- plans -----------------------------------------------------------------------------------------------------------


def small_plan() -> Plan:
    budgets = {"phone": 0.05, "tablet": 0.13, "laptop": 0.3, "desk": 0.5, "server": 1e9, "rack": 1.0}
    return make_plan(resnet(), CIFAR, budgets, depths=(36, 42, 48), widths=(0.7, 0.7, 0.75))


def test_a_plan_reports_sizes_and_clients_by_name() -> None:
    plan = small_plan()
    assert [level.parameters for level in plan.levels] == [210_253, 465_727, 866_730, 1_730_714]
    assert [round(level.multiply_adds / 1e6, 1) for level in plan.levels] == [83.4, 99.7, 138.5, 253.1]
    assert [level.clients for level in plan.levels] == [1, 1, 1, 2]
    assert plan.left_out == ("phone",)
    assert plan.early_heads.parameters == 1_982_136 - 1_730_714
    assert plan.levels[2].exits == (36, 42, 48)


def test_a_plan_survives_toml_and_settles_a_run() -> None:
    plan = small_plan()
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert pairs(find_shapes(resnet(), CIFAR, again.targets)) == [(36, 0.7), (42, 0.7), (48, 0.75), (54, 1.0)]
    searched = find_shapes(resnet(), CIFAR, replace(again.targets, splits=()), "width")
    assert find_shapes(resnet(), CIFAR, again.targets, "width") == searched  # settled for its mode only
    with raises(PlanError, key="levels"):
        find_shapes(resnet(depth=20), CIFAR, again.targets)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("format = ", Expected(key="plan")),
        ("format = 4", Expected(4, key="format")),
        ("", Expected(key="format")),
        ("format = 2", Expected(2, key="format")),
        ("format = 3", Expected(key="plan")),
        ("format = 3\nlevel = [{ name = 1 }]", Expected(key="plan")),
    ],
)
def test_files_that_are_not_plans_are_refused(text: str, expected: Expected) -> None:
    with raises(ConfigError, expected):
        Plan.from_toml(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("depth = 36", 'depth = "36"'),
        ("width = 0.7", "wide = 0.7"),
        ("exits = [", "exits = 3\nmore = ["),
        ("clients = 1", "clients = true"),
    ],
)
def test_a_plan_with_wrong_entries_is_refused(before: str, after: str) -> None:
    text = small_plan().to_toml()
    assert before in text
    with raises(ConfigError, key="plan"):
        Plan.from_toml(text.replace(before, after))


def test_a_plan_in_several_costs() -> None:
    """All must fit: a tablet with little memory gets less than its parameters allow, a watch nothing."""
    shape, conditions = (1, 8, 8), Conditions(batch_size=4)
    whole = compute_cost(cnn(), ({}, (6,)), shape, "memory_bytes", conditions)
    budgets: dict[str, Any] = {
        "phone": {"parameters": 0.25, "memory_bytes": 0.5 * whole},
        "tablet": {"parameters": 0.6, "memory_bytes": 0.5 * whole},
        "desk": {"parameters": 0.6, "memory_bytes": "1 GB"},
        "watch": {"parameters": 0.25, "memory_bytes": 0.01},
        "server": 1.0,
    }
    plan = make_plan(
        cnn(), shape, budgets, how=[0.25, 0.6], depths=(3, 5), widths=(0.85, 0.9), also=["size_bytes"],
        conditions=conditions,
    )  # fmt: skip
    assert [level.clients for level in plan.levels] == [2, 1, 1]
    assert plan.left_out == ("watch (memory_bytes)",)
    for level in plan.levels:
        exits = level.exits if level.depth < 6 else (6,)
        piece = ({} if level.width == 1 else cnn().sizes(level.width), exits)
        assert level.further == {
            cost: compute_cost(cnn(), piece, shape, cost, conditions) for cost in ("memory_bytes", "size_bytes")
        }
    assert plan.batch_size == 4
    assert plan.levels[1].further["memory_bytes"] > 1.1 * 0.5 * whole


def test_plans_survive_toml() -> None:
    conditions = Conditions(measured={"latency_s of something": [0.01, 0.002]})
    budgets = [{"parameters": 0.3, "size_bytes": 0.4}, {"parameters": 1.0}]
    plan = make_plan(cnn(), (1, 8, 8), budgets, also=["memory_bytes"], conditions=conditions)
    assert set(plan.levels[0].further) == {"size_bytes", "memory_bytes"}
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert again.targets.conditions.measured == conditions.measured
    with raises(ConfigError, key="plan"):
        Plan.from_toml(plan.to_toml().replace("[level.further]", "[level.farther]"))


def test_given_levels_must_grow_dearer() -> None:
    with pytest.raises(PlanError):
        make_plan(cnn(), (1, 8, 8), [1.0], depths=(5, 4, 3), widths=(0.5, 0.5, 0.5))
