"""What the modes share: a frozen backbone, and small trained modules put into it wherever a name pattern matches."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fleetfit.errors import ModelError
from fleetfit.layout import ArchitectureWrapper, Declaration, State, build_module, infer_layout
from fleetfit.layout.meta import on_meta

_HEAD = re.compile(r"(?:.*\.)?heads\.\d+\.")
_NUMBER = re.compile(r"\.\d+(?=\.|$)")
PUT_IN = "tuning"  # a part of tensors' names in saved states
"""The name under which a module keeps what is put into it."""


@dataclass(frozen=True)
class Tuned(ArchitectureWrapper):
    """A model family whose backbone is frozen but for what is put in.

    Attributes:
        targets: Patterns of the names of the modules that something is put into; none for nothing.
    """

    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets and not self.places:
            names = sorted({_NUMBER.sub(".*", name) for name, _ in self._plain.named_modules() if self._takes(name)})
            raise ModelError(
                f"[peft] targets {', '.join(self.targets)}: no module of the backbone has such a name. Choose among "
                f"{', '.join(names)}, or patterns of them.",
                key="peft.targets",
            )

    # ---- for each mode to say ------------------------------------------------------------------------------------

    def put_into(self, module: nn.Module, places: list[str]) -> None:
        """Put something into these modules of a model."""
        for place in places:
            module.get_submodule(place).add_module(PUT_IN, self.made_for(module.get_submodule(place)))

    def made_for(self, part: nn.Module) -> nn.Module:
        """Return what is put into a module, and connect it."""
        raise NotImplementedError

    def takes(self, part: nn.Module) -> bool:
        """Tell whether something can be put into a module of this kind."""
        return any(isinstance(inner, nn.Linear) for inner in part.modules())

    # ---- what follows from it ------------------------------------------------------------------------------------

    @cached_property
    def _plain(self) -> nn.Module:
        """The whole model without anything put in, on the meta device."""
        with on_meta():
            return build_module(self.inner, {a: axis.size for a, axis in self.axes.items()}, tuple(self.positions))

    @cached_property
    def places(self) -> tuple[str, ...]:
        """The names of the modules that something is put into."""
        return tuple(name for name, _ in self._plain.named_modules() if self._takes(name) and self._wanted(name))

    @cached_property
    def _classifiers(self) -> frozenset[str]:
        """The tensors of classifiers that are not called heads.{n}, as models of other people have them.

        Raises:
            ModelError: None can be found, so that the classifier would stay as it was drawn.
        """
        if any(_HEAD.match(name) for name, _ in self._plain.named_parameters()):
            return frozenset()
        known = infer_layout(self.inner, tuple(self.positions)).complete.tensors
        found = frozenset(name for name, tensor in known.items() if tensor.exit is not None)
        if not found:
            raise ModelError(
                "[peft] freezes everything but the classifiers and what it puts in, and this model has no classifier "
                'that can be told by its name (heads.{n}) or by building with fewer exits. Declare it, such as "fc.*": '
                f"exit_after({self.blocks}).",
                key="peft",
            )
        return found

    def _takes(self, name: str) -> bool:
        if not name or _HEAD.match(f"{name}.") or any(t.rpartition(".")[0] == name for t in self._classifiers):
            return False
        return self.takes(self._plain.get_submodule(name))

    def _wanted(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.targets)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the other one's module with everything put in, and all else frozen but the classifiers."""
        module = self.inner.build(axes, exits)
        here = {name for name, _ in module.named_modules()}
        places = [name for name in self.places if name in here]
        if places:
            self.put_into(module, places)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(self.trains(name))
        return module

    def trains(self, name: str) -> bool:
        """Tell whether a tensor is trained: of a classifier, or put in."""
        return bool(_HEAD.match(name)) or name in self._classifiers or self.is_new(name)

    def is_new(self, name: str) -> bool:
        """Tell whether a tensor is put in."""
        return f".{PUT_IN}." in name

    def merge(self, state: State) -> State:
        """Return the tensors as they are where nothing is put in."""
        return super().merge(state) if self.places else state

    @cached_property
    def declared(self) -> Mapping[str, Any]:
        """The other one's declarations by tensor, and those that follow for what is put in."""
        found: dict[str, tuple[Declaration, ...]] = {}
        for pattern, value in super().declared.items():
            for name in self._plain.state_dict():
                if fnmatch.fnmatchcase(name, pattern):
                    found[name] = (*found.get(name, ()), *(value if isinstance(value, tuple) else (value,)))
        mine: dict[str, tuple[Declaration, ...]] = {}
        for name, declarations in found.items():
            for new, dims in self.follows(name).items():
                mine[new] = tuple(
                    Declaration(d.kind, d.factor, d.parts, to) for d in declarations for to in [dims.get(d.dim)]
                    if d.kind != "alias" and (d.dim is None or to is not None)
                )  # fmt: skip
        return found | mine

    def follows(self, name: str) -> dict[str, dict[int | None, int | None]]:
        """Return which tensors that are put in are declared like a tensor of the other one, and in which dimensions."""
        return {}
