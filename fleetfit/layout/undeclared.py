"""What an architecture must declare and does not: which dimension, what it may be, and the line to write."""

import math
import re
from collections.abc import Mapping, Sequence

from fleetfit.errors import ModelError
from fleetfit.layout.axes import Axis
from fleetfit.layout.declare import Declaration

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
            f"{where} moves with {moving} and is neither their sum nor their product. Declare what lies side by side "
            'in it, in order, with product(...) for what is multiplied: such as segments(product("heads", "head_dim"), '
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
