"""What an architecture says of itself, looked at before anything is made of it."""

from collections.abc import Mapping
from typing import Any

from fleetfit.errors import FleetFitError, ModelError
from fleetfit.layout.axes import Axis

_WIDTHS = (0.01, 0.3, 0.5, 1.0)


def check_described(architecture: Any) -> None:
    """Check the types and ranges of what an architecture says of itself.

    Raises:
        ModelError: Something is of the wrong type, or out of range; the message says what, and what it must be.
    """
    try:
        _check(type(architecture).__name__, architecture)
    except FleetFitError:
        raise
    except Exception as error:  # of properties and methods of somebody's own
        said = f"{type(error).__name__}: {error}"
        raise ModelError(f"{type(architecture).__name__} cannot say what it is made of: {said}.") from error


def _check(who: str, architecture: Any) -> None:
    _check_axes(who, architecture.axes)
    blocks = architecture.blocks
    if not _is_count(blocks, 1):
        raise ModelError(f"{who}.blocks must be the number of its blocks, at least 1; got {blocks!r}.")
    _check_positions(who, architecture.positions, blocks)
    tokens = getattr(architecture, "tokens", 0)
    if not _is_count(tokens, 0):
        raise ModelError(
            f"{who}.tokens must be the number of tokens that its samples are made of, or 0 where they are real "
            f"numbers; got {tokens!r}."
        )
    why = getattr(architecture, "size_dependent", "")
    if not isinstance(why, str):
        raise ModelError(
            f"{who}.size_dependent must say in words why a narrow model computes something else; got {why!r}."
        )
    for width in _WIDTHS:
        _check_sizes(who, architecture.axes, architecture.sizes(width), width)


def _check_axes(who: str, axes: Any) -> None:
    if not isinstance(axes, Mapping):
        raise ModelError(f'{who}.axes must be axes by name, such as {{"hidden": Axis(64)}}; got {type(axes).__name__}.')
    for name, axis in axes.items():
        if not isinstance(name, str) or not isinstance(axis, Axis):
            raise ModelError(f'{who}.axes must be axes by name, such as {{"hidden": Axis(64)}}; {name!r} is {axis!r}.')


def _check_positions(who: str, positions: Any, blocks: int) -> None:
    """Check the places of classifiers: block counts, ascending, the last of them the depth."""
    whole = isinstance(positions, tuple | list | range) and all(_is_count(p, 1) for p in positions)
    if not whole or not positions or list(positions) != sorted(set(positions)) or positions[-1] != blocks:
        raise ModelError(
            f"{who}.positions must be the block counts after which a classifier may sit, ascending, the last of them "
            f"the depth ({blocks}): such as ({blocks},) for one classifier at the end; got {positions!r}."
        )


def _check_sizes(who: str, axes: Mapping[str, Axis], sizes: Any, width: float) -> None:
    """Check what a width makes of the axes."""
    called = f"{who}.sizes({width:g})"
    if not isinstance(sizes, Mapping) or axes.keys() - sizes.keys():
        raise ModelError(f"{called} must return the size of each axis ({', '.join(axes)}) by name; got {sizes!r}.")
    for name, axis in axes.items():
        n = sizes[name]
        if not _is_count(n, 1) or n > axis.size or (axis.scaled and n % axis.granule):
            raise ModelError(
                f'{called}: axis "{name}" must be a whole number from 1 to {axis.size}'
                f"{f' in granules of {axis.granule}' if axis.granule > 1 else ''}; got {n!r}."
            )
        if width == 1 and n != axis.size:
            raise ModelError(f'{called}: at full width axis "{name}" must be whole, {axis.size}; got {n}.')


def _is_count(n: Any, least: int) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= least


def about_input(architecture: Any, error: BaseException) -> str:
    """Return what a failed call of a module has to do with what its samples are: tokens or real numbers; or ""."""
    said, tokens = str(error), getattr(architecture, "tokens", 0)
    if not tokens and "indices" in said and ("Long" in said or "Int" in said):
        return (
            " It seems to take tokens, and was given real numbers: take vocabulary as a parameter of the architecture "
            "and set self.tokens = vocabulary (token ids are below it; the data give it)."
        )
    if tokens and "dtype" in said:
        return f" It was given tokens below {tokens}, as the architecture's tokens say; 0 stands for real numbers."
    return ""
