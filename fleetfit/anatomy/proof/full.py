"""The full model in float64 with redrawn parameters, and the places of it that a choice of channels keeps.

The places of a dimension are found once, however many tensors have a dimension like it; a state is then cut or masked
by one vector per dimension. `fleetfit.submodel` does the same, but many times slower where channels are drawn.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy import (
    Architecture,
    HasSegments,
    Layout,
    State,
    VisitsExits,
    build_module,
    explain_errors,
    get_length,
    named_tensors,
    outputs,
    settle_norms,
)
from fleetfit.anatomy.meta import Watching
from fleetfit.errors import ModelError
from fleetfit.layout import Segments
from fleetfit.machine import tensor_defaults
from fleetfit.submodel import Channels, Submodel, find_spans

# ---- the full model ------------------------------------------------------------------------------------------------

TOLERANCE = 1e-9
"""Largest difference of outputs, relative to the largest output, that counts as equal."""
_ROUGH = 1e-5  # the same where an operation of the model gives less than float64
_LARGE = 2**22  # numbers of a parameter that is not kept, such as a table of words: drawing takes time
_MOST_NUMBERS = 2**20  # of the logits of an exit that are compared: next tokens of a large vocabulary have more


class FullModel:
    """A full model, its state, an input, and what it makes of it.

    Attributes:
        state: The layout's tensors, in fp32 so that cutting keeps them exactly; a large one is made when it is read.
        base: Tensors that are not in the layout (never trained).
        seed: Of what is drawn later.
        expected: Logits of every exit.
        tolerance: Largest difference that counts as equal: more where the model itself rounds to fp32 or less.
    """

    def __init__(self, architecture: Architecture, layout: Layout, x: Tensor, rng: torch.Generator, seed: int) -> None:
        self.architecture, self.layout, self.seed = architecture, layout, seed
        self.x = x.double() if x.is_floating_point() else x
        self.module = build_module(architecture, layout.full_sizes, layout.exits).eval()
        tensors: dict[str, Callable[[], Tensor]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor, is_parameter in named_tensors(self.module):
            shapes[name] = tuple(tensor.shape)
            tensors[name] = _draw(shapes[name], rng) if is_parameter else tensor.detach().clone().float
        for name, shape in layout.shapes({}, layout.exits).items():
            if (built := shapes.get(name, "nothing")) != shape:
                raise ModelError(f'the layout says {shape} for "{name}" in the full model, the builder makes {built}.')
        self.state: State = _Computed(layout.tensors, lambda name: tensors[name]())
        self.base = {n: make() for n, make in tensors.items() if n not in layout.tensors and n not in layout.aliases}
        self.module.double()
        self.tolerance = TOLERANCE
        self.load(self.state)
        with Watching(self._see_precision):
            self.expected = self.run()
        self._check_exits()
        if not all(bool(torch.isfinite(out).all()) for out in self.expected):
            raise ModelError(
                f"{format_architecture(architecture)}: random parameters give outputs that are not finite, so that "
                "the layout cannot be checked."
            )

    def _see_precision(self, values: Sequence[Any], out: Any) -> None:
        """Compare less exactly where an operation makes numbers of less precision of float64."""
        is_rounded = isinstance(out, Tensor) and out.is_floating_point() and out.dtype != torch.float64
        if is_rounded and any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in values):
            self.tolerance = _ROUGH

    def _check_exits(self) -> None:
        """Check that every exit gives logits, and that segments and heads, where the module has them, give the same."""
        name, exits = format_architecture(self.architecture), self.layout.exits
        if len(self.expected) != len(exits):
            raise ModelError(
                f"{name} gives {len(self.expected)} outputs when it is built with {len(exits)} exits, after blocks "
                f"{', '.join(map(str, exits))}. Its forward must return a list with the logits of each, shallow to "
                "deep. For a model with one exit only, set positions = (blocks,)."
            )
        if not isinstance(self.module, HasSegments):
            return
        with torch.no_grad(), use_float64():
            carry = self.module.start(self.x)
            for i, expected in enumerate(self.expected):
                carry = self.module.segment(i, carry)
                error = difference([self.module.head(i, carry)], [expected])
                if error > self.tolerance:
                    raise ModelError(
                        f"{name}: forward gives other logits for exit {i + 1} than start, segment and head; they "
                        f"differ by {error:.2g} of the outputs' size. Inherit from fleetfit.architecture.ExitModel and "
                        "leave forward to it."
                    )

    def outputs(self, state: State) -> list[Tensor]:
        """Return the logits of every exit under a full state."""
        self.load(state)
        return self.run()

    def load(self, state: State, module: nn.Module | None = None) -> None:
        """Load a state, and what of the rest the module has: the full one, or another one."""
        module = self.module if module is None else module
        own = {name for name, _, _ in named_tensors(module)}
        load(module, overlay({name: tensor for name, tensor in self.base.items() if name in own}, state))

    def release(self) -> None:
        """Let go of the parameters' numbers until the next `load`, while another model of this size is there."""
        for parameter in self.module.parameters():
            if (storage := parameter.untyped_storage()).resizable():
                storage.resize_(0)

    def run(self) -> list[Tensor]:
        """Return the logits of every exit under the state that is loaded."""
        with torch.no_grad(), explain_errors(self.architecture, self.x.shape[1:], "cpu", torch.float64):
            return read_outputs(self.module, self.x)


def read_outputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the logits of every exit; where they are many numbers, those of places that are evenly spread.

    Of a module that visits its exits, no two are whole at the same time.
    """
    if not isinstance(module, VisitsExits):
        return [_thin_out(logits) for logits in outputs(module, x)]
    kept: list[Tensor] = []

    def keep(i: int, logits: Tensor) -> bool:
        kept.append(_thin_out(logits))
        return False

    module.visit_exits(x, keep)
    return kept


def _thin_out(logits: Tensor) -> Tensor:
    """Return logits [..., classes], or [places, classes] of fewer places if they are many."""
    if logits.numel() <= _MOST_NUMBERS or logits.dim() < 2:
        return logits
    rows = logits.reshape(-1, logits.shape[-1])
    n = max(1, _MOST_NUMBERS // rows.shape[1])
    return rows[torch.arange(n) * len(rows) // n]


class _Computed(Mapping[str, Tensor]):
    """A state whose tensors are computed when they are read, so that only one is there at a time."""

    def __init__(self, names: Iterable[str], compute: Callable[[str], Tensor]) -> None:
        self._names, self._compute = dict.fromkeys(names), compute

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._compute(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def overlay(base: State, state: State) -> State:
    """Return both states' tensors, the second's where both have one; none is read yet."""
    return _Computed([*base, *state], lambda name: state[name] if name in state else base[name])


def _draw(shape: tuple[int, ...], rng: torch.Generator) -> Callable[[], Tensor]:
    """Draw a parameter; return a function that returns it. A large one is drawn again each time, and is not kept."""
    before, drawn = rng.get_state(), _draw_numbers(shape, rng)
    if drawn.numel() < _LARGE:
        return lambda: drawn

    def draw_again() -> Tensor:
        again = torch.Generator()
        again.set_state(before)
        return _draw_numbers(shape, again)

    return draw_again


def _draw_numbers(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Return numbers of a parameter: vectors in 0.5..1.5, matrices normal by fan-in."""
    if len(shape) < 2:
        return torch.rand(shape, generator=rng).add_(0.5)
    return torch.randn(shape, generator=rng).div_(math.prod(shape[1:]) ** 0.5)


def use_float64() -> contextlib.AbstractContextManager[None]:
    """Return a context in which modules make their own tensors like their inputs: float64, on the host."""
    return tensor_defaults("cpu", torch.float64)


def load(module: nn.Module, state: State) -> None:
    """Copy a state into a module whose tensors have exactly these names; second names of tensors may be absent.

    Raises:
        ModelError: A tensor is missing, unexpected, or of another shape.
    """
    tensors = {name: tensor for name, tensor, _ in named_tensors(module)}
    filled = {id(tensors[name]) for name in state if name in tensors}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in filled]
    unexpected = sorted(state.keys() - tensors.keys())
    if missing or unexpected:
        raise ModelError(f"a state does not load: missing {missing[:3]}, unexpected {unexpected[:3]}.")
    with torch.no_grad():
        for name, tensor in state.items():
            own = tensors[name]
            if own.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(own.shape)}"
                raise ModelError(f'a state does not load: "{name}" is {shapes}.')
            if own.numel() and not (storage := own.untyped_storage()).nbytes():  # released
                storage.resize_(own.numel() * own.element_size())
            own.copy_(tensor)
    settle_norms(module)


def difference(logits: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference over all exits, each relative to its largest expected output."""
    pairs = list(zip(logits, expected, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    errors = torch.stack([(a - b).abs().max() / b.abs().max().clamp_min(1e-30) for a, b in pairs])
    return float(errors.nan_to_num(float("inf")).max())


def format_architecture(architecture: Architecture) -> str:
    """Return an architecture as one line: its own, or the name of its class where it has none."""
    return type(architecture).__name__ if type(architecture).__repr__ is object.__repr__ else repr(architecture)


def describe_level(level: Submodel) -> str:
    """Return a level as text: its exits and sizes."""
    sizes = ", ".join(f"{axis} {n}" for axis, n in level.sizes.items())
    return f"exits {', '.join(map(str, level.exits))}" + (f" and {sizes}" if sizes else "")


# ---- the places of each dimension that a choice of channels keeps, and full states cut or masked by them -----------


class KeptPlaces:
    """The places that a choice of channels keeps.

    Attributes:
        kept: Of each kind of dimension the kept places, in the order of the channels.
        full: Of each kind of dimension the number of its places in the full model.
    """

    def __init__(self, layout: Layout, channels: Mapping[str, Channels]) -> None:
        """Find the places; axes that are not named are whole.

        Raises:
            ModelError: The channels do not fit the layout.
        """
        self._tensors = layout.tensors
        kinds = dict.fromkeys(dim for tensor in layout.tensors.values() for dim in tensor.dims)
        self.full = {dim: get_length(dim, layout.full_sizes, layout.axes) for dim in kinds}
        self.kept = {
            dim: torch.tensor([start + i for start, n in spans for i in range(n)], dtype=torch.int64)
            for dim, spans in find_spans(layout, kinds, Submodel(dict(channels), layout.exits)).items()
        }
        self._cut_dims = {
            dim: kept
            for dim, kept in self.kept.items()
            if len(kept) != self.full[dim] or bool((kept != torch.arange(len(kept))).any())
        }

    def cut(self, state: State, names: Iterable[str] | None = None) -> State:
        """Return the kept elements of a full state, or of some of its tensors, each one's when it is read."""
        return _Computed(names or state, lambda name: self._cut(state[name], self._tensors[name].dims))

    def _cut(self, tensor: Tensor, dims: Sequence[Segments]) -> Tensor:
        for d, dim in enumerate(dims):
            if dim in self._cut_dims:
                tensor = tensor.index_select(d, self._cut_dims[dim])
        return tensor

    def mask(self, state: State, faint: float = 0.0) -> State:
        """Return a full state whose other elements are zero, or a faint share of what they are, as `cut` does."""
        masks = {
            dim: torch.full((self.full[dim],), faint).index_fill(0, kept, 1.0)
            for dim, kept in self._cut_dims.items()
            if len(kept) != self.full[dim]
        }

        def mask(name: str) -> Tensor:
            factor: Tensor | None = None
            dims = self._tensors[name].dims
            for d, dim in enumerate(dims):
                if dim in masks:
                    shaped = masks[dim].reshape([-1 if i == d else 1 for i in range(len(dims))])
                    factor = shaped if factor is None else torch.minimum(factor, shaped)
            return state[name] if factor is None else state[name] * factor

        return _Computed(state, mask)
