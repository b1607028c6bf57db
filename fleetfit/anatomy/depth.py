"""The block or exit of each tensor: by its name, else by building with fewer exits."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from fleetfit.layout import TensorLayout

_BLOCK, _HEAD = re.compile(r"(?:.*\.)?blocks\.(\d+)\."), re.compile(r"(?:.*\.)?heads\.(\d+)\.")
_NUMBER = re.compile(r"\d+")
Place = tuple[int | None, int | None]
"""A block or an exit, or neither."""
Shapes = Mapping[str, tuple[int, ...]]
Build = Callable[[tuple[int, ...]], Shapes]
"""Builds the full width with some exits; returns the shape of each tensor."""


def find_depths(
    whole: Shapes, exits: tuple[int, ...], positions: Sequence[int], build: Build
) -> tuple[Mapping[str, Place], frozenset[str]]:
    """Find the block or exit of each tensor.

    Names tell where they are `blocks.{i}` and `heads.{block count}` and models with fewer exits have the tensors that
    follow from it. Else the model is built with each shorter prefix of the exits and with the last one alone.

    Args:
        whole: The shapes of the full model.
        exits: Its exits.
        positions: Block counts after which a classifier may sit.
        build: Builds it with other exits.

    Returns:
        The block or exit by the tensor's name, and the tensors of classifiers that are numbered by their order (an
        `nn.ModuleList`), so that a classifier has the same name only in models whose exits are the first ones.
    """
    by_name = {name: _parse_name(name, exits, positions) for name in whole}
    models = _Models(whole, exits, build)
    probes = {exits[:1], exits[: (len(exits) + 1) // 2], exits[-1:]} - {exits}
    tensors = {name: TensorLayout((), block, exit_, True) for name, (block, exit_) in by_name.items()}
    if all((name in models.build(few)) == one.present(few) for few in probes for name, one in tensors.items()):
        return by_name, frozenset()
    models.read(by_name)
    return {name: models.find_place(name, positions) for name in whole}, models.by_order


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
    """Models with fewer exits, each built once, and what they tell."""

    def __init__(self, whole: Shapes, exits: tuple[int, ...], build: Build) -> None:
        self.whole, self.exits, self._build = whole, exits, build
        self._built: dict[tuple[int, ...], Shapes] = {exits: whole}

    def build(self, exits: tuple[int, ...]) -> Shapes:
        """Return the shapes of a model with these exits."""
        if exits not in self._built:
            self._built[exits] = self._build(exits)
        return self._built[exits]

    def read(self, by_name: Mapping[str, Place]) -> None:
        """Find with which exit each tensor comes, and which tensors are of classifiers."""
        exits, self.by_name = self.exits, by_name
        self.alone, first = self.build(exits[-1:]), dict[str, int | None]()
        for name in self.whole:  # None if a deeper model lacks it
            exists = [name in self.build(exits[: i + 1]) for i in range(len(exits))]
            first[name] = exists.index(True) if all(exists[exists.index(True) :]) else None
        self.first = first
        # what the last exit alone does not need, by the exit that it comes with; the last classifier is named alike
        self.heads = {name: i for name, i in first.items() if name not in self.alone and i is not None}
        alike = {_NUMBER.sub("#", name) for name in self.heads}
        self.last = {n for n in self.whole if by_name[n][1] == exits[-1] or _NUMBER.sub("#", n) in alike}
        self.by_order = frozenset(name for name in self._list_first_classifier() if first.get(name) == 0)
        # a tensor that comes with depth and stays is a block's
        self.has_blocks = any(first[name] and name in self.alone and name not in self.last for name in self.whole)

    def _list_first_classifier(self) -> Iterator[str]:
        """Yield tensors of the first exit that the last one has too, where classifiers are numbered by their order."""
        numbers: dict[tuple[str, str], dict[int, int]] = {}
        for name, i in self.heads.items():
            for part in _NUMBER.finditer(name):
                numbers.setdefault((name[: part.start()], name[part.end() :]), {})[i] = int(part[0])
        for (before, after), numbered in numbers.items():
            begins = {number - i for i, number in numbered.items()}
            if len(begins) == 1 and 0 not in numbered:
                yield f"{before}{begins.pop()}{after}"

    def find_place(self, name: str, positions: Sequence[int]) -> Place:
        """Return the place of a tensor by the models that have it, and by its name where several places fit."""
        first, by_name = self.first[name], self.by_name[name]
        if name in self.by_order:
            return None, self.exits[0]
        if first is None:
            return by_name
        if name not in self.alone or (first == len(self.exits) - 1 and name in self.last):
            return None, self.exits[first]
        # classifiers, or blocks, that are built whatever the exits: the check refuses them
        if (by_name[1] in self.exits and not self.heads) or (by_name[0] is not None and not self.has_blocks):
            return by_name
        # its possible blocks, by models that end between the exits, too
        low, high = (self.exits[first - 1] if first else 0), self.exits[first]
        exists = {p: name in self.build((p,)) for p in positions if low < p < high}
        least = max((p for p, has in exists.items() if not has), default=low)
        end = min((p for p, has in exists.items() if has and p > least), default=high)
        if by_name[0] is not None and by_name[0] in range(least, end):
            return by_name
        return (None, None) if least == 0 else (end - 1, None)
