"""What functions are made of: seen by what they call, by hand."""

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.functional import dropout

from fleetfit.method.functions import alike, mentions


class Hooks:
    def choose(self) -> int:
        return 1


def asking(hooks: Hooks) -> int:
    return hooks.choose()


def calling(hooks: Hooks) -> int:
    return asking(hooks)


def silent(hooks: Hooks, other: Any = None) -> int:
    return 2 if other is None else 3


def given(one: Callable[..., int], hooks: Hooks, *, other: Callable[..., int] = silent) -> int:
    return one(hooks) + other(hooks)


def test_a_name_is_found_in_a_function_and_in_what_it_calls() -> None:
    assert mentions(asking, "choose") and mentions(calling, "choose")
    assert not mentions(silent, "choose") and not mentions(asking, "channels")


def test_a_partial_is_searched_with_all_that_it_binds() -> None:
    """The function itself, an argument by its place, one by its name; other bound values say nothing."""
    for found in (
        functools.partial(asking),
        functools.partial(silent, other=asking),
        functools.partial(given, asking),
        functools.partial(given, silent, other=calling),
        functools.partial(functools.partial(given, asking), other=silent),
    ):
        assert mentions(found, "choose"), found
    for missing in (functools.partial(silent, other=5), functools.partial(given, silent), functools.partial(silent)):
        assert not mentions(missing, "choose"), missing


def test_packages_that_call_no_hook_are_not_searched() -> None:
    assert "warnings" in dropout.__code__.co_names or "ValueError" in dropout.__code__.co_names
    assert not mentions(dropout, "ValueError") and not mentions(dropout, "warnings")


def test_tables_are_alike_key_by_key() -> None:
    assert alike({"a": [1, (2,)]}, {"a": [1, (2,)]})
    assert not alike({"a": 1}, {"a": 2}) and not alike({"a": 1}, {"b": 1}) and not alike({"a": 1}, {"a": 1.0})


def test_partials_are_alike_by_all_of_their_parts() -> None:
    assert alike(functools.partial(given, asking), functools.partial(given, asking))
    assert not alike(functools.partial(given, asking), functools.partial(given, silent))
    assert not alike(functools.partial(silent, other=1), functools.partial(silent, other=2))
    assert not alike(functools.partial(silent, other=1), functools.partial(asking))
