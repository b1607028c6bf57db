"""Which method equals FedAvg, with which settings, and what is checked of those which cannot.

The table is `REDUCES`. Budgets are all 1, so that every client is at the full level with one exit, and extra terms are
off; then the final state must equal FedAvg's bit for bit. A method that counts clients where FedAvg counts samples
needs clients of equal size, and for equal bits of a size that is a power of two: n x rounds unless n is, and x_j <-
sum n x_j / sum n would differ from sum x_j / K in the last bit.

FedAvg here is itself held against a plain loop in `test_methods`, and FedSGD against one centralized gradient step
below.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.training import assert_close, last_exit_loss, plain_sgd
from tiny import plain, tiny_data, tiny_parts, tiny_problem

from fleetfit import names
from fleetfit.core import Clients, Federation, Local, Simulation
from fleetfit.engines.local import local as local_engine
from fleetfit.hooks import FEDAVG, HOOKS, build
from fleetfit.layout import State
from fleetfit.planner import Targets
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.submodel import extract

CLIENTS, EACH = 6, 16


@dataclass(frozen=True)
class Case:
    """Settings with which a spec must equal FedAvg."""

    spec: Mapping[str, Any]
    local: Mapping[str, Any] = field(default_factory=dict)  # local settings, for both
    under: str = ""  # where the method keeps its state


REDUCES = [
    Case({"name": "all_large"}),
    Case({"name": "exclusivefl"}),
    Case({"name": "fedsgd"}, {"epochs": 1, "batch_size": "all"}),
    Case({"name": "decoupled"}, under="level1/"),
    Case({"name": "decoupled", "scaling": "both"}, under="level1/"),
    Case({"name": "heterofl"}),
    Case({"name": "heterofl", "scaler": True}),  # the kept fraction is 1
    Case({"name": "heterofl", "masked": True}),  # every client has every class
    Case({"name": "fedrolex"}),  # a window of all channels
    Case({"name": "scalefl", "beta": 0.0}),
    Case({"name": "scalefl", "beta": 0.5}),  # one exit: it has no divergence from itself
    Case({"name": "scalefl", "scaling": "width"}),
    Case({"name": "scalefl", "scaling": "depth", "warmup": 0.5}),
    Case({"name": "scalefl", "hooks": {"choose_channels": "random"}}),
    Case({"name": "scalefl", "hooks": {"choose_channels": "window"}}),
    Case({"name": "fleetfit", "tau": 0.0, "beta": 0.0, "momentum": 0.0}),
    Case({"name": "fleetfit", "tau": 0.0, "momentum": 0.0}),  # one exit: nothing to distill
    Case({"name": "fleetfit", "options": {"class_prior": {"tau": 0.0}, "fedavgm": {"momentum": 0.0}}}),
    Case({"name": "fjord"}),  # one width: it is drawn in each step, and has no divergence from itself
    Case({"name": "fjord", "distill": False}),
    Case({"name": "fedavg", "options": {"fedprox": {"mu": 0.0}}}),
    Case({"name": "fedavg", "options": {"class_prior": {"tau": 0.0}}}),
    Case({"name": "fedavg", "options": {"in_time": {}}}),  # no deadline
    Case({"name": "fedavg", "options": {"lora_product": {}}}),  # no LoRA
    Case({"name": "depthfl", "alpha": 0.0}),  # one exit: nothing to distill; no FedDyn
    Case({"name": "depthfl", "alpha": 0.0, "weight": 0.0}),
    Case({"name": "feddropout", "drop": 0.0}),  # all channels
    Case({"name": "nefl"}, under="level1/"),  # only the norms are under it
    Case({"name": "nefl", "tiers": 2}, under="level1/"),  # one level to draw
    Case({"name": "inclusivefl", "beta": 0.0}),
    Case({"name": "inclusivefl", "damped": True}),  # one level: nobody deeper to learn from
    Case({"name": "fedavg", "options": {"fedavgm": {"momentum": 0.0}}}),
    Case({"name": "feddf", "steps": 0}),  # no distillation
]
CANNOT = {
    "scalefl, printed": "half the loss: equals FedAvg at half the learning rate (test_printed_weights_...)",
    "fedadam, fedyogi, feddyn": "no settings give the plain mean: formulas and a plain run (test_server_options)",
    "lora_product, with LoRA": "the mean product and its factors by plain loops (test_lora_product)",
    "outliers, krum, trimmed_mean": "who is left out, and each mean, by plain loops (test_robust)",
    "adaptivefl": "clients are drawn per model; greedy, with the whole fleet, it is all_large (test_adaptivefl)",
    "feddropout, drop > 0": "the channels that are kept are checked one by one (test_feddropout)",
    "reefl": "its model is another one: equations, loss and estimate by hand (test_reefl)",
    "feddf, steps > 0": "the server trains too: formulas and a plain run (test_feddf)",
    "class_prior, tau > 0": "the offset by hand, and training by a plain loop (test_class_prior)",
    "scaffold, fednova, feddistill": "Algorithm 1 and the rules by plain loops (test_extra_tensors)",
    "fedprox, mu > 0": "the penalty is checked against its formula and in a plain loop (test_methods)",
}


def fleet(
    spec: Mapping[str, Any], sizes: tuple[int, ...] = (EACH,) * CLIENTS, **model: Any
) -> tuple[Federation, Simulation]:
    """Clients who all afford the full model, with the levels that the method asks for."""
    problem, data = tiny_problem(exits=(3,), **model), tiny_data()
    parts = tiny_parts(data, len(sizes))
    parts = [{**p, "train": p["train"][:n]} for p, n in zip(parts, sizes, strict=True)]
    levels = tuple(build(spec).make_levels(problem, Targets((1.0,), (0.1,))))
    counts = np.array([len(p["train"]) for p in parts])
    simulation = Simulation(problem, data, parts)
    reported = np.ones(len(sizes)) if build(spec).needs_budgets else None
    return Federation(problem, Clients(counts, reported), levels, 4, build(spec), spec), simulation


def final(spec: Mapping[str, Any], local: Local, **more: Any) -> State:
    federation, simulation = fleet(spec, **more)
    *_, last = run(federation, local_engine(simulation), Settings(3, local), start(federation))
    assert last.report["train"]["clients"] == 4
    return last.server.state


BASE = Local(lr=0.1, epochs=2, batch_size=6, momentum=0.9, weight_decay=1e-3, clip_norm=5.0)


@pytest.mark.parametrize("case", REDUCES, ids=lambda c: str(c.spec))
def test_equals_fedavg_bit_for_bit(case: Case) -> None:
    local = BASE.replace(**case.local)
    expected = final({"name": "fedavg"}, local, dropout=0.2)
    result = final(case.spec, local, dropout=0.2)
    for name, tensor in expected.items():
        assert torch.equal(result.get(case.under + name, result[name]), tensor), name
    first = start(fleet(case.spec, dropout=0.2)[0]).state
    assert not all(torch.equal(first[n], expected[n]) for n in expected)


def test_every_method_and_option_is_in_the_table() -> None:
    listed = {str(c.spec["name"]) for c in REDUCES} | {o for c in REDUCES for o in c.spec.get("options", {})}
    unequal = {name.strip() for key in CANNOT for name in key.split(",")} - listed
    assert listed | unequal >= {*names.list_names("methods"), *names.list_names("options")}
    assert listed <= {*names.list_names("methods"), *names.list_names("options")}


def test_budgets_of_one_give_one_level() -> None:
    for name in names.list_names("methods"):
        federation, _ = fleet({"name": name})
        if not federation.method.needs_budgets:
            continue
        assert [level.submodel.exits for level in federation.levels] == [(3,)], name
        assert federation.levels[0].submodel.sizes == {"a": 8, "b": 12, "classes": 4}


# without FedDyn, the server's training, its momentum and the class prior
COUNTING: Mapping[str, Mapping[str, Any]] = {
    "depthfl": {"alpha": 0.0}, "feddf": {"steps": 0}, "fleetfit": {"momentum": 0.0, "tau": 0.0}, "heterofl": {},
    "fedrolex": {}, "scalefl": {},
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTING)
def test_the_weights_are_the_only_other_difference(name: str) -> None:
    """With unequal clients, a method that counts clients differs from FedAvg; with FedAvg's weight it is FedAvg."""
    sizes = (5, 9, 16, 12, 28, 20)
    expected = final({"name": "fedavg"}, BASE, sizes=sizes)
    counted = final({"name": name, **COUNTING[name]}, BASE, sizes=sizes)
    weighed = final({"name": name, **COUNTING[name], "hooks": {"weigh": "by_samples"}}, BASE, sizes=sizes)
    assert not all(torch.equal(counted[n], expected[n]) for n in expected)
    assert all(torch.equal(weighed[n], expected[n]) for n in expected)


def test_methods_that_count_samples_are_listed() -> None:
    """So that the list above is complete."""
    counting = [n for n in names.list_names("methods") if build({"name": n}).weigh is not FEDAVG.weigh]
    assert sorted(counting) == sorted(COUNTING)


def test_printed_weights_are_half_the_loss() -> None:
    """Eq. 5 as printed weighs one exit by 1/2: without weight decay and clipping, FedAvg at half the learning rate.

    Halving is exact in floating point, so the states are equal bit for bit.
    """
    local = BASE.replace(weight_decay=0.0, clip_norm=None)
    expected = final({"name": "fedavg"}, local.replace(lr=local.lr / 2))
    result = final({"name": "scalefl", "printed": True}, local)
    assert all(torch.equal(result[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", names.list_names("methods"))
def test_a_method_sets_only_what_it_needs(name: str) -> None:
    """A method is its difference from FedAvg: most hooks are FedAvg's own functions."""
    method = build({"name": name, **COUNTING.get(name, {})})  # an option that it brings along is not its own
    changed = {hook for hook in HOOKS if getattr(method, hook) is not getattr(FEDAVG, hook)}
    assert len(changed) <= 5, changed


# ---- FedSGD -------------------------------------------------


@pytest.mark.parametrize("name", ["fedsgd", "fedavg"])
def test_one_batch_is_a_step_on_pooled_data(name: str) -> None:
    """sum_k n_k / n (w - lr g_k) = w - lr g with g the gradient of the mean loss over all n samples.

    Without norm layers, whose moments would make a sample's loss depend on its neighbors. FedSGD ignores the local
    settings; FedAvg gets them.
    """
    sizes = (5, 9, 16, 1, 28, 20)
    federation, simulation = fleet({"name": name}, sizes=sizes, norm=False)
    federation = replace(federation, cohort=len(sizes))
    local = plain(lr=0.5, epochs=7, batch_size=3) if name == "fedsgd" else plain(lr=0.5, epochs=1, batch_size="all")
    state = start(federation).state
    pooled = torch.cat([part["train"] for part in simulation.parts])
    x, y = simulation.data.batch(pooled)
    server, report = run_round(federation, local_engine(simulation), Settings(1, local), start(federation))
    assert report["train"] == {"loss": report["train"]["loss"], "clients": 6, "samples": 79, "by_level": {"1": 6}}
    assert_close(server.state, plain_sgd(state, (3,), [(x, y)], last_exit_loss, local))


def test_two_rounds_of_fedsgd_are_two_steps() -> None:
    federation, simulation = fleet({"name": "fedsgd"}, norm=False)
    federation = replace(federation, cohort=CLIENTS)
    local = plain(lr=0.5)
    pooled = simulation.data.batch(torch.cat([part["train"] for part in simulation.parts]))
    *_, last = run(federation, local_engine(simulation), Settings(2, local), start(federation))
    assert_close(last.server.state, plain_sgd(start(federation).state, (3,), [pooled] * 2, last_exit_loss, local))


def test_fedsgd_is_fedavg_with_one_batch_and_one_epoch() -> None:
    """Bit for bit, with unequal clients, momentum (which a single step does not see) and batch norm."""
    sizes = (5, 9, 16, 12, 28, 20)
    expected = final({"name": "fedavg"}, BASE.replace(epochs=1, batch_size="all"), sizes=sizes)
    result = final({"name": "fedsgd"}, BASE, sizes=sizes)
    assert all(torch.equal(result[n], expected[n]) for n in expected)


def test_the_level_s_model_is_the_full_model() -> None:
    """What the table takes for granted: at width 1 the sub-model is the state itself."""
    federation, _ = fleet({"name": "fedavg"})
    state = start(federation).state
    piece = extract(federation.problem.layout, state, federation.levels[0].submodel)
    assert piece.keys() == state.keys() and all(torch.equal(piece[n], state[n]) for n in state)
