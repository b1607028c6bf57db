"""The model's tensors as safetensors, and config.json: what the model is, what it takes, when samples leave early."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from fleetfit.inference.export.graphs import Prepared
from fleetfit.inference.export.shipped import Shipped

FORMAT = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_tensors(module: nn.Module, path: Path) -> None:
    """Write all parameters and buffers of a module, batch-norm statistics included, under their own names."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
    save_file(state, path, metadata={"format": "pt"})


def config_of(shipped: Shipped, onnx: dict[str, Any]) -> dict[str, Any]:
    """Return what `config.json` says.

    Args:
        shipped: The model.
        onnx: The files of each variant.
    """
    data, x = shipped.data, shipped.samples("test", 2)[0]
    prepared = Prepared(data)
    policy = shipped.policy
    return {
        "fleetfit_export": FORMAT,
        "model": shipped.facts.get("model", type(shipped.architecture).__name__),
        "level": shipped.level,
        "sizes": dict(shipped.sizes),
        "exits": list(shipped.exits),
        "task": data.task,
        "classes": data.classes,
        "class_names": list(getattr(data, "class_names", ())),
        "input": {
            "shape": list(x.shape[1:]),
            "dtype": str(x.dtype).removeprefix("torch."),
            "inside_the_graph": {
                "scale": _listed(prepared.scale),
                "shift": _listed(prepared.shift),
                "resize": prepared.resize and list(prepared.resize),
            },
            "vocabulary": data.vocabulary,
            "padding": data.padding,
        },
        "onnx": onnx,
        "policy": None if policy is None else {
            "measure": policy.measure, "thresholds": list(policy.thresholds), "temperatures": list(policy.temperatures)
        },
    }  # fmt: skip


def write_config(config: dict[str, Any], folder: Path) -> None:
    """Write `config.json`."""
    (folder / CONFIG).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _listed(value: torch.Tensor | None) -> list[float] | None:
    return None if value is None else np.atleast_1d(value.numpy()).ravel().astype(float).tolist()
