"""Axes get names, are cut together, or are not cut, as the user says."""

from collections.abc import Mapping

import pytest
import torch
from support import raises
from torch import Tensor, nn

from fleetfit.derivation import derive_architecture
from fleetfit.errors import ModelError
from fleetfit.layout import Segment

EXAMPLE = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Axes a (8), b (8) and c (6) in a row, and a table of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.table = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))) @ self.table)


def derive_sizes(axes: Mapping[str, str]) -> dict[str, int]:
    sizes = dict(derive_architecture(Net(), EXAMPLE, axes=axes).plan.axes)
    assert sizes.pop("classes") == 3
    return sizes


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        ({}, {"a": 8, "b": 8, "c": 6, "table": 6}),
        ({"b": "whole"}, {"a": 8, "c": 6, "table": 6}),
        ({"[ab]": "whole"}, {"c": 6, "table": 6}),
        ({"table": "whole"}, {"a": 8, "b": 8, "c": 6}),
        ({"table*": "whole"}, {"a": 8, "b": 8, "c": 6}),
        ({"b": "hidden"}, {"a": 8, "hidden": 8, "c": 6, "table": 6}),
        ({"[ab]": "hidden"}, {"hidden": 8, "c": 6, "table": 6}),
        ({"a": "hidden", "b": "hidden"}, {"hidden": 8, "c": 6, "table": 6}),
        ({"b": "a"}, {"a": 8, "c": 6, "table": 6}),
        ({"a": "b", "b": "a"}, {"b": 8, "a": 8, "c": 6, "table": 6}),
        ({"a": "first", "*": "whole"}, {"first": 8}),
        ({"[ab]": "wide", "[!ab]*": "narrow"}, {"wide": 8, "narrow": 6}),
    ],
)
def test_axes_are_named_merged_and_excluded(axes: Mapping[str, str], sizes: Mapping[str, int]) -> None:
    assert derive_sizes(axes) == sizes


def test_an_axis_that_is_excluded_is_listed_with_the_reason_and_stays_whole() -> None:
    plan = derive_architecture(Net(), EXAMPLE, axes={"b": "whole"}).plan
    assert plan.whole.keys() == {"b"}
    assert plan.whole["b"][0] == 8
    assert ("b.weight", 0) not in plan.segments
    assert plan.segments["b.weight", 1] == (Segment("a"),)


def test_axes_of_one_name_are_cut_as_one() -> None:
    derived = derive_architecture(Net(), EXAMPLE, axes={"[ab]": "hidden"})
    level = derived.build({**derived.plan.axes, "hidden": 3}, derived.positions[-1:]).state_dict()
    assert level["net.a.weight"].shape == (3, 5)
    assert level["net.b.weight"].shape == (3, 3)
    assert level["net.c.weight"].shape == (6, 3)


@pytest.mark.parametrize(
    ("axes", "mentions"),
    [
        ({"d": "whole"}, ("d", "c, table, a, b")),
        ({"tables*": "whole"}, ("tables*",)),
        ({"*": "hidden"}, ("hidden", "a 8", "c 6")),
        ({"a": "hidden", "c": "hidden"}, ("hidden", "a 8", "c 6")),
        ({"c": "a"}, ("a 8", "c 6")),
        ({"c": "classes"}, ("classes",)),
        ({"classes": "whole"}, ("classes",)),
    ],
)
def test_axes_that_cannot_be_are_refused(axes: Mapping[str, str], mentions: tuple[str, ...]) -> None:
    with raises(ModelError, *mentions, key="derive.axes"):
        derive_architecture(Net(), EXAMPLE, axes=axes)
