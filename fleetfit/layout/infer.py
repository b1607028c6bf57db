"""Read a layout off an architecture's own builder: build it with one axis enlarged, and see which dimensions grow."""

import fnmatch
import functools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetfit.errors import ModelError
from fleetfit.layout.arrange import Growing, arrange
from fleetfit.layout.axes import Architecture, Axis, Declaration, ExitModel, read_declarations, validate_architecture
from fleetfit.layout.depth import find_depths
from fleetfit.layout.hints import (
    UndeclaredDimension,
    ask_for_arrangement,
    ask_for_product,
    ask_for_segments,
    count_groups,
    explain_division_error,
    explain_fixed_groups,
    format_question,
    pair_layers,
)
from fleetfit.layout.layout import Layout, Segment, TensorLayout
from fleetfit.layout.meta import on_meta
from fleetfit.layout.weight_norms import forget_vectors

_KEEPS = "_keeps_statistics"
"""An attribute of norms that keep their statistics."""

# ---- one dimension of a tensor: explained by its growth, or by a declaration where growth has several explanations -


def find_segments(
    axes: Mapping[str, Axis], name: str, d: int, size: int, growth: Mapping[str, int], declared: Sequence[Declaration]
) -> tuple[Segment, ...]:
    """Return the segments of axes that one dimension consists of.

    Args:
        axes: The architecture's axes.
        name: The tensor.
        d: The dimension.
        size: Its size in the full model.
        growth: By axis that moves it, how much it grows when that axis grows by one granule.
        declared: Declarations of the tensor.

    Raises:
        UndeclaredDimension: Growth leaves several ways, and no declaration says which.
        ModelError: Growth has no explanation, or a declaration contradicts it.
    """
    where = f'"{name}", dimension {d} of size {size}'
    declarations = [x for x in declared if x.of_dimension and x.dim in (None, d)]
    if not growth:
        if wrong := next((x for x in declarations if x.dim == d), None):
            raise ModelError(
                f"{where} is declared {wrong.kind}, but no axis moves it. Remove the declaration, or correct its dim."
            )
        return (Segment(None, size),)
    if len(growth) == 1:
        (axis,) = growth
        for segment in (Segment(axis), Segment(axis, per_granule=True)):
            if _fits((segment,), axes, size, growth):
                return (segment,)
    for one in declarations:
        segments = tuple(_make_segments(one, axes, growth))
        if _fits(segments, axes, size, growth):
            return segments
    raise _make_error(axes, where, name, d, size, growth, declarations)


def explains(one: Declaration, axes: Mapping[str, Axis], segments: Sequence[Segment]) -> bool:
    """Return whether a dimension has these segments by a declaration; growth alone explains whole axes."""
    moving = {axis: 0 for s in segments for axis in s.axes}
    first = segments[0]
    plain = len(segments) == 1 and first in (Segment(first.axis), Segment(first.axis, per_granule=True))
    return bool(moving) and not plain and tuple(_make_segments(one, axes, moving)) == tuple(segments)


def _fits(segments: Sequence[Segment], axes: Mapping[str, Axis], size: int, growth: Mapping[str, int]) -> bool:
    return _get_length(segments, axes) == size and _get_growth(segments, axes) == dict(growth)


def _get_length(segments: Sequence[Segment], axes: Mapping[str, Axis], larger: str = "") -> int:
    sizes = {name: axis.size + axis.granule * (name == larger) for name, axis in axes.items()}
    return sum(s.length(axes, sizes) for s in segments)


def _get_growth(segments: Sequence[Segment], axes: Mapping[str, Axis]) -> dict[str, int]:
    """Return by how much segments grow with one more granule of each axis that moves them."""
    moving = [axis for axis in axes if any(axis in s.axes for s in segments)]
    return {axis: _get_length(segments, axes, axis) - _get_length(segments, axes) for axis in moving}


def _make_segments(one: Declaration, axes: Mapping[str, Axis], growth: Mapping[str, int]) -> Iterator[Segment]:
    """Yield the segments of a declaration in a dimension that these axes move."""
    if one.kind == "product":
        yield from _multiply(one.parts)
    elif one.kind == "segments":
        for part in one.parts:
            if isinstance(part, int):
                yield Segment(None, part)
            elif isinstance(part, Declaration):
                yield from (s for s in _multiply(part.parts) if set(s.axes) <= growth.keys())
            else:
                yield from (Segment(axis) for axis in axes if fnmatch.fnmatchcase(axis, part) and axis in growth)
    elif len(growth) == 1:
        (axis,) = growth
        yield from (Segment(axis),) * one.factor if one.kind == "blocked" else (Segment(axis, per=one.factor),)


def _multiply(factors: Sequence[str | int | Declaration]) -> tuple[Segment, ...]:
    """Return the segments of a product, outermost factor first."""
    copies = 1
    for i, factor in enumerate(factors):
        if isinstance(factor, int):
            copies *= factor
            continue
        inner = _multiply(factors[i + 1 :])
        is_fixed = not inner[0].axes
        segment = Segment(str(factor), per=inner[0].per) if is_fixed else Segment(str(factor), within=inner)
        return (segment,) * copies
    return (Segment(None, copies),)


def _make_error(
    axes: Mapping[str, Axis],
    where: str,
    name: str,
    d: int,
    size: int,
    growth: Mapping[str, int],
    declared: Sequence[Declaration],
) -> ModelError:
    """Return the error of a dimension without an explanation."""
    proportional = all(by * axes[axis].size == size * axes[axis].granule for axis, by in growth.items())
    composed = [x for x in declared if x.kind in ("segments", "product")]
    if composed and not (proportional and len(growth) == 1):
        segments = tuple(_make_segments(composed[0], axes, growth))
        return ModelError(
            f"{where}: {composed[0]} adds up to {_get_length(segments, axes)} and grows by "
            f"{_get_growth(segments, axes)} per granule, but the builder has {size} and {dict(growth)}."
        )
    if len(growth) > 1 and proportional and size % math.prod(axes[axis].size for axis in growth) == 0:
        return ask_for_product(name, where, size, growth, axes)
    if len(growth) > 1 or not proportional:
        return ask_for_segments(name, where, size, growth, axes)
    axis, slope = next(iter(growth.items()))
    if size % axes[axis].size:
        return ModelError(
            f'{where} has {slope} elements per granule of axis "{axis}" ({axes[axis].granule} channels): neither one '
            "per granule nor a whole number per channel. Set the axis's granule so that it divides."
        )
    return ask_for_arrangement(name, where, axis, d, size // axes[axis].size, declared)


# ---- inference -----------------------------------------------------------------------------------------------------


def build_module(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], larger: str | None = None
) -> nn.Module:
    """Build a module without running statistics (see `fleetfit.evaluation`), and without the vectors of spectral norms.

    Args:
        architecture: The model family.
        sizes: Size of every axis.
        exits: Its exits.
        larger: The axis that is enlarged, for the message.

    Raises:
        ModelError: The builder failed or did not return a module.
    """
    try:
        module = architecture.build(dict(sizes), exits)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        message = f"{type(architecture).__name__}.build failed for axes {dict(sizes)} and exits {exits}: {cause}"
        raise ModelError(f"{message.rstrip('.')}.{explain_division_error(error, larger)}") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{type(architecture).__name__}.build must return an nn.Module, got {type(module).__name__}.")
    own_exits = getattr(module, "exits", None)
    if isinstance(module, ExitModel) and (not isinstance(own_exits, tuple | list) or tuple(own_exits) != exits):
        raise ModelError(
            f"{type(module).__name__}.exits must be the exits that it was built with, {exits}: set self.exits = exits "
            f"in its __init__; it is {own_exits!r}."
        )
    lazy = [name for name, tensor in module.state_dict(keep_vars=True).items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ModelError(f'"{lazy[0]}" has no size yet: lazy modules cannot be scaled, so give its input size.')
    complex_name = next((name for name, parameter in module.named_parameters() if parameter.is_complex()), None)
    if complex_name is not None:
        raise ModelError(
            f'the parameter "{complex_name}" of {type(module).__name__} is complex, and FleetFit trains real numbers. '
            "Keep torch.view_as_real of it as the parameter, and call torch.view_as_complex in forward.",
            key="model",
        )
    for norm in batch_norms(module).values():
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    forget_vectors(module)
    return module


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers of a module by name, but those that keep their statistics."""
    norms = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    return {name: norm for name, norm in norms.items() if not hasattr(norm, _KEEPS)}


def keep_statistics(norm: nn.Module) -> None:
    """Let a norm compute with its own running statistics, which are then frozen tensors of the model."""
    setattr(norm, _KEEPS, True)
    norm.eval()


def evaluate_kept_norms(module: nn.Module) -> None:
    """Put the norms that keep their statistics into evaluation mode."""
    for part in module.modules():
        if hasattr(part, _KEEPS):
            part.training = False


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, is parameter) of all parameters, then all saved floating-point buffers, aliases too."""
    saved = module.state_dict(keep_vars=True)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if name in saved and buffer.is_floating_point():
            yield name, buffer, False


def infer_layout(
    architecture: Architecture,
    exits: Sequence[int] | None = None,
    base: Iterable[str] = (),
    input_shape: Sequence[int] | None = None,
) -> Layout:
    """Read an architecture's layout off its builder; only once for architectures that are equal by their values.

    Args:
        architecture: The model family.
        exits: Exits of the full model; by default every position.
        base: Names of tensors that are never trained and are not sent.
        input_shape: Shape of one sample; without it, what growth alone does not show is refused.

    Raises:
        ModelError: Keys change with a size, growth is not affine, something ambiguous is not declared, or one tensor
            has two names. The message names parameter, dimension, factor and candidates, and the line to write.
    """
    validate_architecture(architecture)
    chosen = tuple(exits) if exits is not None else tuple(architecture.positions)
    _check_exits(architecture, chosen)
    frozen = frozenset(base)
    own = getattr(architecture, "find_layout", None)
    if own is not None:
        layout: Layout = own(chosen, frozen)
        return layout
    shape = None if input_shape is None else tuple(input_shape)
    if not _is_value(architecture):
        return _infer(architecture, chosen, frozen, shape)
    # axes and declarations may be attributes of an object that its class does not compare
    described = repr((dict(architecture.axes), read_declarations(architecture)))
    return _infer_once(cast(Hashable, architecture), chosen, frozen, shape, described)


def _is_value(architecture: Architecture) -> bool:
    """Return whether it compares by its values; one that is equal to itself only may be changed in place."""
    parts = [part for part in getattr(architecture, "__dict__", {}).values() if hasattr(part, "build")]
    if type(architecture).__eq__ is object.__eq__ or not all(map(_is_value, parts)):
        return False
    try:
        hash(architecture)
    except TypeError:
        return False
    return True


def _infer(
    architecture: Architecture, chosen: tuple[int, ...], base: frozenset[str], input_shape: tuple[int, ...] | None
) -> Layout:
    # 1. build the full model
    axes, declared = dict(architecture.axes), read_declarations(architecture)
    full = {name: axis.size for name, axis in axes.items()}
    whole = _probe(architecture, declared, full, chosen)
    if not any(is_parameter for _, is_parameter in whole.tensors.values()):
        raise ModelError(f"{type(architecture).__name__}.build makes a module without parameters: nothing to train.")
    _check_aliases(whole, declared, every=set(chosen) == set(architecture.positions))
    # 2. enlarge each axis by one granule and by two
    slopes: dict[tuple[str, int], dict[str, int]] = {}  # (tensor, dimension) -> axis -> growth per granule
    fixed = dict(whole.groups)
    for name, axis in axes.items():
        one, two = (
            _probe(architecture, declared, {**full, name: axis.size + n * axis.granule}, chosen, name) for n in (1, 2)
        )
        _record_growth(name, whole.tensors, one.tensors, two.tensors, slopes)
        fixed = {part: n for part, n in fixed.items() if one.groups.get(part) == n}
    # 3. explain each dimension by its growth and its declarations
    by_tensor = {name: matching for name in whole.tensors if (matching := _match_declarations(declared, name))}
    segments, missing = _find_all_segments(axes, whole.tensors, slopes, by_tensor, fixed)
    if missing:
        if input_shape is None:
            raise ModelError(format_question(pair_layers(missing)))
        sizes = {(name, d): n for name, (shape, _) in whole.tensors.items() for d, n in enumerate(shape)}
        growing = Growing(axes, sizes, slopes, {dim: one for dim, one in segments.items() if dim in slopes})
        segments |= arrange(architecture, lambda s: build_module(architecture, s, chosen), input_shape, growing)
    dims = {name: tuple(segments[name, d] for d in range(len(shape))) for name, (shape, _) in whole.tensors.items()}
    # 4. find the block or exit of each tensor
    depth = find_depths(
        {name: shape for name, (shape, _) in whole.tensors.items()},
        chosen,
        tuple(architecture.positions),
        lambda some: {n: shape for n, (shape, _) in _probe(architecture, declared, full, some).tensors.items()},
        by_tensor,
    )
    # 5. put the layout together, and compare it with a model of which all axes are enlarged
    trains = getattr(architecture, "trains", lambda name: True)
    tensors: dict[str, TensorLayout] = {}
    frozen: dict[str, TensorLayout] = {}
    for name, (_, is_parameter) in whole.tensors.items():
        is_sent = name not in base and trains(name)
        block, exit_ = depth.places[name]
        (tensors if is_sent else frozen)[name] = TensorLayout(dims[name], block, exit_, is_parameter)
    layout = Layout(axes, chosen, tensors, whole.aliases, frozen, depth.by_order)
    if any(len(growth) > 1 for growth in slopes.values()):
        larger = {name: axis.size + axis.granule for name, axis in axes.items()}
        _check_together(layout.complete, larger, _probe(architecture, declared, larger, chosen).tensors)
    return layout


@functools.lru_cache(maxsize=64)
def _infer_once(
    architecture: Hashable,
    chosen: tuple[int, ...],
    base: frozenset[str],
    input_shape: tuple[int, ...] | None,
    described: str,
) -> Layout:
    return _infer(cast(Architecture, architecture), chosen, base, input_shape)


def _check_exits(architecture: Architecture, exits: tuple[int, ...]) -> None:
    allowed = tuple(architecture.positions)
    if not exits or list(exits) != sorted(set(exits)) or any(e not in allowed for e in exits):
        raise ModelError(
            f"exits must be block counts among {allowed}, each once and ascending, got {exits}.", key="exits"
        )


_Tensors = dict[str, tuple[tuple[int, ...], bool]]
_Declared = Mapping[str, tuple[Declaration, ...]]


@dataclass(frozen=True)
class _Probe:
    """A model at some sizes: shapes by name (and whether a parameter), second names, groups of modules."""

    tensors: _Tensors
    aliases: dict[str, str]
    groups: dict[str, int]


def _probe(
    architecture: Architecture,
    declared: _Declared,
    sizes: Mapping[str, int],
    exits: tuple[int, ...],
    larger: str | None = None,
) -> _Probe:
    """Build on the meta device, and read the shapes."""
    with on_meta():
        module = build_module(architecture, sizes, exits, larger)
    tensors: _Tensors = {}
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor, is_parameter in named_tensors(module):
        other = first_name.setdefault(id(tensor), name)
        if other == name:
            tensors[name] = (tuple(tensor.shape), is_parameter)
        elif any(d.kind == "alias" for d in _match_declarations(declared, name)):
            aliases[name] = other
        else:
            raise ModelError(
                f'"{name}" and "{other}" are one tensor under two names. Averaging would count it twice: register it '
                f'once, or declare {{"{name}": alias("{other}")}}.'
            )
    return _Probe(tensors, aliases, count_groups(module))


def _check_aliases(whole: _Probe, declared: _Declared, every: bool) -> None:
    """Refuse an alias that is declared for another tensor than the one that it is.

    Args:
        whole: The full model.
        declared: Declarations by parameter name pattern.
        every: Whether it has all exits; else a declaration may name a tensor that is not built here.
    """
    for name, other in whole.aliases.items():
        names = [str(d.parts[0]) for d in _match_declarations(declared, name) if d.kind == "alias"]
        wrong = [one for one in names if whole.aliases.get(one, one) != other]
        unknown = [one for one in wrong if one not in whole.tensors and one not in whole.aliases]
        if len(wrong) == len(names) and (every or wrong != unknown):
            raise ModelError(
                f'"{name}" is declared alias("{wrong[0]}"), but it is the same tensor as "{other}". Declare '
                f'alias("{other}").'
            )


def _record_growth(
    axis: str, whole: _Tensors, one: _Tensors, two: _Tensors, slopes: dict[tuple[str, int], dict[str, int]]
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
                    "axis's granule; of a square of one size, make the two factors axes of their own."
                )
            if first:
                slopes.setdefault((name, d), {})[axis] = first


def _match_declarations(declared: _Declared, name: str) -> tuple[Declaration, ...]:
    return tuple(one for pattern, all_ in declared.items() if fnmatch.fnmatchcase(name, pattern) for one in all_)


def _find_all_segments(
    axes: Mapping[str, Axis],
    whole: _Tensors,
    slopes: Mapping[tuple[str, int], Mapping[str, int]],
    declared: _Declared,
    fixed: Mapping[str, int],
) -> tuple[dict[tuple[str, int], tuple[Segment, ...]], list[UndeclaredDimension]]:
    """Explain all dimensions that growth or a declaration explains; return the questions of the others."""
    segments: dict[tuple[str, int], tuple[Segment, ...]] = {}
    missing: list[UndeclaredDimension] = []
    for name, (shape, _) in whole.items():
        part = name.rpartition(".")[0]
        for d, size in enumerate(shape):
            growth = slopes.get((name, d), {})
            if d == 1 and len(growth) == 1 and part in fixed:
                _check_group(axes, name, size, next(iter(growth)), fixed[part])
            try:
                segments[name, d] = find_segments(axes, name, d, size, growth, declared.get(name, ()))
            except UndeclaredDimension as one:
                missing.append(one)
    return segments, missing


def _check_group(axes: Mapping[str, Axis], name: str, size: int, axis: str, groups: int) -> None:
    """Refuse a grouped convolution whose groups shrink with an axis that is not the channels of one group."""
    whole = axes[axis].size
    if size * groups == whole:
        raise ModelError(
            f'"{name}", dimension 1 of size {size}: a convolution in {groups} groups of {size} channels, {groups} of '
            f'them at every size of axis "{axis}" ({whole}), so that cutting the axis moves channels from group to '
            f"group. {explain_fixed_groups(groups, axis, size=whole)}"
        )


def _check_together(layout: Layout, sizes: Mapping[str, int], built: _Tensors) -> None:
    """Compare the shapes with all axes enlarged, which tells a product from a sum."""
    for name, shape in layout.shapes(sizes, layout.exits).items():
        if built[name][0] != shape:
            raise ModelError(
                f'"{name}": with every axis larger by a granule the layout predicts {shape}, the builder makes '
                f"{built[name][0]}. Check its declaration: product(...) multiplies, segments(...) adds."
            )
