"""Every built-in model at a size for tests: its keys, and data that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fleetfit import names
from fleetfit.anatomy import Architecture
from fleetfit.core import Problem
from fleetfit.core.tasks import get_task
from fleetfit.data import Data
from fleetfit.factories import call_factory

CLASSES, VOCABULARY, PADDING = 4, 20, 0


@dataclass(frozen=True)
class Small:
    """How a test uses a model.

    Attributes:
        shape: Of one sample; (L,) for tokens.
        keys: Keys of [model] that make it small.
        kind: "images", "texts" (tokens with a class) or "next" (tokens with the next ones).
        family: The model that it is a size of: that one is trained by the tests, this one only built.
    """

    shape: tuple[int, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "images"
    family: str = ""


SMALL: dict[str, Small] = {
    "cnn": Small((1, 8, 8)),
    "resnet": Small((3, 8, 8), {"depth": 8}),
    "resnet20": Small((3, 8, 8)),
    "resnet32": Small((3, 8, 8), family="resnet"),
    "resnet56": Small((3, 8, 8), family="resnet"),
    "resnet110": Small((3, 8, 8), family="resnet"),
    "resnet18": Small((3, 8, 8), {"base": 4}),
    "resnet34": Small((3, 8, 8), {"base": 4}, family="resnet18"),
    "vgg16": Small((3, 8, 8), {"base": 4, "wide": 12}),
    "msdnet": Small((3, 8, 8), {"layers": 4, "scales": 2, "base": 4, "growth": 4, "head_channels": 6}),
    "msdnet24": Small((3, 8, 8), family="msdnet"),
    "mobilenetv2": Small((3, 8, 8), {"width_multiplier": 0.25, "stride": 4, "top": 16}),
    "efficientnet_b0": Small((3, 8, 8), {"width_multiplier": 0.25, "stride": 4}),
    "efficientnet_b4": Small((3, 8, 8), {"stride": 4}, family="efficientnet_b0"),
    "mlp": Small((9,), {"hidden": 12, "layers": 5}),
    "mlp_2nn": Small((1, 8, 8), {"hidden": [12, 10]}),
    "fedavg_cnn": Small((1, 8, 8)),
    "fedavg_cifar_cnn": Small((3, 8, 8)),
    "char_lstm": Small((7,), {"hidden": 10}, "next"),
    "word_lstm": Small((7,), {"embedding": 6, "hidden": 10}, "next"),
    "bert": Small(
        (7,),
        {"hidden": 12, "layers": 3, "attention_heads": 3, "intermediate": 18, "max_positions": 8},
        "texts",
    ),
    "bert_tiny": Small((7,), {}, "texts", family="bert"),
    "bert_small": Small((7,), {}, "texts", family="bert"),
    "bert_base": Small((7,), {}, "texts", family="bert"),
    "vit": Small((3, 8, 8), {"hidden": 12, "depth": 3, "attention_heads": 3, "intermediate": 18, "patch": 4}),
    "deit_ti": Small((3, 8, 8), {"patch": 4}, family="vit"),
    "deit_s": Small((3, 8, 8), {"patch": 4}, family="vit"),
    "deit_b": Small((3, 8, 8), {"patch": 4}, family="vit"),
    "vim": Small((3, 8, 8), {"depth": 3, "hidden": 12, "patch": 4, "rank": 3, "state": 4}),
    "vim_ti": Small((3, 8, 8), {"patch": 4}, family="vim"),
}


def architecture_of(name: str, **keys: Any) -> Architecture:
    """Return a model at its size for tests, as a run would make it."""
    small = SMALL[name]
    arguments = {"classes": VOCABULARY if small.kind == "next" else CLASSES, "channels": small.shape[0],
             "input_shape": small.shape, "vocabulary": 0 if small.kind == "images" else VOCABULARY,
             "padding": -1 if small.kind == "images" else PADDING}  # fmt: skip
    architecture: Architecture = call_factory(
        names.resolve("models", name), name, "[model]", {**small.keys, **keys}, **arguments
    )
    return architecture


def spec_of(name: str, exits: tuple[int, ...]) -> dict[str, Any]:
    """Return the spec from which a worker rebuilds the problem."""
    small = SMALL[name]
    tokens = small.kind != "images"
    arguments = {"classes": VOCABULARY if small.kind == "next" else CLASSES, "channels": small.shape[0],
             "input_shape": list(small.shape), "vocabulary": VOCABULARY if tokens else 0,
             "padding": PADDING if tokens else -1}  # fmt: skip
    return {"model": {"name": name, **small.keys}, "given": arguments, "task": task_of(name), "exits": list(exits)}


def task_of(name: str) -> str:
    """Return the task of the model's data."""
    return "next_token" if SMALL[name].kind == "next" else "classification"


def data_of(name: str, n: int = 24) -> Data:
    """Return noise of the right kind; texts are padded at their ends, each to another length."""
    small, rng = SMALL[name], torch.Generator().manual_seed(0)
    splits = {"train": torch.arange(n // 2), "test": torch.arange(n // 2, n)}
    y = torch.arange(n) % CLASSES
    if small.kind == "images":
        x = torch.randint(0, 256, (n, *small.shape), generator=rng, dtype=torch.uint8)
        return Data("noise", x, y, splits, CLASSES, mean=(0.5,), std=(0.25,))
    x = torch.randint(1, VOCABULARY, (n, *small.shape), generator=rng)
    lengths = 2 + torch.arange(n) % (small.shape[0] - 1)
    padded = torch.arange(small.shape[0]) >= lengths[:, None]
    x[padded] = PADDING
    if small.kind == "texts":
        return Data("noise", x, y, splits, CLASSES, vocabulary=VOCABULARY, padding=PADDING)
    following = torch.roll(x, -1, 1)
    following[:, -1] = 1
    following[padded] = -100
    return Data("noise", x, following, splits, VOCABULARY, task="next_token", vocabulary=VOCABULARY, padding=PADDING)


def sentences(n: int = 600) -> Data:
    """Token ids whose class is that of their first word, padded to different lengths."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(5, 20, (n, 7), generator=rng)
    y = torch.randint(0, 4, (n,), generator=rng)
    x[:, 0] = 1 + y
    x[torch.arange(7) >= 3 + (torch.arange(n) % 5)[:, None]] = 0
    splits = {"train": torch.arange(n // 2), "validation": torch.arange(n // 2, 3 * n // 4),
              "test": torch.arange(3 * n // 4, n)}  # fmt: skip
    return Data("sentences", x, y, splits, 4, vocabulary=20, padding=0)


def problem_of(name: str, exits: tuple[int, ...] = ()) -> Problem:
    """Return the problem of a model on its data; by default with the first and the last exit."""
    architecture = architecture_of(name)
    positions = tuple(architecture.positions)
    exits = exits or tuple(sorted({positions[0], architecture.blocks}))
    return Problem(architecture, SMALL[name].shape, get_task(task_of(name)), exits, spec=spec_of(name, exits))
