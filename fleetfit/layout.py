"""What can scale in a model: axes, declarations, and the layout inferred from an architecture's own builder.

A layout says for each tensor which stretch of which dimension belongs to which axis, and with which block or exit the tensor
comes and goes. It is read off the builder: `infer_layout` builds the model on the meta device with one axis enlarged by one
granule and by two, and looks at which dimensions moved. What growth alone cannot tell is declared by the architecture.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetfit.errors import ModelError

State = dict[str, Tensor]
"""Tensors by name."""
Carry = Any
"""Any nest of tensors, batch first in each."""


@dataclass(frozen=True)
class Axis:
    """One scalable size of an architecture.

    Attributes:
        size: Channels of the full model.
        granule: Channels come and go in whole granules (a head, a norm group).
        scaled: False for an axis that width never cuts, such as the classes.
        block: The first block that the axis belongs to.
    """

    size: int
    granule: int = 1
    scaled: bool = True
    block: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.granule < 1 or self.size % self.granule:
            raise ModelError(f"an axis of size {self.size} cannot be cut in granules of {self.granule}: both must be at "
                             "least 1 and the size a multiple of the granule.")  # fmt: skip


class Architecture(Protocol):
    """A model family: how to build the model for any sizes of its axes and any choice of exits.

    Inherit from it to get the defaults of `positions`, `declared` and `sizes`.
    """

    axes: Mapping[str, Axis]
    blocks: int

    @property
    def positions(self) -> tuple[int, ...]:
        """Block counts after which a classifier may sit; the planner (ScaleFL Eq. 1) chooses among them."""
        return tuple(range(1, self.blocks + 1))

    @property
    def declared(self) -> Mapping[str, Any]:
        """Declarations by parameter name pattern: what growth alone cannot tell."""
        return {}

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis at a width in (0, 1]: floor(width * size) in whole granules, at least one."""
        return default_sizes(self.axes, width)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        ...


def default_sizes(axes: Mapping[str, Axis], width: float) -> dict[str, int]:
    """Return floor(width * size) per axis, in whole granules, at least one granule; unscaled axes stay whole.

    Raises:
        ModelError: The width is outside (0, 1].
    """
    if not 0 < width <= 1:
        raise ModelError(f"a width must be above 0 and at most 1, got {width}.")
    kept = {}
    for name, axis in axes.items():
        granules = int(width * axis.size / axis.granule + 1e-9)  # 0.7 * 10 is 6.999..., and means 7
        kept[name] = max(1, granules) * axis.granule if axis.scaled else axis.size
    return kept


@runtime_checkable
class HasSegments(Protocol):
    """What early exits need of a module (ScaleFL Eqs. 3 and 4)."""

    exits: tuple[int, ...]

    def start(self, x: Tensor) -> Carry:
        """Return the state before the first block (the paper's H_0 after the stem)."""
        ...

    def segment(self, i: int, carry: Carry) -> Carry:
        """Run the blocks between exit i-1 and exit i (Eq. 3)."""
        ...

    def head(self, i: int, carry: Carry) -> Tensor:
        """Return the logits of exit i (Eq. 4)."""
        ...


class ExitModel(nn.Module):
    """Mixin that derives `forward` from `start`, `segment` and `head`.

    A model names its blocks `blocks.{i}` and its classifiers `heads.{block count}`; `exits` are the block counts after which
    its classifiers sit, shallow to deep.
    """

    exits: tuple[int, ...]

    def start(self, x: Tensor) -> Carry:
        """Return the state before the first block."""
        raise NotImplementedError

    def segment(self, i: int, carry: Carry) -> Carry:
        """Run the blocks after exit i-1 up to exit i (Eq. 3)."""
        blocks = self.get_submodule("blocks")
        for b in range(self.exits[i - 1] if i else 0, self.exits[i]):
            carry = blocks[b](carry)  # type: ignore[index]
        return carry

    def head(self, i: int, carry: Carry) -> Tensor:
        """Return the logits [B, classes] of exit i (Eq. 4)."""
        logits: Tensor = self.get_submodule(f"heads.{self.exits[i]}")(carry)
        return logits

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of every exit, shallow to deep."""
        carry = self.start(x)
        logits = []
        for i in range(len(self.exits)):
            carry = self.segment(i, carry)
            logits.append(self.head(i, carry))
        return logits


def outputs(module: nn.Module, x: Any) -> list[Tensor]:
    """Return the logits of every exit; a module that returns one tensor has one exit."""
    found = module(x)
    return [found] if isinstance(found, Tensor) else list(found)


# ---- declarations -------------------------------------------------------------------------------------------------------


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
    """Declare a concatenation: axis names, patterns of them (in the architecture's order), and fixed sizes, in order."""
    return Declaration("segments", parts=parts, dim=dim)


def alias(name: str) -> Declaration:
    """Declare that a tensor is another name of the tensor `name` (tied weights)."""
    return Declaration("alias", parts=(name,))


@dataclass(frozen=True)
class Segment:
    """One stretch of a dimension.

    Attributes:
        axis: Its axis, or None for a stretch of fixed size.
        per: Elements per channel; of a fixed stretch, its size.
        per_granule: One element per granule of the axis instead (a bias per head).
    """

    axis: str | None
    per: int = 1
    per_granule: bool = False

    def length(self, axes: Mapping[str, Axis], sizes: Mapping[str, int]) -> int:
        """Return its length when the axes have these sizes."""
        if self.axis is None:
            return self.per
        return sizes[self.axis] // axes[self.axis].granule if self.per_granule else sizes[self.axis] * self.per


@dataclass(frozen=True)
class TensorLayout:
    """What is known of one tensor.

    Attributes:
        dims: Per dimension its stretches; lengths add up to the shape.
        block: The block that it belongs to, or None.
        exit: The exit (block count) whose head it belongs to, or None.
        trainable: Whether it is a parameter that is trained; else a buffer that is averaged.
    """

    dims: tuple[tuple[Segment, ...], ...]
    block: int | None
    exit: int | None
    trainable: bool

    def present(self, exits: tuple[int, ...]) -> bool:
        """Tell whether a sub-model with these exits has the tensor."""
        if self.exit is not None:
            return self.exit in exits
        return self.block is None or self.block < exits[-1]


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a model with all its exits.

    Attributes:
        axes: The architecture's axes.
        exits: Exits of the full model, shallow to deep; the last is the full depth.
        tensors: By name, in canonical order: parameters first, then buffers that are averaged.
        aliases: Second names of tensors, by name.
    """

    axes: Mapping[str, Axis]
    exits: tuple[int, ...]
    tensors: Mapping[str, TensorLayout]
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def full_sizes(self) -> dict[str, int]:
        """The size of each axis in the full model."""
        return {name: axis.size for name, axis in self.axes.items()}

    def shapes(self, sizes: Mapping[str, int], exits: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that a sub-model of these sizes and exits has."""
        sizes = {**self.full_sizes, **sizes}
        return {
            name: tuple(sum(s.length(self.axes, sizes) for s in dim) for dim in tensor.dims)
            for name, tensor in self.tensors.items()
            if tensor.present(exits)
        }

    @cached_property
    def cuts(self) -> dict[Any, Any]:
        """Index work done once per sub-model, kept by `fleetfit.submodel`."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the cached index work behind when the layout goes to another process."""
        return {key: value for key, value in self.__dict__.items() if key != "cuts"}


# ---- building and inferring ---------------------------------------------------------------------------------------------

_BLOCK, _HEAD = re.compile(r"(?:.*\.)?blocks\.(\d+)\."), re.compile(r"(?:.*\.)?heads\.(\d+)\.")


def build_module(architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
    """Build a module and switch off running statistics: federated training has none (see `fleetfit.evaluate`).

    Raises:
        ModelError: The builder failed or did not return a module.
    """
    try:
        module = architecture.build(dict(sizes), exits)
    except Exception as error:
        message = f"{type(architecture).__name__}.build failed for axes {dict(sizes)} and exits {exits}: {error}"
        raise ModelError(message) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{type(architecture).__name__}.build must return an nn.Module, got {type(module).__name__}.")
    for norm in batch_norms(module).values():
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return module


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers of a module by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, is parameter) of all parameters, then of all floating-point buffers that are saved, aliases too."""
    saved = module.state_dict(keep_vars=True)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in saved and buffer.is_floating_point():
            yield name, buffer, False


def infer_layout(architecture: Architecture, exits: Sequence[int] | None = None, base: Iterable[str] = ()) -> Layout:
    """Read an architecture's layout off its builder.

    Args:
        architecture: The model family.
        exits: Exits of the full model; by default every position.
        base: Names of tensors that are never trained and do not travel.

    Raises:
        ModelError: Keys change with a size, growth is not affine, something ambiguous is not declared, or one tensor has two
            names. The message names parameter, dimension, factor and candidates.
    """
    chosen = tuple(exits) if exits is not None else tuple(architecture.positions)
    _check_exits(architecture, chosen)
    full = {name: axis.size for name, axis in architecture.axes.items()}
    whole, aliases = _probe(architecture, full, chosen)
    slopes: dict[tuple[str, int], dict[str, int]] = {}  # (tensor, dimension) -> axis -> growth per granule
    for name, axis in architecture.axes.items():
        one, _ = _probe(architecture, {**full, name: axis.size + axis.granule}, chosen)
        two, _ = _probe(architecture, {**full, name: axis.size + 2 * axis.granule}, chosen)
        _record_growth(name, whole, one, two, slopes)
    declared = _declarations(architecture, whole)
    kept_out = set(base)
    tensors = {}
    for name, (shape, is_parameter) in whole.items():
        if name in kept_out:
            continue
        dims = tuple(
            _dimension(architecture, name, d, size, slopes.get((name, d), {}), declared.get(name, ()))
            for d, size in enumerate(shape)
        )
        block, head = _BLOCK.match(name), _HEAD.match(name)
        tensors[name] = TensorLayout(
            dims, int(block[1]) if block and not head else None, int(head[1]) if head else None, is_parameter
        )
    return Layout(dict(architecture.axes), chosen, tensors, aliases)


def _check_exits(architecture: Architecture, exits: tuple[int, ...]) -> None:
    allowed = tuple(architecture.positions)
    if not exits or list(exits) != sorted(set(exits)) or any(e not in allowed for e in exits):
        raise ModelError(f"exits must be block counts among {allowed}, each once and ascending, got {exits}.")


_Probe = dict[str, tuple[tuple[int, ...], bool]]


def _probe(architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...]) -> tuple[_Probe, dict[str, str]]:
    """Build on the meta device; return shapes by name, and the declared aliases."""
    with torch.device("meta"):
        module = build_module(architecture, sizes, exits)
    found: _Probe = {}
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor, is_parameter in named_tensors(module):
        other = first_name.setdefault(id(tensor), name)
        if other == name:
            found[name] = (tuple(tensor.shape), is_parameter)
        elif any(d.kind == "alias" for d in _declared_for(architecture, name)):
            aliases[name] = other
        else:
            raise ModelError(
                f'"{name}" and "{other}" are one tensor under two names. Averaging would count it twice: register it once, or '
                f'declare {{"{name}": alias("{other}")}}.'
            )
    return found, aliases


def _record_growth(
    axis: str, whole: _Probe, one: _Probe, two: _Probe, slopes: dict[tuple[str, int], dict[str, int]]
) -> None:
    if whole.keys() != one.keys() or whole.keys() != two.keys():
        odd = sorted((whole.keys() ^ one.keys()) | (whole.keys() ^ two.keys()))
        raise ModelError(f'enlarging axis "{axis}" changes which tensors exist: {", ".join(odd[:4])}. A size must not decide '
                         "what is built.")  # fmt: skip
    for name, (shape, _) in whole.items():
        for d, size in enumerate(shape):
            first, second = one[name][0][d] - size, two[name][0][d] - one[name][0][d]
            if first != second:
                raise ModelError(
                    f'"{name}", dimension {d}: one more granule of axis "{axis}" adds {first}, the next one {second}. Sizes must '
                    "grow evenly: make a size that is derived by rounding an axis of its own, or set the axis's granule."
                )
            if first:
                slopes.setdefault((name, d), {})[axis] = first


def _declared_for(architecture: Architecture, name: str) -> tuple[Declaration, ...]:
    found: list[Declaration] = []
    for pattern, value in getattr(architecture, "declared", {}).items():
        if fnmatch.fnmatchcase(name, pattern):
            found.extend(value if isinstance(value, tuple) else (value,))
    return tuple(found)


def _declarations(architecture: Architecture, whole: _Probe) -> dict[str, tuple[Declaration, ...]]:
    return {name: found for name in whole if (found := _declared_for(architecture, name))}


def _dimension(
    architecture: Architecture,
    name: str,
    d: int,
    size: int,
    growth: Mapping[str, int],
    declared: tuple[Declaration, ...],
) -> tuple[Segment, ...]:
    """Explain one dimension by stretches of axes."""
    where = f'"{name}", dimension {d} of size {size}'
    ours = [x for x in declared if x.kind != "alias" and x.dim in (None, d)]
    concatenations = [x for x in ours if x.kind == "segments"]
    if not growth:
        wrong = next((x for x in ours if x.dim == d), None)
        if wrong is not None:
            raise ModelError(f"{where} is declared {wrong.kind}, but no axis moves it. Remove the declaration or mend "
                             "its dim.")  # fmt: skip
        return (Segment(None, size),)
    axes = architecture.axes
    if len(growth) > 1 or (len(growth) == 1 and _offset(axes, growth, size)):
        if not concatenations:
            parts = ", ".join(f'"{axis}"' for axis in growth)
            raise ModelError(f"{where} moves with {parts} and is not a multiple of one axis. If it is a concatenation, declare "
                             f"{{{name!r}: segments({parts}, ...)}} in its order, fixed sizes as numbers.")  # fmt: skip
        return _concatenation(axes, where, size, growth, concatenations[0])
    axis, slope = next(iter(growth.items()))
    return _multiple(axes[axis], axis, where, name, size, slope, ours)


def _offset(axes: Mapping[str, Axis], growth: Mapping[str, int], size: int) -> bool:
    axis, slope = next(iter(growth.items()))
    return slope * axes[axis].size != size * axes[axis].granule


def _multiple(
    axis: Axis, axis_name: str, where: str, name: str, size: int, slope: int, declared: Sequence[Declaration]
) -> tuple[Segment, ...]:
    if size == axis.size:
        return (Segment(axis_name),)
    if size * axis.granule == axis.size:
        return (Segment(axis_name, per_granule=True),)
    if size % axis.size:
        raise ModelError(f'{where} has {slope} elements per granule of axis "{axis_name}" ({axis.granule} channels): neither one '
                         "per granule nor a whole number per channel. Set the axis's granule so that it divides.")  # fmt: skip
    factor = size // axis.size
    for declaration in declared:
        if declaration.factor == factor and declaration.kind == "blocked":
            return (Segment(axis_name),) * factor
        if declaration.factor == factor and declaration.kind == "interleaved":
            return (Segment(axis_name, per=factor),)
    said = f" (declared: {declared[0].kind}({declared[0].factor}))" if declared else ""
    raise ModelError(
        f'{where} has {factor} elements per channel of axis "{axis_name}"{said}, and growth cannot tell how they lie. Declare '
        f"{{{name!r}: blocked({factor})}} if it is {factor} stacked copies (fused q, k, v; gates), or "
        f"{{{name!r}: interleaved({factor})}} if each channel owns {factor} neighbours (a flatten)."
    )


def _concatenation(
    axes: Mapping[str, Axis], where: str, size: int, growth: Mapping[str, int], declared: Declaration
) -> tuple[Segment, ...]:
    found: list[Segment] = []
    for part in declared.parts:
        if isinstance(part, int):
            found.append(Segment(None, part))
        else:
            found.extend(Segment(axis) for axis in axes if fnmatch.fnmatchcase(axis, part) and axis in growth)
    sizes = {name: axis.size for name, axis in axes.items()}
    total = sum(s.length(axes, sizes) for s in found)
    counted = {axis: sum(axes[axis].granule for s in found if s.axis == axis) for axis in growth}
    if total != size or counted != dict(growth):
        raise ModelError(f"{where}: segments{declared.parts} adds up to {total} and grows by {counted} per granule, but the "
                         f"builder has {size} and {dict(growth)}.")  # fmt: skip
    return tuple(found)
