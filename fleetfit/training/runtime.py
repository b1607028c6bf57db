"""The runtime of a sub-model: device, precision, memory format, compiled kernels, and freed memory.

`engine.speed = "exact"` computes in fp32, in the memory format of a rule (`fleetfit.training.memory_format`). "fast"
chooses for each level's shape by the rule of `choose_arithmetic`. Both are rules and not measurements, so two runs on
one machine have the same bits. The choice is stored in the run's configuration and in the problem's spec, and every
job, evaluation and resumed run uses it. Weights, optimizer, statistics, losses and stored or sent tensors are fp32 in
both; `torch.autocast` decides what is computed in bf16.

The rule of "fast" follows measurements with one thread on a CPU with avx512_bf16 and amx_bf16 (`benchmarks/fast.py`
repeats them), relative to fp32 in the plain memory format:

- Channels last for images: a training step takes 0.6 to 0.9 of the time, if the weights of convolutions have that
  format too. Group norm has no good kernel for it, and patches that do not overlap gain nothing.
- bf16: dense convolutions take 0.5 to 0.7, linear layers over many tokens 0.3 to 0.7. Depthwise convolutions, small
  linear layers, and classifiers of one vector per sample are slower than in fp32. So is the backward pass of torch's
  attention, which `fleetfit.models.transformer` replaces by own steps, with one product for query, key and value.
- Dropout beside bf16: torch draws one number per element, a fourth of a step of a small BERT. One number for four
  elements takes 0.2 of that.

glibc maps each large block anew and zeroes it page by page, and training allocates the same blocks at every step.
Keeping freed memory saves up to a third of the CPU time of small models. oneDNN compiles a kernel for each shape and
keeps the last 1,024; one evaluation of the default run needs more, so its cache is enlarged.
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fleetfit.core import Problem
from fleetfit.core.arithmetic import PLAIN, Arithmetic, MemoryFormat
from fleetfit.errors import ConfigError
from fleetfit.models.transformer import dropout
from fleetfit.submodel import buffers
from fleetfit.training.memory_format import is_unsafe_in_channels_last

# ---- devices -------------------------------------------------------------------------------------------------------

_BF16 = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")  # capabilities of x86 and of ARM
_ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"  # environment variable of oneDNN, which computes torch's products
_ISAS_WITH_BF16 = ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT")


def resolve_device(name: str) -> torch.device:
    """Return the torch device of a name: "cpu", "cuda" or "cuda:N".

    Raises:
        ConfigError: There is no such device on this machine.
    """
    unknown = ConfigError(f'engine.device must be "cpu", "cuda" or "cuda:N", got "{name}".', key="engine.device")
    try:
        device = torch.device(name or "nothing")
    except RuntimeError:
        raise unknown from None
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ConfigError(f'engine.device is "{name}", but this machine has {count} CUDA devices.', key="engine.device")
    return torch.device("cuda", device.index or 0)


def has_bf16(accelerator: torch.device) -> bool:
    """Tell whether an accelerator has bf16 instructions and does not emulate them."""
    if accelerator.type == "cuda":
        with torch.cuda.device(accelerator):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    limit = os.environ.get(_ISA_LIMIT, "ALL").upper()
    if not any(isa in limit for isa in _ISAS_WITH_BF16):
        return False
    # of PyTorch 2.11; an older one keeps to fp32
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in _BF16)


def check_compiler(accelerator: torch.device) -> None:
    """Check that `torch.compile` has a compiler for the accelerator.

    Raises:
        ConfigError: It has none.
    """
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if accelerator.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(
            f"engine.compile needs a C++ compiler, but {compiler} is not on this machine. Install one, name "
            "another in the environment variable CXX, or leave engine.compile out.",
            key="engine.compile",
        )
    if accelerator.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "engine.compile needs triton for a CUDA device, which is not installed; leave it out.", key="engine.compile"
        )


def replace_emulated_bf16(problem: Problem, accelerator: torch.device) -> Problem:
    """Return the problem in fp32 instead of bf16 if the accelerator has no bf16, unlike the server's."""
    if has_bf16(accelerator) or not any(one.arithmetic.precision == "bf16" for one in problem.computed):
        return problem
    return problem.replace_arithmetic(
        tuple(replace(one, arithmetic=replace(one.arithmetic, precision="fp32")) for one in problem.computed)
    )


# ---- the arithmetic of "fast" ----------------------------------------------------------------------------------------

_FAN_IN = 96  # inputs of a convolution's filter from which on its product in bf16 saves more than conversions cost
_TOKENS_FAN_IN = 40  # the same of a linear layer over many tokens, the smaller of its sides
_PIXELS = 256  # of an image; with fewer the calls cost more than the products
_RECURRENT = 128  # the same of the units of a recurrent layer


def has_convolutions(module: nn.Module) -> bool:
    """Tell whether a module has convolutions of images, which have a memory format."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def choose_arithmetic(module: nn.Module, input_shape: Sequence[int], accelerator: torch.device) -> Arithmetic:
    """Return the arithmetic of "fast" for a module, by its layers' kinds and sizes; see the module's docstring.

    Args:
        module: Of the shape; on any device, also the meta device.
        input_shape: Of one sample.
        accelerator: Where it will be computed.
    """
    parts = list(module.modules())
    memory_format: MemoryFormat = "contiguous"
    if accelerator.type == "cuda":
        if not has_bf16(accelerator):
            return PLAIN
        return Arithmetic("bf16", "channels_last" if has_convolutions(module) else memory_format)
    dense = [p for p in parts if isinstance(p, nn.Conv2d) and p.kernel_size > p.stride and p.groups == 1]
    if dense and not any(isinstance(p, nn.GroupNorm) for p in parts) and not is_unsafe_in_channels_last(module):
        memory_format = "channels_last"
    gains = has_bf16(accelerator) and (_images_gain(parts, dense, input_shape) if dense else _tokens_gain(parts))
    return Arithmetic("bf16" if gains else "fp32", memory_format)


def _images_gain(parts: Sequence[nn.Module], dense: Sequence[nn.Conv2d], input_shape: Sequence[int]) -> bool:
    """Tell whether bf16 pays for a model of convolutions; its linear layers stay in fp32 (see `prepare_model`)."""
    if math.prod(input_shape[-2:]) < _PIXELS or any(isinstance(p, nn.Conv2d) and p.groups > 1 for p in parts):
        return False
    return _is_majority((p.weight.numel(), p.weight[0].numel() >= _FAN_IN) for p in dense)


def _tokens_gain(parts: Sequence[nn.Module]) -> bool:
    """Tell whether bf16 pays for a model of tokens, whose layers see each sample's vectors one by one."""
    if any(isinstance(p, nn.Conv1d) for p in parts):  # state spaces: most is done element by element
        return False
    recurrent = [p for p in parts if isinstance(p, nn.RNNBase)]
    if recurrent:
        return _is_majority((sum(w.numel() for w in p.parameters()), p.hidden_size >= _RECURRENT) for p in recurrent)
    if not any(isinstance(p, nn.Embedding | nn.Conv2d) for p in parts):  # one vector per sample
        return False
    linear = [p for p in parts if isinstance(p, nn.Linear)]
    return _is_majority((p.weight.numel(), min(p.weight.shape) >= _TOKENS_FAN_IN) for p in linear)


def _is_majority(layers: Iterable[tuple[int, bool]]) -> bool:
    """Tell whether layers that gain have most of the weights; each layer is (weights, gains)."""
    layers = list(layers)
    return 2 * sum(weights for weights, gains in layers if gains) > sum(weights for weights, _ in layers)


# ---- modules -------------------------------------------------------------------------------------------------------

_ENTRY_POINTS = ("start", "segment", "head", "forward")  # they run a model as a whole or exit by exit
_RECOMPILE_LIMIT = 64  # kernels of one function: several shapes, training and evaluation, batches of several sizes


def view_in_format(flat: Tensor, shape: tuple[int, ...], is_ordered: bool) -> Tensor:
    """Return a view of a flat buffer as a tensor of a shape, or as a convolution's weight in channels-last order."""
    if not is_ordered or len(shape) != 4:
        return flat.view(shape)
    out, channels, height, width = shape
    return flat.view(out, height, width, channels).permute(0, 3, 1, 2)


def convolution_weights(module: nn.Module) -> set[int]:
    """Return the ids of the weights that have a memory format."""
    return {id(part.weight) for part in module.modules() if isinstance(part, nn.Conv2d)}


def prepare_model(module: nn.Module, arithmetic: Arithmetic, accelerator: torch.device) -> nn.Module:
    """Make a module compute in an arithmetic. Its parameters stay the same objects, and its logits are fp32.

    Args:
        module: On the accelerator; changed in place.
        arithmetic: How it computes.
        accelerator: Where.

    Returns:
        The module.
    """
    if arithmetic == PLAIN:
        return module
    if arithmetic.memory_format == "channels_last":
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                part.weight.data = part.weight.data.contiguous(memory_format=torch.channels_last)
    if arithmetic.precision == "bf16" and accelerator.type == "cpu":
        for part in module.modules():
            if type(part) is nn.Linear:
                part.forward = partial(_apply_linear, part)  # type: ignore[method-assign]
            if type(part) is nn.Dropout:
                part.forward = partial(_apply_dropout, part)  # type: ignore[method-assign]
    for name in _ENTRY_POINTS:
        function = getattr(module, name, None)
        if callable(function):
            setattr(module, name, _EntryPoint(name, function, arithmetic, accelerator.type))
    if arithmetic.compile:
        module.forward = _compile(module.forward)
    return module


def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _RECOMPILE_LIMIT
    torch._inductor.config.compile_threads = 1  # more would be processes of their own, in every worker
    return torch.compile(forward)


def disable_compiled_kernels(arithmetic: Arithmetic) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a module computes without its compiled kernels."""
    return torch.compiler.set_stance("force_eager") if arithmetic.compile else contextlib.nullcontext()


def _apply_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute in fp32 for one vector per sample: the conversion of the weight would cost more than it saves."""
    if x.dim() > 2 or not torch.is_autocast_enabled("cpu"):
        return F.linear(x, layer.weight, layer.bias)
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), layer.weight, layer.bias)


def _apply_dropout(layer: nn.Dropout, x: Tensor) -> Tensor:
    """Drop elements by cheaper random numbers."""
    return dropout(x, layer.p) if layer.training and layer.p else x


class _EntryPoint:
    """An entry point of a module, in an arithmetic. Autocast, which is global, ends with it."""

    def __init__(self, name: str, function: Callable[..., Any], arithmetic: Arithmetic, device: str) -> None:
        self._function, self._device = function, device
        self._is_half = arithmetic.precision == "bf16"
        self._takes_images = name in ("start", "forward") and arithmetic.memory_format == "channels_last"
        self._gives_logits = name in ("head", "forward")

    def __call__(self, *inputs: Any) -> Any:
        if self._takes_images:
            inputs = tuple(
                x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x
                for x in inputs
            )
        if not self._is_half:
            return self._function(*inputs)
        # without its cache, which would keep what was converted while no gradients were wanted
        with torch.autocast(self._device, dtype=torch.bfloat16, cache_enabled=False):
            outputs = self._function(*inputs)
        return tree_map(_convert_to_fp32, outputs) if self._gives_logits else outputs


def _convert_to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


# ---- freed memory ----------------------------------------------------------------------------------------------------

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_LARGEST = 32 * 1024 * 1024  # the largest threshold that glibc takes
_SMALLEST = 128 * 1024  # glibc's first threshold
_KERNEL_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"  # environment variable, read when the first kernel is made


@functools.cache
def keep_freed_memory() -> None:
    """Make this process's allocator keep freed memory, and oneDNN its kernels; once per process."""
    os.environ.setdefault(_KERNEL_CACHE, "4096")
    _set_thresholds({_MMAP_THRESHOLD: _LARGEST, _TRIM_THRESHOLD: 2**31 - 1})


@functools.cache
def configure_allocator_to_return() -> None:
    """Make this process's allocator return each large block when it is freed; once per process.

    By default glibc raises its threshold with each freed block, until tensors are in the heap between small objects
    that stay. These gaps count as this process's memory, and fewer and fewer new tensors fit them.
    """
    _set_thresholds({_MMAP_THRESHOLD: _SMALLEST, _TRIM_THRESHOLD: _SMALLEST})


def _set_thresholds(thresholds: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in thresholds.items():
            mallopt(name, value)


def trim_heap() -> None:
    """Return unused memory of this process to the system now, as far as its allocator can."""
    gc.collect()
    buffers.release()
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
