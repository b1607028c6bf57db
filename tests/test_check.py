"""Right layouts pass all three parts; each deliberately wrong one is refused with a sentence that says where."""

from dataclasses import replace

import pytest
import torch
from support import raises
from support.states import put_back
from torch import nn
from zoo import (
    Deep,
    Made,
    Normed,
    arrange,
    attention,
    concatenation,
    flattened,
    grouped,
    lstm,
    normed,
    residual,
    squeeze,
)  # fmt: skip

from fleetfit.anatomy import Axis, Segment as S, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.errors import ModelError
from fleetfit.models.cnn import cnn
from fleetfit.models.resnet import resnet
from fleetfit.submodel import Submodel, extract


def check(architecture: Made, **options: object) -> str:
    return str(check_layout(architecture, input_shape=architecture.input_shape, **options))


WRONG: dict[str, tuple[Made, dict[tuple[str, int], tuple[S, ...]], str, str]] = {
    "fused qkv taken as interleaved": (attention(), {("qkv.weight", 0): (S("hidden", per=3),)}, "hidden", "qkv.weight"),
    "gates taken as interleaved": (
        lstm(), {("lstm.weight_ih_l0", 0): (S("hidden", per=4),)}, "hidden", "lstm.weight_ih_l0",
    ),
    "concatenation in the wrong order": (
        concatenation(), {("fc.weight", 1): (S(None, 5), S("b"), S("a"))}, "a", "fc.weight",
    ),
    "fixed part at the wrong end": (
        concatenation(), {("fc.weight", 1): (S("a"), S("b"), S(None, 5))}, "a", "fc.weight",
    ),
    "flatten taken as blocked": (flattened(), {("fc.weight", 1): (S("wide"),) * 4}, "wide", "fc.weight"),
    "groups whose members change": (grouped(groups=2), {}, "wide", "conv"),
    "residual stream left untied": (residual(tied=False), {}, "stream", "branch"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layouts_are_refused(name: str) -> None:
    architecture, dims, axis, suspect = WRONG[name]
    with raises(ModelError, f'"{axis}"', suspect):
        check_layout(architecture, arrange(architecture.infer(), dims), input_shape=architecture.input_shape)


def test_untied_residual_passes_the_other_parts() -> None:
    """A prefix of both axes loads and computes, which is why the permutation is the first part."""
    architecture = residual(tied=False)
    layout = infer_layout(architecture)
    state = {name: torch.randn(shape) for name, shape in layout.shapes({}, (1,)).items()}
    small = architecture.build({"stream": 4, "branch": 4, "classes": 3}, (1,))
    small.load_state_dict(extract(layout, state, Submodel({"stream": range(4), "branch": range(4)}, (1,))))
    full = architecture.build({"stream": 8, "branch": 8, "classes": 3}, (1,))
    masked = {name: torch.zeros_like(t) for name, t in state.items()}
    piece = Submodel({"stream": range(4), "branch": range(4)}, (1,))
    full.load_state_dict(put_back(layout, masked, piece, extract(layout, state, piece)))
    x = torch.randn(7, 5)
    torch.testing.assert_close(small(x), full(x))


def test_heads_cut_in_single_channels_are_refused() -> None:
    """Twelve channels in three heads of four; granule 1 builds only for multiples of four."""
    with raises(ModelError, '"hidden"'):
        check(attention(granule=1))
    with raises(ModelError, '"hidden"'):
        check(attention_of_fixed_heads())


def attention_of_fixed_heads() -> Made:
    """Granules of two, but what a channel does depends on its group of three."""

    class Grouped(nn.Module):
        def __init__(self, hidden: int, classes: int) -> None:
            super().__init__()
            self.up, self.fc = nn.Linear(5, hidden), nn.Linear(hidden, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x)
            return self.fc((h.unflatten(-1, (3, -1)).softmax(-1)).flatten(1))

    return Made({"hidden": Axis(12), "classes": Axis(3, scaled=False)}, lambda s: Grouped(s["hidden"], s["classes"]))


def test_rounded_sizes_are_refused() -> None:
    check(squeeze(own_axis=False, granule=4))  # a quarter of the channels, in granules of four: whole
    with raises(ModelError, '"between.', "(2, 2)", "(1, 2)"):
        check(squeeze(own_axis=False, granule=1))


def test_blocks_behind_the_last_exit_must_be_absent() -> None:
    check_layout(Deep(), input_shape=(5,))
    with raises(ModelError, '"blocks.1.0.bias"'):
        check_layout(Deep(keeps_all=True), input_shape=(5,))


def test_channel_norms_take_full_numbers() -> None:
    """A layer norm written out, one without weights and one over the first dimension are proved like PyTorch's own."""

    class Own(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) * self.weight

    class Bare(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x, x.shape[1:]) * self.weight

    for norm in (Own, Bare, lambda n: nn.LayerNorm(n, elementwise_affine=False)):
        architecture = normed(norm)
        report = check_layout(architecture, input_shape=architecture.input_shape)
        assert report.numbers and max(report.cuts.values()) < 1e-12


def test_a_wrong_layout_given_by_hand_is_refused() -> None:
    """The layout is what is checked: take a right one and lie about one tensor."""
    architecture = normed()
    layout = infer_layout(architecture)
    fixed = replace(layout.tensors["norm.bias"], dims=((type(layout.tensors["norm.bias"].dims[0][0])(None, 8),),))
    lying = replace(layout, tensors={**layout.tensors, "norm.bias": fixed})
    with raises(ModelError, '"hidden"'):
        check_layout(architecture, lying, input_shape=(5,))


def test_levels_and_report() -> None:
    levels = [Submodel({"a": range(2), "classes": range(3)}, (1, 2)), Submodel({"a": range(5)}, (1, 2, 3))]
    report = check_layout(Deep(), levels=levels, input_shape=(5,))
    assert report.levels == ("exits 1, 2 and a 2, classes 3", "exits 1, 2, 3 and a 5")
    assert "axis classes: 3" in str(report) and all(cut in str(report) for cut in report.cuts)


def test_reports_are_cached_by_the_parameters() -> None:
    assert check_layout(cnn(classes=7), input_shape=(1, 8, 8)) is check_layout(cnn(classes=7), input_shape=(1, 8, 8))
    assert check_layout(cnn(classes=7), input_shape=(1, 8, 8)) is not check_layout(
        cnn(classes=6), input_shape=(1, 8, 8)
    )


def test_inputs_that_do_not_fit_are_refused() -> None:
    with raises(ModelError, key="input_shape"):
        check_layout(Deep())
    with raises(ModelError, "Deep", "(4,)", "zoo.py"):
        check_layout(Deep(), input_shape=(4,))


def test_example_batches_serve_other_inputs() -> None:
    class Embedded(Normed):
        def __init__(self, hidden: int, classes: int) -> None:
            super().__init__(hidden, classes, nn.Identity())
            self.up = nn.Embedding(11, hidden)

    architecture = Made(
        {"hidden": Axis(6), "classes": Axis(3, scaled=False)}, lambda s: Embedded(s["hidden"], s["classes"])
    )
    report = check_layout(architecture, example=torch.arange(9))
    assert max(report.cuts.values()) < 1e-12


def test_threads_of_a_proof_follow_the_models_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("fleetfit.anatomy.proof._prove", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for family in (cnn(classes=3), resnet(depth=20, classes=3)):
            check_layout(family, input_shape=(family.channels, 8, 8), seed=99)
        assert seen == [1, 3]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
