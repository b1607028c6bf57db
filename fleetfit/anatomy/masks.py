"""Masks for padded tokens: what forward of an instance gets beside its tokens."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fleetfit.anatomy.kernels import skip_fast_path, skip_recomputation

_DTYPES = {"int64": torch.int64, "bool": torch.bool, "float32": torch.float32}
_QUESTIONS = (Tensor.__bool__, Tensor.__contains__, Tensor.item, torch.equal, torch.allclose)
_READS = (Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.item)
TOKENS, PADDING, LENGTHS = KINDS = ("tokens", "padding", "lengths")


@dataclass(frozen=True)
class InputMask:
    """The argument of forward that tells tokens from padding.

    Attributes:
        padding: The token that fills short texts.
        argument: The argument of forward; "" where the module needs none.
        kind: What the argument marks: "tokens" or "padding"; or it is the "lengths" of the texts.
        dtype: Its type.
    """

    padding: int
    argument: str = ""
    kind: str = TOKENS
    dtype: str = "int64"

    def find_tokens(self, x: Tensor) -> Tensor:
        """Return which places [batch, places] have tokens; the first one of a text without any does."""
        tokens = x != self.padding
        first = torch.arange(x.shape[1], device=x.device) == 0
        return tokens | (first & (tokens.sum(1, keepdim=True) == 0))

    def make_arguments(self, x: Tensor) -> dict[str, Tensor]:
        """Return what forward gets beside token ids [batch, places]."""
        if not self.argument:
            return {}
        tokens = self.find_tokens(x)
        if self.kind == LENGTHS:
            return {self.argument: tokens.sum(1)}
        return {self.argument: (tokens if self.kind == TOKENS else ~tokens).to(_DTYPES[self.dtype])}

    def to_payload(self) -> list[Any]:
        """Return it as plain values."""
        return [self.padding, self.argument, self.kind, self.dtype]

    @staticmethod
    def from_payload(payload: Any) -> "InputMask | None":
        """Return the mask of plain values.

        Raises:
            ValueError: They are not those of one.
        """
        if payload is None:
            return None
        padding, argument, kind, dtype = payload
        if type(padding) is not int or not isinstance(argument, str) or kind not in KINDS or dtype not in _DTYPES:
            raise ValueError("a mask that is none")
        return InputMask(padding, argument, kind, dtype)


def call_instance(net: nn.Module, x: Tensor, mask: InputMask | None, answers: Sequence[bool] = ()) -> Any:
    """Return what an instance gives for samples [batch, ...].

    Args:
        net: The instance.
        x: The samples.
        mask: Its mask for padding.
        answers: What forward reads from samples, which have no numbers on the meta device.
    """
    arguments = {} if mask is None else mask.make_arguments(x)
    if not (x.is_meta and (arguments or answers)):
        with contextlib.nullcontext() if torch.compiler.is_compiling() else skip_recomputation():
            return net(x, **arguments)
    # PyTorch's encoders have no fast path for masks on the meta device
    with skip_fast_path(), skip_recomputation(), _MetaReads([*arguments.values()], x.shape[1], answers):
        return net(x, **arguments)


class _MetaReads(TorchFunctionMode):
    """Answers what forward asks on the meta device.

    Not all of a mask is so, and the longest text fills all places: modules ask whether there is padding at all, and
    take a faster path without. Other questions get the answers of the example.
    """

    def __init__(self, masks: list[Tensor], places: int, answers: Sequence[bool]) -> None:
        super().__init__()
        self._masks, self._places, self._answers = masks, places, iter(answers)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        is_asked = bool(tensors) and all(any(x is mask for mask in self._masks) for x in tensors)
        if is_asked and func in _READS:
            return False if func is Tensor.__bool__ or tensors[0].dtype == torch.bool else self._places
        try:
            out = func(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError):
            answer = next(self._answers, None) if func in _QUESTIONS else None
            if answer is None:
                raise
            return answer
        if is_asked and isinstance(out, Tensor):
            self._masks.append(out)
        return out
