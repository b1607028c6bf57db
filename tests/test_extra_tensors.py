"""Tensors beside the state: declared, validated, counted and resumed alike; and the options that send them, by hand."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import raises
from support.bits import assert_same_bits
from support.states import put_back
from support.training import assert_close, last_exit_loss, make_job, plain_sgd, train_job
from tiny import plain, tiny_federation
from torch import Tensor

import fleetfit as ff
from fleetfit.core import Device, Federation, Job, Level, LocalResult, Problem, Server, Simulation, Update
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.processes import processes
from fleetfit.errors import ConfigError
from fleetfit.hooks import ExtraShapes, Method, build
from fleetfit.hooks.movements import declare_elements
from fleetfit.layout import State
from fleetfit.messages import dump_job, dump_reply, job_size, load_job, load_reply, pack, reply_size, unpack
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.submodel import Submodel, extract, full_submodel
from fleetfit.validation import find_job_error, find_update_error

LOCAL = plain(lr=0.05, epochs=3, batch_size="all")
CHOSEN = {0: [0, 1, 2, 3], 1: [1, 2], 2: [0, 2, 5]}


def by_round(federation: Federation, server: Server, rng: Any) -> list[int]:
    return CHOSEN[server.round]


def fleet(option: str, *, equal: bool = False, hooks: Mapping[str, Any] = {}, **values: Any) -> tuple[Any, ...]:
    """Six clients of three levels, or all of the full one, and FedAvg with an option."""
    spec = {"name": "fedavg", "options": {option: values}, "hooks": {"choose_clients": by_round, **hooks}}
    federation, simulation = tiny_federation(spec, norm=False, shares=(3, 5, 7, 4, 6, 3))
    if equal:
        federation = replace(federation, levels=(replace(federation.levels[2], needs=0.0),))
    return federation, simulation


def final(federation: Federation, simulation: Simulation, local: Any = LOCAL) -> Server:
    engine, server = local_engine(simulation), start(federation)
    for _ in CHOSEN:
        server, report = run_round(federation, engine, Settings(3, local), server)
        assert not report["failures"] and "undone" not in report
    return server


def zeros_like(state: State) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


class Loop:
    """What all loops by hand need: pieces of full states as float64, and each client's data."""

    def __init__(self, federation: Federation, simulation: Simulation) -> None:
        self.federation, self.simulation, self.layout = federation, simulation, federation.problem.layout
        self.x = {name: tensor.double() for name, tensor in start(federation).state.items()}

    def level(self, client: int) -> Level:
        return self.federation.levels[int(self.federation.level_of[client])]

    def cut(self, full: State, piece: Submodel) -> State:
        return {name: tensor.double() for name, tensor in extract(self.layout, full, piece).items()}

    def spread(self, part: State, piece: Submodel) -> State:
        return put_back(self.layout, zeros_like(start(self.federation).state), piece, part)

    def batches(self, client: int, epochs: int) -> list[tuple[Tensor, Tensor]]:
        data = self.simulation.device(client).data
        return [data.batch(data.split("train"))] * epochs

    def samples(self, client: int) -> int:
        return len(self.simulation.device(client).data.split("train"))


# ---- SCAFFOLD, Algorithm 1, option II -------------------------------------------------------------------------------


def loop_scaffold(federation: Federation, simulation: Simulation, lr: float) -> State:
    loop = Loop(federation, simulation)
    c, own = zeros_like(loop.x), {client: zeros_like(loop.x) for client in range(6)}
    count = zeros_like(loop.x)
    for client in range(6):
        piece = loop.level(client).submodel
        one = {name: torch.ones_like(tensor) for name, tensor in loop.cut(c, piece).items()}
        count = {name: tensor + loop.spread(one, piece)[name] for name, tensor in count.items()}
    for chosen in CHOSEN.values():
        moved, seen, changes = zeros_like(loop.x), zeros_like(loop.x), zeros_like(loop.x)
        for client in chosen:
            piece = loop.level(client).submodel
            x, control, mine = (loop.cut(state, piece) for state in (loop.x, c, own[client]))

            def penalty(w: State, control: State = control, mine: State = mine) -> Any:
                return sum(((control[name] - mine[name]) * w[name]).sum() for name in w)

            y = plain_sgd(x, piece.exits, loop.batches(client, 3), last_exit_loss, LOCAL, penalty)
            change = {name: (x[name] - y[name]) / (3 * LOCAL.lr) - control[name] for name in x}
            for total, part in (
                (moved, {name: y[name] - x[name] for name in x}), (changes, change),
                (seen, {name: torch.ones_like(tensor) for name, tensor in x.items()}), (own[client], change),
            ):  # fmt: skip
                for name, tensor in loop.spread(part, piece).items():
                    total[name] += tensor
        loop.x = {n: loop.x[n] + lr * moved[n] / seen[n].clamp_min(1) for n in loop.x}
        c = {n: c[n] + changes[n] / count[n] for n in c}
    return loop.x


@pytest.mark.parametrize("lr", [1.0, 0.5])
@pytest.mark.parametrize("equal", [True, False])
def test_scaffold_is_algorithm_1(equal: bool, lr: float) -> None:
    federation, simulation = fleet("scaffold", equal=equal, lr=lr)
    assert_close(final(federation, simulation).state, loop_scaffold(federation, simulation, lr), atol=2e-5)


def test_controls_of_other_channels_are_kept() -> None:
    """c stays the mean of all c_i while channels roll: what a client forgot would be counted again."""
    federation, simulation = tiny_federation(
        {"name": "fedrolex", "options": {"scaffold": {}}}, norm=False, clients=3, cohort=3
    )
    engine, server = local_engine(simulation), start(federation)
    for _ in range(9):
        server, report = run_round(federation, engine, Settings(9, LOCAL), server)
        assert not report["failures"]
    memories = [entry["memory"]["control"] for entry in engine.dump_memories().values()]
    whole = full_submodel(federation.problem.layout)
    sums = zeros_like(server.state)
    for memory in memories:
        piece = Submodel({a: range(r["from"], r["to"]) for a, r in memory["channels"].items()}, tuple(memory["exits"]))
        for name, tensor in put_back(federation.problem.layout, zeros_like(sums), piece, memory["state"]).items():
            sums[name] = sums[name] + tensor
    name = "stem.bias"  # all clients have its block, and each all of its channels in turn
    assert len(memories) == 3 and whole.sizes["a"] == 8
    torch.testing.assert_close(server.memory["control"][name] * 3, sums[name], rtol=1e-4, atol=1e-5)


def test_workers_have_the_bits_of_local() -> None:
    """Also what a client stored beside its state, on the second visit."""
    spec = {"name": "heterofl", "options": {"scaffold": {}}}
    federation, simulation = tiny_federation(spec, norm=False)
    servers = []
    for engine in (local_engine(simulation), processes(simulation, workers=2)):
        with contextlib.closing(engine):
            *_, last = run(federation, engine, Settings(3, LOCAL), start(federation))
        assert not last.report["failures"]
        servers.append(last.server)
    assert_same_bits(servers[0].state, servers[1].state)
    assert_same_bits(servers[0].memory["control"], servers[1].memory["control"])


@pytest.mark.parametrize(
    ("option", "local", "key"),
    [
        ("scaffold", {"momentum": 0.9}, "local.momentum"),
        ("scaffold", {"optimizer": "adamw"}, "local.momentum"),
        ("fednova", {"optimizer": "adamw"}, "local.optimizer"),
        ("fednova", {"nesterov": True}, "local.optimizer"),
        ("fednova", {"schedule_in_round": "cosine"}, "local.optimizer"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused_before_a_round(
    option: str, local: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with raises(ConfigError, key=key):
        ff.run(method={"name": "fedavg", "options": {option: {}}}, local=local, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- FedNova ------------------------------------------------------------------------------------------------------


def epochs_by_client(job: Job, device: Device) -> Job:
    return replace(job, local=job.local.replace(epochs=1 + (device.id or 0) % 3))


def reaches(name: str, piece: Submodel) -> bool:
    """Whether the last exit's loss depends on a tensor: heads of earlier exits do not count."""
    return not name.startswith("heads") or name.startswith(f"heads.{piece.exits[-1]}.")


def loop_fednova(federation: Federation, simulation: Simulation, local: Any, momentum: float) -> State:
    loop, rho = Loop(federation, simulation), local.momentum
    velocity = zeros_like(loop.x)
    for chosen in CHOSEN.values():
        weights, scaled, lengths = zeros_like(loop.x), zeros_like(loop.x), zeros_like(loop.x)
        for client in chosen:
            piece, steps, n = loop.level(client).submodel, 1 + client % 3, loop.samples(client)
            x = loop.cut(loop.x, piece)
            y = plain_sgd(x, piece.exits, loop.batches(client, steps), last_exit_loss, local)
            a = sum(rho ** (later - k) for k in range(steps) for later in range(k, steps))  # each gradient's weight
            for total, part in (
                (scaled, {name: n * (y[name] - x[name]) / a for name in x}),
                (weights, {name: torch.full_like(tensor, n * reaches(name, piece)) for name, tensor in x.items()}),
                (lengths, {name: torch.full_like(tensor, n * a * reaches(name, piece)) for name, tensor in x.items()}),
            ):
                for name, tensor in loop.spread(part, piece).items():
                    total[name] += tensor
        for name in loop.x:
            has, w = weights[name] > 0, weights[name].clamp_min(1)
            step = momentum * velocity[name] + lengths[name] / w * scaled[name] / w
            velocity[name] = torch.where(has, step, velocity[name])
            loop.x[name] = torch.where(has, loop.x[name] + velocity[name], loop.x[name])
    return loop.x


@pytest.mark.parametrize(("rho", "momentum"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.5)])
@pytest.mark.parametrize("equal", [True, False])
def test_fednova_is_its_rule(equal: bool, rho: float, momentum: float) -> None:
    """Clients of 1 to 3 steps, with a gradient's weights added up one by one."""
    federation, simulation = fleet("fednova", equal=equal, hooks={"adapt_job": epochs_by_client}, momentum=momentum)
    local = plain(lr=0.05, epochs=1, batch_size="all", momentum=rho)
    expected = loop_fednova(federation, simulation, local, momentum)
    assert_close(final(federation, simulation, local).state, expected, atol=2e-5)


def report_text(job: Job, device: Device, result: LocalResult) -> Mapping[str, Any]:
    return {"a": "many" if device.id == 1 else 3.0}


def test_an_error_of_an_aggregator_costs_that_update_only() -> None:
    """The round is as if the client had not come: with an aggregator that reads what it sends."""
    states = []
    for chosen, report in ((CHOSEN[0], report_text), ([0, 2, 3], report_text)):
        hooks = {"choose_clients": lambda *arguments, chosen=chosen: chosen, "report": report}
        federation, simulation = fleet("fednova", hooks=hooks)
        server, report_ = run_round(federation, local_engine(simulation), Settings(3, LOCAL), start(federation))
        states.append(server.state)
        assert [failure["client"] for failure in report_["failures"]] == [1] * (1 in chosen)
        assert report_["train"]["clients"] == 3
    assert_close(states[0], {name: tensor.double() for name, tensor in states[1].items()}, atol=1e-5)


@pytest.mark.parametrize("option", ["scaffold", "fednova"])
def test_early_stopping_counts_the_steps_it_keeps(option: str) -> None:
    """The update is that of a job of as many steps as made the best weights."""
    federation, simulation = fleet(option)
    extra = federation.method.attach(federation, start(federation), 2, federation.levels[2].submodel)

    def train(**settings: Any) -> Update:
        local = plain(epochs=9, batch_size=8, **settings)
        return train_job(make_job(federation, 2, 2, local=local, extra=extra), simulation.device(2))

    stopped = train(lr=0.3, patience=2)
    ends = [train(lr=0.3, max_steps=most) for most in range(1, stopped.metrics["steps"] + 1)]
    (same,) = [end for end in ends if all(torch.equal(end.state[name], t) for name, t in stopped.state.items())]
    assert same.metrics["steps"] < stopped.metrics["steps"]
    assert same.metrics.get("a") == stopped.metrics.get("a")
    assert_same_bits(same.extra, stopped.extra)


@pytest.mark.parametrize("option", ["scaffold", "fednova"])
def test_a_round_at_a_rate_of_zero_changes_nothing(option: str) -> None:
    federation, simulation = fleet(option)
    server = start(federation)
    for lr in (0.05, 0.0):
        before = server
        server, report = run_round(federation, local_engine(simulation), Settings(3, LOCAL.replace(lr=lr)), before)
        assert not report["failures"]
    assert_close(server.state, {name: tensor.double() for name, tensor in before.state.items()}, atol=1e-7)


def test_fednova_of_many_steps_is_fedavg() -> None:
    """With equal a_i the step is FedAvg's, but for one subtraction, however large a is."""
    (nova, simulation), (average, _) = fleet("fednova", equal=True), fleet("fedprox", equal=True, mu=0.0)
    local = plain(lr=1e-4, epochs=300, batch_size="all", momentum=0.9)
    states = []
    for federation in (nova, average):
        server, report = run_round(federation, local_engine(simulation), Settings(3, local), start(federation))
        assert not report["failures"]
        states.append(server.state)
    assert_close(states[0], {name: tensor.double() for name, tensor in states[1].items()}, atol=5e-7)


# ---- FedDistill+ --------------------------------------------------------------------------------------------------


def loop_feddistill(federation: Federation, simulation: Simulation, weight: float) -> tuple[State, Tensor]:
    loop, prototypes, present = Loop(federation, simulation), torch.zeros(4, 4).double(), torch.zeros(4).bool()
    for chosen in CHOSEN.values():
        total, seen, sums, count = zeros_like(loop.x), zeros_like(loop.x), torch.zeros(4, 4).double(), torch.zeros(4)
        for client in chosen:
            piece, n = loop.level(client).submodel, loop.samples(client)
            w, outputs = loop.cut(loop.x, piece), []

            def loss(
                logits: list[Tensor], y: Tensor, outputs: list[Any] = outputs, present: Tensor = present
            ) -> Tensor:
                outputs.append((logits[-1].detach(), y))
                value = F.cross_entropy(logits[-1], y)
                rows = [i for i in range(len(y)) if present[y[i]]]
                if not rows:
                    return value
                log_q = F.log_softmax(logits[-1], 1)
                terms = []
                for i in rows:
                    p = prototypes[y[i]].softmax(0)
                    terms.append((p * (p.log() - log_q[i])).sum())
                return value + weight * torch.stack(terms).mean()

            for batch in loop.batches(client, 3):
                w = plain_sgd(w, piece.exits, [batch], loss, LOCAL)
            for c in range(4):
                own = [z[y == c] for z, y in outputs if bool((y == c).any())]
                if own:
                    sums[c] += torch.cat(own).mean(0)
                    count[c] += 1
            weighed = {name: n * reaches(name, piece) * tensor for name, tensor in w.items()}
            for name, tensor in loop.spread(weighed, piece).items():
                total[name] += tensor
            ones = {name: torch.full_like(tensor, n * reaches(name, piece)) for name, tensor in w.items()}
            for name, tensor in loop.spread(ones, piece).items():
                seen[name] += tensor
        loop.x = {n: torch.where(seen[n] > 0, total[n] / seen[n].clamp_min(1), loop.x[n]) for n in loop.x}
        has = count > 0
        prototypes[has], present = sums[has] / count[has][:, None], present | has
    return loop.x, prototypes


def test_feddistill_is_its_rule() -> None:
    """Full models: prototypes of outputs while they train, and the divergence from them from the second round on."""
    federation, simulation = fleet("feddistill", weight=0.7)
    expected, prototypes = loop_feddistill(federation, simulation, 0.7)
    server = final(federation, simulation)
    assert_close(server.state, expected, atol=2e-5)
    torch.testing.assert_close(server.memory["prototypes"][:, :4].double(), prototypes, rtol=1e-4, atol=1e-5)


# ---- the contract -------------------------------------------------------------------------------------------------


def sending(down: Callable[..., Any], up: Callable[..., Any]) -> Method:
    """A method that declares one tensor [3] each way, and sends what it is told."""
    shapes = ExtraShapes({"d": (3,)}, {"u": (3,)})
    return Method(
        declare_extra=lambda problem, submodel: shapes, attach=lambda *arguments: down(), report=lambda *arguments: up()
    )


def ones() -> Tensor:
    return torch.ones(3)


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "another name": lambda: {"x": ones()},
    "one more": lambda: {"d": ones(), "u": ones(), "x": ones()},
    "another shape": lambda: {"d": torch.ones(3, 1), "u": torch.ones(3, 1)},
    "another type": lambda: {"d": ones().double(), "u": ones().double()},
    "not finite": lambda: {"d": torch.tensor([1.0, math.nan, 1.0]), "u": torch.tensor([1.0, math.inf, 1.0])},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_other_tensors_than_declared_are_refused(wrong: str) -> None:
    """By the server that attaches them, by the device that reports them, and by the side that gets them."""

    def only(name: str) -> dict[str, Any]:
        tensors = WRONG[wrong]()
        return {key: tensor for key, tensor in tensors.items() if key in (name, "x")}

    federation, simulation = tiny_federation({"name": sending(lambda: {"d": ones()}, lambda: {"u": ones()})})
    engine = local_engine(simulation)
    bad_down = replace(federation, method=build({"name": sending(lambda: only("d"), lambda: {"u": ones()})}))
    with raises(ConfigError, key="attach"):
        run_round(bad_down, engine, Settings(1, LOCAL), start(federation))
    bad_up = {"name": sending(lambda: {"d": ones()}, lambda: only("u"))}
    _, report = run_round(replace(federation, method_spec=bad_up), engine, Settings(1, LOCAL), start(federation))
    assert report["train"]["clients"] == 0 and len(report["failures"]) == 4
    job = make_job(federation, 5, 2, extra={"d": ones()})
    update = train_job(job, simulation.device(5))
    assert find_update_error(update, job, federation) is None and find_job_error(job, federation.problem) is None
    assert find_update_error(replace(update, extra=only("u")), job, federation) is not None
    assert find_job_error(replace(job, extra=only("d")), federation.problem) is not None


def test_only_training_jobs_have_extra_tensors() -> None:
    federation, _ = tiny_federation({"name": sending(lambda: {"d": ones()}, lambda: {"u": ones()})})
    job = make_job(federation, 5, 2, kind="evaluate")
    assert find_job_error(job, federation.problem) is None
    assert find_job_error(replace(job, extra={"d": ones()}), federation.problem) is not None


def test_they_travel_and_count_in_bytes() -> None:
    federation, simulation = tiny_federation({"name": "fedavg", "options": {"scaffold": {}}})
    layout = federation.problem.layout
    size = sum(
        tensor.numel() for tensor in extract(layout, start(federation).state, federation.levels[1].submodel).values()
    )
    job = make_job(federation, 4, 1, extra={"control": torch.linspace(0, 1, size)}, local=LOCAL)
    update = train_job(job, simulation.device(4))
    for value, measure, dump, load in (
        (job, job_size, dump_job, load_job), (update, reply_size, dump_reply, load_reply),
    ):  # fmt: skip
        message = pack(dump(value, layout))
        back = load(unpack(message), layout)
        assert_same_bits(back.extra, value.extra)
        assert back.extra.keys() == {"control"}
        assert measure(value, layout) - measure(replace(value, extra={}), layout) > 4 * size
    assert job_size(job, layout) == len(pack(dump_job(job, layout)))


def test_a_number_for_each_element_may_go_down_alone() -> None:
    """As in FedCM: the server's momentum, for what the client trains; nothing comes back."""
    federation, _ = tiny_federation({"name": "fedavg", "options": {downwards: {}}})
    layout, level = federation.problem.layout, federation.levels[0].submodel
    shapes = federation.method.declare_extra(federation.problem, level)
    memory = {name: torch.randn_like(tensor) for name, tensor in start(federation).state.items()}
    server = replace(start(federation), memory={"momentum": memory})
    sent = federation.method.attach(federation, server, 0, level)
    expected = torch.cat([tensor.flatten() for tensor in extract(layout, memory, level).values()])
    assert shapes == ExtraShapes(down={"momentum": expected.shape}, up={})
    assert torch.equal(sent["momentum"], expected)


def downwards() -> Method:
    return Method(**declare_elements("momentum", up=False))


def declare_two(problem: Problem, submodel: Submodel) -> ExtraShapes:
    return ExtraShapes({"e": (1,)}, {"e": (1,)})


def first_part() -> Method:
    return sending(lambda: {"d": ones()}, lambda: {"u": ones(), "steps": 7})


def second_part() -> Method:
    return Method(
        declare_extra=declare_two, attach=lambda *arguments: {"e": torch.zeros(1)},
        report=lambda *arguments: {"e": torch.zeros(1), "text": "two"},
    )  # fmt: skip


def test_parts_add_up() -> None:
    spec = {"name": first_part(), "options": {f"{__name__}:second_part": {}}}
    federation, simulation = tiny_federation(spec)
    assert build(spec).declare_extra(federation.problem, federation.levels[0].submodel) == (
        {"d": (3,), "e": (1,)}, {"u": (3,), "e": (1,)},
    )  # fmt: skip
    job = make_job(federation, 5, 2, extra={"d": ones(), "e": torch.zeros(1)})
    update = train_job(job, simulation.device(5))
    assert isinstance(update, Update) and update.extra.keys() == {"u", "e"}
    assert update.metrics["text"] == "two" and update.metrics["steps"] == 7
