"""A model family made of another one: what it says of itself is the other's, but for what is changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from fleetfit.errors import ModelError
from fleetfit.layout.axes import Architecture, Axis, State


@dataclass(frozen=True)
class Wrapped(Architecture):
    """A model family around another one.

    Attributes:
        inner: The other one.
        more: What its module has that the other one's has not, as a message names it.
    """

    more: ClassVar[str] = "what this model has beyond the one inside it"
    inner: Architecture
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)
    tokens: int = field(init=False, repr=False, compare=False)
    size_dependent: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.inner.axes))
        object.__setattr__(self, "blocks", self.inner.blocks)
        object.__setattr__(self, "tokens", getattr(self.inner, "tokens", 0))
        object.__setattr__(self, "size_dependent", getattr(self.inner, "size_dependent", ""))

    @property
    def checkpoint(self) -> str | None:
        """Where its pretrained tensors come from."""
        return getattr(self.inner, "checkpoint", None)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Block counts after which a classifier may sit."""
        return tuple(self.inner.positions)

    @cached_property
    def declared(self) -> Mapping[str, Any]:
        """Declarations by parameter name pattern."""
        return getattr(self.inner, "declared", {})

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis at a width."""
        return dict(self.inner.sizes(width))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the other one's module."""
        return self.inner.build(axes, exits)

    def pretrained(self, exits: tuple[int, ...]) -> State:
        """Return what the other one's checkpoint gives, by the names that it has here."""
        found = getattr(self.inner, "pretrained", None)
        return self.adopted(found(exits)) if found is not None else {}

    def trains(self, name: str) -> bool:
        """Tell whether a tensor is trained."""
        found = getattr(self.inner, "trains", None)
        return True if found is None else bool(found(name))

    def adopted(self, state: State) -> State:
        """Return another model's tensors by the names that they have here."""
        found = getattr(self.inner, "adopted", None)
        return state if found is None else found(state)

    def added(self, name: str) -> bool:
        """Tell whether a checkpoint may lack a tensor."""
        found = getattr(self.inner, "added", None)
        return False if found is None else bool(found(name))

    def merged(self, state: State) -> State:
        """Return the tensors with which the other one's module computes what this one's does.

        Args:
            state: All tensors of a module of this family.

        Raises:
            ModelError: It cannot.
        """
        raise ModelError(f"{self.more} cannot be merged into the tensors of a plain {type(self.inner).__name__}.")
