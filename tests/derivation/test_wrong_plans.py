"""No wrong plan of a derived model that computes something else passes the proof."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from bed import Entry
from support.derivation import derive
from torch import Tensor, nn
from wrong_plans import TWIN, WrongPlan, draw_wrong_plans, list_wrong_depths, list_wrong_plans, measure_harm

from fleetfit.anatomy.derive import DerivedArchitecture, derive_architecture, prove_plan
from fleetfit.errors import ModelError
from fleetfit.layout import Segment

MODULES = (
    "mlp_batch_norm", "vit_fused_qkv", "list_of_logits", "gpt_tied", "lstm", "pixel_shuffle", "multi_query",
    "grouped_heads_tied", "maxout", "weight_norm", "densenet", "resnext", "resnet_basic", "unet", "inception",
    "einsum_attention", "cross_covariance_attention", "gru_cells", "gated_residual", "capsules", "convnext",
    "deep_sets", "conv_lstm", "lora", "factorization_machine", "cosine_head", "space_to_depth", "llama",
    "selective_scan", "slice_writes", "lstm_with_attention", "resnet_group_norm", "relative_positions", "mlp_mixer",
)  # fmt: skip
QUICK = MODULES[:10]
COUNT, QUICK_COUNT, LEAST = 30, 8, 900
NEGLIGIBLE = 1e-8


def make_samples(entry: Entry, seed: int) -> Tensor:
    shape, rng = (4, *entry.example().shape[1:]), torch.Generator().manual_seed(seed)
    return torch.randint(1, entry.tokens, shape, generator=rng) if entry.tokens else torch.randn(shape, generator=rng)


def try_wrong_plans(name: str, count: int, seed: int) -> Counter[str]:
    """Try wrong plans of a module; count what became of them, and list those which do harm."""
    entry, right = derive(name)
    outcomes: Counter[str] = Counter()
    for i, wrong in enumerate(draw_wrong_plans(right.plan, count, seed)):
        outcomes["tried"] += 1
        outcomes[try_plan(wrong, right, entry.example(), make_samples(entry, i), i)] += 1
    return outcomes


def try_plan(wrong: WrongPlan, right: DerivedArchitecture, example: Tensor, samples: Tensor, seed: int) -> str:
    """Return what becomes of a wrong plan in words, which begin with HARM if it passes and computes something else."""
    try:
        prove_plan(right.net, wrong.plan, example)
    except ModelError:
        return "refused"
    harm = measure_harm(wrong.plan, right.plan, right.net, samples, seed)
    return "accepted, and right" if harm < NEGLIGIBLE else f"HARM {wrong.kind}: {wrong.what}"


@pytest.mark.parametrize("name", QUICK)
def test_no_harmful_plan_passes(name: str, record_property: Callable[[str, object], None]) -> None:
    outcomes = try_wrong_plans(name, QUICK_COUNT, 1)
    record_property("wrong plans", dict(outcomes))
    assert outcomes["tried"] == QUICK_COUNT
    assert outcomes["refused"] >= 1
    assert not [outcome for outcome in outcomes if outcome.startswith("HARM")]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_no_harmful_plan_of_many_passes(name: str, record_property: Callable[[str, object], None]) -> None:
    outcomes = try_wrong_plans(name, COUNT, 0)
    record_property("wrong plans", dict(outcomes))
    print(dict(outcomes))
    assert outcomes["tried"] == COUNT
    assert outcomes["refused"] >= COUNT // 4
    assert not [outcome for outcome in outcomes if outcome.startswith("HARM")]


# ---- nets of nine exits --------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Nine layers of one size, each with an axis of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Shuffled(nn.Module):
    """A block as in ShuffleNet: one half passes, and the channels of both halves take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(4)
        self.inner, self.outer = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        passed, changed = self.stem(x).chunk(2, 1)
        x = torch.cat((passed, self.norm(self.outer(torch.relu(self.inner(changed))))), 1)
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Shuffles(nn.Module):
    """Nine of these blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Shuffled() for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("count", [10, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("net", "shape"), [(Chain, (5,)), (Shuffles, (1, 6, 6))])
def test_no_wrong_exit_or_depth_of_nine_passes(
    net: Callable[[], nn.Module], shape: tuple[int, ...], count: int | None
) -> None:
    torch.manual_seed(0)
    samples = torch.randn(4, *shape)
    right = derive_architecture(net().eval(), samples)
    assert right.blocks == 9
    plans = list(list_wrong_depths(right.plan))
    random.Random(0).shuffle(plans)
    outcomes = Counter(try_plan(wrong, right, samples[:2], samples, i) for i, wrong in enumerate(plans[:count]))
    assert outcomes["refused"] >= 2
    assert not [outcome for outcome in outcomes if outcome.startswith("HARM")]


def test_many_plans_are_tried() -> None:
    assert len(MODULES) * COUNT >= LEAST


# ---- the loop that decides on harm ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_a_right_plan_does_no_harm(name: str) -> None:
    entry, right = derive(name)
    assert measure_harm(right.plan, right.plan, right.net, make_samples(entry, 0), 0) == 0


@pytest.mark.parametrize(("name", "is_inert"), [("encoder.0.bias", True), ("encoder.3.bias", False)])
def test_batch_norm_hides_a_wrong_bias(name: str, is_inert: bool) -> None:
    """Running statistics are the level's own: its mean has the bias that the next batch subtracts."""
    entry, right = derive("cosine_head")
    (axis,) = (str(s.axis) for s in right.plan.segments[name, 0])
    twin = (Segment(f"{axis}{TWIN}"),)
    wrong = replace(
        right.plan,
        segments={**right.plan.segments, (name, 0): twin},
        axes={**right.plan.axes, f"{axis}{TWIN}": right.plan.axes[axis]},
    )
    harm = measure_harm(wrong, right.plan, right.net, make_samples(entry, 0), 0)
    assert harm < NEGLIGIBLE if is_inert else harm > 1e-3
    assert right.report is not None
    assert (f"net.{name}" in right.report.inert) == is_inert


def test_heads_in_the_wrong_order_are_refused() -> None:
    """Rows (3, heads, 8) taken for (heads, 3, 8): shapes fit at every size."""
    entry, right = derive("vit_fused_qkv")
    dims = {
        d: (Segment(segments[0].axis, per=3 * segments[0].per),)
        for d, segments in right.plan.segments.items()
        if len(segments) == 3
    }
    assert dims
    wrong = replace(right.plan, segments={**right.plan.segments, **dims})
    assert measure_harm(wrong, right.plan, right.net, make_samples(entry, 0), 0) > 1e-3
    with pytest.raises(ModelError):
        prove_plan(right.net, wrong, entry.example())


def test_plans_are_wrong_in_many_ways() -> None:
    kinds = {wrong.kind for name in QUICK for wrong in list_wrong_plans(derive(name)[1].plan)}
    assert len(kinds) >= 10, kinds
