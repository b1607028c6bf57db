"""The two speeds of computing: how each shape of a sub-model is computed, and what that does to its module.

`engine.speed = "exact"` computes in fp32 with the default memory format. "fast" chooses, for each level's shape, by the
rule of `_paying`: a rule and no stopwatch, so that two runs on one machine have the same bits. What was chosen stands
in the run's configuration and in the problem's spec, so whatever runs a job, evaluates or goes on with the run reuses
it. Weights, optimiser, statistics, losses and whatever is sent or kept are fp32 in both; what is computed in bf16 is
`torch.autocast`'s.

Where bf16 pays and where not was measured with one thread on a CPU with avx512_bf16 and amx_bf16 (`benchmarks/fast.py`
repeats it), against the default:

- images with channels last: a training step takes 0.6 to 0.9 of the time, if the weights of convolutions lie so too;
  group norm has no good kernel for it, and patches that do not overlap gain nothing;
- bf16: dense convolutions 0.5 to 0.7, linear layers over many tokens 0.3 to 0.7. Depthwise convolutions, small linear
  layers, and classifiers on one vector per sample are slower than in fp32; so is the backward pass of torch's
  attention, in place of which stand steps of their own (see `fleetfit.models.transformer`), with one product for query,
  key and value;
- dropout beside bf16: torch draws a number for each element, a fourth of a step of a small BERT; one for four is 0.2 of
  that.
"""

import contextlib
import importlib.util
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from fleetfit.errors import ConfigError
from fleetfit.models.transformer import dropout
from fleetfit.values import Problem
from fleetfit.values.arithmetic import PLAIN, Arithmetic, MemoryFormat

# ---- what this machine can do --------------------------------------------------------------------------------------

_CPUINFO = Path("/proc/cpuinfo")
_BF16 = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}  # flags of x86 and of ARM
_HELD = "ONEDNN_MAX_CPU_ISA"  # environment variable of the library behind torch's products
_HELD_WITH_BF16 = ("BF16", "FP16", "AMX", "AVX10", "ALL", "DEFAULT")


def has_bf16(accelerator: torch.device) -> bool:
    """Tell whether an accelerator computes in bf16 itself, and does not emulate it."""
    if accelerator.type == "cuda":
        with torch.cuda.device(accelerator):
            return torch.cuda.is_bf16_supported(including_emulation=False)
    held = os.environ.get(_HELD, "ALL").upper()
    return any(word in held for word in _HELD_WITH_BF16) and bool(_BF16 & _cpu_flags())


@cache
def _cpu_flags() -> frozenset[str]:
    try:
        lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:  # another system than Linux
        found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        return frozenset(name for name, there in found.items() if there)
    return frozenset(lines[0].split()) if lines else frozenset()


def check_compiler(accelerator: torch.device) -> None:
    """Check that there is what `torch.compile` makes kernels with.

    Raises:
        ConfigError: There is not.
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


def within_reach(problem: Problem, accelerator: torch.device) -> Problem:
    """Return the problem without bf16 where that would be emulated: on a device of another kind than the server."""
    if has_bf16(accelerator) or not any(one.arithmetic.precision == "bf16" for one in problem.computed):
        return problem
    return problem.with_computed(
        tuple(replace(one, arithmetic=replace(one.arithmetic, precision="fp32")) for one in problem.computed)
    )


# ---- which arithmetic pays for a shape -----------------------------------------------------------------------------

_FAN_IN = 96  # inputs of a convolution's filter from which on its product in bf16 saves more than conversions cost
_TOKENS_FAN_IN = 40  # the same of a linear layer over many tokens, the smaller of its sides
_PIXELS = 256  # of an image; with fewer the calls cost more than the products
_RECURRENT = 128  # the same of the units of a recurrent layer


def has_convolutions(module: nn.Module) -> bool:
    """Tell whether a module has convolutions of images, which have a memory format."""
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def paying(module: nn.Module, input_shape: Sequence[int], accelerator: torch.device) -> Arithmetic:
    """Return what "fast" computes a module with: a rule of its layers' kinds and sizes; see the module's docstring.

    Args:
        module: Of the shape; on any device, also without values.
        input_shape: Of one sample.
        accelerator: Where it will be computed, with bf16 or without.
    """
    parts = list(module.modules())
    dense = [p for p in parts if isinstance(p, nn.Conv2d) and p.kernel_size > p.stride and p.groups == 1]
    format: MemoryFormat = "contiguous"
    if accelerator.type == "cuda":
        format = "channels_last" if any(isinstance(p, nn.Conv2d) for p in parts) else format
        return Arithmetic("bf16" if has_bf16(accelerator) else "fp32", format)
    if dense and not any(isinstance(p, nn.GroupNorm) for p in parts):
        format = "channels_last"
    gains = has_bf16(accelerator) and (_images_gain(parts, dense, input_shape) if dense else _tokens_gain(parts))
    return Arithmetic("bf16" if gains else "fp32", format)


def _images_gain(parts: Sequence[nn.Module], dense: Sequence[nn.Conv2d], input_shape: Sequence[int]) -> bool:
    """Tell whether bf16 pays for a model of convolutions; linear layers of such stay in fp32 (see `prepared`)."""
    if math.prod(input_shape[-2:]) < _PIXELS or any(isinstance(p, nn.Conv2d) and p.groups > 1 for p in parts):
        return False
    return _mostly((p.weight.numel(), p.weight[0].numel() >= _FAN_IN) for p in dense)


def _tokens_gain(parts: Sequence[nn.Module]) -> bool:
    """Tell whether bf16 pays for a model of tokens: layers that see each sample's vectors one by one."""
    if any(isinstance(p, nn.Conv1d) for p in parts):  # state spaces: most is done element by element
        return False
    recurrent = [p for p in parts if isinstance(p, nn.RNNBase)]
    if recurrent:
        return _mostly((sum(w.numel() for w in p.parameters()), p.hidden_size >= _RECURRENT) for p in recurrent)
    if not any(isinstance(p, nn.Embedding | nn.Conv2d) for p in parts):  # one vector per sample
        return False
    linear = [p for p in parts if isinstance(p, nn.Linear)]
    return _mostly((p.weight.numel(), min(p.weight.shape) >= _TOKENS_FAN_IN) for p in linear)


def _mostly(weighed: Iterable[tuple[int, bool]]) -> bool:
    found = list(weighed)
    return 2 * sum(n for n, gains in found if gains) > sum(n for n, _ in found)


# ---- what it does to a module --------------------------------------------------------------------------------------

_ENTRIES = ("start", "segment", "head", "forward")  # by which a model is run, as a whole or exit by exit
_RECOMPILED = 64  # kernels for one function: several shapes, training and evaluation, batches of several sizes


def in_format(flat: Tensor, shape: tuple[int, ...], arithmetic: Arithmetic, convolution: bool) -> Tensor:
    """Return a view of a flat buffer with the shape of a tensor, whose elements lie in it as the arithmetic wants."""
    if not convolution or len(shape) != 4 or arithmetic.memory_format == "contiguous":
        return flat.view(shape)
    out, channels, height, width = shape
    return flat.view(out, height, width, channels).permute(0, 3, 1, 2)


def convolution_weights(module: nn.Module) -> set[int]:
    """Return the ids of the weights that have a memory format."""
    return {id(part.weight) for part in module.modules() if isinstance(part, nn.Conv2d)}


def prepared(module: nn.Module, arithmetic: Arithmetic, accelerator: torch.device) -> nn.Module:
    """Have a module compute as its shape was chosen to; its parameters stay the same objects, in fp32.

    Logits leave it in fp32, so that every loss is computed so. What it computes between its parts need not be.

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
                part.forward = partial(_linear, part)  # type: ignore[method-assign]
            if type(part) is nn.Dropout:
                part.forward = partial(_dropped, part)  # type: ignore[method-assign]
    for name in _ENTRIES:
        own = getattr(module, name, None)
        if callable(own):
            setattr(module, name, _Entered(name, own, arithmetic, accelerator.type))
    if arithmetic.compile:
        module.forward = _compiled(module.forward)
    return module


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Compute a linear layer in fp32 where it sees one vector per sample: to convert its weight would cost more."""
    if x.dim() > 2 or not torch.is_autocast_enabled("cpu"):
        return F.linear(x, layer.weight, layer.bias)
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), layer.weight, layer.bias)


def _dropped(layer: nn.Dropout, x: Tensor) -> Tensor:
    """Drop elements by cheaper random numbers."""
    return dropout(x, layer.p) if layer.training and layer.p else x


class _Entered:
    """An entry of a module with what the arithmetic does before and after; autocast, which is global, ends with it."""

    def __init__(self, name: str, own: Callable[..., Any], arithmetic: Arithmetic, device: str) -> None:
        self._own, self._device = own, device
        self._half = arithmetic.precision == "bf16"
        self._reorders = name in ("start", "forward") and arithmetic.memory_format == "channels_last"
        self._answers = name in ("head", "forward")

    def __call__(self, *given: Any) -> Any:
        if self._reorders:
            given = tuple(_reordered(value) for value in given)
        if not self._half:
            return self._own(*given)
        # without its cache, which would keep what was converted while no gradients were wanted
        with torch.autocast(self._device, dtype=torch.bfloat16, cache_enabled=False):
            found = self._own(*given)
        return tree_map(_in_fp32, found) if self._answers else found


def _reordered(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _in_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def uncompiled(arithmetic: Arithmetic) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a module computes without the kernels that were compiled for it."""
    return torch.compiler.set_stance("force_eager") if arithmetic.compile else contextlib.nullcontext()


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = _RECOMPILED
    torch._inductor.config.compile_threads = 1  # more would be processes of their own, in every worker
    return torch.compile(forward)
