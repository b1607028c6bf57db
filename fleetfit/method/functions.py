"""What functions are made of: whether two do the same, and whether one has a name in its code or reads an argument.

Where nobody can look inside, the answer is the careful one: not alike, mentioned, read.
"""

import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_FOREIGN = ("numpy", "torch", *sys.stdlib_module_names)
"""Packages whose functions call no hook."""


def alike(one: Any, other: Any) -> bool:
    """Tell whether two values do the same for certain: the same object, or made of the same parts."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, functools.partial):
        return alike((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, FunctionType):
        return one.__code__ is other.__code__ and alike(_bound(one), _bound(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    return isinstance(one, bool | int | float | str | bytes | None) and bool(one == other)


def _bound(function: FunctionType) -> tuple[Any, ...]:
    """Return the values that a function keeps."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__defaults__, function.__kwdefaults__, cells


def mentions(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function, or one that it calls, has a name in its code; True where nobody can look inside."""
    return _mentions(function, name, set())


def _mentions(function: Any, name: str, seen: set[CodeType]) -> bool:
    if isinstance(function, functools.partial):
        bound = [v for v in (*function.args, *function.keywords.values()) if callable(v)]
        return any(_mentions(f, name, seen) for f in (function.func, *bound))
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return True
    if function.__module__.partition(".")[0] in _FOREIGN:
        return False
    codes = [code for code in _codes(function.__code__) if code not in seen]
    seen.update(codes)
    names = {n for code in codes for n in code.co_names} | {c for code in codes for c in code.co_consts if c == name}
    if name in names:
        return True
    return any(_mentions(f, name, seen) for f in _reached(function, names))


def _reached(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield the functions that the names in a function's code stand for, and those that it keeps."""
    there = [function.__globals__[n] for n in names if n in function.__globals__]
    there += [cell.cell_contents for cell in function.__closure__ or ()]
    for value in there:
        if isinstance(value, FunctionType | functools.partial):
            yield value
        elif isinstance(value, ModuleType):
            yield from (f for n in names if isinstance(f := getattr(value, n, None), FunctionType))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def takes(function: Callable[..., Any], place: int) -> bool:
    """Tell whether a function reads the argument at a place; True where nobody can look inside."""
    while isinstance(function, functools.partial):
        if function.args:
            return True
        function = function.func
    if not isinstance(function, FunctionType):
        return True
    code = function.__code__
    if place >= code.co_argcount:
        return True  # it takes them in another way
    name = code.co_varnames[place]
    return any(
        name == step.argval and not step.opname.startswith("STORE")
        for inner in _codes(code)
        for step in dis.get_instructions(inner)
    )
