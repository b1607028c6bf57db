"""Costs against a formula for convolutions written out by hand, and the grid against sub-models really built."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
import zoo
from hypothesis import given, settings, strategies as st
from support import raises
from torch import Tensor, nn
from zoo import Attention, Deep

from fleetfit import messages
from fleetfit.anatomy import Architecture, Axis, ExitModel
from fleetfit.anatomy.derive import derive_architecture
from fleetfit.cost import (
    COSTS,
    WIDTHS,
    Conditions,
    Cost,
    Latency,
    TimedModel,
    compute_cost,
    cost_grid,
    count,
    full_cost,
    get_latency,
    latency,
    measure_latencies,
    message_size,
    parts,
    submodel_cost,
    training_memory,
)
from fleetfit.errors import ConfigError, ModelError
from fleetfit.models.cnn import cnn
from fleetfit.models.resnet import resnet
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import Submodel

CIFAR = (3, 32, 32)
EXACT = [name for name, kind in COSTS.items() if kind.samples is None]


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


def test_one_value_per_channel_can_be_counted() -> None:
    """Batch norm refuses a single value per channel; the count must not."""
    architecture = resnet(depth=8)
    assert submodel_cost(architecture, ({}, (3,)), (3, 4, 4)).multiply_adds == resnet_by_hand(
        1, (3,), (16, 32, 64), side=4
    )


@dataclass(frozen=True)
class Tokens(Architecture):
    """Attention, whose products of queries and keys have no weights: their cost is not proportional to any."""

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"hidden": Axis(12, 4), "inner": Axis(7), "classes": Axis(3, scaled=False)}

    @property
    def blocks(self) -> int:
        return 2

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
def test_the_grid_equals_the_costs_of_sub_models(name: str, column: int, seed: int) -> None:
    """Trunk, own head and shallower heads put together give exactly the sub-model that is built."""
    architecture, shape = FAMILIES[name]
    rng = np.random.default_rng(seed)
    exits = tuple(sorted(rng.permutation(architecture.positions)[: rng.integers(1, 4)].tolist()))
    sizes = architecture.sizes(WIDTHS[column])
    built = submodel_cost(architecture, (sizes, exits), shape)
    for cost in EXACT:
        grid = cost_grid(architecture, shape, cost)
        counted = compute_cost(architecture, (sizes, exits), shape, cost)
        assert grid.estimate(WIDTHS[column], exits) == grid.compute(WIDTHS[column], exits) == counted
        assert grid.full == compute_cost(architecture, ({}, (architecture.blocks,)), shape, cost)
        if cost in ("parameters", "multiply_adds"):
            assert counted == getattr(built, cost)


@pytest.mark.parametrize("name", [*sorted(FAMILIES), "concatenation"])
def test_one_pass_and_three_probes_are_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The multiply-adds of all widths follow from a few passes: from weights, or from axes for attention."""
    passes = []

    def counting(*arguments: Any) -> Any:
        passes.append(arguments)
        return count.count(*arguments)

    monkeypatch.setattr(parts, "count", counting)
    architecture, shape = FAMILIES.get(name, (zoo.concatenation(), (5,)))
    measure = COSTS["multiply_adds"].parts(architecture, shape, Conditions())
    costs = {width: measure(architecture.sizes(width)) for width in WIDTHS}
    assert len(passes) == 4 + min(4, len(architecture.positions))  # the further ones confirm the places of exits
    everything = tuple(architecture.positions)
    for width in (0.25, 0.6):
        built = submodel_cost(architecture, (architecture.sizes(width), everything), shape)
        profile = costs[width]
        assert profile.rest + sum(profile.blocks) + sum(profile.heads.values()) == built.multiply_adds


class Table(nn.Module):
    """Costs that no rule gives: a matrix whose size is not proportional to any axis."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden, self.fc = hidden, nn.Linear(5, classes)
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.ones(5 + self.hidden // 2, len(x), device=x.device) @ x  # [5 + hidden / 2, B] @ [B, 5]
        return self.fc(x) + table.sum() + self.scale.sum()


def test_modules_without_a_rule_are_counted() -> None:
    architecture = zoo.Made({"a": Axis(9), "classes": Axis(3, scaled=False)}, lambda s: Table(s["a"], s["classes"]))
    grid = cost_grid(architecture, (5,), "multiply_adds")
    for width in (0.2, 0.5, 1.0):
        assert (
            grid.estimate(width, (1,))
            == submodel_cost(architecture, (architecture.sizes(width), (1,)), (5,)).multiply_adds
        )
    assert grid.full == 5 * 3 + 5 * (5 + 4)  # per sample: the batch is the inner dimension of the product


def test_costs_grow_with_width_and_depth() -> None:
    for cost in EXACT:
        grid = cost_grid(resnet(depth=14), (3, 16, 16), cost)
        assert (np.diff(grid.trunk, axis=1) >= 0).all()
        assert (np.diff(grid.trunk, axis=0) > 0).all()
        assert (grid.heads > 0).all()


def test_grids_and_costs_are_cached_by_the_parameters() -> None:
    assert cost_grid(cnn(classes=3), [1, 8, 8]) is cost_grid(cnn(classes=3), (1, 8, 8))
    assert cost_grid(cnn(classes=3), (1, 8, 8)) is not cost_grid(cnn(classes=4), (1, 8, 8))


def test_unhashable_architectures_are_measured() -> None:
    class Loose(Deep):
        __hash__ = None  # type: ignore[assignment]

    assert full_cost(Loose(), (5,)) == full_cost(Deep(), (5,))
    assert cost_grid(Loose(), (5,)).full == cost_grid(Deep(), (5,)).full


def test_mistakes_are_refused() -> None:
    with raises(ConfigError, '"parameter"', '"parameters"', key="cost"):
        cost_grid(cnn(), (1, 8, 8), "parameter")
    with raises(ModelError, "(3, 8, 8)"):
        submodel_cost(cnn(), ({}, (6,)), (3, 8, 8))
    grid = cost_grid(cnn(), (1, 8, 8))
    for width, exits in ((0.505, (6,)), (0.5, (7,)), (0.5, ())):
        with raises(ModelError, key="width"):
            grid.estimate(width, exits)


# ---- multiply-adds of what has no weights ------------------------------------------------------------------------


def test_attention_by_hand() -> None:
    """Four products of hidden x hidden per token, and queries by keys and scores by values: 2 L^2 hidden."""
    hidden, inner, tokens = 12, 7, 6
    embed, qkv_out, feed = 5 * hidden, 4 * hidden * hidden, 2 * hidden * inner
    architecture = zoo.attention()
    assert full_cost(architecture, (tokens, 5)).multiply_adds == (
        tokens * (embed + qkv_out + feed) + 2 * tokens**2 * hidden + hidden * 3
    )


def test_an_lstm_by_hand() -> None:
    """Four gates, each from 5 inputs and from the hidden state, at every step; then the classifier."""
    hidden, steps = 6, 4
    assert full_cost(zoo.lstm(), (steps, 5)).multiply_adds == steps * 4 * hidden * (5 + hidden) + hidden * 3
    grid = cost_grid(zoo.lstm(), (steps, 5), "multiply_adds")
    assert grid.estimate(0.5, (1,)) == steps * 4 * 3 * (5 + 3) + 3 * 3


class Scan(nn.Module):
    """A recurrence in elementwise operations, which torch does not count: it says itself what it costs."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.up, self.fc = nn.Linear(5, hidden), nn.Linear(hidden, classes)
        self.scan = Decay(hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.scan(self.up(x)))


class Decay(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.keep = nn.Parameter(torch.full((hidden,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        state = x[:, 0]
        for step in x[:, 1:].unbind(1):
            state = state * self.keep + step
        return state

    def extra_flops(self, inputs: tuple[Tensor, ...]) -> int:
        return 2 * inputs[0].numel()


def test_a_module_adds_what_torch_does_not_count() -> None:
    architecture = zoo.Made({"a": Axis(8), "classes": Axis(3, scaled=False)}, lambda s: Scan(s["a"], s["classes"]))
    assert full_cost(architecture, (6, 5)).multiply_adds == 6 * 5 * 8 + 6 * 8 + 8 * 3
    grid = cost_grid(architecture, (6, 5), "multiply_adds")
    assert grid.estimate(0.5, (1,)) == 6 * 5 * 4 + 6 * 4 + 4 * 3


class Reading(nn.Module):
    """An embedding, which takes tokens only."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(11, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.words(x))


@dataclass(frozen=True, eq=False)
class Reader(zoo.Made):
    tokens: int = 11


def test_models_that_read_tokens_get_tokens() -> None:
    """The logits [B, L, classes] of a next token are a loss too."""
    axes = {"a": Axis(8), "classes": Axis(11, scaled=False)}
    architecture = Reader(axes, lambda s: Reading(s["a"], s["classes"]))
    assert full_cost(architecture, (7,)) == Cost(11 * 8 + 8 * 11 + 11, 7 * 8 * 11)
    for cost in COSTS:
        assert compute_cost(architecture, ({"a": 4}, (1,)), (7,), cost) > 0


# ---- bytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_size_is_that_of_a_message(name: str) -> None:
    """Of fewer than a million numbers the header is up to 16 bytes shorter than said."""
    architecture, shape = FAMILIES[name]
    layout = count.get_layout(architecture, shape)
    for width, exits in ((1.0, (2,)), (0.4, (1, 2))):
        sizes = architecture.sizes(width)
        numbers = sum(math.prod(s) for s in layout.shapes(sizes, exits).values())
        cost = compute_cost(architecture, (sizes, exits), shape, "size_bytes")
        assert 0 <= cost - len(messages.pack(torch.zeros(numbers))) <= 16


@pytest.mark.parametrize("numbers", [1_000_000, 86_000_000, 10**10 - 1])
def test_size_equals_a_large_models_message(numbers: int) -> None:
    assert message_size({"w": (numbers,)}) == messages.packed_size(torch.empty(numbers, device="meta"))


# ---- training memory ---------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self, hidden: int, classes: int, layers: int) -> None:
        super().__init__()
        self.up, self.fc = nn.Linear(5, hidden, bias=False), nn.Linear(hidden, classes, bias=False)
        self.inner = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        for layer in self.inner:
            h = layer(h).tanh()
        return self.fc(h)


@pytest.mark.parametrize(("hidden", "layers", "batch"), [(16, 10, 300), (40, 6, 64), (64, 3, 1)])
def test_training_memory_between_bounds_by_hand(hidden: int, layers: int, batch: int) -> None:
    """Three numbers a parameter, the batch, one activation a layer; and at most three more of the largest tensors."""
    architecture = zoo.Made(
        {"a": Axis(hidden), "classes": Axis(3, scaled=False)}, lambda s: Chain(s["a"], s["classes"], layers)
    )
    numbers = 5 * hidden + layers * hidden**2 + 3 * hidden
    bytes_kept = 4 * (3 * numbers + 5 * batch + (layers + 1) * batch * hidden)
    largest = 4 * max(hidden**2, hidden * batch)
    cost = training_memory(architecture, {"a": hidden, "classes": 3}, (1,), (5,), batch)
    assert bytes_kept < cost < bytes_kept + 3 * largest


def test_estimates_of_memory_are_near_predictions() -> None:
    """The grid's parts are estimates; the full model is met exactly, and sub-models within a few percent."""
    architecture, conditions = resnet(depth=20), Conditions(batch_size=8)
    grid = cost_grid(architecture, CIFAR, "memory_bytes", conditions)
    assert grid.full == pytest.approx(training_memory(architecture, architecture.sizes(1.0), (9,), CIFAR, 8))
    for width, exits in ((0.25, (5,)), (0.5, (2, 6)), (0.8, (3, 5, 8)), (1.0, (4,))):
        built = training_memory(architecture, architecture.sizes(width), exits, CIFAR, 8)
        assert grid.compute(width, exits) == built
        assert grid.estimate(width, exits) == pytest.approx(built, rel=0.08)
    twice = compute_cost(architecture, ({}, (9,)), CIFAR, "memory_bytes", Conditions(batch_size=16))
    assert twice > 1.7 * grid.full


CHILD = """
import sys, torch
from torch.nn import functional as F
from fleetfit.anatomy import build_module
from fleetfit.models.resnet import resnet
from fleetfit.seeds import make_torch_rng
torch.set_num_threads(1)
made, batch, width, exits = resnet(depth=20), int(sys.argv[1]), float(sys.argv[2]), tuple(map(int, sys.argv[3:]))
module = build_module(made, made.sizes(width), exits)
sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
def step(size):
    x, y = torch.randn(size, 3, 32, 32), torch.zeros(size, dtype=torch.int64)
    sum(F.cross_entropy(logits, y) for logits in module(x)).backward()
    sgd.step()
    sgd.zero_grad(set_to_none=False)
def peak():  # not ru_maxrss, which a child inherits from the process that started it
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
step(2)
before = peak()
step(batch), step(batch)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc, which only Linux has")
@pytest.mark.parametrize(("batch", "width", "exits"), [(64, 1.0, (9,)), (128, 0.5, (5, 9))])
def test_predicted_memory_is_near_a_process(batch: int, width: float, exits: tuple[int, ...]) -> None:
    """A child warms up with two samples, then trains: how much its peak grows, beside the predicted difference.

    Without the threshold the allocator keeps freed pieces, and the process looks larger than what is alive.
    """
    command = [sys.executable, "-c", CHILD, str(batch), str(width), *map(str, exits)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    architecture = resnet(depth=20)
    small, large = (training_memory(architecture, architecture.sizes(width), exits, CIFAR, size) for size in (2, batch))
    assert large - small == pytest.approx(int(done.stdout), rel=0.15)


# ---- latency -----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only modules move."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now / 4  # another process computes three quarters of the time


CLOCK = Clock()
RAN: list[int] = []  # widths of the modules that ran, one after another


class Slow(nn.Module):
    """Takes so long, each third time much longer."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds, self.calls, self.weight = seconds, 0, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        RAN.append(len(self.weight))
        CLOCK.now += self.seconds * (100 if self.calls % 3 == 0 else 1)
        return x * self.weight.sum()


class SlowStack(zoo.Stack):
    def __init__(self, sizes: Mapping[str, int], exits: tuple[int, ...], count: int) -> None:
        super().__init__(sizes, exits, count)
        a = sizes["a"]
        self.stem = Slow(0.001 * a, a)
        self.blocks = nn.ModuleList(Slow(0.002 * (i + 1) * a, a) for i in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): Slow(0.0005 * a, a) for e in exits})


@dataclass(frozen=True)
class Sluggish(zoo.Deep):
    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return SlowStack(axes, exits, self.blocks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(latency, "time", CLOCK)
    return CLOCK


def test_latency_is_a_median_and_its_parts_add_up(clock: Clock) -> None:
    """Six channels: 6 ms in the stem, 12, 24 and 36 ms in the blocks, 3 ms in each classifier; two passes of three."""
    conditions = Conditions()
    latency = get_latency(Sluggish(), {"a": 6, "classes": 3}, (1, 3), (5,), conditions)
    assert latency.median_s == pytest.approx(0.006 + 0.012 + 0.024 + 0.036 + 2 * 0.003)
    assert latency.spread_s > 10 * latency.median_s  # a third of the passes took a hundred times as long
    grid = cost_grid(Sluggish(), (5,), "latency_s", conditions)
    assert grid.full == pytest.approx(0.006 + 0.072 + 0.003)
    assert grid.estimate(0.5, (1, 2)) == pytest.approx((0.006 + 0.012 + 0.024 + 2 * 0.003) / 2)


def test_latencies_are_measured_once(clock: Clock) -> None:
    first = Conditions()
    grid = cost_grid(Sluggish(), (5,), "latency_s", first)
    before = grid.compute(0.5, (1, 2))
    recorded = {what: list(numbers) for what, numbers in first.measured.items()}
    clock.now += 1e6
    at = clock.now
    again = cost_grid(Sluggish(), (5,), "latency_s", Conditions(measured=recorded))
    assert again.compute(0.5, (1, 2)) == before
    assert (again.trunk == grid.trunk).all()
    assert clock.now == at  # no module ran


def in_turn(passes: int, threads: int = 1, widths: tuple[int, ...] = (6, 3)) -> tuple[list[Latency], list[int]]:
    """Latencies of sub-models of one block, and what was told of the passes."""
    turns: list[int] = []
    models = [TimedModel(Sluggish(), {"a": width, "classes": 3}, (1,), (5,)) for width in widths]
    RAN.clear()
    return measure_latencies(models, passes, threads, turns.append), turns


def test_latencies_are_measured_in_turn(clock: Clock) -> None:
    """A channel is 1 ms in the stem, 2 ms in the block, half a one in the classifier; 6 channels, then 3.

    Each module takes a hundred times as long in every third call, so a third of the passes. Three passes warm up, one
    begins each turn of ten, and 25 passes are three turns; no model runs more than its turn while the other waits.
    """
    latencies, passes = in_turn(25)
    assert [one.count for one in latencies] == [25, 25]
    assert [one.median_s for one in latencies] == pytest.approx([0.021, 0.0105])
    assert passes == [10, 20, 30, 40, 45, 50]
    turns = [(width, len(list(calls)) // 3) for width, calls in itertools.groupby(RAN)]
    assert turns == [(6, 3), (3, 3), (6, 11), (3, 11), (6, 11), (3, 11), (6, 6), (3, 6)]


def test_processor_seconds_are_measured_with_one_thread(clock: Clock) -> None:
    assert [one.processor_s for one in in_turn(9)[0]] == pytest.approx([0.021 / 4, 0.0105 / 4])
    assert [one.processor_share for one in in_turn(9)[0]] == pytest.approx([1 / 4, 1 / 4])
    assert [one.processor_s for one in in_turn(1, threads=2)[0]] == [None, None]


def test_measuring_in_turn_restores_threads(clock: Clock) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    measure_latencies([TimedModel(cnn(), cnn().sizes(0.25), (1,), (1, 8, 8))], 1, 2,
                      lambda _: seen.append(torch.get_num_threads()))  # fmt: skip
    assert seen == [2] and torch.get_num_threads() == before


def test_measuring_restores_threads_and_randomness() -> None:
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert get_latency(cnn(), cnn().sizes(0.25), (1,), (1, 8, 8), Conditions()).median_s > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


# ---- tensors with several names or uses ----------------------------------------------------------------------------

PLACES, CHANNELS, WORDS = 12, 32, 50
BLOCK = PLACES * 8 * CHANNELS**2 + 2 * PLACES**2 * CHANNELS
"""The products of a block: four matrices of attention, two of twice the channels; scores and their mean of values."""
TABLE = PLACES * CHANNELS * WORDS


class AttentionBlock(nn.Module):
    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 4, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 2 * channels), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + cast(Tensor, self.down(self.up(x).relu()))


class TiedWords(nn.Module):
    """Three blocks and logits of words, whose table is tied in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way == "head first":
            self.head = nn.Linear(CHANNELS, WORDS, bias=False)
        self.table = nn.Embedding(WORDS, CHANNELS)
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(3))
        if way == "weight":
            self.head = nn.Linear(CHANNELS, WORDS, bias=False)
            self.head.weight = self.table.weight
        elif way == "head first":
            self.table.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.table.weight) if self.way == "function" else cast(Tensor, self.head(x))


@pytest.mark.parametrize("way", ["weight", "head first", "function"])
def test_a_tied_table_counts_where_it_is_multiplied(way: str) -> None:
    """At full width, level e has e blocks and the product of each classifier."""
    tokens = torch.randint(WORDS, (2, PLACES), generator=make_torch_rng("tied"))
    words = derive_architecture(TiedWords(way), tokens)
    grid = cost_grid(words, (PLACES,), "multiply_adds")
    for exits in [(2,), (1, 2, 3)]:
        assert grid.estimate(1.0, exits) == exits[-1] * BLOCK + len(exits) * TABLE, exits
        counted = submodel_cost(words, (words.sizes(0.5), exits), (PLACES,)).multiply_adds
        assert grid.estimate(0.5, exits) == counted, exits


class TiedExits(nn.Module):
    """Linear blocks in which encoder and decoder share a matrix; all classifiers are the table of words."""

    def __init__(self, hidden: int, exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits = exits
        self.table = nn.Embedding(WORDS, hidden)
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(exits[-1]))
        self.shared = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, logits = self.table(x), []
        for i, block in enumerate(self.blocks, 1):
            x = self.shared(block(x)) if i in (1, 3) else block(x)
            if i in self.exits:
                logits.append(x.mean(1) @ self.table.weight.T)
        return logits


class TiedFamily(Architecture):
    def __init__(self) -> None:
        self.axes, self.blocks, self.positions, self.tokens = {"hidden": Axis(CHANNELS)}, 3, (1, 2, 3), WORDS

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return TiedExits(axes["hidden"], exits)


def test_a_shared_matrix_counts_at_each_use() -> None:
    """The shared matrix is used in blocks 1 and 3, the table at each exit, on the mean of all places."""
    grid = cost_grid(TiedFamily(), (PLACES,), "multiply_adds")
    for width, channels in ((1.0, 32), (0.5, 16), (0.25, 8)):
        for exits in [(1,), (2,), (3,), (1, 3), (1, 2, 3)]:
            matrices = exits[-1] + (1 if exits[-1] < 3 else 2)
            expected = matrices * PLACES * channels**2 + len(exits) * channels * WORDS
            assert grid.estimate(width, exits) == expected, (width, exits)
