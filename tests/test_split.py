"""The split "depth_first" against all shapes; receptive fields against a formula; widths per axis in plans."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from typing import Any, ClassVar

import pytest
import torch
from small_models import SMALL
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit import names
from fleetfit.anatomy import Architecture, Axis, ExitModel
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.cost import compute_cost
from fleetfit.errors import ConfigError, PlanError
from fleetfit.factories import call_factory
from fleetfit.models.cnn import cnn
from fleetfit.models.fedavg_images import mlp_2nn
from fleetfit.models.inverted import efficientnet_b0, mobilenetv2
from fleetfit.models.lstm import char_lstm
from fleetfit.models.mlp import mlp
from fleetfit.models.resnet import resnet
from fleetfit.models.vit import vit
from fleetfit.planner import LevelShape, Plan, Targets, choose_scaling, find_shapes, get_sizes, make_plan
from fleetfit.planner.receptive_field import find_first_seeing_exit, iter_receptive_fields
from fleetfit.planner.split import find_stage_start, has_stages

QUARTERS = Targets((0.125, 0.25, 0.5, 1.0), (0.1,) * 4)
IMAGE = (3, 32, 32)


# ---- receptive fields ------------------------------------------------------------------------------------------------


def by_formula(layers: Sequence[tuple[int, int]]) -> int:
    """Return the receptive field of convolutions and poolings (kernel, stride), in pixels."""
    field, jump = 1, 1
    for kernel, stride in layers:
        field, jump = field + (kernel - 1) * jump, jump * stride
    return field


def test_receptive_fields_follow_the_formula() -> None:
    conv, halving = (3, 1), (2, 2)
    layers = [[conv], [halving, conv], [conv], [halving, conv], [conv], [conv]]
    fields = dict(iter_receptive_fields(cnn(), (1, 64, 64)))
    for exit in range(1, 6):
        # the center of a map of even size is one place of two, so a field of an even number of pixels
        assert fields[exit] == (by_formula(list(chain(*layers[:exit]))),) * 2
    blocks = [[conv, conv]] * 3 + [[(3, 2), conv]] + [[conv, conv]] * 2
    fields = dict(iter_receptive_fields(resnet(depth=20), (3, 64, 64)))
    for exit in range(1, 7):
        assert fields[exit] == (by_formula([conv, *chain(*blocks[:exit])]),) * 2


def test_a_field_ends_at_the_image() -> None:
    assert dict(iter_receptive_fields(cnn(), (1, 12, 40)))[4] == (
        12,
        by_formula([(3, 1), (2, 2), (3, 1), (3, 1), (2, 2), (3, 1)]),
    )


def test_pooled_statistics_do_not_widen_a_field() -> None:
    plain = dict(iter_receptive_fields(cnn(), (1, 28, 28)))
    assert dict(iter_receptive_fields(cnn(norm="group"), (1, 28, 28))) == plain
    # a stem of stride 2 and a depthwise convolution; squeeze-and-excite would make it the whole image
    fields = dict(iter_receptive_fields(efficientnet_b0(stride=32), (3, 64, 64)))
    assert fields[1] == (by_formula([(3, 2), (3, 1)]),) * 2


def test_the_random_generator_is_left_as_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dict(iter_receptive_fields(resnet(depth=14), IMAGE))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("architecture", "shape", "expected"),
    [
        (cnn(), (1, 28, 28), 4),
        (resnet(depth=20), IMAGE, 5),
        (char_lstm(vocabulary=50, layers=4), (20,), 1),
        (mlp(input_shape=(16,)), (16,), 1),
        (vit(input_shape=IMAGE), IMAGE, 1),
    ],
)
def test_the_first_exit_that_sees_three_quarters(
    architecture: Architecture, shape: tuple[int, ...], expected: int
) -> None:
    assert find_first_seeing_exit(architecture, shape) == expected


# ---- against all shapes ----------------------------------------------------------------------------------------------


class TwoStages(Architecture):
    """Four 3x3 convolutions in two stages of 12 and 20 channels."""

    axes: ClassVar = {"front": Axis(12), "back": Axis(20, block=2), "classes": Axis(5, scaled=False)}
    blocks = 4

    def build(self, axes: Any, exits: tuple[int, ...]) -> nn.Module:
        return Convolutions([3, axes["front"], axes["front"], axes["back"], axes["back"]], axes["classes"], exits)


class OneStageEach(TwoStages):
    """Four 3x3 convolutions, each with an axis of its own."""

    axes: ClassVar = {
        **{f"layer{i}": Axis(n, block=i) for i, n in enumerate((8, 10, 14, 16))},
        "classes": Axis(5, scaled=False),
    }

    def build(self, axes: Any, exits: tuple[int, ...]) -> nn.Module:
        return Convolutions([3, *(axes[f"layer{i}"] for i in range(4))], axes["classes"], exits)


class Granules(TwoStages):
    """The same as `TwoStages`, in granules of four channels."""

    axes: ClassVar = {"front": Axis(12, 4), "back": Axis(20, 4, block=2), "classes": Axis(5, scaled=False)}


class Convolutions(ExitModel):
    def __init__(self, channels: Sequence[int], classes: int, exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        pairs = list(pairwise(channels))[: exits[-1]]
        self.blocks = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
        self.heads = nn.ModuleDict({str(e): Pooled(channels[e], classes) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return x


class Pooled(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def by_all_shapes(
    architecture: Architecture, shape: tuple[int, ...], targets: Targets, first: int, cost: str
) -> list[tuple[dict[str, int], int]]:
    """Return sizes and depth of each smaller level: the rule of the module's docstring, by trying every shape."""
    whole = compute_cost(architecture, ({}, (architecture.blocks,)), shape, cost)
    full, exits, levels = architecture.sizes(1.0), [], []
    for ratio, tolerance in list(zip(targets.ratios, targets.tolerances, strict=True))[:-1]:

        def share(sizes: Any, depth: int, above: Sequence[int]) -> float:
            return compute_cost(architecture, (sizes, tuple(sorted({*above, depth}))), shape, cost) / whole

        deep = [p for p in architecture.positions if p >= max([first, *exits])]
        depth = next((p for p in deep if share(full, p, exits) >= ratio * (1 - tolerance) - 1e-9), architecture.blocks)
        start = find_stage_start(architecture, shape, depth)
        fitting: list[tuple[int, float, float, dict[str, int]]] = []
        for front, last in product(range(400, 0, -4), range(400, 0, -1)):  # in quarters of a hundredth
            alone = front == 400 and last >= 300 and last % 4 == 0
            if not (alone or (front < 400 and 4 * last == 3 * front) if start else front == last):
                continue
            wide, narrow = architecture.sizes(front / 400), architecture.sizes(last / 400)
            sizes = {a: (narrow if axis.block >= start else wide)[a] for a, axis in architecture.axes.items()}
            shared = share(sizes, depth, exits)
            if shared <= ratio * (1 + tolerance) + 1e-9:
                fitting.append((0 if alone else 1, round(abs(shared / ratio - 1), 9), -front - last, sizes))
        best = min(fitting, key=lambda one: one[:3])
        exits = sorted({*exits, depth})
        levels.append((best[3], depth))
    return levels


@pytest.mark.parametrize("cost", ["parameters", "multiply_adds", "size_bytes"])
@pytest.mark.parametrize("architecture", [TwoStages(), OneStageEach(), Granules()], ids=["stages", "axes", "granules"])
@pytest.mark.parametrize("ratios", [(0.125, 0.25, 0.5, 1.0), (0.1, 0.3, 0.8, 1.0), (0.4, 1.0)])
def test_depth_first_equals_trying_all_shapes(architecture: Architecture, ratios: tuple[float, ...], cost: str) -> None:
    targets = Targets(ratios, (0.1,) * len(ratios), cost)
    for size, least in (((3, 10, 10), 4), ((3, 6, 6), 2)):  # the fields are 3, 5, 7 and 9 pixels
        first = find_first_seeing_exit(architecture, size)
        assert first == least
        expected = by_all_shapes(architecture, size, targets, first, cost)
        shapes = find_shapes(architecture, size, targets, "depth_first")
        assert len(shapes) == len(expected) + 1
        for level, (sizes, depth) in zip(shapes, expected, strict=False):
            present = {a for a, axis in architecture.axes.items() if axis.block < depth}
            own = get_sizes(architecture, level)
            assert (level.depth, {a: own[a] for a in present}) == (depth, {a: sizes[a] for a in present})


# ---- the rule on the models ------------------------------------------------------------------------------------------


def test_a_residual_network_keeps_whole_stages_first() -> None:
    model = resnet(depth=20, head_layers=1)
    shapes = find_shapes(model, (3, 16, 16), QUARTERS, "depth_first")
    widths = [{a: n for a, n in get_sizes(model, s).items() if a != "classes"} for s in shapes]
    assert [s.depth for s in shapes] == [4, 5, 7, 9]
    assert [w["stage1"] for w in widths] == [16, 16, 16, 16]
    assert widths[0]["stage2"] < 32 == widths[1]["stage2"] == widths[2]["stage2"]
    assert 48 <= widths[2]["stage3"] < 64
    assert widths[0]["stage3"] == widths[1]["stage3"] == widths[2]["stage3"]  # absent ones are those of the level above
    for shape, ratio in zip(shapes, QUARTERS.ratios, strict=True):
        assert abs(shape.share / ratio - 1) <= 0.1 + 1e-9


class PlainConvolutions(nn.Sequential):
    """A plain module of three stages of two convolutions."""

    def __init__(self) -> None:
        channels = [1, 16, 16, 32, 32, 64, 64]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, 1 + (1 < a < b), 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in pairwise(channels)
        ]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Encoder(nn.Module):
    """A transformer whose classifier reads another axis than its blocks write, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.patches = nn.Conv2d(1, 16, 2, 2)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(16, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.patches(x).flatten(2).transpose(1, 2)).mean(1)
        return self.classifier(self.pooler(x).tanh())


def test_a_module_of_stages_keeps_early_blocks_first() -> None:
    """Its axes begin in the blocks that write them. Four blocks have 17 of its 73 thousand parameters."""
    model = ff.derive(PlainConvolutions(), "digits")
    axes = [(axis.size, axis.block) for axis in model.axes.values() if axis.scaled]
    assert axes == [(16, 0), (16, 1), (32, 2), (32, 3), (64, 4), (64, 5)]
    assert has_stages(model, (1, 8, 8)) and find_first_seeing_exit(model, (1, 8, 8)) == 3
    plan = make_plan(model, (1, 8, 8), QUARTERS.ratios, scaling="auto")
    assert plan.scaling == "depth_first"
    assert [level.depth for level in plan.levels] == [4, 4, 5, 6]
    assert [level.width for level in plan.levels[1:]] == [1.0, 1.0, 1.0]


def test_residual_streams_keep_whole_blocks() -> None:
    model = ff.derive(Encoder(), "digits")
    assert find_stage_start(model, (1, 8, 8), model.blocks) == model.blocks - 1  # of the pooler
    assert not has_stages(model, (1, 8, 8))
    shapes = find_shapes(model, (1, 8, 8), Targets((0.3, 0.55, 0.75, 1.0), (0.2,) * 4), "depth_first")
    assert [(shape.depth, shape.width) for shape in shapes] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]


def test_a_transformer_keeps_whole_blocks() -> None:
    model, quarters = vit(input_shape=IMAGE, depth=8), Targets((0.125, 0.25, 0.5, 1.0), (0.2,) * 4)
    shapes = find_shapes(model, IMAGE, quarters, "depth_first")
    assert [(s.depth, s.width) for s in shapes] == [(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)]
    assert not any(s.widths for s in shapes)
    by_work = find_shapes(model, IMAGE, replace(quarters, cost="multiply_adds"), "depth_first")
    assert [(s.depth, s.width) for s in by_work] == [(1, 1.0), (2, 1.0), (4, 1.0), (8, 1.0)]


def test_below_one_block_a_transformer_is_split_in_both() -> None:
    model = vit(input_shape=IMAGE, depth=4)
    assert find_shapes(model, IMAGE, QUARTERS, "depth_first") == find_shapes(model, IMAGE, QUARTERS, "both")


LARGE = ("efficientnet_b0", "efficientnet_b4", "mobilenetv2", "msdnet24", "resnet", "resnet34", "resnet56", "resnet110")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in names.list_names("models")]
)
def test_every_model_plans_with_all_defaults(name: str) -> None:
    kind = SMALL[name].kind
    shape = (3, 32, 32) if kind == "images" and name != "mlp" else (32,)
    arguments = {
        "classes": 10,
        "channels": 3,
        "input_shape": shape,
        "vocabulary": 0 if kind == "images" else 100,
        "padding": -1,
    }
    model = call_factory(names.resolve("models", name), name, "[model]", {}, **arguments)
    shapes = find_shapes(model, shape, QUARTERS, "auto")
    assert len(shapes) == 4
    assert model.blocks == 1 or has_stages(model, shape) == (find_stage_start(model, shape, model.blocks) > 0)
    for shape_, ratio in zip(shapes, QUARTERS.ratios, strict=True):
        assert shape_.share <= ratio * 1.1 + 1e-9


def test_strict_levels_are_at_or_under_their_budgets() -> None:
    targets = Targets(QUARTERS.ratios, QUARTERS.tolerances, strict=True)
    for model, shape in ((cnn(), (1, 28, 28)), (resnet(depth=20), IMAGE), (mobilenetv2(), IMAGE)):
        shapes = find_shapes(model, shape, targets, "depth_first")
        assert all(s.share <= r + 1e-9 for s, r in zip(shapes, targets.ratios, strict=True))


def test_further_budgets_limit_levels() -> None:
    model = resnet(depth=20)
    free = find_shapes(model, IMAGE, QUARTERS, "depth_first")
    ceilings = {"multiply_adds": (0.1, 0.2, 0.4, 1.0)}
    bounded = find_shapes(model, IMAGE, Targets(QUARTERS.ratios, QUARTERS.tolerances, ceilings=ceilings), "depth_first")
    for one, other, most in zip(free[:-1], bounded[:-1], (0.1, 0.2, 0.4), strict=True):
        assert other.further["multiply_adds"] <= 1.1 * most + 1e-9
        assert other.share < one.share


def test_a_budget_below_every_width_is_refused() -> None:
    with raises(PlanError) as caught:
        find_shapes(cnn(), (1, 28, 28), Targets((1e-4, 1.0), (0.1, 0.1)), "depth_first")
    assert (caught.value.tolerance, caught.value.scaling) == (None, None)


def test_auto_is_both_for_multiply_adds_of_stages() -> None:
    assert (
        choose_scaling(resnet(depth=20), IMAGE, "parameters")
        == choose_scaling(resnet(depth=20), IMAGE, "size_bytes")
        == "depth_first"
    )
    assert (
        choose_scaling(resnet(depth=20), IMAGE, "multiply_adds")
        == choose_scaling(cnn(), (1, 28, 28), "latency_s")
        == "both"
    )
    assert choose_scaling(vit(input_shape=IMAGE), IMAGE, "multiply_adds") == "depth_first"


def test_auto_cuts_width_of_shallow_models() -> None:
    model, targets = mlp_2nn(), Targets((0.125, 0.25, 0.5, 1.0), (0.1,) * 4, "multiply_adds")
    assert choose_scaling(model, (1, 28, 28), "multiply_adds") == "both"
    with raises(PlanError):
        find_shapes(model, (1, 28, 28), targets, "both")
    assert find_shapes(model, (1, 28, 28), targets, "auto") == find_shapes(model, (1, 28, 28), targets, "width")
    assert (
        make_plan(model, (1, 28, 28), [0.125, 0.25, 0.5, 1.0], cost="multiply_adds", scaling="auto").scaling == "width"
    )


# ---- plans and run files ---------------------------------------------------------------------------------------------


def test_a_plan_with_widths_per_axis_is_saved_and_read() -> None:
    model = resnet(depth=20)
    plan = make_plan(model, IMAGE, (0.125, 0.25, 0.5, 1.0), scaling="depth_first")
    assert plan.scaling == "depth_first"
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert [dict(level.widths) for level in again.levels] == [dict(level.widths) for level in plan.levels]
    shapes = find_shapes(model, IMAGE, again.targets, "auto")
    assert [get_sizes(model, s) for s in shapes] == [get_sizes(model, level.shape) for level in plan.levels]
    assert [s.share for s in shapes] == pytest.approx([level.share for level in plan.levels])
    counted = [compute_cost(model, (get_sizes(model, s), s.exits), IMAGE) for s in shapes[:-1]]
    assert counted == [level.parameters for level in plan.levels[:-1]]


def test_a_width_of_an_unknown_axis_is_refused() -> None:
    with raises(PlanError, "stage9", key="levels"):
        get_sizes(resnet(depth=20), LevelShape(4, 1.0, (4,), 0.1, widths={"stage9": 0.5}))
    with raises(PlanError, "classes", key="levels"):
        get_sizes(resnet(depth=20), LevelShape(4, 1.0, (4,), 0.1, widths={"classes": 0.5}))


def plan_of(method: dict[str, Any], **fleet: Any) -> Plan:
    tables = {
        "data": {"name": "digits", "partition": {"clients": 4}}, "method": method, "fleet": fleet, "rounds": 1,
    }  # fmt: skip
    return assemble(load_experiment(tables)).plan


def test_fleet_split_reaches_the_method() -> None:
    assert plan_of({"name": "scalefl"}, scaling="depth_first").scaling == "depth_first"
    assert plan_of({"name": "scalefl"}).scaling == "both"
    assert plan_of({"name": "scalefl"}, scaling="width").scaling == "width"


@pytest.mark.parametrize("method", [{"name": "scalefl", "scaling": "both"}, {"name": "heterofl"}, {"name": "depthfl"}])
def test_self_splitting_methods_refuse_fleet_split(method: dict[str, Any]) -> None:
    with raises(ConfigError, key="fleet.scaling"):
        plan_of(method, scaling="depth_first")


@pytest.mark.parametrize("split", ["both", "width", "depth", "depth_first", "auto"])
def test_a_split_does_not_replace_listed_levels(split: str) -> None:
    """They differ in both: a run that asks for something else is refused, not planned anew."""
    levels = [{"budget": 0.3, "depth": 3, "width": 0.5}, {"budget": 1.0}]
    fleet = {"levels": levels, "scaling": split, "groups": [{"budget": 0.3}, {"budget": 1.0}]}
    if split in ("width", "depth"):
        with raises(ConfigError, split, key="fleet.scaling"):
            plan_of({"name": "scalefl"}, **fleet)
    else:
        smallest = plan_of({"name": "scalefl"}, **fleet).levels[0]
        assert (smallest.depth, smallest.width) == (3, 0.5)


def test_listed_levels_may_have_a_width_per_axis() -> None:
    levels = [
        {"budget": 0.125, "depth": 4, "width": {"stage1": 0.6, "stage2": 0.45}},
        {"budget": 0.25, "depth": 4, "width": {"stage1": 0.8, "stage2": 0.62}},
        {"budget": 1.0},
    ]
    plan = plan_of({"name": "scalefl"}, levels=levels, groups=[{"budget": b} for b in (0.125, 0.25, 1.0)])
    assert plan.scaling == "depth_first"
    assert [level.depth for level in plan.levels] == [4, 4, 6]
    sizes = [get_sizes(cnn(), level.shape) for level in plan.levels]
    assert [(s["stage1"], s["stage2"]) for s in sizes] == [(16, 18), (22, 26), (28, 42)]


def test_non_embedding_parameters_leave_embeddings_out() -> None:
    model = char_lstm(vocabulary=100, layers=2)
    table = 100 * model.axes["embedding"].size
    whole = compute_cost(model, ({}, (2,)), (20,), "parameters")
    assert compute_cost(model, ({}, (2,)), (20,), "non_embedding_parameters") == whole - table
    assert compute_cost(cnn(), ({}, (6,)), (1, 8, 8), "non_embedding_parameters") == compute_cost(
        cnn(), ({}, (6,)), (1, 8, 8)
    )


@pytest.mark.parametrize(
    ("budget", "split", "ratio"),
    [
        (0.25, {}, "1.17"),  # whole blocks: (242.2 + 412.0) / (148.6 + 412.0) multiply-adds
        (0.25, {"scaling": "depth_first"}, ""),
        (0.25, {"scaling": "both"}, ""),
        (1.0, {}, ""),
    ],
)
def test_whole_early_blocks_have_a_note(budget: float, split: dict[str, str], ratio: str) -> None:
    table = {
        "data": {"name": "digits", "partition": {"clients": 12}},
        "fleet": {"groups": [{"budget": budget}, {"budget": 1.0}], **split},
    }
    notes = [note for note in assemble(load_experiment(table)).notes if "fleet.scaling" in note]
    assert [ratio in note for note in notes] == [True] * bool(ratio)
