"""The picture of attention maps: what is laid over the image, what is framed, which images are taken."""

import importlib.util
from typing import Any

import pytest
import torch
from support import raises
from torch import Tensor

from experiments.figures.attention import (
    ROWS,
    AttentionMaps,
    compute_shades,
    draw_attention,
    draw_sample_attention,
    overlay,
)
from experiments.figures.images import restore_images
from fleetfit.data import Data
from fleetfit.errors import ConfigError, MissingExtra
from fleetfit.layout import build_module
from fleetfit.models.ree import recurrent
from fleetfit.models.vit import vit

matplotlib = pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")


def data(x: Tensor, **fields: Any) -> Data:
    splits = {"train": torch.arange(3), "test": torch.arange(3, len(x))}
    return Data("mine", x, torch.arange(len(x)) % 3, splits, 3, **fields)


def colours(count: int = 9) -> Tensor:
    return torch.randint(0, 256, (count, 3, 4, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def module_of(shape: tuple[int, ...]) -> Any:
    architecture = recurrent(vit(3, shape, hidden=8, depth=2, attention_heads=2, patch=2), shape)
    return build_module(architecture, architecture.sizes(1.0), (1, 2)).eval()


def panels(figure: Any) -> list[Any]:
    """All axes with an image, in the order in which they were drawn."""
    return [axes for part in figure.subfigs for axes in part.axes if axes.images]


def test_a_picture_is_shown_as_it_was_before_mean_and_std() -> None:
    raw = colours()
    mine = data(raw, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1))
    images, _ = mine.batch(torch.arange(9))
    torch.testing.assert_close(restore_images(images, mine), raw / 255)
    floats = torch.tensor([-3.0, 1.0, 5.0, 0.0]).view(1, 1, 2, 2)
    result = restore_images(floats, data(floats.expand(4, -1, -1, -1)))
    torch.testing.assert_close(result.flatten(), torch.tensor([0.0, 0.5, 1.0, 0.375]))


def test_a_patch_without_attention_shows_the_image_and_one_with_all_of_it_the_colour() -> None:
    image = torch.zeros(1, 4, 4)
    image[0, :2] = 1
    result = overlay(image, torch.tensor([[0.0, 1.0], [0.0, 1.0]]), "#ff0000")
    assert result.shape == (4, 4, 3)
    white, black = result[0, 0], result[3, 0]
    assert white.tolist() == [1, 1, 1] and len(set(black.tolist())) == 1 and 0 < black[0] < 1
    for row, grey in ((0, white), (3, black)):
        red = result[row, 3]
        assert red[0] >= grey[0] and red[1] < 0.4 * grey[1] and red[1] == red[2]
    torch.testing.assert_close(result[:2, :2], white.expand(2, 2, 3))


def test_each_image_has_three_rows_of_blocks_and_the_first_right_exit_is_framed() -> None:
    """Exits after blocks 1 and 3: image 0 is right at 3 only, image 1 at both, image 2 nowhere."""
    maps = torch.rand(3, 3, 3, 4, generator=torch.Generator().manual_seed(1))
    predicted = torch.tensor([[1, 1, 0], [0, 1, 0]])
    logits = torch.nn.functional.one_hot(predicted, 3).float()
    figure = draw_attention(
        torch.rand(3, 1, 4, 4), [0, 1, 2], AttentionMaps(maps, (1, 2, 3), (2, 2), (1, 3), logits), ("a", "b", "c")
    )
    assert [len([axes for axes in part.axes if axes.images]) for part in figure.subfigs] == [1 + 9] * 3 + [0]
    framed = []
    for part in figure.subfigs[:-1]:
        shown = [axes for axes in part.axes if axes.images]
        framed.append([i for i, axes in enumerate(shown[1:]) if axes.spines["left"].get_visible()])
        assert [axes.get_title().split("\n")[0] for axes in shown[1:4]] == ["block 1", "block 2", "block 3"]
    assert framed == [[2, 5, 8], [0, 3, 6], []]
    first = panels(figure)[:10]
    assert first[0].get_title() == "a"
    assert [axes.get_xlabel() for axes in first[7:]] == ["b", "", "a"]


def test_the_three_maps_of_a_block_are_coloured_on_one_scale() -> None:
    """From the smallest to the largest; almost even attention stays pale, by how far it is from even."""
    result = compute_shades(torch.tensor([[0.1, 0.2], [0.0, 0.4], [0.1, 0.1]]))
    torch.testing.assert_close(result, torch.tensor([[0.25, 0.5], [0.0, 1.0], [0.25, 0.25]]))
    even = compute_shades(torch.tensor([[0.20, 0.22], [0.20, 0.20], [0.20, 0.18]]))
    torch.testing.assert_close(even, torch.tensor([[0.1, 0.2], [0.1, 0.1], [0.1, 0.0]]))


def test_the_scale_stands_above_each_block_and_bars_show_its_colours() -> None:
    """Block 1 has 10 to 40%; block 2 is almost even, so that full colour is its mean, 20%, above its smallest, 18%."""
    maps = torch.tensor([[[0.1, 0.2], [0.2, 0.22]], [[0.1, 0.4], [0.2, 0.2]], [[0.1, 0.1], [0.2, 0.18]]])[:, None]
    figure = draw_attention(
        torch.zeros(1, 1, 2, 2), [0], AttentionMaps(maps, (1, 2), (1, 2), (2,), torch.zeros(1, 1, 3))
    )
    first, second = (axes.get_title() for axes in panels(figure)[1:3])
    assert (first, second) == ("block 1\n10 to 40%", "block 2\n18 to 38%")
    bars = figure.subfigs[-1].axes
    assert [bar.get_title() for bar in bars] == [name for _, name in ROWS]
    for bar, (color, _) in zip(bars, ROWS, strict=True):
        (mesh,) = [drawn for drawn in bar.collections if drawn.get_array() is not None]
        ends = mesh.cmap([0.0, 1.0])[:, :3]
        for heat, end in zip((0.0, 1.0), ends, strict=True):
            expected = overlay(torch.ones(1, 1, 1), torch.tensor([[heat]]), color)[0, 0]
            torch.testing.assert_close(torch.as_tensor(end).float(), expected, atol=0.01, rtol=0)


def test_a_panel_is_the_image_under_its_blocks_map() -> None:
    images, maps = torch.rand(1, 1, 4, 4), torch.rand(3, 1, 2, 4)
    figure = draw_attention(images, [0], AttentionMaps(maps, (1, 2), (2, 2), (2,), torch.zeros(1, 1, 3)))
    shown = [axes.images[0].get_array() for axes in panels(figure)]
    for row, (color, _) in enumerate(ROWS):
        for column in range(2):
            heat = compute_shades(maps[:, 0, column])[row].view(2, 2)
            expected = overlay(images[0], heat, color)
            torch.testing.assert_close(torch.as_tensor(shown[1 + 2 * row + column]), expected)


def test_test_images_are_taken_at_equal_distances() -> None:
    """The 6 test images have classes 0, 1, 2, 0, 1, 2; of three, each is the last of a third."""
    figure = draw_sample_attention(module_of((3, 4, 6)), data(colours()), 3, "mine")
    assert figure.get_suptitle() == "mine"
    assert [part.axes[0].get_title() for part in figure.subfigs[:-1]] == ["1", "0", "2"]
    every = draw_sample_attention(module_of((3, 4, 6)), data(colours()), 6)
    assert [part.axes[0].get_title() for part in every.subfigs[:-1]] == ["0", "1", "2", "0", "1", "2"]


@pytest.mark.parametrize("samples", [0, 7])
def test_more_images_than_there_are_is_a_sentence(samples: int) -> None:
    with raises(ConfigError, 1, 6, key="samples"):
        draw_sample_attention(module_of((3, 4, 6)), data(colours()), samples)


def test_without_matplotlib_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(MissingExtra, extra="plots"):
        draw_sample_attention(module_of((3, 4, 6)), data(colours()), 1)
