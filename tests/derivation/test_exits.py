"""Exits of a derived model: where they are found, what a level without the rest holds and computes, what they give."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from bed import ENTRIES
from support import raises
from support.derivation import derive as derive_bed, make_instance
from torch import Tensor, nn

from fleetfit.anatomy.derive import DerivedArchitecture, derive_architecture, prove_plan
from fleetfit.errors import ModelError

VECTORS = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.fc(self.norm(x)))


class Blocks(nn.Module):
    """A ModuleList of blocks between a stem and a classifier; the stem's norm comes again before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(5, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x * self.scale))


class ScaleFirst(Blocks):
    """Python reads the scale before the blocks run, and uses it behind them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.scale * self.run(x)))

    def run(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x


class Stages(nn.Module):
    """Four stages beside each other, as in a ResNet; the last has two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        widths = (4, 4, 6, 6, 8)
        for i, (n_in, n_out) in enumerate(itertools.pairwise(widths), 1):
            layers = (nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))
            setattr(self, f"layer{i}", nn.Sequential(*layers))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class Attributes(nn.Module):
    """Blocks of one class that are plain attributes, between modules of other classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.neck = nn.Linear(5, 8), nn.Sequential(nn.Linear(8, 6), nn.ReLU())
        self.block1, self.block2, self.last = Block(8), Block(8), Block(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.neck(self.block2(self.block1(self.stem(x))))))


class OwnExits(nn.Module):
    """A classifier after each of its three layers; it returns a list of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5 if i == 0 else 8, 8) for i in range(3)])
        self.classifiers = nn.ModuleList([nn.Linear(8, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        logits = []
        for layer, classifier in zip(self.layers, self.classifiers, strict=True):
            x = torch.relu(layer(x))
            logits.append(classifier(x))
        return logits


class Experts(nn.Module):
    """Layers beside each other, which are not a chain; one of them runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.again, self.count, self.head = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        h = torch.stack([expert(h) for expert in self.experts]).sum(0)
        return self.head(self.again(self.again(h)) * self.count(h.mean(0, keepdim=True)))


def make_sequential() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
    )


MAKE = {"sequential": make_sequential, "blocks": Blocks, "stages": Stages, "own": OwnExits, "experts": Experts,
        "attributes": Attributes, "scale first": ScaleFirst}  # fmt: skip
EXAMPLES = {"stages": IMAGES}
AUTO = {
    "sequential": ("1", "3", "5"),
    "blocks": ("blocks.0", "blocks.1"),
    "stages": ("layer1", "layer2", "layer3"),
    "own": ("classifiers.0", "classifiers.1"),
    "experts": (),
    "attributes": ("block1", "block2", "neck"),
    "scale first": ("blocks.0", "blocks.1"),
}
"""The modules after which exits are found."""

USED: dict[str, Sequence[set[str]]] = {
    "sequential": ({"0"}, {"2"}, {"4"}, {"6"}),
    "blocks": ({"stem", "norm", "blocks.0"}, {"blocks.1"}, {"blocks.2", "scale", "head"}),
    "stages": ({"conv1", "layer1"}, {"layer2"}, {"layer3"}, {"layer4", "fc"}),
    "own": ({"layers.0", "classifiers.0"}, {"layers.1", "classifiers.1"}, {"layers.2", "classifiers.2"}),
    "experts": ({"stem", "experts", "again", "count", "head"},),
    "attributes": ({"stem", "block1"}, {"block2"}, {"neck"}, {"last", "head"}),
    "scale first": ({"stem", "norm", "blocks.0"}, {"blocks.1"}, {"blocks.2", "scale", "head"}),
}
"""The tensors that the pass until each exit uses, beside those of the exit before: names, or modules they are in."""


@cache
def derive(kind: str, exits: str | tuple[str, ...] = "auto") -> DerivedArchitecture:
    torch.manual_seed(1)
    return derive_architecture(MAKE[kind](), EXAMPLES.get(kind, VECTORS), exits)


def list_used(kind: str, net: nn.Module, e: int) -> set[str]:
    parts = set().union(*USED[kind][:e])
    return {name for name in net.state_dict() if any(name == part or name.startswith(f"{part}.") for part in parts)}


@pytest.mark.parametrize("kind", MAKE)
def test_exits_are_found(kind: str) -> None:
    plan = derive(kind).plan
    assert tuple(point.module for point in plan.exits) == AUTO[kind]
    assert {point.is_own for point in plan.exits} <= {kind == "own"}
    assert derive(kind).positions == tuple(range(1, len(AUTO[kind]) + 2))


@pytest.mark.parametrize("kind", MAKE)
def test_a_level_holds_nothing_behind_its_last_exit(kind: str) -> None:
    architecture = derive(kind)
    half = {axis: max(1, n // 2) for axis, n in architecture.plan.axes.items() if axis != "classes"}
    for e in architecture.positions:
        level = architecture.build({**architecture.plan.axes, **half}, (e,))
        names = {name for name in level.state_dict() if not name.startswith("heads.")}
        assert names == {f"net.{name}" for name in list_used(kind, architecture.net, e)}
        is_added = kind != "own" and e < architecture.blocks
        heads = {f"heads.{e}.{name}" for name in ("norm.weight", "norm.bias", "fc.weight", "fc.bias")}
        assert set(level.state_dict()) - names == (heads if is_added else set())


@pytest.mark.parametrize("kind", MAKE)
def test_a_level_computes_nothing_behind_its_last_exit(kind: str) -> None:
    """Also where the modules are there, since a batch of all exits has them: the pass itself ends."""
    architecture, x = derive(kind), EXAMPLES.get(kind, VECTORS)
    for e in architecture.positions[:-1]:
        level = architecture.build(architecture.plan.axes, (e,)).eval()
        ran: list[str] = []
        for name, part in level.named_modules():
            part.register_forward_pre_hook(lambda part, args, name=name, ran=ran: ran.append(name))
        level(x)
        unused = set().union(*USED[kind][e:])
        assert f"net.{AUTO[kind][e - 1]}" in ran
        assert not [name for name in ran if any(f"{name}.".startswith(f"net.{part}.") for part in unused)]


@pytest.mark.parametrize("kind", MAKE)
def test_exit_logits_are_those_of_their_classifier(kind: str) -> None:
    architecture, x = derive(kind), EXAMPLES.get(kind, VECTORS)
    net, level = architecture.net, architecture.build(architecture.plan.axes, architecture.positions).eval()
    outputs: dict[str, Tensor] = {}
    handles = [
        net.get_submodule(name).register_forward_hook(
            lambda part, args, out, name=name: outputs.update({name: out.clone()})
        )
        for name in AUTO[kind]
    ]
    with torch.no_grad():
        was_training = net.training
        last = net.eval()(x)
        net.train(was_training)
        logits = level(x)
    for handle in handles:
        handle.remove()
    assert len(logits) == architecture.blocks
    assert torch.equal(logits[-1], last[-1] if isinstance(last, list) else last)
    for e, (name, logit) in enumerate(zip(AUTO[kind], logits, strict=False), 1):
        hidden = outputs[name]
        if kind == "own":
            assert torch.equal(logit, hidden)
            continue
        pooled = hidden.mean((2, 3)) if hidden.dim() == 4 else hidden
        mean, deviation = pooled.mean(1, keepdim=True), pooled.var(1, keepdim=True, correction=0).add(1e-5).sqrt()
        head = level.heads[str(e)]
        expected = ((pooled - mean) / deviation) @ head.fc.weight.T + head.fc.bias
        assert torch.allclose(logit, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["blocks", "stages", "own"])
def test_gradients_of_all_exits_reach_what_they_use(kind: str) -> None:
    architecture, x = derive(kind), EXAMPLES.get(kind, VECTORS)
    for e in architecture.positions:
        level = architecture.build(architecture.plan.axes, architecture.positions[:e]).train()
        torch.stack([logits.logsumexp(1).sum() for logits in level(x)]).sum().backward()
        assert [name for name, p in level.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("mistake", ["an exit early", "a tensor early", "a tensor late"])
def test_a_level_with_more_or_less_than_its_exits_read_is_refused(mistake: str) -> None:
    """More would be sent for nothing, and no device of that level would train it."""
    net, plan = derive("blocks").net, derive("blocks").plan
    name = "blocks.1.fc.weight"
    if mistake == "an exit early":
        first, second = plan.exits
        plan = replace(plan, exits=(first, replace(second, module=first.module)))
    else:
        plan = replace(plan, blocks={**plan.blocks, name: plan.blocks[name] + (1 if mistake.endswith("late") else -1)})
    with raises(ModelError, key="derive.exits"):
        prove_plan(net, plan, VECTORS)


def test_a_gate_of_a_few_channels_belongs_to_its_block() -> None:
    assert [point.module for point in derive_bed("eca")[1].plan.exits] == ["attention0"]


@pytest.mark.parametrize(
    ("name", "width"),
    [("mlp_mixer", 24), ("gpt_list_of_heads", 24), ("einsum_attention", 24), ("hf_vit", 32), ("vit_chunked_qkv", 32)],
)
def test_exits_read_channels_and_not_places(name: str, width: int) -> None:
    """Places may have parameters, too: a table of positions, or a linear layer over them."""
    whole = derive_architecture(make_instance(name), ENTRIES[name].example(), axes={"*": "whole"})
    for architecture in (derive_bed(name)[1], whole):
        module = architecture.build(architecture.plan.axes, architecture.positions)
        assert [head.norm.normalized_shape for head in module.heads.values()] == [(width,)] * (architecture.blocks - 1)


def test_none_has_the_classifier_alone() -> None:
    architecture = derive("blocks", "none")
    assert architecture.plan.exits == () and architecture.positions == (1,)
    assert set(architecture.build(architecture.plan.axes, (1,)).state_dict()) == {
        f"net.{name}" for name in architecture.net.state_dict()
    }


def test_named_exits_come_in_running_order() -> None:
    architecture = derive("stages", ("layer3", "conv1", "layer3"))
    assert [point.module for point in architecture.plan.exits] == ["conv1", "layer3"]
    level = architecture.build(architecture.plan.axes, (1,))
    assert {name for name in level.state_dict() if name.startswith("net.")} == {"net.conv1.weight", "net.conv1.bias"}


def test_named_exits_replace_own_exits() -> None:
    architecture = derive("own", ("layers.0",))
    assert [(point.module, point.is_own) for point in architecture.plan.exits] == [("layers.0", False)]


@pytest.mark.parametrize(
    ("kind", "exits", "mentions"),
    [
        ("blocks", ("blocks.7",), ("blocks.7", "blocks.0, blocks.1")),
        ("blocks", ("blocks.0", "block.1"), ("block.1", "blocks.1")),
        ("blocks", ("head",), ("head",)),
        ("blocks", ("",), ()),
        ("experts", ("again",), ("again",)),
        ("experts", ("count",), ("count",)),
        ("experts", ("nothing",), ("nothing",)),
        ("stages", "layer1", ("layer1",)),
        ("stages", "automatic", ("automatic",)),
    ],
)
def test_exits_that_cannot_be_are_refused(kind: str, exits: str | tuple[str, ...], mentions: Sequence[str]) -> None:
    with raises(ModelError, *mentions, key="derive.exits"):
        derive_architecture(MAKE[kind](), EXAMPLES.get(kind, VECTORS), exits)
