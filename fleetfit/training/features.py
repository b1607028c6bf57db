"""Batches of a job; the features that a frozen backbone gives are computed once per sample.

They go as far up as `fleetfit.training.frozen` proves that they do not depend on training, and are cached for all
epochs, rounds, clients and levels: by sample, sub-model and exit, for every client of the process that has the sample.
One memory budget holds for all of them; beyond it they go into a file (`fleetfit.training.row_store`).

Cached features may differ from those of a training batch by the rounding of another batch shape, so they are used on
request or in a "fast" run only. Augmented samples differ each time: training on them caches nothing, evaluation does.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from fleetfit.core import Device, Problem
from fleetfit.machine import free_memory
from fleetfit.submodel import Submodel
from fleetfit.training.frozen import BATCH, CachedValue, FrozenPrefix, find_frozen_prefix
from fleetfit.training.local_model import LocalModel
from fleetfit.training.row_store import MemoryBudget, RowStore

_MEMORY_SHARE = 0.25
"""Largest share of the memory that is free when the first value is cached."""
_MAX_STORES = 256
"""Most stores of a problem, one per sub-model and exit; the least recently used are dropped first."""
_MAX_DATA_SETS = 8
"""Most data sets of which something is cached: a process has one, and perhaps the server's."""


class BatchLoader:
    """Loads the batches of one job, and lets its module use cached features."""

    def __init__(self, device: Device, module: Any, features: "_Features | None" = None) -> None:
        """Load batches of a device; with `features`, the module computes only what is not cached."""
        self._device, self._module, self._features = device, module, features
        self._samples: Tensor | None = None
        self._indices = torch.empty(0, dtype=torch.int64)

    def load(self, indices: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return samples and labels on the accelerator; `rng` is for the augmentation in training."""
        device = self._device
        if self._features is None:
            x, y = device.data.batch(indices, rng)
            return device.put(x), device.put(y)
        self._indices = indices
        self._samples = make_lazy_samples(device, lambda: device.put(device.data.batch(indices)[0]), len(indices))
        return self._samples, device.put(device.data.labels(indices))

    def prepare(self, indices: Tensor) -> None:
        """Compute the features of coming samples that are not cached yet."""
        if self._features is not None and not self._features.prepare(indices):
            self._features = None  # no room for them

    @contextlib.contextmanager
    def open(self) -> Iterator["BatchLoader"]:
        """Let the module use cached features until the job ends."""
        if self._features is None:
            yield self
            return
        own, plain = vars(self._module).get("forward"), self._module.forward

        def forward(x: Any) -> Any:
            if x is not self._samples or self._features is None:
                return plain(x)
            return self._features.compute_logits(self._indices)

        self._module.forward = forward
        try:
            yield self
        finally:
            if own is None:
                del self._module.forward
            else:
                self._module.forward = own


def make_batch_loader(device: Device, model: LocalModel, submodel: Submodel, training: bool) -> BatchLoader:
    """Return the loader of a job, with cached features if the problem asks for them."""
    problem, data = device.problem, device.data
    # labels of padded tokens are cut with their batch, so they cannot be had without its samples
    labels_vary = data.padding >= 0 and data.y.ndim > 1
    if not problem.features_bytes or not problem.base or (training and data.augment is not None) or labels_vary:
        return BatchLoader(device, model.module)
    if problem not in _caches:
        free_bytes = _MEMORY_SHARE * free_memory(torch.device("cpu"))
        _caches[problem] = FeatureCache(MemoryBudget(min(problem.features_bytes, free_bytes)))
    return BatchLoader(device, model.module, _caches[problem].get_features(device, model, submodel))


# ---- the cache -------------------------------------------------------------------------------------------------------

Key = tuple[Any, ...]


class FeatureCache:
    """All cached features of one problem."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._stores: dict[Key, RowStore] = {}
        self._prefixes: dict[Key, FrozenPrefix | None] = {}
        self._data: list[Any] = []  # referenced, so that no other object gets its id

    def get_features(self, device: Device, model: LocalModel, submodel: Submodel) -> "_Features | None":
        """Return the features of a sub-model and a device's data, or None if nothing is frozen."""
        data = device.data
        if not any(x is data.x for x in self._data):
            if len(self._data) == _MAX_DATA_SETS:
                for store in self._stores.values():
                    store.close()
                self._stores, self._prefixes, self._data = {}, {}, []
            self._data.append(data.x)
        channels = tuple(sorted(submodel.channels.items(), key=lambda item: item[0]))
        key = (id(data.x), data.mean, data.std, data.resize, channels, model.arithmetic)
        shape = (*key, submodel.exits, device.accelerator)
        if shape not in self._prefixes:
            if sum(len(indices) for indices in data.splits.values()) < 2:  # too few samples to try
                return None
            self._prefixes[shape] = _find_prefix(device, model)
        prefix = self._prefixes[shape]
        return None if prefix is None else _Features(self, key, prefix, device, model, submodel.exits)

    def open_store(self, key: Key, samples: int, examples: list[Tensor]) -> RowStore:
        """Return a store, which is made if it is missing."""
        store = self._stores.pop(key, None)
        if store is None:
            while len(self._stores) >= _MAX_STORES:
                self._stores.pop(next(iter(self._stores))).close()
            store = RowStore(samples, examples, self._budget)
        self._stores[key] = store
        return store

    def find_stores(self, keys: list[Key]) -> list[RowStore] | None:
        """Return the stores of some keys, or None if one is missing."""
        return [self._stores[key] for key in keys] if self._stores.keys() >= set(keys) else None


_caches: WeakKeyDictionary[Problem, FeatureCache] = WeakKeyDictionary()


def _find_prefix(device: Device, model: LocalModel) -> FrozenPrefix | None:
    """Return the frozen prefix of a model, tried on samples that the device has."""
    indices = torch.cat(list(device.data.splits.values()))
    try:
        x, other = (_load_filled(device, part[:BATCH]) for part in (indices, indices.flip(0)))
        other = other.roll(1, -1) if other.dtype == torch.int64 else 0.5 * other + 0.25  # unlike x, however few
        return find_frozen_prefix(model.module, list(model.parameters.values()), x, other)
    except (ValueError, RuntimeError, TypeError):  # its parts do not run one by one
        return None


def _load_filled(device: Device, indices: Tensor) -> Tensor:
    """Return BATCH samples, the first ones again at the end, in one shape: padding is not cut off."""
    data = device.data
    indices = indices.repeat(-(-BATCH // len(indices)))[:BATCH]
    return device.put(data.stored(indices) if data.padding >= 0 else data.batch(indices)[0])


@dataclass(eq=False)
class _Features:
    """The cached features of one sub-model, for the samples of one device."""

    cache: FeatureCache
    key: Key  # of the data and the sub-model's channels
    prefix: FrozenPrefix
    device: Device
    model: LocalModel
    exits: tuple[int, ...]
    _ready: Sequence[tuple[RowStore, CachedValue]] = ()

    @cached_property
    def _keys(self) -> list[Key]:
        """One key per part of the prefix; levels share the keys of what they have in common."""
        kinds = [(i + 1, "carry" if part.head is None else "head") for i, part in enumerate(self.prefix.exits)]
        if self.prefix.carry is not None:
            kinds.append((len(self.prefix.exits), "carry"))
        return [(*self.key, self.exits[:count], kind) for count, kind in kinds]

    def prepare(self, indices: Tensor) -> bool:
        """Compute what is not cached of some samples; return whether there was room for it."""
        stores, missing = self.cache.find_stores(self._keys), indices.unique()
        if stores is not None:
            missing = torch.cat([store.find_missing(indices) for store in stores]).unique()
            if len(missing) and any(store.full for store in stores):
                return False
        for batch in missing.split(BATCH) if len(missing) else ():
            self._compute(batch)
        stores = self.cache.find_stores(self._keys)
        if stores is None or any(len(store.find_missing(indices)) for store in stores):
            return False
        self._ready = list(zip(stores, self.prefix.parts, strict=True))
        return True

    @torch.no_grad()
    def _compute(self, batch: Tensor) -> None:
        values = self.prefix.compute_values(self.model.module, _load_filled(self.device, batch))
        for key, value in zip(self._keys, values, strict=True):
            tensors = [tensor[: len(batch)] for tensor in tree_flatten(value)[0]]
            store = self.cache.open_store(key, len(self.device.data.x), tensors)
            new = torch.isin(batch, store.find_missing(batch))
            store.add(batch[new], [t[new.to(t.device)] for t in tensors])

    def compute_logits(self, indices: Tensor) -> list[Tensor]:
        """Return the logits of every exit, shallow to deep, from the cached values of samples."""
        put = self.device.put
        values = [part.rebuild([put(tensor) for tensor in store.get(indices)]) for store, part in self._ready]
        return self.prefix.compute_logits(self.model.module, values)


# ---- lazy samples ----------------------------------------------------------------------------------------------------


class _LazySamples(Tensor):
    """Samples that are loaded when their values are used; a module with cached features never does."""

    _load: Callable[[], Tensor]
    _loaded: Tensor | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*map(_load, args), **{key: _load(value) for key, value in (kwargs or {}).items()})


def make_lazy_samples(device: Device, load: Callable[[], Tensor], count: int) -> Tensor:
    """Return lazy samples with the right shape and type. Code that bypasses `__torch_function__` sees no values."""
    data = device.data
    filler = torch.tensor(-1 if data.x.dtype == torch.int64 else torch.nan, device=device.accelerator)
    samples = filler.expand(count, *data.sample_shape).as_subclass(_LazySamples)
    samples._load = load
    return samples


def _load(value: Any) -> Any:
    if isinstance(value, _LazySamples):
        if value._loaded is None:
            value._loaded = value._load()
        return value._loaded
    if type(value) in (list, tuple):
        return type(value)(map(_load, value))
    return value
