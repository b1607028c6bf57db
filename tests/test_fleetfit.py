"""FleetFit's method: loss and server by hand, its defaults, what takes the place of a part, what it goes with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import data_of
from support import raises
from support.bits import assert_same_bits
from support.secure import TINY, merge_tables
from support.training import assert_close, make_job, plain_sgd, tiny_fleet, train_job
from tiny import plain, tiny_federation
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.aggregate import Aggregate
from fleetfit.config import load_experiment, to_table
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Device, Federation, Server, Simulation
from fleetfit.core.tasks import Task, classification, multi_label, next_token, regression
from fleetfit.data import Data
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError
from fleetfit.hooks import FEDAVG, build
from fleetfit.layout import State
from fleetfit.options import fedadam
from fleetfit.rounds import Settings, run, start
from fleetfit.rounds.report import LEFT_OUT

# ---- the loss ------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """A module whose exits say the same, whatever the input."""

    def __init__(self, exits: Sequence[Any]) -> None:
        super().__init__()
        self.exits = [torch.tensor(exit, dtype=torch.float64) for exit in exits]

    def forward(self, x: Any) -> list[Tensor]:
        return self.exits


def compute_loss(task: Task, exits: Sequence[Any], y: Any, **settings: float) -> float:
    """Return the loss of the method's hook for outputs and targets of a task."""
    federation, simulation = tiny_fleet({"name": "fleetfit", **settings})
    device: Device = simulation.device(2)
    device.problem = replace(device.problem, task=task)
    loss = build(federation.method_spec).make_loss(make_job(federation, 2, 2), device)
    return float(loss(Fixed(exits), None, torch.tensor(y)))


def softmax(row: Sequence[float]) -> list[float]:
    return [math.exp(v) / sum(math.exp(w) for w in row) for v in row]


def log_sum(row: Sequence[float]) -> float:
    return math.log(sum(math.exp(v) for v in row))


EXITS = [[[0.2, -1.0, 0.5], [1.0, 0.0, -1.0]], [[2.0, 0.1, -0.3], [0.4, 0.5, 0.6]], [[1.5, -0.5, 0.0], [0.0, 2.0, 1.0]]]
LABELS = [0, 2]


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 3.0), (0.5, 3.0), (2.0, 1.0)])
def test_exits_count_alike_and_learn_from_the_deepest(beta: float, temperature: float) -> None:
    """L = 1/l sum_i [CE_i + [i < l] beta T^2 sum_c t_c log(t_c / s_c)], over a mean of two samples."""
    total = 0.0
    for index, rows in enumerate(EXITS):
        for row, deepest, y in zip(rows, EXITS[-1], LABELS, strict=True):
            total += log_sum(row) - row[y]
            if index < 2:
                teacher, student = (softmax([v / temperature for v in z]) for z in (deepest, row))
                divergence = sum(t * math.log(t / s) for t, s in zip(teacher, student, strict=True))
                total += beta * temperature**2 * divergence
    loss = compute_loss(classification, EXITS, LABELS, beta=beta, temperature=temperature)
    assert loss == pytest.approx(total / (3 * 2), rel=1e-12)


def test_one_third_for_each_of_three_equal_exits() -> None:
    """Two classes, logits (ln 3, 0): softmax (3/4, 1/4). Of the first class CE is ln(4/3), and no exit differs."""
    rows = [[[math.log(3), 0.0]]] * 3
    assert compute_loss(classification, rows, [0]) == pytest.approx(math.log(4 / 3), rel=1e-12)


def test_of_a_regression_exits_learn_the_deepest_s_value() -> None:
    """Targets 2; exits say 1 and 3: squares 1 and 1, and half of (1 - 3)^2 = 4: (1 + 2 + 1) / 2."""
    assert compute_loss(regression, [[[1.0]], [[3.0]]], [[2.0]]) == pytest.approx(2.0)


def test_of_next_tokens_padding_does_not_count() -> None:
    """Of two positions the second is padding: the loss of the first alone, whatever the logits of the second."""
    rows = [[[[0.0, 1.0], [9.0, -9.0]]], [[[2.0, 0.0], [-9.0, 9.0]]]]
    alone = compute_loss(classification, [[[0.0, 1.0]], [[2.0, 0.0]]], [1])
    assert compute_loss(next_token, rows, [[1, -100]]) == pytest.approx(alone, rel=1e-12)


def test_of_several_labels_each_is_a_coin() -> None:
    """One label, target 1, logits 0 and ln 3, T 1: CE ln 2 and ln 4/3; KL((3/4, 1/4) || (1/2, 1/2)) = ln 2 - H."""
    entropy = math.log(4) - 0.75 * math.log(3)
    expected = (math.log(2) + 0.5 * (math.log(2) - entropy) + math.log(4 / 3)) / 2
    loss = compute_loss(multi_label, [[[0.0]], [[math.log(3)]]], [[1.0]], temperature=1.0)
    assert loss == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("tau", [0.0, 1.0, 0.5])
def test_training_is_plain_sgd_on_that_loss(tau: float) -> None:
    """Gradients flow into the deepest exit from its own cross-entropy only, and the class prior is in that alone."""
    federation, simulation = tiny_fleet({"name": "fleetfit", "tau": tau}, norm=False)
    device, local = simulation.device(2), plain(lr=0.3, epochs=3, batch_size="all")
    x, y = device.data.batch(device.data.split("train"))
    fleet = (0.4, 0.3, 0.2, 0.1)
    counts = [sum(int(label) == c for label in y) for c in range(4)]
    offset = [tau * (math.log((n + 1) / (len(y) + 4)) - math.log(p)) for n, p in zip(counts, fleet, strict=True)]

    def loss(logits: list[Tensor], y: Tensor) -> Tensor:
        teacher = torch.softmax(logits[-1].detach() / 3, 1)
        total = torch.zeros((), dtype=torch.float64)
        for i, z in enumerate(logits):
            logs = torch.log_softmax(z + torch.tensor(offset, dtype=torch.float64), 1)
            total = total - logs[range(len(y)), y].mean()
            if i < len(logits) - 1:
                kl = (teacher * (teacher.log() - torch.log_softmax(z / 3, 1))).sum(1).mean()
                total = total + 0.5 * 9 * kl
        return total / len(logits)

    job = make_job(federation, 2, 2, local=local, prior=fleet)
    update = train_job(job, device)
    assert update.submodel.exits == (1, 2, 3)
    assert_close(update.state, plain_sgd(job.state, (1, 2, 3), [(x, y)] * 3, loss, local))


# ---- the server ----------------------------------------------------------------------------------------------------


def test_the_server_s_momentum_by_hand() -> None:
    """From x = 1: mean 2, v 1, x 2; mean 3, v 0.5 + 1, x 3.5; without a client both stay; mean 3.5, v 0.75, x 4.25."""
    step, server = build({"name": "fleetfit"}).step, Server({"w": torch.tensor([1.0])})
    federation, _ = tiny_federation({"name": "fleetfit"})
    states = []
    for mean in (2.0, 3.0, None, 3.5):
        means = {"w": torch.tensor([math.nan if mean is None else mean])}
        coverage = {"w": torch.tensor([0.0 if mean is None else 3.0])}
        server = step(federation, server, Aggregate(means, coverage), [])
        states.append(server.state["w"].item())
    assert states == [2.0, 3.5, 3.5, 4.25]


def finish(spec: Mapping[str, Any]) -> State:
    federation, simulation = tiny_federation(spec, dropout=0.2)
    *_, last = run(federation, local_engine(simulation), Settings(3, plain(epochs=2, batch_size=8)), start(federation))
    assert last.report["train"]["clients"] == 4
    return last.server.state


@pytest.mark.parametrize("momentum", [0.5, 0.8])
def test_momentum_is_that_of_fedavgm(momentum: float) -> None:
    own = finish({"name": "fleetfit", "momentum": momentum})
    option = {"fedavgm": {"momentum": momentum}}
    assert_same_bits(own, finish({"name": "fleetfit", "momentum": 0.0, "options": option}))
    without = finish({"name": "fleetfit", "momentum": 0.0})
    assert not all(torch.equal(own[name], without[name]) for name in own)


@pytest.mark.parametrize("option", ["fedadam", "fedavgm", "fedyogi", "feddyn"])
def test_another_server_optimizer_takes_the_place_of_the_momentum(option: str) -> None:
    spec = {"name": "fleetfit", "options": {option: {}}}
    assert_same_bits(finish(spec), finish({**spec, "momentum": 0.0}))


def test_the_class_prior_is_that_of_the_option() -> None:
    own = finish({"name": "fleetfit", "tau": 0.7})
    option = {"options": {"class_prior": {"tau": 0.7}}}
    assert_same_bits(own, finish({"name": "fleetfit", **option}))
    assert_same_bits(own, finish({"name": "fleetfit", "tau": 0.0, **option}))
    without = finish({"name": "fleetfit", "tau": 0.0})
    assert not all(torch.equal(own[name], without[name]) for name in own)


@pytest.mark.parametrize(
    ("key", "values", "option"),
    [*(("momentum", (0.5, 0.7), option) for option in ("fedadam", "fedavgm", "fedyogi")),
     ("tau", (1.0, 0.5), "class_prior")],
)  # fmt: skip
def test_both_at_once_are_refused(key: str, values: Sequence[float], option: str) -> None:
    """With the default of the key written out, too."""
    for value in values:
        table = {"method": {"name": "fleetfit", key: value, "options": {option: {}}}}
        with raises(ConfigError, key, option, key=f"method.{key}"):
            assemble(load_experiment(merge_tables(TINY, table)))
    assert build({"name": "fleetfit", key: 0.3, "options": {"fedprox": {"mu": 0.1}}}).step is not FEDAVG.step


def test_two_options_never_take_the_same_place() -> None:
    with raises(ConfigError, key="method.hooks.step"):
        build({"name": "fleetfit", "options": {"fedadam": {}, "fedavgm": {}}})


# ---- defaults and switches, in a run file --------------------------------------------------------------------------


def test_a_run_records_what_it_began_with(tmp_path: Path) -> None:
    table = merge_tables(TINY, {"method": {"name": "fleetfit"}})
    first = ff.run(table, out=tmp_path / "run")
    config = to_table(load_experiment(tmp_path / "run" / "config.toml"))
    assert config["local"]["schedule"] == {"kind": "cosine", "minimum": 0.01}
    assert config["method"] == {"name": "fleetfit", "tau": 1.0, "beta": 0.5, "temperature": 3.0, "momentum": 0.5}
    assert [report["lr"] for report in first.metrics] == pytest.approx([0.05, 0.02525, 0.0005])
    again = ff.run(tmp_path / "run" / "config.toml", out=tmp_path / "again")
    assert_same_bits(first.server.state, again.server.state)


@pytest.mark.parametrize(("values", "beta"), [({}, 0.0), ({"beta": 0.5}, 0.5)])
def test_a_regression_distills_nothing_unless_beta_is_set(values: dict[str, float], beta: float) -> None:
    x = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
    data = Data("lines", x, x[:, :1], {"train": torch.arange(48), "test": torch.arange(48, 60)}, 1, task="regression")
    section = {"name": data, "partition": {"kind": "iid", "clients": 4}}
    table = {"model": {"name": "mlp"}, "data": section, "method": {"name": "fleetfit", **values}}
    assert assemble(load_experiment(table)).federation.method_spec["beta"] == beta


@pytest.mark.parametrize("schedule", [{"kind": "constant"}, {"kind": "step", "at": [2], "factor": 0.1}])
def test_a_schedule_of_one_s_own_wins(schedule: dict[str, Any]) -> None:
    table = {"method": {"name": "fleetfit"}, "local": {"schedule": schedule}}
    assert to_table(load_experiment(table))["local"]["schedule"] == schedule
    assert load_experiment({"method": {"name": "scalefl"}}).local.schedule.kind == "constant"
    assert load_experiment(table, ["method.name=heterofl"]).local.schedule.kind == schedule["kind"]


def test_a_record_with_options_in_their_place_has_no_momentum_and_no_tau() -> None:
    """Written out, both would be set; without them a resumed run is the same."""
    complete = load_experiment(merge_tables(TINY, {"method": {"name": "fleetfit", "options": PLUS}}))
    assert "tau" not in to_table(complete)["method"]
    assert (
        "momentum" not in to_table(complete)["method"]
        and to_table(complete)["method"]["options"]["fedadam"]["lr"] == 0.1
    )
    assert assemble(complete).federation.method.step.func is fedadam.step  # type: ignore[attr-defined]


PLUS: dict[str, Any] = {"fedadam": {}, "class_prior": {}}


@pytest.mark.parametrize(
    ("key", "value"), [("momentum", 1.0), ("momentum", -0.1), ("beta", -0.1), ("temperature", 0), ("tau", -1.0)]
)
def test_ranges(key: str, value: float) -> None:
    with raises(ConfigError, str(value), key=f"method.{key}"):
        build({"name": "fleetfit", key: value})


def test_a_run_says_what_is_left_with_one_exit() -> None:
    """All budgets 1 make one level, whose model has no early exit."""
    single = {"method": {"name": "fleetfit"}, "fleet": {"levels": [1.0], "groups": [{"budget": 1.0}]}}
    notes = assemble(load_experiment(merge_tables(TINY, single))).notes
    assert any("method.beta" in note for note in notes)
    several = assemble(load_experiment(merge_tables(TINY, {"method": {"name": "fleetfit"}}))).notes
    off = assemble(load_experiment(merge_tables(TINY, single, {"method": {"beta": 0.0}}))).notes
    assert not any("method.beta" in note for note in (*several, *off))
    notes_by_method = {
        next(note for note in assemble(load_experiment(merge_tables(TINY, single, {"method": values}))).notes
             if "method.beta" in note)
        for values in ({}, {"tau": 0.0}, {"momentum": 0.0}, {"tau": 0.0, "momentum": 0.0})
    }  # fmt: skip
    assert len(notes_by_method) == 4  # a part that is off is not named


# ---- what it goes with ---------------------------------------------------------------------------------------------

COMBINATIONS: dict[str, dict[str, Any]] = {
    "outliers": {"method": {"options": {"outliers": {}}}},
    "krum": {"method": {"options": {"krum": {}}}},
    "trimmed mean": {"method": {"options": {"trimmed_mean": {}}}},
    "AdaptiveFL's selection": {"cohort": {"selection": "rl", "fraction": 0.5}},
    "privacy": {"privacy": {"clipping_norm": 0.5, "noise_multiplier": 1.0}},
    "secure": {"secure": {"min_clients": 3}},
    "both": {"privacy": {"clipping_norm": 0.5, "noise_multiplier": 1.0},
             "secure": {"min_clients": 3, "clipping_range": 0.5}},
    "deadlines": {
        "cohort": {"deadline_s": 1.0, "on_deadline": "shallower"},
        "fleet": {"groups": [
            {"budget": b, "profile": {"multiply_adds_per_s": 2e5, "down_bytes_per_s": 1e6, "up_bytes_per_s": 1e6}}
            for b in (0.3, 0.55, 1.0)
        ]},
    },
    "compressed": {"local": {"compress": "int8"}},
    "rolling channels": {"method": {"hooks": {"choose_channels": "rolling"}}},
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINATIONS)
def test_two_rounds_with(name: str, tmp_path: Path) -> None:
    change = dict(COMBINATIONS[name])
    if "privacy" in change:
        pytest.importorskip("opacus", reason="the extra privacy is not installed")
        change["privacy"] = {**change["privacy"], "key_file": str(tmp_path / "keys" / "run.key")}
    if "secure" in change:
        pytest.importorskip("cryptography", reason="the extra secure is not installed")
    table = merge_tables(TINY, {"rounds": 2, "method": {"name": "fleetfit"}}, change)
    trained = ff.run(table, out=tmp_path / "run")
    assert trained.finished and not any("undone" in report for report in trained.metrics)
    assert {f["reason"] for report in trained.metrics for f in report["failures"]} <= {LEFT_OUT}
    first = start(trained.assembly.federation).state
    assert not all(torch.equal(first[key], tensor) for key, tensor in trained.server.state.items())
    velocity = trained.server.memory["velocity"]
    assert any(bool(tensor.any()) for tensor in velocity.values())


def test_local_and_processes_give_the_same_bits(tmp_path: Path) -> None:
    table = merge_tables(TINY, {"rounds": 2, "method": {"name": "fleetfit"}})
    runs = [ff.run(table, engine=engine, out=tmp_path / engine["name"])
            for engine in ({"name": "local"}, {"name": "processes", "workers": 2})]  # fmt: skip
    assert_same_bits(runs[0].server.state, runs[1].server.state)
    assert runs[0].columns == runs[1].columns


@pytest.mark.parametrize("mode", [{"name": "full"}, {"name": "frozen"}, {"name": "lora", "rank": 4}], ids=str)
def test_a_pretrained_transformer(mode: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint folder of BERT with 24 hidden units; the frozen part stays."""
    hf: Any = pytest.importorskip("transformers", reason="the library that writes the folder is not installed")
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
             "intermediate_size": 36, "max_position_embeddings": 20}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=4)).save_pretrained(tmp_path / "bert")
    trained = ff.run(
        {"rounds": 2, "method": {"name": "fleetfit"}, "local": {"epochs": 1, "lr": 0.01}, "cohort": {"count": 2},
         "fleet": {"levels": [{"depth": 1, "budget": 0.7}, {"budget": 1.0}], "tolerance": 0.3,
                   "groups": [{"budget": 0.7}, {"budget": 1.0}]}, "peft": mode},
        data={"name": data_of("bert", 60), "partition": {"kind": "iid", "clients": 4}},
        model={"name": "bert", "checkpoint": str(tmp_path / "bert")},
        out=tmp_path / "run",
    )  # fmt: skip
    assert trained.finished and not any(report["failures"] for report in trained.metrics)
    assert [len(level.submodel.exits) for level in trained.assembly.federation.levels] == [1, 2]
    assert bool(trained.assembly.federation.problem.base) == (mode["name"] != "full")


def test_a_client_without_a_second_exit_trains_its_own(tmp_path: Path) -> None:
    """The smallest level of tiny models has one exit: its loss is the plain one."""
    federation, simulation = tiny_fleet({"name": "fleetfit", "tau": 0.0})
    plain_federation, _ = tiny_fleet({"name": "fedavg"})
    own, other = (train_on_level_one(fed, simulation) for fed in (federation, plain_federation))
    assert_same_bits(own, other)


def train_on_level_one(federation: Federation, simulation: Simulation) -> State:
    return train_job(make_job(federation, 0, 0, local=plain()), simulation.device(0)).state
