"""Budgets that no level of a derived model fits, and levels that would be equal."""

from pathlib import Path

import pytest
import torch
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.errors import ConfigError, PlanError


class Mixed(nn.Module):
    """A layer that a Fourier transform keeps whole, beside two that can be cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.rfft(self.fc(self.norm(x)), dim=-1, norm="ortho").real
        x = x + mixed.repeat(1, 2)[:, : x.shape[1]]
        return x + self.down(self.up(x).relu())


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(64, 64), nn.ModuleList([Mixed(64) for _ in range(4)])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class TwoHeads(nn.Module):
    """Attention of two heads: its stream has two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(8)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x[:, 0])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def plan(net: nn.Module, method: str, budgets: list[float]) -> ff.Plan:
    return ff.plan(model=net, data="digits", method=method, fleet={"groups": [{"budget": b} for b in budgets]})


def count(*parts: nn.Module) -> int:
    return sum(p.numel() for part in parts for p in part.parameters())


@pytest.mark.parametrize("method", ["fleetfit", "scalefl", "heterofl"])
def test_the_error_has_the_shares_and_what_stays_whole(method: str) -> None:
    net = Whole()
    head = 2 * 64 + count(net.head)  # an early classifier has a norm, too
    shares = [(count(net.stem, *net.blocks[:depth]) + head) / count(net) for depth in (1, 2, 3)]
    with raises(PlanError, *(f"{share:.3g}" for share in shares), "rfft", "blocks.*.fc"):
        plan(net, method, [0.01, 0.02, 1.0])


class Shuffled(nn.Module):
    """A shuffle between two convolutions in groups: each channel comes before channels of all groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3)
        self.first, self.second = nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 16, 1, groups=4)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.channel_shuffle(self.first(self.stem(x).relu()).relu(), 4)
        return self.fc(self.second(x).relu().mean((2, 3)))


def test_what_goes_together_is_named() -> None:
    with raises(PlanError, "stem (16)", "budget = 1.0"):
        plan(Shuffled(), "fleetfit", [0.25, 1.0])


@pytest.mark.parametrize("method", ["fleetfit", "heterofl"])
def test_a_model_of_one_piece_is_sent_to_one_level(method: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with raises(PlanError, "budget = 1.0"):
        plan(net, method, [0.25, 1.0])
    assert len(plan(net, method, [1.0]).levels) == 1


def test_levels_of_too_few_widths_differ_in_depth() -> None:
    """All widths below these budgets are of one head; whole blocks tell them apart. HeteroFL has widths alone."""
    budgets = [0.16, 0.17, 0.3, 1.0]
    for method in ("fleetfit", "scalefl"):
        levels = plan(TwoHeads(), method, budgets).levels
        assert len({(level.exits, level.parameters) for level in levels}) == len(levels)
    assert all(len(level.exits) == 1 for level in plan(TwoHeads(), "heterofl", budgets).levels)


@pytest.mark.parametrize("method", ["fleetfit", "scalefl"])
def test_the_least_tolerance_of_all_splits_is_named_and_helps(method: str) -> None:
    with raises(PlanError) as caught:
        plan(TwoHeads(), method, [0.125, 0.25, 0.5, 1.0])
    least = caught.value.tolerance
    fleet = {"groups": [{"budget": b} for b in (0.125, 0.25, 0.5, 1.0)], "tolerance": least}
    levels = ff.plan(model=TwoHeads(), data="digits", method=method, fleet=fleet).levels
    assert levels[0].share <= 0.125 * (1 + least)
    with raises(PlanError):
        ff.plan(model=TwoHeads(), data="digits", method=method, fleet={**fleet, "tolerance": least - 0.01})


def test_default_budgets_below_all_sub_models_go(tmp_path: Path) -> None:
    """One head is more than an eighth of a layer of four; budgets of one's own stay, and raise."""

    class OneLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 4, 256, dropout=0.0, batch_first=True)
            self.whole = nn.Linear(64, 8)
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.layer(x[:, 0]).mean(1) + torch.fft.fft(self.whole(x.flatten(1))).real)
            return logits

    net, default = OneLayer(), [0.125, 0.25, 0.5, 1.0]
    with raises(PlanError):
        plan(net, "heterofl", default)
    run = ff.run(model=net, data="digits", method="heterofl", rounds=1, progress=False, out=tmp_path / "run")
    assert [group.budget for group in run.experiment.fleet.groups] == default[1:]
    assert all(level.share <= 1.1 * budget for level, budget in zip(run.plan.levels, default[1:], strict=True))
    assert ff.load(run.folder, model=net).experiment.fleet == run.experiment.fleet
    with raises(ConfigError) as caught:
        ff.compare(model=net, data="digits", rounds=1, compare={"row": [{"method": "heterofl"}]}, out=tmp_path / "rows")
    assert caught.value.key == "fleet.groups"
