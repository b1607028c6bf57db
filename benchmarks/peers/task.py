"""The tasks that all sides train, in plain PyTorch: samples of each client in memory, and two models.

Batch norm keeps no running statistics, so that a state is its parameters on every side. Images are the handwritten
digits, or made: of each class a smooth pattern under noise. Clients' samples are drawn alike.
"""

import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, MADE_TEST = 10, 1000


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        model: "cnn" or "resnet20".
        channels: Of the images.
        side: Of the images, in pixels.
        samples: Of each client.
        rounds: In all.
        clients: In all.
        cohort: Clients of a round.
        batch_size: Samples of a step.
        epochs: Of a client in a round.
        lr: Of SGD.
        momentum: Of SGD.
        seed: Of samples, first weights and batches; another in each turn.
        digits: Whether images are the handwritten digits of scikit-learn, or made.
    """

    model: str
    channels: int
    side: int
    samples: int
    rounds: int
    clients: int = 100
    cohort: int = 10
    batch_size: int = 20
    epochs: int = 1
    lr: float = 0.05
    momentum: float = 0.9
    seed: int = 0
    digits: bool = False


def make(task: Task, folder: Path) -> None:
    """Write the task, its data and the model to begin with into a folder."""
    rng = np.random.default_rng(task.seed)
    x, y = digits(rng) if task.digits else made(task, rng)
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    np.savez(folder / "task.npz", **asdict(task))
    torch.manual_seed(task.seed)
    model = model_of(task)
    for part in model.modules():  # as our models begin, so that all sides learn alike
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    save(model, folder / "first.npz")


def made(task: Task, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return images of smooth patterns under noise with their classes, `MADE_TEST` of them for the test."""
    coarse = torch.from_numpy(rng.normal(size=(CLASSES, task.channels, 4, 4)))
    patterns = F.interpolate(coarse, size=(task.side, task.side), mode="bilinear")
    total = task.clients * task.samples + MADE_TEST
    y = torch.from_numpy(rng.integers(0, CLASSES, size=total))
    noise = torch.from_numpy(rng.normal(size=(total, task.channels, task.side, task.side)))
    return (128 + 64 * patterns[y] + 40 * noise).clamp(0, 255).to(torch.uint8), y


def digits(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return the 1,797 handwritten digits of 8x8 in a random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = rng.permutation(len(found.target))
    x = torch.from_numpy(found.images[order] * (255 / 16)).round().to(torch.uint8)
    return x[:, None], torch.from_numpy(found.target[order]).long()


class Loaded:
    """A task from its folder, with all samples in memory: uint8 images [N, C, H, W] and labels [N]."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.task = Task(**{name: value.item() for name, value in np.load(self.folder / "task.npz").items()})
        data = np.load(self.folder / "data.npz")
        self.x, self.y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])

    @property
    def trained(self) -> int:
        """How many samples the clients have; those behind them are the test samples."""
        return self.task.clients * self.task.samples

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Return one client's samples, normalized."""
        here = slice(i * self.task.samples, (i + 1) * self.task.samples)
        return normalized(self.x[here]), self.y[here]

    def model(self) -> nn.Module:
        """Return the model to begin with."""
        model = model_of(self.task)
        load(model, self.folder / "first.npz")
        return model

    @torch.no_grad()
    def accuracy(self, file: Path) -> float:
        """Return a saved model's share of right answers on the test samples."""
        model = model_of(self.task)
        load(model, file)
        x, y = self.x[self.trained :], self.y[self.trained :]
        right = [model(normalized(a)).argmax(1) == b for a, b in zip(x.split(250), y.split(250), strict=True)]
        return float(torch.cat(right).float().mean())


@cache
def loaded(folder: str) -> Loaded:
    """Return the task of a folder, read once per process; it computes on one thread."""
    torch.set_num_threads(1)
    return Loaded(folder)


def normalized(x: Tensor) -> Tensor:
    """Return images as floats around 0."""
    return (x.float() / 255 - 0.5) / 0.25


def save(model: nn.Module, file: Path) -> None:
    """Write a model's parameters, in its order."""
    np.savez(file, *(value.detach().numpy() for value in model.state_dict().values()))


def load(model: nn.Module, file: Path) -> None:
    """Read a model's parameters, in its order, whatever their names."""
    with np.load(file) as found:
        values = [torch.from_numpy(found[name]) for name in found]
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def round_done() -> None:
    """Tell the observer that a round has ended."""
    os.write(int(os.environ["ROUNDS_FD"]), b".")


# ---- models ------------------------------------------------------------------------------------------------------


def model_of(task: Task) -> nn.Module:
    """Return the task's model: that of `fleetfit.models` of the same name, with its last classifier only."""
    return {"cnn": Cnn, "resnet20": ResNet20}[task.model](task.channels)


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def conv(before: int, after: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)


class Cnn(nn.Module):
    """Six 3x3 convolutions in two stages, each with norm and ReLU; halved before the second and the fourth."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels, 28, 28, 28, 42, 42, 42]
        layers: list[nn.Module] = []
        for i in range(6):
            layers += [nn.MaxPool2d(2)] if i in (1, 3) else []
            layers += [conv(widths[i], widths[i + 1]), norm(widths[i + 1]), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(42, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1, self.norm1 = conv(before, after, stride), norm(after)
        self.conv2, self.norm2 = conv(after, after), norm(after)
        self.shortcut = nn.Sequential()
        if stride == 2:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=2, bias=False), norm(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x), inplace=True)


class ResNet20(nn.Module):
    """ResNet-20 for small images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(channels, 16), norm(16), nn.ReLU(inplace=True))
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Block(widths[i], widths[i + 1]) for i in range(9)))
        self.classifier = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))
