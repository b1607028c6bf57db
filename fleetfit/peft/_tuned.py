"""The base of fine-tuning modes: a frozen backbone, with small trained modules added where a name pattern matches."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fleetfit.anatomy import (
    ArchitectureWrapper,
    Layout,
    Segment,
    State,
    TensorLayout,
    build_module,
    find_classifiers,
    infer_layout,
    named_tensors,
)
from fleetfit.anatomy.meta import on_meta
from fleetfit.errors import ModelError

_HEAD = re.compile(r"(?:.*\.)?heads\.\d+\.")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
ADDED = "tuning"  # a part of tensors' names in saved states
"""The name of the added module within a module."""


@dataclass(frozen=True)
class Tuned(ArchitectureWrapper):
    """A model family with a frozen backbone and added modules.

    Attributes:
        targets: Patterns of the names of the modules to which a module is added; none for nothing.
    """

    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets and not self.places:
            names = sorted(
                {_NUMBER.sub(".*", name) for name, _ in self._plain.named_modules() if self._is_candidate(name)}
            )
            raise ModelError(
                f"[peft] targets {', '.join(self.targets)}: no module of the backbone has such a name. Choose among "
                f"{', '.join(names)}, or patterns of them.",
                key="peft.targets",
            )

        if not self.targets and self._is_derived and not self._classifiers:
            raise ModelError(
                "[peft] freezes all but the classifiers, and the exits of this model share its own head, which is "
                'frozen, too. Set model.derive.heads = "own", or a mode that adds modules.',
                key="peft",
            )

    # ---- overridden by modes -------------------------------------------------------------------------------------

    def add_modules(self, module: nn.Module, names: list[str]) -> None:
        """Add a module to each of these modules of a model."""
        for name in names:
            module.get_submodule(name).add_module(ADDED, self.make_module(module.get_submodule(name)))

    def make_module(self, part: nn.Module) -> nn.Module:
        """Return the module that is added to a module, and connect it."""
        raise NotImplementedError

    def accepts(self, part: nn.Module) -> bool:
        """Return whether a module can be added to a module of this kind."""
        return any(isinstance(inner, nn.Linear) for inner in part.modules())

    # ---- for all modes -------------------------------------------------------------------------------------------

    @cached_property
    def _plain(self) -> nn.Module:
        """The whole model without added modules, on the meta device."""
        with on_meta():
            return build_module(self.inner, {a: axis.size for a, axis in self.axes.items()}, tuple(self.positions))

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The names of the modules to which a module is added."""
        return tuple(
            name
            for name, _ in self._plain.named_modules()
            if self._is_candidate(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.targets)
        )

    @property
    def _is_derived(self) -> bool:
        """Whether the inner family gives its own layout; then names say nothing of classifiers."""
        return hasattr(self.inner, "find_layout")

    def _is_in_head(self, name: str) -> bool:
        return not self._is_derived and bool(_HEAD.match(name))

    @cached_property
    def _classifiers(self) -> frozenset[str]:
        """The tensors of classifiers with other names than heads.{n}, as in users' own models."""
        if not self._is_derived and any(_HEAD.match(name) for name, _ in self._plain.named_parameters()):
            return frozenset()
        if self._is_derived:
            tensors = infer_layout(self.inner, tuple(self.positions)).complete.tensors
            return frozenset(name for name, tensor in tensors.items() if tensor.exit is not None)
        classifiers = find_classifiers(self.inner)
        if not classifiers:
            raise ModelError(
                "[peft] freezes everything but the classifiers and the added modules, and this model has no classifier "
                "that is found by its name (heads.{n}), by building with fewer exits, or as the last part of the "
                f'module. Name it heads.{self.blocks}, as in nn.ModuleDict({{"{self.blocks}": ...}}).',
                key="peft",
            )
        return classifiers

    def _is_candidate(self, name: str) -> bool:
        if not name or self._is_in_head(f"{name}.") or any(t.rpartition(".")[0] == name for t in self._classifiers):
            return False
        return self.accepts(self._plain.get_submodule(name))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the inner family's module with all modules added, and all else frozen but the classifiers."""
        module = self.inner.build(axes, exits)
        present = dict(module.named_modules())
        names = [name for name in self.places if name in present and self.accepts(present[name])]
        if names:
            self.add_modules(module, names)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trains(name))
        return module

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained: of a classifier, or added."""
        return self._is_in_head(name) or name in self._classifiers or self.is_new(name)

    def is_new(self, name: str) -> bool:
        """Return whether a tensor is of an added module."""
        return f".{ADDED}." in name

    def merge(self, state: State) -> State:
        """Return the tensors of the model without added modules."""
        return super().merge(state) if self.places else state

    def __getattr__(self, name: str) -> Any:
        """Give an own layout where the inner family does."""
        if name == "find_layout" and "inner" in self.__dict__ and self._is_derived:
            return self._extend_layout
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def _extend_layout(self, exits: tuple[int, ...], base: frozenset[str]) -> Layout:
        """Return the inner family's layout with the added tensors: their dimensions follow those that shrink alike."""
        inner = self.inner.find_layout(exits, frozenset()).complete  # type: ignore[attr-defined]
        layouts: dict[str, TensorLayout] = dict(self.rename_tensors(inner.tensors))  # type: ignore[arg-type]
        full = inner.full_sizes
        shapes = self._list_shapes(full, exits)
        shrinking: dict[tuple[str, int], dict[str, int]] = {}
        for axis, size in full.items():
            smaller = self._list_shapes({**full, axis: size - 1}, exits) if size > 1 else shapes
            for name, shape in shapes.items():
                for d, n in enumerate(shape):
                    if n != smaller[name][d]:
                        shrinking.setdefault((name, d), {})[axis] = n - smaller[name][d]
        by_growth: dict[tuple[Any, ...], tuple[Segment, ...]] = {}
        for name, one in layouts.items():
            for d, segments in enumerate(one.dims):
                by_growth.setdefault((shapes[name][d], *shrinking.get((name, d), {}).items()), segments)
        for name in shapes.keys() - layouts.keys() - inner.aliases.keys():
            dims = []
            for d, n in enumerate(shapes[name]):
                growth = shrinking.get((name, d), {})
                if growth and (n, *growth.items()) not in by_growth:
                    raise ModelError(f'"{name}", dimension {d} of size {n}: no tensor of the model shrinks like it.')
                dims.append(by_growth[n, *growth.items()] if growth else (Segment(None, n),))
            layer = next(place for place in self.places if name.startswith(f"{place}."))
            near = next((one for other, one in layouts.items() if other.startswith(f"{layer}.")), None)
            layouts[name] = TensorLayout(tuple(dims), near.block if near else None, None, True)
        ordered = {name: layouts[name] for name in shapes if name in layouts}
        sent = {n: one for n, one in ordered.items() if n not in base and self.trains(n)}
        rest = {n: one for n, one in ordered.items() if n not in sent}
        return Layout(inner.axes, exits, sent, inner.aliases, rest)

    def _list_shapes(self, sizes: Mapping[str, int], exits: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        with on_meta():
            module = build_module(self, sizes, exits)
        return {name: tuple(tensor.shape) for name, tensor, _ in named_tensors(module)}
