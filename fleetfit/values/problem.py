"""What is trained: the problem and its levels."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fleetfit import names
from fleetfit.errors import RunError
from fleetfit.factories import call_factory
from fleetfit.layout import Architecture, Layout, State, infer_layout
from fleetfit.submodel import Submodel, extract
from fleetfit.tasks import Task, get_task
from fleetfit.values.arithmetic import Arithmetic, Computed, arithmetic_of

AS_MUCH = 2.0**60
"""Bytes for features where nobody says how many: as much as a process may have in any case."""


@dataclass(frozen=True, eq=False)
class Problem:
    """What is trained: an architecture, the exits chosen for it, their layout, and the task.

    Attributes:
        architecture: The model family.
        input_shape: Shape of one sample, without the batch.
        task: Loss, divergence and metrics.
        exits: Exits of the full model.
        base: Tensors of the full model that are never trained and do not travel.
        start: The run folder whose final state is this one's first; "" for none. Other processes do not need it.
        spec: How another process rebuilds the problem; None for objects that have no import path.
        features_bytes: How much memory may keep what a frozen backbone makes of samples (`fleetfit.training.features`),
            `AS_MUCH` for what is sensible; 0: it is computed each time.
        computed: How the levels' shapes are computed, and so how others are; in fp32 as always where nothing is said.
    """

    architecture: Architecture
    input_shape: tuple[int, ...]
    task: Task
    exits: tuple[int, ...]
    base: State = field(default_factory=dict)
    start: str = ""
    spec: Mapping[str, Any] | None = None
    features_bytes: float = 0.0
    computed: tuple[Computed, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        """The layout of the model with all its exits."""
        return infer_layout(self.architecture, self.exits, self.base)

    @staticmethod
    def rebuilt(spec: Mapping[str, Any]) -> "Problem":
        """Build the problem that a spec describes, but for what its method makes of the model.

        Args:
            spec: `model`, `given`, `task`, `exits`, and perhaps `peft`, `method`, `features_bytes` and `computed`.
        """
        model = dict(spec["model"])
        name = model.pop("name")
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in spec["given"].items()}
        architecture = call_factory(names.resolve("models", name), name, "[model]", model, **given)
        architecture = tuned(architecture, spec.get("peft", {}))
        exits = tuple(spec["exits"]) or (architecture.blocks,)
        shape, task = tuple(given["input_shape"]), get_task(spec["task"])
        computed = tuple(map(Computed.restored, spec.get("computed", ())))
        found = Problem(architecture, shape, task, exits, spec=spec, computed=computed)
        return found.with_features(float(spec.get("features_bytes", 0)))

    def with_exits(self, exits: Iterable[int]) -> "Problem":
        """Return the same problem with other exits."""
        chosen = tuple(sorted(set(exits)))
        spec = None if self.spec is None else {**self.spec, "exits": list(chosen)}
        return replace(self, exits=chosen, spec=spec)

    def with_features(self, features_bytes: float) -> "Problem":
        """Return the same problem, of which so much may be kept."""
        known = {} if self.spec is None else {k: v for k, v in self.spec.items() if k != "features_bytes"}
        told = {"features_bytes": features_bytes} if features_bytes else {}
        return replace(self, features_bytes=features_bytes, spec=None if self.spec is None else known | told)

    def with_computed(self, computed: tuple[Computed, ...]) -> "Problem":
        """Return the same problem whose shapes are computed in other ways."""
        nests = {"computed": [one.nest for one in computed]} if computed else {}
        spec = None if self.spec is None else {k: v for k, v in self.spec.items() if k != "computed"} | nests
        return replace(self, computed=computed, spec=spec)

    def arithmetic_of(self, piece: Submodel) -> Arithmetic:
        """Return how a sub-model is computed, by its shape."""
        return arithmetic_of(self.computed, {**self.layout.full_sizes, **piece.sizes}, piece.exits)

    def base_of(self, piece: Submodel) -> State:
        """Return a sub-model's part of what is never trained.

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


def tuned(architecture: Architecture, spec: Mapping[str, Any]) -> Architecture:
    """Return an architecture as a `[peft]` section says: what of it is trained, and what is put in.

    Raises:
        FleetFitError: The mode is unknown, or does not fit the model.
    """
    settings = {key: value for key, value in spec.items() if key != "name"}
    name = spec.get("name", "full")
    function = name if callable(name) else names.resolve("peft", name)
    made: Architecture = call_factory(function, str(name), "[peft]", settings, architecture=architecture)
    return made


@dataclass(frozen=True, eq=False)
class Level:
    """One complexity level.

    Attributes:
        name: What people call it, "1" for the smallest.
        submodel: Its sub-model, with prefix channels; the one that is evaluated and deployed.
        width: Fraction of the channels kept (s_w).
        needs: Cost as a fraction of the full model's, which a client must afford; 0 for everybody.
        further: The same of each further cost that budgets name; those not named are for everybody.
        averaged: Whether it counts in the average over the levels' models.
    """

    name: str
    submodel: Submodel
    width: float
    needs: float
    further: Mapping[str, float] = field(default_factory=dict)
    averaged: bool = True
