"""The receptive field of each exit: the part of an image on which the center of its blocks' output depends.

It is measured by one gradient, of that center with respect to the image, in a narrow model (channels do not matter).
Weights are positive and the same for all places, so that no two paths cancel out. Max pooling is replaced by its mean,
since a gradient follows one place of a maximum only. Global operations inside a block, such as squeeze-and-excite and
norms over places, see the image but do not tell where something is, so they are left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fleetfit.anatomy import Architecture, build_module, explain_errors
from fleetfit.cost import call_once
from fleetfit.seeds import isolate_rng

ENOUGH = 0.75
"""The part of each side of the image that an exit must see."""
_WIDTH = 0.25
_NORMS = ("batch_norm", "group_norm", "layer_norm", "instance_norm", "rms_norm")  # batch norm has no running statistics
_POOLS = ("mean", "adaptive_avg_pool2d", "adaptive_max_pool2d", "amax")


def find_first_seeing_exit(architecture: Architecture, input_shape: Sequence[int]) -> int:
    """Return the shallowest exit whose blocks see at least three quarters of both sides of an image.

    Tokens, vectors and other samples that are not images need one block: the shallowest exit. Where no exit sees
    enough, it is the full depth.

    Args:
        architecture: The model family.
        input_shape: Shape of one sample; an image is (channels, height, width).
    """
    if getattr(architecture, "tokens", 0) or len(input_shape) != 3 or len(architecture.positions) == 1:
        return architecture.positions[0]
    return call_once(_find_first_seeing_exit, architecture, tuple(input_shape))


def _find_first_seeing_exit(architecture: Architecture, input_shape: tuple[int, ...]) -> int:
    sides = input_shape[1:]
    for exit, seen in iter_receptive_fields(architecture, input_shape):
        if all(part >= ENOUGH * side for part, side in zip(seen, sides, strict=True)):
            return exit
    return architecture.blocks


def iter_receptive_fields(
    architecture: Architecture, input_shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each exit's block count, and the height and width in pixels that the center of its input sees.

    Args:
        architecture: The model family.
        input_shape: Shape of one image (channels, height, width).
    """
    positions = tuple(architecture.positions)
    with isolate_rng(torch.device("cpu")):  # the weights are drawn and then replaced
        sizes = architecture.sizes(_WIDTH)
        module = build_module(architecture, sizes, positions).eval()
    _set_weights(module)
    image = torch.full((1, *input_shape), 1e-3, requires_grad=True)
    inputs: dict[int, Any] = {}
    explained = explain_errors(architecture, input_shape, sizes=sizes)
    with explained, _keep_head_inputs(module, positions, inputs), _LocalOperations():
        module(image)
    for exit in positions:
        tensors = [leaf for leaf in tree_leaves(inputs.get(exit)) if isinstance(leaf, Tensor)]
        centers = [  # the sum over the channels at the center of a map [1, C, H, W]; over all of another tensor
            (t[:, :, t.shape[2] // 2, t.shape[3] // 2] if t.dim() == 4 else t).sum() for t in tensors if t.requires_grad
        ]
        if not centers:  # a classifier of the module's own, which reads something that was pooled
            yield exit, (input_shape[1], input_shape[2])
            continue
        total = torch.stack(centers).sum()
        (gradient,) = torch.autograd.grad(total, image, retain_graph=True)
        touched = gradient[0].abs().sum(0) > 0
        yield exit, (_measure_extent(touched.any(1)), _measure_extent(touched.any(0)))


def _set_weights(module: nn.Module) -> None:
    """Make every layer a mean over its inputs, so that activations keep their size."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            value = parameter.shape[0] / parameter.numel()
        else:
            value = 1.0 if name.endswith("weight") else 0.0
        parameter.detach().fill_(value)
        parameter.requires_grad_(False)


@contextmanager
def _keep_head_inputs(module: nn.Module, positions: Sequence[int], inputs: dict[int, Any]) -> Iterator[None]:
    """Store what each early classifier reads, by its block count."""
    heads = getattr(module, "heads", None)
    by_exit: Mapping[int, nn.Module] = {}
    if isinstance(heads, nn.ModuleDict):
        by_exit = {int(name): head for name, head in heads.items() if name.isdigit()}
    elif isinstance(heads, nn.ModuleList):
        by_exit = dict(zip(positions, heads, strict=False))

    def make_hook(exit: int) -> Callable[..., None]:
        return lambda _, args, kwargs: inputs.setdefault(exit, (args, kwargs))

    with ExitStack() as hooks:
        for e, head in by_exit.items():
            hooks.enter_context(head.register_forward_pre_hook(make_hook(e), with_kwargs=True))
        yield


class _LocalOperations(TorchFunctionMode):
    """Runs a model without its global operations, and with means in the place of maxima."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _NORMS:
            return args[0]
        if name == "max_pool2d":
            return _pool_by_mean(*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _POOLS and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
            is_global = isinstance(result, Tensor) and result.numel() * args[0][0, 0].numel() == args[0].numel()
            return result.detach() if is_global else result
        return result


def _pool_by_mean(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    **_: Any,
) -> Tensor:  # fmt: skip
    return F.avg_pool2d(x, kernel_size, stride or None, padding, ceil_mode)


def _measure_extent(touched: Tensor) -> int:
    """Return the distance from the first to the last place, both included."""
    places = torch.nonzero(touched)
    return int(places[-1] - places[0] + 1) if len(places) else 0
