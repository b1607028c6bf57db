"""Derived state: what of the state that training forwards change may be cut, and what may not.

The vectors of a spectral norm written by hand may not: a level's weight would have another norm than 1, by
`torch.linalg.matrix_norm`. Those of PyTorch's are computed from each weight that is loaded. What is an average per
channel may.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import raises, run_verb
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from zoo import CLASSES, Made, arrange

from fleetfit.anatomy import Axis, Segment, build_module, infer_layout, settle_norms
from fleetfit.anatomy.proof import check_layout, derived
from fleetfit.errors import ModelError
from fleetfit.models.cnn import cnn
from fleetfit.submodel import Submodel, extract


class Two(nn.Module):
    """Two layers of one width, something after each, and a classifier."""

    def __init__(self, wide: int, classes: int, after: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(6, wide), after(wide)
        self.second, self.two = nn.Linear(wide, wide), after(wide)
        self.fc = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(self.first(x)).tanh()
        return self.fc(self.two(self.second(h)).tanh())


def two(after: Callable[[int], nn.Module]) -> Made:
    axes = {"wide": Axis(12), "classes": CLASSES}
    return Made(axes, lambda s: Two(s["wide"], s["classes"], after), (6,))


def normed(norm: Callable[[nn.Module], nn.Module]) -> Made:
    """Two layers under a norm of their weights."""

    def make(s: dict[str, int]) -> nn.Module:
        module = Two(s["wide"], s["classes"], lambda _: nn.Identity())
        module.first, module.second = norm(module.first), norm(module.second)
        return module

    return Made({"wide": Axis(12), "classes": CLASSES}, make, (6,))  # type: ignore[arg-type]


def check(architecture: Made, seed: int = 0) -> bool:
    """Return whether the whole layout is proved; what is wrong raises."""
    report = check_layout(architecture, input_shape=architecture.input_shape, seed=seed)
    return bool(report.cuts) and not report.not_proved


# ---- computed from the parameters: refused ---------------------------------------------------------------------------


class Power(nn.Module):
    """A spectral norm written by hand, whose vector is a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(rows))
        self.u: Tensor

    def forward(self, w: Tensor) -> Tensor:
        with torch.no_grad():
            v = nn.functional.normalize(w.T @ self.u, dim=0)
            if self.training:
                self.u = nn.functional.normalize(w @ v, dim=0)
        return w / (self.u @ w @ v)


class Scale(nn.Module):
    """Keeps the norm of a weight as a number, which is not cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.ones(1))
        self.norm: Tensor

    def forward(self, w: Tensor) -> Tensor:
        if self.training:
            self.norm.copy_(w.detach().norm())
        return w / self.norm


class Exact(nn.Module):
    """The remedy: the same without state."""

    def forward(self, w: Tensor) -> Tensor:
        return w / torch.linalg.matrix_norm(w.flatten(1), 2)


def with_parametrization(make: Callable[[int], nn.Module]) -> Callable[[nn.Linear], nn.Module]:
    def norm(layer: nn.Linear) -> nn.Module:
        return parametrize.register_parametrization(layer, "weight", make(layer.out_features))

    return norm


class Convolutions(nn.Module):
    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.conv, self.fc = parametrizations.spectral_norm(nn.Conv2d(1, wide, 3)), nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).relu().mean((2, 3)))


FROM_PARAMETERS = {
    "power iteration by hand": (normed(with_parametrization(Power)), ("first.parametrizations.weight.0.u",)),
    "the norm of a weight, which is a number": (
        normed(with_parametrization(lambda _: Scale())), ("first.parametrizations.weight.0.norm",)
    ),
}  # fmt: skip
SETTLED = {
    "torch.nn.utils.parametrizations.spectral_norm": normed(parametrizations.spectral_norm),
    "torch.nn.utils.spectral_norm": normed(nn.utils.spectral_norm),
    "spectral norm of a convolution": Made(
        {"wide": Axis(12), "classes": CLASSES}, lambda s: Convolutions(s["wide"], s["classes"]), (1, 6, 6)
    ),
}


@pytest.mark.parametrize("name", SETTLED)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
def test_spectral_vectors_settle_after_loading(name: str) -> None:
    """A level divides by the norm of its own weight: no state has the vectors."""
    assert check(SETTLED[name])
    assert not [tensor for tensor in infer_layout(SETTLED[name]).complete.tensors if tensor.endswith(("_u", "_v"))]


@pytest.mark.parametrize("name", FROM_PARAMETERS)
@pytest.mark.parametrize("seed", range(3))
def test_state_of_the_full_models_parameters_is_refused(name: str, seed: int) -> None:
    architecture, quoted = FROM_PARAMETERS[name]
    with raises(ModelError, 3, "matrix_norm(w.flatten(1)") as error:
        check(architecture, seed)
    for text in (*quoted, "torch.linalg.matrix_norm"):
        assert text in str(error.value)


def settled_norms(architecture: Made, channels: range) -> list[float]:
    """Return the norms of the hidden layers of a level cut from a full model whose state has settled."""
    torch.manual_seed(0)
    full = build_module(architecture, {"wide": 12, "classes": 3}, (1,)).train()
    for _ in range(200):
        full(torch.zeros(4, 6))
    layout = infer_layout(architecture)
    part = extract(layout, full.state_dict(), Submodel({"wide": channels}, (1,)))
    small = build_module(architecture, {"wide": len(channels), "classes": 3}, (1,)).eval()
    small.load_state_dict(part)
    settle_norms(small)
    small(torch.zeros(4, 6))
    return [float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) for layer in (small.first, small.second)]


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, with_parametrization(lambda _: Exact())])
def test_spectral_norms_are_1(norm: Callable[[nn.Module], nn.Module]) -> None:
    right = normed(norm)
    for channels in (range(12), range(3), range(7)):
        assert all(abs(norm - 1) < 1e-5 for norm in settled_norms(right, channels))
    assert check(right)


def test_layers_that_are_never_cut_may_keep_such_state() -> None:
    """Only the axis behind the layer with the spectral norm is cut."""

    class Whole(nn.Module):
        def __init__(self, wide: int, classes: int) -> None:
            super().__init__()
            self.stem = with_parametrization(Power)(nn.Linear(6, 8))
            self.up, self.fc = nn.Linear(8, wide), nn.Linear(wide, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.up(self.stem(x).relu()).relu())

    axes = {"wide": Axis(12), "classes": CLASSES}
    assert check(Made(axes, lambda s: Whole(s["wide"], s["classes"]), (6,)))


MODEL = """
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from fleetfit.architecture import Architecture, Axis

class Power(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.register_buffer("u", torch.ones(rows))
    def forward(self, w):
        with torch.no_grad():
            v = nn.functional.normalize(w.T @ self.u, dim=0)
            if self.training:
                self.u = nn.functional.normalize(w @ v, dim=0)
        return w / (self.u @ w @ v)
def normed(layer):
    return register_parametrization(layer, "weight", Power(layer.out_features))

class Family(Architecture):
    blocks = 1
    def __init__(self, classes):
        self.axes = {"h": Axis(16), "classes": Axis(classes, scaled=False)}
    def build(self, axes, exits):
        h = axes["h"]
        return nn.Sequential(nn.Flatten(), normed(nn.Linear(64, h)), nn.ReLU(), nn.Linear(h, axes["classes"]))
"""


def test_check_model_and_run_refuse_derived_state(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(MODEL)
    run = [f"--set=model.name={path}:Family", "--set=method.name=heterofl", "--set=fleet.tolerance=0.5"]
    for arguments in (
        ["check-model", f"{path}:Family", "--input-shape", "1,8,8"],
        ["run", "--out", tmp_path / "out", *run, "--set=rounds=1"],
    ):
        assert '"1.parametrizations.weight.0.u"' in run_verb(*arguments, code=2).err
    assert not (tmp_path / "out").exists()


# ---- computed from the data, or element by element: accepted ---------------------------------------------------------


class Average(nn.Module):
    """Takes off a moving average of each channel."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(wide))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.average


class ByHand(nn.Module):
    """A batch norm written by hand."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(wide)), nn.Parameter(torch.zeros(wide))
        self.register_buffer("mean", torch.zeros(wide))
        self.register_buffer("var", torch.ones(wide))
        self.mean: Tensor
        self.var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            mean, var = x.mean(0), x.var(0)
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.var = 0.9 * self.var + 0.1 * var.detach()
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


class Codebook(nn.Module):
    """A vector-quantized layer: codes are averages of what is nearest to them."""

    def __init__(self, wide: int, codes: int = 5) -> None:
        super().__init__()
        start = torch.linspace(-1, 1, codes)[:, None].expand(codes, wide).clone()
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", start)
        self.counts: Tensor
        self.sums: Tensor

    def forward(self, x: Tensor) -> Tensor:
        codes = self.sums / self.counts[:, None]
        nearest = torch.cdist(x.detach(), codes).argmin(1)
        if self.training:
            hits = nn.functional.one_hot(nearest, len(codes)).to(x.dtype)
            self.counts.mul_(0.9).add_(0.1 * (hits.sum(0) + 0.01))
            self.sums.mul_(0.9).add_(0.1 * (hits.T @ x.detach() + 0.01 * codes))
        return x + (codes[nearest] - x).detach() + 0.3 * x


class Follower(nn.Module):
    """A layer beside its slow copy, as of a mean teacher."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.fast = nn.Linear(wide, wide)
        self.slow = nn.Linear(wide, wide).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return self.fast(x) + self.slow(x)


class Steps(nn.Module):
    """A temperature that falls with each step, one of each channel."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(wide))
        self.temperature: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature.mul_(0.9)
        return x / self.temperature


class Observed(nn.Module):
    """Divides by the largest number that it has seen, which it takes out of the tensor."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))
        self.largest: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.fill_(max(float(self.largest), float(x.abs().max())))
        return x / self.largest


class Noisy(Average):
    """With dropout before it, so that a small model draws other numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


class Constant(nn.Module):
    """Buffers that no forward changes."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, wide))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


ACCEPTED: dict[str, Callable[[int], nn.Module]] = {
    "average of each channel": Average,
    "batch norm by hand": ByHand,
    "codebook": Codebook,
    "slow copy of a layer": Follower,
    "temperature": Steps,
    "largest number": Observed,
    "average behind dropout": Noisy,
    "constant": Constant,
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("seed", range(3))
def test_state_that_can_be_cut_is_accepted(name: str, seed: int) -> None:
    architecture = two(ACCEPTED[name])
    report = check_layout(architecture, input_shape=architecture.input_shape, seed=seed)
    assert not report.not_proved and max(report.cuts.values()) < 1e-9


def test_instance_norm_statistics_are_accepted() -> None:
    axes = {"wide": Axis(12), "classes": CLASSES}
    assert check(Made(axes, lambda s: Convolved(s["wide"], s["classes"]), (1, 6, 6)))


class Convolved(nn.Module):
    """An instance norm with running statistics between two convolutions."""

    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, wide, 3), nn.InstanceNorm2d(wide, affine=True, track_running_stats=True)
        self.second, self.fc = nn.Conv2d(wide, wide, 3), nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


def test_a_models_own_average_is_accepted() -> None:
    class Own(Two):
        def __init__(self, wide: int, classes: int) -> None:
            super().__init__(wide, classes, lambda _: nn.Identity())
            self.register_buffer("average", torch.zeros(wide))
            self.average: Tensor

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(self.first(x).tanh())
            if self.training:
                self.average.lerp_(h.detach().mean(0), 0.1)
            return self.fc(h - self.average)

    axes = {"wide": Axis(12), "classes": CLASSES}
    assert check(Made(axes, lambda s: Own(s["wide"], s["classes"]), (6,)))


# ---- its own layout is proved with what it is after some steps -------------------------------------------------------


class Stacked(nn.Module):
    """Means and deviations in one buffer, one behind the other; both begin alike for all channels."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("stats", torch.ones(2 * wide))
        self.stats: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.stats.lerp_(torch.cat([x.detach().mean(0), 1 + x.detach().std(0)]), 0.1)
        mean, deviation = self.stats.chunk(2)
        return (x - mean) / deviation


def test_the_layout_of_derived_state_is_proved() -> None:
    architecture = two(Stacked)
    assert check(architecture)
    pairs = (Segment("wide", per=2),)
    wrong = arrange(architecture.infer(), {("one.stats", 0): pairs, ("two.stats", 0): pairs})
    with raises(ModelError, '"wide"', '"one.stats"'):
        check_layout(architecture, wrong, input_shape=architecture.input_shape)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def test_models_without_buffers_run_no_training_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a training forward")

    monkeypatch.setattr(derived, "_run_training", never)
    check_layout(cnn(classes=4), input_shape=(1, 8, 8), seed=5)
    with pytest.raises(AssertionError, match="a training forward"):
        check(two(Constant), seed=5)
