"""Attention maps before and after Ree's modulation as a picture (ReeFL, ICML 2024, Figures 1b and 11).

For each image three rows, a column for each block: where the class token that enters the block looks (blue), where the
modulated one looks (pink), and the one that is classified (green); `fleetfit.inference.attention` says what exactly.
Colour goes from none at the smallest element of the block's three maps to full at the largest, so that these compare
with each other and not with another block's. Where the two are nearer than the mean element, so that attention is
almost even, full is that far from the smallest, and the maps stay pale. Under the columns of exits stands the predicted
class; the first exit that is right is framed, as that is the block which the paper's Figure 11 shows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.inference import AttentionMaps, attention_maps
from fleetfit.report.drawing import COLORS, DARK, empty, plain, unscaled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 32
"""Images in one picture, at most."""
ROWS = ((COLORS[0], "class token"), ("#d6247f", "modulated"), (COLORS[2], "classified"))
"""Colour and name of the maps, in their order."""
RIGHT, WRONG = COLORS[2], COLORS[4]
_SEEN, _OPAQUE = 0.55, 0.85  # how strong the image under a map is, and the map's fullest colour
_PANEL = 0.82  # inches


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
            "go into one picture."
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
    high = 3 * _PANEL * images.shape[-2] / images.shape[-1] + 0.5
    figure = empty(_PANEL * (deep + 3.2), 0.8 + count * high)
    figure.suptitle(title or "where the tokens look", fontsize=10, color=DARK)
    figure.supxlabel("below: what the exit says; framed: the first exit that is right", fontsize=8, color=DARK)
    parts = figure.subfigures(count, 1, squeeze=False)[:, 0]
    for i, part in enumerate(parts):
        _one(part, i, images[i], labels[i], found, names)
    return figure


def shades(maps: Tensor) -> Tensor:
    """Return how strong the colours of a block's maps [3, patches] are, from 0 to 1."""
    low = maps.min()
    return (maps - low) / torch.maximum(maps.max() - low, maps.mean())


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
                axes.set_title(f"block {block}", fontsize=8, color=DARK)
            if r == len(ROWS) - 1 and block in said:
                axes.set_xlabel(names[said[block]], fontsize=8, color=RIGHT if said[block] == label else WRONG)
