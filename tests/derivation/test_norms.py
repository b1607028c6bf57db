"""Norms with statistics from a training before: which keep them, in training, evaluation, levels and workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import fleetfit as ff
from fleetfit.anatomy import build_module
from fleetfit.anatomy.derive import derive_architecture

CLASSES, WIDTH = 3, 12


class Encoder(nn.Module):
    """Two convolutions with norms, and a classifier of the mean over places.

    Args:
        make_norm: Makes a norm of some channels.
        holds: Whether the module keeps its encoder in evaluation mode.
        frozen: The modules without trained parameters.
        statistics: Whether the norms come with trained statistics.
    """

    def __init__(
        self,
        make_norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        holds: bool = False,
        frozen: tuple[str, ...] = ("norm1", "norm2"),
        statistics: bool = True,
    ) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(4)
        self.holds = holds
        self.conv1, self.norm1 = nn.Conv2d(1, WIDTH, 3, padding=1), make_norm(WIDTH)
        self.conv2, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), make_norm(WIDTH)
        self.fc = nn.Linear(WIDTH, CLASSES)
        for norm in (self.norm1, self.norm2):
            if statistics and isinstance(norm, _NormBase):
                norm.running_mean = torch.rand(WIDTH, generator=rng) - 0.5
                norm.running_var = 2 + 3 * torch.rand(WIDTH, generator=rng)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        out: Tensor = self.fc(self.norm2(self.conv2(x)).relu().mean((2, 3)))
        return out

    def train(self, mode: bool = True) -> "Encoder":
        super().train(mode)
        if self.holds:
            self.norm1.eval()
            self.norm2.eval()
        return self


class FixedNorm(nn.Module):
    """Batch norm of buffers, as detection models have it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.linspace(-1, 1, channels))
        self.register_buffer("running_var", torch.linspace(2, 3, channels))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.running_mean[:, None, None]) * (self.running_var[:, None, None] + 1e-5).rsqrt()


def make_images() -> tuple[Any, Any]:
    y = np.arange(90) % CLASSES
    x = np.random.default_rng(2).normal(size=(90, 1, 6, 6)).astype("float32")
    x[:, 0, :2] += y[:, None, None]
    return x, y


ONE_LEVEL: dict[str, Any] = {"method": {"name": "fedavg"}, "fleet": {"groups": [{"budget": 1.0}]}}
STILL = {"lr": 1e-9, "epochs": 1}
"""Training that moves parameters by nothing, so that the instance's logits stay."""


def run_still(net: Any, out: Path, **sections: Any) -> tuple[ff.Run, Tensor]:
    return run_with(net, out, STILL, **sections)


def run_with(net: Any, out: Path, local: dict[str, Any], **sections: Any) -> tuple[ff.Run, Tensor]:
    """Return a run, and the samples of its test split."""
    run = ff.run(model=net, data=make_images(), rounds=2, local=local, out=out, progress=False, **sections)
    data: Any = run.assembly.data
    return run, data.batch(data.split("test"))[0]


CASES: dict[str, Callable[[], Encoder]] = {
    "frozen norms": Encoder,
    "a frozen encoder": lambda: Encoder(frozen=("conv1", "norm1", "conv2", "norm2")),
    "norms without parameters": lambda: Encoder(
        lambda n: nn.BatchNorm2d(n, affine=False), frozen=("conv1", "conv2"), holds=True
    ),
    "norms that train and are held": lambda: Encoder(frozen=(), holds=True),
    "new norms that are held": lambda: Encoder(frozen=(), holds=True, statistics=False),
    "instance norms": lambda: Encoder(lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)),
    "norms of buffers": lambda: Encoder(FixedNorm, frozen=()),
}


@pytest.mark.parametrize("case", CASES)
def test_statistics_are_kept(case: str, tmp_path: Path) -> None:
    """The instance's own logits in evaluation mode."""
    net = CASES[case]()
    run, x = run_still(net, tmp_path / "run", **ONE_LEVEL)
    with torch.no_grad():
        torch.testing.assert_close(run.model()(x), net.eval()(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ff.load(run.folder, model=net, data=make_images()).model()(x), net(x))
    is_noted = case != "norms of buffers"
    assert any('"norm1", "norm2"' in note for note in run.notes) == is_noted


def test_training_leaves_the_statistics(tmp_path: Path) -> None:
    """They are no part of what the server averages, and the trained level computes with the instance's own."""
    net = Encoder(holds=True)
    run, _ = run_with(net, tmp_path / "run", {"lr": 0.3, "epochs": 1}, **ONE_LEVEL)
    assert all("running" not in name for name in run.server.state)
    assert (run.server.state["net.fc.weight"] - net.fc.weight.detach()).abs().max() > 1e-3
    norms = [part for part in run.model().modules() if isinstance(part, nn.BatchNorm2d)]
    for norm, own in zip(norms, (net.norm1, net.norm2), strict=True):
        torch.testing.assert_close(norm.running_mean, own.running_mean)
        torch.testing.assert_close(norm.running_var, own.running_var)


def test_a_step_normalizes_by_the_statistics() -> None:
    """The gradients of a level in training mode are those of the instance, which autograd gives."""
    net, x, y = Encoder(holds=True), torch.randn(8, 1, 6, 6), torch.arange(8) % CLASSES
    derived = derive_architecture(net, x)
    module = build_module(derived, derived.plan.axes, derived.positions[-1:]).train()
    nn.functional.cross_entropy(module(x)[-1], y).backward()
    nn.functional.cross_entropy(net.train()(x), y).backward()
    assert net.conv1.weight.grad is not None and bool(net.conv1.weight.grad.any())
    torch.testing.assert_close(module.get_parameter("net.conv1.weight").grad, net.conv1.weight.grad)
    torch.testing.assert_close(module.get_parameter("net.fc.weight").grad, net.fc.weight.grad)


def test_fine_tuned_and_new_norms_are_as_before(tmp_path: Path) -> None:
    """Trained weights: each batch's own statistics. Only norms with trained statistics have a note."""
    tuned, _ = run_still(Encoder(frozen=("norm1",)), tmp_path / "tuned", **ONE_LEVEL)
    new, _ = run_still(Encoder(statistics=False), tmp_path / "new", **ONE_LEVEL)
    assert [('"norm1"' in note, '"norm2"' in note) for note in tuned.notes if "norm" in note.lower()] == [
        (True, False),
        (False, True),
    ]
    assert not any('"norm1"' in note for note in new.notes)


def test_a_narrow_level_has_its_part_of_the_statistics(tmp_path: Path) -> None:
    """Computed by hand from the first channels of each tensor."""
    net = Encoder(holds=True)
    derived = derive_architecture(net, torch.randn(2, 1, 6, 6))
    sizes = {axis: WIDTH // 2 if one.scaled else one.size for axis, one in derived.axes.items()}
    module, x, n = derived.build(sizes, derived.positions[-1:]).train(), torch.randn(5, 1, 6, 6), WIDTH // 2

    def normalize(x: Tensor, norm: Any) -> Tensor:
        mean, scale = norm.running_mean[:n, None, None], (norm.running_var[:n, None, None] + 1e-5).rsqrt()
        hidden: Tensor = ((x - mean) * scale).relu()
        return hidden

    bias1, bias2 = net.get_parameter("conv1.bias"), net.get_parameter("conv2.bias")
    with torch.no_grad():
        h = normalize(nn.functional.conv2d(x, net.conv1.weight[:n], bias1[:n], padding=1), net.norm1)
        h = normalize(nn.functional.conv2d(h, net.conv2.weight[:n, :n], bias2[:n], padding=1), net.norm2)
        expected = h.mean((2, 3)) @ net.fc.weight[:, :n].T + net.fc.bias
        torch.testing.assert_close(module(x)[-1], expected)


@pytest.mark.parametrize("tuning", ["frozen", "ssf"])
def test_what_fine_tuning_freezes_keeps_its_statistics(tuning: str, tmp_path: Path) -> None:
    net = Encoder(frozen=())
    run, x = run_still(net, tmp_path / "run", **ONE_LEVEL, peft={"name": tuning})
    derived = derive_architecture(net, torch.randn(2, *x.shape[1:]))  # before the run: the same
    again, _ = run_still(derived, tmp_path / "derived", **ONE_LEVEL, peft={"name": tuning})
    with torch.no_grad():
        for one in (run, again):
            torch.testing.assert_close(one.model()(x), net.eval()(x), rtol=1e-4, atol=1e-5)


def make_encoder(classes: int = CLASSES) -> Encoder:
    torch.manual_seed(6)
    return Encoder()


def test_workers_and_levels_keep_them(tmp_path: Path) -> None:
    run, x = run_still(
        f"{Path(__file__)}:make_encoder", tmp_path / "run", fleet={"tolerance": 0.9}, engine={"name": "processes"}
    )
    with torch.no_grad():
        torch.testing.assert_close(run.model()(x), make_encoder().eval()(x), rtol=1e-4, atol=1e-5)
