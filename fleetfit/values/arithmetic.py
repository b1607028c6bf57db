"""How the modules of sub-models are computed: precision, memory format and compilation, by shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf, log
from typing import Any, Literal, get_args

from fleetfit.errors import ConfigError, truncate

Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]


@dataclass(frozen=True)
class Arithmetic:
    """How a module is computed; without arguments as a run with `engine.speed = "exact"` does.

    Attributes:
        precision: "bf16" computes products of matrices in bf16; weights, gradients and all that is kept are fp32.
        memory_format: How images and the weights of convolutions lie in memory.
        compile: Whether `torch.compile` makes kernels for the module.
    """

    precision: Precision = "fp32"
    memory_format: MemoryFormat = "contiguous"
    compile: bool = False

    def __str__(self) -> str:
        """Return the words: "bf16 channels_last"."""
        return " ".join((self.precision, self.memory_format, *(["compile"] if self.compile else [])))

    @staticmethod
    def read(text: Any) -> "Arithmetic":
        """Return what the words of `str` say.

        Raises:
            ConfigError: They are others.
        """
        words = text.split() if isinstance(text, str) else []
        known = [get_args(Precision), get_args(MemoryFormat), ("compile",)]
        if len(words) not in (2, 3) or not all(word in of for word, of in zip(words, known, strict=False)):
            raise ConfigError(
                f"how a level is computed must be {' or '.join(known[0])}, then {' or '.join(known[1])}, and "
                f'perhaps compile, such as "bf16 channels_last"; got {truncate(repr(text))}.',
                key="how",
            )
        return Arithmetic(words[0], words[1], len(words) == 3)  # type: ignore[arg-type]


PLAIN = Arithmetic()


@dataclass(frozen=True)
class Computed:
    """A shape, and how it is computed."""

    sizes: Mapping[str, int]
    exits: tuple[int, ...]
    arithmetic: Arithmetic

    @property
    def nest(self) -> dict[str, Any]:
        """The same as plain values."""
        return {"sizes": dict(self.sizes), "exits": list(self.exits), "how": str(self.arithmetic)}

    @staticmethod
    def restored(nest: Any) -> "Computed":
        """Return what `nest` says.

        Raises:
            ConfigError: It is no such nest.
        """
        if not isinstance(nest, Mapping) or nest.keys() != {"sizes", "exits", "how"}:
            raise ConfigError("the computation of a shape must be a table of sizes, exits and how.", key="how")
        sizes, exits = nest["sizes"], nest["exits"]
        if not isinstance(sizes, Mapping) or not all(_is_count(n) for n in sizes.values()):
            raise ConfigError("the sizes of a shape must be a table of whole numbers from 1.", key="sizes")
        if not isinstance(exits, Sequence) or isinstance(exits, str) or not exits or not all(map(_is_count, exits)):
            raise ConfigError("the exits of a shape must be a list of whole numbers from 1.", key="exits")
        return Computed(dict(sizes), tuple(exits), Arithmetic.read(nest["how"]))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def arithmetic_of(known: Sequence[Computed], sizes: Mapping[str, int], exits: tuple[int, ...]) -> Arithmetic:
    """Return how a shape is computed: as is said of it, or as the nearest shape is of which something is said.

    A method may make shapes that are no level's; that of two equally near ones counts which is said first.
    """
    nearest, least = PLAIN, inf
    for one in known:
        if one.exits == exits and all(one.sizes.get(axis) == size for axis, size in sizes.items()):
            return one.arithmetic
        apart = abs(log(one.exits[-1] / exits[-1])) + sum(
            abs(log(one.sizes[axis] / size)) for axis, size in sizes.items() if axis in one.sizes
        )
        if apart < least:
            nearest, least = one.arithmetic, apart
    return nearest


FINER = tuple(field.name for field in fields(Arithmetic))
"""The keys of `[engine]` that decide one of these for every shape."""
