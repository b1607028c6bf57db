"""What a planner's refusal recommends works: each remedy is applied. Every built-in model has a plan by default."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleetfit.anatomy import Architecture
from fleetfit.cli.plan import PlanOptions, plan_model
from fleetfit.errors import PlanError
from fleetfit.models.cnn import cnn
from fleetfit.models.fedavg_images import fedavg_cifar_cnn, fedavg_cnn, mlp_2nn
from fleetfit.models.mlp import mlp
from fleetfit.models.resnet import resnet, resnet18
from fleetfit.planner import Targets, make_grids, search

MODELS: Mapping[str, tuple[Architecture, tuple[int, ...]]] = {
    "cnn": (cnn(), (1, 8, 8)),
    "mlp": (mlp(10, (16,)), (16,)),
    "mlp_2nn": (mlp_2nn(), (1, 28, 28)),
    "fedavg_cnn": (fedavg_cnn(), (1, 28, 28)),
    "fedavg_cifar_cnn": (fedavg_cifar_cnn(), (3, 24, 24)),
    "resnet20": (resnet(depth=20), (3, 32, 32)),
    "resnet18": (resnet18(), (3, 32, 32)),
}
CASES = [
    ((0.125, 0.25, 0.5, 1.0), 0.1), ((0.9, 0.95, 1.0), 0.01), ((0.02, 1.0), 0.1), ((0.3, 0.31, 0.32, 1.0), 0.0),
    ((0.5, 1.0), 0.001),
]  # fmt: skip


def refusal(architecture: Architecture, shape: tuple[int, ...], targets: Targets, mode: Any) -> PlanError | None:
    grid, further = make_grids(architecture, shape, targets)
    try:
        search(grid, targets, mode, further=further)
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize("mode", ["both", "depth", "width"])
@pytest.mark.parametrize("name", MODELS)
def test_the_remedies_of_a_refusal_work(name: str, mode: str) -> None:
    architecture, shape = MODELS[name]
    refused = 0
    for ratios, tolerance in CASES:
        targets = Targets(ratios, (tolerance,) * len(ratios))
        error = refusal(architecture, shape, targets, mode)
        if error is None:
            continue
        refused += 1
        if error.tolerance is not None:
            wider = (error.tolerance,) * len(ratios)
            assert refusal(architecture, shape, replace(targets, tolerances=wider), mode) is None
            less = (error.tolerance - 0.01,) * len(ratios)
            assert error.tolerance < tolerance + 0.02 or refusal(
                architecture, shape, replace(targets, tolerances=less), mode
            )
        if error.scaling is not None:
            assert refusal(architecture, shape, targets, error.scaling) is None
        assert error.ceilings is None
    assert refused  # so that the cases are hard enough


def test_some_refusals_have_either_remedy() -> None:
    """Of mlp_2nn, which has too few depths: the width. Of a residual network: a tolerance, and the width."""
    quarters = Targets(*(t for t in ((0.125, 0.25, 0.5, 1.0), (0.1,) * 4)))
    few = refusal(*MODELS["mlp_2nn"], quarters, "both")
    assert few is not None and few.scaling == "width" and few.tolerance is None
    residual = refusal(*MODELS["resnet18"], quarters, "both")
    assert residual is not None and residual.scaling == "width" and residual.tolerance == 0.16


@pytest.mark.parametrize("cost", ["size_bytes", "memory_bytes", "multiply_adds"])
@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet20"])
def test_raised_budgets_of_another_cost_work(name: str, cost: str) -> None:
    architecture, shape = MODELS[name]
    targets = Targets((0.25, 0.5, 1.0), (0.2,) * 3, ceilings={cost: (0.01, 0.02, 1.0)})
    error = refusal(architecture, shape, targets, "both")
    assert error is not None and error.ceilings is not None and all(np.diff(error.ceilings[cost]) >= 0)
    assert refusal(architecture, shape, replace(targets, ceilings=error.ceilings), "both") is None


@pytest.mark.parametrize("name", ["mlp_2nn", "fedavg_cnn", "char_lstm"])
def test_auto_falls_back_to_width(name: str) -> None:
    shown = plan_model(PlanOptions(model=name, cost="multiply_adds"), ())
    assert shown.plan.scaling == "width" and not shown.notes


@pytest.mark.parametrize("name", ["mlp_2nn", "fedavg_cnn", "char_lstm"])
def test_an_explicit_mode_is_kept(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_model(PlanOptions(model=name, scaling="both"), ())
    assert caught.value.scaling is not None
    assert plan_model(PlanOptions(model=name, scaling=caught.value.scaling), ()).plan.scaling == "width"
