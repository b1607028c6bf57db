"""Modules, built once per shape: all parameters of a module lie in one flat buffer, and so do their gradients."""

from collections.abc import Container, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fleetfit.errors import RunError
from fleetfit.layout import State, build_module, named_tensors, place_module
from fleetfit.seeds import derive_seed, isolate_rng
from fleetfit.submodel import FlatState, Submodel, concat_state, extract, whole
from fleetfit.training.speed import convolution_weights, in_format, prepared
from fleetfit.training.start import beginnings
from fleetfit.values import Problem


class LocalModel:
    """A module of one shape whose parameters are views of one flat buffer.

    Attributes:
        module: The module.
        flat: All travelling tensors [size], side by side in the layout's order: trained parameters first.
        trained: The part of `flat` that is trained.
        grad: Gradients of `trained`.
        parameters: The trained parameters by name, views of `trained`.
        arithmetic: How the module computes; it may want convolutions' weights in another order than a state has them.
    """

    def __init__(self, problem: Problem, submodel: Submodel, accelerator: torch.device) -> None:
        """Build the module."""
        layout = problem.layout
        self.shapes = layout.shapes(submodel.sizes, submodel.exits)
        sizes = {**layout.full_sizes, **submodel.sizes}
        with isolate_rng(accelerator):
            built = build_module(problem.architecture, sizes, submodel.exits)
        self.module = place_module(built, accelerator, problem.architecture, sizes, submodel.exits, problem.input_shape)
        found = {name: (tensor, is_parameter) for name, tensor, is_parameter in named_tensors(self.module)}
        _check_built(found, self.shapes, layout.aliases, layout.base)
        self.arithmetic = problem.arithmetic_of(submodel)
        convolutions = convolution_weights(self.module)
        self._reordered: list[str] = []  # what lies in another order than a state's
        self.flat = torch.empty(sum(_count(s) for s in self.shapes.values()), device=accelerator)
        count = sum(_count(s) for name, s in self.shapes.items() if layout.tensors[name].trainable)
        self.trained, self.grad = self.flat[:count], torch.zeros(count, device=accelerator)
        at = 0
        self.parameters: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes.items():
            here = slice(at, at := at + _count(shape))
            tensor, is_parameter = found[name]
            convolution = id(tensor) in convolutions
            tensor.data = in_format(self.flat[here], shape, self.arithmetic, convolution)
            if not tensor.is_contiguous():
                self._reordered.append(name)
            if is_parameter:
                tensor.grad = in_format(self.grad[here], shape, self.arithmetic, convolution)
                self.parameters[name] = tensor
        for name, value in problem.base_of(submodel).items():
            found[name][0].requires_grad_(False).data.copy_(value)
        prepared(self.module, self.arithmetic, accelerator)

    def load(self, state: State) -> None:
        """Copy a state in."""
        in_order = state if list(state) == list(self.shapes) else {name: state[name] for name in self.shapes}
        self.flat.copy_(concat_state(in_order))
        self.put(in_order, self._reordered)

    def put(self, state: State, names: Iterable[str]) -> None:
        """Copy the tensors of some names in."""
        with torch.no_grad():
            for name in names:
                self.parameters[name].copy_(state[name])

    def read(self) -> State:
        """Return the state, a copy on the host."""
        found = FlatState(self.flat.detach().to("cpu", copy=True), self.shapes)
        for name in self._reordered:
            found[name].copy_(self.parameters[name].detach())
        return found


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _check_built(
    found: Mapping[str, Any], shapes: Mapping[str, Any], aliases: Mapping[str, str], base: Container[str]
) -> None:
    built = {name: tuple(t.shape) for name, (t, _) in found.items() if name not in aliases and name not in base}
    if built != dict(shapes):
        odd = [n for n in sorted(built.keys() | shapes.keys()) if built.get(n) != shapes.get(n)]
        first = odd[0]
        raise RunError(f'the builder and the layout disagree on "{first}": built {built.get(first)}, expected '
                       f"{shapes.get(first)}. Run `fleetfit check-model` on this model.")  # fmt: skip


_local_models: WeakKeyDictionary[Problem, dict[Any, LocalModel]] = WeakKeyDictionary()


def local_model_of(problem: Problem, submodel: Submodel, accelerator: torch.device, use: str = "job") -> LocalModel:
    """Return the module of a sub-model's shape, built once per process, and once more for each further use."""
    kept = _local_models.setdefault(problem, {})
    key = (tuple(sorted(submodel.sizes.items())), submodel.exits, accelerator, use)
    if key not in kept:
        kept[key] = LocalModel(problem, submodel, accelerator)
    return kept[key]


def initial_state(problem: Problem, seed: int) -> State:
    """Return the full model's first state, drawn by its own initialisation from a seed, but for what is pretrained.

    Raises:
        FleetFitError: A checkpoint that it begins from cannot be read or does not fit.
    """
    full = _beginning(problem, seed)
    return extract(problem.layout, {name: full[name] for name in problem.layout.tensors}, whole(problem.layout))


def initial_base(problem: Problem, seed: int) -> State:
    """Return what of the full model is never trained, with the values of `initial_state`."""
    full = _beginning(problem, seed) if problem.layout.base else {}
    return {name: full[name] for name in problem.layout.base}


def _beginning(problem: Problem, seed: int) -> State:
    with isolate_rng(torch.device("cpu")):
        torch.manual_seed(derive_seed(seed, "initial"))
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    found = {name: tensor.detach().float() for name, tensor, _ in named_tensors(module)}
    return found | beginnings(problem).state
