"""Strips: equal tensors at equal distances are one view, whatever the model; nothing is moved twice or left out."""

from collections.abc import Callable

import pytest
import torch

from fleetfit.anatomy import Architecture, infer_layout
from fleetfit.models.bert import bert
from fleetfit.models.resnet import resnet56
from fleetfit.submodel import SlicePlan, Submodel
from fleetfit.submodel.strips import Strip, find_strips, merge_strips


def places(strips: list[Strip], full: int, piece: int) -> tuple[list[int], list[int]]:
    """The places of strips in both buffers, in the strips' own order."""
    far, near = torch.arange(full), torch.arange(piece)
    return (
        [n for strip in strips for n in strip.view_full(far).flatten().tolist()],
        [n for strip in strips for n in strip.view_submodel(near).flatten().tolist()],
    )


def test_matrix_prefix() -> None:
    """Of a matrix [3, 4] at 10, the upper left [2, 3] lies at 10, 11, 12 and 14, 15, 16."""
    (strip,) = find_strips([[(0, 2)], [(0, 3)]], (3, 4), (2, 3), 10, 0) or []
    assert places([strip], 30, 6) == ([10, 11, 12, 14, 15, 16], [0, 1, 2, 3, 4, 5])


def test_whole_tensor_has_one_dimension() -> None:
    """A matrix of which all is kept, and the first rows of one: their elements lie in a row in both buffers."""
    assert find_strips([[(0, 3)], [(0, 4)]], (3, 4), (3, 4), 0, 7) == [Strip((12,), (1,), (1,), 0, 7)]
    assert find_strips([[(0, 2)], [(0, 4)]], (3, 4), (2, 4), 5, 0) == [Strip((8,), (1,), (1,), 5, 0)]


def test_wrapping_window() -> None:
    """Rows 3 and 0 of a matrix [4, 2]: their order in the piece is that of the stretches."""
    strips = find_strips([[(3, 1), (0, 1)], [(0, 2)]], (4, 2), (2, 2), 0, 0) or []
    assert places(strips, 8, 4) == ([6, 7, 0, 1], [0, 1, 2, 3])


def test_equal_tensors_at_equal_distances_are_one_strip() -> None:
    """Two matrices [3, 4] at 0 and 20 and a third at 40, [2, 2] of each: one strip of three dimensions."""
    one = [strip for i in range(3) for strip in find_strips([[(0, 2)], [(0, 2)]], (3, 4), (2, 2), 20 * i, 4 * i) or []]
    strips = merge_strips(one)
    assert len(strips) == 1 and strips[0].sizes == (3, 2, 2)
    assert places(strips, 60, 12) == places(one, 60, 12)


def test_adjacent_tensors_are_one_strip() -> None:
    one = [*(find_strips([[(0, 5)]], (5,), (5,), 0, 0) or []), *(find_strips([[(0, 7)]], (7,), (7,), 5, 5) or [])]
    assert merge_strips(one) == [Strip((12,), (1,), (1,), 0, 0)]


def test_scattered_channels_have_no_strips() -> None:
    scattered = [(i * i, 1) for i in range(50)]
    assert find_strips([scattered, [(0, 2)]], (2500, 4), (50, 2), 0, 0) is None


def bert_tiny_deep() -> Architecture:
    return bert(layers=6, hidden=256, vocabulary=99)


@pytest.mark.parametrize("architecture", [resnet56, bert_tiny_deep])
def test_deep_model_has_few_strips(architecture: Callable[[], Architecture]) -> None:
    """Its strips and its index cover each kept element once, in both buffers; hundreds of tensors are some views."""
    layout = infer_layout(architecture())
    sizes = architecture().sizes(0.5)
    piece = Submodel({axis: range(sizes[axis]) for axis in sizes}, layout.exits[: len(layout.exits) // 2 + 1])
    compiled = SlicePlan(layout, piece)
    strips, index, slices = compiled._moves
    full = sum(torch.Size(shape).numel() for shape in layout.shapes({}, layout.exits).values())
    far, near = places(strips, full, compiled.size)
    if index is not None:
        far, near = far + index[0].tolist(), near + index[1].tolist()
    assert not slices and sorted(near) == list(range(compiled.size)) and len(set(far)) == compiled.size
    numbers = torch.arange(full, dtype=torch.float64)
    assert [int(n) for n in compiled.gather(numbers)[torch.tensor(near)]] == far
    assert len(compiled.names) > 60 and len(strips) < len(compiled.names) / 3
