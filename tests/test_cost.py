"""Costs against a formula for convolutions written out by hand, and the grid against sub-models really built."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import Attention, Deep

from fleetfit.cost import COSTS, WIDTHS, Cost, cost_grid, full_cost, submodel_cost
from fleetfit.errors import ConfigError, ModelError
from fleetfit.layout import Architecture, Axis, ExitModel
from fleetfit.models.cnn import cnn
from fleetfit.models.resnet import resnet
from fleetfit.submodel import Submodel

CIFAR = (3, 32, 32)


def resnet_by_hand(n: int, exits: tuple[int, ...], stages: tuple[int, int, int], side: int = 32) -> int:
    """Multiply-adds: kernel * channels in * channels out * places for a convolution, features * classes at the end."""
    total = 9 * 3 * stages[0] * side**2
    for i in range(exits[-1]):
        stage = i // n
        before, after = stages[(i - 1) // n if i else 0], stages[stage]
        places = (side >> stage) ** 2
        total += 9 * before * after * places + 9 * after * after * places
        if stage and i % n == 0:
            total += before * after * places
    for e in exits:
        stage = (e - 1) // n
        c, places = stages[stage], (side >> stage) ** 2
        total += 10 * c + (0 if e == 3 * n else 3 * 9 * c * c * places)
    return total


@pytest.mark.parametrize(
    ("width", "exits", "stages", "printed"),
    [
        (0.70, (36,), (11, 22, 44), (0.21, 83.4)),
        (0.70, (36, 42), (11, 22, 44), (0.46, 99.7)),
        (0.75, (36, 42, 48), (12, 24, 48), (0.86, 138.5)),
        (1.00, (54,), (16, 32, 64), (1.73, 253.1)),
        (0.70, (54,), (11, 22, 44), (0.82, 119.7)),
    ],
)
def test_scalefl_table_1(
    width: float, exits: tuple[int, ...], stages: tuple[int, int, int], printed: tuple[float, float]
) -> None:
    """Within one percent of the printed numbers, and exactly the formula."""
    cost = submodel_cost(resnet(), (resnet().sizes(width), exits), CIFAR)
    assert cost.multiply_adds == resnet_by_hand(18, exits, stages)
    assert cost.multiply_adds / 1e6 == pytest.approx(printed[1], rel=0.01)
    assert cost.parameters / 1e6 == pytest.approx(printed[0], abs=0.0101 if printed[0] < 1 else 0.01)


def test_early_heads_of_the_full_model_are_apart() -> None:
    bare, whole = full_cost(resnet(), CIFAR), submodel_cost(resnet(), ({}, (36, 42, 48, 54)), CIFAR)
    assert bare == Cost(1_730_714, resnet_by_hand(18, (54,), (16, 32, 64)))
    assert whole.parameters == 1_982_136
    assert whole.multiply_adds == resnet_by_hand(18, (36, 42, 48, 54), (16, 32, 64))


def test_a_sub_model_costs_what_its_sizes_cost() -> None:
    """Which channels are kept does not matter, and axes that are not named are whole."""
    sizes = cnn().sizes(0.5)
    one = submodel_cost(cnn(), (sizes, (2, 4)), (1, 8, 8))
    assert submodel_cost(cnn(), Submodel({a: range(n) for a, n in sizes.items()}, (2, 4)), (1, 8, 8)) == one
    assert (
        submodel_cost(cnn(), Submodel({"stage1": tuple(range(0, 28, 2)), "stage2": range(7, 28)}, (2, 4)), (1, 8, 8))
        == one
    )
    assert submodel_cost(cnn(), Submodel({}, (6,)), (1, 8, 8)) == full_cost(cnn(), (1, 8, 8))


def test_one_value_per_channel_is_enough() -> None:
    """Batch norm refuses a single value per channel; the count must not."""
    made = resnet(depth=8)
    assert submodel_cost(made, ({}, (3,)), (3, 4, 4)).multiply_adds == resnet_by_hand(1, (3,), (16, 32, 64), side=4)


@dataclass(frozen=True)
class Tokens(Architecture):
    """Attention, whose products of queries and keys have no weights: their cost is not proportional to any."""

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"hidden": Axis(12, 4), "inner": Axis(7), "classes": Axis(3, scaled=False)}

    @property
    def blocks(self) -> int:
        return 2

    @property
    def declared(self) -> Mapping[str, object]:
        from fleetfit.layout import blocked

        return {"*qkv.*": blocked(3)}

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return TokenModule(axes, exits)


class TokenBlock(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).mean() * x


class TokenModule(ExitModel):
    def __init__(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        make = TokenBlock
        self.blocks = nn.ModuleList(make(axes["hidden"], axes["inner"], axes["classes"]) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(5, axes["classes"]) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return x


FAMILIES: dict[str, tuple[Architecture, tuple[int, ...]]] = {
    "cnn": (cnn(head_layers=1), (1, 10, 10)),
    "resnet": (resnet(depth=14, norm="group"), (3, 8, 8)),
    "linear": (Deep(), (5,)),
    "attention": (Tokens(), (6, 5)),
}


@given(name=st.sampled_from(sorted(FAMILIES)), column=st.integers(0, 99), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=80)
def test_the_grid_is_what_sub_models_cost(name: str, column: int, seed: int) -> None:
    """Trunk, own head and shallower heads put together give exactly the sub-model that is built."""
    architecture, shape = FAMILIES[name]
    rng = np.random.default_rng(seed)
    exits = tuple(sorted(rng.permutation(architecture.positions)[: rng.integers(1, 4)].tolist()))
    built = submodel_cost(architecture, (architecture.sizes(WIDTHS[column]), exits), shape)
    for cost in COSTS:
        grid = cost_grid(architecture, shape, cost)
        assert grid.of(WIDTHS[column], exits) == getattr(built, cost)
        assert grid.full == getattr(full_cost(architecture, shape), cost)


def test_costs_grow_with_width_and_depth() -> None:
    for cost in COSTS:
        grid = cost_grid(resnet(depth=14), (3, 16, 16), cost)
        assert (np.diff(grid.trunk, axis=1) >= 0).all()
        assert (np.diff(grid.trunk, axis=0) > 0).all()
        assert (grid.heads > 0).all()


def test_grids_and_costs_are_cached_by_the_parameters() -> None:
    assert cost_grid(cnn(classes=3), [1, 8, 8]) is cost_grid(cnn(classes=3), (1, 8, 8))
    assert cost_grid(cnn(classes=3), (1, 8, 8)) is not cost_grid(cnn(classes=4), (1, 8, 8))


def test_an_architecture_that_cannot_be_hashed_is_measured() -> None:
    class Loose(Deep):
        __hash__ = None  # type: ignore[assignment]

    assert full_cost(Loose(), (5,)) == full_cost(Deep(), (5,))
    assert cost_grid(Loose(), (5,)).full == cost_grid(Deep(), (5,)).full


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match='"parameter" is no cost.*Did you mean "parameters"'):
        cost_grid(cnn(), (1, 8, 8), "parameter")
    with pytest.raises(ModelError, match=r"does not accept an input of shape \(3, 8, 8\)"):
        submodel_cost(cnn(), ({}, (6,)), (3, 8, 8))
    grid = cost_grid(cnn(), (1, 8, 8))
    for width, exits in ((0.505, (6,)), (0.5, (7,)), (0.5, ())):
        with pytest.raises(ModelError, match="the cost grid has no width"):
            grid.of(width, exits)
