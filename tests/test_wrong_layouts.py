"""No wrong layout that changes an output of a sub-model passes the proof, and no right one is refused."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import foreign_models
import pytest
import torch
from foreign import FOREIGN, fused, fused_by_head, grouped_resnet, multihead
from small_models import SMALL, architecture_of
from support import raises
from torch import Tensor
from wrong_layouts import Wrong, relabeled, some_wrong, wrong_layouts
from zoo import RIGHT, Made, arrange

from fleetfit.anatomy import Architecture, Layout, Segment, State, build_module, infer_layout, make_input, outputs
from fleetfit.anatomy.proof import check_layout, select_exits
from fleetfit.anatomy.proof.full import difference, load
from fleetfit.errors import ModelError
from fleetfit.submodel import Channels, Submodel, extract

Family = tuple[Architecture, tuple[int, ...]]


def of_zoo(make: Callable[[], Made]) -> Family:
    architecture = make()
    return architecture, architecture.input_shape


def of_package(name: str, **keys: object) -> Family:
    return architecture_of(name, **keys), SMALL[name].shape


def of_people(name: str) -> Family:
    return foreign_models.FOREIGN[name].build_architecture(), foreign_models.FOREIGN[name].input_shape


def families() -> Mapping[str, Callable[[], Family]]:
    """Every architecture by name: the package's at sizes for tests, purpose-made ones, and other people's."""
    return {
        **{name: partial(of_package, name) for name, small in SMALL.items() if not small.family},
        **{f"{name}, fixed heads": partial(of_package, name, heads="fixed") for name in ("bert", "vit")},
        **{name: partial(of_zoo, make) for name, make in {**RIGHT, **FOREIGN}.items()},
        **{name: partial(of_people, name) for name in foreign_models.FOREIGN},
    }


FAMILIES = families()
MANY_AXES = ("mobilenetv2", "efficientnet_b0", "msdnet", "vgg16", "resnet18", "resnet20", "vim")
QUICK = [name for name in FAMILIES if name not in MANY_AXES]


@cache
def family(name: str) -> tuple[Architecture, Layout, tuple[int, ...]]:
    architecture, shape = FAMILIES[name]()
    return architecture, infer_layout(architecture, select_exits(architecture), input_shape=shape), shape


# ---- harm ----------------------------------------------------------------------------------------------------------


def draws(layout: Layout, seed: int) -> Iterator[Mapping[str, Channels]]:
    """Yield kept channels of all axes: prefixes and random granules of several sizes."""
    rng = random.Random(seed)
    for how in ("prefix", "random", "random", "random"):
        channels: dict[str, Channels] = {}
        for name, axis in layout.axes.items():
            granules = axis.size // axis.granule
            n = rng.randint(1, granules) if axis.scaled else granules
            chosen = range(n) if how == "prefix" or axis.ordered else sorted(rng.sample(range(granules), n))
            channels[name] = tuple(g * axis.granule + i for g in chosen for i in range(axis.granule))
        yield channels


def computed(
    architecture: Architecture, layout: Layout, sizes: Mapping[str, int], state: State, x: Tensor
) -> list[Tensor]:
    module = build_module(architecture, {**layout.full_sizes, **sizes}, layout.exits).double().eval()
    load(module, state)
    with torch.no_grad():
        return outputs(module, x)


def harm(wrong: Wrong, right: tuple[Architecture, Layout, tuple[int, ...]], seed: int) -> float:
    """Return how far a sub-model that is cut by the wrong layout is from the one that is cut by the right one.

    Zero where the wrong layout only names units that are alike in another order.
    """
    architecture, layout, shape = right
    rng = torch.Generator().manual_seed(seed)
    state: State = {
        name: torch.rand(s, generator=rng) + 0.5 if len(s) < 2 else torch.randn(s, generator=rng) / s[-1] ** 0.5
        for name, s in layout.shapes({}, layout.exits).items()
    }
    x = make_input(architecture, shape, 4, rng)
    x = x.double() if x.is_floating_point() else x
    same = relabeled(state, layout, wrong.layout)
    if same is not None and difference(computed(architecture, layout, {}, same, x),
                                       computed(architecture, layout, {}, state, x)) < 1e-9:  # fmt: skip
        return 0.0
    most = 0.0
    for channels in draws(wrong.layout, seed):
        ours = {axis: places for axis, places in channels.items() if axis in layout.axes}
        piece = Submodel(ours, layout.exits)
        try:
            outputs = [
                computed(architecture, layout, piece.sizes, extract(each, {n: state[n] for n in each.tensors}, cut), x)
                for each, cut in ((layout, piece), (wrong.layout, Submodel(channels, layout.exits)))
            ]
        except (ModelError, RuntimeError):  # such a model cannot be cut or built, so it does no harm
            continue
        most = max(most, difference(outputs[1], outputs[0]))
    return most


def swept(name: str, count: int, *seeds: int) -> Counter[str]:
    """Try so many wrong layouts of a family per seed; count what was made of them, and list the harmful ones."""
    right = family(name)
    wrong_ones = list(wrong_layouts(right[0], right[1]))  # thousands, so only once
    outcomes: Counter[str] = Counter()
    drawn = [(seed, wrong) for seed in seeds for wrong in some_wrong(wrong_ones, *right[:2], count, seed)]
    for seed, wrong in drawn:
        outcomes["tried"] += 1
        outcomes[wrong.kind] += 1
        try:
            check_layout(wrong.architecture, wrong.layout, input_shape=right[2], seed=seed)
        except ModelError as error:
            message = str(error)
            part = (
                "small models"
                if "could not be proved" in message
                else "permutation"
                if "permut" in message
                else "shapes"
            )
            outcomes[f"refused by {part}"] += 1
            continue
        outcomes["passed"] += 1
        if harm(wrong, right, seed) > 1e-9:
            outcomes[f"HARMFUL {wrong.kind}: {wrong.what}"] += 1
    return outcomes


def harmful(outcomes: Counter[str]) -> list[str]:
    return [key for key in outcomes if key.startswith("HARMFUL")]


@pytest.mark.parametrize("name", QUICK)
def test_no_harmful_layout_passes(name: str, record_property: Callable[[str, object], None]) -> None:
    outcomes = swept(name, 6, 0)
    record_property("wrong layouts", dict(outcomes))
    print(dict(outcomes))
    assert outcomes["tried"] >= 5
    assert not harmful(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_harmful_layout_passes_with_other_seeds(name: str) -> None:
    outcomes = swept(name, 3 if name in MANY_AXES else 25, 1, 2)
    print(dict(outcomes))
    assert not harmful(outcomes)


@pytest.mark.parametrize("name", QUICK)
def test_no_right_layout_is_refused(name: str) -> None:
    architecture, layout, shape = family(name)
    for seed in range(2):
        report = check_layout(architecture, layout, input_shape=shape, seed=seed)
        assert report.cuts and max(report.cuts.values()) < 1e-9 and not report.not_proved


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_no_right_layout_is_refused_with_other_seeds(name: str) -> None:
    architecture, layout, shape = family(name)
    for seed in range(2, 3 if name in MANY_AXES else 8):
        report = check_layout(architecture, layout, input_shape=shape, seed=seed)
        assert report.cuts and max(report.cuts.values()) < 1e-9 and not report.not_proved


# ---- mistakes that are easily made ---------------------------------------------------------------------------------

MISTAKES = {
    "four heads by hand, granules of a head's size": (fused(heads=lambda inner: 4), fused()),
    "four heads of nn.MultiheadAttention": (multihead(heads=lambda dim: 4), multihead()),
    "four groups of a norm whose members change": (grouped_resnet(groups=lambda c: 4), grouped_resnet()),
}
"""Each beside the model whose layout it seems to have."""


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("seed", range(3))
def test_mistakes_that_pass_permutations_are_refused(name: str, seed: int) -> None:
    architecture, right = MISTAKES[name]
    with raises(ModelError, 'size_dependent = "why"'):
        check_layout(architecture, right.infer(), input_shape=architecture.input_shape, seed=seed)


def test_rows_of_whole_heads_as_stacked_copies_are_refused() -> None:
    architecture, heads = fused_by_head(), Segment("heads")
    copies = {("attention.qkv.weight", 0): (heads,) * 24, ("attention.qkv.bias", 0): (heads,) * 24,
              ("attention.proj.weight", 1): (heads,) * 8}  # fmt: skip
    with raises(ModelError, 'size_dependent = "why"'):
        check_layout(architecture, arrange(architecture.infer(), copies), input_shape=architecture.input_shape)
