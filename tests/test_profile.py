"""`fleetfit profile`: from what levels cost on a device to the budget file, and from the file to the level again."""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import raises, run_verb
from support.profiles import FACTS, TABLES, with_fleet

from fleetfit.api import profiling
from fleetfit.api.profiling import ProfileResult, profile
from fleetfit.cli.plan import PlanOptions, plan_model, plan_run_file
from fleetfit.config import load_experiment
from fleetfit.config.assemble.levels import plan_levels
from fleetfit.config.assemble.run import assemble, assemble_fleet
from fleetfit.core import DataDescription, NodeDescription
from fleetfit.cost import Latency
from fleetfit.errors import ConfigError, DataError, PlanError
from fleetfit.training.profiling import (
    EnergyMeter,
    Measurement,
    ProfileRequest,
)


def found_of(step_s: float = 0.1, latency_s: float = 0.01, memory: int | None = 10**6, **more: Any) -> Measurement:
    return Measurement(Latency(step_s, 0.01, 9), Latency(latency_s, 0.001, 9), memory, 3 * 10**8, **more)


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Measurement]], list[ProfileRequest]]:
    """Let every level be found as it is said, without a process; returns what was asked."""

    def let(measurements: Sequence[Measurement]) -> list[ProfileRequest]:
        calls: list[ProfileRequest] = []

        def measured(what: ProfileRequest, share_s: float, most_s: float) -> Measurement:
            calls.append(what)
            assert share_s <= most_s
            return measurements[what.level]

        monkeypatch.setattr(profiling, "profile_level", measured)
        monkeypatch.setattr(profiling, "free_memory", lambda *_: 10**9)
        return calls

    return let


THREE = [found_of(0.1), found_of(0.2), found_of(0.4)]


# ---- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [0, 1, 2])
@pytest.mark.parametrize("wish", ["step_s", "memory", "latency_s"])
def test_group_with_budget_file_gets_level(chosen: int, wish: str, measuring: Any, tmp_path: Path) -> None:
    """With a saved plan, as a fleet uses it: its levels stay, whatever the budgets of those who come."""
    measuring([found_of(0.1 * k, 0.01 * k, 10**6 * k) for k in (1, 2, 4)])
    (tmp_path / "plan.toml").write_text(assemble(load_experiment(TABLES)).plan.to_toml())
    most: dict[str, Any] = {"step_s": 0.1 * 2**chosen, "latency_s": 0.01 * 2**chosen, "memory": f"{2**chosen} MB"}
    settled = with_fleet(levels=str(tmp_path / "plan.toml"))
    result = profile(settled, **{wish: most[wish]}, facts=FACTS, out=tmp_path / "pi.toml")
    assert result.affords.level == chosen
    groups = [{"budget": str(tmp_path / "pi.toml")}, {"budget": 1.0, "name": "whole"}]
    assembly = assemble(load_experiment(with_fleet(levels=str(tmp_path / "plan.toml"), groups=groups)))
    assert assembly.fleet.names == ("pi", "whole")
    level = set(assembly.federation.level_of[assembly.fleet.group == 0])
    if wish == "latency_s":  # the planner measures that itself, here of a model whose levels take the same time
        assert max(level) <= chosen
    else:
        assert level == {chosen}


@pytest.mark.parametrize("chosen", [0, 1, 2])
def test_node_with_budget_file_gets_level(chosen: int, measuring: Any, tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from fleetfit.fleet.settings import read_settings

    measuring(THREE)
    profile(TABLES, step_s=0.1 * 2**chosen, facts=FACTS, out=tmp_path / "budget.toml")
    (tmp_path / "node.toml").write_text('name = "pi"\nbudget = "budget.toml"\n[data]\nname = "tiny:tiny_data"\n')
    settings = read_settings(tmp_path / "node.toml")
    nodes = NodeDescription("pi", FACTS, 20, settings.budget, settings.tolerance)
    assembly = assemble_fleet(
        load_experiment({**TABLES, "data": {}}), [nodes, replace(nodes, name="whole", budget=1.0)]
    )
    assert assembly.federation.level_of.tolist() == [chosen, 2]


@pytest.mark.parametrize("method", ["scalefl", "heterofl", "depthfl", "decoupled", "fedrolex", "adaptivefl"])
@pytest.mark.parametrize("cost", ["parameters", "multiply_adds", "memory_bytes", "size_bytes"])
def test_each_level_has_a_budget(method: str, cost: str, measuring: Any) -> None:
    """And no other one, as the planner gives levels: the largest whose every need is within (1 + epsilon) B."""
    tables = {**with_fleet(cost=cost, tolerance=1.0 if method == "depthfl" else 0.4), "method": {"name": method}}
    levels = plan_levels(load_experiment(tables), FACTS).levels
    for chosen, level in enumerate(levels):
        measuring([found_of(0.1 * (i + 1)) for i in range(len(levels))])
        result = profile(tables, step_s=0.1 * (chosen + 1), facts=FACTS)
        limit = (1 + result.affords.tolerance) * float(result.affords.budget[cost])
        assert result.affords.level == chosen
        assert [other.needs <= limit for other in levels[: chosen + 1]] == [True] * (chosen + 1), level.name
        assert not any(other.needs <= limit for other in levels[chosen + 1 :]), level.name


def test_the_levels_are_those_of_the_plan(measuring: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("fleet.groups = [{ budget = 0.2 }, { budget = 0.6 }, { budget = 1.0 }]\n")
    planned = plan_run_file(tmp_path / "run.toml", ())[0].plan
    calls = measuring([found_of()] * 3)
    result = profile(tmp_path / "run.toml", facts=DataDescription("", "classification", (1, 8, 8), 10))
    assert [level.share for level in result.levels] == [level.share for level in planned.levels]
    assert [a.submodel.exits for a in calls] == [level.exits for level in planned.levels]
    assert [a.batch_size for a in calls] == [16, 16, 16]


def test_model_option_plans_levels(measuring: Any, tmp_path: Path) -> None:
    measuring([found_of()] * 4)
    model = ["--model", "cnn", "--input-shape", "1,8,8", "--budgets", "0.15,0.4,1"]
    run_verb("profile", *model, "--out", tmp_path / "b.toml", code=0)
    planned = plan_model(PlanOptions("cnn", "0.15,0.4,1", input_shape="1,8,8"), ()).plan
    shares = [f"{level.share:.3f}" for level in planned.levels]
    rows = [line.split() for line in (tmp_path / "b.toml").read_text().splitlines() if line.startswith("# ")]
    assert [row[2] for row in rows if row[1:2] and row[1].isdigit()] == shares


# ---- which level -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "level"),
    [
        ({}, 2),
        ({"step_s": 0.3}, 1),
        ({"step_s": 0.2}, 1),
        ({"latency_s": 0.015}, 0),
        ({"memory": "3 MB"}, 1),
        ({"memory": "3 MB", "step_s": 0.15}, 0),
        ({"energy_j": 2.5}, 1),
    ],
)
def test_the_largest_level_within_every_wish(
    wishes: dict[str, Any], level: int, measuring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "find_energy_meter", lambda: EnergyMeter("battery", lambda: 0.0))
    measuring([found_of(0.1 * k, 0.01 * k, 10**6 * k, energy_j=float(k)) for k in (1, 2, 4)])
    result = profile(TABLES, **wishes, facts=FACTS)
    assert result.affords.level == level
    assert [not one.reasons for one in result.levels] == [True] * (level + 1) + [False] * (2 - level)


def test_failed_level_ends_profile(measuring: Any) -> None:
    calls = measuring([found_of(), Measurement(memory_bytes=5, failed="cause 7"), found_of()])
    lines: list[str] = []
    result = profile(TABLES, facts=FACTS, say=lines.append)
    assert [a.level for a in calls] == [0, 1] and result.affords.level == 0
    assert result.levels[1].reasons == ("cause 7",) and len(result.levels[2].reasons) == 1
    assert any("cause 7" in line for line in lines)


def test_too_large_level_is_not_tried(measuring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measuring([found_of(memory=100)] * 3)
    before = plan_levels(load_experiment(TABLES), FACTS)
    second = before.cost(before.levels[1], "memory_bytes")
    monkeypatch.setattr(profiling, "free_memory", lambda *_: int(second))
    result = profile(TABLES, memory="1 GB", facts=FACTS)
    assert len(calls) == 2 and calls[0].most_bytes == int(second)
    assert result.levels[2].reasons and not result.levels[1].reasons


def test_each_level_gets_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [0.0], []

    def measured(request: ProfileRequest, share_s: float, most_s: float) -> Measurement:
        limits.append((share_s, most_s))
        now[0] += (2.0, 10.0, 90.0)[request.level]
        return found_of()

    monkeypatch.setattr(profiling, "profile_level", measured)
    monkeypatch.setattr(profiling.time, "monotonic", lambda: now[0])
    profile(TABLES, facts=FACTS, limit_s=30.0)
    assert limits == [(10.0, 30.0), (14.0, 28.0), (18.0, 18.0)]
    limits.clear()
    result = profile(TABLES, facts=FACTS, limit_s=12.5)
    assert len(limits) == 2 and result.levels[2].reasons
    assert result.affords.level == 1


def test_unmeasured_cost_is_not_afforded() -> None:
    limits = profiling.DeviceLimits(step_s=1.0, latency_s=1.0, memory_bytes=100.0, energy_j=1.0)
    measured = found_of(memory=90, energy_j=0.5)
    assert profiling.list_reasons(measured, 80.0, limits) == ()
    assert len(profiling.list_reasons(measured, 200.0, limits)) == 1, "no budget would lead to the level"
    without = Measurement(found_of().step, None, None, None, None)
    reasons = profiling.list_reasons(without, 200.0, limits)
    assert [reason.partition(" ")[0] for reason in reasons] == ["inference", "a", "a"]
    assert "MB" in reasons[2], "memory is as predicted"


# ---- the budget ------------------------------------------------------------------------------------------------------


def budget_of(result: ProfileResult) -> dict[str, Any]:
    return tomllib.loads(result.to_toml())


def test_the_budget_is_the_levels_cost(measuring: Any) -> None:
    """A step that takes twice what is predicted leaves half of the memory, and the tolerance goes off it."""
    before = plan_levels(load_experiment(TABLES), FACTS)
    predicted = before.cost(before.levels[1], "memory_bytes")
    measuring([found_of(0.1, memory=100), found_of(0.2, memory=int(2 * predicted)), found_of(9.0)])
    result = profile(TABLES, step_s=0.5, memory="12 MB", facts=FACTS)
    file = budget_of(result)
    needs = before.levels[1].needs
    assert needs <= file["budget"]["parameters"] < needs + 1.1e-6
    assert file["budget"]["memory_bytes"] == "5 MB" and file["tolerance"] == 0.2  # 12 / 2 / 1.2
    measuring([found_of(0.1, memory=100), found_of(0.2, memory=0), found_of(9.0)])
    result = profile(TABLES, step_s=0.5, memory="12 MB", facts=FACTS)
    assert result.affords.budget["memory_bytes"] == "10 MB", "never more than is predicted"


def test_default_limit_is_half_of_free_memory(measuring: Any) -> None:
    measuring(THREE)
    assert profile(TABLES, facts=FACTS).limits.memory_bytes == 5 * 10**8
    assert "latency_s" not in profile(TABLES, facts=FACTS).affords.budget


def test_latency_is_a_fraction_of_the_full_models_here(measuring: Any) -> None:
    measuring([found_of(latency_s=0.01), found_of(latency_s=0.02), found_of(latency_s=0.1)])
    result = profile(TABLES, latency_s=0.06, facts=FACTS)
    fraction = float(result.affords.budget["latency_s"])
    assert (
        result.affords.level == 1 and fraction == pytest.approx(0.06 / 0.1 / 1.2, rel=0.1) and not result.affords.notes
    )
    assert profile(TABLES, latency_s=0.5, facts=FACTS).affords.budget["latency_s"] == 1.0
    measuring([found_of(latency_s=0.01), Measurement(failed="cause")])
    result = profile(TABLES, latency_s=0.011, facts=FACTS)
    before = plan_levels(load_experiment(TABLES), FACTS)
    levels = [before.cost(level, "multiply_adds") for level in (before.levels[0], None)]
    assert float(result.affords.budget["latency_s"]) == pytest.approx(levels[0] / levels[1], rel=1e-3)
    assert "level 1" in result.affords.notes[0] and result.affords.notes[0] in result.to_toml()


def test_tolerance_excludes_next_level() -> None:
    assert profiling._compute_tolerance(0.1, 0.5, [0.6, 1.0]) == 0.1
    assert profiling._compute_tolerance(0.1, 0.5, [0.52, 1.0]) == pytest.approx(0.02)
    assert profiling._compute_tolerance(0.1, 0.5, []) == 0.1


def test_budget_file_escapes_reasons(measuring: Any) -> None:
    measuring([found_of(), Measurement(failed='two\nlines "quoted" # and more')])
    text = profile(TABLES, facts=FACTS).to_toml()
    assert set(tomllib.loads(text)) == {"budget", "tolerance"}
    assert all(quoted in text for quoted in ("tiny:tiny", "1 x 4 x 4", "batches of 16"))


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_no_fitting_level_writes_nothing(measuring: Any, tmp_path: Path) -> None:
    measuring(THREE)
    with raises(PlanError, 1, 0.1, 0.05):
        profile(TABLES, step_s=0.05, facts=FACTS, out=tmp_path / "b.toml")
    assert not any(tmp_path.iterdir())


def test_method_with_other_needs_is_refused(measuring: Any) -> None:
    """exclusivefl's levels all need the full model, so that a device of level 1 would get the last one."""
    measuring(THREE)
    tables = {**with_fleet(tolerance=0.9), "method": {"name": "exclusivefl", "exits": "all"}}
    with raises(PlanError, "level 1", "exclusivefl"):
        profile(tables, step_s=0.1, facts=FACTS)
    assert profile(tables, facts=FACTS).affords.level == 2


def test_existing_file_is_kept(measuring: Any, tmp_path: Path) -> None:
    calls, path = measuring(THREE), tmp_path / "b.toml"
    path.write_text("mine")
    with raises(ConfigError, "b.toml"):
        profile(TABLES, facts=FACTS, out=path)
    assert path.read_text() == "mine" and not calls, "seen before anything is measured"
    profile(TABLES, facts=FACTS, out=path, force=True)
    assert budget_of_file(path) == {"parameters", "memory_bytes"} and [*tmp_path.iterdir()] == [path]
    with raises(ConfigError, "b.toml"):
        profile(TABLES, facts=FACTS, out=tmp_path / "nowhere" / "b.toml")


def budget_of_file(path: Path) -> set[str]:
    return set(tomllib.loads(path.read_text())["budget"])


@pytest.mark.parametrize(
    ("arguments", "quoted"),
    [
        (["--energy-j", "3"], "--energy-j cannot be checked. Leave it out."),
        (["--input-shape", "1,8,8"], "--input-shape and --classes need each other"),
        (["run.toml", "--model", "cnn"], "--model"),
        (["--memory", "300"], "memory: a budget of memory_bytes"),
        (["--step-s", "0"], "step_s"),
        (["--limit-s", "0"], "limit"),
        (["--device", "tpu"], 'must be "cpu", "cuda" or "cuda:N"'),
        (["--set", "data.name=cifar10", "--set", "data.folder=nowhere"], "--input-shape 3,32,32 --classes 10"),
        (["--input-shape", "1,8,8", "--classes", "10", "--set", "local.batch_size=all"], "local.batch_size=64"),
        (["--step-s", "0.001"], "affords no level"),
    ],
)
def test_refused_options(arguments: list[str], quoted: str, measuring: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiling, "find_energy_meter", lambda: EnergyMeter("not reported by this machine"))
    measuring([found_of()] * 4)
    err = run_verb("profile", *arguments, code=2).err
    assert quoted in err and err.count("\n") == 1 and "Traceback" not in err
    assert not any(tmp_path.iterdir())


def test_ctrl_c_writes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def stopped(*_: Any) -> Measurement:
        raise KeyboardInterrupt

    monkeypatch.setattr(profiling, "profile_level", stopped)
    assert "stopped." in run_verb("profile", "--out", tmp_path / "b.toml", code=130).err
    assert not any(tmp_path.iterdir())


def test_objects_cannot_be_profiled() -> None:
    from tiny import Tiny

    with raises(ConfigError, '"package.module:function"', '"file.py:function"'):
        profile({**TABLES, "model": {"name": Tiny()}}, facts=FACTS)


def test_a_group_of_the_run_may_name_a_budget_file(measuring: Any, tmp_path: Path) -> None:
    measuring(THREE)
    profile(TABLES, step_s=0.2, facts=FACTS, out=tmp_path / "pi.toml")
    (tmp_path / "run.toml").write_text('fleet.groups = [{ budget = "pi.toml" }, { budget = 1.0 }]\n')
    assert load_experiment(tmp_path / "run.toml").fleet.groups[0].tolerance == 0.2


def test_missing_data_error_names_facts(tmp_path: Path) -> None:
    with raises(DataError, 3, 10):
        plan_levels(load_experiment(None, ["data.name=mnist", f"data.folder={tmp_path}"]))
