"""Networks of other people's packages, from networks.toml, with random weights; making one imports its package."""

import functools
import importlib.metadata
import importlib.util
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bed.entry import Entry


class Encoder(nn.Module):
    """A classifier of the mean of what an encoder gives for the tokens."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder, self.fc = encoder, nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.encoder(tokens).last_hidden_state.mean(1))


class Columns(nn.Module):
    """A model of tables, for one of numbers alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, numbers: Tensor) -> Tensor:
        return self.net(numbers, None)


@dataclass(frozen=True)
class Network:
    """A row of networks.toml."""

    package: str
    name: str
    line: str
    shape: tuple[int, ...]
    tokens: int = 0
    end: int = 0
    next_tokens: bool = False
    bed: str = ""
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.package}: {self.name}"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def make(self) -> nn.Module:
        define_torchvision_operations()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = importlib.import_module(self.package)
            return eval(self.line, {self.package: package, "Encoder": Encoder, "Columns": Columns})  # noqa: S307 lines of networks.toml

    def draw(self, n: int) -> Tensor:
        """Return samples; token 0 is left to padding."""
        rng, shape = torch.Generator().manual_seed(0), (n, *self.shape)
        if not self.tokens:
            return torch.randn(shape, generator=rng)
        x = torch.randint(self.end + 1, self.tokens, shape, generator=rng)
        if self.end:
            x[:, -1] = self.end
        return x


@functools.cache
def define_torchvision_operations() -> torch.library.Library | None:
    """Define two operations that torchvision registers more for, beside a build of PyTorch for CPUs.

    PyPI's torchvision for Linux is built for GPUs, and its own operations do not load there. No classifier calls them.
    transformers and timm import torchvision, too, where it is installed.
    """
    is_installed = importlib.util.find_spec("torchvision") is not None
    if (
        not is_installed
        or not torch.__version__.endswith("+cpu")
        or "+cpu" in importlib.metadata.version("torchvision")
    ):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


NETWORKS = [
    Network(**{**row, "shape": tuple(row["shape"])})
    for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["network"]
]
ENTRIES = [
    Entry(
        network.bed,
        network.make,
        functools.partial(network.draw, 2),
        tokens=network.tokens,
        next_tokens=network.next_tokens,
    )
    for network in NETWORKS
    if network.bed
]
