"""The digits of scikit-learn."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from support import raises

from fleetfit.data.sets.digits import FACTS, digits
from fleetfit.errors import DataError


def test_facts_are_true() -> None:
    data = digits()
    assert len(data.split("train")) + len(data.split("validation")) == FACTS.train
    assert len(data.split("test")) == FACTS.test
    assert data.classes == FACTS.classes
    assert "x".join(map(str, data.x.shape[2:])) == FACTS.resolution


def test_pixels_are_scikit_learns() -> None:
    gray, label = load_digits(return_X_y=True)
    data = digits()
    assert np.array_equal(data.x.numpy().reshape(-1, 64), np.rint(gray * 255 / 16)) and data.x.dtype == torch.uint8
    assert np.array_equal(data.y.numpy(), label) and data.y.dtype == torch.int64
    x, y = data.batch(torch.arange(len(label)))
    unit = x * 0.376 + 0.305
    assert np.abs(unit.numpy().reshape(-1, 64) - gray / 16).max() < 0.5 / 255 + 1e-5  # 16 gray values in 255 steps
    assert y.tolist() == label.tolist()
    assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 1) < 0.01


def test_splits_are_in_proportion() -> None:
    data = digits(validation=0.25, test=0.1)
    total = torch.bincount(data.y)
    test = torch.bincount(data.y[data.split("test")])
    validation = torch.bincount(data.y[data.split("validation")])
    assert ((test - 0.1 * total).abs() < 1).all()
    assert ((validation - 0.25 * (total - test)).abs() < 1).all()


def test_seed_decides() -> None:
    assert digits(seed=1).split("test").tolist() == digits(seed=1).split("test").tolist()
    assert digits(seed=1).split("test").tolist() != digits(seed=2).split("test").tolist()


def test_share_out_of_range() -> None:
    with raises(DataError, 1, 1.5, key="test"):
        digits(test=1.5)
