"""The block or exit of each tensor: by its name, else by building with fewer exits."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fleetfit.layout import TensorLayout

_BLOCK, _HEAD = re.compile(r"(?:.*\.)?blocks\.(\d+)\."), re.compile(r"(?:.*\.)?heads\.(\d+)\.")
_NUMBER = re.compile(r"\d+")
Place = tuple[int | None, int | None]
"""A block or an exit, or neither."""
Shapes = Mapping[str, tuple[int, ...]]
Build = Callable[[tuple[int, ...]], Shapes]
"""Builds the full width with some exits; returns the shape of each tensor."""


@dataclass(frozen=True)
class Depth:
    """The block or exit of each tensor.

    Attributes:
        places: The block or exit by the tensor's name.
        by_order: Tensors of classifiers that are numbered by their order (an `nn.ModuleList`), so that a classifier has
            the same name only in models whose exits are the first ones.
    """

    places: Mapping[str, Place]
    by_order: frozenset[str] = field(default_factory=frozenset)


def find_depths(whole: Shapes, exits: tuple[int, ...], positions: Sequence[int], build: Build) -> Depth:
    """Find the block or exit of each tensor.

    Names tell where they are `blocks.{i}` and `heads.{block count}` and models with fewer exits have the tensors that
    follow from it. Else the model is built with each shorter prefix of the exits and with the last one alone.

    Args:
        whole: The shapes of the full model.
        exits: Its exits.
        positions: Block counts after which a classifier may sit.
        build: Builds it with other exits.
    """
    by_name = {name: _parse_name(name, exits, positions) for name in whole}
    models = _Models(whole, exits, build, by_name)
    probes = {exits[:1], exits[: (len(exits) + 1) // 2], exits[-1:]} - {exits}
    tensors = {name: TensorLayout((), block, exit_, True) for name, (block, exit_) in by_name.items()}
    if all((name in models.build(few)) == one.present(few) for few in probes for name, one in tensors.items()):
        return Depth(by_name)
    return Depth({name: _find_place(name, models, positions) for name in whole}, models.by_order)


def _parse_name(name: str, exits: tuple[int, ...], positions: Sequence[int]) -> Place:
    """Return the place in a name; where there is one exit, numbers that do not fit mean something else."""
    block, head = _BLOCK.match(name), _HEAD.match(name)
    if head:
        number = int(head[1])
        return None, exits[0] if len(exits) == 1 and number not in positions else number
    if block is None or (len(exits) == 1 and int(block[1]) >= exits[0]):
        return None, None
    return int(block[1]), None


class _Models:
    """Models with fewer exits, each built once."""

    def __init__(self, whole: Shapes, exits: tuple[int, ...], build: Build, by_name: Mapping[str, Place]) -> None:
        self.whole, self.exits, self.by_name = whole, exits, by_name
        self._build = build
        self._built: dict[tuple[int, ...], Shapes] = {exits: whole}

    def build(self, exits: tuple[int, ...]) -> Shapes:
        """Return the shapes of a model with these exits."""
        if exits not in self._built:
            self._built[exits] = self._build(exits)
        return self._built[exits]

    def is_in_last_exit(self, name: str) -> bool:
        """Return whether a model with the last exit alone has a tensor."""
        return name in self.build(self.exits[-1:])

    def find_first(self, name: str) -> int | None:
        """Return the number of the first exit with which a tensor exists; None if a deeper model lacks it."""
        exists = [name in self.build(self.exits[: i + 1]) for i in range(len(self.exits))]
        first = exists.index(True)
        return first if all(exists[first:]) else None

    @cached_property
    def exit_tensors(self) -> dict[str, int]:
        """Tensors that the last exit alone does not need, by the number of the exit that they come with."""
        names = (name for name in self.whole if not self.is_in_last_exit(name))
        return {name: i for name in names if (i := self.find_first(name)) is not None}

    def is_last_classifier(self, name: str) -> bool:
        """Return whether a tensor that comes with the last exit is its classifier's: named like the others'."""
        return self.by_name[name][1] == self.exits[-1] or _NUMBER.sub("#", name) in self._classifier_names

    @cached_property
    def _classifier_names(self) -> set[str]:
        return {_NUMBER.sub("#", name) for name in self.exit_tensors}

    @cached_property
    def by_order(self) -> frozenset[str]:
        """Tensors of the first exit that the last one alone has too, since classifiers are numbered by their order."""
        numbers: dict[tuple[str, str], dict[int, int]] = {}
        for name, i in self.exit_tensors.items():
            for part in _NUMBER.finditer(name):
                numbers.setdefault((name[: part.start()], name[part.end() :]), {})[i] = int(part[0])
        first = set()
        for (before, after), numbered in numbers.items():
            begins = {number - i for i, number in numbered.items()}
            if len(begins) == 1 and 0 not in numbered:
                first.add(f"{before}{begins.pop()}{after}")
        return frozenset(name for name in first if name in self.whole and self.find_first(name) == 0)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether a tensor comes with depth and stays, as those of blocks do."""
        later = (name for name in self.whole if self.is_in_last_exit(name) and self.find_first(name))
        return any(not self.is_last_classifier(name) for name in later)

    def find_blocks(self, name: str, first: int, positions: Sequence[int]) -> range:
        """Return the possible blocks of a tensor, by models that end between the exits, too."""
        low, high = (self.exits[first - 1] if first else 0), self.exits[first]
        exists = {p: name in self.build((p,)) for p in positions if low < p < high}
        least = max((p for p, has in exists.items() if not has), default=low)
        return range(least, min((p for p, has in exists.items() if has and p > least), default=high))


def _find_place(name: str, models: _Models, positions: Sequence[int]) -> Place:
    """Return the place of a tensor by the models that have it, and by its name where several places fit."""
    first, by_name = models.find_first(name), models.by_name[name]
    if name in models.by_order:
        return None, models.exits[0]
    if first is None:
        return by_name
    if not models.is_in_last_exit(name):
        return None, models.exits[first]
    if first == len(models.exits) - 1 and models.is_last_classifier(name):
        return None, models.exits[-1]
    # classifiers, or blocks, that are built whatever the exits: the check refuses them
    if (by_name[1] in models.exits and not models.exit_tensors) or (by_name[0] is not None and not models.has_blocks):
        return by_name
    blocks = models.find_blocks(name, first, positions)
    if by_name[0] is not None and by_name[0] in blocks:
        return by_name
    return (None, None) if blocks.start == 0 else (blocks.stop - 1, None)
