"""The classifiers of transformers: one module on the class token, of the kind that `[model] head` names."""

from collections.abc import Callable
from typing import Literal, get_args

from torch import Tensor, nn

from fleetfit.errors import ModelError

HeadKind = Literal["linear", "pooler", "norm"]
"""What stands before a classifier's linear layer: nothing, a layer with tanh (BERT's pooler), or a norm (ViT's)."""


class TokenHead(nn.Module):
    """A classifier on the class token.

    Attributes:
        kind: What stands before its linear layer.
    """

    def __init__(
        self, kind: HeadKind, hidden: int, classes: int, norm: Callable[[int], nn.Module], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.kind = kind
        if kind == "norm":
            self.norm = norm(hidden)
        elif kind == "pooler":
            self.pooler = nn.Linear(hidden, hidden)
        self.fc, self.drop = nn.Linear(hidden, classes), nn.Dropout(dropout)

    def forward(self, token: Tensor) -> Tensor:
        """Return logits [B, classes] of class tokens [B, hidden]."""
        if self.kind == "norm":
            token = self.norm(token)
        elif self.kind == "pooler":
            token = self.pooler(token).tanh()
        logits: Tensor = self.fc(self.drop(token))
        return logits


def check_head(kind: str) -> None:
    """Refuse a kind that there is not.

    Raises:
        ModelError: There is no such kind.
    """
    if kind not in get_args(HeadKind):
        raise ModelError(f'head must be "linear", "pooler" or "norm", got {kind!r}.')
