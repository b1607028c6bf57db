"""What an architecture says wrongly or leaves out: what it may be, and the line to write."""

import math
import re
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fleetfit.errors import FleetFitError, ModelError
from fleetfit.layout.axes import Axis, Declaration
from fleetfit.layout.layout import Layout

_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_NO_NUMBERS = re.compile(r"item\(\)|no data|register_meta|meta device type")
_ELSEWHERE = re.compile(r"(same|expected) device|dtype|scalar type|should be the same")


# ---- what an architecture says of itself, looked at before anything is made of it ----------------------------------

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
    """Return what a failed call of a module has to do with its samples, or with tensors that it makes itself; or ""."""
    said, tokens = str(error), getattr(architecture, "tokens", 0)
    whole = "Long" in said or "Int" in said
    if not tokens and "indices" in said and whole:
        return (
            " It seems to take tokens, and was given real numbers: take vocabulary as a parameter of the architecture "
            "and set self.tokens = vocabulary (token ids are below it; the data give it)."
        )
    if tokens and "dtype" in said and whole:
        return f" It was given tokens below {tokens}, as the architecture's tokens say; 0 stands for real numbers."
    if _NO_NUMBERS.search(said):
        return (
            f"{_failed_line(error)} FleetFit counts on the meta device, where tensors have shapes and no numbers: what "
            "forward does must not depend on numbers, as with .item(), float(x) or if x.sum() > 0."
        )
    if _ELSEWHERE.search(said) and not whole:
        return (
            f"{_failed_line(error)} FleetFit counts on the meta device, proves in float64 and trains where the device "
            "computes: a tensor that forward makes must not name another device or type, nor may forward convert what "
            "it is given (.float()). Use x.new_zeros(...), or torch.zeros(..., device=x.device, dtype=x.dtype)."
        )
    return ""


def _failed_line(error: BaseException) -> str:
    """Return the line of the model's own code in which an error was raised, as a sentence; "" where there is none."""
    lines = [(Path(frame.f_code.co_filename), n) for frame, n in traceback.walk_tb(error.__traceback__)]
    own = [(path, n) for path, n in lines if not any(path.is_relative_to(package) for package in _PACKAGES)]
    return f" It failed at line {own[-1][1]} of {own[-1][0].name}." if own else ""


# ---- fixed numbers of groups and heads: where a model has them, and how an architecture says it --------------------

_DIVISION = re.compile(r"divisible|not a multiple|multiple of", re.IGNORECASE)
_COUNTS = {"groups": "groups", "num_groups": "groups", "num_heads": "heads", "heads": "heads", "nhead": "heads"}


def groups_of(module: nn.Module) -> dict[str, int]:
    """Return how many groups each grouped convolution and each group norm has, by the module's name; only above one."""
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        n = part.groups if isinstance(part, _ConvNd) else part.num_groups if isinstance(part, nn.GroupNorm) else 1
        if isinstance(n, int) and n > 1:
            found[name] = n
    return found


def if_fixed(n: int | None, axis: str | None, what: str = "groups", size: int | None = None) -> str:
    """Return what to do where a model has a fixed number of groups or heads: they need no word of their own.

    Args:
        n: How many; None where that is not known.
        axis: The axis that they divide; None where that is not known.
        what: Groups or heads.
        size: The axis's size, where it is known.
    """
    one, many, called = what.removesuffix("s"), "4" if n is None else str(n), axis or "mid"
    shown = f"Axis({size // n})" if n and size and size % n == 0 else "its size"
    return (
        f'If its {what} are fixed, make axis "{called}" the channels of one {one} ({shown} in the full model), build '
        f'{many} * axes["{called}"] where there are {many} of them, and declare blocked({many}) there. If {what} come '
        f"and go whole, build size // granule of them, with the channels of one {one} as the axis's granule."
    )


def same_number(layout: Layout, large: nn.Module, small: nn.Module, axes: Collection[str]) -> str:
    """Return which modules have as many groups or heads in a small model as in the large one, and what to do; or "".

    Args:
        layout: The layout of the large model.
        large: A module of it.
        small: A module in which some axes are smaller.
        axes: Those axes; others do not matter.
    """
    here, there = _counts(large), _counts(small)
    for name, n in here.items():
        dims = [dim for t in layout.tensors if t.rpartition(".")[0] == name for dim in layout.tensors[t].dims]
        cut = [dim for dim in dims if len(dim) % n and any(axis in axes for s in dim for axis in s.axes)]
        if there.get(name) == n and cut:
            axis = next(axis for s in cut[0] for axis in s.axes if axis in axes)
            what = "heads" if isinstance(large.get_submodule(name), nn.MultiheadAttention) else "groups"
            kind = type(large.get_submodule(name)).__name__
            said = if_fixed(n, axis, what, layout.axes[axis].size)
            return f' "{name}", a {kind}, has {n} {what} at every size of axis "{axis}". {said}'
    return ""


def _counts(module: nn.Module) -> dict[str, int]:
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, nn.MultiheadAttention))
    return groups_of(module) | {name: part.num_heads for name, part in parts if part.num_heads > 1}


def indivisible(error: BaseException, axis: str | None) -> str:
    """Return what to do where building failed since a size cannot be divided; "" where it failed for something else."""
    if not _DIVISION.search(str(error)):
        return ""
    kind, n, what, where = _failed_at(error)
    return f" It is {kind}{where}. {if_fixed(n, axis, what)}" if kind else f" {if_fixed(n, axis, what)}"


def _failed_at(error: BaseException) -> tuple[str, int | None, str, str]:
    """Return the kind of the module that could not be made, its groups, what they are called, and who made it."""
    kind, n, what, where = "", None, "groups", ""
    outside: FrameType | None = None
    at = 0
    for frame, line in traceback.walk_tb(error.__traceback__):
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and type(own).__module__.startswith("torch.") and not kind:
            kind = f"the {type(own).__name__}"
            n, what = _counted(frame.f_locals)
            if outside is not None:
                maker = outside.f_locals.get("self")
                inside = f" in {type(maker).__name__}" if isinstance(maker, nn.Module) else ""
                where = f" made{inside} at line {at} of {Path(outside.f_code.co_filename).name}"
        elif not kind:
            outside, at = frame, line
    return kind, n, what, where


def _counted(values: Mapping[str, object]) -> tuple[int | None, str]:
    for key, what in _COUNTS.items():
        n = values.get(key)
        if isinstance(n, int) and not isinstance(n, bool):
            return n, what
    return None, "groups"


# ---- which dimension, what it may be, and the line to write --------------------------------------------------------

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_LISTED = 8


class Undeclared(ModelError):
    """A dimension of which growth does not tell how it is made up.

    Attributes:
        name: The tensor.
        what: The dimension and what is unclear, as a sentence.
        candidates: What it may be, from a declaration to when it is right.
    """

    def __init__(self, name: str, what: str, candidates: Mapping[str, str]) -> None:
        """Keep the parts, so that several dimensions can be asked for at once."""
        self.name, self.what, self.candidates = name, what, dict(candidates)
        super().__init__(question([self]))


def stacked_or_flat(
    name: str, where: str, axis: str, d: int, factor: int, declared: Sequence[Declaration]
) -> Undeclared:
    """Ask for k elements per channel; the likeliest way first, which depends on the dimension."""
    at = f", dim={d}" if declared else ""
    said = f" (declared: {declared[0]})" if declared else ""
    copies = next((n for n in (3, *range(2, factor)) if factor % n == 0 and n < factor), 0)
    ways = {
        f"blocked({factor}{at})": f"they are {factor} stacked copies (fused q, k, v; gates)",
        f"interleaved({factor}{at})": f"each channel owns {factor} neighbours (a flatten)",
    }
    if copies:
        ways[f'product({copies}, "{axis}", {factor // copies}{at})'] = (
            f"they are {copies} stacked copies in which each channel owns {factor // copies} neighbours (fused q, k, v "
            f"of heads; likewise other numbers that make {factor})"
        )
    # inputs of a layer come from a flatten, outputs are stacked: of whole heads where they are more than q, k and v
    likely = ("interleaved",) if d else ("product",) if copies == 3 else ()
    ways = dict(sorted(ways.items(), key=lambda way: not way[0].startswith(likely))) if likely else ways
    what = f'{where} has {factor} elements per channel of axis "{axis}"{said}, and growth cannot tell how they lie'
    return Undeclared(name, what, ways)


def concatenated(name: str, where: str, size: int, growth: Mapping[str, int], axes: Mapping[str, Axis]) -> ModelError:
    """Ask for the parts of a concatenation; the parts are known, their order is a guess (the architecture's)."""
    moving = ", ".join(f'"{axis}"' for axis in growth)
    times = {axis: growth[axis] // axes[axis].granule for axis in axes if axis in growth}
    fixed = size - sum(axes[axis].size * n for axis, n in times.items())
    if fixed < 0 or any(growth[axis] % axes[axis].granule for axis in growth):
        return ModelError(
            f"{where} moves with {moving} and is neither their sum nor their product. Declare its parts in order, "
            'products with product(...), such as segments(product("heads", "head_dim"), '
            'product("groups", "head_dim")), or only one of the axes may move it.'
        )
    front = [str(fixed)] if fixed else []
    when = "they are concatenated in this order; else put them in theirs" + (", fixed sizes as numbers" * (fixed > 0))
    ways = {_segments(front, [f'"{axis}"' for axis, n in times.items() for _ in range(n)]): when}
    if any(n > 1 for n in times.values()):
        owned = [f'"{axis}"' if n == 1 else f'product("{axis}", {n})' for axis, n in times.items()]
        ways[_segments(front, owned)] = "each channel owns its elements side by side"
    return Undeclared(name, f"{where} moves with {moving} and is not a multiple of one axis", ways)


def _segments(front: Sequence[str], parts: Sequence[str]) -> str:
    return f"segments({', '.join([*front, *parts])})"


def multiplied(name: str, where: str, size: int, growth: Mapping[str, int], axes: Mapping[str, Axis]) -> Undeclared:
    """Ask for the order of a product; its factors are known, their order is a guess (the architecture's)."""
    factors = [axis for axis in axes if axis in growth]
    rest = size // math.prod(axes[axis].size for axis in factors)
    shown = [f'"{axis}"' for axis in factors]
    what = f"{where} is the product of {', '.join(shown[:-1])} and {shown[-1]}" + (f", times {rest}" * (rest > 1))
    parts = [str(rest)] * (rest > 1) + shown
    when = "its factors lie in this order, outermost first; else put them in theirs, the number too"
    return Undeclared(name, what, {f"product({', '.join(parts)})": when})


def paired(missing: Sequence[Undeclared]) -> list[Undeclared]:
    """Return the same dimensions, those that take what a layer beside them made asked for as that layer's are.

    A layer that is k times as wide as its axis, and the next one that makes it as wide again (the inner layer of a
    transformer's block): what one stacks the other takes stacked, and is no flatten.
    """
    stacked = {(_beside(one.name), next(iter(one.candidates))) for one in missing}
    found = []
    for one in missing:
        first = next(iter(one.candidates))
        other = first.replace("interleaved", "blocked")
        if other != first and other in one.candidates and (_beside(one.name), other) in stacked:
            ways = {other: one.candidates[other], **one.candidates}
            one = Undeclared(one.name, one.what, ways)
        found.append(one)
    return found


def _beside(name: str) -> str:
    """Return the module in which the layer of a tensor lies."""
    return ".".join(name.split(".")[:-2])


def question(missing: Sequence[Undeclared]) -> str:
    """Return what is unclear of the first dimension, and the line that declares all of them."""
    first = missing[0]
    (chosen, when), *others = first.candidates.items()
    entries = _entries(missing)
    shown = ", ".join(f'"{pattern}": {declaration}' for pattern, declaration in list(entries.items())[:_MOST_LISTED])
    more = f", and {len(entries) - _MOST_LISTED} more tensors likewise" if len(entries) > _MOST_LISTED else ""
    text = f"{first.what}. Write in the architecture: self.declared = {{{shown}}}{more} if {when}"
    for declaration, reason in others:
        text += f", or {declaration} instead of {chosen} if {reason}"
    return f"{text}."


def _entries(missing: Sequence[Undeclared]) -> dict[str, str]:
    """Return a declaration by pattern: one pattern for what all blocks, or all classifiers, have alike."""
    groups: dict[str, list[Undeclared]] = {}
    for one in missing:
        groups.setdefault(_NUMBER.sub("*", one.name), []).append(one)
    found = {}
    for pattern, members in groups.items():
        declarations = [next(iter(one.candidates)) for one in members]
        longest = max(declarations, key=len)
        # segments of a block name axes that earlier blocks lack; those are left out where they do not move a dimension
        alike = all(d == longest or (_parts(d) and set(_parts(d)) <= set(_parts(longest))) for d in declarations)
        if len(members) > 1 and alike:
            found[pattern] = longest
        else:
            found |= {one.name: d for one, d in zip(members, declarations, strict=True)}
    return found


def _parts(declaration: str) -> list[str]:
    return re.findall(r'"[^"]+"', declaration) if re.fullmatch(r'segments\(("[^"]+"(, )?)+\)', declaration) else []
