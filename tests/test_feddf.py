"""FedDF: the server's distillation against plain loops in float64, and the server's own data."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support import Expected, aggregate_plainly, aggregate_updates, raises
from support.bits import assert_same_bits, has_same_bits
from support.training import assert_close, plain_outputs
from tiny import plain, spec_of, tiny, tiny_data, tiny_federation, tiny_server_data
from torch import Tensor, nn

import fleetfit
from fleetfit.aggregate import Aggregate, apply_mean
from fleetfit.anatomy import State, build_module, outputs
from fleetfit.config import load_experiment, to_toml
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Device, Federation, Job, Level, Local, Problem, Server, Simulation, Update
from fleetfit.core.tasks import classification, next_token
from fleetfit.data import Data, drop_labels
from fleetfit.engines.local import local as local_engine
from fleetfit.engines.pool import dump_setup, load_setup
from fleetfit.errors import ConfigError, DataError, RunError
from fleetfit.hooks import Method, build
from fleetfit.messages import pack, unpack
from fleetfit.methods.feddf import Distillation
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.submodel import Submodel, extract, full_submodel
from fleetfit.training import initial_state, run_on_server
from fleetfit.training.job import DIVERGED

SETTINGS = Settings(2, plain(lr=0.1, batch_size=8))


def update_of(problem: Problem, piece: Submodel, state: State, index: int) -> Update:
    return Update(0, index, index, 0, piece, piece, extract(problem.layout, state, piece), 10, {})


def received(federation: Federation) -> list[Update]:
    """Two clients of level 1, one of each other level, each with weights of its own and opinions that are firm."""
    problem, updates = federation.problem, []
    for i, level in enumerate((0, 0, 1, 2)):
        drawn = initial_state(problem, i)
        firm = {n: t * (10 if n == "heads.3.weight" else 1) for n, t in drawn.items()}
        updates.append(update_of(problem, federation.levels[level].submodel, firm, i))
    return updates


def by_width(spec: Mapping[str, Any], **model: Any) -> tuple[Federation, Simulation]:
    """The tiny fleet with one exit and three widths."""
    federation, simulation = tiny_federation(spec, exits=(3,), **model)
    problem = federation.problem
    levels = [Level(str(i + 1), problem.submodel(w, (3,)), w, w**2) for i, w in enumerate((0.5, 0.75, 1.0))]
    return replace(federation, levels=tuple(levels)), simulation


# ---- the loss -------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_by_hand(temperature: float) -> None:
    """Two teachers, three classes: KL(softmax(mean / T) || softmax(student / T)) T^2, summed over classes by hand.

    A model whose last layer has no weights says its biases, whatever it sees.
    """
    problem = Problem(tiny(classes=3), (1, 4, 4), classification, (3,))
    logits_by_level = {"narrow": (2.0, 0.0, -1.0), "wide": (0.0, 1.0, 3.0), "student": (0.5, -0.5, 0.0)}
    pieces = {"narrow": problem.submodel(0.5, (3,)), "wide": problem.submodel(1.0, (3,))}

    def saying(logits: tuple[float, ...]) -> State:
        state = dict(initial_state(problem, 0))
        return {**state, "heads.3.weight": torch.zeros(3, 8), "heads.3.bias": torch.tensor(logits)}

    teachers = [
        update_of(problem, piece, saying(logits_by_level[name]), i) for i, (name, piece) in enumerate(pieces.items())
    ]
    job = Job("train", 0, 1, 0, None, full_submodel(problem.layout), {}, {}, 0)
    loss = Distillation(job, Device(problem, tiny_server_data()), teachers, [], temperature)
    module = build_module(problem.architecture, problem.layout.full_sizes, (3,))
    module.load_state_dict(saying(logits_by_level["student"]))
    x = torch.randn(5, 1, 4, 4)
    mean = [(a + b) / 2 for a, b in zip(logits_by_level["narrow"], logits_by_level["wide"], strict=True)]
    p = [math.exp(z / temperature) for z in mean]
    q = [math.exp(z / temperature) for z in logits_by_level["student"]]
    p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
    expected = temperature**2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    torch.testing.assert_close(loss.compute_teacher_logits(x), torch.tensor([mean] * 5))
    assert loss(module, x, torch.empty(0)).item() == pytest.approx(expected, rel=1e-5)
    assert loss.get_metrics() == {}, "nothing was looked at that was held out"


def test_teachers_are_in_eval_mode_and_students_train() -> None:
    """With dropout of 0.9, teachers say the same twice and students do not."""
    torch.manual_seed(0)
    federation, simulation = by_width({"name": "feddf"}, dropout=0.9)
    problem, pieces = federation.problem, [level.submodel for level in federation.levels[:2]]
    device = replace(simulation.device(None), data=tiny_server_data())
    job = Job("train", 0, 1, 0, None, full_submodel(problem.layout), {}, {}, 0)
    loss = Distillation(job, device, received(federation), pieces, 1.0)
    x = torch.randn(9, 1, 4, 4)
    assert torch.equal(loss.compute_teacher_logits(x), loss.compute_teacher_logits(x))
    module = build_module(problem.architecture, problem.layout.full_sizes, (3,))
    several = [loss.compute_logits(module.train(), x) for _ in range(2)]
    assert all(not torch.equal(a, b) for a, b in zip(*several, strict=True))
    several = [loss.compute_logits(module.eval(), x) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*several, strict=True))


def test_padding_teaches_nothing() -> None:
    """What a teacher says at a padded place changes nothing; what it says of a token does."""
    federation, simulation = by_width({"name": "feddf"})
    padded = replace(tiny_server_data(), padding=0)
    device = replace(simulation.device(None), problem=replace(federation.problem, task=next_token), data=padded)
    job = Job("train", 0, 1, 0, None, full_submodel(federation.problem.layout), {}, {}, 0)
    loss = Distillation(job, device, [], [], 1.0)
    x = torch.tensor([[1, 2, 0], [3, 1, 2]])
    teacher = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))

    def with_other(row: int, place: int) -> Tensor:
        other = teacher.clone()
        other[row, place] = torch.tensor([9.0, 0.0, 0.0, -9.0])
        return loss._compute_divergence(other, nn.Embedding.from_pretrained(torch.eye(4)), x)

    divergence = loss._compute_divergence(teacher, nn.Embedding.from_pretrained(torch.eye(4)), x)
    assert divergence > 0
    assert torch.equal(with_other(0, 2), divergence)
    assert not torch.equal(with_other(1, 2), divergence)


# ---- the server's training -------------------------------------------------


class Plain:
    """Distillation written out: a network of matrices, torch's Adam and cosine, states noted at every check."""

    def __init__(self, federation: Federation, teachers: list[Update], data: Data, temperature: float) -> None:
        self.layout, self.temperature = federation.problem.layout, temperature
        self.pieces = [level.submodel for level in federation.levels]
        self.train, self.held = (data.batch(data.split(name))[0].double() for name in ("train", "validation"))
        self.says = {x: self._teach(teachers, x) for x in (self.train, self.held)}

    @staticmethod
    def _teach(teachers: list[Update], x: Tensor) -> Tensor:
        logits = [plain_outputs({n: t.double() for n, t in u.state.items()}, x, (3,))[-1] for u in teachers]
        return torch.stack(logits).mean(0)

    def _loss(self, leaves: State, x: Tensor) -> Tensor:
        p = torch.softmax(self.says[x] / self.temperature, 1)
        logits = []
        for piece in self.pieces:
            a, b = piece.sizes["a"], piece.sizes["b"]
            size = {8: a, 12: b, 16: 16, 4: 4}  # no two axes of the model are of one size
            cut = {n: t[tuple(slice(size[k]) for k in t.shape)] for n, t in leaves.items()}
            q = torch.log_softmax(plain_outputs(cut, x, (3,))[-1] / self.temperature, 1)
            logits.append((p * (p.log() - q)).sum(1).mean() * self.temperature**2)
        return torch.stack(logits).mean()

    def run(self, state: State, local: Local) -> list[tuple[float, State]]:
        """Return the held-out divergence and the state before the first step and at every check."""
        leaves = {n: t.double().clone().requires_grad_() for n, t in state.items()}
        adam = torch.optim.Adam(list(leaves.values()), lr=local.lr)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, local.max_steps or 1)
        logits = []
        for step in range((local.max_steps or 0) + 1):
            if step % (local.check_every or 1) == 0 or step == local.max_steps:
                with torch.no_grad():
                    logits.append(
                        (float(self._loss(leaves, self.held)), {n: t.detach().clone() for n, t in leaves.items()})
                    )
            adam.zero_grad()
            self._loss(leaves, self.train).backward()
            nn.utils.clip_grad_norm_(list(leaves.values()), local.clip_norm or math.inf)
            adam.step()
            falling.step()
        return logits


def whole_batches(**values: Any) -> dict[str, Any]:
    """Every step sees all samples, so that their order does not matter."""
    return {"name": "feddf", "batch_size": 1000, **values}


def merged(federation: Federation, updates: list[Update], server: Server) -> tuple[Aggregate, State]:
    """The aggregate, and the plain mean that it starts from."""
    mean = apply_mean(server.state, aggregate_plainly(federation, server, updates))
    return aggregate_updates(federation, server, updates), mean


@pytest.mark.parametrize(("temperature", "every"), [(1.0, 4), (3.0, 3)])
def test_the_server_trains_as_a_plain_loop_does(temperature: float, every: int) -> None:
    """The last step is looked at, whatever the rhythm.

    Without norm layers: a bias in front of one has no gradient but noise, which Adam makes into whole steps.
    """
    federation, _ = by_width(whole_batches(steps=8, check_every=every, lr=0.003, temperature=temperature), norm=False)
    updates = received(federation)
    state, mean = merged(federation, updates, start(federation))
    local = plain(0.003, max_steps=8, check_every=every, clip_norm=5.0)
    expected = Plain(federation, updates, tiny_server_data(), temperature).run(mean, local)
    divergences = [d for d, _ in expected]
    assert divergences == sorted(divergences, reverse=True)  # so the last state is the best
    assert_close(state.mean, expected[-1][1], atol=1e-5)
    assert state.metrics["steps"] == 8
    assert state.metrics["before"] == pytest.approx(divergences[0], rel=1e-4, abs=1e-6)
    assert state.metrics["after"] == pytest.approx(divergences[-1], rel=1e-4, abs=1e-6)


def test_the_settings_are_the_paper_s() -> None:
    """Adam at 1e-3 along a cosine of 10,000 steps, gradients cut at norm 5, a look every 100, patience of 10 looks."""
    aggregate: Any = build({"name": "feddf"}).make_aggregator
    assert aggregate.keywords["temperature"] == 1.0
    assert aggregate.keywords["local"] == Local(
        lr=1e-3, epochs=10_000, batch_size=64, clip_norm=5.0, max_steps=10_000, patience=10, check_every=100,
        optimizer="adam", schedule_in_round="cosine",
    )  # fmt: skip


def test_patience_keeps_the_best_state() -> None:
    """A learning rate that overshoots; the plain run says which check was the best, and when patience was over."""
    lr, every, patience, steps = 0.2, 2, 2, 60
    spec = whole_batches(steps=steps, check_every=every, patience=patience, lr=lr)
    federation, _ = by_width(spec, norm=False)
    updates = received(federation)
    state, mean = merged(federation, updates, start(federation))
    checks = Plain(federation, updates, tiny_server_data(), 1.0).run(
        mean, plain(lr, max_steps=steps, check_every=every, clip_norm=5.0)
    )
    best, stopped = 0, len(checks) - 1
    for i, (divergence, _) in enumerate(checks):
        best = i if divergence < checks[best][0] else best
        if i - best >= patience:
            stopped = i
            break
    assert stopped < len(checks) - 1 and 0 <= best < stopped, "the learning rate was to overshoot"
    assert state.metrics["steps"] == stopped * every
    assert_close(state.mean, checks[best][1], atol=1e-4)


def test_a_student_that_only_gets_worse_stays_the_mean() -> None:
    """The start is looked at too."""
    federation, _ = by_width({"name": "feddf", "steps": 20, "check_every": 5, "lr": 1e3})
    state, mean = merged(federation, received(federation), start(federation))
    assert all(torch.equal(state.mean[n], mean[n]) for n in mean)
    assert state.metrics["after"] == state.metrics["before"]


def test_students_move_towards_their_teachers() -> None:
    """On unlabeled data that they were not trained on, each level's model says more what the teachers' mean says."""
    federation, _ = by_width({"name": "feddf", "steps": 200, "check_every": 50, "lr": 0.01, "batch_size": 16})
    updates, problem = received(federation), federation.problem
    student_state, mean = merged(federation, updates, start(federation))
    data = tiny_server_data()
    x, _ = data.batch(data.split("validation"))

    def says(state: State, piece: Submodel) -> Tensor:
        module = build_module(problem.architecture, {**problem.layout.full_sizes, **piece.sizes}, piece.exits).eval()
        module.load_state_dict(dict(state))
        with torch.no_grad():
            return torch.softmax(outputs(module, x)[-1], 1)

    logits = torch.stack([says(u.state, u.submodel).log() for u in updates])
    target = torch.softmax(logits.mean(0), 1)  # log p differs from the logits by a constant, which softmax forgets
    for level in federation.levels:
        before, after = (F.kl_div(says(extract(problem.layout, s, level.submodel), level.submodel).log(), target,
                                  reduction="batchmean") for s in (mean, student_state.mean))  # fmt: skip
        assert float(after) < 0.5 * float(before)


# ---- a round -------------------------------------------------


def rounds_of(federation: Federation, simulation: Simulation, server: Server | None = None) -> Server:
    *_, last = run(federation, local_engine(simulation), SETTINGS, server or start(federation))
    assert not last.report["failures"]
    return last.server


def test_it_starts_from_heterofl_s_mean() -> None:
    heterofl, no_steps, feddf = (rounds_of(*by_width(spec)).state for spec in (
        {"name": "heterofl"}, {"name": "feddf", "steps": 0}, spec_of("feddf")))  # fmt: skip
    assert has_same_bits(heterofl, no_steps) and not has_same_bits(heterofl, feddf)
    federation, _ = by_width(spec_of("feddf"))
    updates = received(federation)
    plain = aggregate_plainly(federation, start(federation), updates)
    state, mean = merged(federation, updates, start(federation))
    assert has_same_bits(plain.mean, mean) and not has_same_bits(state.mean, mean)  # the whole model is covered


def test_unsent_parts_are_distilled_too() -> None:
    federation, _ = by_width(spec_of("feddf"))
    server = start(federation)
    small = [u for u in received(federation) if u.submodel == federation.levels[0].submodel]
    state, mean = merged(federation, small, server)
    plain = aggregate_plainly(federation, server, small)
    outside = plain.coverage["stem.weight"] == 0
    assert bool(outside.any()) and not torch.equal(state.mean["stem.weight"][outside], mean["stem.weight"][outside])
    assert all(bool((t > 0).all()) for t in state.coverage.values())
    assert torch.equal(state.coverage["stem.weight"][~outside], plain.coverage["stem.weight"][~outside])


def test_a_round_without_updates_distils_nothing() -> None:
    federation, _ = by_width(spec_of("feddf"))
    server = start(federation)
    state = aggregate_updates(federation, server, [])
    assert_same_bits(apply_mean(server.state, state), server.state)


def test_interrupted_and_taken_up_again() -> None:
    federation, simulation = by_width(spec_of("feddf"), dropout=0.2)
    unbroken = rounds_of(federation, simulation)
    first, _ = run_round(federation, local_engine(simulation), SETTINGS, start(federation))
    assert_same_bits(rounds_of(federation, simulation, first).state, unbroken.state)


def test_server_options_start_from_the_distilled_state() -> None:
    """FedAvgM without momentum changes nothing, bit for bit."""
    plain = rounds_of(*by_width(spec_of("feddf")))
    still = rounds_of(*by_width({**spec_of("feddf"), "options": {"fedavgm": {"momentum": 0.0}}}))
    moved = rounds_of(*by_width({**spec_of("feddf"), "options": {"fedavgm": {}}}))
    assert has_same_bits(plain.state, still.state) and not has_same_bits(plain.state, moved.state)


def test_options_of_the_clients_do_not_reach_the_server() -> None:
    """A penalty on the clients' loss is none on the server's: with an engine that answers the same, the same bits."""
    federation, _ = by_width(spec_of("feddf"))
    other, _ = by_width({**spec_of("feddf"), "options": {"fedprox": {"mu": 10.0}}})
    updates, server = received(federation), start(federation)
    assert_same_bits(merged(federation, updates, server)[0].mean, merged(other, updates, server)[0].mean)


def threads_seen(job: Job, device: Device, seen: list[int]) -> Any:
    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return outputs(module, x)[-1].sum()

    return loss


def test_the_server_s_job_runs_in_one_thread() -> None:
    federation, simulation = by_width({"name": "fedavg"})
    seen: list[int] = []
    state = start(federation).state
    job = Job("train", 4, 9, 0, None, full_submodel(federation.problem.layout), state,
              {"name": Method(make_loss=partial(threads_seen, seen=seen))}, 0, local=plain(0.0))  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        run_on_server(job, simulation.device(None))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
    with raises(RunError, 5, DIVERGED, key="method"):
        run_on_server(replace(job, local=plain().model_copy(update={"lr": math.inf})), simulation.device(None))


def test_feddf_without_server_data_is_refused() -> None:
    federation, _ = by_width(spec_of("feddf"))
    for device in (None, replace(federation.device or pytest.fail("no device"), unlabeled=None)):
        with raises(ConfigError, key="data.server"):
            merged(replace(federation, device=device), received(federation), start(federation))


# ---- the server's own data -------------------------------------------------


def test_unlabeled_data_keep_their_splits() -> None:
    data = tiny_data()
    unlabeled = drop_labels(data)
    assert set(unlabeled.y.tolist()) == {0} and unlabeled.classes == 1 and unlabeled.groups is None
    for name in ("train", "validation"):
        assert torch.equal(unlabeled.split(name), data.split(name))
    assert not len(unlabeled.split("test"))
    x, y = unlabeled.batch(data.split("train")[:5])
    assert torch.equal(x, data.batch(data.split("train")[:5])[0]) and y.tolist() == [0] * 5


def test_a_tenth_is_held_out_where_nothing_is() -> None:
    data = tiny_data()
    whole_set = data.share({"train": torch.cat([data.split("train"), data.split("validation")])})
    sets = [drop_labels(whole_set, seed) for seed in (0, 0, 1)]
    held = [set(d.split("validation").tolist()) for d in sets]
    assert len(held[0]) == len(whole_set.split("train")) // 10 and held[0] == held[1] != held[2]
    assert not held[0] & set(sets[0].split("train").tolist())
    with raises(DataError, key="data.server"):
        drop_labels(data.share({"test": data.split("test")}))


@pytest.mark.parametrize("task", ["classification", "regression", "multi_label"])
def test_labels_are_never_used(task: str) -> None:
    """Wrong labels, and targets that are no labels at all, give the same bits."""
    right = tiny_data(100, seed=9)
    y = {"classification": 3 - right.y, "regression": 1e30 * torch.ones(100, 4), "multi_label": torch.ones(100, 4)}[
        task
    ]
    poisoned = replace(right, y=y, task=task)
    states = []
    for data in (right, poisoned):
        federation, simulation = by_width(spec_of("feddf"))
        device = replace(federation.device or pytest.fail("no device"), unlabeled=drop_labels(data))
        states.append(rounds_of(replace(federation, device=device), simulation).state)
    assert has_same_bits(*states)


def test_workers_do_not_get_them() -> None:
    _, simulation = by_width({"name": "feddf"})
    assert simulation.unlabeled is not None
    sent = [pack(dump_setup(one, 1)) for one in (simulation, replace(simulation, unlabeled=None))]
    assert sent[0] == sent[1]
    assert load_setup(unpack(sent[0]), simulation.data, "cpu").device(None).unlabeled is None


# ---- [data] server -------------------------------------------------

HERE = Path(__file__)
SMALL = ["data.partition.clients=8", "rounds=1", "method.name=feddf"]


def other_digits() -> Data:
    """Noise of the shape of the digits, and no validation split."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 255, (60, 1, 8, 8)).astype(np.uint8))
    return Data("noise", x, torch.zeros(60, dtype=torch.int64), {"train": torch.arange(60)}, 2)


def large_images() -> Data:
    return Data("large", torch.zeros(9, 3, 16, 16, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64),
                {"train": torch.arange(9)}, 2)  # fmt: skip


def words(vocabulary: int = 9, padding: int = 0, length: int = 6) -> Data:
    y = torch.arange(40) % 2
    splits = dict(zip(("train", "validation", "test"), torch.arange(40).split([24, 8, 8]), strict=True))
    return Data(
        "words", torch.ones(40, length, dtype=torch.int64), y, splits, 2, vocabulary=vocabulary, padding=padding
    )


def test_a_run_file_names_the_servers_data() -> None:
    assembly = assemble(load_experiment({}, [*SMALL, f"data.server={{name='{HERE}:other_digits'}}"]))
    own = assembly.simulation.unlabeled
    assert own is not None and own.name == "noise" and len(own.split("validation")) == 6
    assert assembly.federation.device is not None and assembly.federation.device.unlabeled is own
    assert assembly.simulation.device(0).unlabeled is None


def test_it_is_written_with_its_defaults_and_read_back() -> None:
    written = to_toml(load_experiment({}, [*SMALL, "data.server={name='digits', seed=4}"]))
    assert "[data.server]" in written
    again = load_experiment(tomllib.loads(written))
    assert again.data.server is not None
    assert (again.data.server.name, again.data.server.settings) == (
        "digits",
        {"seed": 4, "validation": 0.1, "test": 0.2},
    )
    assert to_toml(again) == written


def test_an_object_may_stand_in_for_a_name() -> None:
    assembly = assemble(load_experiment({}, SMALL, data={"name": "digits", "server": {"name": other_digits()}}))
    assert assembly.simulation.unlabeled is not None and assembly.simulation.unlabeled.name == "noise"
    assert '"<Data>"' in to_toml(assembly.experiment)


def test_server_data_are_loaded_only_if_needed() -> None:
    """So that the rows of a comparison may share [data]."""
    for name in ("heterofl", "feddf"):
        changes = [*SMALL, f"method.name={name}", "data.server={name='digits'}", "method.steps=0"]
        assembly = assemble(load_experiment({}, changes if name == "feddf" else changes[:-1]))
        assert assembly.simulation.unlabeled is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], Expected('server = { name = "cifar100" }', key="data.server")),
        (["data.server={name='digitz'}"], Expected('"digits"', key="data.server.name")),
        (["data.server={name='digits', tset=0.1}"], Expected("[data] server digits", '"tset"', key="data.server.tset")),
        (["data.server={folder='x'}"], Expected("[data] server.name", key="data.server.name")),
        (["data.server=digits"], Expected("[data] server", "'digits'", key="data.server")),
        (
            [f"data.server={{name='{HERE}:large_images'}}"],
            Expected("large is [3, 16, 16]", "digits is [1, 8, 8]", key="data.server"),
        ),
        (
            [f"data.name={HERE}:words", f"data.server={{name='{HERE}:words', length=5}}"],
            Expected("[5]", "[6]", "length", key="data.server"),
        ),
        (
            [f"data.name={HERE}:words", f"data.server={{name='{HERE}:words', vocabulary=7}}"],
            Expected("words has 7 tokens and padding 0", "words 9 and 0", key="data.server"),
        ),
    ],
)
def test_wrong_server_data_are_refused(changes: list[str], expected: Expected) -> None:
    with raises(ConfigError, expected):
        assemble(load_experiment({}, [*SMALL, *changes]))


def test_paths_are_seen_from_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def load():\n    pass\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "run.toml").write_text('[data]\nserver = { name = "mine.py:load", folder = "here" }\n')
    server = load_experiment(tmp_path / "run.toml").data.server
    assert server is not None and server.name == f"{tmp_path / 'mine.py'}:load"
    assert server.settings["folder"] == str(tmp_path / "here")


def test_a_run_that_is_stopped_and_resumed(tmp_path: Path) -> None:
    """From Python, with everything read from its folder; the rounds report what the server did."""
    changes = [*SMALL, "rounds=2", "method.steps=4", "method.check_every=2", "local.epochs=1", "evaluate.every=0",
               f"data.server={{name='{HERE}:other_digits'}}"]  # fmt: skip

    def stop(report: Any) -> None:
        raise KeyboardInterrupt

    unbroken = fleetfit.run(load_experiment(None, changes), out=tmp_path / "unbroken")
    with pytest.raises(KeyboardInterrupt):
        fleetfit.run(load_experiment(None, changes), out=tmp_path / "stopped", on_round=stop)
    assert len(fleetfit.load(tmp_path / "stopped").metrics) == 1
    resumed = fleetfit.resume(tmp_path / "stopped")
    assert_same_bits(resumed.server.state, unbroken.server.state)
    for report in resumed.metrics:
        assert report["server"]["steps"] == 4 and report["server"]["after"] <= report["server"]["before"]


def texts(folder: Path, name: str, lines: list[str]) -> Path:
    (folder / name).mkdir()
    for split in ("train", "test"):
        rows = [f"{text},{i % 2}" for i, text in enumerate(lines * 6)]
        (folder / name / f"{split}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    return folder / name


def test_texts_are_cut_into_the_clients_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Word pieces are learned from the clients' texts only; a tokenizer of the server's own is refused."""
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    ours = texts(tmp_path, "ours", ["a good film", "a bad film", "no film"])
    theirs = texts(tmp_path, "theirs", ["bad news of films", "good news", "a film"])
    changes = [*SMALL, "data.partition.kind=iid", "data.partition.clients=2", "model.name=bert_tiny", "data.name=text",
               f"data.folder={ours}", "data.length=8", "data.vocabulary=40"]  # fmt: skip
    server = f"name='text', folder='{theirs}', length=8, vocabulary=40"
    assembly = assemble(load_experiment({}, [*changes, f"data.server={{{server}}}"]))
    own, data = assembly.simulation.unlabeled, assembly.data
    assert own is not None and own.tokenizer and own.vocabulary == data.vocabulary
    rows = [data.x[i].tolist() for i in range(len(data.x))]
    assert own.x[own.split("train")].tolist() and [r for r in own.x.tolist() if r in rows] == []
    film = set(data.x[(data.x[:, 1:4] > 3).all(1)][0].tolist())
    assert film & set(own.x.flatten().tolist()) - {0, 2, 3}  # they share pieces
    alone = assemble(load_experiment({}, [*changes, f"data.folder={theirs}", f"data.server={{{server}}}"])).data
    with raises(ConfigError, "[data] server", "theirs", "ours"):
        assemble(load_experiment({}, [*changes, f"data.server={{{server}, tokenizer='{alone.tokenizer}'}}"]))
