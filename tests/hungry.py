"""Models that a device cannot train, for tests: run files name `hungry:killed`, `hungry:full` and `hungry:endless`."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tiny import Tiny, TinyNet
from torch import nn

_SMALL = 5  # channels of axis "a" up to which all is well


@dataclass(frozen=True)
class Hungry(Tiny):
    """Its levels of more than a few channels do something dreadful when they run."""

    what: Callable[[], Any] = int

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        module = super().build(axes, exits)
        assert isinstance(module, TinyNet)
        if axes["a"] > _SMALL:
            module.stem.register_forward_pre_hook(lambda _, inputs: None if inputs[0].is_meta else self.do())
        return module

    def do(self) -> None:
        self.what()


def killed() -> Hungry:
    """As the kernel does where no memory is left."""
    return Hungry(what=lambda: os.kill(os.getpid(), signal.SIGKILL))


def full() -> Hungry:
    """More memory than any machine has."""
    return Hungry(what=lambda: torch.empty(2**45))


def endless() -> Hungry:
    """A step that takes longer than anybody waits."""
    return Hungry(what=lambda: time.sleep(600))
