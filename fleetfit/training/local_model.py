"""Modules for jobs, built once per shape. All parameters of a module are in one flat buffer; so are its gradients."""

import math
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fleetfit.anatomy import Layout, State, build_module, has_norms, named_tensors, place_module, settle_norms
from fleetfit.core import Problem
from fleetfit.errors import RunError
from fleetfit.seeds import derive_seed, isolate_rng
from fleetfit.submodel import FlatState, Submodel, concat_state, extract, full_submodel
from fleetfit.training.memory_format import choose_format
from fleetfit.training.runtime import convolution_weights, prepare_model, view_in_format
from fleetfit.training.start import load_start


class LocalModel:
    """A module of one shape whose parameters are views of one flat buffer.

    Attributes:
        module: The module.
        flat: All traveling tensors [size] in the layout's order, trained parameters first: side by side on the host;
            on CUDA each begins at a multiple of 16 bytes, since kernels for channels-last need aligned weights.
        trained: The part of `flat` that is trained.
        grad: Gradients of `trained`.
        parameters: The trained parameters by name, views of `trained`.
        arithmetic: How the module computes; the weights of its convolutions may have another order than in a state.
        is_for_both: Whether training and evaluation compute alike, so that one module serves both.
    """

    def __init__(self, problem: Problem, submodel: Submodel, accelerator: torch.device, training: bool = True) -> None:
        """Build the module, in the memory format of training or of evaluation."""
        layout = problem.layout
        self.shapes = layout.shapes(submodel.sizes, submodel.exits)
        sizes = {**layout.full_sizes, **submodel.sizes}
        with isolate_rng(accelerator):
            module = build_module(problem.architecture, sizes, submodel.exits)
        self.module = place_module(
            module, accelerator, problem.architecture, sizes, submodel.exits, problem.input_shape
        )
        tensors = {name: (tensor, is_parameter) for name, tensor, is_parameter in named_tensors(self.module)}
        _check_built(tensors, layout, sizes, submodel.exits)
        arithmetic = problem.get_arithmetic(submodel)
        by_use = {use: choose_format(arithmetic, self.module, accelerator, use) for use in (True, False)}
        self.arithmetic, self.is_for_both = by_use[training], by_use[True] == by_use[False]
        is_last = self.arithmetic.memory_format == "channels_last"
        ordered = convolution_weights(self.module) if is_last else set()
        self._has_norms = has_norms(self.module)
        self._reordered: list[str] = []  # parameters in another order than in a state
        parts, size = lay_out(self.shapes, _ALIGNMENT if accelerator.type == "cuda" else 1)
        self.flat = torch.zeros(size, device=accelerator)
        count = max((part.stop for name, part in parts.items() if layout.tensors[name].trainable), default=0)
        self.trained, self.grad = self.flat[:count], torch.zeros(count, device=accelerator)
        self._places: torch.Tensor | None = None  # of the state's elements in `flat`, if there are gaps
        if size > sum(part.stop - part.start for part in parts.values()):
            places = [torch.arange(part.start, part.stop) for part in parts.values()]
            self._places = torch.cat(places).to(accelerator)
        self.parameters: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            part, (tensor, is_parameter) = parts[name], tensors[name]
            is_ordered = id(tensor) in ordered
            tensor.data = view_in_format(self.flat[part], shape, is_ordered)
            if not tensor.is_contiguous():
                self._reordered.append(name)
            if is_parameter:
                tensor.grad = view_in_format(self.grad[part], shape, is_ordered)
                self.parameters[name] = tensor
        for name, value in problem.get_base(submodel).items():
            tensors[name][0].requires_grad_(False).data.copy_(value)
        prepare_model(self.module, self.arithmetic, accelerator)

    def load(self, state: State) -> None:
        """Copy a state in."""
        ordered = state if list(state) == list(self.shapes) else {name: state[name] for name in self.shapes}
        if self._places is None:
            self.flat.copy_(concat_state(ordered))
        else:
            self.flat[self._places] = concat_state(ordered).to(self.flat.device)
        self.restore(ordered, self._reordered)
        if self._has_norms:
            settle_norms(self.module)

    def restore(self, state: State, names: Iterable[str]) -> None:
        """Copy some tensors of a state in."""
        with torch.no_grad():
            for name in names:
                self.parameters[name].copy_(state[name])

    def read(self) -> State:
        """Return the state, a copy on the host."""
        flat = self.flat.detach() if self._places is None else self.flat.detach()[self._places]
        state = FlatState(flat.to("cpu", copy=True), self.shapes)
        for name in self._reordered:
            state[name].copy_(self.parameters[name].detach())
        return state


def _check_built(
    tensors: Mapping[str, tuple[torch.Tensor, bool]], layout: Layout, sizes: Mapping[str, int], exits: tuple[int, ...]
) -> None:
    """Refuse a layout that is not that of a built module: a node has it from a server that it does not trust."""

    def is_alias(name: str, tensor: torch.Tensor) -> bool:
        other = layout.aliases.get(name)
        return other is not None and (other not in tensors or tensors[other][0] is tensor)

    kinds, whole = {True: "parameter", False: "buffer"}, layout.complete
    built = {n: (kinds[is_p], tuple(t.shape)) for n, (t, is_p) in tensors.items() if not is_alias(n, t)}
    shapes = whole.shapes(sizes, exits)
    expected = {name: (kinds[whole.tensors[name].trainable], shape) for name, shape in shapes.items()}
    if built != expected:
        first = min(n for n in built.keys() | expected.keys() if built.get(n) != expected.get(n))
        raise RunError(
            f'the builder and the layout disagree on "{first}": built {built.get(first)}, expected '
            f"{expected.get(first)}. Run `fleetfit check-model` on this model."
        )


_ALIGNMENT = 4
"""Numbers of 4 bytes: cuDNN's batch norm and convolutions for channels-last fail on addresses between."""


def lay_out(shapes: Mapping[str, tuple[int, ...]], alignment: int) -> tuple[dict[str, slice], int]:
    """Return each tensor's part of a flat buffer, and the buffer's size.

    Args:
        shapes: Of the tensors, in their order.
        alignment: Each part starts at a multiple of it.
    """
    parts, start = {}, 0
    for name, shape in shapes.items():
        start = -(-start // alignment) * alignment
        parts[name] = slice(start, start := start + math.prod(shape))
    return parts, start


_local_models: WeakKeyDictionary[Problem, dict[Any, LocalModel]] = WeakKeyDictionary()


def get_local_model(
    problem: Problem, submodel: Submodel, accelerator: torch.device, use: str = "job", training: bool = True
) -> LocalModel:
    """Return the module of a sub-model's shape, built once per process and use; another if evaluation needs one.

    Args:
        problem: The problem.
        submodel: The sub-model.
        accelerator: Where it is computed.
        use: Modules of different uses are loaded at the same time.
        training: Whether it is trained or evaluated.
    """
    models = _local_models.setdefault(problem, {})
    shape = (tuple(sorted(submodel.sizes.items())), submodel.exits, accelerator, use)
    for trains in (True, training):
        key = (*shape, trains)
        if key not in models:
            models[key] = LocalModel(problem, submodel, accelerator, trains)
        if models[key].is_for_both:
            break
    return models[key]


def initial_state(problem: Problem, seed: int) -> State:
    """Return the full model's first state: drawn by its own initialization from a seed, or pretrained.

    Raises:
        FleetFitError: A checkpoint that it starts from cannot be read or does not fit.
    """
    full = _initialize(problem, seed)
    return extract(problem.layout, {name: full[name] for name in problem.layout.tensors}, full_submodel(problem.layout))


def initial_base(problem: Problem, seed: int) -> State:
    """Return the frozen tensors of the full model, with the values of `initial_state`."""
    full = _initialize(problem, seed) if problem.layout.base else {}
    return {name: full[name] for name in problem.layout.base}


def _initialize(problem: Problem, seed: int) -> State:
    with isolate_rng(torch.device("cpu"), derive_seed(seed, "initial")):
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    drawn = {name: tensor.detach().float() for name, tensor, _ in named_tensors(module)}
    return drawn | load_start(problem)[0]
