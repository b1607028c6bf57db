"""The picture of attention maps: what is laid over the image, what is framed, which images are taken."""

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.figures.attention import (
    AttentionMaps,
    draw_attention,
    draw_sample_attention,
    overlay,
)
from experiments.figures.images import restore_images
from fleetfit.anatomy import build_module
from fleetfit.data import Data
from fleetfit.models.ree import recurrent
from fleetfit.models.vit import vit

matplotlib = pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")


def data(x: Tensor, **fields: Any) -> Data:
    splits = {"train": torch.arange(3), "test": torch.arange(3, len(x))}
    return Data("mine", x, torch.arange(len(x)) % 3, splits, 3, **fields)


def colors(count: int = 9) -> Tensor:
    return torch.randint(0, 256, (count, 3, 4, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def module_of(shape: tuple[int, ...]) -> Any:
    architecture = recurrent(vit(3, shape, hidden=8, depth=2, attention_heads=2, patch=2), shape)
    return build_module(architecture, architecture.sizes(1.0), (1, 2)).eval()


def panels(figure: Any) -> list[Any]:
    """All axes with an image, in the order in which they were drawn."""
    return [axes for part in figure.subfigs for axes in part.axes if axes.images]


def test_a_picture_is_shown_as_it_was_before_mean_and_std() -> None:
    raw = colors()
    mine = data(raw, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.1))
    images, _ = mine.batch(torch.arange(9))
    torch.testing.assert_close(restore_images(images, mine), raw / 255)
    floats = torch.tensor([-3.0, 1.0, 5.0, 0.0]).view(1, 1, 2, 2)
    result = restore_images(floats, data(floats.expand(4, -1, -1, -1)))
    torch.testing.assert_close(result.flatten(), torch.tensor([0.0, 0.5, 1.0, 0.375]))


def test_a_patch_without_attention_shows_the_image_and_one_with_all_of_it_the_color() -> None:
    image = torch.zeros(1, 4, 4)
    image[0, :2] = 1
    result = overlay(image, torch.tensor([[0.0, 1.0], [0.0, 1.0]]), "#ff0000")
    assert result.shape == (4, 4, 3)
    white, black = result[0, 0], result[3, 0]
    assert white.tolist() == [1, 1, 1] and len(set(black.tolist())) == 1 and 0 < black[0] < 1
    for row, gray in ((0, white), (3, black)):
        red = result[row, 3]
        assert red[0] >= gray[0] and red[1] < 0.4 * gray[1] and red[1] == red[2]
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


def test_test_images_are_taken_at_equal_distances() -> None:
    """The 6 test images have classes 0, 1, 2, 0, 1, 2; of three, each is the last of a third."""
    figure = draw_sample_attention(module_of((3, 4, 6)), data(colors()), 3, "mine")
    assert figure.get_suptitle() == "mine"
    assert [part.axes[0].get_title() for part in figure.subfigs[:-1]] == ["1", "0", "2"]
    every = draw_sample_attention(module_of((3, 4, 6)), data(colors()), 6)
    assert [part.axes[0].get_title() for part in every.subfigs[:-1]] == ["0", "1", "2", "0", "1", "2"]
