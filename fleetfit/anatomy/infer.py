"""Read a layout off an architecture's own builder: build it with one axis enlarged, and see which dimensions grow.

Where growth leaves several orders of places, a forward pass shows which it is (`arrange`).
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetfit.anatomy.architecture import Architecture, ExitModel, validate_architecture
from fleetfit.anatomy.depth import Place, Shapes, find_depths
from fleetfit.anatomy.growth import Growing, explain_by_growth
from fleetfit.anatomy.hints import count_groups, explain_division_error, explain_fixed_groups
from fleetfit.anatomy.meta import on_meta
from fleetfit.anatomy.weight_norms import forget_vectors
from fleetfit.errors import ModelError
from fleetfit.layout import Axis, Dimension, Layout, Segments, TensorLayout

_KEEPS = "_keeps_statistics"
"""An attribute of norms that keep their statistics."""


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
    check_real(module)
    for norm in batch_norms(module).values():
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    forget_vectors(module)
    return module


def check_real(module: nn.Module) -> None:
    """Refuse complex parameters.

    Raises:
        ModelError: There is one.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ModelError(
                f'the parameter "{name}" of {type(module).__name__} is complex ({parameter.dtype}), and FleetFit '
                "trains real numbers. Keep torch.view_as_real of it as the parameter, and call torch.view_as_complex "
                "in forward.",
                key="model",
            )


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
        input_shape: Shape of one sample, for a forward pass where growth alone does not tell.

    Raises:
        ModelError: Keys change with a size, growth is not affine, or no forward pass shows the order of a dimension's
            places. The message names parameter and dimension.
    """
    validate_architecture(architecture)
    chosen = tuple(exits) if exits is not None else tuple(architecture.positions)
    allowed = tuple(architecture.positions)
    if not chosen or list(chosen) != sorted(set(chosen)) or any(e not in allowed for e in chosen):
        raise ModelError(
            f"exits must be block counts among {allowed}, each once and ascending, got {chosen}.", key="exits"
        )
    frozen = frozenset(base)
    own = getattr(architecture, "find_layout", None)
    if own is not None:
        layout: Layout = own(chosen, frozen)
        return layout
    shape = None if input_shape is None else tuple(input_shape)
    axes = tuple(architecture.axes.items())  # which may be an attribute that its class does not compare
    infer: Callable[..., Layout] = _infer_once if _is_value(architecture) else _infer
    return infer(architecture, chosen, frozen, shape, axes)


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
    architecture: Architecture,
    chosen: tuple[int, ...],
    base: frozenset[str],
    input_shape: tuple[int, ...] | None,
    items: tuple[tuple[str, Axis], ...],
) -> Layout:
    # 1. build the full model
    axes = dict(items)
    full = {name: axis.size for name, axis in axes.items()}
    whole = _probe(architecture, full, chosen)
    if not whole.parameters:
        raise ModelError(f"{type(architecture).__name__}.build makes a module without parameters: nothing to train.")
    # 2. enlarge each axis by one granule, and then all
    slopes, fixed = _measure_growth(architecture, whole, chosen)
    # 3. explain each dimension by its growth, and by a forward pass where that does not tell
    sizes = {(name, d): n for name, shape in whole.shapes.items() for d, n in enumerate(shape)}
    segments: dict[Dimension, Segments] = {}
    for (name, d), size in sizes.items():
        part, growth = name.rpartition(".")[0], slopes.get((name, d), {})
        if d == 1 and len(growth) == 1 and part in fixed:
            _check_group(axes, name, size, next(iter(growth)), fixed[part])
        known = explain_by_growth(axes, f'"{name}", dimension {d} of size {size}', size, growth)
        if known is not None:
            segments[name, d] = known
    growing = Growing(axes, sizes, slopes, {dim: one for dim, one in segments.items() if dim in slopes})
    if growing.open:
        from fleetfit.anatomy.arrange import arrange  # models without such dimensions start without it

        segments |= arrange(architecture, lambda s: build_module(architecture, s, chosen), input_shape, growing)
    dims = {name: tuple(segments[name, d] for d in range(len(shape))) for name, shape in whole.shapes.items()}
    # 4. find the block or exit of each tensor
    places, by_order = _find_depth(architecture, whole, chosen)
    # 5. put the layout together, and compare it with a model of which all axes are enlarged
    trains = getattr(architecture, "trains", lambda name: True)
    tensors: dict[str, TensorLayout] = {}
    frozen: dict[str, TensorLayout] = {}
    for name in whole.shapes:
        is_sent = name not in base and trains(name)
        block, exit_ = places[name]
        (tensors if is_sent else frozen)[name] = TensorLayout(dims[name], block, exit_, name in whole.parameters)
    layout = Layout(axes, chosen, tensors, whole.aliases, frozen, by_order)
    if any(len(growth) > 1 for growth in slopes.values()):
        larger = {name: axis.size + axis.granule for name, axis in axes.items()}
        built = _probe(architecture, larger, chosen).shapes
        for name, shape in layout.complete.shapes(larger, chosen).items():  # which tells a product from a sum
            if built[name] != shape:
                raise ModelError(
                    f'"{name}": with every axis larger by a granule the layout predicts {shape}, the builder makes '
                    f"{built[name]}. Let each of its dimensions be a product or a sum of axes."
                )
    return layout


@functools.lru_cache(maxsize=64)
def _infer_once(*key: Any) -> Layout:
    return _infer(*key)


def _find_depth(
    architecture: Architecture, whole: "_Probe", exits: tuple[int, ...]
) -> tuple[Mapping[str, Place], frozenset[str]]:
    full = {name: axis.size for name, axis in architecture.axes.items()}
    positions = tuple(architecture.positions)
    return find_depths(whole.shapes, exits, positions, lambda some: _probe(architecture, full, some).shapes)


def find_classifiers(architecture: Architecture) -> frozenset[str]:
    """Return the tensors of classifiers; none where they are not found.

    Of a model with one exit and no name for it, the classifier is the last part of the module, if its outputs keep
    their size when all axes of width are larger.

    Args:
        architecture: The model family.
    """
    exits = tuple(architecture.positions)
    sizes = {name: axis.size for name, axis in architecture.axes.items()}
    larger = {name: n + architecture.axes[name].granule * architecture.axes[name].scaled for name, n in sizes.items()}
    whole, wide = (_probe(architecture, some, exits) for some in (sizes, larger))
    places, _ = _find_depth(architecture, whole, exits)
    classifiers = frozenset(name for name in whole.shapes if places[name][1] is not None)
    if classifiers or len(exits) > 1:
        return classifiers
    names, prefix = list(whole.parameters), ""
    while len(parts := dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in names)) == 1:
        prefix += f"{next(iter(parts))}."
    prefix += next(reversed(parts))
    last = [name for name in names if f"{name}.".startswith(f"{prefix}.")]
    keeps = whole.shapes[last[-1]][:1] == wide.shapes[last[-1]][:1]
    return frozenset(last) if keeps else frozenset()


@dataclass(frozen=True)
class _Probe:
    """A model at some sizes: shapes by name, the names of parameters, second names, groups of modules."""

    shapes: Shapes
    parameters: Sequence[str]
    aliases: dict[str, str]
    groups: dict[str, int]


def _probe(
    architecture: Architecture, sizes: Mapping[str, int], exits: tuple[int, ...], larger: str | None = None
) -> _Probe:
    """Build on the meta device, and read the shapes."""
    with on_meta():
        module = build_module(architecture, sizes, exits, larger)
    shapes: dict[str, tuple[int, ...]] = {}
    parameters = []
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor, is_parameter in named_tensors(module):
        other = first_name.setdefault(id(tensor), name)
        if other == name:
            shapes[name] = tuple(tensor.shape)
            parameters += [name] * is_parameter
        else:
            aliases[name] = other
    return _Probe(shapes, parameters, aliases, count_groups(module))


def _measure_growth(
    architecture: Architecture, whole: "_Probe", exits: tuple[int, ...]
) -> tuple[dict[Dimension, dict[str, int]], dict[str, int]]:
    """Return by how much each dimension grows with a granule of each axis, and the groups that no axis changes."""
    axes, slopes, fixed, by_axis = architecture.axes, dict[Dimension, dict[str, int]](), dict(whole.groups), {}
    full = {name: axis.size for name, axis in axes.items()}
    for name, axis in axes.items():
        one = by_axis[name] = _probe(architecture, {**full, name: axis.size + axis.granule}, exits, name)
        _check_names(name, whole.shapes, one.shapes)
        for tensor, shape in whole.shapes.items():
            for d, size in enumerate(shape):
                if growth := one.shapes[tensor][d] - size:
                    slopes.setdefault((tensor, d), {})[name] = growth
        fixed = {part: n for part, n in fixed.items() if one.groups.get(part) == n}
    uneven = _find_uneven(architecture, whole.shapes, exits, slopes)
    for name in (name for name in axes if name in uneven):
        two = _probe(architecture, {**full, name: axes[name].size + 2 * axes[name].granule}, exits, name)
        _check_growth(name, whole.shapes, by_axis[name].shapes, two.shapes)
    return slopes, fixed


def _find_uneven(
    architecture: Architecture, whole: Shapes, exits: tuple[int, ...], slopes: Mapping[Dimension, Mapping[str, int]]
) -> set[str]:
    """Return the axes of dimensions that are no sum of axes, as a model shows of which all are two granules larger."""
    sizes = {name: axis.size + 2 * axis.granule for name, axis in architecture.axes.items()}
    try:
        shapes = _probe(architecture, sizes, exits).shapes
    except ModelError:  # each by itself may fit
        return set(sizes)
    if shapes.keys() != whole.keys():
        return set(sizes)
    uneven: set[str] = set()
    for name, shape in whole.items():
        for d, size in enumerate(shape):
            growth = slopes.get((name, d), {})
            if shapes[name][d] != size + 2 * sum(growth.values()):
                uneven |= growth.keys() or sizes.keys()
    return uneven


def _check_growth(axis: str, whole: Shapes, one: Shapes, two: Shapes) -> None:
    _check_names(axis, whole, two)
    for name, shape in whole.items():
        for d, size in enumerate(shape):
            first, second = one[name][d] - size, two[name][d] - one[name][d]
            if first != second:
                raise ModelError(
                    f'"{name}", dimension {d}: one more granule of axis "{axis}" adds {first}, the next one {second}. '
                    "Sizes must grow evenly: make a size that is derived by rounding an axis of its own, or set the "
                    "axis's granule; of a square of one size, make the two factors axes of their own."
                )


def _check_names(axis: str, whole: Shapes, larger: Shapes) -> None:
    if whole.keys() != larger.keys():
        odd = sorted(whole.keys() ^ larger.keys())
        raise ModelError(
            f'enlarging axis "{axis}" changes which tensors exist: {", ".join(odd[:4])}. A size must not decide what '
            "is built."
        )


def _check_group(axes: Mapping[str, Axis], name: str, size: int, axis: str, groups: int) -> None:
    """Refuse a grouped convolution whose groups shrink with an axis that is not the channels of one group."""
    whole = axes[axis].size
    if size * groups == whole:
        raise ModelError(
            f'"{name}", dimension 1 of size {size}: a convolution in {groups} groups of {size} channels, {groups} of '
            f'them at every size of axis "{axis}" ({whole}), so that cutting the axis moves channels from group to '
            f"group. {explain_fixed_groups(groups, axis, size=whole)}"
        )
