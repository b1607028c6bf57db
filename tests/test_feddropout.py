"""Federated Dropout: how many channels, which ones, for whom; and the average over those who trained them."""

from collections import Counter

import numpy as np
import pytest
from support import raises
from support.engines import RecordingEngine
from tiny import plain, tiny_federation, tiny_problem

from fleetfit.core import Update
from fleetfit.errors import ConfigError
from fleetfit.hooks import build, get_round_submodel
from fleetfit.layout import Axis
from fleetfit.methods.feddropout import select_channels
from fleetfit.planner import Targets
from fleetfit.rounds import Settings, run_round, start


@pytest.mark.parametrize(
    ("size", "granule", "n", "drop", "expected"),
    [
        (8, 1, 8, 0.25, 6),  # 6 of 8
        (8, 1, 4, 0.25, 3),  # of the level's 4, not of the model's 8
        (10, 1, 10, 0.3, 7),  # 0.7 * 10 is 7.000...1 or 6.999..., and means 7
        (12, 2, 12, 0.25, 8),  # 9 channels are 4 whole granules
        (12, 4, 4, 0.9, 4),  # never less than one granule
        (8, 1, 8, 0.0, 8),
    ],
)
def test_so_many_channels_are_kept(size: int, granule: int, n: int, drop: float, expected: int) -> None:
    for seed in range(20):
        channels = select_channels(Axis(size, granule), n, 0, 3, np.random.default_rng(seed), drop)
        assert len(channels) == len(set(channels)) == expected and set(channels) <= set(range(size))
        assert {c // granule for c in channels} == {c // granule for c in channels[::granule]}, "whole granules"
    assert select_channels(Axis(size, granule), n, 0, None, np.random.default_rng(0), drop) == range(n)


def test_every_channel_is_drawn_alike() -> None:
    """400 draws of 3 out of 8: each channel 150 times, give or take 5 standard deviations of 9.7."""
    counts: Counter[int] = Counter()
    for seed in range(400):
        counts.update(select_channels(Axis(8), 4, 0, 1, np.random.default_rng(seed), 0.25))
    assert set(counts) == set(range(8)) and all(abs(counts[c] - 150) < 49 for c in range(8))


def test_clients_and_rounds_draw_for_themselves() -> None:
    federation, _ = tiny_federation({"name": "feddropout", "drop": 0.5})
    full = [5, 2]  # both at the full level
    drawn = {(c, r): get_round_submodel(federation, r, c).channels["a"] for c in full for r in range(4)}
    assert len(set(map(tuple, drawn.values()))) > 4
    again = {(c, r): get_round_submodel(federation, r, c).channels["a"] for c in full for r in range(4)}
    assert drawn == again


def test_each_element_is_its_clients_mean() -> None:
    """The stem's bias has one element per channel: sum n_k x_kj / sum n_k over the clients k that kept channel j."""
    federation, simulation = tiny_federation({"name": "feddropout", "drop": 0.5}, norm=False)
    server, engine = start(federation), RecordingEngine(simulation)
    after, _ = run_round(federation, engine, Settings(1, plain(lr=0.3)), server)
    updates = [reply for reply in engine.replies if isinstance(reply, Update)]
    assert len({u.submodel.channels["a"] for u in updates}) > 1, "clients keep different channels"
    before = server.state["stem.bias"]
    for j in range(8):
        mine = [(u.num_examples, u.state["stem.bias"][list(u.submodel.channels["a"]).index(j)].item())
                for u in updates if j in u.submodel.channels["a"]]  # fmt: skip
        expected = sum(n * x for n, x in mine) / sum(n for n, _ in mine) if mine else before[j].item()
        assert after.state["stem.bias"][j].item() == pytest.approx(expected, rel=1e-6)
    channels = set().union(*(u.submodel.channels["a"] for u in updates))
    assert 4 < len(channels) < 8, "more than one client's, and not all, or the test shows little"


def test_the_levels_are_those_of_width() -> None:
    problem, targets = tiny_problem(exits=(3,)), Targets((0.3, 1.0), (0.25, 0.25))
    levels, expected = (build({"name": name}).make_levels(problem, targets) for name in ("feddropout", "heterofl"))
    assert [level.submodel for level in levels] == [level.submodel for level in expected]


@pytest.mark.parametrize("drop", [-0.1, 1.0])
def test_shares_outside_their_range_are_refused(drop: float) -> None:
    with raises(ConfigError, 0, 1, key="method.drop"):
        build({"name": "feddropout", "drop": drop})
