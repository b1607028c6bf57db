"""What a frozen backbone makes of each sample is computed once: kept for all epochs, rounds, clients and levels.

It goes as far up as `fleetfit.training.constant` proves that it is the same whatever is trained. Values are kept by
sample, sub-model and exit, and found again by every client of the process that has the sample; a bound of memory holds
for all of them together, beyond which they go into a file (`fleetfit.training.rows`).

A batch's values in a run that keeps them may differ from those of one that does not by the rounding of another batch
shape, so a run only does it where it is asked to, or is "fast". Augmented samples are other ones each time: training on
them keeps nothing, evaluation does.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fleetfit.data import Data
from fleetfit.submodel import Submodel
from fleetfit.training.constant import BATCH, ConstantPart, Part, constant_of, logits_from
from fleetfit.training.local_model import LocalModel
from fleetfit.training.rows import Bound, KeptRows
from fleetfit.values import Device, Problem

_SHARE = 0.25
"""Of the memory that is free when the first value is kept: the bound where none is given, and the most in any case."""
_SETS = 256
"""Sets of rows, of a sub-model and exit each, that a problem has at most; the oldest go first."""
_DATA_SETS = 8
"""Data sets of which something is kept: a process has one, and perhaps the server's."""


class Feed:
    """The batches of one job: samples and labels, and a module that knows what it need not compute of them."""

    def __init__(self, device: Device, module: Any, features: "Features | None" = None) -> None:
        """Give batches of a device; those of `features` without computing what is kept."""
        self._device, self._module, self._features = device, module, features
        self._given: Tensor | None = None
        self._indices = torch.empty(0, dtype=torch.int64)

    def batch(self, indices: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return samples and labels where the device computes; `rng`: of the augmentation, in training."""
        device = self._device
        if self._features is None:
            x, y = device.data.batch(indices, rng)
            return device.put(x), device.put(y)
        self._indices = indices
        self._given = _unmade(device, lambda: device.put(device.data.batch(indices, rng)[0]), len(indices))
        return self._given, device.put(device.data.labels(indices))

    def ready(self, indices: Tensor) -> None:
        """Compute what is not kept yet of samples that will come."""
        if self._features is not None and not self._features.ready(indices):
            self._features = None  # no room for them

    @contextlib.contextmanager
    def open(self) -> Iterator["Feed"]:
        """Have the module take up what is kept, as long as the job lasts."""
        if self._features is None:
            yield self
            return
        own, plain = vars(self._module).get("forward"), self._module.forward
        self._module.forward = lambda x: self._logits(x, plain)
        try:
            yield self
        finally:
            if own is None:
                del self._module.forward
            else:
                self._module.forward = own

    def _logits(self, x: Any, plain: Callable[[Any], Any]) -> Any:
        if x is not self._given or self._features is None:
            return plain(x)
        return self._features.logits(self._indices)


def feed_of(device: Device, piece: LocalModel, submodel: Submodel, training: bool) -> Feed:
    """Return the batches of a job, with what is kept of the model where the problem asks for it."""
    problem, data = device.problem, device.data
    bound = problem.features_bytes
    if not bound or not problem.base or (training and data.augment is not None) or not _keepable(data):
        return Feed(device, piece.module)
    kept = _kept.setdefault(problem, Kept(Bound(_most(bound))))
    return Feed(device, piece.module, kept.of(device, piece, submodel))


def _most(asked: float) -> float:
    """Return the bytes that may be kept in memory: as asked for, but no more than a share of what is free."""
    from fleetfit.training.profiling.memory import free_memory  # measuring stands on training

    free = free_memory(torch.device("cpu"))
    return asked if free is None else min(asked, _SHARE * free)


def _keepable(data: Data) -> bool:
    """Tell whether a sample's labels are the same in every batch; those of padded tokens are cut with them."""
    return data.padding < 0 or data.y.ndim == 1


# ---- what is kept ----------------------------------------------------------------------------------------------------

Key = tuple[Any, ...]


class Kept:
    """All that is kept of one problem."""

    def __init__(self, bound: Bound) -> None:
        """Keep nothing yet."""
        self.bound = bound
        self._rows: dict[Key, KeptRows] = {}
        self._constant: dict[Key, ConstantPart | None] = {}
        self._data: list[Any] = []  # held, so that no other one gets its id

    def of(self, device: Device, piece: LocalModel, submodel: Submodel) -> "Features | None":
        """Return what is kept of a sub-model and a device's data, or None where nothing can be."""
        data = device.data
        if not any(x is data.x for x in self._data):
            if len(self._data) == _DATA_SETS:
                self._forget()
            self._data.append(data.x)
        key = (id(data.x), data.mean, data.std, data.resize, _channels(submodel))
        where = (*key, submodel.exits, device.accelerator)
        if where not in self._constant:
            if sum(len(indices) for indices in data.splits.values()) < 2:  # too little to try
                return None
            self._constant[where] = _constant(device, piece)
        found = self._constant[where]
        return None if found is None else Features(self, key, found, device, piece, submodel.exits)

    def _forget(self) -> None:
        for rows in self._rows.values():
            rows.close()
        self._rows, self._constant, self._data = {}, {}, []

    def rows(self, key: Key, samples: int, like: list[Tensor]) -> KeptRows:
        """Return the rows of a set."""
        found = self._rows.pop(key, None)
        if found is None:
            while len(self._rows) >= _SETS:
                self._rows.pop(next(iter(self._rows))).close()
            found = KeptRows(samples, like, self.bound)
        self._rows[key] = found  # last used, last dropped
        return found

    def known(self, key: Key) -> KeptRows | None:
        """Return the rows of a set, if there are any."""
        return self._rows.get(key)


_kept: WeakKeyDictionary[Problem, Kept] = WeakKeyDictionary()


def _channels(submodel: Submodel) -> Key:
    return tuple(sorted(submodel.channels.items(), key=lambda item: item[0]))


def _constant(device: Device, piece: LocalModel) -> ConstantPart | None:
    """Return what is constant in a module, tried on samples that the device has."""
    indices = torch.cat(list(device.data.splits.values()))
    try:
        x, beside = (_whole(device, _filled(some[:BATCH])) for some in (indices, indices.flip(0)))
        beside = beside.roll(1, -1) if beside.dtype == torch.int64 else 0.5 * beside + 0.25  # unlike x, however few
        return constant_of(piece.module, list(piece.parameters.values()), x, beside)
    except (ValueError, RuntimeError, TypeError):  # its parts do not run one by one
        return None


def _filled(indices: Tensor) -> Tensor:
    """Return so many samples that they are a whole batch, the first ones again at the end."""
    return indices.repeat(-(-BATCH // len(indices)))[:BATCH]


def _whole(device: Device, indices: Tensor) -> Tensor:
    """Return samples as a model gets them, of one shape whatever is among them: padding is not cut off."""
    data = device.data
    return device.put(data.stored(indices) if data.padding >= 0 else data.batch(indices)[0])


@dataclass(eq=False)
class Features:
    """What is kept of one sub-model, for one device.

    Attributes:
        kept: Of all sub-models of the problem.
        key: What is kept of the data, and the sub-model's channels.
        constant: What is constant in the module.
        device: Whose samples they are.
        piece: The model.
        exits: Of the sub-model.
    """

    kept: Kept
    key: Key
    constant: ConstantPart
    device: Device
    piece: LocalModel
    exits: tuple[int, ...]
    _ready: list[tuple[KeptRows, Part]] = field(init=False, default_factory=list)

    @cached_property
    def _sets(self) -> list[tuple[Key, Part]]:
        """Return the sets of rows that logits are made from; what levels have in common has one key."""
        sets = [
            ((*self.key, self.exits[: i + 1], "head" if part.head is not None else "carry"), part)
            for i, part in enumerate(self.constant.exits)
        ]
        if self.constant.carry is not None:
            sets.append(((*self.key, self.exits[: self.constant.segments], "carry"), self.constant.carry))
        return sets

    def ready(self, indices: Tensor) -> bool:
        """Compute what is not kept yet of some samples; tell whether there was room for it."""
        lacking, sets = indices, self._sets
        known = [rows for key, _ in sets if (rows := self.kept.known(key)) is not None]
        if len(known) == len(sets):
            lacking = torch.cat([rows.lacking(indices) for rows in known]).unique()
        if len(lacking) and any(rows.full for rows in known):
            return False
        batches = lacking.unique().split(BATCH) if len(lacking) else ()
        found = all(self._computed(batch) for batch in batches)
        known = [rows for key, _ in sets if (rows := self.kept.known(key)) is not None]
        self._ready = list(zip(known, (part for _, part in sets), strict=True)) if len(known) == len(sets) else []
        return found

    @torch.no_grad()
    def _computed(self, batch: Tensor) -> bool:
        """Run the constant part on samples and keep what it gives."""
        module: Any = self.piece.module
        carry = module.start(_whole(self.device, _filled(batch)))
        values = []
        for i, part in enumerate(self.constant.exits):
            carry = module.segment(i, carry)
            values.append(carry if part.head is None else _read(module, part.head, i, carry))
        if self.constant.carry is not None:
            values.append(carry)
        room = True
        for (key, _), value in zip(self._sets, values, strict=True):
            tensors = [tensor[: len(batch)] for tensor in tree_flatten(value)[0]]
            rows = self.kept.rows(key, len(self.device.data.x), tensors)
            new = torch.isin(batch, rows.lacking(batch))
            room = rows.put(batch[new], [t[new.to(t.device)] for t in tensors]) and room
        return room

    def logits(self, indices: Tensor) -> list[Tensor]:
        """Return the logits of every exit, shallow to deep, from what is kept of samples."""
        put, values = self.device.put, []
        for rows, part in self._ready:
            values.append(part.value([put(tensor) for tensor in rows.get(indices)]))
        carry = values.pop() if self.constant.carry is not None else None
        return list(logits_from(self.piece.module, self.constant, values, carry))


class _Enough(Exception):
    """Ends a classifier that is only asked what it reads."""


def _read(module: Any, head: nn.Module, i: int, carry: Any) -> Tensor:
    """Return what an exit's classifier reads, without running it."""
    given: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        given.append(inputs[0])
        raise _Enough

    hook = head.register_forward_pre_hook(note)
    try:
        with contextlib.suppress(_Enough):
            module.head(i, carry)
    finally:
        hook.remove()
    return given[0]


# ---- samples that nobody may ask for ---------------------------------------------------------------------------------


class _Unmade(Tensor):
    """Samples that are only made when somebody looks at them: a module that has kept what they give does not."""

    _make: Callable[[], Tensor]
    _made: Tensor | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(_made, args), **{key: _made(value) for key, value in (kwargs or {}).items()})


def _unmade(device: Device, make: Callable[[], Tensor], count: int) -> Tensor:
    """Return samples of the right shape and kind; who got at their values past Python would get none."""
    data = device.data
    nothing = torch.tensor(-1 if data.x.dtype == torch.int64 else torch.nan, device=device.accelerator)
    found = nothing.expand(count, *data.sample_shape).as_subclass(_Unmade)
    found._make = make
    return found


def _made(value: Any) -> Any:
    if isinstance(value, _Unmade):
        if value._made is None:
            value._made = value._make()
        return value._made
    if type(value) in (list, tuple):
        return type(value)(map(_made, value))
    return value
