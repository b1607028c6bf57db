"""A level's module: a deep copy of the instance, with cut parameters and the numbers in its modules set.

The copy's `memo` maps each parameter and buffer to its cut one before anything is copied, so that ties and
parametrisations survive and nothing is copied whole. The instance is left as it is.
"""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.derivation.labels import list_tensors
from fleetfit.derivation.plan import DerivedPlan
from fleetfit.derivation.units import get_length, list_places
from fleetfit.layout.known_values import set_values


class Absent(nn.Module):
    """Stands for a module behind the last exit of a level."""


def copy_instance(net: nn.Module) -> nn.Module:
    """Return a copy of an instance, with all tensors that its modules have."""
    return copy.deepcopy(net, _copy_plain_tensors(net, {}))


def copy_level(
    net: nn.Module, plan: DerivedPlan, sizes: Mapping[str, int], absent: Collection[str] = frozenset()
) -> nn.Module:
    """Return a copy of an instance with these sizes.

    Args:
        net: The instance.
        plan: What was derived from it.
        sizes: The units of each axis; the others stay whole.
        absent: Tensors behind the last exit.
    """
    sizes = {**plan.axes, **sizes}
    memo: dict[int, Any] = {}
    for name, tensor in list_tensors(net):
        if id(tensor) not in memo:
            cut = torch.empty(0, dtype=tensor.dtype) if name in absent else _cut(name, tensor, plan, sizes)
            memo[id(tensor)] = nn.Parameter(cut, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cut
    level = copy.deepcopy(net, _copy_plain_tensors(net, memo))
    modes = [(part, part.training) for part in level.modules()]
    level.eval()  # spectral norm moves its vectors when its weight is read in training mode
    incomplete = {parent for name in absent for parent in _list_parents(name)}
    for (name, whole), part in zip(net.named_modules(), level.modules(), strict=True):
        if name not in incomplete:
            _resize(whole, part)
    for part, mode in modes:
        part.training = mode
    for number in plan.numbers:
        _set_number(level.get_submodule(number.module), number.attribute, number.index,
                    get_length(number.meaning, sizes))  # fmt: skip
    if absent:
        _remove(net, level, absent, "")
    return level


def _copy_plain_tensors(net: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """Add the tensors that are no parameters or buffers (old weight norm, caches): deepcopy refuses some of them."""
    for part in net.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = value.detach().clone().to(torch.get_default_device())
    return memo


def _cut(name: str, tensor: Tensor, plan: DerivedPlan, sizes: Mapping[str, int]) -> Tensor:
    """Return a tensor's prefix at some sizes, on the default device; on the meta device its shape."""
    is_meta = torch.get_default_device().type == "meta"
    shape, cut = list(tensor.shape), tensor.detach()
    for d, whole in enumerate(tensor.shape):
        segments = plan.segments.get((name, d))
        if segments is None:
            continue
        shape[d] = get_length(segments, sizes)
        if shape[d] != whole and not is_meta:
            if len(segments) == 1:
                cut = cut.narrow(d, 0, shape[d])
            else:
                cut = cut.index_select(d, torch.tensor(list_places(segments, plan.axes, sizes), device=cut.device))
    if is_meta:
        empty = torch.empty(shape, dtype=tensor.dtype)
        if not tensor.is_floating_point():
            set_values(empty, cut.to("cpu", copy=True))
        return empty
    return cut.clone(memory_format=torch.contiguous_format).to(torch.get_default_device())


def _list_parents(name: str) -> list[str]:
    """Return the names of the modules that a tensor is in."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _set_number(part: nn.Module, attribute: str, index: int | None, value: int) -> None:
    if index is None:
        setattr(part, attribute, value)
        return
    values = list(getattr(part, attribute))
    values[index] = value
    setattr(part, attribute, type(getattr(part, attribute))(values))


def _remove(net: nn.Module, level: nn.Module, absent: Collection[str], prefix: str) -> None:
    """Put shells in the place of modules behind the last exit, and None in that of single tensors."""
    for name, child in list(net.named_children()):
        inner = [f"{prefix}{name}.{tensor}" for tensor, _ in list_tensors(child)]
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if inner and not is_list and all(tensor in absent for tensor in inner):
            level._modules[name] = Absent()
        else:
            _remove(child, level.get_submodule(name), absent, f"{prefix}{name}.")
    for table in (level._parameters, level._buffers):
        for leaf in table:
            if f"{prefix}{leaf}" in absent:
                table[leaf] = None


def _resize(whole: nn.Module, part: nn.Module) -> None:
    """Set the numbers of one of PyTorch's own modules by the shapes of its parameters."""
    resize = next((resize for kinds, resize in _RESIZE if isinstance(whole, kinds)), None)
    if resize is not None and getattr(part, "weight", part) is not None:
        resize(whole, part)


def _resize_linear(whole: Any, part: Any) -> None:
    part.out_features, part.in_features = part.weight.shape


def _resize_convolution(whole: Any, part: Any) -> None:
    before, after = whole.weight.shape, part.weight.shape
    if whole.transposed:
        part.in_channels, part.out_channels = after[0], after[1] * part.groups
        return
    if whole.groups > 1:
        part.groups = whole.groups * after[0] // before[0]
    part.out_channels, part.in_channels = after[0], after[1] * part.groups


def _resize_batch_norm(whole: Any, part: Any) -> None:
    part.num_features = part.weight.shape[0]


def _resize_layer_norm(whole: Any, part: Any) -> None:
    part.normalized_shape = tuple(part.weight.shape)


def _resize_group_norm(whole: Any, part: Any) -> None:
    part.num_channels = part.weight.shape[0]
    part.num_groups = max(1, whole.num_groups * part.num_channels // whole.num_channels) if whole.num_groups > 1 else 1


def _resize_embedding(whole: Any, part: Any) -> None:
    part.num_embeddings, part.embedding_dim = part.weight.shape


def _resize_attention(whole: Any, part: Any) -> None:
    part.embed_dim = part.out_proj.weight.shape[0]
    part.num_heads = whole.num_heads * part.embed_dim // whole.embed_dim
    if part._qkv_same_embed_dim:
        part.kdim = part.vdim = part.embed_dim
    else:
        part.kdim, part.vdim = part.k_proj_weight.shape[1], part.v_proj_weight.shape[1]


def _resize_recurrent(whole: Any, part: Any) -> None:
    part.input_size, part.hidden_size = part.weight_ih_l0.shape[1], part.weight_hh_l0.shape[1]


def _resize_cell(whole: Any, part: Any) -> None:
    part.input_size, part.hidden_size = part.weight_ih.shape[1], part.weight_hh.shape[1]


def _resize_prelu(whole: Any, part: Any) -> None:
    part.num_parameters = part.weight.shape[0]


def _resize_transformer(whole: Any, part: Any) -> None:
    part.d_model = next(part.parameters()).shape[-1]
    part.nhead = part.decoder.layers[0].self_attn.num_heads


_RESIZE: tuple[tuple[Any, Any], ...] = (
    (nn.Linear, _resize_linear),
    (nn.modules.conv._ConvNd, _resize_convolution),
    (nn.modules.batchnorm._NormBase, _resize_batch_norm),
    ((nn.LayerNorm, nn.RMSNorm), _resize_layer_norm),
    (nn.GroupNorm, _resize_group_norm),
    ((nn.Embedding, nn.EmbeddingBag), _resize_embedding),
    (nn.MultiheadAttention, _resize_attention),
    (nn.RNNBase, _resize_recurrent),
    (nn.RNNCellBase, _resize_cell),
    (nn.PReLU, _resize_prelu),
    (nn.Transformer, _resize_transformer),
)
