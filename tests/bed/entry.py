"""What the bed holds of each module, and batches of two samples."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """A module in somebody's style: a maker of new instances, and one of a batch of two samples.

    `tokens` is the vocabulary of a module of tokens. `narrow` calls the same constructor with its widths times a
    factor. `limit` names a limit for which a derivation may refuse the module.
    """

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[], Tensor]
    tokens: int = 0
    narrow: Callable[[float], nn.Module] | None = None
    next_tokens: bool = False
    limit: str = ""


def images(channels: int = 3, side: int = 16) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def vectors(width: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, width, generator=torch.Generator().manual_seed(0))


def series(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def sentences(vocabulary: int, length: int) -> Callable[[], Tensor]:
    """Token 0 is left to padding."""
    return lambda: torch.randint(1, vocabulary, (2, length), generator=torch.Generator().manual_seed(0))


def quiet(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Make a module without PyTorch's warnings of what it no longer recommends; tests take them for errors."""

    def make_quietly() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return make_quietly
