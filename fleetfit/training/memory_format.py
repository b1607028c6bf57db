"""The memory format of a sub-model's images, by its shape: plain or channels-last, apart for training and evaluation.

`engine.speed = "exact"` computes in fp32 in the format that a rule chooses. The rule is a function of the module's
layers, without a measurement: each machine and engine chooses alike, also after a resume. A run records the rule's
name. A later rule gets another name, and older runs keep theirs.

Rule 1 was fitted to sub-models of 11 models at up to five widths (`benchmarks/formats.py`; ADR 0024 has the table),
with PyTorch 2.13 on an AVX-512 processor and, of ten of them, on the same one limited to AVX2. Where it chooses
channels-last, none loses more than 5% of a training step or an evaluation pass. With PyTorch 2.11 some do: before 2.13
all is plain.

- Convolutions gain where their channels fill vector registers: 16 or more in and out, multiples of 8, or depthwise.
  In training half of them must be such, in evaluation seven in ten. The first one is left out, since images have few
  channels, and those with a bias beside others without one: squeeze-and-excite layers, which see one vector a sample.
- Evaluation of one-channel images loses: the first convolution then takes a large part.
- Group norm has no good kernel for channels-last. VGG's convolutions with 320 or more outputs on small maps lose, too.
- Weight gradients of a strided 1x1 convolution with fewer than 8 input channels write past their workspace in
  channels-last on AVX2 (oneDNN issue 6035, PyTorch 2.13): such a sub-model trains in the plain format.
- On CUDA the plain format stays. On an H200 channels-last took 0.98 to 1.32 of a training step in fp32 for models up to
  ResNet-20 of half width, at batch sizes from 16 to 128.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fleetfit.anatomy import outputs
from fleetfit.core.arithmetic import Arithmetic, MemoryFormat
from fleetfit.errors import format_cause

_SINCE = (2, 13)  # versions of PyTorch
_SHARES = {True: 0.5, False: 0.7}  # in training, in evaluation
_VERY_WIDE = 320
_SHARE_OF_VERY_WIDE = 0.4
_BLOCK = 8  # channels that AVX2 computes together


def choose_format(arithmetic: Arithmetic, module: nn.Module, accelerator: torch.device, training: bool) -> Arithmetic:
    """Return the arithmetic with "contiguous" or "channels_last" in place of a rule's name.

    Args:
        arithmetic: The arithmetic of the module's shape.
        module: The module of the sub-model.
        accelerator: Where it is computed.
        training: Whether it is trained or evaluated.
    """
    if arithmetic.memory_format != "rule-1":
        return arithmetic
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    gains = accelerator.type == "cpu" and version >= _SINCE and _gains_by_rule_1(module, training)
    chosen: MemoryFormat = "channels_last" if gains else "contiguous"
    return replace(arithmetic, memory_format=chosen)


def find_view_error(module: nn.Module, input_shape: Sequence[int]) -> str:
    """Return why images in channels-last cannot pass a module, or "": a `view` may need the plain format's strides.

    Args:
        module: On the CPU; its gradients and buffers change.
        input_shape: Of one sample.
    """
    x = torch.zeros(2, *input_shape).contiguous(memory_format=torch.channels_last)
    try:
        logits = outputs(module.train().to(memory_format=torch.channels_last), x)  # type: ignore[call-overload]
        total = torch.stack([one.sum() for one in logits]).sum()
        if total.requires_grad:
            total.backward()
    except Exception as error:  # what fails in any format fails again in a job, which says so
        return format_cause(error)
    return ""


def is_unsafe_in_channels_last(module: nn.Module) -> bool:
    """Tell whether training in channels-last may write past its memory on AVX2: oneDNN issue 6035."""
    return any(
        isinstance(part, nn.Conv2d)
        and part.kernel_size == (1, 1)
        and max(part.stride) > 1
        and part.in_channels // part.groups < _BLOCK
        for part in module.modules()
    )


def _gains_by_rule_1(module: nn.Module, training: bool) -> bool:
    parts = list(module.modules())
    convolutions = [part for part in parts if isinstance(part, nn.Conv2d)]
    if not convolutions or any(isinstance(part, nn.GroupNorm) for part in parts):
        return False
    if training and is_unsafe_in_channels_last(module):
        return False
    if not training and convolutions[0].in_channels == 1:
        return False
    without_bias = [convolution for convolution in convolutions[1:] if convolution.bias is None]
    judged = without_bias or convolutions[1:] or convolutions
    very_wide = sum(part.out_channels >= _VERY_WIDE and part.groups == 1 for part in judged)
    filling = sum(map(_fills_registers, judged))
    return very_wide < _SHARE_OF_VERY_WIDE * len(judged) and filling >= _SHARES[training] * len(judged)


def _fills_registers(convolution: nn.Conv2d) -> bool:
    ins, outs, groups = convolution.in_channels, convolution.out_channels, convolution.groups
    if groups > 1:
        return ins // groups <= 2 or min(ins, outs) // groups >= _BLOCK
    return min(ins, outs) >= 2 * _BLOCK or (ins % _BLOCK == 0 and outs % _BLOCK == 0)
