"""LoRA: a product of two thin matrices beside the query and value projections (Hu et al., ICLR 2022), by way of peft.

W x becomes W x + (alpha / rank) B A x, with W frozen, A [rank, in] drawn and B [out, rank] zero at first; all else is
frozen but the classifiers. Rank 32 and alpha 64 are those of ReeFL (ICML 2024, appendix A): 49,152 numbers per block of
DeiT-S. Federated averages take A and B apart, as the papers do; the average of B A is not that, and
`method.options.lora_product` takes it.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fleetfit.anatomy import Architecture, State, unwrap
from fleetfit.errors import MissingExtra, ModelError
from fleetfit.peft._tuned import Tuned

A, B = "lora_A.default.weight", "lora_B.default.weight"
"""What peft calls the two matrices of a layer."""
BASE = "base_layer"
"""What peft calls the layer itself."""


@dataclass(frozen=True)
class Lora(Tuned):
    """The family; made by `lora`, which says what the fields mean."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ModelError(
                f"[peft] rank must be at least 1 and alpha above 0, got {self.rank} and {self.alpha}.",
                key="peft.rank" if self.rank < 1 else "peft.alpha",
            )
        super().__post_init__()

    def accepts(self, part: nn.Module) -> bool:
        """Return whether it is a linear layer, or GPT-2's, which keeps its weight turned: [in, out]."""
        return isinstance(part, nn.Linear) or _is_turned(part)

    def add_modules(self, module: nn.Module, names: list[str]) -> None:
        """Let peft replace the linear layers."""
        LoraConfig, inject_adapter_in_model, _ = _import_peft()
        turned = {name for name in names if _is_turned(module.get_submodule(name))}
        for some in (turned, set(names) - turned):
            if some:
                pattern = "|".join(re.escape(name) for name in sorted(some))
                config = LoraConfig(
                    r=self.rank,
                    lora_alpha=self.alpha,
                    target_modules=f"({pattern})",
                    fan_in_fan_out=some is turned,
                )
                inject_adapter_in_model(config, module)

    def is_new(self, name: str) -> bool:
        """Return whether a tensor is one of the thin matrices."""
        return name.endswith((A, B))

    def rename_tensors(self, state: State) -> State:
        """Return another model's tensors by peft's names."""
        renamed = {}
        for name, tensor in super().rename_tensors(state).items():
            layer, _, kind = name.rpartition(".")
            renamed[f"{layer}.{BASE}.{kind}" if layer in self.places else name] = tensor
        return renamed

    def merge(self, state: State) -> State:
        """Return the tensors with W + (alpha / rank) B A for W, computed in double precision."""
        merged = {name: t for name, t in state.items() if not self.is_new(name) and f".{BASE}." not in name}
        for layer in self.places:
            for kind in ("weight", "bias"):
                if (tensor := state.get(f"{layer}.{BASE}.{kind}")) is not None:
                    merged[f"{layer}.{kind}"] = tensor
            if f"{layer}.{B}" in state:
                product = state[f"{layer}.{B}"].double() @ state[f"{layer}.{A}"].double()
                product = product.T if _is_turned(self._plain.get_submodule(layer)) else product
                weight = merged[f"{layer}.weight"]
                merged[f"{layer}.weight"] = (weight.double() + self.alpha / self.rank * product).to(weight.dtype)
        return merged


def _is_turned(part: nn.Module) -> bool:
    return (type(part).__module__, type(part).__name__) == ("transformers.pytorch_utils", "Conv1D")


def lora(
    architecture: Architecture, rank: int = 32, alpha: float = 64.0, targets: tuple[str, ...] | None = None
) -> Architecture:
    """Put thin matrices beside linear layers.

    Args:
        architecture: The model family.
        rank: Rows of A and columns of B.
        alpha: The product is multiplied by alpha / rank.
        targets: Patterns of the names of the linear layers; by default peft's table for models of transformers, such as
            `["*.q_proj", "*.v_proj"]` for Llama, and `["*.query", "*.value"]` for others.

    Raises:
        ModelError: No linear layer has such a name.
        MissingExtra: peft is not installed.
    """
    return Lora(architecture, tuple(_find_targets(architecture) if targets is None else targets), rank, alpha)


def _find_targets(architecture: Architecture) -> list[str]:
    """Return the patterns of peft's table for the model of transformers that a derived family has inside."""
    net = getattr(unwrap(architecture), "net", nn.Module())
    kinds = {str(getattr(getattr(part, "config", None), "model_type", "")) for part in net.modules()} - {""}
    known = _import_peft()[-1] if kinds else {}
    names = next((known[kind] for kind in sorted(kinds) if isinstance(known.get(kind), list)), ["query", "value"])
    return [f"*.{name}" for name in names]


def _import_peft() -> tuple[Any, Any, Mapping[str, Any]]:
    """Return peft's configuration, the function that puts the matrices in, and its table of targets."""
    try:
        with _silence_loggers("torchao", "torch.utils._pytree"):
            from peft import LoraConfig, inject_adapter_in_model
            from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TARGETS
    except ImportError:
        raise MissingExtra("peft", "LoRA") from None
    return LoraConfig, inject_adapter_in_model, TARGETS


@contextlib.contextmanager
def _silence_loggers(*names: str) -> Iterator[None]:
    """Let loggers print errors only: peft imports torchao, which warns of kernels that LoRA does not use."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
