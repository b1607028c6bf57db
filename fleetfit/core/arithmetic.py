"""How the modules of sub-models are computed: precision, memory format and compilation, by shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Any, Literal, get_args

from fleetfit.errors import ConfigError, truncate

Precision = Literal["fp32", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last", "rule-1"]
NEWEST_RULE: MemoryFormat = "rule-1"
"""By the sub-model's shape, apart for training and evaluation: `fleetfit.training.memory_format`. A later rule gets a
name of its own, so that a run keeps the rule that it began with."""


@dataclass(frozen=True)
class Arithmetic:
    """How a module is computed; without arguments as a run with `engine.speed = "exact"` does.

    Attributes:
        precision: "bf16" computes products of matrices in bf16; weights, gradients and all that is kept are fp32.
        memory_format: The memory format of images and of the weights of convolutions.
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
        """Parse the text that `str` makes.

        Raises:
            ConfigError: The text is not such words.
        """
        words = text.split() if isinstance(text, str) else []
        choices = [get_args(Precision), get_args(MemoryFormat), ("compile",)]
        if len(words) not in (2, 3) or not all(word in of for word, of in zip(words, choices, strict=False)):
            raise ConfigError(
                f"how a level is computed must be {' or '.join(choices[0])}, then {' or '.join(choices[1])}, and "
                f'perhaps compile, such as "bf16 channels_last"; got {truncate(repr(text))}.',
                key="how",
            )
        return Arithmetic(words[0], words[1], len(words) == 3)  # type: ignore[arg-type]


PLAIN = Arithmetic()


@dataclass(frozen=True)
class ShapeArithmetic:
    """A shape of a sub-model, and its arithmetic."""

    sizes: Mapping[str, int]
    exits: tuple[int, ...]
    arithmetic: Arithmetic

    @property
    def payload(self) -> dict[str, Any]:
        """Plain values, for a message."""
        return {"sizes": dict(self.sizes), "exits": list(self.exits), "how": str(self.arithmetic)}

    @staticmethod
    def from_payload(payload: Any) -> "ShapeArithmetic":
        """Return the arithmetic of a payload.

        Raises:
            ConfigError: The payload has other keys or values.
        """
        if not isinstance(payload, Mapping) or payload.keys() != {"sizes", "exits", "how"}:
            raise ConfigError("the computation of a shape must be a table of sizes, exits and how.", key="how")
        sizes, exits = payload["sizes"], payload["exits"]
        if not isinstance(sizes, Mapping) or not all(_is_count(n) for n in sizes.values()):
            raise ConfigError("the sizes of a shape must be a table of whole numbers from 1.", key="sizes")
        if not isinstance(exits, Sequence) or isinstance(exits, str) or not exits or not all(map(_is_count, exits)):
            raise ConfigError("the exits of a shape must be a list of whole numbers from 1.", key="exits")
        return ShapeArithmetic(dict(sizes), tuple(exits), Arithmetic.read(payload["how"]))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def find_arithmetic(entries: Sequence[ShapeArithmetic], sizes: Mapping[str, int], exits: tuple[int, ...]) -> Arithmetic:
    """Return how a shape is computed: by its own entry, or by that of the nearest shape.

    A method may make shapes that no level has. Of two equally near shapes the first entry counts.
    """
    nearest, least = PLAIN, inf
    for entry in entries:
        if entry.exits == exits and all(entry.sizes.get(axis) == size for axis, size in sizes.items()):
            return entry.arithmetic
        distance = abs(log(entry.exits[-1] / exits[-1])) + sum(
            abs(log(entry.sizes[axis] / size)) for axis, size in sizes.items() if axis in entry.sizes
        )
        if distance < least:
            nearest, least = entry.arithmetic, distance
    return nearest
