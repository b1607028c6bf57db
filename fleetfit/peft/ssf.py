"""SSF: every layer's output scaled and shifted, per channel (Lian et al., NeurIPS 2022).

A vector of factors and one of terms after every linear layer, convolution and norm of the backbone, all else frozen;
ReeFL (ICML 2024, appendix A) fine-tunes with it. 8,448 numbers per block of DeiT-S.

Differs from the paper: factors begin at one and terms at zero, so that the model begins unchanged; there they are drawn
around that. A classifier is trained as it is, so nothing is put into it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fleetfit.anatomy import Architecture, State
from fleetfit.errors import ModelError
from fleetfit.peft._tuned import ADDED, Tuned

_KINDS = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.RMSNorm, nn.BatchNorm2d, nn.GroupNorm)
_MAPS = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)


class ScaleShift(nn.Module):
    """A factor and a term per channel."""

    def __init__(self, channels: int, maps: bool) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.maps = maps

    def forward(self, x: Tensor) -> Tensor:
        """Return x, [..., channels] or maps [B, channels, height, width], scaled and shifted."""
        if self.maps:
            return x * self.scale[:, None, None] + self.shift[:, None, None]
        return x * self.scale + self.shift


@dataclass(frozen=True)
class Ssf(Tuned):
    """The family; made by `ssf`."""

    def accepts(self, part: nn.Module) -> bool:
        """Return whether it is a linear layer, a convolution or a norm, with a weight."""
        return isinstance(part, _KINDS) and any(True for _ in part.parameters())

    def make_module(self, part: nn.Module) -> nn.Module:
        """Return the vectors of a layer, whose output they change from now on."""
        part.register_forward_hook(lambda part, _, output: part.get_submodule(ADDED)(output))
        weight = next(iter(part.parameters()))  # its first dimension is that of the output, for every kind
        return ScaleShift(len(weight), isinstance(part, _MAPS))

    def merge(self, state: State) -> State:
        """Return the tensors with each layer's factors and terms within its weight and bias.

        Raises:
            ModelError: A layer has no bias to add its terms to.
        """
        merged = {name: tensor for name, tensor in state.items() if not self.is_new(name)}
        for layer in self.places:
            if (scale := state.get(f"{layer}.{ADDED}.scale")) is None:
                continue
            if f"{layer}.bias" not in state:
                raise ModelError(f"SSF cannot be merged into {layer}: it has no bias to add the terms to.")
            weight = state[f"{layer}.weight"]
            merged[f"{layer}.weight"] = weight * scale.view(-1, *[1] * (weight.dim() - 1))
            merged[f"{layer}.bias"] = state[f"{layer}.bias"] * scale + state[f"{layer}.{ADDED}.shift"]
        return merged


def ssf(architecture: Architecture, targets: tuple[str, ...] = ("*",)) -> Architecture:
    """Put factors and terms behind the backbone's layers.

    Args:
        architecture: The model family.
        targets: Patterns of the layers' names; all by default.

    Raises:
        ModelError: No layer has such a name.
    """
    return Ssf(architecture, tuple(targets))
