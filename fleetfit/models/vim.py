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
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.errors import ModelError
from fleetfit.factories import Preset, make_presets
from fleetfit.layout import Axis
from fleetfit.models.family import Family
from fleetfit.models.selective_scan import SelectiveScan
from fleetfit.models.transformer import HeadKind, TokenHead, TokenModule, check_head

_EPSILON = 1e-5


class Mixer(nn.Module):
    """The bidirectional mixer of a block."""

    def __init__(self, family: "Vim", axes: Mapping[str, int]) -> None:
        super().__init__()
        hidden, inner = axes["hidden"], axes["inner"]
        sizes = (inner, axes["rank"], family.state, family.kernel)
        self.in_proj = nn.Linear(hidden, 2 * inner, bias=False)
        self.forwards, self.backwards = SelectiveScan(*sizes), SelectiveScan(*sizes)
        self.out_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [B, L, hidden] of tokens [B, L, hidden]."""
        x, gate = self.in_proj(tokens).chunk(2, dim=-1)
        x = x.transpose(1, 2)
        both = self.forwards(x) + self.backwards(x.flip(-1)).flip(0)
        return self.out_proj(both.transpose(0, 1) * F.silu(gate) / 2)


class VimBlock(nn.Module):
    """A residual block."""

    def __init__(self, family: "Vim", axes: Mapping[str, int]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(axes["hidden"], eps=_EPSILON)
        self.mixer = Mixer(family, axes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [B, L, hidden] of tokens [B, L, hidden]."""
        return tokens + self.mixer(self.norm(tokens))


class VimModule(TokenModule):
    """A module of patches with the class token in the middle.

    Attributes:
        class_position: The position of the class token among the tokens.
    """

    stem_name = "patch_embedding"
    patch_embedding: nn.Conv2d

    def __init__(self, family: "Vim", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__(family, axes, exits)
        self.class_position = family.patches // 2
        self.class_token = nn.Parameter(torch.zeros(1, 1, axes["hidden"]))
        self.position_embedding = nn.Parameter(torch.zeros(1, family.patches + 1, axes["hidden"]))
        if not self.class_token.is_meta:
            self._initialize(family.blocks)

    @torch.no_grad()
    def _initialize(self, depth: int) -> None:
        """Draw initial weights as the authors do; other tensors have PyTorch's own or the scan's."""
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.position_embedding, std=0.02)
        kernel = self.patch_embedding.weight
        nn.init.trunc_normal_(kernel, std=kernel[0].numel() ** -0.5)
        nn.init.zeros_(self.patch_embedding.bias)  # type: ignore[arg-type]
        for module in self.modules():
            if isinstance(module, TokenHead):
                for layer in (x for x in module.children() if isinstance(x, nn.Linear)):
                    nn.init.trunc_normal_(layer.weight, std=0.02)
                    nn.init.zeros_(layer.bias)
            elif isinstance(module, Mixer):
                module.out_proj.weight /= depth**0.5

    def token(self, carry: Tensor) -> Tensor:
        """Return the class token [B, hidden]."""
        return carry[:, self.class_position]

    def with_token(self, carry: Tensor, token: Tensor) -> Tensor:
        """Return the tokens with another class token."""
        return torch.cat([carry[:, : self.class_position], token[:, None], carry[:, self.class_position + 1 :]], dim=1)

    def start(self, x: Tensor) -> Tensor:
        """Return the tokens [B, L, hidden] of images [B, channels, height, width], the class token in the middle."""
        patches = self.patch_embedding(x).flatten(2).transpose(1, 2)
        before, after = patches[:, : self.class_position], patches[:, self.class_position :]
        token = self.class_token.expand(x.shape[0], -1, -1)
        return torch.cat([before, token, after], dim=1) + self.position_embedding


@dataclass(frozen=True)
class Vim(Family):
    """The family; made by `vim`, which explains the fields."""

    module_class = VimModule
    classes: int
    input_shape: tuple[int, ...]
    blocks: int
    hidden: int
    patch: int
    expand: int
    rank: int
    state: int
    kernel: int
    head: HeadKind

    @cached_property
    def patches(self) -> int:
        """Number of patches."""
        return math.prod(side // self.patch for side in self.input_shape[1:])

    def _make_axes(self) -> dict[str, Axis]:
        return {"hidden": Axis(self.hidden), "inner": Axis(self.expand * self.hidden), "rank": Axis(self.rank)}

    def _build_stem(self, axes: Mapping[str, int]) -> nn.Module:
        return nn.Conv2d(self.input_shape[0], axes["hidden"], self.patch, stride=self.patch)

    def _build_block(self, axes: Mapping[str, int], i: int) -> nn.Module:
        return VimBlock(self, axes)

    def _build_head(self, axes: Mapping[str, int], e: int) -> nn.Module:
        return TokenHead(self.head, axes["hidden"], axes["classes"], partial(nn.RMSNorm, eps=_EPSILON))


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
        rank: Channels from which step sizes are projected; 0: a sixteenth of `hidden`, rounded up.
        state: States per channel; never cut.
        kernel: Tokens that the causal convolution sees.
        head: Kind of the classifiers: Vim's "norm", a "pooler" with tanh, or nothing before their "linear" layer.

    Raises:
        ModelError: The patches do not tile the images, or a size is below 1.
    """
    rank = rank or -(-hidden // 16)
    check_head(head)
    if len(input_shape) != 3 or patch < 1 or any(side < 1 or side % patch for side in input_shape[1:]):
        raise ModelError(
            f"Vision Mamba cuts images (channels, height, width) into patches of {patch} x {patch}, got inputs of "
            f"shape {tuple(input_shape)}. Set patch to a divisor of both sides, or resize the images.",
            key="patch",
        )
    if min(depth, expand, rank, state, kernel) < 1:
        raise ModelError("depth, expand, rank, state and kernel of Vision Mamba must all be at least 1.", key="depth")
    return Vim(classes, tuple(input_shape), depth, hidden, patch, expand, rank, state, kernel, head)


SIZES = {
    "vim_ti": Preset(
        "Vision Mamba, tiny (Vim-T): 24 bidirectional blocks of width 192; 7,148,008 parameters at 224x224, 1,000 "
        "classes.",
        {"depth": 24, "hidden": 192, "expand": 2, "rank": 0, "state": 16, "kernel": 4},
    ),
}
(vim_ti,) = make_presets(vim, SIZES)
