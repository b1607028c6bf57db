"""Residual networks for small images and of four stages: their structure and sizes, counted by hand."""

import pytest
import torch
from proofs import built, get_shapes, proven, trains, whole_before
from torch import nn

from fleetfit.anatomy import build_module, infer_layout
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.models.resnet import ResNet, resnet, resnet18, resnet34

# ---- for small images ------------------------------------------------------------------------------------------------


def count_parameters(n: int, exits: tuple[int, ...], stages: tuple[int, int, int], classes: int = 10) -> int:
    """Parameters of a ResNet 6n+2, term by term: convolutions without biases, norms with two numbers per channel."""
    total = 3 * 9 * stages[0] + 2 * stages[0]  # stem
    for i in range(exits[-1]):
        after = stages[i // n]
        before = stages[(i - 1) // n] if i else stages[0]
        total += 9 * before * after + 9 * after * after + 4 * after
        if before != after or (i % n == 0 and i):
            total += before * after + 2 * after  # shortcut
    for e in exits:
        c = stages[(e - 1) // n]
        total += c * classes + classes + (0 if e == 3 * n else 3 * (9 * c * c + 2 * c))
    return total


def count(architecture: ResNet, width: float, exits: tuple[int, ...]) -> int:
    with torch.device("meta"):
        module = build_module(architecture, architecture.sizes(width), exits)
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("depth", [8, 14, 20, 32, 56, 110])
def test_parameters_of_every_depth(depth: int) -> None:
    n = (depth - 2) // 6
    assert count(resnet(depth=depth), 1.0, (3 * n,)) == count_parameters(n, (3 * n,), (16, 32, 64))


def test_known_sizes() -> None:
    """ResNet-20 with option B, and ScaleFL's Table 1 for ResNet-110: 0.21, 0.46, 0.86, 1.73 M."""
    assert count(resnet(depth=20), 1.0, (9,)) == 272_474
    assert count(resnet(), 0.70, (36,)) == count_parameters(18, (36,), (11, 22, 44)) == 210_253
    assert count(resnet(), 0.70, (36, 42)) == count_parameters(18, (36, 42), (11, 22, 44)) == 465_727
    assert count(resnet(), 0.75, (36, 42, 48)) == count_parameters(18, (36, 42, 48), (12, 24, 48)) == 866_730
    assert count(resnet(), 1.0, (54,)) == 1_730_714


def test_logits_of_every_exit_and_halved_images() -> None:
    architecture = resnet(classes=7, channels=1, depth=14)
    module = build_module(architecture, architecture.sizes(0.5), (1, 3, 6)).eval()
    shapes = {}
    for i, block in enumerate(module.blocks):
        block.register_forward_hook(lambda part, x, out, i=i: shapes.update({i: tuple(out.shape[1:])}))
    logits = module(torch.randn(2, 1, 12, 12))
    assert [tuple(out.shape) for out in logits] == [(2, 7)] * 3
    assert shapes == {0: (8, 12, 12), 1: (8, 12, 12), 2: (16, 6, 6), 3: (16, 6, 6), 4: (32, 3, 3), 5: (32, 3, 3)}


def test_shortcuts_sit_where_stages_meet() -> None:
    architecture = resnet(depth=14)
    module = build_module(architecture, {"stage1": 1, "stage2": 1, "stage3": 1, "classes": 10}, (6,))
    kinds = [type(block.shortcut) for block in module.blocks]
    assert [kind is nn.Sequential for kind in kinds] == [False, False, True, False, True, False]


def test_early_exits_have_three_convolutions() -> None:
    module = build_module(resnet(depth=8), resnet(depth=8).sizes(1.0), (1, 3))
    convolutions = {e: sum(isinstance(m, nn.Conv2d) for m in head.modules()) for e, head in module.heads.items()}
    assert convolutions == {"1": 3, "3": 0}


def test_group_norm_cuts_whole_groups() -> None:
    architecture = resnet(depth=8, norm="group", group=4)
    assert architecture.sizes(0.7) == {"stage1": 8, "stage2": 20, "stage3": 44, "classes": 10}
    norms = [
        m for m in build_module(architecture, architecture.sizes(0.7), (3,)).modules() if isinstance(m, nn.GroupNorm)
    ]
    assert norms
    assert {m.num_channels // m.num_groups for m in norms} == {4}


def test_initial_weights_have_the_scale_of_he() -> None:
    architecture = resnet(depth=20)
    module = build_module(architecture, architecture.sizes(1.0), (9,))
    weight = module.blocks[8].conv2.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)
    assert not module.heads["9"].fc.bias.any()


# ---- of four stages --------------------------------------------------------------------------------------------------


def four_stages_by_hand(
    stream: tuple[int, ...], inner: tuple[int, ...], per_stage: tuple[int, ...], kernel: int, classes: int
) -> int:
    total = 3 * kernel**2 * stream[0] + 2 * stream[0]
    before, i = stream[0], 0
    for s, count in enumerate(per_stage):
        for j in range(count):
            after = stream[s]
            total += 9 * before * inner[i] + 2 * inner[i] + 9 * inner[i] * after + 2 * after
            if s and not j:
                total += before * after + 2 * after
            before, i = after, i + 1
    return total + before * classes + classes


def test_known_sizes_of_four_stages() -> None:
    """Those of torchvision for 224x224; 11.17 M is what the federated papers print for CIFAR-10."""
    small, large = (3, 32, 32), (3, 224, 224)
    eighteen, full = (2, 2, 2, 2), (64, 128, 256, 512)
    inner = tuple(c for c in full for _ in range(2))
    assert full_cost(resnet18(1000, stem="large"), large).parameters == 11_689_512
    assert full_cost(resnet34(1000, stem="large"), large).parameters == 21_797_672
    assert full_cost(resnet18(), small).parameters == four_stages_by_hand(full, inner, eighteen, 3, 10) == 11_173_962
    assert full_cost(resnet18(1000, stem="large"), large).multiply_adds == pytest.approx(1.814e9, rel=1e-3)
    assert full_cost(resnet18(), small).multiply_adds == pytest.approx(0.56e9, rel=1e-2)
    architecture = resnet18()
    cut = tuple(int(0.4 * c) for c in full)
    cost = submodel_cost(architecture, (architecture.sizes(0.4), (8,)), small)
    assert cost.parameters == four_stages_by_hand(cut, tuple(c for c in cut for _ in range(2)), eighteen, 3, 10)


def test_the_layout_with_group_norm_is_proven() -> None:
    """With batch norm: test_every_model.py."""
    proven(resnet18(3, 2, base=4, norm="group", head_layers=1), (2, 8, 8), (1, 3, 6, 8))


def test_resnet34_is_deeper() -> None:
    assert resnet34().blocks == 16
    assert [resnet34().axes[f"stage{s}"].block for s in (1, 2, 3, 4)] == [0, 3, 7, 13]
    assert [resnet34().axes[f"inner{i}"].size for i in (2, 3, 7, 12, 13)] == [64, 128, 256, 256, 512]
    with torch.device("meta"):
        module = build_module(resnet34(3), resnet34(3).sizes(0.5), (5, 16))
    assert [block.conv1.out_channels for block in module.blocks] == [32] * 3 + [64] * 4 + [128] * 6 + [256] * 3


def test_it_trains() -> None:
    trains(resnet18(4, 3, base=8), (3, 16, 16), (3, 6, 8))


@pytest.mark.parametrize(
    ("stem", "sides"), [("small", [32, 32, 16, 16, 8, 8, 4, 4]), ("large", [8, 8, 4, 4, 2, 2, 1, 1])]
)
def test_each_stage_but_the_first_halves_the_map(stem: str, sides: list[int]) -> None:
    architecture = resnet18(5, 1, base=2, stem=stem)
    module = build_module(architecture, architecture.sizes(1.0), (1, 8)).eval()
    side_lengths = []
    for block in module.blocks:
        block.register_forward_hook(lambda part, x, out: side_lengths.append(out.shape[-1]))
    assert [tuple(z.shape) for z in module(torch.randn(2, 1, 32, 32))] == [(2, 5)] * 2
    assert side_lengths == sides


def test_shortcuts_of_four_stages() -> None:
    sizes = dict.fromkeys(resnet18().axes, 1)
    module = built(resnet18(), sizes, (8,))
    kinds = [isinstance(block.shortcut, nn.Sequential) for block in module.blocks]
    assert kinds == [False, False, True, False, True, False, True, False]


def test_blocks_before_i_stay_whole() -> None:
    """AdaptiveFL: the stream of a stage that began is whole, inside later blocks channels are cut."""
    architecture = resnet18(base=8)
    sizes = whole_before(architecture, 3, 0.5)
    assert [sizes[f"stage{s}"] for s in (1, 2, 3, 4)] == [8, 16, 16, 32]
    assert [sizes[f"inner{i}"] for i in range(8)] == [8, 8, 16, 8, 16, 16, 32, 32]
    layout = infer_layout(architecture, (8,))
    assert get_shapes(built(architecture, sizes, (8,))) == layout.shapes(sizes, (8,))


def test_early_exits_of_four_stages_have_convolutions() -> None:
    module = built(resnet18(head_layers=2), resnet18().sizes(1.0), (2, 8))
    convolutions = {e: sum(isinstance(m, nn.Conv2d) for m in head.modules()) for e, head in module.heads.items()}
    assert convolutions == {"2": 2, "8": 0}


def test_it_computes_what_transformers_computes() -> None:
    """The same weights in Hugging Face's ResNet with basic blocks."""
    transformers = pytest.importorskip("transformers")
    shape = {"embedding_size": 4, "hidden_sizes": [4, 8, 16, 32], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=5, **shape)).eval()
    architecture = resnet18(5, 3, base=4, stem="large")
    ours = architecture.build(architecture.sizes(1.0), (8,)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if tensor.is_floating_point():  # norms and their statistics too
                tensor.copy_(torch.rand_like(tensor) + 0.5 if tensor.dim() < 2 else 0.3 * torch.randn_like(tensor))
                ours.state_dict()[_our_name(name)].copy_(tensor)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[-1], theirs(x).logits, rtol=1e-4, atol=1e-4)


def _our_name(name: str) -> str:
    """Return our name of a tensor of theirs."""
    parts = name.split(".")
    leaf = parts[-1]
    if parts[0] == "classifier":
        return f"heads.8.fc.{leaf}"
    kind = parts[-2]  # convolution or normalization
    if parts[1] == "embedder":
        return f"stem.{0 if kind == 'convolution' else 1}.{leaf}"
    block = 2 * int(parts[3]) + int(parts[5])
    if parts[6] == "shortcut":
        return f"blocks.{block}.shortcut.{0 if kind == 'convolution' else 1}.{leaf}"
    return f"blocks.{block}.{'conv' if kind == 'convolution' else 'norm'}{int(parts[7]) + 1}.{leaf}"
