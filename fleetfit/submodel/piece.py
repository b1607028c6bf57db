"""A sub-model as a value: the kept channels of each axis, and the exits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Channels = range | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Submodel:
    """A piece of a model: kept channels by axis (axes not named are whole) and exits; no blocks after the last exit."""

    channels: Mapping[str, Channels]
    exits: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", {a: tidy(c) for a, c in self.channels.items()})
        object.__setattr__(self, "exits", tuple(int(e) for e in self.exits))
        object.__setattr__(self, "_key", (frozenset(self.channels.items()), self.exits))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Submodel) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    _key = (frozenset[tuple[str, Channels]](), ())  # replaced per object; equality and hash by value

    @property
    def sizes(self) -> dict[str, int]:
        """Kept channels per axis, as a count."""
        return {axis: len(channels) for axis, channels in self.channels.items()}

    @property
    def depth(self) -> int:
        """Blocks kept."""
        return self.exits[-1]

    def inside(self, other: "Submodel") -> bool:
        """Tell whether every element of this sub-model is in the other; both name the axes that the other narrows."""
        if not set(self.exits) <= set(other.exits):
            return False
        return all(
            axis in self.channels and _within(self.channels[axis], kept) for axis, kept in other.channels.items()
        )


def _within(some: Channels, kept: Channels) -> bool:
    if isinstance(some, range) and isinstance(kept, range):
        return not some or (kept.start <= some.start and some.stop <= kept.stop)
    return set(some) <= set(kept)


def tidy(channels: Iterable[int]) -> Channels:
    """Return a range where the channels are one, else a tuple."""
    if isinstance(channels, range) and channels.step == 1:
        return channels
    found = tuple(int(c) for c in channels)
    if found and found == tuple(range(found[0], found[0] + len(found))):
        return range(found[0], found[0] + len(found))
    return found
