"""Eq. 1 against plain loops over all pairs; budgets to levels; clients to levels; plans saved and read again."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfit.cost import WIDTHS, Grid, cost_grid
from fleetfit.errors import ConfigError, PlanError
from fleetfit.models.cnn import cnn
from fleetfit.models.resnet import resnet
from fleetfit.planner import (
    Plan,
    Split,
    Targets,
    as_fractions,
    assign,
    levels_of_budgets,
    make_plan,
    one_level,
    search,
)  # fmt: skip

CIFAR = (3, 32, 32)
QUARTERS = Targets((0.125, 0.25, 0.5, 1.0), (0.1,) * 4)


def pairs(splits: tuple[Split, ...]) -> list[tuple[int, float]]:
    return [(s.depth, s.width) for s in splits]


# ---- Eq. 1 -----------------------------------------------------------------------------------------------------------


def by_loops(grid: Grid, targets: Targets, mode: str) -> list[tuple[int, float]] | None:
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
    mode=st.sampled_from(["both", "depth"]),
    strict=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_search_is_what_plain_loops_find(grid: Grid, count: int, seed: int, mode: str, strict: bool) -> None:
    rng = np.random.default_rng(seed)
    ratios = tuple(sorted(set(rng.uniform(0.05, 0.95, count).round(2).tolist())))
    tolerances = tuple(rng.choice([0.1, 0.3, 0.6], len(ratios) + 1).tolist())
    targets = Targets((*ratios, 1.0), tolerances, strict=strict)
    expected = by_loops(grid, targets, mode)
    if expected is None:
        with pytest.raises(PlanError, match="within the levels' tolerances"):
            search(grid, targets, mode)
        return
    found = search(grid, targets, mode)
    assert pairs(found) == expected
    for level, split in enumerate(found[:-1]):
        assert split.exits == tuple(d for d, _ in expected[: level + 1])
        assert split.share == pytest.approx(grid.of(split.width, split.exits) / grid.full)
    assert found[-1] == Split(grid.blocks, 1.0, tuple(d for d, _ in expected), 1.0)


def test_resnet_20_solves_together_where_one_by_one_does_not() -> None:
    """Alone, r_1 takes 6 blocks at 0.65, after which nothing deeper is near 0.25; together 4, 5 and 6 blocks fit."""
    grid = cost_grid(resnet(depth=20), CIFAR)
    assert pairs((one_level(grid, 0.125),)) == [(6, 0.65)]
    after = [grid.of(w, (6, d)) / grid.full for d in (7, 8) for w in WIDTHS if w >= 0.65 and d < 9]
    assert min(abs(share / 0.25 - 1) for share in after) > 0.1
    found = search(grid, QUARTERS)
    assert pairs(found) == [(4, 0.75), (5, 0.79), (6, 0.91), (9, 1.0)]
    # One step wider keeps the same channels in all three, and so costs the same, but its pairs are farther apart.
    wider = search(grid, QUARTERS, depths=(4, 5, 6), widths=(0.76, 0.80, 0.92))
    assert [s.share for s in wider] == [s.share for s in found]
    for split, ratio in zip(wider[:-1], QUARTERS.ratios, strict=False):
        assert abs(split.share / ratio - 1) <= 0.1


def test_resnet_110_at_the_papers_exits() -> None:
    """All of Table 1 is within the tolerance of Eq. 1, and Eq. 1 itself finds pairs that are closer."""
    grid = cost_grid(resnet(), CIFAR)
    table = search(grid, QUARTERS, depths=(36, 42, 48), widths=(0.70, 0.70, 0.75))
    assert [round(s.share, 3) for s in table] == [0.121, 0.269, 0.501, 1.0]
    assert all(abs(s.share / r - 1) <= 0.1 for s, r in zip(table, QUARTERS.ratios, strict=True))
    found = search(grid, QUARTERS)
    assert pairs(found) == [(36, 0.69), (40, 0.74), (45, 0.83), (54, 1.0)]
    assert found[-1].exits == (36, 40, 45, 54)
    given_depths = search(grid, QUARTERS, depths=(36, 42, 48))
    assert [s.depth for s in given_depths] == [36, 42, 48, 54]
    assert all(abs(s.share / r - 1) <= 0.1 for s, r in zip(given_depths, QUARTERS.ratios, strict=True))


def test_width_only_takes_the_nearest_cost_at_full_depth() -> None:
    grid = cost_grid(resnet(), CIFAR)
    found = search(grid, QUARTERS, "width")
    assert all(s.exits == (54,) for s in found)
    for split, ratio in zip(found[:-1], QUARTERS.ratios, strict=False):
        shares = [grid.of(w, (54,)) / grid.full for w in WIDTHS]
        assert split.share == min(shares, key=lambda s: abs(s - ratio))
        assert abs(split.share / ratio - 1) <= 0.1


def test_depth_only_keeps_all_channels() -> None:
    found = search(cost_grid(resnet(), CIFAR), QUARTERS, "depth")
    assert [s.width for s in found] == [1.0] * 4
    assert [s.depth for s in found] == [24, 34, 40, 54]


@pytest.mark.parametrize("cost", ["parameters", "multiply_adds"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_default_fleet_fits_the_small_cnn(cost: str, norm: str) -> None:
    for mode in ("both", "width", "depth"):
        if (cost, mode) != ("multiply_adds", "depth"):  # half of its multiply-adds are in the first blocks
            assert len(search(cost_grid(cnn(norm=norm), (1, 8, 8), cost), QUARTERS, mode)) == 4


def test_strict_stays_under_every_budget() -> None:
    grid = cost_grid(resnet(), CIFAR)
    found = search(grid, Targets(QUARTERS.ratios, QUARTERS.tolerances, strict=True))
    assert all(s.share <= r for s, r in zip(found, QUARTERS.ratios, strict=True))
    assert any(s.share > r for s, r in zip(search(grid, QUARTERS), QUARTERS.ratios, strict=True))


def test_nothing_fits_names_the_nearest_and_the_tolerance() -> None:
    grid = cost_grid(resnet(depth=20), CIFAR)
    with pytest.raises(PlanError) as caught:
        search(grid, QUARTERS, "depth")
    text = str(caught.value)
    assert "level 2: 4 of 9 blocks at width 1.00 costs 0.236 for 0.25" in text
    assert "A tolerance of 0.37 would admit them" in text
    search(grid, Targets(QUARTERS.ratios, (0.37,) * 4), "depth")
    with pytest.raises(PlanError):
        search(grid, Targets(QUARTERS.ratios, (0.36,) * 4), "depth")


def test_more_levels_than_depths() -> None:
    ratios = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 1.0)
    with pytest.raises(PlanError, match="6 smaller levels need as many different depths, and the model has 5"):
        search(cost_grid(cnn(), (1, 8, 8)), Targets(ratios, (0.1,) * 7))


def test_one_level_alone_says_what_would_do() -> None:
    grid = cost_grid(cnn(), (1, 8, 8))
    with pytest.raises(
        PlanError, match="cost 0.0001 of the model within 0.1; the nearest is 1 of 6 blocks at width 0.01"
    ):
        one_level(grid, 0.0001)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": (1, 2)}, "4 levels need 3 depths .*got 2"),
        ({"widths": (0.5,)}, "4 levels need 3 widths"),
        ({"depths": (3, 2, 4)}, "must grow strictly"),
        ({"depths": (2, 3, 6)}, r"be among \[1, 2, 3, 4, 5\]"),
        ({"widths": (0.5, 0.4, 0.6)}, "must not shrink"),
        ({"widths": (0.5, 0.505, 0.6)}, "go by 0.01"),
        ({"mode": "height"}, 'must be "both", "width" or "depth"'),
    ],
)
def test_given_depths_and_widths_are_checked(options: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        search(cost_grid(cnn(), (1, 8, 8)), QUARTERS, **options)


# ---- budgets to levels -----------------------------------------------------------------------------------------------


def test_few_distinct_budgets_are_a_level_each() -> None:
    budgets = [0.25, 1.0, 0.125, 0.5, 0.5, 2.0]
    assert levels_of_budgets(budgets).ratios == (0.125, 0.25, 0.5, 1.0)
    assert levels_of_budgets([1.0, 1.0]).ratios == (1.0,)


def test_many_budgets_are_clustered_and_the_smallest_counts() -> None:
    rng = np.random.default_rng(0)
    groups = [0.1, 0.3, 1.0]
    budgets = np.concatenate([g * np.exp(rng.uniform(0, 0.2, 400)) for g in groups])
    found = levels_of_budgets(budgets)
    assert len(found.ratios) == 3
    assert found.ratios[:2] == (budgets[:400].min(), budgets[400:800].min())  # r_l = min of the cluster
    assert found.ratios[-1] == 1.0  # r_L = 1
    assert found == levels_of_budgets(budgets[::-1])


def test_a_full_model_that_nobody_affords_is_a_level_of_its_own() -> None:
    assert levels_of_budgets([0.25, 0.5]).ratios == (0.25, 0.5, 1.0)
    assert levels_of_budgets([0.25, 0.95]).ratios == (0.25, 1.0)  # within its tolerance


def test_halving_goes_down_to_the_smallest_client() -> None:
    for smallest, expected in ((1.0, 1), (0.5, 2), (0.46, 2), (0.45, 3), (0.125, 4), (1e-6, 8)):
        ratios = levels_of_budgets([smallest, 1.0], "halving").ratios
        assert ratios == tuple(0.5**i for i in reversed(range(expected))), smallest


def test_ratios_may_be_given() -> None:
    assert levels_of_budgets([0.1, 1.0], [0.2, 0.4]).ratios == (0.2, 0.4, 1.0)
    assert levels_of_budgets([0.1, 1.0], [0.2, 1]).ratios == (0.2, 1.0)
    for wrong in ([0.4, 0.2], [0.0, 0.5], [0.5, 1.5], [0.3, 0.3]):
        with pytest.raises(PlanError, match="target ratios must be"):
            levels_of_budgets([0.1, 1.0], wrong)


def test_a_levels_tolerance_is_the_smallest_of_its_clients() -> None:
    budgets, slack = [0.25, 0.25, 0.5, 1.0], [0.3, 0.2, 0.05, 0.1]
    assert levels_of_budgets(budgets, "cluster", slack).tolerances == (0.2, 0.05, 0.1)
    assert levels_of_budgets(budgets, [0.25, 0.5, 0.75], slack).tolerances == (0.2, 0.05, 0.05, 0.1)  # nobody at 0.75


@pytest.mark.parametrize("budgets", [[], [0.0], [0.5, -1.0], [float("nan")], [float("inf")]])
def test_budgets_that_make_no_sense(budgets: list[float]) -> None:
    with pytest.raises(PlanError, match="budget"):
        levels_of_budgets(budgets)


def test_other_words_and_tolerances_are_refused() -> None:
    with pytest.raises(PlanError, match='must be "cluster", "halving" or a list'):
        levels_of_budgets([1.0], "thirds")
    with pytest.raises(PlanError, match="a tolerance must be a number of at least 0, got -0.1"):
        levels_of_budgets([1.0], "cluster", -0.1)


def test_budgets_above_one_are_absolute() -> None:
    assert as_fractions([0.5, 1.0, 500, 2000], 1000).tolist() == [0.5, 1.0, 0.5, 2.0]


# ---- clients to levels -----------------------------------------------------------------------------------------------


@given(
    clients=st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 1)), min_size=1, max_size=20),
    costs=st.lists(st.floats(0.01, 1), min_size=1, max_size=5).map(sorted),
)
def test_assign_is_the_largest_level_within_the_clients_own_tolerance(
    clients: list[tuple[float, float]], costs: list[float]
) -> None:
    budgets, slack = zip(*clients, strict=True)
    expected = [max((i for i, c in enumerate(costs) if c <= (1 + e) * b * (1 + 1e-9)), default=-1) for b, e in clients]
    assert assign(budgets, slack, costs).tolist() == expected


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
    grid = cost_grid(resnet(), CIFAR)
    assert pairs(search(grid, again.targets)) == [(36, 0.7), (42, 0.7), (48, 0.75), (54, 1.0)]
    assert pairs(search(grid, again.targets, "width")) != pairs(
        search(grid, again.targets)
    )  # settled for its mode only
    with pytest.raises(PlanError, match="made for another model"):
        search(cost_grid(resnet(depth=20), CIFAR), again.targets)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = ", "must be TOML"),
        ("format = 2", "format 2 cannot be read"),
        ("", "format None"),
        ("format = 1", "no plan that"),
        ("format = 1\nlevel = [{ name = 1 }]", "no plan that"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
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
    with pytest.raises(ConfigError, match="no plan that"):
        Plan.from_toml(text.replace(before, after))


def test_given_levels_must_grow_dearer() -> None:
    with pytest.raises(PlanError):
        make_plan(cnn(), (1, 8, 8), [1.0], depths=(5, 4, 3), widths=(0.5, 0.5, 0.5))
