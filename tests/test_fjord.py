"""FjORD: the drawn widths, both losses and the average by plain loops, its work by hand, and what equals HeteroFL."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.bits import assert_same_bits
from support.engines import RecordingEngine, choose_always
from support.training import assert_close, make_job, plain_outputs, train_job
from tiny import plain, tiny_federation, tiny_problem
from torch import Tensor

from fleetfit.config import load_experiment
from fleetfit.core import Federation, Job, Level, Simulation, Update
from fleetfit.engines.local import local as local_engine
from fleetfit.hooks import build
from fleetfit.layout import State
from fleetfit.methods.fjord import DrawnWidthLoss, list_narrower
from fleetfit.planner import Targets
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.seeds import derive_seed
from fleetfit.submodel import Submodel

SIZES = [(4, 6), (6, 8), (8, 12)]
"""Channels of the axes a and b at the widths 0.5, 0.75 and 1: floors, of b in granules of two."""


def fleet(spec: Mapping[str, Any], **more: Any) -> tuple[Federation, Simulation]:
    """Clients of three widths of one exit, in turn."""
    federation, simulation = tiny_federation(spec, norm=False, **more)
    problem = federation.problem.replace_exits((3,))
    levels = tuple(
        Level(str(i + 1), problem.submodel(width, (3,)), width, needs)
        for i, (width, needs) in enumerate([(0.5, 0.2), (0.75, 0.5), (1.0, 1.0)])
    )
    assert [(level.submodel.sizes["a"], level.submodel.sizes["b"]) for level in levels] == SIZES
    problem = problem.replace_levels(level.submodel for level in levels)
    return replace(federation, problem=problem, levels=levels), replace(simulation, problem=problem)


def narrow(state: State, level: int) -> dict[str, Tensor]:
    """The first channels of every tensor of TinyNet; inputs and classes are whole."""
    a, b = SIZES[level]
    sizes = {"stem.weight": (a, 16), "stem.bias": (a,), "heads.3.weight": (4, a), "heads.3.bias": (4,)}
    for i in range(3):
        sizes |= {f"blocks.{i}.0.weight": (b, a), f"blocks.{i}.0.bias": (b,)}
        sizes |= {f"blocks.{i}.4.weight": (a, b), f"blocks.{i}.4.bias": (a,)}
    return {name: state[name][tuple(map(slice, sizes[name]))] for name in state if name in sizes}


def draw(job: Job, steps: int) -> list[int]:
    """The level of each step: uniform among those up to the client's, from a generator of the job's own."""
    rng = np.random.default_rng(derive_seed(job.seed, "width"))
    return [int(rng.integers(job.level + 1)) for _ in range(steps)]


def compute_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each sample -sum_c t_c log s_c; their mean."""
    return -(targets * (logits - logits.exp().sum(1, keepdim=True).log())).sum(1).mean()


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("distill", [True, False])
def test_local_training_is_a_plain_loop(level: int, distill: bool) -> None:
    """Each step: CE of the drawn slice; or CE of the widest, and of the drawn one against the widest's softmax.

    That cross-entropy differs from the divergence by the teacher's entropy, through which no gradient flows. At the
    widest it has no gradient: that of softmax(z) - softmax(z).
    """
    federation, simulation = fleet({"name": "fjord", "distill": distill})
    device, local = simulation.device(level), plain(lr=0.3, epochs=7, batch_size="all")
    job = make_job(federation, level, level, local=local)
    weights = {name: tensor.double() for name, tensor in job.state.items()}
    x, y = device.data.batch(device.data.split("train"))
    labels = F.one_hot(y, 4).double()
    drawn = draw(job, 7)
    assert set(drawn) == set(range(level + 1))
    for width in drawn:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        (student,) = plain_outputs(narrow(leaves, width), x.double(), (3,))
        loss = compute_cross_entropy(student, labels)
        if distill:
            (teacher,) = plain_outputs(leaves, x.double(), (3,))
            targets = teacher.detach().exp() / teacher.detach().exp().sum(1, keepdim=True)
            loss = compute_cross_entropy(teacher, labels) + compute_cross_entropy(student, targets)
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        weights = {name: w - 0.3 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    assert_close(train_job(job, device).state, weights)


def test_the_loss_of_a_step_by_hand() -> None:
    """The reported loss of one step: CE of the widest, and KL(t || s) = sum_c t_c (log t_c - log s_c) of the drawn."""
    federation, simulation = fleet({"name": "fjord"})
    device, local = simulation.device(2), plain(lr=0.3, epochs=1, batch_size="all")
    x, y = device.data.batch(device.data.split("train"))
    levels = set()
    for seed in range(6):
        job = make_job(federation, 2, 2, local=local, seed=seed)
        (width,) = draw(job, 1)
        rows = [plain_outputs(narrow(job.state, which), x, (3,))[0].double().tolist() for which in (2, width)]
        total = 0.0
        for z, s, label in zip(*rows, y.tolist(), strict=True):
            t, u = (np.exp(row) / np.exp(row).sum() for row in (z, s))
            total += -np.log(t[label]) + sum(t[c] * (np.log(t[c]) - np.log(u[c])) for c in range(4))
        assert train_job(job, device).metrics["loss"] == pytest.approx(total / len(y), rel=1e-5)
        levels.add(width)
    assert levels == {0, 1, 2}


def test_elements_outside_the_drawn_width_keep_their_bits() -> None:
    federation, simulation = fleet({"name": "fjord", "distill": False})
    device, local = simulation.device(2), plain(lr=0.3, epochs=1, batch_size="all")
    levels = set()
    for seed in range(6):
        job = make_job(federation, 2, 2, local=local, seed=seed)
        (width,) = draw(job, 1)
        update = train_job(job, device)
        assert update.submodel == job.submodel and not update.untrained, "it covers the widest"
        for name, tensor in update.state.items():
            inside = torch.zeros(tensor.shape, dtype=torch.bool)
            narrow({name: inside}, width)[name][...] = True
            assert torch.equal(tensor[~inside], job.state[name][~inside]), name
        assert not torch.equal(update.state["stem.weight"][:4], job.state["stem.weight"][:4])
        levels.add(width)
    assert levels == {0, 1, 2}


def test_widths_are_drawn_alike_and_anew_in_each_job() -> None:
    """3,000 steps: each of three widths 1,000 times, give or take 5 standard deviations of 26."""
    federation, simulation = fleet({"name": "fjord", "distill": False})
    counts: Counter[int] = Counter()
    orders = set()
    for seed in range(100):
        loss = make_loss(federation, simulation, seed=seed)
        order = tuple(measure_width(loss) for _ in range(30))
        counts.update(order)
        orders.add(order)
    assert set(counts) == {0, 1, 2} and all(abs(count - 1000) < 130 for count in counts.values())
    assert len(orders) == 100


def test_equally_wide_levels_are_one_width() -> None:
    """Of two levels of the smallest width and one of the largest, half of the steps draw the smallest."""
    federation, simulation = fleet({"name": "fjord", "distill": False})
    small, _, large = federation.problem.levels
    counts: Counter[int] = Counter()
    for seed in range(40):
        loss = make_loss(federation, simulation, seed=seed, levels=(small, small, large))
        counts.update(measure_width(loss) for _ in range(10))
    assert set(counts) == {0, 2} and abs(counts[0] - 200) < 50


def test_narrower_widths_are_the_first_of_a_client_s_channels() -> None:
    """Also where these are not the model's first ones."""
    federation, _ = fleet({"name": "fjord"})
    channels = {"a": (0, 1, 3, 4, 6, 7), "b": (2, 3, 4, 5, 8, 9, 10, 11), "classes": range(4)}
    job = make_job(federation, 1, 1, levels=federation.problem.levels)
    assert list_narrower(job) == [federation.levels[0].submodel]
    (narrower,) = list_narrower(replace(job, submodel=Submodel(channels, (3,))))
    assert narrower == Submodel({"a": (0, 1, 3, 4), "b": (2, 3, 4, 5, 8, 9), "classes": range(4)}, (3,))


def make_loss(federation: Federation, simulation: Simulation, **fields: Any) -> DrawnWidthLoss:
    job = make_job(federation, 2, 2, **{"levels": federation.problem.levels, **fields})
    return DrawnWidthLoss(job, simulation.device(2), distill=False)


def measure_width(loss: DrawnWidthLoss) -> int:
    """Return the level that the next step trains, from the channels of the stem that get a gradient."""
    stem = torch.nn.Linear(16, 8)
    torch.nn.init.ones_(stem.weight)
    module = tiny_problem(exits=(3,), norm=False).architecture.build({"a": 8, "b": 12, "classes": 4}, (3,))
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    loss(module, torch.ones(2, 1, 4, 4), torch.tensor([0, 1])).backward()
    gradient = module.get_parameter("heads.3.weight").grad
    assert gradient is not None
    return [a for a, _ in SIZES].index(int((gradient[0] != 0).sum()))


# ---- the average -------------------------------------------------


@pytest.mark.parametrize("clients", [(0, 1, 2, 3, 4, 5), (0, 1, 3, 4)])
def test_each_element_is_the_mean_by_samples_of_those_who_cover_it(clients: tuple[int, ...]) -> None:
    """sum n_i w_i / sum n_i over clients whose own width has the element; without any it keeps its bits."""
    spec = {"name": "fjord", "distill": False, "hooks": {"choose_clients": choose_always(*clients)}}
    federation, simulation = fleet(spec, shares=(3, 5, 7, 11, 13, 3))
    server, engine = start(federation), RecordingEngine(simulation)
    after, _ = run_round(federation, engine, Settings(1, plain(lr=0.3, batch_size=8)), server)
    updates = [reply for reply in engine.replies if isinstance(reply, Update)]
    assert len(updates) == len(clients) and len({update.num_examples for update in updates}) > 3
    for name, old in server.state.items():
        sums, weights = torch.zeros(old.shape, dtype=torch.float64), torch.zeros(old.shape)
        for update in updates:
            narrow({name: sums}, update.client % 3)[name].add_(update.state[name] * update.num_examples)
            narrow({name: weights}, update.client % 3)[name].add_(update.num_examples)
        covered = weights > 0
        torch.testing.assert_close(after.state[name][covered].double(), (sums / weights)[covered], rtol=1e-6, atol=1e-8)
        assert torch.equal(after.state[name][~covered], old[~covered])
        assert bool(covered.all()) == (2 in clients or name == "heads.3.bias")


@pytest.mark.parametrize("distill", [True, False])
def test_with_the_smallest_clients_alone_it_is_heterofl(distill: bool) -> None:
    """They have one width to draw: bit for bit, with dropout, momentum and unequal clients."""
    local = plain(lr=0.1, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size=6)
    states = []
    for spec in ({"name": "fjord", "distill": distill}, {"name": "heterofl"}):
        hooks = {"choose_clients": choose_always(0, 3), "weigh": "by_samples"}
        federation, simulation = fleet({**spec, "hooks": hooks}, shares=(3, 5, 7, 11, 13, 3), dropout=0.2)
        *_, last = run(federation, local_engine(simulation), Settings(2, local), start(federation))
        states.append(last.server.state)
    assert_same_bits(*states)


def test_a_resumed_run_draws_the_same_widths() -> None:
    federation, simulation = fleet({"name": "fjord", "distill": False})
    settings = Settings(3, plain(lr=0.3, batch_size=8))
    first, *_, last = run(federation, local_engine(simulation), settings, start(federation))
    *_, resumed = run(federation, local_engine(simulation), settings, first.server)
    assert_same_bits(last.server.state, resumed.server.state)


def test_the_levels_are_those_of_width() -> None:
    problem, targets = tiny_problem(exits=(3,)), Targets((0.3, 1.0), (0.25, 0.25))
    levels, expected = (build({"name": name}).make_levels(problem, targets) for name in ("fjord", "heterofl"))
    assert [level.submodel for level in levels] == [level.submodel for level in expected]


# ---- work and settings -------------------------------------------------


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("distill", [True, False])
def test_the_work_is_the_mean_over_the_widths(level: int, distill: bool) -> None:
    """Forward 16 a + 3 * 2 a b + 4 a multiply-adds, three times as many a step; 224, 408 and 736 for the widths.

    Without distillation the mean over the widths up to the client's. With it, the widest in every step, and the mean of
    the others, where a step that draws the widest adds nothing.
    """
    work = [16 * a + 6 * a * b + 4 * a for a, b in SIZES]
    assert work == [224, 408, 736]
    federation, simulation = fleet({"name": "fjord", "distill": distill})
    job = make_job(federation, level, level, local=plain(epochs=2, batch_size=8))
    update = train_job(job, simulation.device(level))
    drawn = sum(work[:level]) + (0 if distill else work[level])
    step = 3 * (drawn / (level + 1) + (work[level] if distill else 0))
    assert update.multiply_adds == 2 * update.num_examples * round(step)


def test_without_distillation_sgd_is_plain() -> None:
    """By default; momentum and decay move elements that a step does not draw. What a file says wins."""
    tables: dict[str, Any] = {"method": {"name": "fjord"}}
    assert load_experiment(tables).local.momentum == 0.9
    tables["method"]["distill"] = False
    local = load_experiment(tables).local
    assert (local.momentum, local.weight_decay) == (0.0, 0.0)
    assert load_experiment({**tables, "local": {"momentum": 0.5}}).local.momentum == 0.5
