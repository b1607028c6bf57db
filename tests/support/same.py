"""Whether two functions do the same for certain: the same object, or made of the same parts."""

import functools
from types import FunctionType
from typing import Any


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values do the same for certain."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return is_same((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, FunctionType):
        return one.__code__ is other.__code__ and is_same(_find_bound_values(one), _find_bound_values(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return isinstance(one, bool | int | float | str | bytes | None) and bool(one == other)


def _find_bound_values(function: FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__defaults__, function.__kwdefaults__, cells
