"""The problem that is trained, and its levels."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from fleetfit import names
from fleetfit.anatomy import Architecture, Layout, State, build_module, infer_layout, make_input, outputs, unwrap
from fleetfit.anatomy.derive import (
    DerivedArchitecture,
    SampleFacts,
    build_without_numbers,
    find_drawn_constants,
    prepare_instance,
    restore_architecture,
)
from fleetfit.anatomy.meta import on_meta
from fleetfit.core.arithmetic import Arithmetic, ShapeArithmetic, find_arithmetic
from fleetfit.core.tasks import Task, get_task
from fleetfit.errors import ConfigError, ModelError, RunError, quote_some
from fleetfit.factories import call_factory
from fleetfit.seeds import isolate_global_rngs, seed_global_rngs
from fleetfit.submodel import Submodel, dump_prefixes, extract, parse_prefixes

UNLIMITED = 2.0**60
"""Bytes for features where the run file sets no limit."""
_NORM = re.compile(r"Norm(\dd)?$")


@dataclass(frozen=True, eq=False)
class Problem:
    """A learning problem: an architecture, its exits, their layout, and the task.

    Attributes:
        architecture: The model family.
        input_shape: Shape of one sample, without the batch.
        task: Loss, divergence and metrics.
        exits: Exits of the full model.
        base: Tensors of the full model that are never trained and do not travel.
        init_from: The run folder whose final state is this one's first; "" for none. Other processes do not need it.
        spec: What another process rebuilds the problem from; None for objects without an import path.
        features_bytes: Most bytes of memory for the features of a frozen backbone (`fleetfit.training.features`), or
            `UNLIMITED`; 0: nothing is cached.
        computed: The arithmetic of the levels' shapes, and so of others; empty: fp32 in the plain memory format.
        levels: The sub-models of the levels, smallest first, with prefix channels; empty before levels are planned.
    """

    architecture: Architecture
    input_shape: tuple[int, ...]
    task: Task
    exits: tuple[int, ...]
    base: State = field(default_factory=dict)
    init_from: str = ""
    spec: Mapping[str, Any] | None = None
    features_bytes: float = 0.0
    computed: tuple[ShapeArithmetic, ...] = ()
    levels: tuple[Submodel, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        """The layout of the model with all its exits: as the spec has it, or inferred."""
        payload = (self.spec or {}).get("layout")
        if payload is not None:
            return Layout.from_payload(payload, self.architecture.axes, self.exits)
        return infer_layout(self.architecture, self.exits, self.base, self.input_shape)

    @cached_property
    def output_size(self) -> int:
        """Length of an output: the classes, or the number of values."""
        if isinstance(inner := unwrap(self.architecture), DerivedArchitecture):
            return inner.plan.classes  # forward may read places of the samples
        with on_meta():
            module = build_module(self.architecture, self.layout.full_sizes, self.exits[-1:])
            x = make_input(self.architecture, self.input_shape, 2)
        with torch.no_grad(), on_meta():
            return int(outputs(module.eval(), x)[-1].shape[-1])

    @cached_property
    def norms(self) -> frozenset[str]:
        """Names of trained tensors of norm layers: modules of a class, or a base class, `...Norm` or `...Norm2d`."""
        with on_meta():
            module = build_module(self.architecture, self.layout.full_sizes, self.exits)
        layers = {
            name
            for name, part in module.named_modules(remove_duplicate=False)
            if any(_NORM.search(kind.__name__) for kind in type(part).__mro__)
        }
        return frozenset(name for name in self.layout.tensors if name.rpartition(".")[0] in layers)

    @staticmethod
    def from_spec(spec: Mapping[str, Any]) -> "Problem":
        """Build the problem that a spec describes, but for what its method makes of the model.

        Args:
            spec: `model`, `given`, `task`, `exits`, and perhaps `derived`, `head`, `peft`, `method`, `features_bytes`,
                `computed`, `levels` and `layout`.
        """
        make, arguments = _read_factory(spec)

        def build() -> Any:
            facts = SampleFacts(arguments["input_shape"], arguments.get("vocabulary", 0), 0)
            return prepare_instance(made, facts.make_example()) if isinstance(made := make(), nn.Module) else made

        architecture = build_without_numbers(build) if "derived" in spec else build()
        if isinstance(architecture, nn.Module):
            architecture = restore_architecture(architecture, spec.get("derived"), spec.get("head", ""))
        architecture = apply_peft(architecture, spec.get("peft", {}))
        exits = tuple(spec["exits"]) or (architecture.blocks,)
        shape, task = tuple(arguments["input_shape"]), get_task(spec["task"])
        computed = tuple(map(ShapeArithmetic.from_payload, spec.get("computed", ())))
        levels = parse_prefixes(spec["levels"]) if "levels" in spec else ()
        problem = Problem(architecture, shape, task, exits, spec=spec, computed=computed, levels=levels)
        return problem.replace_features_bytes(float(spec.get("features_bytes", 0)))

    def replace_exits(self, exits: Iterable[int]) -> "Problem":
        """Return the same problem with other exits."""
        chosen = tuple(sorted(set(exits)))
        return self._replace("exits", chosen, list(chosen))

    def replace_features_bytes(self, features_bytes: float) -> "Problem":
        """Return the same problem with another limit of the memory for features."""
        return self._replace("features_bytes", features_bytes, features_bytes)

    def replace_task(self, task: Task) -> "Problem":
        """Return the same problem with another task, for one job: its spec is still that of the first."""
        problem = replace(self, task=task)
        vars(problem)["layout"] = self.layout  # which would take long to infer again
        return problem

    def replace_arithmetic(self, computed: tuple[ShapeArithmetic, ...]) -> "Problem":
        """Return the same problem with another arithmetic of its shapes."""
        return self._replace("computed", computed, [one.payload for one in computed])

    def replace_levels(self, pieces: Iterable[Submodel]) -> "Problem":
        """Return the same problem with other levels, given by their sub-models."""
        full = {name: axis.size for name, axis in self.architecture.axes.items()}
        levels = tuple(
            Submodel({name: range(size) for name, size in {**full, **piece.sizes}.items()}, piece.exits)
            for piece in pieces
        )
        return self._replace("levels", levels, dump_prefixes(levels))

    def _replace(self, field: str, value: Any, entry: Any) -> "Problem":
        """Return the same problem with another value of a field, and its entry in the spec unless that is empty."""
        spec = None
        if self.spec is not None:
            gone = (field, "layout") if field == "exits" else (field,)
            spec = {k: v for k, v in self.spec.items() if k not in gone} | ({field: entry} if entry else {})
        return replace(self, **{field: value}, spec=spec)

    def check_levels(self) -> None:
        """Check that the levels are parts of the model: they may come from a stranger.

        Raises:
            ModelError: One has other axes, more channels or blocks, or none.
        """
        full = {name: axis.size for name, axis in self.architecture.axes.items()}
        for piece in self.levels:
            fits = piece.channels.keys() == full.keys() and all(0 < n <= full[a] for a, n in piece.sizes.items())
            if not fits or not piece.exits or not 0 < min(piece.exits) <= max(piece.exits) <= self.architecture.blocks:
                raise ModelError("the levels are not parts of the model.", key="levels")

    def get_arithmetic(self, piece: Submodel) -> Arithmetic:
        """Return the arithmetic of a sub-model, by its shape."""
        return find_arithmetic(self.computed, {**self.layout.full_sizes, **piece.sizes}, piece.exits)

    def get_base(self, piece: Submodel) -> State:
        """Return a sub-model's part of the tensors that are never trained.

        Raises:
            RunError: The problem does not have it; `train.initial_base` gives a new run's.
        """
        if self.layout.base.keys() - self.base.keys():
            raise RunError(
                "the tensors that are never trained have no values in this problem: set its base to initial_base(...).",
                key="base",
            )
        return extract(self.layout.frozen, self.base, piece) if self.base else {}

    def submodel(self, width: float, exits: tuple[int, ...]) -> Submodel:
        """Return the prefix sub-model of a width and some exits."""
        sizes = self.architecture.sizes(width)
        return Submodel({axis: range(sizes[axis]) for axis in self.architecture.axes}, exits)


def check_rebuildable(problem: Problem, who: str) -> None:
    """Check that other processes can rebuild the model from its spec, and that each of them gets the same one.

    Raises:
        ConfigError: It has no import path, or its constructor draws numbers that are not sent.
    """
    if problem.spec is None:
        raise ConfigError(
            f"{who} rebuild the model in other processes, so it needs an import path "
            '("package.module:function" or "file.py:function"). Write it into a file beside this script, or start runs '
            'below `if __name__ == "__main__":`; objects made in Python run with engine.name = "local".',
            key="model",
        )
    if "derived" not in problem.spec:
        return
    make, _ = _read_factory(problem.spec)
    made = []
    for seed in range(2):
        with isolate_global_rngs():
            seed_global_rngs(torch.device("cpu"), seed)
            made.append(build_without_numbers(make))
    if drawn := find_drawn_constants(*made):
        raise ConfigError(
            f"the constructor of {problem.spec['model']['name']} draws {quote_some(drawn)}, which is no parameter "
            f"and no saved buffer of floating-point numbers and so is not sent: {who} would each have another. "
            "Draw it from a generator with a seed of its own, such as torch.Generator().manual_seed(0), or register it "
            "as a buffer.",
            key="model.name",
        )


def _read_factory(spec: Mapping[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return what makes a spec's module or architecture, and the values of the data among its arguments."""
    model = dict(spec["model"])
    name = model.pop("name")
    arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in spec["given"].items()}
    return partial(call_factory, names.resolve("models", name), name, "[model]", model, **arguments), arguments


def apply_peft(architecture: Architecture, spec: Mapping[str, Any]) -> Architecture:
    """Apply a `[peft]` section to an architecture: which tensors are trained, and which are added.

    Raises:
        FleetFitError: The mode is unknown, or does not fit the model.
    """
    settings = {key: value for key, value in spec.items() if key != "name"}
    name = spec.get("name", "full")
    function = name if callable(name) else names.resolve("peft", name)
    return call_factory(function, str(name), "[peft]", settings, architecture=architecture)


@dataclass(frozen=True, eq=False)
class Level:
    """One complexity level.

    Attributes:
        name: Its name, "1" for the smallest.
        submodel: Its sub-model, with prefix channels; the one that is evaluated and deployed.
        width: Fraction of the channels kept (s_w).
        needs: Cost as a fraction of the full model's, which a client must afford; 0: every client affords it.
        further: The same for each further cost that budgets name.
        averaged: Whether it counts in the average over the levels' models.
    """

    name: str
    submodel: Submodel
    width: float
    needs: float
    further: Mapping[str, float] = field(default_factory=dict)
    averaged: bool = True
