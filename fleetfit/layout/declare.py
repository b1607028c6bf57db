"""Declarations: what an architecture says where building it at other sizes and depths cannot tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetfit.errors import ModelError

OF_DEPTH = ("block", "exit_after")
"""The kinds of declarations that say when a tensor is there."""


@dataclass(frozen=True)
class Declaration:
    """What an architecture declares of a dimension or of a tensor; made by the functions of this module."""

    kind: str
    factor: int = 1
    parts: tuple["str | int | Declaration", ...] = ()
    dim: int | None = None

    @property
    def of_dimension(self) -> bool:
        """Whether it says how a dimension is made up."""
        return self.kind in ("blocked", "interleaved", "segments", "product")

    def __str__(self) -> str:
        """Return it as it is written in an architecture."""
        inner = [str(self.factor)] if self.kind in ("blocked", "interleaved", *OF_DEPTH) else []
        inner += [f'"{part}"' if isinstance(part, str) else str(part) for part in self.parts]
        return f"{self.kind}({', '.join(inner + ([] if self.dim is None else [f'dim={self.dim}']))})"


def blocked(k: int, dim: int | None = None) -> Declaration:
    """Declare k stacked copies of an axis in one dimension: fused q, k, v; the gates of an LSTM."""
    return Declaration("blocked", factor=_count("blocked", k), dim=_place("blocked", dim))


def interleaved(k: int, dim: int | None = None) -> Declaration:
    """Declare that each channel owns k neighbours in one dimension: a flatten."""
    return Declaration("interleaved", factor=_count("interleaved", k), dim=_place("interleaved", dim))


def product(*factors: str | int, dim: int | None = None) -> Declaration:
    """Declare axes and numbers that are multiplied in one dimension, outermost first.

    `product(3, "heads", "head_dim")` is three stacked copies of heads that own as many rows as a head has channels;
    `product(3, "heads", 8)` the same with heads of a fixed size.

    Args:
        factors: Names of axes, each once, and numbers.
        dim: The dimension that it is meant for; by default any that it fits.

    Raises:
        ModelError: There is no axis among the factors, one twice, or a number below 1.
    """
    for factor in factors:
        if not isinstance(factor, str):
            _count("product", factor)
    axes = [factor for factor in factors if isinstance(factor, str)]
    if not axes or len(set(axes)) != len(axes):
        raise ModelError(
            'product(...) takes axes, each once, and numbers, outermost first, such as product(3, "heads", 8); got '
            f"{factors!r}."
        )
    return Declaration("product", parts=factors, dim=_place("product", dim))


def segments(*parts: str | int | Declaration, dim: int | None = None) -> Declaration:
    """Declare a concatenation, in order.

    Args:
        parts: Axis names, patterns of them (in the architecture's order), fixed sizes, and `product(...)` of axes.
        dim: The dimension that it is meant for; by default any that it fits.
    """
    for part in parts:
        if isinstance(part, Declaration) and part.kind != "product":
            raise ModelError(f"segments(...) takes axes, numbers and product(...) of them, got {part}.")
        if not isinstance(part, (str, Declaration)):
            _count("segments", part)
    if not parts:
        raise ModelError('segments() has no parts; name what lies side by side, such as segments("stem", "grow*").')
    return Declaration("segments", parts=parts, dim=_place("segments", dim))


def alias(name: str) -> Declaration:
    """Declare that a tensor is another name of the tensor `name` (tied weights)."""
    return Declaration("alias", parts=(name,))


def block(number: int) -> Declaration:
    """Declare the block that tensors belong to, counted from 0, where building with fewer exits does not tell."""
    return Declaration("block", factor=_count("block", number, least=0))


def exit_after(blocks: int) -> Declaration:
    """Declare the exit that tensors belong to, by the blocks before it, where building with fewer does not tell."""
    return Declaration("exit_after", factor=_count("exit_after", blocks))


def declarations_of(architecture: Any) -> dict[str, tuple[Declaration, ...]]:
    """Return what an architecture declares, by parameter name pattern.

    Raises:
        ModelError: It is something else than declarations by pattern, or names an axis that the architecture lacks.
    """
    said = getattr(architecture, "declared", {})
    if not isinstance(said, Mapping):
        raise ModelError(
            f'declared must be declarations by parameter name pattern, such as {{"*.qkv.*": blocked(3)}}; got {said!r}.'
        )
    found = {}
    for pattern, value in said.items():
        several = value if isinstance(value, (tuple, list)) else (value,)
        for one in several:
            if not isinstance(pattern, str) or not isinstance(one, Declaration):
                raise ModelError(
                    f"declared[{pattern!r}] must be blocked(...), interleaved(...), product(...), segments(...), "
                    f"alias(...), block(...), exit_after(...) or a tuple of them; got {one!r}."
                )
            _known(one, pattern, architecture.axes)
        found[pattern] = tuple(several)
    return found


def _known(one: Declaration, pattern: str, axes: Mapping[str, Any]) -> None:
    if not one.of_dimension:
        return
    for part in one.parts:
        if isinstance(part, Declaration):
            _known(part, pattern, axes)
        elif isinstance(part, str) and part not in axes and not set(part) & set("*?["):
            raise ModelError(f'"{pattern}": {one} names axis "{part}"; the model has {", ".join(axes)}.')


def _count(kind: str, n: Any, least: int = 1) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < least:
        raise ModelError(f"{kind}(...) takes whole numbers of at least {least}, got {n!r}.")
    return n


def _place(kind: str, dim: Any) -> int | None:
    return None if dim is None else _count(f"dim of {kind}", dim, least=0)
