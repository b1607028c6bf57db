"""Factories are called with a configuration's values; presets fix some arguments; declared parameters are unused."""

import inspect
from typing import Any, Literal

import pytest
from support import raises

from fleetfit.errors import ConfigError, check_range
from fleetfit.factories import Preset, call_factory, make_presets


def widget(size: int, shape: tuple[int, ...] = (3,), depth: int | None = None, rate: float = 0.1) -> dict[str, Any]:
    """Return its arguments.

    Args:
        size: How large,
            in both directions.
        shape: Of a sample.
        depth: How deep; 3 by default.
        rate: How fast.
    """
    return dict(locals())


def test_a_row_has_the_keys_that_it_leaves_open() -> None:
    row = Preset("The small one.", {"size": 4, "rate": 0.5}, {"depth": 7})
    other = Preset("The large one.", {"size": 9})
    small, large = make_presets(widget, {"small": row, "large": other})
    assert {key: p.default for key, p in inspect.signature(small).parameters.items()} == {"shape": (3,), "depth": 7}
    assert small() == {"size": 4, "shape": (3,), "depth": 7, "rate": 0.5}
    assert small((5,), depth=1) == {"size": 4, "shape": (5,), "depth": 1, "rate": 0.5}
    assert large(rate=2.0) == {"size": 9, "shape": (3,), "depth": None, "rate": 2.0}
    assert call_factory(small, "small", "[model]", {"depth": 2}, shape=(1, 2))["shape"] == (1, 2)
    with raises(ConfigError, "shape, depth", key="model.size"):
        call_factory(small, "small", "[model]", {"size": 2})
    with raises(ConfigError, "'deep'", key="model.depth"):
        call_factory(small, "small", "[model]", {"depth": "deep"})
    assert (inspect.getdoc(small) or "").startswith("The small one.\n") and small.__name__ == "small"


# ---- values against a signature -------------------------------------------------


def factory(
    rate: float = 0.1,
    count: int = 3,
    kind: Literal["a", "b"] = "a",
    on: bool = False,
    sizes: tuple[int, ...] = (),
    shape: Any = None,
) -> dict[str, Any]:
    return dict(locals())


def called(**values: Any) -> dict[str, Any]:
    settings: dict[str, Any] = call_factory(factory, "widget", "[section]", values)
    return settings


def test_values_fit_their_annotations() -> None:
    assert called(rate=1, sizes=[1, 2], kind="b") == {
        "rate": 1.0,
        "count": 3,
        "kind": "b",
        "on": False,
        "sizes": (1, 2),
        "shape": None,
    }
    assert isinstance(called(rate=1)["rate"], float)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": "fast"},
        {"rate": "0.1"},
        {"rate": True},
        {"rate": None},
        {"rate": [0.1]},
        {"count": 2.5},
        {"count": "3"},
        {"count": True},
        {"kind": "c"},
        {"kind": 1},
        {"on": "true"},
        {"on": 2},
        {"sizes": ["x"]},
        {"sizes": 3},
    ],
    ids=str,
)
def test_wrong_types_are_refused_with_the_value(wrong: dict[str, Any]) -> None:
    ((key, value),) = wrong.items()
    with raises(ConfigError, "widget", repr(value), key=f"section.{key}"):
        called(**wrong)


def test_unknown_and_missing_keys() -> None:
    with raises(ConfigError, "cuont", "rate", '"count"', key="section.cuont"):
        called(cuont=3)

    def needy(must: int) -> int:
        return must

    def needier(must: int, also: int, can: int = 1) -> int:
        return must + also + can

    with raises(ConfigError, "needy", key="section.must"):
        call_factory(needy, "needy", "[section]", {})
    with raises(ConfigError, "must", "also", key="section.must"):
        call_factory(needier, "needier", "[section]", {})
    with raises(ConfigError, "it", key="section.classes"):  # what FleetFit gives is not the user's to set
        call_factory(lambda classes: classes, "it", "[section]", {"classes": 2}, classes=1)


def test_an_error_of_a_factory_names_its_key() -> None:
    def factory(beta: float = 0.5) -> float:
        check_range("beta", beta, 0, 1)
        return beta

    for where, key in (("[method]", "method.beta"), ("[method.options.own]", "method.options.own.beta"),
                       ("[cohort] selection", "cohort.selection.beta"), ("--data", "beta")):  # fmt: skip
        with raises(ConfigError, "beta", 2.0, key=key):
            call_factory(factory, "factory", where, {"beta": 2.0})
    with raises(ConfigError, "beta", key="method.beta"):
        call_factory(factory, "factory", "[method]", {"beta": "much"})


def test_supplied_values_go_to_their_parameters() -> None:
    assert call_factory(lambda a: a, "it", "[s]", {}, a=1, b=2) == 1
    assert call_factory(lambda **all: all, "it", "[s]", {"c": 3}, a=1) == {"a": 1, "c": 3}


def test_annotations_that_cannot_be_read_check_nothing() -> None:
    def odd(x: "NoSuchType" = 1) -> Any:  # type: ignore[name-defined]  # noqa: F821
        return x

    assert call_factory(odd, "odd", "[s]", {"x": "anything"}) == "anything"


@pytest.mark.parametrize(
    ("key", "near"),
    [("clases", "classes"), ("inputshape", "input_shape"), ("chanels", "channels"), ("classes", None),
     ("input_shape", None), ("channels", None)],
)  # fmt: skip
def test_keys_from_the_data_are_explained(key: str, near: str | None) -> None:
    def model(channels: int, depth: int = 2) -> int:
        return channels + depth

    supplied: dict[str, Any] = {"classes": 3, "channels": 6, "input_shape": (6, 60)}
    with raises(ConfigError, f'"{key}"', "data", key=f"model.{key}") as caught:
        call_factory(model, "net.py:model", "[model]", {key: 3}, own=("derive",), **supplied)
    assert (f'"{near}"' in str(caught.value)) == (near is not None)
    with raises(ConfigError, '"dept"', '"depth"', key="model.dept") as caught:
        call_factory(model, "net.py:model", "[model]", {"dept": 3}, **supplied)
    assert "data" not in str(caught.value) and call_factory(model, "m", "[model]", {"depth": 1}, **supplied) == 7
