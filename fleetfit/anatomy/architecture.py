"""A model family: its axes and its builder; models with exits; a family around another one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from queue import Queue
from threading import Thread
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from fleetfit.errors import FleetFitError, ModelError
from fleetfit.layout import Axis, State

# ---- axes, builders, and models with exits -------------------------------------------------------------------------

Carry = Any
"""Any nest of tensors, batch first in each."""


class Architecture(Protocol):
    """A model family: how to build the model for any sizes of its axes and any choice of exits.

    Inherit from it to get the defaults of `positions` and `sizes`.
    """

    axes: Mapping[str, Axis]
    blocks: int
    tokens: int = 0
    """Above 0: samples are int64 tokens below it, of shape (L,); 0: samples are real numbers."""
    size_dependent: str = ""
    """Why a narrow model computes something else than the masked full one, if it does; `check_layout` reports it."""

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Block counts after which a classifier may sit; the planner (ScaleFL Eq. 1) chooses among them."""
        return tuple(range(1, self.blocks + 1))

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis at a width in (0, 1]: floor(width * size) in whole granules, at least one."""
        return default_sizes(self.axes, width)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        ...

    def pretrained(self, exits: tuple[int, ...]) -> State:
        """Return tensors of the full model with these exits that do not start from drawn values."""
        return {}

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained; others stay on each machine, and are not sent."""
        return True

    def rename_tensors(self, state: State) -> State:
        """Return another model's tensors by their names in this model; tensors that it lacks keep theirs."""
        return state

    def is_new(self, name: str) -> bool:
        """Return whether a checkpoint may lack a tensor, which is then drawn."""
        return False


def default_sizes(axes: Mapping[str, Axis], width: float) -> dict[str, int]:
    """Return floor(width * size) per axis, in whole granules, at least one granule; unscaled axes stay whole.

    Raises:
        ModelError: The width is outside (0, 1].
    """
    if not 0 < width <= 1:
        raise ModelError(f"a width must be above 0 and at most 1, got {width}.", key="width")
    sizes = {}
    for name, axis in axes.items():
        granules = int(width * axis.size / axis.granule + 1e-9)  # 0.29 * 100 is 28.999..., and means 29
        sizes[name] = max(1, granules) * axis.granule if axis.scaled else axis.size
    return sizes


@runtime_checkable
class HasSegments(Protocol):
    """What early exits need of a module (ScaleFL Eqs. 3 and 4)."""

    exits: tuple[int, ...]

    def start(self, x: Tensor) -> Carry:
        """Return the state before the first block (the paper's H_0 after the stem)."""
        ...

    def segment(self, i: int, carry: Carry) -> Carry:
        """Run the blocks between exit i-1 and exit i (Eq. 3)."""
        ...

    def head(self, i: int, carry: Carry) -> Tensor:
        """Return the logits of exit i (Eq. 4)."""
        ...


class ExitModel(nn.Module):
    """Mixin that derives `forward` from `start`, `segment` and `head`.

    A model names its blocks `blocks.{i}` and its classifiers `heads.{block count}`; `exits` are the block counts
    after which its classifiers sit, shallow to deep.
    """

    exits: tuple[int, ...]

    def start(self, x: Tensor) -> Carry:
        """Return the state before the first block."""
        raise NotImplementedError

    def segment(self, i: int, carry: Carry) -> Carry:
        """Run the blocks after exit i-1 up to exit i (Eq. 3)."""
        blocks = self.get_submodule("blocks")
        for b in range(self.exits[i - 1] if i else 0, self.exits[i]):
            carry = blocks[b](carry)  # type: ignore[index]
        return carry

    def head(self, i: int, carry: Carry) -> Tensor:
        """Return the logits [B, classes] of exit i (Eq. 4)."""
        heads = getattr(self, "heads", None)
        key = str(self.exits[i])
        if isinstance(heads, nn.ModuleList) and len(heads) == len(self.exits):  # in order
            key = str(i)
        if not isinstance(heads, nn.ModuleDict | nn.ModuleList) or key not in heads._modules:
            raise ModelError(
                f"the classifiers of a {type(self).__name__} must be an nn.ModuleDict called heads, one for each exit "
                f"by its block count, such as nn.ModuleDict({{str(e): ... for e in exits}}); there is none for "
                f"{self.exits[i]} in {type(heads).__name__}{list(getattr(heads, '_modules', ()))}."
            )
        logits: Tensor = heads._modules[key](carry)
        return logits

    def token(self, carry: Carry) -> Tensor:
        """Return the input of classifiers, [B, D]: by default the first token, or a carry that is [B, D] itself.

        Raises:
            ModelError: The carry is neither; then the model needs a `token` and a `with_token` of its own.
        """
        tokens = _tokens(carry)
        return tokens[:, 0] if tokens.dim() == 3 else tokens

    def with_token(self, carry: Carry, token: Tensor) -> Carry:
        """Return the carry with another token in the place of `token`."""
        tokens = _tokens(carry)
        new = torch.cat([token[:, None], tokens[:, 1:]], dim=1) if tokens.dim() == 3 else token
        return new if isinstance(carry, Tensor) else (new, *carry[1:])

    def predict(self, x: Tensor) -> Tensor:
        """Return the last exit's logits [B, classes]; no other classifier runs.

        Args:
            x: Samples [B, ...], as `forward` takes them.
        """
        return next(predictions(self, x, every=False))

    def predict_exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each exit [B, classes], as soon as they are computed (ScaleFL, Algorithm 4).

        Nothing is computed twice; a caller that stops early saves the rest.

        Args:
            x: Samples [B, ...], as `forward` takes them.
        """
        return predictions(self, x)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of every exit, shallow to deep."""
        carry = self.start(x)
        logits = []
        for i in range(len(self.exits)):
            carry = self.segment(i, carry)
            logits.append(self.head(i, carry))
        return logits


@runtime_checkable
class VisitsExits(Protocol):
    """A module that has no segments, but calls a function at each exit and stops there on request."""

    exits: tuple[int, ...]

    def visit_exits(self, x: Tensor, visit: Callable[[int, Tensor], bool], every: bool = True) -> None:
        """Call `visit(i, logits)` at each exit, shallow to deep, until it returns True; nothing behind is computed.

        Args:
            x: Samples [B, ...].
            visit: Takes the exit, from 0, and its logits [B, classes].
            every: False: at the last exit alone, without the classifiers of the others.
        """
        ...


def visit_exits(module: nn.Module, x: Tensor, visit: Callable[[int, Tensor], bool]) -> None:
    """Call `visit(i, logits)` at each exit, shallow to deep, until it returns True; nothing behind is computed.

    Args:
        module: A module with `start`, `segment` and `head`, or with `visit_exits`.
        x: Samples [B, ...].
        visit: Takes the exit, from 0, and its logits [B, classes].

    Raises:
        ModelError: The module can do neither; the message says what it lacks.
    """
    if isinstance(module, VisitsExits):
        module.visit_exits(x, visit)
        return
    model = require_segments(module)
    carry = model.start(x)
    for i in range(len(model.exits)):
        carry = model.segment(i, carry)
        if visit(i, model.head(i, carry)):
            return


def predictions(module: nn.Module, x: Tensor, every: bool = True) -> Iterator[Tensor]:
    """Yield logits [B, classes] exit by exit, shallow to deep, each segment computed once and only when it is needed.

    Args:
        module: A module with `start`, `segment` and `head`, or with `visit_exits`; for the last exit alone, any.
        x: Samples [B, ...].
        every: Yield those of every exit; else only the last one's, without computing the others.

    Raises:
        ModelError: The module cannot be run exit by exit; the message says what it lacks.
    """
    if isinstance(module, VisitsExits):
        return _iter_visits(module, x) if every else iter([_compute_last(module, x)])
    if not every and not isinstance(module, HasSegments):
        with torch.no_grad():
            return iter([outputs(module, x)[-1]])
    return _iter_predictions(require_segments(module), x, every)


@torch.no_grad()
def _iter_predictions(module: HasSegments, x: Tensor, every: bool) -> Iterator[Tensor]:
    carry, last = module.start(x), len(module.exits) - 1
    for i in range(last + 1):
        carry = module.segment(i, carry)
        if every or i == last:
            yield module.head(i, carry)


@torch.no_grad()
def _compute_last(module: VisitsExits, x: Tensor) -> Tensor:
    logits: dict[int, Tensor] = {}
    module.visit_exits(x, lambda i, z: logits.setdefault(i, z) is None, every=False)
    return logits[len(module.exits) - 1]


def _iter_visits(module: VisitsExits, x: Tensor) -> Iterator[Tensor]:
    """Yield the logits of each exit from one forward pass, which waits at each exit in a thread of its own."""
    results: Queue[Tensor | BaseException | None] = Queue()
    goes_on: Queue[bool] = Queue()

    def visit(i: int, logits: Tensor) -> bool:
        results.put(logits)
        return not goes_on.get()

    def run() -> None:
        error = None
        try:
            with torch.no_grad():  # which is per thread
                module.visit_exits(x, visit)
        except BaseException as raised:
            error = raised
        results.put(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while (result := results.get()) is not None:
            if isinstance(result, BaseException):
                raise result
            yield result
            goes_on.put(True)
    finally:
        goes_on.put(False)
        thread.join()


def require_segments(module: nn.Module) -> HasSegments:
    """Return the module as one that can be run segment by segment.

    Raises:
        ModelError: It cannot; the message says what it lacks.
    """
    missing = [name for name in ("exits", "start", "segment", "head") if not hasattr(module, name)]
    if missing:
        raise ModelError(
            f"adaptive inference runs a model segment by segment, and {type(module).__name__} has no "
            f"{', no '.join(missing)}. Inherit from fleetfit.architecture.ExitModel, or write them (see "
            "docs/own-architecture.md)."
        )
    return cast(HasSegments, module)


def _tokens(carry: Carry) -> Tensor:
    """Return the carry, or its first part, where that is [B, tokens, D] or [B, D]."""
    tokens = carry[0] if isinstance(carry, tuple) and carry else carry
    if not isinstance(tokens, Tensor) or tokens.dim() not in (2, 3):
        kind = (
            f"a tensor of shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        )
        raise ModelError(
            f"between its blocks this model hands on {kind}, not tokens [B, tokens, D] or a state [B, D]. Give it a "
            "token(carry) that returns [B, D] and a with_token(carry, token) that puts another one in its place."
        )
    return tokens


def make_input(
    architecture: Architecture, input_shape: Sequence[int], batch: int, rng: torch.Generator | None = None
) -> Tensor:
    """Return inputs of an architecture [batch, ...]: its samples, or noise; without a generator zeros."""
    tokens, shape = getattr(architecture, "tokens", 0), (batch, *input_shape)
    if rng is None:
        zeros = torch.zeros(shape, dtype=torch.int64 if tokens else torch.float32)
        # on the meta device, a forward pass must not learn that they are zeros
        return torch.empty_like(zeros) if zeros.is_meta else zeros
    samples = getattr(unwrap(architecture), "samples", None)
    if samples is not None and tuple(samples.shape[1:]) == shape[1:]:
        return samples[torch.arange(batch) % len(samples)]
    return torch.randint(tokens, shape, generator=rng) if tokens else torch.randn(shape, generator=rng)


def outputs(module: nn.Module, x: Any) -> list[Tensor]:
    """Return the logits of every exit; a module that returns one tensor has one exit.

    Raises:
        ModelError: It returns something else than a tensor or a list of tensors.
    """
    logits = module(x)
    if isinstance(logits, Tensor):
        return [logits]
    if not isinstance(logits, list | tuple) or not all(isinstance(one, Tensor) for one in logits):
        kinds = [type(one).__name__ for one in logits] if isinstance(logits, list | tuple) else type(logits).__name__
        raise ModelError(
            f"forward of {type(module).__name__} must return a tensor of logits, or a list with the logits of each "
            f"exit, shallow to deep; got {kinds}."
        )
    return list(logits)


# ---- validation of an architecture, which users write --------------------------------------------------------------

_WIDTHS = (0.01, 0.3, 0.5, 1.0)


def validate_architecture(architecture: Any) -> None:
    """Check the types and ranges of an architecture's attributes.

    Raises:
        ModelError: An attribute has a wrong type or is out of range, or reading it raises.
    """
    who = type(architecture).__name__
    try:
        _validate_axes(who, architecture.axes)
        blocks = architecture.blocks
        if not _is_count(blocks, 1):
            raise ModelError(f"{who}.blocks must be the number of its blocks, at least 1; got {blocks!r}.")
        _validate_positions(who, architecture.positions, blocks)
        tokens = getattr(architecture, "tokens", 0)
        if not _is_count(tokens, 0):
            raise ModelError(
                f"{who}.tokens must be the number of tokens that its samples are made of, or 0 for real numbers; got "
                f"{tokens!r}."
            )
        reason = getattr(architecture, "size_dependent", "")
        if not isinstance(reason, str):
            raise ModelError(
                f"{who}.size_dependent must say in words why a narrow model computes something else; got {reason!r}."
            )
        for width in _WIDTHS:
            _validate_sizes(who, architecture.axes, architecture.sizes(width), width)
    except FleetFitError:
        raise
    except Exception as error:  # of a user's properties and methods
        raise ModelError(f"reading the attributes of {who} failed: {type(error).__name__}: {error}.") from error


def _validate_axes(who: str, axes: Any) -> None:
    expected = f'{who}.axes must be axes by name, such as {{"hidden": Axis(64)}}; '
    if not isinstance(axes, Mapping):
        raise ModelError(f"{expected}got {type(axes).__name__}.")
    for name, axis in axes.items():
        if not isinstance(name, str) or not isinstance(axis, Axis):
            raise ModelError(f"{expected}{name!r} is {axis!r}.")


def _validate_positions(who: str, positions: Any, blocks: int) -> None:
    are_counts = isinstance(positions, tuple | list | range) and all(_is_count(p, 1) for p in positions)
    if not are_counts or not positions or list(positions) != sorted(set(positions)) or positions[-1] != blocks:
        raise ModelError(
            f"{who}.positions must be the block counts after which a classifier may sit, ascending, the last of them "
            f"the depth ({blocks}): such as ({blocks},) for one classifier at the end; got {positions!r}."
        )


def _validate_sizes(who: str, axes: Mapping[str, Axis], sizes: Any, width: float) -> None:
    call = f"{who}.sizes({width:g})"
    if not isinstance(sizes, Mapping) or axes.keys() - sizes.keys():
        raise ModelError(f"{call} must return the size of each axis ({', '.join(axes)}) by name; got {sizes!r}.")
    for name, axis in axes.items():
        n = sizes[name]
        if not _is_count(n, 1) or n > axis.size or (axis.scaled and n % axis.granule):
            granules = f" in granules of {axis.granule}" if axis.granule > 1 else ""
            raise ModelError(
                f'{call}: axis "{name}" must be a whole number from 1 to {axis.size}{granules}; got {n!r}.'
            )
        if width == 1 and n != axis.size:
            raise ModelError(f'{call}: at full width axis "{name}" must be whole, {axis.size}; got {n}.')


def _is_count(n: Any, least: int) -> bool:
    return type(n) is int and n >= least


# ---- a model family around another one, from which it takes what it does not change --------------------------------


@dataclass(frozen=True)
class ArchitectureWrapper(Architecture):
    """A model family around another one.

    Attributes:
        inner: The other one.
        more: The parts of its module that the other one's has not, as a message names them.
    """

    more: ClassVar[str] = "what this model has beyond the one inside it"
    inner: Architecture
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)
    tokens: int = field(init=False, repr=False, compare=False)
    size_dependent: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.inner.axes))
        object.__setattr__(self, "blocks", self.inner.blocks)
        object.__setattr__(self, "tokens", getattr(self.inner, "tokens", 0))
        object.__setattr__(self, "size_dependent", getattr(self.inner, "size_dependent", ""))

    @property
    def checkpoint(self) -> str | None:
        """Where its pretrained tensors come from."""
        return getattr(self.inner, "checkpoint", None)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """Block counts after which a classifier may sit."""
        return tuple(self.inner.positions)

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis at a width."""
        return dict(self.inner.sizes(width))

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the other one's module."""
        return self.inner.build(axes, exits)

    def pretrained(self, exits: tuple[int, ...]) -> State:
        """Return the tensors of the other one's checkpoint by their names in this model."""
        pretrained = getattr(self.inner, "pretrained", None)
        return self.rename_tensors(pretrained(exits)) if pretrained is not None else {}

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained."""
        return bool(getattr(self.inner, "trains", lambda name: True)(name))

    def rename_tensors(self, state: State) -> State:
        """Return another model's tensors by their names in this model."""
        renamed: State = getattr(self.inner, "rename_tensors", lambda state: state)(state)
        return renamed

    def is_new(self, name: str) -> bool:
        """Return whether a checkpoint may lack a tensor."""
        return bool(getattr(self.inner, "is_new", lambda name: False)(name))

    def merge(self, state: State) -> State:
        """Return the state of a plain module of the other family that computes what this one's does.

        Args:
            state: All tensors of a module of this family.

        Raises:
            ModelError: It cannot.
        """
        raise ModelError(f"{self.more} cannot be merged into the tensors of a plain {type(self.inner).__name__}.")


def unwrap(architecture: Architecture) -> Architecture:
    """Return the family inside all wrappers."""
    while isinstance(architecture, ArchitectureWrapper):
        architecture = architecture.inner
    return architecture
