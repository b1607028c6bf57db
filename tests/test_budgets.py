"""Budgets in several costs from a run file to levels, notes and plan; what is measured is recorded and used again."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raises

import fleetfit as ff
from fleetfit.cli.plan import PlanOptions, plan_model
from fleetfit.config import load_experiment, to_toml
from fleetfit.config.assemble.run import assemble
from fleetfit.cost import Conditions, compute_cost, latency
from fleetfit.errors import ConfigError, PlanError
from fleetfit.models.cnn import cnn
from fleetfit.planner import Plan, get_sizes
from fleetfit.report.tables import make_plan_table

FLEET = {"data": {"partition": {"kind": "iid", "clients": 8}}, "local": {"batch_size": 8, "epochs": 1}, "rounds": 1}
SHAPE = (1, 8, 8)
SEVERAL = [
    {"name": "phones", "budget": {"parameters": 0.25, "memory_bytes": 0.5}},
    {"name": "boards", "budget": {"parameters": 0.6, "memory_bytes": "1 GB"}},
    {"name": "starved", "budget": {"parameters": 0.6, "memory_bytes": 1000.0}},
    {"name": "servers", "budget": 1.0},
]


def described(groups: list[dict[str, Any]], **fleet: Any) -> ff.Experiment:
    return load_experiment({**FLEET, "fleet": {"groups": groups, "levels": [0.25, 0.6], **fleet}})


def test_every_cost_of_a_budget_must_fit() -> None:
    """The starved clients' memory shuts out the level of their parameters; with less of these they are left out."""
    with raises(PlanError, "memory_bytes"):
        assemble(described(SEVERAL))
    assembly = assemble(described([*SEVERAL[:2], {**SEVERAL[2], "budget": {"parameters": 0.1, "memory_bytes": 1000.0}},
                                SEVERAL[3]]))  # fmt: skip
    levels, fleet = assembly.federation.levels, assembly.fleet
    whole = compute_cost(cnn(), ({}, (6,)), SHAPE, "memory_bytes", Conditions(batch_size=8))
    for index, level in enumerate(levels[:-1]):
        piece = (level.submodel.sizes, level.submodel.exits)
        share = compute_cost(cnn(), piece, SHAPE, "memory_bytes", Conditions(batch_size=8)) / whole
        assert level.further == {"memory_bytes": pytest.approx(share)}
        assert assembly.plan.levels[index].further == {"memory_bytes": pytest.approx(share * whole)}
    assert levels[0].further["memory_bytes"] <= 1.1 * 0.5
    level_of = dict(
        zip(fleet.names, [assembly.federation.level_of[fleet.group == g][0] for g in range(4)], strict=True)
    )
    assert level_of == {"phones": 0, "boards": 1, "starved": -1, "servers": 2}
    starved = np.flatnonzero(fleet.group == 2)
    assert assembly.plan.left_out == tuple(f'{c} (group "starved", parameters, memory_bytes)' for c in starved)
    short = 1000.0 / whole
    for quoted in ("2 clients", '"starved"', "parameters 0.1", f"memory_bytes {short:.3g} of", "parameters 0.2"):
        assert quoted in assembly.notes[0]
    clients, first = assembly.federation.clients, np.flatnonzero(fleet.group == 0)[0]
    assert clients.budget is not None and clients.budget[first] == 0.25
    assert {cost: values[first] for cost, values in clients.further.items()} == {"memory_bytes": 0.5}


def test_only_the_cost_that_failed_is_named() -> None:
    groups = [{"budget": {"parameters": 1.0, "size_bytes": 0.5}, "name": "thin"}, {"budget": 1.0}]
    assembly = assemble(load_experiment({**FLEET, "fleet": {"groups": groups}, "method": {"name": "exclusivefl"}}))
    assert assembly.plan.left_out and all('(group "thin", size_bytes)' in who for who in assembly.plan.left_out)
    assert "size_bytes 0.5" in assembly.notes[0] and "size_bytes 1." in assembly.notes[0]
    assert "parameters" not in assembly.notes[0]


def test_levels_of_exclusivefl_need_all_of_every_cost() -> None:
    groups = [{"budget": {"parameters": 1.0, "memory_bytes": 0.9}}, {"budget": {"parameters": 0.5}}, {"budget": 1.0}]
    method = {"name": "exclusivefl", "exits": "all"}
    federation = assemble(
        load_experiment({**FLEET, "fleet": {"groups": groups, "tolerance": 0.2}, "method": method})
    ).federation
    assert len(federation.levels) > 1 and all(level.further == {"memory_bytes": 1.0} for level in federation.levels)
    assert set(federation.level_of.tolist()) == {-1, len(federation.levels) - 1}


@pytest.mark.parametrize("method", ["fedavg", "exclusivefl", "decoupled", "heterofl", "all_large"])
def test_levels_of_every_method_need_the_further_costs(method: str) -> None:
    """A method's own levels too; All-Large asks nobody for anything."""
    groups = [{"budget": {"parameters": 1.0, "size_bytes": 0.6}}, {"budget": {"parameters": 1.0, "size_bytes": 1.0}}]
    assembly = assemble(
        load_experiment({**FLEET, "fleet": {"groups": groups, "levels": [0.5]}, "method": {"name": method}})
    )
    small = assembly.federation.level_of[assembly.fleet.group == 0]
    large = assembly.federation.level_of[assembly.fleet.group == 1]
    top = len(assembly.federation.levels) - 1
    assert (large == top).all()
    if method == "all_large":
        assert (small == top).all()
    else:
        assert all(0 < level.further["size_bytes"] <= 1 for level in assembly.federation.levels)
        assert (small == {"exclusivefl": -1, "fedavg": 0}.get(method, 0)).all()


def test_whole_batches_count_the_largest_client() -> None:
    assembly = assemble(load_experiment({**FLEET, "local": {"batch_size": "all"}}))
    assert assembly.fleet.conditions.batch_size == max(len(p["train"]) for p in assembly.simulation.parts)
    assert assemble(load_experiment(FLEET)).fleet.conditions.batch_size == 8


def test_a_table_survives_the_resolved_file() -> None:
    text = to_toml(described(SEVERAL))
    assert tomllib.loads(text)["fleet"]["groups"][0]["budget"] == {"parameters": 0.25, "memory_bytes": 0.5}
    assert to_toml(load_experiment(tomllib.loads(text))) == text
    assert "measured" not in text
    groups = [{"budget": {"parameters": 0.25, "size_bytes": "1 GB"}}, {"budget": 1.0}]
    assert assemble(described(groups)).fleet.names == ("parameters 1/4, size_bytes 1 GB", "1")


# ---- what a plan shows ---------------------------------------------------------------------------------------------


def test_a_plan_shows_further_costs_as_columns() -> None:
    options = PlanOptions("cnn", "0.3,1", input_shape="1,8,8", also="memory_bytes, size_bytes", batch_size=4)
    plan = plan_model(options, ()).plan
    table = make_plan_table(plan)
    shown = {column: [row[i] for row in table.rows] for i, column in enumerate(table.columns)}
    small = plan.levels[0]
    piece = (get_sizes(cnn(), small.shape), small.exits)
    memory = compute_cost(cnn(), piece, SHAPE, "memory_bytes", Conditions(batch_size=4))
    assert shown["training memory, batch 4"][0] == f"{memory / 1e3:.1f} kB"
    assert (
        next(cells for column, cells in shown.items() if "bytes" in column)[0]
        == f"{compute_cost(cnn(), piece, SHAPE, 'size_bytes') / 1e3:.1f} kB"
    )
    with raises(ConfigError, '"memory"', '"memory_bytes"', key="cost"):
        plan_model(PlanOptions("cnn", input_shape="1,8,8", also="memory"), ())


# ---- latency: measured once, recorded ----------------------------------------------------------------------------


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Latencies that follow from sizes and differ a little each time; counts how often something was measured."""
    calls: list[int] = []

    def made_up(module: Any, x: Any, parts: Any, *limits: float) -> list[dict[Any, float]]:
        calls.append(1)
        noise = 1 + 0.001 * len(calls)
        each = {place: 1e-8 * noise * sum(p.numel() for p in part.parameters()) for part, place in parts.items()}
        rest = 1e-8 * noise * sum(p.numel() for p in module.parameters()) - sum(each.values())
        return [{**each, None: rest}] * 9

    monkeypatch.setattr(latency, "_time_passes", made_up)
    return calls


GROUPS = [{"budget": "0.16 ms"}, {"budget": 0.5}, {"budget": 1.0}]


def test_a_run_measures_latency_once(tmp_path: Path, times: list[int]) -> None:
    fleet = {"cost": "latency_s", "groups": GROUPS, "levels": [0.25, 0.5]}
    table = {**FLEET, "fleet": fleet, "method": {"name": "fedavg"}}
    run = ff.run(table, out=tmp_path / "run")
    levels, often = run.plan.levels, len(times)
    assert often > 0
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert written["recorded"]["latencies"] == run.plan.measured != {}
    again = ff.load(tmp_path / "run")
    assert again.assembly.plan == run.plan
    assert again.evaluate(evaluate={"split": "validation"})["split"] == "validation"
    repeated = ff.run(written, out=tmp_path / "repeated")
    assert repeated.plan.levels == levels
    assert len(times) == often  # nothing was measured a second time
    assert (tmp_path / "repeated" / "config.toml").read_text() == (tmp_path / "run" / "config.toml").read_text()
    assert ff.run(table, out=tmp_path / "fresh").plan.measured != run.plan.measured


def test_a_plan_shows_median_and_spread(times: list[int]) -> None:
    """As made up, a pass takes ten nanoseconds a parameter, and a little more each time something is measured."""
    plan = plan_model(PlanOptions("cnn", "0.3,1", input_shape="1,8,8", also="latency_s"), ()).plan
    table = make_plan_table(plan)
    (column,) = [i for i, name in enumerate(table.columns) if name == "latency ± spread (ms)"]
    for level, row in zip(plan.levels, table.rows, strict=True):
        median, spread = map(float, row[column].split(" ± "))
        assert median == pytest.approx(1e3 * 1e-8 * level.parameters, rel=0.02)
        assert spread == 0
        assert level.further["latency_spread_s"] == 0


def test_a_saved_plan_brings_its_measurements(tmp_path: Path, times: list[int]) -> None:
    fleet: dict[str, Any] = {"cost": "latency_s", "groups": GROUPS, "levels": [0.25, 0.5]}
    first = assemble(load_experiment({**FLEET, "fleet": fleet}))
    often = len(times)
    saved = tmp_path / "plan.toml"
    saved.write_text(first.plan.to_toml())
    used = assemble(load_experiment({**FLEET, "fleet": {**fleet, "levels": str(saved)}}))
    assert used.plan == first.plan == Plan.from_toml(saved.read_text())
    assert (used.federation.level_of == first.federation.level_of).all()
    assert len(times) == often


def test_a_resumed_comparison_finds_its_runs(tmp_path: Path, times: list[int]) -> None:
    (tmp_path / "both.toml").write_text(
        """
        rounds = 1
        [data.partition]
        kind = "iid"
        clients = 8
        [fleet]
        cost = "latency_s"
        groups = [{ budget = 0.5 }, { budget = 1.0 }]
        [[compare.row]]
        method.name = "fedavg"
        """
    )
    first = ff.compare(tmp_path / "both.toml", out=tmp_path / "out")
    often = len(times)
    again = ff.compare(tmp_path / "both.toml", out=tmp_path / "out")
    assert again.table == first.table
    assert len(times) == often
    assert not [note for note in again.table.notes if "not used" in note]


@pytest.mark.parametrize(("budget", "is_noted"), [(1.0, False), (64, True), (100, True), (101, False)])
def test_a_budget_that_looks_like_a_percentage_is_noted(budget: float, is_noted: bool) -> None:
    """Above 1 a number is absolute, so that 100 is a hundred parameters."""
    experiment = load_experiment(fleet={"groups": [{"budget": budget}, {"budget": 1.0}]})
    notes = assemble(experiment).notes
    assert any("#1.budget" in note for note in notes) == is_noted
