"""AdaptiveFL's pool: its sub-models against the paper's formula written out, and its Table 1."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st
from support import Expected, raises
from zoo import Deep

from fleetfit.anatomy import infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.cost import submodel_cost
from fleetfit.errors import PlanError
from fleetfit.methods._pool import make_pool, narrow
from fleetfit.models.cnn import cnn
from fleetfit.models.vgg16 import vgg16

CIFAR = (3, 32, 32)
CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512, 4096, 4096)
TABLE_1 = {"S3": 5.67, "S2": 6.48, "S1": 8.39, "M3": 14.84, "M2": 15.41, "M1": 16.81, "L1": 33.65}


def vgg_by_hand(width: float, whole: int) -> int:
    """3x3 kernels and biases, two numbers a norm, two wide layers and the classifier; the first layers are whole."""
    sizes = [c if layer < whole else int(width * c + 1e-9) for layer, c in enumerate(CHANNELS)]
    total = 0
    for before, after in zip([3, *sizes[:12]], sizes[:13], strict=True):
        total += 9 * before * after + after + 2 * after
    for before, after in zip(
        [
            *sizes[12:],
        ],
        [*sizes[13:], 10],
        strict=True,
    ):
        total += before * after + after
    return total


def test_table_1_of_adaptivefl() -> None:
    """5.67 6.48 8.40 14.84 15.41 16.81 33.65 M, from small to large; the paper prints 8.397 as 8.39."""
    pool = make_pool(vgg16())
    assert [model.name for model in pool] == list(TABLE_1)
    for model in pool:
        parameters = submodel_cost(vgg16(), model.submodel, CIFAR).parameters
        assert parameters == vgg_by_hand(model.width, 15 if model.whole is None else model.whole)
        assert parameters / 1e6 == pytest.approx(TABLE_1[model.name], abs=0.01)
    assert submodel_cost(vgg16(), pool[-1].submodel, CIFAR).parameters == 33_646_666


def test_a_coarse_pool_keeps_the_largest_start() -> None:
    assert [(m.name, m.width, m.whole) for m in make_pool(vgg16(), p=1)] == [
        ("S1", 0.4, 8),
        ("M1", 0.66, 8),
        ("L1", 1.0, None),
    ]
    assert [m.whole for m in make_pool(vgg16(), p=2)] == [6, 8, 6, 8, None]


@given(width=st.floats(0.05, 0.95), whole=st.integers(0, 8))
def test_early_axes_are_whole_and_deeper_ones_floored(width: float, whole: int) -> None:
    sizes = narrow(vgg16(), width, whole).sizes
    for layer, channels in enumerate(CHANNELS):
        assert sizes[f"layer{layer}"] == (channels if layer < whole else max(1, int(width * channels + 1e-9)))
    assert sizes["classes"] == 10


def test_shared_axes_narrow_from_their_first_block() -> None:
    """The small CNN's stages begin with blocks 0 and 3."""
    axes = cnn().axes
    second = next(name for name, axis in axes.items() if axis.block == 3)
    sizes = narrow(cnn(), 0.5, 2).sizes
    assert {name for name, axis in axes.items() if sizes[name] < axis.size} == {second}


def test_sub_models_are_nested_and_can_be_built() -> None:
    """Each in the full model; within a ratio, the more layers are whole, the more is kept."""
    small = vgg16(base=4, wide=16, input_shape=(1, 16, 16), head_layers=0)
    pool = make_pool(small)
    layout = infer_layout(small, (15,))
    check_layout(small, layout, [m.submodel for m in pool], input_shape=(1, 16, 16))
    for model in pool:
        assert model.submodel.is_part_of(pool[-1].submodel)
    for a, b in pairwise(pool[:3]):
        assert a.submodel.is_part_of(b.submodel)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"p": 4}, Expected("p = 4", key="p")),
        ({"p": 4, "starts": (4, 6, 8)}, Expected(4, key="starts")),
        ({"p": 0}, Expected("p = 0", key="p")),
        ({"p": 2, "starts": (0, 1)}, Expected("M1", "S1", key="starts")),
        ({"starts": (8, 6, 4)}, Expected(key="starts")),
        ({"starts": (-1, 2, 3)}, Expected(key="starts")),
        ({"widths": (0.66, 0.4)}, Expected(0, 1, key="widths")),
        ({"widths": (0.4, 1.0)}, Expected(key="widths")),
        ({"widths": (0.4,)}, Expected(key="widths")),
    ],
)
def test_settings_that_make_no_pool(options: dict, expected: Expected) -> None:
    with raises(PlanError, expected):
        make_pool(Deep(), **options)
