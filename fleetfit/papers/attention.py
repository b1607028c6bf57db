"""Where a vision transformer with Ree looks before and after modulation (ReeFL, ICML 2024, appendix E).

The map of block l for a token a is the row of its attention that belongs to a, in the place of the class token, beside
the tokens that enter the block: softmax(q(a) K / sqrt(head size)) over [a, patches], the mean over heads, without the
element of a itself. Three tokens are asked: attn_x, the class token that enters block l (Eq. 7); attn_m, the m_l that
Ree makes of the token that left it (Eq. 8); attn_c, the m_0 + z that is classified after it (Eq. 9). The model runs
once, as always; what enters blocks and what Ree says are overheard.

The picture, as Figures 1b and 11, has three rows for each image, a column for each block: where the class token that
enters the block looks (blue), where the modulated one looks (pink), and the one that is classified (green). Colour goes
from none at the smallest element of the block's three maps to full at the largest, so that these compare with each
other and not with another block's. Where the two are nearer than the mean element, so that attention is almost even,
full is that far from the smallest, and the maps stay pale. Above each block stand the shares of a token's attention, in
percent, at which colour is none and full, and the bars at the bottom are the colours in between. Under the columns of
exits stands the predicted class; the first exit that is right is framed, as that is the block which the paper's Figure
11 shows.

Differs from the paper, or is settled where it is open: z^{l-1} of Eq. 7 is what enters block l, so its class token is
m_{l-1} where the backbone goes on with Ree's token (Eq. 4), and attn_x is the attention that the forward pass uses; z^l
of Eq. 9 is what block l put out, as in Eq. 3. The caption of Figure 1b names the patches after block l; here they are
those before it, as in appendix E. With Ree at exits only there are maps of those blocks only. A distillation token is
a key like the patches, but is no patch, so its element is left out too. Rows are not scaled up for what was left out.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetfit.data import Data
from fleetfit.errors import ConfigError, ModelError
from fleetfit.models.ree import RecurrentModule
from fleetfit.models.vit import VitModule
from fleetfit.report.drawing import COLORS, DARK, empty, plain, unscaled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- the maps --------------------------------------------------------------------------------------------------------

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
            'transformer with method "reefl", and not with its ree = false.',
            key="method",
        )
    backbone = module.backbone
    if not isinstance(backbone, VitModule):
        raise ModelError(
            "attention maps need attention over the patches of an image, so a vision transformer (vit, deit_ti, "
            f"deit_s, deit_b); Ree sits on a {type(backbone).__name__} here.",
            key="model",
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


# ---- the picture -----------------------------------------------------------------------------------------------------

MOST = 32
"""Images in one picture, at most."""
ROWS = ((COLORS[0], "class token"), ("#d6247f", "modulated"), (COLORS[2], "classified"))
"""Colour and name of the maps, in their order."""
RIGHT, WRONG = COLORS[2], COLORS[4]
_SEEN, _OPAQUE = 0.55, 0.85  # how strong the image under a map is, and the map's fullest colour
_PANEL, _BARS, _NARROWEST = 0.82, 1.1, 5.2  # inches


def attention_of_samples(module: nn.Module, data: Data, samples: int = 4, title: str = "") -> "Figure":
    """Draw the attention maps of test images, taken at equal distances from the whole test set.

    Args:
        module: A vision transformer with Ree, in eval mode.
        data: The data that it was trained on.
        samples: How many images.
        title: What stands above.

    Raises:
        ConfigError: There are not so many images, or it is more than fit into a picture.
        ModelError: The model has no Ree, or is no vision transformer.
        MissingExtra: matplotlib is not installed.
    """
    there = data.split("test")
    most = min(MOST, len(there))
    if not 1 <= samples <= most:
        raise ConfigError(
            f"samples must be 1 to {most}, got {samples}: {data.name} has {len(there)} test images, and at most {MOST} "
            "go into one picture.",
            key="samples",
        )
    chosen = there[(2 * torch.arange(samples) + 1) * len(there) // (2 * samples)]
    images, labels = data.batch(chosen)
    found = attention_maps(module, images)
    return attention(unscaled(images, data), labels.tolist(), found, data.class_names, title)


def attention(
    images: Tensor, labels: Sequence[int], found: AttentionMaps, names: Sequence[str] = (), title: str = ""
) -> "Figure":
    """Draw images and their attention maps.

    Args:
        images: [B, channels, height, width], from 0 to 1.
        labels: Their classes.
        found: Their maps.
        names: Of the classes; by default their numbers.
        title: What stands above.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    count, deep = len(images), len(found.blocks)
    names = names or [str(c) for c in range(found.logits.shape[-1])]
    high = 3 * _PANEL * images.shape[-2] / images.shape[-1] + 0.6
    figure = empty(max(_NARROWEST, _PANEL * (deep + 3.2)), 0.6 + _BARS + count * high)
    figure.suptitle(title or "where the tokens look", fontsize=10, color=DARK)
    *parts, below = figure.subfigures(count + 1, 1, squeeze=False, height_ratios=[*[high] * count, _BARS])[:, 0]
    for i, part in enumerate(parts):
        _one(part, i, images[i], labels[i], found, names)
    _bars(below)
    return figure


def _bars(part: Any) -> None:
    """Draw the colours between none and full, a bar for each map, and what the numbers and frames are."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    part.supxlabel(
        "above a block: the share of a token's attention at which a patch has no colour, and full colour\n"
        "below: what the exit says; framed: the first exit that is right",
        fontsize=8, color=DARK,
    )  # fmt: skip
    white = torch.ones(1, 1, 1)
    for axes, (color, name) in zip(part.subplots(1, len(ROWS)), ROWS, strict=True):
        ends = [overlaid(white, torch.full((1, 1), heat), color)[0, 0].tolist() for heat in (0.0, 1.0)]
        colors = ScalarMappable(Normalize(0, 1), LinearSegmentedColormap.from_list(name, ends))
        bar = part.colorbar(colors, cax=axes, orientation="horizontal", ticks=[0, 1])
        axes.set_box_aspect(0.08)
        bar.ax.set_xticklabels(["first number", "second"], fontsize=7, color=DARK)
        bar.ax.set_title(name, fontsize=8, color=color)
        bar.outline.set_visible(False)


def shades(maps: Tensor) -> Tensor:
    """Return how strong the colours of a block's maps [3, patches] are, from 0 to 1."""
    none, full = scale_of(maps)
    return (maps - none) / (full - none)


def scale_of(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return at which elements of a block's maps [3, patches] colour is none, and where it is full."""
    low = maps.min()
    return low, low + torch.maximum(maps.max() - low, maps.mean())


def overlaid(image: Tensor, heat: Tensor, color: str) -> Tensor:
    """Return a picture [height, width, 3] of a map laid over a faded grey image.

    Args:
        image: [channels, height, width], from 0 to 1.
        heat: [rows, columns] of patches, from 0, where the image is seen, to 1, full colour.
        color: Of the map.
    """
    from matplotlib.colors import to_rgb

    grey = 1 - _SEEN * (1 - image.mean(0)[..., None])
    rows, columns = (whole // part for whole, part in zip(image.shape[1:], heat.shape, strict=True))
    strength = _OPAQUE * heat.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[..., None]
    return (1 - strength) * grey + strength * torch.tensor(to_rgb(color))


def _one(part: Any, i: int, image: Tensor, label: int, found: AttentionMaps, names: Sequence[str]) -> None:
    """Draw one image with its maps."""
    deep = len(found.blocks)
    grid = part.add_gridspec(len(ROWS), deep + 2, width_ratios=[1.7, 0.9, *[1] * deep])
    axes = part.add_subplot(grid[:, 0])
    plain(axes)
    axes.imshow((image if len(image) == 3 else image.mean(0).expand(3, -1, -1)).permute(1, 2, 0).numpy())
    axes.set_title(names[label], fontsize=9, color=DARK)
    said = dict(zip(found.exits, found.logits[:, i].argmax(-1).tolist(), strict=True))
    first = next((e for e in found.exits if said[e] == label), None)
    for r, (color, name) in enumerate(ROWS):
        beside = part.add_subplot(grid[r, 1])
        beside.set_axis_off()
        beside.text(1, 0.5, name, ha="right", va="center", fontsize=8, color=color)
        for c, block in enumerate(found.blocks):
            axes = part.add_subplot(grid[r, c + 2])
            plain(axes, framed=block == first)
            heat = shades(found.maps[:, i, c])[r].unflatten(0, found.grid)
            axes.imshow(overlaid(image, heat, color).numpy())
            if r == 0:
                none, full = (100 * float(end) for end in scale_of(found.maps[:, i, c]))
                axes.set_title(f"block {block}\n{none:.2g} to {full:.2g}%", fontsize=7, color=DARK)
            if r == len(ROWS) - 1 and block in said:
                axes.set_xlabel(names[said[block]], fontsize=8, color=RIGHT if said[block] == label else WRONG)
