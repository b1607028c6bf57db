"""Declarations: what an architecture says where growth alone cannot tell how a dimension is made up."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Declaration:
    """What an architecture declares of a dimension; made by `blocked`, `interleaved`, `segments` and `alias`."""

    kind: str
    factor: int = 1
    parts: tuple[str | int, ...] = ()
    dim: int | None = None


def blocked(k: int, dim: int | None = None) -> Declaration:
    """Declare k stacked copies of an axis in one dimension: fused q, k, v; the gates of an LSTM."""
    return Declaration("blocked", factor=k, dim=dim)


def interleaved(k: int, dim: int | None = None) -> Declaration:
    """Declare that each channel owns k neighbours in one dimension: a flatten."""
    return Declaration("interleaved", factor=k, dim=dim)


def segments(*parts: str | int, dim: int | None = None) -> Declaration:
    """Declare a concatenation, in order: axis names, patterns of them (in the architecture's order), fixed sizes."""
    return Declaration("segments", parts=parts, dim=dim)


def alias(name: str) -> Declaration:
    """Declare that a tensor is another name of the tensor `name` (tied weights)."""
    return Declaration("alias", parts=(name,))
