"""Where a vision transformer with Ree looks before and after modulation: the maps of ReeFL's appendix E (ICML 2024).

The map of block l for a token a is the row of its attention that belongs to a, in the place of the class token, beside
the tokens that enter the block: softmax(q(a) K / sqrt(head size)) over [a, patches], the mean over heads, without the
element of a itself. Three tokens are asked: attn_x, the class token that enters block l (Eq. 7); attn_m, the m_l that
Ree makes of the token that left it (Eq. 8); attn_c, the m_0 + z that is classified after it (Eq. 9). The model runs
once, as always; what enters blocks and what Ree says are overheard.

Differs from the paper, or is settled where it is open: z^{l-1} of Eq. 7 is what enters block l, so its class token is
m_{l-1} where the backbone goes on with Ree's token (Eq. 4), and attn_x is the attention that the forward pass uses; z^l
of Eq. 9 is what block l put out, as in Eq. 3. The caption of Figure 1b names the patches after block l; here they are
those before it, as in appendix E. With Ree at exits only there are maps of those blocks only. A distillation token is
a key like the patches, but is no patch, so its element is left out too. Rows are not scaled up for what was left out.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.errors import ModelError
from fleetfit.models.ree import RecurrentModule
from fleetfit.models.vit import VitModule

TOKENS = ("x", "m", "c")
"""Whose maps there are, in their order: the class token's, the modulated one's, the classified one's."""


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps of some images.

    Attributes:
        maps: attn_x, attn_m and attn_c, [3, B, blocks, patches]; patches row by row. A map's sum is at most 1.
        blocks: Which blocks they are of, counted from 1.
        grid: Rows and columns of patches.
        exits: After which blocks there is a classification.
        logits: What it says, [exits, B, classes].
    """

    maps: Tensor
    blocks: tuple[int, ...]
    grid: tuple[int, int]
    exits: tuple[int, ...]
    logits: Tensor


def attention_maps(module: nn.Module, images: Tensor) -> AttentionMaps:
    """Compute the maps of every block after which Ree reads.

    Args:
        module: A vision transformer with Ree, tuned in any way, in eval mode, as `Run.model` returns it.
        images: [B, channels, height, width], as the model gets them.

    Raises:
        ModelError: The model has no Ree, or is no vision transformer.
    """
    model, backbone, ree = _parts(module)
    entered: dict[int, Tensor] = {}
    said: dict[int, tuple[Tensor, Tensor]] = {}

    def overhear(ree: nn.Module, given: tuple[Any, ...], made: tuple[Tensor, Tensor]) -> None:
        queue, places = given
        said[places[-1]] = (made[1], made[0] + queue[-1])

    with torch.no_grad(), ExitStack() as hooks:
        for number, block in enumerate(backbone.blocks, 1):
            hooks.enter_context(block.register_forward_pre_hook(_into(entered, number)))
        hooks.enter_context(ree.register_forward_hook(overhear))
        logits = torch.stack(model(images))
        rows, columns = (
            size // side for size, side in zip(images.shape[-2:], backbone.embeddings.patches.stride, strict=True)
        )
        maps = []
        for number, asked in said.items():
            tokens, block = entered[number], backbone.blocks[number - 1]
            every = [_row(block, token, tokens, rows * columns) for token in (tokens[:, 0], *asked)]
            maps.append(torch.stack(every))
    return AttentionMaps(torch.stack(maps, dim=2), tuple(said), (rows, columns), model.exits, logits)


def _parts(module: nn.Module) -> tuple[RecurrentModule, VitModule, nn.Module]:
    """Return the model, its backbone and its Ree."""
    if not isinstance(module, RecurrentModule) or module.ree is None:
        raise ModelError(
            "attention maps before and after modulation need a model with Ree, which this one has not. Train a vision "
            'transformer with method "reefl", and not with its ree = false.'
        )
    backbone = module.backbone
    if not isinstance(backbone, VitModule):
        raise ModelError(
            "attention maps need attention over the patches of an image, so a vision transformer (vit, deit_ti, "
            f"deit_s, deit_b); Ree sits on a {type(backbone).__name__} here."
        )
    return module, backbone, module.ree


def _into(entered: dict[int, Tensor], number: int) -> Any:
    """Return a hook that keeps what enters a block."""

    def keep(block: nn.Module, given: tuple[Any, ...]) -> None:
        entered[number] = given[0]

    return keep


def _row(block: Any, token: Tensor, tokens: Tensor, patches: int) -> Tensor:
    """Return the attention [B, patches] that a token [B, D] pays in the place of the first of the tokens [B, T, D].

    The layers are called, and not their weights taken, so that whatever a fine-tuning mode put into them counts.
    """
    attention = block.attention
    normed = block.norm1(torch.cat([token[:, None], tokens[:, 1:]], dim=1))
    query, key = (
        layer(of).unflatten(-1, (-1, attention.head_size)).transpose(1, 2)
        for layer, of in ((attention.query, normed[:, :1]), (attention.key, normed))
    )
    paid = (query @ key.transpose(-1, -2) / attention.head_size**0.5).softmax(dim=-1)
    found: Tensor = paid.mean(dim=1)[:, 0, -patches:]
    return found
