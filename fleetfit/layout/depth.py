"""With which block or exit a tensor comes and goes: by its name, else by building with fewer exits."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fleetfit.errors import ModelError
from fleetfit.layout.axes import OF_DEPTH, Declaration

_BLOCK, _HEAD = re.compile(r"(?:.*\.)?blocks\.(\d+)\."), re.compile(r"(?:.*\.)?heads\.(\d+)\.")
_NUMBER = re.compile(r"\d+")
Place = tuple[int | None, int | None]
"""A block or an exit, or neither."""
Shapes = Mapping[str, tuple[int, ...]]
Build = Callable[[tuple[int, ...]], Shapes]
"""Builds the full width with some exits; returns the shape of each tensor."""


@dataclass(frozen=True)
class Depth:
    """When each tensor is there.

    Attributes:
        places: By name, its block or exit.
        by_order: Tensors of classifiers that are numbered by their order (an `nn.ModuleList`), so that a classifier has
            the same name only in models whose exits are the first ones.
    """

    places: Mapping[str, Place]
    by_order: frozenset[str] = field(default_factory=frozenset)


def depths(
    whole: Shapes,
    exits: tuple[int, ...],
    positions: Sequence[int],
    build: Build,
    declared: Mapping[str, Sequence[Declaration]],
) -> Depth:
    """Find the block or exit of each tensor.

    Names tell where they are `blocks.{i}` and `heads.{block count}` and models with fewer exits have the tensors that
    follow from it. Else the model is built with each shorter prefix of the exits and with the last one alone.

    Args:
        whole: The shapes of the full model.
        exits: Its exits.
        positions: Block counts after which a classifier may sit.
        build: Builds it with other exits.
        declared: Declarations by tensor.

    Raises:
        ModelError: A declaration contradicts what is built.
    """
    named = {name: _by_name(name, exits, positions) for name in whole}
    said = {name: place for name in whole if (place := _declared(name, declared.get(name, ()), exits)) is not None}
    found, places = _FewerExits(whole, exits, build, named), named | said
    probes = {exits[:1], exits[: (len(exits) + 1) // 2], exits[-1:]} - {exits}
    if all(_expected(places, some) == found.built(some).keys() & whole.keys() for some in probes):
        return Depth(places)
    for name in said:
        _check_declared(name, places[name], declared[name], found)
    places = {name: said.get(name) or _placed(name, found, positions) for name in whole}
    return Depth(places, found.by_order)


def _by_name(name: str, exits: tuple[int, ...], positions: Sequence[int]) -> Place:
    """Return what a name says; where there is one exit, numbers that do not fit mean something else."""
    block, head = _BLOCK.match(name), _HEAD.match(name)
    if head:
        number = int(head[1])
        return None, exits[0] if len(exits) == 1 and number not in positions else number
    if block is None or (len(exits) == 1 and int(block[1]) >= exits[0]):
        return None, None
    return int(block[1]), None


def _declared(name: str, declared: Sequence[Declaration], exits: tuple[int, ...]) -> Place | None:
    one = next((d for d in declared if d.kind in OF_DEPTH), None)
    if one is None:
        return None
    if one.kind == "block":
        if one.factor >= exits[-1]:
            raise ModelError(
                f'"{name}" is declared {one}, but a model with exits {exits} has it, and that has blocks 0 to '
                f"{exits[-1] - 1}."
            )
        return one.factor, None
    if one.factor not in exits:
        raise ModelError(
            f'"{name}" is declared {one}, but a model with exits {exits} has it, without an exit after block '
            f"{one.factor}: declare it where it belongs, or build it with that exit only."
        )
    return None, one.factor


def _check_declared(name: str, place: Place, declared: Sequence[Declaration], found: "_FewerExits") -> None:
    """Compare when a tensor is there with its declaration."""
    one = next(d for d in declared if d.kind in OF_DEPTH)
    alone = () if name in found.by_order else (found.exits[-1:],)
    for some in (*(found.exits[: i + 1] for i in range(len(found.exits))), *alone):
        if (name in _expected({name: place}, some)) != (name in found.built(some)):
            has = "has it" if name in found.built(some) else "does not have it"
            raise ModelError(f'"{name}" is declared {one}, but a model that is built with exits {some} {has}.')


def _expected(places: Mapping[str, Place], exits: tuple[int, ...]) -> set[str]:
    """Return the tensors that a model with these exits has if the places are right."""
    return {
        name
        for name, (block, exit_) in places.items()
        if (exit_ in exits if exit_ is not None else block is None or block < exits[-1])
    }


class _FewerExits:
    """What models with fewer exits have."""

    def __init__(self, whole: Shapes, exits: tuple[int, ...], build: Build, named: Mapping[str, Place]) -> None:
        self.whole, self.exits, self._build, self.named = whole, exits, build, named
        self._made: dict[tuple[int, ...], Shapes] = {exits: whole}

    def built(self, exits: tuple[int, ...]) -> Shapes:
        """Return what a model with these exits has; built once."""
        if exits not in self._made:
            self._made[exits] = self._build(exits)
        return self._made[exits]

    def alone(self, name: str) -> bool:
        """Tell whether a model with the last exit alone has it."""
        return name in self.built(self.exits[-1:])

    def first(self, name: str) -> int | None:
        """Return the number of the first exit with which it is there; None where it does not stay."""
        there = [name in self.built(self.exits[: i + 1]) for i in range(len(self.exits))]
        began = there.index(True)
        return began if all(there[began:]) else None

    @cached_property
    def of_exits(self) -> dict[str, int]:
        """Tensors that the last exit alone does not need, by the number of the exit that they come with."""
        names = (name for name in self.whole if not self.alone(name))
        return {name: i for name in names if (i := self.first(name)) is not None}

    def last_exit(self, name: str) -> bool:
        """Tell of a tensor that comes with the last exit whether it is its classifier's: named like the others'."""
        return self.named[name][1] == self.exits[-1] or _NUMBER.sub("#", name) in self._families

    @cached_property
    def _families(self) -> set[str]:
        return {_NUMBER.sub("#", name) for name in self.of_exits}

    @cached_property
    def by_order(self) -> frozenset[str]:
        """Tensors of the first exit that the last one alone has too, since classifiers are numbered by their order."""
        numbers: dict[tuple[str, str], dict[int, int]] = {}
        for name, i in self.of_exits.items():
            for part in _NUMBER.finditer(name):
                numbers.setdefault((name[: part.start()], name[part.end() :]), {})[i] = int(part[0])
        found = set()
        for (before, after), numbered in numbers.items():
            begins = {number - i for i, number in numbered.items()}
            if len(begins) == 1 and 0 not in numbered:
                found.add(f"{before}{begins.pop()}{after}")
        return frozenset(name for name in found if name in self.whole and self.first(name) == 0)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether any tensor comes with depth and stays, as those of blocks do."""
        later = (name for name in self.whole if self.alone(name) and self.first(name))
        return any(not self.last_exit(name) for name in later)

    def block(self, name: str, first: int, positions: Sequence[int]) -> range:
        """Return between which numbers its block lies, told by models that end between the exits, too."""
        low, high = (self.exits[first - 1] if first else 0), self.exits[first]
        there = {p: name in self.built((p,)) for p in positions if low < p < high}
        least = max((p for p, has in there.items() if not has), default=low)
        return range(least, min((p for p, has in there.items() if has and p > least), default=high))


def _placed(name: str, found: _FewerExits, positions: Sequence[int]) -> Place:
    """Return the place of a tensor by when it is there, and by its name where that leaves several."""
    first, named = found.first(name), found.named[name]
    if name in found.by_order:
        return None, found.exits[0]
    if first is None:
        return named
    if not found.alone(name):
        return None, found.exits[first]
    if first == len(found.exits) - 1 and found.last_exit(name):
        return None, found.exits[-1]
    if named[1] in found.exits and not found.of_exits:
        return named  # a classifier that is built without its exit, too: for the check to say
    if named[0] is not None and not found.has_blocks:
        return named  # blocks that are built whatever the depth, likewise
    between = found.block(name, first, positions)
    if named[0] is not None and named[0] in between:
        return named
    return (None, None) if between.start == 0 else (between.stop - 1, None)
