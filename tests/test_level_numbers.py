"""A run that dropped level 1 has levels 3 and 2, smallest first: each is known by its number, not by its position."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import raises

import fleetfit as ff
from fleetfit.config.assemble.trust import draw_attackers
from fleetfit.errors import ConfigError
from fleetfit.planner import Targets, keep_shapes, make_plan, make_targets as make_new_targets
from fleetfit.report.order import measure_levels
from fleetfit.runs.folder import RunFolder

TABLE: dict[str, Any] = {
    "rounds": 1,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 12}},
    "model": {"name": "cnn"},
    "method": {"name": "scalefl"},
    "local": {"epochs": 1, "max_steps": 2, "lr": 0.05},
    "fleet": {"groups": [{"budget": 0.25}, {"budget": 1.0}]},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ff.Run:
    folder = tmp_path_factory.mktemp("numbers") / "run"
    ff.run(TABLE, out=folder, progress=False)
    fleet = {"groups": [{"budget": 0.5}, {"budget": 1.0}]}
    run = ff.resume(folder, rounds=2, fleet=fleet, progress=False)
    assert [level.name for level in run.plan.levels] == ["3", "2"]
    return run


def test_a_dropped_level_has_no_model(run: ff.Run) -> None:
    with raises(ConfigError, "3, 2", key="level"):
        run.model(level=1)
    sizes = [sum(p.numel() for p in run.model(level=level).parameters()) for level in (3, 2)]
    assert sizes[0] < sizes[1]


def test_accuracies_on_the_test_set_are_those_of_their_levels(run: ff.Run) -> None:
    on_test = run.columns["static"]["test_levels"]
    assert set(on_test) == {"3", "2"}
    measured = measure_levels([RunFolder(run.folder).read_summary()])
    assert {name: one for name, (one,) in measured.seeds.items()} == on_test


def test_hostile_clients_are_of_the_numbered_level(run: ff.Run) -> None:
    federation, experiment = run.assembly.federation, run.experiment
    section = experiment.attack.model_copy(update={"fraction": 1.0, "among": [3]})
    attackers = draw_attackers(experiment.model_copy(update={"attack": section}), None, federation)  # type: ignore[arg-type]
    assert attackers.clients == tuple(np.flatnonzero(federation.level_of == 0))


def test_devices_that_no_longer_afford_a_level_get_another_one(run: ff.Run) -> None:
    first = run.plan.levels[0]
    architecture, shape = run.assembly.federation.problem.architecture, run.assembly.federation.problem.input_shape
    ratio = first.target * 0.995
    over = first.share / ratio - 1
    for tolerance, name in ((over + 0.001, "3"), (over - 0.001, "4")):
        level = keep_shapes(run.plan, make_targets(ratio, tolerance), architecture, shape, "both").splits[0]
        assert level.name == name and (name == "3") == (level.share == first.share)


def test_a_new_level_may_be_far_from_the_best_shapes(run: ff.Run) -> None:
    """Under a low ceiling of multiply-adds none of the first eight by Eq. 1 fits."""
    architecture, shape = run.assembly.federation.problem.architecture, run.assembly.federation.problem.input_shape
    targets = make_new_targets([0.25, 0.4, 1.0], tolerances=0.2)
    targets = replace(targets, ceilings={"multiply_adds": (1.0, 0.3, 1.0)})
    plan = make_plan(architecture, shape, [0.25, 1.0], 0.1)
    level = keep_shapes(plan, targets, architecture, shape, "both").splits[1]
    assert abs(level.share / 0.4 - 1) <= 0.2 and level.further["multiply_adds"] <= 0.3 * 1.2


def make_targets(ratio: float, tolerance: float) -> Targets:
    return Targets((ratio, 1.0), (tolerance, tolerance))
