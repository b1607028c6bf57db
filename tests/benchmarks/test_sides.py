"""The sides of the ratios do what they say: the naive loop's averages, steps of a client's round, averaging's share."""

from types import SimpleNamespace

import pytest
import torch
from sampling import some_quick

from benchmarks import techniques
from benchmarks.measuring import Figure
from benchmarks.naive import Naive
from benchmarks.random_fleet import CNN, KINDS, fleet
from benchmarks.techniques import TECHNIQUES, TimedData, client
from fleetfit.aggregate import Mean, apply_mean
from fleetfit.submodel import extract


def clock(*readings):
    """Return a `time` whose CPU clock reads these, one after the other."""
    return SimpleNamespace(process_time=iter(readings).__next__)


@pytest.mark.parametrize("kind", some_quick(list(KINDS), ["cnn", "small ViT"]))
def test_every_kind_has_four_levels(kind):
    federation, simulation = fleet(KINDS[kind], 8, 8)
    assert len(federation.levels) == 4
    naive = Naive(federation, simulation)  # raises where its cut is another than ours
    parts = [set(naive.part(module)) for module in naive.models]
    assert parts[3] == set(naive.state)


def test_the_naive_average_is_ours():
    """Updates of levels 1, 3 and 3: elements beyond level 1 are the mean of two, those beyond level 3 stay."""
    federation, simulation = fleet(CNN, 8, 8)
    naive, layout = Naive(federation, simulation), federation.problem.layout
    torch.manual_seed(0)
    mean, updates = Mean(layout), []
    for level in (0, 2, 2):
        piece = federation.levels[level].submodel
        update = {
            name: tensor + torch.randn_like(tensor) for name, tensor in extract(layout, naive.state, piece).items()
        }
        updates.append(update)
        mean.add(piece, update, 1.0)
    ours = apply_mean(extract(layout, naive.state, federation.levels[3].submodel), mean.result())
    theirs = naive.average(updates)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_naive_round_trains_each_client_once(monkeypatch):
    federation, simulation = fleet(CNN, 8, 8, samples=32)
    naive = Naive(federation, simulation)
    calls = []
    train = naive.train
    monkeypatch.setattr(naive, "train", lambda module, who: (calls.append(who), train(module, who)))
    before = {name: tensor.clone() for name, tensor in naive.state.items()}
    naive.round([(0, 0), (3, 3)])
    assert calls == [0, 3]
    assert not any(torch.equal(before[name], tensor) for name, tensor in naive.state.items() if tensor.dim() > 1)


def test_a_step_is_from_one_training_batch_to_the_next(monkeypatch):
    """Training batches at 1, 3 and 6, a look at 10, training batches at 20 and 21: steps of 2, 3 and 1."""
    monkeypatch.setattr(techniques, "time", clock(1, 3, 6, 10, 20, 21))
    data, rng = TimedData(SimpleNamespace(batch=lambda indices, rng: (indices, rng), name="x")), torch.Generator()
    for training in (True, True, True, False, True, True):
        assert data.batch(torch.arange(2), rng if training else None)[1] is (rng if training else None)
    assert data.steps == [2, 3, 1] and data.name == "x"


QUICK = [technique for technique in TECHNIQUES if technique.name.startswith(("FedDyn", "compression to int8", "early"))]


@pytest.mark.parametrize("technique", some_quick(TECHNIQUES, QUICK), ids=lambda technique: technique.name)
def test_both_sides_of_a_technique_do_the_same_steps(technique):
    """Two epochs of four batches: eight steps, the last of which has no batch after it."""
    kind = KINDS[technique.only[0]]
    looks = "early" in technique.name
    for method, local in ((technique.method, technique.local), (technique.without, {})):
        steps, whole = client(kind, method, local)()
        assert len(steps) == (6 if looks and local else 7) and whole > 0


def test_each_measured_technique_has_a_row():
    names = [f"cnn, {name}: {what} with it against without" for name, what in
             (("FedDyn", "a step"), ("FedDyn", "a round"), ("compression to int8", "a round"))]  # fmt: skip
    measured = [Figure(name, value, value, value, 1) for name, value in zip(names, (1.154, 0.98, 1.02), strict=True)]
    assert techniques.table(measured).splitlines()[2:] == [
        "| FedDyn | +15% | -2% |",
        "| compression to int8 | | +2% |",
    ]
