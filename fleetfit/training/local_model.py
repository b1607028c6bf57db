"""Modules for jobs, built once per shape. All parameters of a module are in one flat buffer; so are its gradients."""

import math
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fleetfit.errors import RunError
from fleetfit.layout import State, build_module, has_norms, named_tensors, place_module, settle_norms
from fleetfit.seeds import derive_seed, isolate_rng
from fleetfit.submodel import FlatState, Submodel, concat_state, extract, full_submodel
from fleetfit.training.runtime import convolution_weights, prepare_model, view_in_format
from fleetfit.training.start import load_start
from fleetfit.values import Problem


class LocalModel:
    """A module of one shape whose parameters are views of one flat buffer.

    Attributes:
        module: The module.
        flat: All travelling tensors [size], side by side in the layout's order: trained parameters first.
        trained: The part of `flat` that is trained.
        grad: Gradients of `trained`.
        parameters: The trained parameters by name, views of `trained`.
        arithmetic: How the module computes; the weights of its convolutions may have another order than in a state.
    """

    def __init__(self, problem: Problem, submodel: Submodel, accelerator: torch.device) -> None:
        layout = problem.layout
        self.shapes = layout.shapes(submodel.sizes, submodel.exits)
        sizes = {**layout.full_sizes, **submodel.sizes}
        with isolate_rng(accelerator):
            module = build_module(problem.architecture, sizes, submodel.exits)
        self.module = place_module(
            module, accelerator, problem.architecture, sizes, submodel.exits, problem.input_shape
        )
        tensors = {name: (tensor, is_parameter) for name, tensor, is_parameter in named_tensors(self.module)}
        built = {
            name: tuple(tensor.shape)
            for name, (tensor, _) in tensors.items()
            if name not in layout.aliases and name not in layout.base
        }
        if built != dict(self.shapes):
            names = sorted(built.keys() | self.shapes.keys())
            first = next(name for name in names if built.get(name) != self.shapes.get(name))
            raise RunError(
                f'the builder and the layout disagree on "{first}": built {built.get(first)}, expected '
                f"{self.shapes.get(first)}. Run `fleetfit check-model` on this model."
            )
        self._has_norms = has_norms(self.module)
        self.arithmetic = problem.get_arithmetic(submodel)
        convolutions = convolution_weights(self.module)
        self._reordered: list[str] = []  # parameters in another order than in a state
        counts = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self.flat = torch.empty(sum(counts.values()), device=accelerator)
        count = sum(n for name, n in counts.items() if layout.tensors[name].trainable)
        self.trained, self.grad = self.flat[:count], torch.zeros(count, device=accelerator)
        start = 0
        self.parameters: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            part = slice(start, start := start + counts[name])
            tensor, is_parameter = tensors[name]
            is_convolution = id(tensor) in convolutions
            tensor.data = view_in_format(self.flat[part], shape, self.arithmetic, is_convolution)
            if not tensor.is_contiguous():
                self._reordered.append(name)
            if is_parameter:
                tensor.grad = view_in_format(self.grad[part], shape, self.arithmetic, is_convolution)
                self.parameters[name] = tensor
        for name, value in problem.get_base(submodel).items():
            tensors[name][0].requires_grad_(False).data.copy_(value)
        prepare_model(self.module, self.arithmetic, accelerator)

    def load(self, state: State) -> None:
        """Copy a state in."""
        ordered = state if list(state) == list(self.shapes) else {name: state[name] for name in self.shapes}
        self.flat.copy_(concat_state(ordered))
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
        state = FlatState(self.flat.detach().to("cpu", copy=True), self.shapes)
        for name in self._reordered:
            state[name].copy_(self.parameters[name].detach())
        return state


_local_models: WeakKeyDictionary[Problem, dict[Any, LocalModel]] = WeakKeyDictionary()


def get_local_model(problem: Problem, submodel: Submodel, accelerator: torch.device, use: str = "job") -> LocalModel:
    """Return the module of a sub-model's shape, built once per process and use."""
    models = _local_models.setdefault(problem, {})
    key = (tuple(sorted(submodel.sizes.items())), submodel.exits, accelerator, use)
    if key not in models:
        models[key] = LocalModel(problem, submodel, accelerator)
    return models[key]


def initial_state(problem: Problem, seed: int) -> State:
    """Return the full model's first state: drawn by its own initialisation from a seed, or pretrained.

    Raises:
        FleetFitError: A checkpoint that it starts from cannot be read or does not fit.
    """
    full = _initialise(problem, seed)
    return extract(problem.layout, {name: full[name] for name in problem.layout.tensors}, full_submodel(problem.layout))


def initial_base(problem: Problem, seed: int) -> State:
    """Return the frozen tensors of the full model, with the values of `initial_state`."""
    full = _initialise(problem, seed) if problem.layout.base else {}
    return {name: full[name] for name in problem.layout.base}


def _initialise(problem: Problem, seed: int) -> State:
    with isolate_rng(torch.device("cpu")):
        torch.manual_seed(derive_seed(seed, "initial"))
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    drawn = {name: tensor.detach().float() for name, tensor, _ in named_tensors(module)}
    return drawn | load_start(problem).state
