"""Peak memory of one training step, predicted on the meta device, where nothing is computed and nothing allocated.

A step keeps parameters, gradients and moments (4 bytes a number each; of frozen tensors, only themselves), the batch,
and the tensors that the forward pass saves for the backward pass; the peak is the largest sum of storages alive at
once. It leaves out allocations inside a kernel, the allocator's rounding and the interpreter: on a CPU the growth of a
process was 0.95 to 1.3 times the predicted one for most models tried, 1.5 for VGG-16 and 1.65 for an LSTM, whose fused
kernels keep more.

The loss is a cross-entropy over the last dimension of each exit's outputs; those of other tasks hold as much.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from fleetfit.anatomy import Architecture, explain_errors, outputs
from fleetfit.anatomy.meta import Operations, run
from fleetfit.cost.count import Conditions, call_once, get_layout, on_meta
from fleetfit.cost.parts import Measure, Place, Profile, get_place, iter_parts, sum_by_place

_NUMBER = 4  # bytes


class LiveBytes(Operations):
    """Sums the storages that are alive.

    Attributes:
        now: Bytes alive.
        peak: The most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        result = run(func, args, kwargs or {}, by_rules=False)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


def training_memory(
    architecture: Architecture,
    sizes: Mapping[str, int],
    exits: Sequence[int],
    input_shape: Sequence[int],
    batch_size: int,
    moments: int = 1,
) -> int:
    """Return the peak bytes of one training step of a sub-model.

    Args:
        architecture: The model family.
        sizes: Size of every axis.
        exits: Its exits, all of which are trained.
        input_shape: Shape of one sample.
        batch_size: Samples in the step.
        moments: Numbers that the optimizer keeps of each trained parameter.

    Raises:
        ModelError: The model cannot be built, does not accept the input, or looks at values (meta tensors have none).
    """
    conditions = Conditions(batch_size, moments=moments)
    key = tuple(sorted(sizes.items())), tuple(exits), tuple(input_shape), conditions
    return call_once(_training_memory, architecture, *key)


def _training_memory(
    architecture: Architecture,
    key: tuple[tuple[str, int], ...],
    exits: tuple[int, ...],
    input_shape: tuple[int, ...],
    conditions: Conditions,
) -> int:
    memory, module, x = _prepare_step(architecture, dict(key), exits, input_shape, conditions)
    with explain_errors(architecture, input_shape, "meta"), memory:
        sum((_loss(logits) for logits in outputs(module, x)), torch.zeros((), device="meta")).backward()
    return memory.peak


def _prepare_step(
    architecture: Architecture,
    sizes: Mapping[str, int],
    exits: tuple[int, ...],
    input_shape: Sequence[int],
    conditions: Conditions,
) -> tuple[LiveBytes, nn.Module, Tensor]:
    """Return the memory before a step, the module and the batch."""
    module, x = on_meta(architecture, sizes, exits, input_shape, conditions.batch_size)
    memory = LiveBytes()
    for parameter in module.train().parameters():
        memory.add(parameter)
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            memory.add(parameter.grad)
            memory.now += conditions.moments * parameter.numel() * parameter.element_size()
    memory.now += sum(b.numel() * b.element_size() for b in module.buffers())
    memory.add(x)
    return memory, module, x


def _loss(logits: Tensor) -> Tensor:
    flat = logits.flatten(0, -2) if logits.dim() > 1 else logits[:, None]
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64, device=logits.device))


# ---- by parts ------------------------------------------------------------------------------------------------------


def memory_bytes(architecture: Architecture, input_shape: tuple[int, ...], conditions: Conditions) -> Measure:
    """Estimate by parts: what each part's tensors take, and what it leaves for the backward pass."""
    layout = get_layout(architecture, input_shape)

    def measure(sizes: Mapping[str, int]) -> Profile:
        parts: list[tuple[Place, float]] = []
        memory, module, x = _prepare_step(architecture, sizes, layout.exits, input_shape, conditions)
        before = memory.now
        for part, place in iter_parts(module):
            _record_growth(part, place, memory, parts)
        with explain_errors(architecture, input_shape, "meta"), memory:
            logits = outputs(module, x)  # noqa: F841  their storages are alive until here
        stem = x.numel() * x.element_size() + memory.now - before - sum(n for _, n in parts)
        parts.append(((None, None), stem))
        for name, shape in layout.complete.shapes(sizes, layout.exits).items():
            trained = name in layout.tensors and layout.tensors[name].trainable
            numbers = 2 + conditions.moments if trained else 1  # the parameter, its gradient, what its optimizer keeps
            parts.append((get_place(layout.complete, name), _NUMBER * numbers * math.prod(shape)))
        return sum_by_place(architecture, parts)

    return measure


def _record_growth(part: nn.Module, place: Place, memory: LiveBytes, parts: list[tuple[Place, float]]) -> None:
    """Record how many more bytes are alive after a part than before it."""
    before: list[int] = []
    part.register_forward_pre_hook(lambda *_: before.append(memory.now))
    part.register_forward_hook(lambda *_: parts.append((place, memory.now - before.pop())))
