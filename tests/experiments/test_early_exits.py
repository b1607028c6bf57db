"""Pictures of early stopping: borders by loops, who is in which panel, points of the curve, a marker for each level."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Expected, raises
from torch import Tensor

from experiments.figures import costs as figures, samples_by_exit as exits
from experiments.figures.samples_by_exit import LOST, RIGHT, WRONG
from fleetfit.data import Data
from fleetfit.errors import ConfigError
from fleetfit.inference import Scores, calibrate

matplotlib = pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")

NAMES = ("airplane", "bird", "cat")


def scored(count: int = 60, classes: int = 3, deep: int = 3, seed: int = 0) -> Scores:
    """Logits that lean to the right class, the more the deeper the exit."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=rng)
    logits = torch.randn(deep, count, classes, generator=rng)
    logits += 0.5 * torch.arange(1.0, deep + 1).view(-1, 1, 1) * torch.nn.functional.one_hot(labels, classes)
    return Scores(logits, labels, torch.arange(count) + 5)


def left(scores: Scores, seed: int = 1) -> Tensor:
    return torch.randint(len(scores.logits), (len(scores.labels),), generator=torch.Generator().manual_seed(seed))


def images(scores: Scores, names: tuple[str, ...] = NAMES, channels: int = 3) -> Data:
    """Images of one gray each: sample i has the value i."""
    total = int(scores.indices.max()) + 1
    x = torch.arange(total, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, channels, 4, 4).contiguous()
    y = torch.zeros(total, dtype=torch.int64)
    y[scores.indices] = scores.labels
    splits = {"train": torch.arange(5), "validation": torch.arange(0), "test": scores.indices}
    return Data("greys", x, y, splits, 3, class_names=names, mean=(0.5,) * channels, std=(0.25,) * channels)


# ---- borders -------------------------------------------------


def test_borders_are_those_of_a_loop() -> None:
    scores = scored()
    where = left(scores)
    expected = []
    for n, label in enumerate(scores.labels.tolist()):
        predicted = [row.index(max(row)) for row in scores.logits[:, n].tolist()]
        here, last = predicted[int(where[n])], predicted[-1]
        expected.append(RIGHT if here == label else LOST if last == label else WRONG)
    assert exits.judge_samples(scores, where).tolist() == expected
    assert set(expected) == {RIGHT, LOST, WRONG}


# ---- panels --------------------------------------------------


def test_a_panel_has_the_samples_of_the_class_that_left_there() -> None:
    scores = scored()
    where = left(scores)
    for panel, e in zip(exits.select_panels(scores, where, 1, share=1.0), range(3), strict=True):
        expected = [n for n in range(60) if scores.labels[n] == 1 and where[n] == e]
        assert panel.samples.tolist() == expected
        assert panel.share == pytest.approx(len(expected) / int((scores.labels == 1).sum()))


def test_a_share_is_drawn_evenly_and_at_least_one_of_each_exit() -> None:
    """Of 40 at the first exit a tenth: the middles of four equal stretches. Of one at the last exit: that one."""
    scores = Scores(torch.zeros(3, 41, 2), torch.zeros(41, dtype=torch.int64), torch.arange(41))
    where = torch.tensor([0] * 40 + [2])
    first, second, last = exits.select_panels(scores, where, 0, share=0.1)
    assert (first.samples.tolist(), second.samples.tolist(), last.samples.tolist()) == ([5, 15, 25, 35], [], [40])
    few = exits.select_panels(scores, where, 0)
    assert sum(len(panel.samples) for panel in few) == 41, "all of a class that has fewer than 50"


@pytest.mark.parametrize(
    ("label", "share", "expected"),
    [
        (0, 0.0, Expected(0, 1, key="share")),
        (0, 1.5, Expected(0, 1, 1.5, key="share")),
        (0, math.nan, Expected(0, key="share")),
        (1, 0.5, Expected(900, 1, key="label")),
        (0, 1.0, Expected(900, 400, 0.442, key="share")),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(label: int, share: float, expected: Expected) -> None:
    scores = Scores(torch.zeros(2, 900, 2), torch.zeros(900, dtype=torch.int64), torch.arange(900))
    with raises(ConfigError, expected):
        exits.select_panels(scores, torch.zeros(900, dtype=torch.int64), label, share)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_shows_those_samples_with_those_borders(channels: int) -> None:
    scores = scored()
    where, data = left(scores), images(scores, channels=channels)
    figure = exits.draw_exits(data, scores, where, 1, share=1.0)
    verdicts = exits.judge_samples(scores, where)
    for axes, panel in zip(figure.axes, exits.select_panels(scores, where, 1, share=1.0), strict=True):
        drawn: list[Any] = list(axes.images)
        shown = [round(255 * float(image.get_array()[0, 0, 0])) for image in drawn]
        assert shown == scores.indices[panel.samples].tolist(), "gray levels name the samples"
        assert {image.get_interpolation() for image in drawn} <= {"nearest"}
        framed = {(p.get_x(), p.get_y()): matplotlib.colors.to_hex(p.get_edgecolor()) for p in axes.patches}
        for image, n in zip(drawn, panel.samples.tolist(), strict=True):
            x0, _, _, top = image.get_extent()
            expected = {RIGHT: "#1f5fa8", LOST: "#d1661b", WRONG: None}[int(verdicts[n])]
            assert framed.get((x0, top)) == expected
    assert re.match(r"bird .* exit 1 \(", figure.axes[0].get_title(), re.DOTALL)


def test_classes_are_those_of_the_paper_or_the_first_five() -> None:
    scores = scored()
    assert exits.select_classes(images(scores)) == [0, 1, 2]
    assert exits.select_classes(images(scores, ())) == [0, 1, 2]
    assert exits.select_classes(images(scores), ["cat", "airplane", "cat"]) == [2, 0]
    cifar = images(scores)
    object.__setattr__(cifar, "class_names", ("deer", "frog", "ship", "horse", "dog", *exits.PAPER_CLASSES[:4]))
    assert [cifar.class_names[c] for c in exits.select_classes(cifar)] == ["airplane", "truck", "bird", "cat", "deer"]
    with raises(ConfigError, '"brid"', '"bird"', key="label"):
        exits.select_classes(images(scores), ["brid"])


def test_what_is_no_image_is_said() -> None:
    scores = scored()
    assert exits.explain_no_images(images(scores)) == ""
    assert "of shape [5, 4, 4]" in exits.explain_no_images(images(scores, channels=5))
    empty = torch.arange(0)
    splits = {"train": torch.arange(4), "validation": empty, "test": empty}
    words = Data("words", torch.zeros(4, 6, dtype=torch.int64), torch.zeros(4).long(), splits, 2, vocabulary=9)
    assert exits.explain_no_images(words)


# ---- curves --------------------------------------------------


@pytest.mark.parametrize(("cost", "scale"), [("multiply_adds", 1e6), ("latency_s", 1e-3)])
def test_the_curve_is_the_calibrations(cost: str, scale: float) -> None:
    scores, costs = scored(400, seed=2), [scale * c for c in (1.0, 2.0, 4.0)]
    calibration = calibrate("3", scored(400, seed=3), scores, costs, 2.5 * scale, cost)
    (axes,) = figures.draw_accuracy_over_budget(calibration.numbers()).axes
    lines: dict[str, Any] = {str(line.get_label()).split(" ")[0]: line for line in axes.lines}
    points = [(p["cost"] / scale, 100 * p["accuracy"]) for p in calibration.curve]
    chosen = (calibration.test.cost / scale, 100 * calibration.test.accuracy)
    drawn = list(zip(*lines["early"].get_data(), strict=True))
    expected = sorted([*points, chosen])
    assert [v for pair in sorted(drawn) for v in pair] == pytest.approx([v for pair in expected for v in pair])
    assert tuple(v[0] for v in lines["budget"].get_data()) == pytest.approx(chosen)
    assert list(lines["single"].get_xdata()) == pytest.approx([1.0, 2.0, 4.0])
    assert list(lines["single"].get_ydata()) == pytest.approx([100 * a for a in calibration.accuracies])
    assert set(lines["last"].get_ydata()) == {100 * calibration.accuracies[-1]}
    assert axes.get_xlabel().endswith({"multiply_adds": "(M)", "latency_s": "(ms)"}[cost])


def test_the_legend_lies_off_the_curve_and_exits_in_the_wrong_order_are_said() -> None:
    scores = scored(100)
    numbers = calibrate("3", scores, scores, [1.0, 2.0, 4.0], 3.0).numbers()
    for accuracies, is_noted in (([0.5, 0.6, 0.7], False), ([0.5, 0.8, 0.7], True)):
        figure = figures.draw_accuracy_over_budget({**numbers, "accuracies": accuracies})
        figure.canvas.draw()
        (axes,) = figure.axes
        assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
        assert ("behind" in figure.get_supxlabel()) == is_noted


LEVELS = [
    figures.LevelCost("1", (0.5,), (10_000.0,), (0.001,)),
    figures.LevelCost("2", (0.55, 0.7), (12_000.0, 40_000.0), (0.002, 0.004)),
    figures.LevelCost("3", (0.6, 0.65, 0.8), (15_000.0, 50_000.0, 90_000.0), (math.nan, math.nan, 0.008)),
]


def test_each_level_has_a_marker_and_its_exits_small_ones() -> None:
    left_axes, right_axes = figures.draw_accuracy_by_level(LEVELS).axes
    for axes, xs in ((left_axes, [10, 40, 90]), (right_axes, [1, 4, 8])):
        marks = [line for line in axes.lines if str(line.get_label()).startswith("level ")]
        assert [line.get_label() for line in marks] == ["level 1", "level 2", "level 3"]
        assert [float(line.get_xdata()[0]) for line in marks] == pytest.approx(xs)
        assert [float(line.get_ydata()[0]) for line in marks] == pytest.approx([50, 70, 80])
        assert len({line.get_marker() for line in marks}) == 3
        sizes = [line.get_markersize() for line in marks]
        assert sizes == sorted(sizes)
        assert sizes[0] > 5
    small = [list(line.get_xdata()) for line in left_axes.lines if not str(line.get_label()).startswith("level ")]
    assert small == [[10], [12, 40], [15, 50, 90]]
    assert left_axes.get_xlabel() == "parameters (K)"


def test_levels_in_the_wrong_order_are_said_below_the_picture() -> None:
    assert "behind" not in figures.draw_accuracy_by_level(LEVELS).get_supxlabel()
    worse = [*LEVELS[:2], replace(LEVELS[2], accuracies=(0.5, 0.9, 0.6))]
    figure = figures.draw_accuracy_by_level(worse)
    assert "level 3." in figure.get_supxlabel() and figure.get_supxlabel().count("behind") == 2
    figure.canvas.draw()
    legend = figure.axes[0].get_legend().get_window_extent()
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)
