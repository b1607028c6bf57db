from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from proofs import built, proven, trains, whole_before
from support import raises
from tiny import plain
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import arrange

from fleetfit.anatomy import build_module, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.core import Clients, DeviceResources, Federation, Job, Level, Local, Problem, Simulation, Update
from fleetfit.core.tasks import classification
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ModelError
from fleetfit.hooks import build
from fleetfit.models.msdnet import msdnet, msdnet24
from fleetfit.rounds import Settings, run_round, start
from fleetfit.submodel import extract
from fleetfit.validation import validate_reply

EXITS = (15, 18, 21, 24)
SMALL: dict[str, Any] = {"layers": 6, "base": 4, "growth": 4, "head_channels": 6}
TWO = SMALL | {"layers": 3, "scales": 2}


@pytest.mark.parametrize(
    ("width", "exits", "parameters", "multiply_adds"),
    [
        (1.00, 4, 2.64, 101.9),
        (0.75, 4, 1.33, 48.1),
        (0.50, 4, 0.66, 25.6),
        (0.35, 4, 0.30, None),  # 12.4 M printed; no width with 0.30 M parameters has them
        (0.85, 3, 1.38, 59.7),
        (0.70, 2, 0.64, 32.4),
        (0.65, 1, 0.28, 15.8),
    ],
)
def test_scalefl_s_table_7(width: float, exits: int, parameters: float, multiply_adds: float | None) -> None:
    """In millions, at the printed widths. A level counts its own and earlier classifiers, a narrow one all four."""
    architecture = msdnet24()
    cost = submodel_cost(architecture, (architecture.sizes(width), EXITS[:exits]), (3, 32, 32))
    assert cost.parameters / 1e6 == pytest.approx(parameters, rel=0.01)
    if multiply_adds is not None:
        assert cost.multiply_adds / 1e6 == pytest.approx(multiply_adds, rel=0.03)


def count_parameters(
    layers: int, scales: int, base: int, growth: int, head: int, exits: tuple[int, ...], classes: int
) -> int:
    """Parameters, scale by scale as the paper describes the layers: factors 1, 2, 4 for growth and bottlenecks."""

    def unit(before: int, after: int, kernel: int) -> int:
        return kernel**2 * before * after + 2 * after

    total = unit(3, base, 3) + sum(unit(base * 2 ** (s - 1), base * 2**s, 3) for s in range(1, scales))
    share, channels, finest = -(-layers // scales), base, 0
    for layer in range(1, exits[-1] + 1):
        ends = layer > 1 and (layer - 1) % share == 0
        for s in range(finest + ends, scales):
            add, own = growth * 2**s, channels * 2**s
            if s == finest:
                total += unit(own, add * 2**s, 1) + unit(add * 2**s, add, 3)
            else:
                half = add // 2
                total += unit(own, half * 2**s, 1) + unit(half * 2**s, half, 3)
                total += unit(own // 2, half * 2 ** (s - 1), 1) + unit(half * 2 ** (s - 1), half, 3)
        channels += growth
        if ends:
            finest += 1
            total += sum(unit(channels * 2**s, channels // 2 * 2**s, 1) for s in range(finest, scales))
            channels //= 2
        if layer in exits:
            last = channels * 2 ** (scales - 1)
            total += unit(last, head, 3) + unit(head, head, 3) + head * classes + classes
    return total


@pytest.mark.parametrize(
    ("layers", "scales", "exits", "width"),
    [(24, 3, EXITS, 0.65), (24, 3, EXITS[:1], 1.0), (10, 2, (3, 10), 0.5), (7, 4, (2, 5, 7), 0.4), (3, 1, (1, 3), 0.9)],
)
def test_sizes_by_hand(layers: int, scales: int, exits: tuple[int, ...], width: float) -> None:
    architecture = msdnet(7, 3, layers, scales)
    sizes = (int(16 * width), int(6 * width), int(128 * width))
    cost = submodel_cost(architecture, (architecture.sizes(width), exits), (3, 32, 32))
    assert cost.parameters == count_parameters(layers, scales, *sizes, exits, 7)


def test_the_layout_with_group_norm_is_proven() -> None:
    """With batch norm: test_every_model.py."""
    proven(msdnet(3, 2, norm="group", **SMALL), (2, 8, 8), (1, 3, 4, 6))


@pytest.mark.slow
def test_the_layout_of_24_layers_is_proven() -> None:
    proven(msdnet24(5), (3, 16, 16), EXITS)


def test_the_order_of_concatenated_parts_matters() -> None:
    family = msdnet(3, 2, **TWO)
    right = infer_layout(family, (3,), input_shape=(2, 8, 8))
    check_layout(family, right, input_shape=(2, 8, 8))
    joined = {
        (name, 1): one.dims[1][::-1]
        for name, one in right.tensors.items()
        if len(one.dims[1:2]) and len(one.dims[1]) > 1
    }
    with raises(ModelError, '"stem0"'):
        check_layout(family, arrange(right, joined), input_shape=(2, 8, 8))


def test_it_computes_what_the_paper_describes() -> None:
    """The forward pass again, with plain functions on the module's tensors."""
    architecture = msdnet(5, 2, **SMALL)  # two layers, then a scale ends in layers 3 and 5
    module = build_module(architecture, architecture.sizes(1.0), (1, 2, 3, 6)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = dict(module.named_parameters())

    def unit(x: Tensor, name: str, at: int = 0, stride: int = 1) -> Tensor:
        kernel = state[f"{name}.{at}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        return F.batch_norm(
            x, None, None, state[f"{name}.{at + 1}.weight"], state[f"{name}.{at + 1}.bias"], True
        ).relu()

    x = torch.randn(3, 2, 16, 16, dtype=torch.float64)
    logits = module(x)
    maps = {0: unit(x, "stem.0")}
    maps[1] = unit(maps[0], "stem.1", stride=2)
    maps[2] = unit(maps[1], "stem.2", stride=2)
    for layer in range(1, 7):
        ends = layer in (3, 5)
        scale_maps = {}
        for s in sorted(maps)[ends:]:
            name, parts = f"blocks.{layer - 1}.scale.{s}", [maps[s]]
            if s - 1 in maps:
                parts.append(unit(unit(maps[s - 1], f"{name}.down"), f"{name}.down", 3, stride=2))
            parts.append(unit(unit(maps[s], f"{name}.normal"), f"{name}.normal", 3))
            joined = torch.cat(parts, 1)
            scale_maps[s] = unit(joined, f"{name}.reduce") if ends else joined
        maps = scale_maps
        if layer in module.exits:
            name = f"heads.{layer}"
            deep = unit(unit(maps[2], f"{name}.body", stride=2), f"{name}.body", 3, stride=2).mean((2, 3))
            expected = deep @ state[f"{name}.fc.weight"].T + state[f"{name}.fc.bias"]
            torch.testing.assert_close(logits[module.exits.index(layer)], expected, rtol=1e-9, atol=1e-9)
    assert sorted(maps) == [2]


@pytest.mark.parametrize("side", [8, 28, 33])
def test_scales_halve_the_map_and_end(side: int) -> None:
    architecture = msdnet(4, 1, **SMALL)
    module = build_module(architecture, architecture.sizes(0.5), (2, 6))
    halves = [side, (side + 1) // 2, ((side + 1) // 2 + 1) // 2]
    carry = module.start(torch.randn(2, 1, side, side))
    assert [m.shape[-1] for m in carry] == halves
    for i, alive in enumerate([3, 3, 2, 2, 1, 1]):
        carry = module.blocks[i](carry)
        assert [m.shape[-1] for m in carry] == halves[3 - alive :], i
    assert [tuple(z.shape) for z in module(torch.randn(2, 1, side, side))] == [(2, 4)] * 2


def test_it_trains() -> None:
    trains(msdnet(4, 3, **SMALL | {"base": 8, "head_channels": 12}), (3, 16, 16), (2, 4, 6))


def fleet_of_two(method: dict[str, Any]) -> tuple[Federation, Simulation]:
    """Two clients with all widths, one up to layer 2 and one up to layer 6, of a network whose 3 scales are alive."""
    architecture = msdnet(4, 1, **SMALL)
    problem = Problem(architecture, (1, 8, 8), classification, (2, 6))
    rng = torch.Generator().manual_seed(0)
    data = Data("noise", torch.randn(24, 1, 8, 8, generator=rng), torch.arange(24) % 4, {}, 4)
    parts = [{"train": torch.arange(0, 12)}, {"train": torch.arange(12, 24)}]
    levels = tuple(
        Level(str(len(exits)), problem.submodel(1.0, exits), 1.0, needs)
        for exits, needs in (((2,), 0.2), ((2, 6), 1.0))
    )
    clients = Clients(np.array([12, 12]), np.array([0.2, 1.0]))
    return (
        Federation(problem, clients, levels, 2, build(method), method),
        Simulation(problem, data, parts, DeviceResources({"parameters": np.array([0.2, 1.0])})),
    )


def without_gradient(exits: tuple[int, ...]) -> set[str]:
    """What autograd says does not decide the logits of these exits."""
    architecture = msdnet(4, 1, **SMALL)
    module = build_module(architecture, architecture.sizes(1.0), exits)
    sum(z.sum() for z in module(torch.randn(3, 1, 8, 8))).backward()
    return {name for name, parameter in module.named_parameters() if parameter.grad is None}


@pytest.mark.parametrize("compress", [None, "int8"])
def test_unused_scales_of_the_last_layer_stay(compress: str | None) -> None:
    """The client of two layers has them without training them: what becomes of them is what the other one made."""
    idle = without_gradient((2,))
    assert {name.rpartition(".normal")[0] for name in idle if ".normal" in name} >= {
        "blocks.1.scale.0", "blocks.1.scale.1", "blocks.0.scale.0",
    }  # fmt: skip
    assert not without_gradient((2, 6)) & idle
    federation, simulation = fleet_of_two({"name": "scalefl"})
    engine, states = local_engine(simulation), {}

    class Watching:
        def run(self, jobs: Any) -> Any:
            for reply in engine.run(jobs):
                states[reply.client] = reply
                yield reply

        def commit_memory(self, update: Any) -> None:
            engine.commit_memory(update)

    before = start(federation)
    local = Local(lr=0.05, momentum=0.9, weight_decay=0.1, epochs=2, batch_size=6, compress=compress)
    after, report = run_round(federation, Watching(), Settings(1, local), before)  # type: ignore[arg-type]
    assert not report["failures"] and set(states[0].untrained) == idle
    sent = extract(federation.problem.layout, before.state, federation.levels[0].submodel)
    deep = validate_reply(states[1], replace(job_of(states[1], federation, before), local=local), federation)
    assert isinstance(deep, Update)
    for name in idle:
        if compress is None:
            assert torch.equal(states[0].state[name], sent[name]), name
        assert torch.equal(after.state[name], deep.state[name]), name
        assert not torch.equal(after.state[name], before.state[name]), name
    shared = "blocks.1.scale.2.normal.0.weight"
    assert shared not in idle and not torch.equal(after.state[shared], deep.state[shared])


def job_of(reply: Update, federation: Federation, server: Any) -> Job:
    """The job that an update answers."""
    state = extract(federation.problem.layout, server.state, reply.dispatched)
    return Job(
        "train", 0, 1, reply.index, reply.client, reply.dispatched, state, federation.method_spec, 0, reply.level
    )


def test_untrained_parts_stay_in_a_round() -> None:
    """Only the client of two layers takes part: the finer scales of its last layer keep their bits."""
    federation, simulation = fleet_of_two({"name": "scalefl"})
    alone = replace(federation, clients=Clients(np.array([12, 0]), np.array([0.2, 1.0])))
    before = start(alone)
    settings = Settings(1, plain(lr=0.05, weight_decay=0.1, batch_size=6))
    after, _ = run_round(alone, local_engine(simulation), settings, before)
    for name in without_gradient((2,)):
        assert torch.equal(after.state[name], before.state[name]), name
    assert not torch.equal(after.state["heads.2.fc.weight"], before.state["heads.2.fc.weight"])


def test_widths_follow_from_three_numbers() -> None:
    """At 0.65: 10 channels, growth 3; after 9 layers 10 + 27 channels are halved, after 8 more 18 + 24."""
    sizes = msdnet24().sizes(0.65)
    assert [sizes[f"stem{s}"] for s in (0, 1, 2)] == [10, 20, 40]
    assert (sizes["normal0_0"], sizes["down0_1"], sizes["normal0_2"], sizes["normal1_1"], sizes["normal2_2"]) == (
        3,
        3,
        6,
        6,
        12,
    )
    assert (sizes["reduced1_1"], sizes["reduced1_2"], sizes["reduced2_2"]) == (36, 72, 84)
    assert (sizes["head"], sizes["classes"]) == (83, 10)
    assert msdnet24(norm="group").sizes(0.65)["normal0_0"] == 2


def test_layers_before_i_stay_whole() -> None:
    """Layers that share axes are whole if the first of them is."""
    architecture = msdnet(4, 3, **SMALL)
    sizes = whole_before(architecture, 3, 0.5)
    assert (sizes["stem2"], sizes["normal0_2"], sizes["reduced1_2"]) == tuple(
        architecture.axes[name].size for name in ("stem2", "normal0_2", "reduced1_2")
    )
    assert (sizes["normal1_2"], sizes["reduced2_2"], sizes["head"]) == (4, 16, 3)
    layout = infer_layout(architecture, (6,), input_shape=(3, 16, 16))
    assert {n: tuple(p.shape) for n, p in built(architecture, sizes, (6,)).named_parameters()} == layout.shapes(
        sizes, (6,)
    )


def test_plain_heads_are_proven() -> None:
    proven(msdnet(3, 2, head_layers=0, **TWO), (2, 8, 8), (1, 2, 3))
