"""Sizes that are not plain attributes: behind an underscore, in a configuration, in pairs as einops keeps them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from fleetfit.anatomy import build_module, outputs
from fleetfit.anatomy.derive import DerivedArchitecture, DerivedPlan, derive_architecture, restore_architecture
from fleetfit.anatomy.numbers import Trials
from fleetfit.errors import ModelError

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
HEADS, WIDTH, BLOCKS = 4, 8, 2


class Attention(nn.Module):
    """Attention by hand; `kind` says where it has its number of heads."""

    def __init__(self, kind: str, config: SimpleNamespace) -> None:
        super().__init__()
        self.kind, self.config = kind, config
        self.qkv, self.out = nn.Linear(WIDTH, 3 * 16), nn.Linear(16, WIDTH)
        if kind == "underscore":
            self._n_heads = HEADS
        elif kind == "pairs":
            self._lengths = (("h", HEADS), ("k", 3))

    def count_heads(self) -> int:
        if self.kind == "underscore":
            return self._n_heads
        return self._lengths[0][1] if self.kind == "pairs" else self.config.heads

    def forward(self, x: Tensor) -> Tensor:
        batch, places, _ = x.shape
        q, k, v = self.qkv(x).view(batch, places, 3, self.count_heads(), 4).permute(2, 0, 3, 1, 4)
        y = ((q @ k.transpose(-1, -2)) / 2).softmax(-1) @ v
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, places, self.count_heads() * 4))
        return out


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.config = SimpleNamespace(heads=HEADS, layers=BLOCKS, name="net")
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Attention(kind, self.config) for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def derive(net: nn.Module) -> DerivedArchitecture:
    return derive_architecture(net, X)


@pytest.mark.parametrize("kind", ["underscore", "config", "pairs"])
def test_heads_are_cut_wherever_their_number_is(kind: str) -> None:
    net = Net(kind)
    derived = derive(net)
    assert not any("qkv" in name for name in derived.plan.whole)
    sizes = [size for axis, size in derived.plan.axes.items() if size == HEADS and axis != "classes"]
    assert len(sizes) == (1 if kind == "config" else BLOCKS)  # one number for all blocks makes one axis
    level = build_module(derived, {**derived.plan.axes, **dict.fromkeys(derived.plan.axes, 2), "classes": 3}, (2,))
    assert [block.count_heads() for block in level.net.blocks] == [2] * BLOCKS  # type: ignore[union-attr]
    assert outputs(level, X)[-1].shape == (2, 3)
    assert net.config.heads == HEADS and [block.count_heads() for block in net.blocks] == [HEADS] * BLOCKS


@pytest.mark.parametrize("kind", ["underscore", "config", "pairs"])
def test_a_plan_says_where_the_number_is(kind: str) -> None:
    payload = derive(Net(kind)).plan.to_payload()
    assert restore_architecture(Net(kind), payload).plan == DerivedPlan.from_payload(payload)
    other = Net(kind)
    other.config.heads = 2
    for block in other.blocks:
        block._n_heads, block._lengths = 2, (("h", 2),)  # type: ignore[assignment,union-attr]
    with pytest.raises(ModelError):
        restore_architecture(other, payload)


def test_a_number_that_scales_stays() -> None:
    """Gemma scales by the width of the whole model: the number equals a size, and must not follow it."""

    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.config.width**0.5)

    net = Scaled("underscore")
    net.config.width = WIDTH
    derived = derive(net)
    level = build_module(derived, {**dict.fromkeys(derived.plan.axes, 2), "classes": 3}, (2,))
    assert level.net.config.width == WIDTH  # type: ignore[union-attr]


def test_einops_layers() -> None:
    pytest.importorskip("einops")
    from einops.layers.torch import Rearrange

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * 16), nn.Linear(16, WIDTH)
            self.split = Rearrange("b n (t h d) -> t b h n d", t=3, h=HEADS)
            self.join = Rearrange("b h n d -> b n (h d)")

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(self.qkv(x))
            out: Tensor = self.out(self.join((q @ k.transpose(-1, -2) / 2).softmax(-1) @ v))
            return out

    net = Net("underscore")
    net.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
    derived = derive(net)
    assert sorted(derived.plan.axes.values()).count(HEADS) == BLOCKS and not derived.plan.whole


def test_trials_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many numbers that all equal a size, of which none is one: a limit of trials, then the axis stays whole."""

    class Hopeless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 3)
            for i in range(12):
                setattr(self, f"n{i}", WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            assert all(getattr(self, f"n{i}") == WIDTH for i in range(12))
            logits: Tensor = self.head(self.stem(x).reshape(-1, 3, 8).mean(1))
            return logits

    runs = []
    run = Trials._run
    monkeypatch.setattr(Trials, "_run", lambda self, sizes: runs.append(sizes) or run(self, sizes))
    monkeypatch.setattr(sys.modules["fleetfit.anatomy.numbers"], "_MAX_TRIALS", 20)
    derived = derive(Hopeless())
    assert 20 < len(runs) < 40 and "stem" in str(derived.plan.whole)
