"""Vision Mamba (Zhu et al., ICML 2024) of any size: bidirectional state-space blocks over image patches.

Patches, a class token in the middle of them and learned positions go through blocks h + mixer(RMSNorm(h)); a mixer
projects to two streams of `inner` channels, scans one of them forwards and backwards over the tokens, gates the mean of
the two results with SiLU of the other stream and projects back (the authors' "bimamba v2" with the sum halved). An exit
is RMSNorm and a linear layer on the class token (`head` names other kinds). ReeFL (ICML 2024, appendix F) puts its
method on Vim-T: `vim_ti`.

Differs from the paper: the scan is plain PyTorch and not a CUDA kernel (`selective_scan.py`); stochastic depth, which
their fine-tuning switches off, is left out. Width cuts `hidden`, `inner` and `rank`, each by its own axis, and never
the states.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Architecture, Axis, ExitModel, blocked, segments
from fleetfit.models.selective_scan import SelectiveScan
from fleetfit.models.transformer import HeadKind, TokenHead, check_head

_EPSILON = 1e-5


class Mixer(nn.Module):
    """The bidirectional mixer of a block."""

    def __init__(self, architecture: "Vim", axes: Mapping[str, int]) -> None:
        super().__init__()
        hidden, inner = axes["hidden"], axes["inner"]
        sizes = (inner, axes["rank"], architecture.state, architecture.kernel)
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.forwards, self.backwards = SelectiveScan(*sizes), SelectiveScan(*sizes)
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [B, L, hidden] of tokens [B, L, hidden]."""
        x, gate = self.in_proj(tokens).chunk(2, dim=-1)
        x = x.transpose(1, 2)
        both = self.forwards(x) + self.backwards(x.flip(-1)).flip(0)
        mixed: Tensor = self.out_proj(both.transpose(0, 1) * F.silu(gate) / 2)
        return mixed


class VimBlock(nn.Module):
    """A residual block."""

    def __init__(self, architecture: "Vim", axes: Mapping[str, int]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(axes["hidden"], eps=_EPSILON)
        self.mixer = Mixer(architecture, axes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [B, L, hidden] of tokens [B, L, hidden]."""
        mixed: Tensor = self.mixer(self.norm(tokens))
        return tokens + mixed


class VimModule(ExitModel):
    """The module of one sub-model; its names are those of the full model.

    Attributes:
        class_place: Where the class token stands among the tokens.
    """

    def __init__(self, architecture: "Vim", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        hidden, patch, count = axes["hidden"], architecture.patch, architecture.patches
        self.exits, self.class_place = exits, count // 2
        self.patch_embedding = nn.Conv2d(architecture.input_shape[0], hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.position_embedding = nn.Parameter(torch.zeros(1, count + 1, hidden))
        self.blocks = nn.ModuleList(VimBlock(architecture, axes) for _ in range(exits[-1]))
        norm = partial(nn.RMSNorm, eps=_EPSILON)
        self.heads = nn.ModuleDict({str(e): TokenHead(architecture.head, hidden, axes["classes"], norm) for e in exits})
        if not self.class_token.is_meta:
            self._draw(architecture.blocks)

    @torch.no_grad()
    def _draw(self, depth: int) -> None:
        """Draw initial weights as the authors do; what is not named here has PyTorch's own or the scan's."""
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.position_embedding, std=0.02)
        kernel = self.patch_embedding.weight
        nn.init.trunc_normal_(kernel, std=kernel[0].numel() ** -0.5)
        nn.init.zeros_(self.patch_embedding.bias)  # type: ignore[arg-type]
        for part in self.modules():
            if isinstance(part, TokenHead):
                for layer in (x for x in part.children() if isinstance(x, nn.Linear)):
                    nn.init.trunc_normal_(layer.weight, std=0.02)
                    nn.init.zeros_(layer.bias)
            elif isinstance(part, Mixer):
                part.out_proj.weight /= depth**0.5

    def head(self, i: int, carry: Tensor) -> Tensor:
        """Return the logits [B, classes] of exit i, which looks at the class token."""
        logits: Tensor = self.heads[str(self.exits[i])](self.token(carry))
        return logits

    def token(self, carry: Tensor) -> Tensor:
        """Return the class token [B, hidden]."""
        return carry[:, self.class_place]

    def with_token(self, carry: Tensor, token: Tensor) -> Tensor:
        """Return the tokens with another class token."""
        return torch.cat([carry[:, : self.class_place], token[:, None], carry[:, self.class_place + 1 :]], dim=1)

    def start(self, x: Tensor) -> Tensor:
        """Return the tokens [B, L, hidden] of images [B, channels, height, width], the class token in the middle."""
        patches = self.patch_embedding(x).flatten(2).transpose(1, 2)
        before, after = patches[:, : self.class_place], patches[:, self.class_place :]
        token = self.class_token.expand(x.shape[0], -1, -1)
        return torch.cat([before, token, after], dim=1) + self.position_embedding


@dataclass(frozen=True)
class Vim(Architecture):
    """The family; made by `vim`, which says what the fields mean."""

    classes: int
    input_shape: tuple[int, ...]
    depth: int
    hidden: int
    patch: int
    expand: int
    rank: int
    state: int
    kernel: int
    head: HeadKind
    axes: Mapping[str, Axis] = field(init=False, repr=False, compare=False)
    blocks: int = field(init=False, repr=False, compare=False)
    patches: int = field(init=False, repr=False, compare=False)
    declared: Mapping[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_head(self.head)
        sides, least = self.input_shape[1:], min(self.depth, self.expand, self.rank, self.state, self.kernel)
        if len(sides) != 2 or self.patch < 1 or any(side < 1 or side % self.patch for side in sides):
            raise ModelError(
                f"Vision Mamba cuts images (channels, height, width) into patches of {self.patch} x {self.patch}, got "
                f"inputs of shape {self.input_shape}: set patch to a divisor of both sides, or resize the images.",
                key="patch",
            )
        if least < 1:
            raise ModelError(
                "depth, expand, rank, state and kernel of Vision Mamba must all be at least 1.", key="depth"
            )
        axes = {
            "hidden": Axis(self.hidden),
            "inner": Axis(self.expand * self.hidden),
            "rank": Axis(self.rank),
            "classes": Axis(self.classes, scaled=False),
        }
        declared = {"*.in_proj.weight": blocked(2, dim=0), "*.x_proj.weight": segments("rank", 2 * self.state, dim=0)}
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "blocks", self.depth)
        object.__setattr__(self, "patches", math.prod(side // self.patch for side in sides))
        object.__setattr__(self, "declared", declared)

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and a classifier after each block count in `exits`."""
        return VimModule(self, axes, exits)


def vim(
    classes: int = 10,
    input_shape: tuple[int, ...] = (3, 224, 224),
    depth: int = 24,
    hidden: int = 192,
    patch: int = 16,
    expand: int = 2,
    rank: int = 0,
    state: int = 16,
    kernel: int = 4,
    head: HeadKind = "norm",
) -> Vim:
    """Return the Vision Mamba family of a size.

    Args:
        classes: Classes; never cut.
        input_shape: Channels, height and width of the images.
        depth: Blocks; a classifier may sit after any of them.
        hidden: Channels of the tokens.
        patch: Side of a square patch; divides height and width.
        expand: Channels inside a mixer, as a multiple of `hidden`.
        rank: Channels from which step sizes are projected; 0 stands for a sixteenth of `hidden`, rounded up.
        state: States per channel; never cut.
        kernel: Tokens that the causal convolution sees.
        head: Kind of the classifiers: Vim's "norm", a "pooler" with tanh, or nothing before their "linear" layer.

    Raises:
        ModelError: The patches do not tile the images, or a size is below 1.
    """
    rank = rank or -(-hidden // 16)
    return Vim(classes, tuple(input_shape), depth, hidden, patch, expand, rank, state, kernel, head)


SIZES = {
    "vim_ti": Preset(
        "Vision Mamba, tiny (Vim-T): 24 bidirectional blocks of width 192; 7,148,008 parameters at 224x224, 1,000 "
        "classes.",
        {"depth": 24, "hidden": 192, "expand": 2, "rank": 0, "state": 16, "kernel": 4},
    ),
}
(vim_ti,) = make_presets(vim, SIZES)
