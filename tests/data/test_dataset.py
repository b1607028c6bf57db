"""Data: batches against the formula, checks at construction, views, held-out samples."""

import dataclasses
import pickle  # noqa: TID251 - what a stranger's multiprocessing would do to a view
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support import Expected, raises

from fleetfit.data import Data
from fleetfit.data.splits import hold_out
from fleetfit.errors import DataError


def small(**changes: Any) -> Data:
    fields: dict[str, Any] = {
        "name": "small",
        "x": torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
        "y": torch.arange(20) % 4,
        "splits": {"train": torch.arange(10), "validation": torch.arange(10, 14), "test": torch.arange(14, 20)},
        "classes": 4,
        "mean": (0.5, 0.4, 0.3),
        "std": (0.25, 0.2, 0.1),
    }
    return Data(**(fields | changes))


def test_batch_is_the_formula() -> None:
    """Each value is (v / 255 - mean of its channel) / std of its channel, recomputed in Python floats."""
    data = small()
    x, y = data.batch(torch.tensor([7, 3]))
    assert x.dtype == torch.float32 and x.shape == (2, 3, 8, 8)
    assert y.tolist() == [3, 3]
    for b, index in enumerate((7, 3)):
        for c, (mean, std) in enumerate(zip(data.mean, data.std, strict=True)):
            for i, j in ((0, 0), (3, 5), (7, 7)):
                expected = (int(data.x[index, c, i, j]) / 255 - mean) / std
                assert float(x[b, c, i, j]) == pytest.approx(expected, abs=2e-6)


def test_one_mean_serves_all_channels() -> None:
    one, three = small(mean=(0.5,), std=(0.25,)), small(mean=(0.5,) * 3, std=(0.25,) * 3)
    assert torch.equal(one.batch(torch.arange(5))[0], three.batch(torch.arange(5))[0])


def test_without_mean_pixels_lie_between_0_and_1() -> None:
    data = small(mean=(), std=())
    assert torch.allclose(data.batch(torch.arange(20))[0], data.x / 255)


def test_place_in_the_batch_does_not_change_bits() -> None:
    data = small()
    alone = torch.cat([data.batch(torch.tensor([i]))[0] for i in range(20)])
    assert torch.equal(data.batch(torch.arange(20))[0], alone)


def test_batch_leaves_the_data_alone() -> None:
    for x in (torch.rand(20, 3, 8, 8), small().x):
        data = small(x=x.clone(), augment="crop-flip")
        data.batch(torch.arange(20), torch.Generator().manual_seed(0))
        data.batch(torch.arange(20))
        assert torch.equal(data.x, x)


def test_only_training_batches_are_augmented() -> None:
    data = small(augment="crop-flip")
    plain = small()
    rng = torch.Generator().manual_seed(1)
    assert torch.equal(data.batch(torch.arange(20))[0], plain.batch(torch.arange(20))[0])
    assert torch.equal(plain.batch(torch.arange(20), rng)[0], plain.batch(torch.arange(20))[0])
    first = data.batch(torch.arange(20), torch.Generator().manual_seed(1))[0]
    assert not torch.equal(first, plain.batch(torch.arange(20))[0])
    assert torch.equal(first, data.batch(torch.arange(20), torch.Generator().manual_seed(1))[0])


def test_padding_is_black_before_normalization() -> None:
    data = small(x=torch.full((20, 3, 8, 8), 255, dtype=torch.uint8), augment="shift")
    x, _ = data.batch(torch.arange(20), torch.Generator().manual_seed(0))
    values = x[:, 0].unique()
    assert torch.allclose(values, torch.tensor([-2.0, 2.0]))


def test_floats_and_tokens_pass_through() -> None:
    floats = small(x=torch.rand(20, 5, dtype=torch.float64), mean=(), std=())
    assert torch.equal(floats.batch(torch.arange(20))[0], floats.x.float())
    tokens = small(x=torch.arange(60).view(20, 3), mean=(), std=())
    assert torch.equal(tokens.batch(torch.tensor([2]))[0], torch.tensor([[6, 7, 8]]))


def test_floats_can_be_normalized() -> None:
    data = small(x=torch.rand(20, 3, 8, 8))
    expected = (data.x[4, 2, 1, 1] - 0.3) / 0.1
    assert float(data.batch(torch.tensor([4]))[0][0, 2, 1, 1]) == pytest.approx(float(expected), abs=2e-6)


def test_share_is_a_view_with_other_splits() -> None:
    data = small()
    part = data.share({"train": torch.tensor([1, 3])})
    assert part.x.data_ptr() == data.x.data_ptr()
    assert part.split("train").tolist() == [1, 3]
    assert part.split("test").tolist() == []
    assert data.split("train").tolist() == list(range(10))
    assert torch.equal(part.batch(part.split("train"))[0], data.batch(torch.tensor([1, 3]))[0])


def test_survives_copies_and_replacement() -> None:
    data = small(augment="crop-flip")
    again = pickle.loads(pickle.dumps(data))  # noqa: S301
    assert torch.equal(again.batch(torch.arange(5))[0], data.batch(torch.arange(5))[0])
    bare = dataclasses.replace(data, mean=(), std=())
    assert torch.allclose(bare.batch(torch.arange(20))[0], data.x / 255)


def test_to_moves_all_but_the_splits() -> None:
    moved = small(groups=torch.arange(20)).to("meta")
    assert {moved.x.device.type, moved.y.device.type} == {"meta"}
    assert moved.groups is not None and moved.groups.device.type == "meta"
    assert moved.split("train").device.type == "cpu"
    assert moved.batch(torch.arange(3))[0].device.type == "meta"
    assert small().to("cpu").batch(torch.arange(2))[0].shape == (2, 3, 8, 8)


def test_repr_is_one_line() -> None:
    assert repr(small()) == "Data('small', x [20, 3, 8, 8] torch.uint8, 4 classes, train 10, validation 4, test 6)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"x": np.zeros((20, 3))}, Expected(key="x")),
        ({"y": [0] * 20}, Expected(key="y")),
        ({"x": torch.zeros(20, 3, dtype=torch.int32)}, Expected("uint8", "torch.int32", key="x")),
        ({"y": torch.arange(19)}, Expected("[20, 3, 8, 8]", "[19]", key="y")),
        ({"y": torch.arange(20)}, Expected("0..3", 4, key="y")),
        ({"y": torch.zeros(20)}, Expected("int64", "[20]", "torch.float32", key="y")),
        ({"y": torch.zeros(20, 2, dtype=torch.int64)}, Expected("int64", "[20]", "torch.int64", "[20, 2]", key="y")),
        ({"classes": 0}, Expected(1, 0, key="classes")),
        ({"class_names": ("a", "b")}, Expected(4, 2, key="class_names")),
        ({"groups": torch.arange(19)}, Expected("int64", "[20]", key="groups")),
        ({"groups": torch.arange(20) - 1}, Expected(-1, key="groups")),
        ({"mean": (0.5,)}, Expected(1, 3, key="mean")),
        ({"mean": (0.5,) * 2, "std": (1.0,) * 2}, Expected(1, 3, 2, key="mean")),
        ({"std": (1.0, 0.0, 1.0)}, Expected(key="std")),
        ({"x": torch.zeros(20, 3, dtype=torch.int64)}, Expected(key="mean")),
        ({"augment": "crop-flp"}, Expected('"crop-flip"', key="augment")),
        ({"splits": {"train": torch.tensor([20])}}, Expected('"train"', "20..20", 20, key="splits")),
        ({"splits": {"train": torch.tensor([-1])}}, Expected('"train"', -1, key="splits")),
        ({"splits": {"train": torch.tensor([0.0])}}, Expected('"train"', "int64", "torch.float32", key="splits")),
        ({"splits": {"tain": torch.tensor([0])}}, Expected('"tain"', '"train"', key="splits")),
        (
            {"splits": {"train": torch.arange(5), "test": torch.arange(4, 9)}},
            Expected(4, '"test"', key="splits"),
        ),
    ],
)
def test_wrong_fields(changes: dict[str, Any], expected: Expected) -> None:
    with raises(DataError, expected):
        small(**changes)


def test_unknown_split() -> None:
    with raises(DataError, '"valid"', '"validation"', key="split"):
        small().split("valid")


def test_other_tasks_may_have_other_labels() -> None:
    data = small(y=torch.rand(20, 2), task="my_task", classes=2)
    assert torch.equal(data.batch(torch.tensor([3]))[1], data.y[3:4])


def test_training_targets_of_a_regression_are_standardized() -> None:
    y = 5 + 3 * torch.rand(20, 2)
    y[:, 1] = 7.0  # constant: left at 0, not divided by 0
    data = small(y=y, task="regression", classes=2)
    train = data.split("train")
    targets = data.batch(train)[1]
    assert torch.allclose(targets[:, 0].mean(), torch.tensor(0.0), atol=1e-5)
    assert torch.allclose(targets[:, 0].var(correction=0), torch.tensor(1.0), atol=1e-4)
    assert bool((targets[:, 1] == 0).all())
    mean, std = data.target_scale
    assert torch.allclose(targets * std + mean, y[train], atol=1e-5)
    one = data.share({"train": train[:1]}).batch(train[:1])[1]
    assert torch.equal(one, targets[:1])  # a client's share is scaled as the whole is


def test_padding_is_cut_to_the_longest_sample_of_a_batch() -> None:
    x = torch.tensor([[5, 6, 9, 9], [5, 9, 7, 9], [9, 9, 9, 9]])
    data = Data("words", x, torch.tensor([0, 1, 0]), {"train": torch.arange(3)}, 2, vocabulary=10, padding=9)
    assert [data.batch(torch.tensor(i))[0].shape[1] for i in ([0], [1], [0, 1], [2])] == [2, 3, 3, 1]
    labels = torch.tensor([[1, 0, 1, 0]] * 3)
    several = Data("several", x, labels, {}, 4, task="multi_label", vocabulary=10, padding=9)
    assert several.batch(torch.tensor([0]))[1].tolist() == [[1, 0, 1, 0]]  # as many labels as tokens
    following = Data("next", x, x.clone(), {"train": torch.arange(3)}, 10, task="next_token", vocabulary=10, padding=9)
    assert [tuple(t.shape) for t in following.batch(torch.tensor([0]))] == [(1, 2), (1, 2)]


def test_images_are_resized_batch_by_batch() -> None:
    data = small(x=torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8), mean=(), std=(), resize=(16, 12))
    assert data.sample_shape == (3, 16, 12)
    resized = data.batch(torch.tensor([1, 4]))[0]
    plain = torch.nn.functional.interpolate(data.x[[1, 4]].float() / 255, (16, 12), mode="bilinear")
    assert torch.allclose(resized, plain, atol=1e-6)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"y": torch.zeros(20), "task": "regression"}, Expected("[20, 4]", "float32", key="y")),
        ({"y": torch.full((20, 2), torch.nan), "task": "regression", "classes": 2}, Expected(0, key="y")),
        ({"y": torch.full((20, 2), 2), "task": "multi_label", "classes": 2}, Expected(0, 1, key="y")),
        ({"task": "next_token"}, Expected("int64", key="y")),
        ({"vocabulary": 10}, Expected("int64", "[N, L]", key="x")),
    ],
)
def test_labels_that_do_not_fit_the_task(changed: dict[str, object], expected: Expected) -> None:
    with raises(DataError, expected):
        small(**changed)


@given(
    strata=st.lists(st.integers(0, 6), max_size=80),
    fraction=st.floats(0, 0.99),
    seed=st.integers(0, 1000),
)
def test_hold_out_is_a_division_in_proportion(strata: list[int], fraction: float, seed: int) -> None:
    indices, kinds = np.arange(len(strata)) * 3, np.array(strata, dtype=np.int64)
    remaining, held = hold_out(indices, kinds, fraction, seed)
    assert sorted([*remaining.tolist(), *held.tolist()]) == indices.tolist()
    assert remaining.tolist() == sorted(remaining.tolist()) and held.tolist() == sorted(held.tolist())
    assert len(held) == round(fraction * len(strata))
    for kind in set(strata):
        assert abs((kinds[held // 3] == kind).sum() - fraction * strata.count(kind)) < 1 + 1e-6
    again = hold_out(indices, kinds, fraction, seed)
    assert again[1].tolist() == held.tolist()


def test_hold_out_depends_on_the_seed() -> None:
    divisions = {tuple(hold_out(np.arange(50), np.zeros(50, np.int64), 0.3, seed)[1].tolist()) for seed in range(5)}
    assert len(divisions) == 5


@pytest.mark.parametrize(("fraction", "seed"), [(1.0, 0), (-0.1, 0), (0.5, -1), (0.5, 1.5), (0.5, True)])
def test_hold_out_refuses(fraction: float, seed: Any) -> None:
    with raises(DataError, 0, key="seed" if fraction == 0.5 else "validation"):
        hold_out(np.arange(4), np.zeros(4, np.int64), fraction, seed)
