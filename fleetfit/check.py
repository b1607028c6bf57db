"""Prove a layout before anything is trained with it.

Everything is computed in float64 with every parameter redrawn, biases and norm affines too:
1. permuting an axis everywhere, by whole granules, must not change the full model's outputs;
2. every level's predicted shapes are those that the builder makes, and its state loads strictly;
3. (on request) a sub-model with random channels equals the full model with the other channels zeroed and each norm over
   channels restricted to the kept ones. Models whose arithmetic depends on a size are exempt: leave this part out.

A right layout is exact to about 1e-15 (2e-7 where a module computes in fp32 inside); a wrong one is off by 0.06 and more.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.layout import Architecture, Layout, State, build_module, infer_layout, named_tensors, outputs
from fleetfit.seeds import numpy_rng, torch_rng
from fleetfit.submodel import Submodel, extract, put_back, random, whole

TOLERANCE = 1e-5
"""Largest difference of outputs, relative to the largest output, that passes for equal."""
_BATCH = 4
_MOST_EXITS = 6  # exits that are checked where the caller names no layout
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # those that mix channels; batch norm does not


@dataclass(frozen=True)
class LayoutReport:
    """What was proved.

    Attributes:
        architecture: The architecture, as text.
        axes: Of each axis its size and granule, as text.
        permutation: By axis, how far a permutation moved the outputs; axes of one granule are absent.
        levels: The levels whose shapes and states fit, as text.
        channels: By level, how far random channels were from the masked full model; empty when that part was not run.
        exempt: Why the part with random channels was not run, if it was not.
    """

    architecture: str
    axes: Mapping[str, str]
    permutation: Mapping[str, float]
    levels: tuple[str, ...]
    channels: Mapping[str, float] = field(default_factory=dict)
    exempt: str = ""

    def __str__(self) -> str:
        lines = [f"{self.architecture}: the layout is right."]
        for axis, text in self.axes.items():
            proof = (
                f"permuting moves outputs by {self.permutation[axis]:.0e}"
                if axis in self.permutation
                else "one granule"
            )
            lines.append(f"  axis {axis}: {text}; {proof}")
        for level in self.levels:
            proof = f"; random channels differ by {self.channels[level]:.0e}" if level in self.channels else ""
            lines.append(f"  level with {level}: shapes as predicted, state loads{proof}")
        if self.exempt:
            lines.append(f"  random channels: not checked, {self.exempt}")
        return "\n".join(lines)


def check_layout(
    architecture: Architecture,
    layout: Layout | None = None,
    levels: Sequence[Submodel] = (),
    channels_part: bool = False,
    input_shape: Sequence[int] | None = None,
    example: Tensor | None = None,
) -> LayoutReport:
    """Prove a layout, or say where it is wrong.

    Args:
        architecture: The model family.
        layout: Its layout; by default inferred with up to six exits.
        levels: Sub-models to build; by default four of different width and depth.
        channels_part: Also compare random channels with the masked full model.
        input_shape: Shape of one sample, of which random ones are drawn.
        example: A batch to use instead, for models that do not take floats.

    Returns:
        A report that prints readably. Without `layout` and `example` it is cached by the architecture's parameters.

    Raises:
        ModelError: The layout is wrong; the message names the axis and the tensors to look at.
    """
    if example is None and input_shape is None:
        raise ModelError("check_layout needs input_shape, the shape of one sample, or an example batch.")
    if layout is None and example is None and isinstance(architecture, Hashable):
        return _remembered(architecture, tuple(levels), channels_part, tuple(input_shape or ()))
    return _checked(architecture, layout, levels, channels_part, tuple(input_shape or ()), example)


@functools.lru_cache(maxsize=64)
def _remembered(
    architecture: Architecture, levels: tuple[Submodel, ...], channels_part: bool, input_shape: tuple[int, ...]
) -> LayoutReport:
    return _checked(architecture, None, levels, channels_part, input_shape, None)


def _checked(
    architecture: Architecture,
    layout: Layout | None,
    levels: Sequence[Submodel],
    channels_part: bool,
    input_shape: tuple[int, ...],
    example: Tensor | None,
) -> LayoutReport:
    layout = layout or infer_layout(architecture, _some_exits(architecture))
    rng = torch_rng("check_layout")
    full = _Full(architecture, layout, _batch(example, input_shape, rng), rng)
    permutation = {axis: error for axis in layout.axes if (error := _permuted(full, axis)) is not None}
    levels = levels or _some_levels(architecture, layout)
    modules = {_text(level): (level, _loaded(full, level)) for level in levels}
    exempt = _unreachable(full) if channels_part else "it was not asked for"
    channels = {} if exempt else {name: _random_channels(full, level) for name, (level, _) in modules.items()}
    axes = {
        name: f"{a.size} channels in granules of {a.granule}" + ("" if a.scaled else ", never cut")
        for name, a in layout.axes.items()
    }
    return LayoutReport(str(architecture), axes, permutation, tuple(modules), channels, exempt)


def _batch(example: Tensor | None, input_shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if example is None:
        return torch.randn(_BATCH, *input_shape, generator=rng, dtype=torch.float64)
    return example.double() if example.is_floating_point() else example


def _some_exits(architecture: Architecture) -> tuple[int, ...]:
    """Return up to six positions, evenly spread, the last one among them."""
    positions = tuple(architecture.positions)
    step = max(1, -(-len(positions) // _MOST_EXITS))
    return positions[::-1][::step][::-1]


def _some_levels(architecture: Architecture, layout: Layout) -> list[Submodel]:
    found = []
    for i, width in enumerate((0.3, 0.5, 0.8, 1.0)):
        exits = layout.exits[: max(1, len(layout.exits) * (i + 1) // 4)]
        sizes = architecture.sizes(width)
        found.append(Submodel({axis: range(sizes[axis]) for axis in layout.axes}, exits))
    return found


def _text(level: Submodel) -> str:
    return f"exits {', '.join(map(str, level.exits))} and " + ", ".join(f"{a} {n}" for a, n in level.sizes.items())


# ---- the full model with redrawn parameters --------------------------------------------------------------------------


class _Full:
    """The full model in float64 with redrawn parameters, an input, and what it makes of it."""

    def __init__(self, architecture: Architecture, layout: Layout, x: Tensor, rng: torch.Generator) -> None:
        self.architecture, self.layout, self.x = architecture, layout, x
        self.module = build_module(architecture, layout.full_sizes, layout.exits).eval()
        everything = {}
        for name, tensor, is_parameter in named_tensors(self.module):
            everything[name] = _redrawn(tensor, rng) if is_parameter else tensor.detach().clone().float()
        self.state: State = {name: everything[name] for name in layout.tensors}
        self.base = {n: t for n, t in everything.items() if n not in layout.tensors and n not in layout.aliases}
        self.module.double()
        self.expected = self.outputs(self.state)
        if not all(torch.isfinite(out).all() for out in self.expected):
            raise ModelError(f"{architecture}: random parameters give outputs that are not finite, so the layout cannot "
                             "be checked.")  # fmt: skip

    def outputs(self, state: State) -> list[Tensor]:
        """Return the logits of every exit under a full state."""
        load(self.module, {**self.base, **state})
        try:
            with torch.no_grad():
                return outputs(self.module, self.x)
        except Exception as error:
            shape = tuple(self.x.shape)
            raise ModelError(f"{self.architecture} does not accept a batch of shape {shape}: {error}") from error


def _redrawn(parameter: Tensor, rng: torch.Generator) -> Tensor:
    """Return a parameter drawn anew, in fp32 so that cutting keeps it exactly: vectors in 0.5..1.5, matrices by fan-in."""
    if parameter.dim() < 2:
        return 0.5 + torch.rand(parameter.shape, generator=rng)
    return torch.randn(parameter.shape, generator=rng) / (parameter.numel() / parameter.shape[0]) ** 0.5


def load(module: nn.Module, state: State) -> None:
    """Copy a state into a module whose tensors have exactly these names; second names of tensors may be absent."""
    missing, unexpected = module.load_state_dict(state, strict=False)
    own = {name: tensor for name, tensor, _ in named_tensors(module)}
    filled = {id(own[name]) for name in state if name in own}
    missing = [name for name in missing if name in own and id(own[name]) not in filled]
    if missing or unexpected:
        raise ModelError(f"a state does not load: missing {missing[:3]}, unexpected {unexpected[:3]}.")


def _difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference over all exits, each relative to its largest output."""
    if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return float("inf")
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in zip(ours, theirs, strict=True))


# ---- part 1: permutations --------------------------------------------------------------------------------------------


def _permuted(full: _Full, axis: str) -> float | None:
    """Permute an axis everywhere; return how far the outputs moved, or None for an axis of one granule."""
    kept = _permutation(full.layout, axis)
    if kept is None:
        return None
    error = _moved(full, {axis: kept})
    if not full.layout.axes[axis].scaled and error > TOLERANCE:  # classes: the logits may be permuted with them
        index = torch.tensor(kept)
        ours = full.outputs(extract(full.layout, full.state, Submodel({axis: kept}, full.layout.exits)))
        theirs = [t.index_select(-1, index) if t.shape[-1] == len(kept) else t for t in full.expected]
        error = _difference(ours, theirs)
    if error > TOLERANCE:
        raise ModelError(f'permuting the channels of axis "{axis}" everywhere changes the outputs by {error:.2g} of their '
                         f"size, so its layout is wrong. {_suspicion(full, axis, kept)}")  # fmt: skip
    return error


def _permutation(layout: Layout, axis: str) -> tuple[int, ...] | None:
    granule = layout.axes[axis].granule
    count = layout.axes[axis].size // granule
    if count < 2:
        return None
    order = torch.randperm(count, generator=torch_rng("check_layout", axis)).tolist()
    if order == sorted(order):
        order = order[::-1]
    return tuple(g * granule + i for g in order for i in range(granule))


def _moved(full: _Full, channels: Mapping[str, tuple[int, ...]], but: str = "") -> float:
    state = extract(full.layout, full.state, Submodel(channels, full.layout.exits))
    if but:
        state[but] = full.state[but]
    return _difference(full.outputs(state), full.expected)


def _suspicion(full: _Full, axis: str, kept: tuple[int, ...]) -> str:
    """Say where to look: an axis that must move with this one, a declaration, or single tensors."""
    axes = full.layout.axes
    for other, theirs in axes.items():
        same = other != axis and (theirs.size, theirs.granule) == (axes[axis].size, axes[axis].granule)
        if same and _moved(full, {axis: kept, other: kept}) <= TOLERANCE:
            return f'Permuted together with axis "{other}" it is right: the two are one stream (a residual sum?), so give them one axis.'
    users = {
        name: [dim for dim in tensor.dims if any(s.axis == axis for s in dim)]
        for name, tensor in full.layout.tensors.items()
    }
    users = {name: dims for name, dims in users.items() if dims}
    declared = [name for name, dims in users.items() if any(len(dim) > 1 or dim[0].per > 1 for dim in dims)]
    if declared:
        return f"Look at the declarations (blocked, interleaved or segments, and their order) of {_listed(declared)}."
    single = [name for name in list(users)[:200] if _moved(full, {axis: kept}, but=name) <= TOLERANCE]
    if single:
        return f"It is right when {_listed(single)} stays as it is: that tensor does not follow the axis."
    return (
        f"Look at the tensors that follow it ({_listed(list(users))}) and at what they are added to or multiplied by."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f'"{name}"' for name in names[:4]) + more


# ---- part 2: shapes and strict loading -------------------------------------------------------------------------------


def _loaded(full: _Full, level: Submodel) -> nn.Module:
    """Build a level's module, compare its shapes with the predicted ones, and load its state."""
    layout = full.layout
    sizes = {**layout.full_sizes, **level.sizes}
    module = build_module(full.architecture, sizes, level.exits).eval()
    predicted = layout.shapes(level.sizes, level.exits)
    built = {
        name: tuple(tensor.shape)
        for name, tensor, _ in named_tensors(module)
        if name not in layout.aliases and name not in full.base
    }
    for name in sorted(predicted.keys() ^ built.keys()):
        where = "the builder does not make it" if name in predicted else "the builder makes it all the same"
        raise ModelError(f'level with {_text(level)}: by the layout "{name}" {"is" if name in predicted else "is not"} part '
                         f"of it, but {where}. Blocks are named blocks.{{i}}.*, classifiers heads.{{block count}}.*, and a "
                         "level has no blocks after its last exit.")  # fmt: skip
    for name, shape in predicted.items():
        if built[name] != shape:
            axes = sorted({s.axis for dim in layout.tensors[name].dims for s in dim if s.axis is not None})
            raise ModelError(f'level with {_text(level)}: the layout predicts {shape} for "{name}" (axes {", ".join(axes)}), '
                             f"the builder makes {built[name]}. A size that is derived by rounding must be an axis of its "
                             "own, or its granule be set so that it divides.")  # fmt: skip
    present = {name for name, _, _ in named_tensors(module)}
    base = {name: tensor for name, tensor in full.base.items() if name in present}
    module.double()
    load(module, {**base, **extract(layout, full.state, level)})
    return module


# ---- part 3: random channels -----------------------------------------------------------------------------------------


def _random_channels(full: _Full, level: Submodel) -> float:
    """Compare a sub-model of a level's sizes, with random channels, with the masked full model."""
    layout = full.layout
    chosen = {
        axis: random(layout.axes[axis], n, 0, 0, numpy_rng("check_layout", axis, n))
        if layout.axes[axis].scaled
        else range(n)
        for axis, n in level.sizes.items()
    }
    piece = Submodel(chosen, level.exits)
    state = extract(layout, full.state, piece)
    module = _loaded(full, piece)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in full.state.items()}
    masked = put_back(layout, nothing, piece, state)
    hooks = [
        norm.register_forward_hook(_restricted(module.get_submodule(name), _kept(layout, piece, f"{name}.weight")))
        for name, norm in full.module.named_modules()
        if isinstance(norm, _NORMS) and f"{name}.weight" in state
    ]
    try:
        everything = full.outputs(masked)
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        ours = outputs(module, full.x)
    error = _difference(ours, [everything[layout.exits.index(e)] for e in piece.exits])
    if error > TOLERANCE:
        raise ModelError(f"level with {_text(level)}: a sub-model with random channels differs from the full model with the "
                         f"other channels zeroed by {error:.2g} of the outputs' size. Either the layout is wrong, or the "
                         "model's arithmetic depends on a size, or it has a norm over channels of its own making; in the "
                         "last two cases leave this part out.")  # fmt: skip
    return error


def _unreachable(full: _Full) -> str:
    """Return why the part with random channels cannot be run, or an empty string."""
    for name, part in full.module.named_modules():
        if isinstance(part, _NORMS) and f"{name}.weight" not in full.layout.tensors:
            return f'the norm "{name}" has no weights of its own, so its channels cannot be told'
    return ""


def _kept(layout: Layout, piece: Submodel, name: str) -> Tensor:
    """Return the places of a tensor, counted flat, that a sub-model keeps."""
    shapes = layout.shapes({}, layout.exits)
    empty = {key: torch.zeros(shape) for key, shape in shapes.items()}
    empty[name] = torch.arange(empty[name].numel(), dtype=torch.float32).view(shapes[name])
    return extract(layout, empty, piece)[name].flatten().long()


def _restricted(small: nn.Module, kept: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that norms the kept channels alone, as the sub-model does, and leaves zeros elsewhere."""

    shape = small.get_parameter("weight").shape

    def hook(norm: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        x = inputs[0]
        found = torch.zeros_like(out)
        if isinstance(norm, nn.GroupNorm):
            return found.index_copy(1, kept, small(x.index_select(1, kept)))
        flat = x.flatten(-len(shape)).index_select(-1, kept)
        normed = small(flat.unflatten(-1, shape)).flatten(-len(shape))
        return found.flatten(-len(shape)).index_copy(-1, kept, normed).view_as(out)

    return hook
