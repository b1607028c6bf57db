"""Rows in memory up to a budget that stores share, and beyond it in a file."""

import torch
from torch import Tensor

from fleetfit.training.row_store import MemoryBudget, RowStore


def make_rows(samples: list[int], shift: int) -> list[Tensor]:
    """Rows of 16 bytes: two float32, and one int64."""
    numbers = torch.tensor(samples) + shift
    return [torch.stack([numbers, -numbers], 1).float(), numbers]


def test_stores_share_their_memory() -> None:
    """80 bytes are five rows: three of the first store and two of the second one; the other four are in files."""
    budget = MemoryBudget(80.0)
    first, second = (RowStore(8, make_rows([0], 0), budget) for _ in range(2))
    for store, shift, samples, used in (
        (first, 10, [5, 0, 7], 48),
        (second, 20, [1, 2, 3, 4], 80),
        (first, 10, [6, 1], 80),
    ):
        assert store.find_missing(torch.tensor([*samples, samples[0]])).tolist() == sorted(samples)
        store.add(torch.tensor(samples), make_rows(samples, shift))
        assert budget.used == used and not store.full
    for store, shift, samples in ((first, 10, [1, 0, 6, 5, 7, 0]), (second, 20, [4, 1, 3, 2])):
        assert not len(store.find_missing(torch.tensor(samples)))
        for tensor, expected in zip(store.get(torch.tensor(samples)), make_rows(samples, shift), strict=True):
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
    assert first.find_missing(torch.arange(8)).tolist() == [2, 3, 4]
    first.add(torch.tensor([], dtype=torch.int64), make_rows([], 10))
    assert budget.used == 80
