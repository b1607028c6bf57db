"""Axes get names, are cut together, or are not cut, as the user says."""

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from support import raises
from torch import Tensor, nn

from fleetfit.anatomy import Segment, infer_layout
from fleetfit.anatomy.derive import derive_architecture
from fleetfit.anatomy.proof import check_layout
from fleetfit.errors import ModelError
from fleetfit.submodel import Submodel

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


def test_excluded_axes_stay_whole_with_a_reason() -> None:
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
        ({"[ac]": "whole", "a": "first"}, ('"a"',)),  # the first pattern counts
        ({"a": "hidden", "c": "hidden"}, ("hidden", "a 8", "c 6")),
        ({"c": "a"}, ("a 8", "c 6")),
        ({"c": "classes"}, ("classes",)),
        ({"classes": "whole"}, ("classes",)),
    ],
)
def test_axes_that_cannot_be_are_refused(axes: Mapping[str, str], mentions: tuple[str, ...]) -> None:
    with raises(ModelError, *mentions, key="derive.axes"):
        derive_architecture(Net(), EXAMPLE, axes=axes)


class Compared(nn.Module):
    """Adds what came before where it has the same shape: a residual at one width of b alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 4), nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.relu(self.a(x))
        after = torch.relu(self.b(before))
        return self.c(after + before if after.shape == before.shape else after)


@pytest.mark.parametrize(("b", "is_right"), [(3, True), (4, False), (5, True), (12, True)])
def test_sizes_equal_by_chance_are_refused(b: int, is_right: bool) -> None:
    """The proof's narrow models have other widths of b; those of a run are compared, too."""
    torch.manual_seed(0)
    derived = derive_architecture(Compared(), EXAMPLE, axes={"a": "whole"})
    level = Submodel({"b": range(b), "classes": range(3)}, derived.positions)
    with nullcontext() if is_right else raises(ModelError, "b 4", key="model"):
        layout, proved = infer_layout(derived), derived.report
        assert check_layout(derived, layout, [level], input_shape=(5,), proved=proved) is proved


class Experts(nn.Module):
    """Each sample goes to one of three experts, whose rows are multiplied together."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(5, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.experts = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        expert, order = torch.sort(self.router(h).argmax(1))
        ends = (expert[:, None] <= torch.arange(3)).sum(0, dtype=torch.int32)
        mixed = nn.functional.grouped_mm(h[order], self.experts, offs=ends)
        return self.head(mixed[torch.argsort(order)])


def test_experts_that_take_no_float64_are_refused_with_what_to_call() -> None:
    with raises(ModelError, "batched_mm", key=None):
        derive_architecture(Experts(), EXAMPLE)
