"""InclusiveFL against plain loops: who averages what, the momentum distillation, FedAdam on top, what is evaluated.

The network and the optimizer on the plain side are those of `test_train`: no module, no optimizer, float64.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.bits import assert_same_bits
from support.engines import MeddlingEngine, Reply
from support.training import assert_close, last_exit_loss, plain_sgd
from tiny import tiny_federation
from torch import Tensor

from fleetfit.anatomy import Axis, Layout, Segment, TensorLayout, infer_layout
from fleetfit.core import Failure, Federation, Level, Local, Server, Simulation
from fleetfit.engines.local import local as local_engine
from fleetfit.evaluation.levels import build_level_module, get_level_state
from fleetfit.methods.inclusivefl import find_own_blocks
from fleetfit.models.resnet import resnet
from fleetfit.rounds import Settings, run_round, start

LOCAL = Local(lr=0.1, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size="all")
# clients 0 and 3 are of level 1, 1 and 4 of level 2, 2 and 5 of level 3 (of the last level where there are two)
ROUNDS = [[0, 3, 1, 2], [0, 1, 5], [], [0, 2], [0, 1, 4, 5], [3, 1]]
Plain = dict[str, Tensor]


def by_depth(depths: tuple[int, ...], rounds: list[list[int]] = ROUNDS, **spec: Any) -> tuple[Federation, Simulation]:
    """A fleet with levels of these depths, at full width, and clients chosen by round."""
    hooks = {"choose_clients": lambda federation, server, rng: rounds[server.round]}
    federation, simulation = tiny_federation({"name": "inclusivefl", "hooks": hooks, **spec}, norm=False)
    problem = federation.problem
    levels = tuple(
        Level(str(i + 1), problem.submodel(1.0, (d,)), 1.0, 1.0 if d == 3 else 0.15 * d) for i, d in enumerate(depths)
    )
    return replace(federation, levels=levels), simulation


def after(federation: Federation, simulation: Simulation, rounds: int) -> list[Server]:
    engine, servers = local_engine(simulation), [start(federation)]
    for _ in range(rounds):
        server, report = run_round(federation, engine, Settings(9, LOCAL), servers[-1])
        assert not report["failures"]
        servers.append(server)
    return servers


class Reference:
    """The method in loops over levels, clients and tensors; `beta` None: no distillation at all."""

    def __init__(
        self, federation: Federation, simulation: Simulation, beta: float | None, damped: bool = False
    ) -> None:
        self.x: Plain = {n: t.double() for n, t in start(federation).state.items()}
        self.own: dict[int, Plain] = {}  # by depth
        self.m: dict[int, Plain] = {}  # by depth of the level that hands it down
        self.federation, self.simulation, self.beta, self.damped = federation, simulation, beta, damped
        self.depths = [level.submodel.depth for level in federation.levels]
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    def top(self, depth: int, name: str) -> bool:
        return depth < 3 and name.startswith(f"blocks.{depth - 1}.")

    def sent(self, depth: int) -> Plain:
        names = [n for n in self.x if n.startswith(("stem", f"heads.{depth}", *(f"blocks.{b}" for b in range(depth))))]
        mine = self.own.get(depth, self.x)
        return {n: mine[n] if self.top(depth, n) else self.x[n] for n in names}

    def round(self, chosen: list[int], adam: Mapping[str, float] | None = None) -> None:
        groups: dict[int, list[tuple[float, Plain]]] = {}
        for client in chosen:
            depth = self.depths[int(self.federation.level_of[client])]
            data = self.simulation.device(client).data
            batches = [data.batch(data.split("train"))] * LOCAL.epochs
            weights = plain_sgd(self.sent(depth), (depth,), batches, last_exit_loss, LOCAL)
            groups.setdefault(depth, []).append((float(len(data.split("train"))), dict(weights)))
        mean = {d: {n: sum(w * s[n] for w, s in g) / sum(w for w, _ in g) for n in g[0][1]} for d, g in groups.items()}
        g: dict[int, Plain] = {d: {n: t - self.sent(d)[n] for n, t in m.items()} for d, m in mean.items()}  # type: ignore[operator]
        below = dict(zip(self.depths[1:], self.depths, strict=False))
        for depth, least in below.items():
            for name in [n for n in g.get(least, {}) if self.top(least, n)]:
                key = name.split(".", 2)[2]
                if self.beta is not None and (depth in self.m or self.damped):
                    g[least][name] = self.beta * self.m.get(depth, {}).get(key, torch.zeros(())) + (1 - self.beta) * g[
                        least][name]  # fmt: skip
        self.m = {
            d: {key: sum(g[d][f"blocks.{b}.{key}"] for b in range(below[d], d)) / (d - below[d])  # type: ignore[misc]
                for key in ("0.weight", "0.bias", "4.weight", "4.bias")}
            for d in groups if d in below
        }  # fmt: skip
        new, own = dict(self.x), {d: dict(tensors) for d, tensors in self.own.items()}
        for name in self.x:  # what levels share
            those = [(sum(w for w, _ in groups[d]), g[d][name]) for d in groups
                     if name in g[d] and not self.top(d, name)]  # fmt: skip
            if those:
                moved = sum(w * t for w, t in those) / sum(w for w, _ in those)
                new[name] = self.x[name] + self.step(name, moved, adam)  # type: ignore[arg-type]
        for d in groups:
            for name in [n for n in g[d] if self.top(d, n)]:
                own.setdefault(d, {})[name] = self.sent(d)[name] + self.step(f"exit{d}/{name}", g[d][name], adam)
        self.x, self.own = new, own

    def step(self, name: str, moved: Tensor, adam: Mapping[str, float] | None) -> Tensor:
        """FedAdam (Reddi et al., Algorithm 2) on one tensor, or the movement itself."""
        if adam is None:
            return moved
        zero = torch.zeros_like(moved)
        m, v = self.moments.get(name, (zero, zero + adam["tau"] ** 2))
        m = adam["beta1"] * m + (1 - adam["beta1"]) * moved
        v = adam["beta2"] * v + (1 - adam["beta2"]) * moved**2
        self.moments[name] = m, v
        return adam["lr"] * m / (v.sqrt() + adam["tau"])

    def state(self) -> Plain:
        return self.x | {f"exit{d}/{n}": t for d, tensors in self.own.items() for n, t in tensors.items()}


@pytest.mark.parametrize("depths", [(1, 2, 3), (1, 3), (2, 3), (3,)], ids=str)
@pytest.mark.parametrize(("beta", "damped"), [(0.2, False), (0.2, True), (0.7, False), (0.0, True)])
def test_momentum_distillation_is_liu_et_al_s_formula(depths: tuple[int, ...], beta: float, damped: bool) -> None:
    """g <- beta m + (1 - beta) g on each level's last block, m from the round before, over six rounds in which levels
    come and go, and one of which nobody takes part in.
    """
    federation, simulation = by_depth(depths, beta=beta, damped=damped)
    plain = Reference(federation, simulation, None if beta == 0 else beta, damped)
    for server, chosen in zip(after(federation, simulation, len(ROUNDS))[1:], ROUNDS, strict=True):
        plain.round(chosen)
        assert_close(server.state, plain.state(), atol=2e-5)


def test_numbers_of_the_first_three_rounds() -> None:
    """Round 1 has no m: the last block of level 1 moves by its whole step, or by 0.8 of it where `damped`.

    In round 2 it moves by 0.2 m + 0.8 g, with m the mean of the movements that blocks 2 and 3 had in round 1 at level
    2, the only other one, whose blocks nobody else trains. Level 2 rests in rounds 3 and 4 and hands nothing down.
    """
    rounds = [[0, 2], [0, 2], [0], [0]]
    numbers = {}
    for name, more in (("off", {"beta": 0.0}), ("on", {}), ("damped", {"damped": True})):
        numbers[name] = after(*by_depth((1, 3), rounds, **more), rounds=2)
    name, key = "exit1/blocks.0.4.weight", "4.weight"
    first = numbers["off"][0].state["blocks.0.4.weight"]
    g = numbers["off"][1].state[name] - first
    assert g.abs().max() > 1e-3
    assert torch.equal(numbers["on"][1].state[name], numbers["off"][1].state[name])
    torch.testing.assert_close(numbers["damped"][1].state[name] - first, 0.8 * g, rtol=1e-4, atol=1e-7)
    before, now = numbers["on"][0].state, numbers["on"][1].state
    m = sum((now[f"blocks.{b}.{key}"] - before[f"blocks.{b}.{key}"]) for b in (1, 2)) / 2
    torch.testing.assert_close(numbers["on"][1].memory["movement"]["1"][f"block:{key}"], m)
    # level 2 is at the same state in both runs, and so is what level 1 begins round 2 with
    g2 = numbers["off"][2].state[name] - numbers["off"][1].state[name]
    torch.testing.assert_close(numbers["on"][2].state[name] - now[name], 0.2 * m + 0.8 * g2, rtol=1e-4, atol=1e-7)
    *_, third, fourth = after(*by_depth((1, 3), rounds), rounds=4)
    assert third.memory["movement"] == fourth.memory["movement"] == {}


def test_fedadam_goes_on_top() -> None:
    """The paper's server optimizer sees g after the distillation; a level's own block has its own moments."""
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "tau": 1e-6}
    federation, simulation = by_depth((1, 2, 3), options={"fedadam": adam})
    plain = Reference(federation, simulation, 0.2)
    for server, chosen in zip(after(federation, simulation, len(ROUNDS))[1:], ROUNDS, strict=True):
        plain.round(chosen, adam)
        # a g of about tau or less (a unit that is off) is divided by itself, so fp32 noise in it counts in full
        assert_close(server.state, plain.state(), atol=2e-4)
    assert set(server.memory) == {"first", "second", "movement", "movement_round"}


def test_each_level_has_its_own_last_block() -> None:
    federation, simulation = by_depth((1, 2, 3))
    server = after(federation, simulation, 2)[-1]
    state, (low, middle, high) = server.state, (get_level_state(federation, server, i) for i in range(3))
    name = "4.weight"
    assert torch.equal(low[f"blocks.0.{name}"], state[f"exit1/blocks.0.{name}"])
    assert torch.equal(middle[f"blocks.1.{name}"], state[f"exit2/blocks.1.{name}"])
    for shared in (middle, high):
        assert torch.equal(shared[f"blocks.0.{name}"], state[f"blocks.0.{name}"])
    assert torch.equal(high[f"blocks.2.{name}"], state[f"blocks.2.{name}"])
    assert not torch.equal(state[f"blocks.0.{name}"], state[f"exit1/blocks.0.{name}"])
    assert not any(key.startswith("exit3/") for key in state), "the deepest level's is the full model's"
    assert [sorted({k.split(".")[1] for k in piece if k.startswith("heads")}) for piece in (low, middle, high)] == [
        ["1"], ["2"], ["3"]]  # fmt: skip
    module = build_level_module(federation, server, 0, None)
    assert torch.equal(module.get_parameter(f"blocks.0.{name}"), state[f"exit1/blocks.0.{name}"])


def test_untrained_levels_use_the_full_model() -> None:
    federation, simulation = by_depth((1, 3), [[2, 5], [0, 2], [2]])
    _, first, second, third = after(federation, simulation, 3)
    assert "exit1/blocks.0.4.weight" not in first.state
    low = get_level_state(federation, first, 0)
    assert torch.equal(low["blocks.0.4.weight"], first.state["blocks.0.4.weight"])
    names = [name for name in second.state if name.startswith("exit1/")]
    assert len(names) == 4 and all(torch.equal(third.state[n], second.state[n]) for n in names)
    assert not torch.equal(third.state["blocks.0.4.weight"], second.state["blocks.0.4.weight"])


def test_rounds_of_failures_move_nothing() -> None:
    """Neither blocks nor moments: no update, so nothing to hand down and nothing for FedAdam."""
    federation, simulation = by_depth((1, 2, 3), options={"fedadam": {}})
    before = after(federation, simulation, 1)[-1]

    def fail(index: int, reply: Reply) -> Reply:
        return Failure(reply.round, reply.index, reply.client, reply.level, reply.dispatched, "lost")

    server, report = run_round(federation, MeddlingEngine(simulation, fail), Settings(9, LOCAL), before)
    assert "undone" not in report and [failure["client"] for failure in report["failures"]] == [5, 1, 0]
    assert_same_bits(server.state, before.state)
    assert_same_bits(server.memory["second"], before.memory["second"])


def test_blocks_of_other_names_hand_their_movement_down() -> None:
    """Two blocks whose tensors' names begin with `body.0` and `body.1.inner`, and a head."""
    dims = ((Segment("a"),),)
    tensors = {f"body.0.{key}": TensorLayout(dims, 0, None, True) for key in ("conv.weight", "norm.bias")}
    tensors |= {f"body.1.inner.{key}": TensorLayout(dims, 1, None, True) for key in ("conv.weight", "norm.bias")}
    layout = Layout({"a": Axis(4)}, (1, 2), {**tensors, "head": TensorLayout(dims, None, 2, True)})
    assert find_own_blocks(layout, (1, 2)).top == {
        1: {"block:conv.weight": "exit1/body.0.conv.weight", "block:norm.bias": "exit1/body.0.norm.bias"},
        2: {"block:conv.weight": "body.1.inner.conv.weight", "block:norm.bias": "body.1.inner.norm.bias"},
    }


def test_movements_pass_between_equal_shapes() -> None:
    """ResNet-14 has two blocks in each of three stages, and the first of a stage has a shortcut of its own.

    The last block of a level of one block learns from block 2, which has its stage's shapes; that of a level of two
    blocks, at the end of its stage, learns from nobody, and beta does nothing there.
    """
    own_blocks = find_own_blocks(infer_layout(resnet(depth=14), (1, 2, 4, 6)), (1, 2, 4, 6))
    blocks = {
        depth: [next(iter(b.values())).split("blocks.")[1].split(".")[0] for b in further]
        for depth, further in own_blocks.further.items()
    }
    assert blocks == {2: ["1"], 4: [], 6: []}
    assert own_blocks.below == {2: 1, 4: 2, 6: 4}
    assert {n.split("/")[0] for n in own_blocks.layout.tensors if "/" in n} == {"exit1", "exit2", "exit4", "exit6"}
