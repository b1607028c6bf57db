"""What an architecture must declare and does not: which dimension, what it may be, and the line to write."""

import re
from collections.abc import Mapping, Sequence

from fleetfit.errors import ModelError
from fleetfit.layout.axes import Axis

_NUMBER = re.compile(r"(^|\.)(blocks|heads)\.\d+(?=\.)")
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


def stacked_or_flat(name: str, what: str, factor: int, dim: int | None) -> Undeclared:
    """Ask for k elements per channel; `dim` where another dimension of the tensor is declared already."""
    where = "" if dim is None else f", dim={dim}"
    return Undeclared(
        name,
        what,
        {
            f"blocked({factor}{where})": f"they are {factor} stacked copies (fused q, k, v; gates)",
            f"interleaved({factor}{where})": f"each channel owns {factor} neighbours (a flatten)",
        },
    )


def concatenated(name: str, what: str, size: int, growth: Mapping[str, int], axes: Mapping[str, Axis]) -> Undeclared:
    """Ask for the parts of a concatenation; the parts are known, their order is a guess (the architecture's)."""
    times = {axis: max(1, growth[axis] // axes[axis].granule) for axis in axes if axis in growth}
    fixed = size - sum(axes[axis].size * n for axis, n in times.items())
    parts = ([str(fixed)] if fixed > 0 else []) + [f'"{axis}"' for axis, n in times.items() for _ in range(n)]
    when = "they are concatenated in this order; else put them in theirs" + (", fixed sizes as numbers" * (fixed > 0))
    return Undeclared(name, what, {f"segments({', '.join(parts)})": when})


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
        groups.setdefault(_NUMBER.sub(r"\1\2.*", one.name), []).append(one)
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
