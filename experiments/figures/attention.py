"""Attention maps of a vision transformer before and after Ree's modulation (ReeFL, ICML 2024, appendix E).

    .venv/bin/python -m experiments.figures.attention RUN --samples 4

Writes RUN/plots/attention.png. `attention_maps` returns the maps as numbers.

The map of block l for a token a is the attention of a, in place of the class token, over the tokens that enter the
block: softmax(q(a) K / sqrt(head size)) over [a, patches], the mean over heads, without the element of a itself. There
are maps of three tokens: attn_x, the class token that enters block l (Eq. 7); attn_m, the m_l that Ree makes of the
token that left it (Eq. 8); attn_c, the m_0 + z that is classified after it (Eq. 9). The model runs once; hooks record
the inputs of blocks and the outputs of Ree.

The figure, as Figures 1b and 11, has three rows for each image and a column for each block: the map of the class token
(blue), of the modulated token (pink) and of the classified one (green). Color goes from none at the smallest element
of the block's three maps to full at the largest, so only maps of the same block are comparable. If these two differ by
less than the mean element, attention is almost uniform: full color is then the smallest element plus the mean, and the
maps are pale. Above each block are the shares of a token's attention, in percent, at which color is none and full;
bars at the bottom show the colors in between. Below the columns of exits is the predicted class. The first correct
exit is framed, which is the block in the paper's Figure 11.

Differs from the paper, or chosen where the paper is open: z^{l-1} of Eq. 7 is the input of block l, so its class token
is m_{l-1} where the backbone continues with Ree's token (Eq. 4), and attn_x is the attention of the forward pass; z^l
of Eq. 9 is the output of block l, as in Eq. 3. The caption of Figure 1b names the patches after block l; these are
those before it, as in appendix E. With Ree at exits only there are maps of those blocks only. A distillation token is a
key like the patches but not a patch, so its element is left out too. Rows are not scaled up for that.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from experiments.figures.images import remove_ticks, restore_images, select_evenly
from experiments.figures.script import run_script
from fleetfit.api.inference import select_data
from fleetfit.api.results import load
from fleetfit.data import Data
from fleetfit.errors import ConfigError, ModelError
from fleetfit.models.ree import RecurrentModule
from fleetfit.models.vit import VitModule
from fleetfit.report.drawing import COLORS, DARK, make_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ---- the maps --------------------------------------------------------------------------------------------------------

TOKENS = ("x", "m", "c")
"""The tokens of the maps in order: class token, modulated token, classified token."""


@dataclass(frozen=True)
class AttentionMaps:
    """Attention maps of some images.

    Attributes:
        maps: attn_x, attn_m and attn_c, [3, B, blocks, patches]; patches row by row. A map's sum is at most 1.
        blocks: The blocks, counted from 1.
        grid: Rows and columns of patches.
        exits: The blocks with a classifier after them.
        logits: The classifiers' logits, [exits, B, classes].
    """

    maps: Tensor
    blocks: tuple[int, ...]
    grid: tuple[int, int]
    exits: tuple[int, ...]
    logits: Tensor


def attention_maps(module: nn.Module, images: Tensor) -> AttentionMaps:
    """Compute the maps of every block whose output Ree reads.

    Args:
        module: A vision transformer with Ree in eval mode, as `Run.model` returns it; adapters are supported.
        images: [B, channels, height, width], as the model takes them.

    Raises:
        ModelError: The model has no Ree, or is not a vision transformer.
    """
    model, backbone, ree = _split_model(module)
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, tuple[Tensor, Tensor]] = {}  # of Ree: the modulated and the classified token

    def record_input(number: int, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        inputs[number] = arguments[0]

    def record_output(ree: nn.Module, arguments: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        queue, positions = arguments
        outputs[positions[-1]] = (result[1], result[0] + queue[-1])

    with torch.no_grad(), ExitStack() as hooks:
        for number, block in enumerate(backbone.blocks, 1):
            hooks.enter_context(block.register_forward_pre_hook(partial(record_input, number)))
        hooks.enter_context(ree.register_forward_hook(record_output))
        logits = torch.stack(model(images))
        rows, columns = (
            size // side for size, side in zip(images.shape[-2:], backbone.embeddings.patches.stride, strict=True)
        )
        maps = []
        for number, output in outputs.items():
            tokens, block = inputs[number], backbone.blocks[number - 1]
            block_maps = [_compute_attention(block, one, tokens, rows * columns) for one in (tokens[:, 0], *output)]
            maps.append(torch.stack(block_maps))
    return AttentionMaps(torch.stack(maps, dim=2), tuple(outputs), (rows, columns), model.exits, logits)


def _split_model(module: nn.Module) -> tuple[RecurrentModule, VitModule, nn.Module]:
    """Return the model, its backbone and its Ree."""
    if not isinstance(module, RecurrentModule) or module.ree is None:
        raise ModelError(
            'attention maps need a model with Ree. Train a vision transformer with method "reefl" and ree = true.',
            key="method",
        )
    backbone = module.backbone
    if not isinstance(backbone, VitModule):
        raise ModelError(
            "attention maps need a vision transformer (vit, deit_ti, deit_s, deit_b), got Ree on a "
            f"{type(backbone).__name__}.",
            key="model",
        )
    return module, backbone, module.ree


def _compute_attention(block: Any, token: Tensor, tokens: Tensor, patches: int) -> Tensor:
    """Return the attention [B, patches] of a token [B, D] in place of the first of the tokens [B, T, D].

    The layers are called instead of reading their weights, so that adapters inside them have their effect.
    """
    attention = block.attention
    normed = block.norm1(torch.cat([token[:, None], tokens[:, 1:]], dim=1))
    query, key = (
        layer(tokens_of_layer).unflatten(-1, (-1, attention.head_size)).transpose(1, 2)
        for layer, tokens_of_layer in ((attention.query, normed[:, :1]), (attention.key, normed))
    )
    weights: Tensor = (query @ key.transpose(-1, -2) / attention.head_size**0.5).softmax(dim=-1)
    return weights.mean(dim=1)[:, 0, -patches:]


# ---- the figure ------------------------------------------------------------------------------------------------------

MAX_IMAGES = 32
"""Maximal number of images in a figure."""
ROWS = ((COLORS[0], "class token"), ("#d6247f", "modulated"), (COLORS[2], "classified"))
"""Color and name of the maps, in order."""
_RIGHT, _WRONG = COLORS[2], COLORS[4]
_FADED, _OPAQUE = 0.55, 0.85  # opacity of the image under a map, and of the map's full color
_PANEL, _BARS, _NARROWEST = 0.82, 1.1, 5.2  # inches


def draw_sample_attention(module: nn.Module, data: Data, samples: int = 4, title: str = "") -> "Figure":
    """Draw the attention maps of evenly spaced test images.

    Args:
        module: A vision transformer with Ree, in eval mode.
        data: Its training data set.
        samples: The number of images.
        title: Title of the figure.

    Raises:
        ConfigError: There are fewer test images, or more than a figure can hold.
        ModelError: The model has no Ree, or is not a vision transformer.
        MissingExtra: matplotlib is not installed.
    """
    indices = data.split("test")
    most = min(MAX_IMAGES, len(indices))
    if not 1 <= samples <= most:
        raise ConfigError(
            f"samples must be 1 to {most}, got {samples}: {data.name} has {len(indices)} test images, and a figure "
            f"has at most {MAX_IMAGES}.",
            key="samples",
        )
    images, labels = data.batch(select_evenly(indices, samples))
    maps = attention_maps(module, images)
    return draw_attention(restore_images(images, data), labels.tolist(), maps, data.class_names, title)


def draw_attention(
    images: Tensor, labels: Sequence[int], maps: AttentionMaps, names: Sequence[str] = (), title: str = ""
) -> "Figure":
    """Draw images and their attention maps.

    Args:
        images: [B, channels, height, width], from 0 to 1.
        labels: Their classes.
        maps: Their maps.
        names: Of the classes; by default their numbers.
        title: Title of the figure.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    count, depth = len(images), len(maps.blocks)
    names = names or [str(c) for c in range(maps.logits.shape[-1])]
    height = 3 * _PANEL * images.shape[-2] / images.shape[-1] + 0.6
    figure = make_figure(max(_NARROWEST, _PANEL * (depth + 3.2)), 0.6 + _BARS + count * height)
    figure.suptitle(title or "attention of the tokens", fontsize=10, color=DARK)
    *parts, bottom = figure.subfigures(count + 1, 1, squeeze=False, height_ratios=[*[height] * count, _BARS])[:, 0]
    for i, part in enumerate(parts):
        _draw_image(part, i, images[i], labels[i], maps, names)
    _draw_bars(bottom)
    return figure


def _draw_bars(part: Any) -> None:
    """Draw a color bar for each map, and a legend of numbers and frames."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    part.supxlabel(
        "above a block: the share of a token's attention at which a patch has no color, and full color\n"
        "below: the exit's prediction; framed: the first correct exit",
        fontsize=8, color=DARK,
    )  # fmt: skip
    white = torch.ones(1, 1, 1)
    for axes, (color, name) in zip(part.subplots(1, len(ROWS)), ROWS, strict=True):
        ends = [overlay(white, torch.full((1, 1), heat), color)[0, 0].tolist() for heat in (0.0, 1.0)]
        colors = ScalarMappable(Normalize(0, 1), LinearSegmentedColormap.from_list(name, ends))
        bar = part.colorbar(colors, cax=axes, orientation="horizontal", ticks=[0, 1])
        axes.set_box_aspect(0.08)
        bar.ax.set_xticklabels(["first number", "second"], fontsize=7, color=DARK)
        bar.ax.set_title(name, fontsize=8, color=color)
        bar.outline.set_visible(False)


def compute_shades(maps: Tensor) -> Tensor:
    """Return the color strength of a block's maps [3, patches], from 0 to 1."""
    none, full = compute_range(maps)
    return (maps - none) / (full - none)


def compute_range(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a block's maps [3, patches] at no color and at full color."""
    low = maps.min()
    return low, low + torch.maximum(maps.max() - low, maps.mean())


def overlay(image: Tensor, heat: Tensor, color: str) -> Tensor:
    """Return an image [height, width, 3] with a map over the image in faded gray.

    Args:
        image: [channels, height, width], from 0 to 1.
        heat: [rows, columns] of patches, from 0, no color, to 1, full color.
        color: The map's color.
    """
    from matplotlib.colors import to_rgb

    gray = 1 - _FADED * (1 - image.mean(0)[..., None])
    rows, columns = (whole // part for whole, part in zip(image.shape[1:], heat.shape, strict=True))
    strength = _OPAQUE * heat.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[..., None]
    return (1 - strength) * gray + strength * torch.tensor(to_rgb(color))


def _draw_image(part: Any, i: int, image: Tensor, label: int, maps: AttentionMaps, names: Sequence[str]) -> None:
    depth = len(maps.blocks)
    grid = part.add_gridspec(len(ROWS), depth + 2, width_ratios=[1.7, 0.9, *[1] * depth])
    axes = part.add_subplot(grid[:, 0])
    remove_ticks(axes)
    axes.imshow((image if len(image) == 3 else image.mean(0).expand(3, -1, -1)).permute(1, 2, 0).numpy())
    axes.set_title(names[label], fontsize=9, color=DARK)
    predictions = dict(zip(maps.exits, maps.logits[:, i].argmax(-1).tolist(), strict=True))
    first = next((e for e in maps.exits if predictions[e] == label), None)
    for r, (color, name) in enumerate(ROWS):
        heading = part.add_subplot(grid[r, 1])
        heading.set_axis_off()
        heading.text(1, 0.5, name, ha="right", va="center", fontsize=8, color=color)
        for c, block in enumerate(maps.blocks):
            axes = part.add_subplot(grid[r, c + 2])
            remove_ticks(axes, framed=block == first)
            heat = compute_shades(maps.maps[:, i, c])[r].unflatten(0, maps.grid)
            axes.imshow(overlay(image, heat, color).numpy())
            if r == 0:
                none, full = (100 * float(end) for end in compute_range(maps.maps[:, i, c]))
                axes.set_title(f"block {block}\n{none:.2g} to {full:.2g}%", fontsize=7, color=DARK)
            if r == len(ROWS) - 1 and block in predictions:
                color = _RIGHT if predictions[block] == label else _WRONG
                axes.set_xlabel(names[predictions[block]], fontsize=8, color=color)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the attention maps of a run's newest checkpoint; return the exit code."""

    def draw(options: argparse.Namespace) -> tuple[dict[str, "Figure"], list[str]]:
        run = load(options.folder)
        images = select_data(run, None, options.data)
        title = f"{images.name}, after round {run.server.round}"
        return {"attention": draw_sample_attention(run.model(), images, options.samples, title)}, []

    parser = argparse.ArgumentParser(prog="attention", description=main.__doc__)
    parser.add_argument("--samples", type=int, default=4, help="number of test images")
    parser.add_argument("--data", help="other data of the same shape")
    return run_script(parser, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
