"""Some cases of a test in the quick suite, and all of them in the whole one."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def some_quick(cases: Sequence[Any], quick: Collection[Any]) -> list[Any]:
    """Return the cases of `pytest.mark.parametrize`, those that are not among the quick ones marked slow."""
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"no cases of this test: {unknown}"
    return [case if case in quick else _slow(case) for case in cases]


def one_of_each(cases: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return one pair for each first, whose seconds take turns: every first and every second is in some pair."""
    seconds: dict[Any, list[Any]] = {}
    for first, second in cases:
        seconds.setdefault(first, []).append(second)
    return [
        (first, seconds_of_kind[turn % len(seconds_of_kind)])
        for turn, (first, seconds_of_kind) in enumerate(seconds.items())
    ]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
