import pytest
import torch
from proofs import built, get_shapes, proven, trains, whole_before
from support import raises
from torch import nn

from fleetfit import names
from fleetfit.cost import full_cost, submodel_cost
from fleetfit.errors import ConfigError, ModelError
from fleetfit.factories import call_factory
from fleetfit.layout import build_module, infer_layout
from fleetfit.models.resnet_four_stages import FourStages, resnet18, resnet34


def by_hand(
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


def test_known_sizes() -> None:
    """Those of torchvision for 224x224; 11.17 M is what the federated papers print for CIFAR-10."""
    small, large = (3, 32, 32), (3, 224, 224)
    eighteen, full = (2, 2, 2, 2), (64, 128, 256, 512)
    inner = tuple(c for c in full for _ in range(2))
    assert full_cost(resnet18(1000, stem="large"), large).parameters == 11_689_512
    assert full_cost(resnet34(1000, stem="large"), large).parameters == 21_797_672
    assert full_cost(resnet18(), small).parameters == by_hand(full, inner, eighteen, 3, 10) == 11_173_962
    assert full_cost(resnet18(1000, stem="large"), large).multiply_adds == pytest.approx(1.814e9, rel=1e-3)
    assert full_cost(resnet18(), small).multiply_adds == pytest.approx(0.56e9, rel=1e-2)
    architecture = resnet18()
    cut = tuple(int(0.4 * c) for c in full)
    cost = submodel_cost(architecture, (architecture.sizes(0.4), (8,)), small)
    assert cost.parameters == by_hand(cut, tuple(c for c in cut for _ in range(2)), eighteen, 3, 10)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_the_layout_is_proven(norm: str) -> None:
    proven(resnet18(3, 2, base=4, norm=norm, head_layers=1), (2, 8, 8), (1, 3, 6, 8))


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
    seen = []
    for block in module.blocks:
        block.register_forward_hook(lambda part, x, out: seen.append(out.shape[-1]))
    assert [tuple(z.shape) for z in module(torch.randn(2, 1, 32, 32))] == [(2, 5)] * 2
    assert seen == sides


def test_shortcuts_sit_where_stages_meet_even_if_stages_are_equally_wide() -> None:
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


def test_early_exits_have_convolutions_and_the_last_none() -> None:
    module = built(resnet18(head_layers=2), resnet18().sizes(1.0), (2, 8))
    found = {e: sum(isinstance(m, nn.Conv2d) for m in head.modules()) for e, head in module.heads.items()}
    assert found == {"2": 2, "8": 0}


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
                ours.state_dict()[_place(name)].copy_(tensor)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x)[-1], theirs(x).logits, rtol=1e-4, atol=1e-4)


def _place(name: str) -> str:
    """Where a tensor of theirs lies in ours."""
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


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_keys_come_from_a_configuration(name: str) -> None:
    factory = names.resolve("models", name)
    made = call_factory(factory, name, "[model]", {"stem": "large", "base": 16}, classes=7, channels=1)
    per_stage = (2, 2, 2, 2) if name == "resnet18" else (3, 4, 6, 3)
    assert made == FourStages(7, 1, per_stage, 16, "large", "batch", 2, 0.0, 3)
    with raises(ConfigError, '"small"', '"large"'):
        call_factory(factory, name, "[model]", {"stem": "medium"}, classes=7)
    with raises(ModelError, '"small"', key="stem"):
        factory(stem="medium")
