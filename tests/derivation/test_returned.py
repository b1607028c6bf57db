"""What forward may return, and in which types an instance may come."""

import io
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy.derive import copy_instance
from fleetfit.architecture import Architecture, Axis
from fleetfit.errors import ModelError


class Pair(NamedTuple):
    value: Tensor
    hidden: Tensor


class Answer(NamedTuple):
    aux: Tensor
    logits: Tensor


@dataclass
class Parts:
    mean: Tensor
    spread: Tensor


Make = Callable[[Tensor, Tensor, Tensor], Any]


class Returning(nn.Module):
    """Two classifiers of one hidden layer; `make` puts hidden values and both logits together."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make, self.up, self.first, self.second = make, nn.Linear(5, 12), nn.Linear(12, 2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x).relu()
        return self.make(hidden, self.first(hidden), self.second(hidden))


def make_rows() -> tuple[Any, Any]:
    rng = torch.Generator().manual_seed(3)
    y = torch.arange(80) % 2
    return (torch.randn(80, 5, generator=rng) + 3 * y[:, None]).numpy(), y.numpy()


@pytest.mark.parametrize(
    ("make", "quoted"),
    [
        (lambda hidden, a, b: {"first": a, "second": b}, ("first", "second")),
        (lambda hidden, a, b: OrderedDict(score=a + b), ("OrderedDict", "score")),
        (lambda hidden, a, b: Pair(a + b, hidden), ("Pair", "value", "hidden")),
        (lambda hidden, a, b: Parts(a + b, hidden), ("Parts", "mean", "spread")),
        (lambda hidden, a, b: [{"score": a + b}], ("score",)),
        (lambda hidden, a, b: (a, b), (2, "(2, 2)")),
        (lambda hidden, a, b: (a + b, hidden, a), (3, "(2, 2)")),
        (lambda hidden, a, b: [hidden, a + b], ("(2, 12)", "(2, 2)")),
        (lambda hidden, a, b: None, ("NoneType",)),
    ],
)
def test_a_value_whose_logits_are_unclear_is_refused(make: Make, quoted: tuple[object, ...]) -> None:
    with raises(ModelError, *quoted, key="model"):
        ff.run(model=Returning(make), data=make_rows(), rounds=1, progress=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda hidden, a, b: {"hidden": hidden, "logits": a + b},
        lambda hidden, a, b: Answer(hidden.sum(1), a + b),
        lambda hidden, a, b: (a + b, hidden),
        lambda hidden, a, b: (a + b,),
    ],
)
def test_logits_are_read_where_they_are_clear(make: Make) -> None:
    """Their values are the sum of two matrix products."""
    net, x = Returning(make), torch.randn(2, 5)
    derived = ff.derive(net, make_rows())
    with torch.no_grad():
        logits = derived.build(derived.plan.axes, derived.positions)(x)[-1]
        hidden = (x @ net.up.weight.T + net.up.bias).clamp(min=0)
        expected = hidden @ (net.first.weight + net.second.weight).T + net.first.bias + net.second.bias
    torch.testing.assert_close(logits, expected)


# ---- types ---------------------------------------------------------------------------------------------------------


def make_half() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2))
    net[2].half()
    return net


class Casting(nn.Module):
    """A layer in half precision between conversions, as in mixed checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.out = nn.Linear(5, 12), nn.Linear(12, 12).bfloat16(), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mid(self.up(x).bfloat16()).float())
        return out


class Turning(nn.Module):
    """A layer with one complex number a channel, as a parameter or a constant."""

    def __init__(self, is_parameter: bool) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(5, 12), nn.Linear(12, 2)
        turns = torch.polar(torch.ones(12), torch.linspace(0, 1, 12))
        if is_parameter:
            self.turns = nn.Parameter(turns)
        else:
            self.register_buffer("turns", turns)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out((self.up(x) * self.turns).real)
        return out


@pytest.mark.parametrize(
    ("net", "quoted"),
    [
        (nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 2)).double(), ("0.weight", "torch.float64")),
        (nn.Sequential(nn.Flatten(), nn.Linear(5, 2)).to(torch.float16), ("1.weight", "torch.float16")),
        (make_half(), ("2.weight", "torch.float16")),
        (Casting(), ("mid.weight", "torch.bfloat16")),
        (Turning(True), ("turns", "torch.complex64")),
    ],
)
def test_an_instance_of_another_type_is_refused_by_name(net: nn.Module, quoted: tuple[str, str]) -> None:
    with raises(ModelError, *quoted, key="model"):
        ff.run(model=net, data=make_rows(), rounds=1, progress=False)


@pytest.mark.parametrize(
    "value", [threading.Lock(), threading.RLock(), io.BytesIO(), math], ids=lambda value: type(value).__name__
)
def test_what_cannot_be_copied_is_shared(value: Any) -> None:
    net = Returning(lambda hidden, a, b: a + b)
    net.value = value
    assert copy_instance(net).value is value
    assert ff.run(model=net, data=make_rows(), rounds=1, progress=False).summary["failures"] == 0


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    net = Returning(lambda hidden, a, b: a + b)
    net.rows = (row for row in range(3))
    with raises(ModelError, "generator", key="model"):
        ff.run(model=net, data=make_rows(), rounds=1, progress=False)


def test_a_complex_constant_stays_and_counts() -> None:
    """The real part of a real number times e^(ia) is the number times cos(a)."""
    net, x = Turning(False), torch.randn(2, 5)
    derived = ff.derive(net, make_rows())
    with torch.no_grad():
        logits = derived.build(derived.plan.axes, derived.positions)(x)[-1]
        expected = net.out(net.up(x) * torch.cos(torch.linspace(0, 1, 12)))
    torch.testing.assert_close(logits, expected)


def test_complex_parameters_are_refused_by_name() -> None:
    class Family(Architecture):
        axes, blocks, positions = {"hidden": Axis(12)}, 1, (1,)

        def build(self, axes: Any, exits: Any) -> nn.Module:
            return Turning(True)

    with raises(ModelError, "turns", key="model"):
        ff.run(model=Family(), data=make_rows(), rounds=1, progress=False)
