"""Ree: one recurrent exit for all depths of a backbone (ReeFL, Lee et al., ICML 2024, section 3.2).

After every block the backbone's class token joins a queue behind a meta token, and one small transformer block, the
same at all depths, reads the queue (Eq. 2). Its output for the meta token is added to the class token for the
classifier, which all exits share (Eq. 3); its output for the newest token replaces that token in the backbone (Eq. 4).
`recurrent` puts it onto any model family whose module has `start`, `segment` and `head`, and one state size in all
layers: ViT, BERT, Vision Mamba, or one's own (`ExitModel.token` returns the class token).

Ree's block has its norms before attention and MLP; attention works on `bottleneck` features in `heads` heads. Only the
two output tokens that are used are computed, which is exact.

The shared classifier is of the kind that the backbone's are (`[model] head` of BERT, ViT and Vision Mamba), so that all
methods of a comparison have the same; a backbone of one's own gets layer norm and a linear layer.

All of it begins as in the authors' code: weights, positions and meta token from a normal of deviation 0.02 cut off at
two deviations, biases at zero. Eq. 4 overwrites the class token after every block, so Ree's output has to begin small:
with PyTorch's own initialization a pretrained token is lost.

Differs from the paper's authors: attention is divided by the root of a head's size; their code divides by that of all
heads together. Which token the queue keeps, Eqs. 2 and 4 leave open: the modulated one, as in their code, or
(`queue = "original"`) the backbone's. A classifier begins as the backbone's last one, where a checkpoint has one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fleetfit.anatomy import (
    Architecture,
    ArchitectureWrapper,
    Axis,
    Carry,
    ExitModel,
    HasSegments,
    State,
    build_module,
    default_sizes,
    make_input,
)
from fleetfit.anatomy.meta import on_meta
from fleetfit.errors import ModelError
from fleetfit.models.transformer import TokenHead, initialize

BACKBONE = "backbone."
"""The prefix of the backbone's tensors."""
POSITION_AXIS, MLP_AXIS = "ree_places", "ree_mlp"
"""The axes of Ree: rows of its position table, and features inside its MLP."""
_HEAD = re.compile(r"heads\.(\d+)\.")
_STD = 0.02


class Ree(nn.Module):
    """The shared block, with its meta token and positions."""

    def __init__(self, width: int, inner: int, rows: int, heads: int, bottleneck: int) -> None:
        super().__init__()
        self.meta = nn.Parameter(torch.empty(width))
        self.positions = nn.Parameter(torch.empty(rows, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, bottleneck) for _ in range(3))
        self.out = nn.Linear(bottleneck, width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.heads = heads
        if not self.meta.is_meta:
            initialize(self, _STD)
            nn.init.trunc_normal_(self.meta, std=_STD, a=-2 * _STD, b=2 * _STD)  # above it counts as a bias

    def forward(self, queue: list[Tensor], blocks: list[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs for the meta token and the newest token, m_0 and m_l, each [B, width] (Eq. 2).

        Args:
            queue: Tokens [B, width], oldest first.
            blocks: The block behind which each was read: its row of the position table.
        """
        meta = self.meta.expand(len(queue[0]), -1)
        positions = torch.stack(
            [self.positions[row] for row in (0, *blocks)]
        )  # a list would be copied synchronously to a GPU
        tokens = torch.stack([meta, *queue], dim=1) + positions
        normed = self.norm1(tokens)
        step = len(queue)  # every `step`-th token: the first and the last
        query, key, value = map(
            self._split_heads, (self.query(normed[:, ::step]), self.key(normed), self.value(normed))
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        ends = tokens[:, ::step] + self.out(mixed.transpose(1, 2).flatten(2))
        ends = ends + self.fc2(F.gelu(self.fc1(self.norm2(ends))))
        return ends[:, 0], ends[:, 1]

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class RecurrentModule(ExitModel):
    """A backbone without its classifiers, Ree, and the shared classifier.

    The carry: that of the backbone, the queue, and the classifier's input, m_0 + z [B, width].
    """

    def __init__(self, family: "Recurrent", axes: Mapping[str, int], exits: tuple[int, ...]) -> None:
        super().__init__()
        self.exits, self.modulate, self.original = exits, family.modulate, family.queue == "original"
        self.stops = family.list_stops(exits)
        module = family.inner.build({name: axes[name] for name in family.inner.axes}, self.stops)
        heads = getattr(module, "heads", None)
        if not isinstance(module, HasSegments) or not isinstance(heads, nn.ModuleDict):
            raise ModelError(
                "ReeFL needs a backbone that runs block by block, with start, segment and head, and its classifiers "
                "in an nn.ModuleDict named heads. Inherit from fleetfit.architecture.ExitModel."
            )
        width = family.get_token_width(axes)
        token_heads = [head for head in heads.values() if isinstance(head, TokenHead)]
        head = token_heads[-1] if token_heads else TokenHead("norm", width, axes["classes"], nn.LayerNorm)
        initialize(head, _STD)
        del module.heads
        self.backbone = module
        self.ree = (
            Ree(width, axes[MLP_AXIS], axes[POSITION_AXIS], family.heads, family.bottleneck) if family.ree else None
        )
        self.classifier = head

    def start(self, x: Tensor) -> Carry:
        """Return the backbone's state, an empty queue, and the class token."""
        backbone: Any = self.backbone
        carry = backbone.start(x)
        return carry, (), backbone.token(carry)

    def segment(self, i: int, carry: Carry) -> Carry:
        """Run the blocks after exit i-1 up to exit i, and Ree after each of them (Eqs. 2 and 4)."""
        backbone: Any = self.backbone
        state, queue, fused = carry
        before = self.exits[i - 1] if i else 0
        for step, stop in enumerate(self.stops):
            if not before < stop <= self.exits[i]:
                continue
            state = backbone.segment(step, state)
            token = fused = backbone.token(state)
            if self.ree is None:
                continue
            first, last = self.ree([*queue, token], list(self.stops[: step + 1]))
            fused = first + token
            if self.modulate:
                state = backbone.with_token(state, last)
            queue = (*queue, last if self.modulate and not self.original else token)
        return state, queue, fused

    def head(self, i: int, carry: Carry) -> Tensor:
        """Return the logits [B, classes] of exit i (Eq. 3)."""
        return self.classifier(carry[2])


@dataclass(frozen=True)
class Recurrent(ArchitectureWrapper):
    """A model family with one recurrent exit; made by `recurrent`, which explains the fields."""

    input_shape: tuple[int, ...]
    ree: bool
    modulate: bool
    at: str
    queue: str
    heads: int
    bottleneck: int
    mlp: float
    more = "Ree's recurrent exit, or the classifier that all exits share,"

    def __post_init__(self) -> None:
        super().__post_init__()
        ree_axes = {}
        if self.ree:
            inner = max(1, int(self.mlp * self._width[0]))
            ree_axes = {MLP_AXIS: Axis(inner), POSITION_AXIS: Axis(self.blocks + 1, scaled=False, ordered=True)}
        object.__setattr__(self, "axes", {**self.inner.axes, **ree_axes})

    def list_stops(self, exits: tuple[int, ...]) -> tuple[int, ...]:
        """Return the block counts after which Ree reads, for a module with these exits."""
        return exits if self.at == "exits" else tuple(p for p in self.positions if p <= exits[-1])

    def get_token_width(self, axes: Mapping[str, int]) -> int:
        """Return the width of the class token when the axes have these sizes."""
        width, axis = self._width
        return width if axis is None else axes[axis]

    def sizes(self, width: float) -> dict[str, int]:
        """Return the size of each axis at a width."""
        ree_axes = {name: axis for name, axis in self.axes.items() if name not in self.inner.axes}
        return {**self.inner.sizes(width), **default_sizes(ree_axes, width)}

    @cached_property
    def _width(self) -> tuple[int, str | None]:
        """The width of the class token in the full model, and the axis that it follows, if any."""
        full = {name: axis.size for name, axis in self.inner.axes.items()}
        width, *later = self._measure_widths(full)
        changed = next((i for i, other in enumerate(later) if other != width), None)
        if changed is not None:
            raise ModelError(
                f"ReeFL needs a backbone with the same state size in all layers, but this one's is {width} at its "
                f"start and {later[changed]} after block {self.positions[changed]}. Use a vision transformer, BERT or "
                "Vision Mamba.",
                key="model",
            )
        for name, axis in self.inner.axes.items():
            if axis.scaled and self._measure_widths({**full, name: axis.size + axis.granule}, 0)[0] != width:
                if width != axis.size:
                    raise ModelError(
                        f'ReeFL needs an axis for its class token; "{name}" has {axis.size} channels, the token has '
                        f"{width}."
                    )
                return width, name
        return width, None

    def _measure_widths(self, sizes: Mapping[str, int], segments: int | None = None) -> list[int]:
        """Return the width of the class token at the start and after each segment, on the meta device."""
        with on_meta(), torch.no_grad():
            module = build_module(self.inner, sizes, tuple(self.positions))
            if not isinstance(module, HasSegments) or not hasattr(module, "token"):
                raise ModelError(
                    "ReeFL needs a backbone that runs block by block, with start, segment, head, token and "
                    "with_token. Have build() return a fleetfit.architecture.ExitModel, which has the last two. The "
                    "levels of a "
                    "plain module have none of them: use another method, such as scalefl.",
                    key="method.name",
                )
            backbone: Any = module
            carry = backbone.start(make_input(self.inner, self.input_shape, 2))
            widths = [backbone.token(carry).shape[-1]]
            for i in range(len(self.positions) if segments is None else segments):
                carry = backbone.segment(i, carry)
                widths.append(backbone.token(carry).shape[-1])
        return widths

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        """Return the module with these sizes and exits."""
        return RecurrentModule(self, axes, exits)

    def trains(self, name: str) -> bool:
        """Return whether a tensor is trained: all of Ree, and those of the backbone that `[peft]` trains."""
        return super().trains(name.removeprefix(BACKBONE)) if name.startswith(BACKBONE) else True

    def is_new(self, name: str) -> bool:
        """Return whether a checkpoint may lack a tensor."""
        return super().is_new(name.removeprefix(BACKBONE)) if name.startswith(BACKBONE) else True

    def rename_tensors(self, state: State) -> State:
        """Return another model's tensors by the names that they have here, its last classifier's too."""
        adopted: dict[str, Tensor] = {}
        for name, tensor in super().rename_tensors(state).items():
            head = _HEAD.match(name)
            if name.startswith((BACKBONE, "ree.", "classifier.")):
                adopted[name] = tensor
            elif head is None:
                adopted[BACKBONE + name] = tensor
            elif int(head[1]) == self.blocks:
                adopted[f"classifier.{name.removeprefix(head[0])}"] = tensor
        return adopted


def recurrent(
    architecture: Architecture,
    input_shape: tuple[int, ...],
    ree: bool = True,
    modulate: bool = True,
    at: Literal["blocks", "exits"] = "blocks",
    queue: Literal["modulated", "original"] = "modulated",
    heads: int = 8,
    bottleneck: int = 16,
    mlp: float = 1.35,
) -> Recurrent:
    """Add one recurrent exit to a model family.

    Args:
        architecture: The backbone.
        input_shape: Shape of one sample.
        ree: Whether to use Ree. Without it, the class token goes directly to the shared classifier (appendix G).
        modulate: Whether Ree's token replaces the backbone's (Eq. 4).
        at: Run Ree after every block, or at exits only (Table 5).
        queue: Which tokens the queue keeps.
        heads: Heads of Ree's attention.
        bottleneck: Features of Ree's attention; a multiple of `heads`.
        mlp: Features inside Ree's MLP, as a multiple of the token's width, rounded down.

    Raises:
        ModelError: The backbone cannot be run block by block, its state changes its size, or the sizes do not fit.
    """
    if heads < 1 or bottleneck % heads:
        raise ModelError(f"heads must be at least 1 and divide bottleneck = {bottleneck}, got {heads}.", key="heads")
    if not mlp > 0:
        raise ModelError(f"mlp must be above 0, got {mlp}.", key="mlp")
    if at not in ("blocks", "exits"):
        raise ModelError(f'at must be "blocks" or "exits", got {at!r}.', key="at")
    if queue not in ("modulated", "original"):
        raise ModelError(f'queue must be "modulated" or "original", got {queue!r}.', key="queue")
    return Recurrent(architecture, tuple(input_shape), ree, modulate, at, queue, heads, bottleneck, mlp)
