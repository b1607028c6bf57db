"""Build modules, and read a layout off an architecture's own builder."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetfit.errors import ModelError
from fleetfit.layout.axes import Architecture, Axis
from fleetfit.layout.declare import Declaration
from fleetfit.layout.layout import Layout, Segment, TensorLayout
from fleetfit.layout.undeclared import Undeclared, concatenated, question, stacked_or_flat

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
    lazy = [name for name, tensor in module.state_dict(keep_vars=True).items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ModelError(f'"{lazy[0]}" has no size yet: lazy modules cannot be scaled, so give its input size.')
    for norm in batch_norms(module).values():
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return module


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers of a module by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, is parameter) of all parameters, then all saved floating-point buffers, aliases too."""
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
        ModelError: Keys change with a size, growth is not affine, something ambiguous is not declared, or one tensor
            has two names. The message names parameter, dimension, factor and candidates, and the line to write.
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
    trains, kept_out = getattr(architecture, "trains", lambda name: True), set(base)
    tensors: dict[str, TensorLayout] = {}
    frozen: dict[str, TensorLayout] = {}
    missing: list[Undeclared] = []
    for name, (shape, is_parameter) in whole.items():
        try:
            dims = tuple(
                _dimension(architecture, name, d, size, slopes.get((name, d), {}), declared.get(name, ()))
                for d, size in enumerate(shape)
            )
        except Undeclared as one:
            missing.append(one)
            continue
        block, head = _BLOCK.match(name), _HEAD.match(name)
        travels = name not in kept_out and trains(name)
        (tensors if travels else frozen)[name] = TensorLayout(
            dims, int(block[1]) if block and not head else None, int(head[1]) if head else None, is_parameter
        )
    if missing:
        raise ModelError(question(missing))
    return Layout(dict(architecture.axes), chosen, tensors, aliases, frozen)


def _check_exits(architecture: Architecture, exits: tuple[int, ...]) -> None:
    allowed = tuple(architecture.positions)
    if not exits or list(exits) != sorted(set(exits)) or any(e not in allowed for e in exits):
        raise ModelError(f"exits must be block counts among {allowed}, each once and ascending, got {exits}.")


_Probe = dict[str, tuple[tuple[int, ...], bool]]


def _probe(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...]
) -> tuple[_Probe, dict[str, str]]:
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
                f'"{name}" and "{other}" are one tensor under two names. Averaging would count it twice: register it '
                f'once, or declare {{"{name}": alias("{other}")}}.'
            )
    return found, aliases


def _record_growth(
    axis: str, whole: _Probe, one: _Probe, two: _Probe, slopes: dict[tuple[str, int], dict[str, int]]
) -> None:
    if whole.keys() != one.keys() or whole.keys() != two.keys():
        odd = sorted((whole.keys() ^ one.keys()) | (whole.keys() ^ two.keys()))
        raise ModelError(
            f'enlarging axis "{axis}" changes which tensors exist: {", ".join(odd[:4])}. A size must not decide what '
            "is built."
        )
    for name, (shape, _) in whole.items():
        for d, size in enumerate(shape):
            first, second = one[name][0][d] - size, two[name][0][d] - one[name][0][d]
            if first != second:
                raise ModelError(
                    f'"{name}", dimension {d}: one more granule of axis "{axis}" adds {first}, the next one {second}. '
                    "Sizes must grow evenly: make a size that is derived by rounding an axis of its own, or set the "
                    "axis's granule."
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
            what = f"{where} moves with {parts} and is not a multiple of one axis"
            raise concatenated(name, what, size, growth, axes)
        return _concatenation(axes, where, size, growth, concatenations[0])
    axis, slope = next(iter(growth.items()))
    return _multiple(axes[axis], axis, where, name, d, size, slope, ours)


def _offset(axes: Mapping[str, Axis], growth: Mapping[str, int], size: int) -> bool:
    axis, slope = next(iter(growth.items()))
    return slope * axes[axis].size != size * axes[axis].granule


def _multiple(
    axis: Axis,
    axis_name: str,
    where: str,
    name: str,
    dim: int,
    size: int,
    slope: int,
    declared: Sequence[Declaration],
) -> tuple[Segment, ...]:
    if size == axis.size:
        return (Segment(axis_name),)
    if size * axis.granule == axis.size:
        return (Segment(axis_name, per_granule=True),)
    if size % axis.size:
        raise ModelError(
            f'{where} has {slope} elements per granule of axis "{axis_name}" ({axis.granule} channels): neither one '
            "per granule nor a whole number per channel. Set the axis's granule so that it divides."
        )
    factor = size // axis.size
    for declaration in declared:
        if declaration.factor == factor and declaration.kind == "blocked":
            return (Segment(axis_name),) * factor
        if declaration.factor == factor and declaration.kind == "interleaved":
            return (Segment(axis_name, per=factor),)
    said = f" (declared: {declared[0].kind}({declared[0].factor}))" if declared else ""
    what = f'{where} has {factor} elements per channel of axis "{axis_name}"{said}, and growth cannot tell how they lie'
    raise stacked_or_flat(name, what, factor, dim if declared else None)


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
        raise ModelError(
            f"{where}: segments{declared.parts} adds up to {total} and grows by {counted} per granule, but the builder "
            f"has {size} and {dict(growth)}."
        )
    return tuple(found)
