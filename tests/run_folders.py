"""Run folders for tests: small runs of many methods, and checkpoints taken apart and put together from outside."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fleetfit as ff
from fleetfit.api.run import prepare, run_remaining_rounds
from fleetfit.config import load_experiment
from fleetfit.rounds import loop as rounds

HERE = Path(__file__).parent
TINY: dict[str, Any] = {
    "seed": 3,
    "rounds": 3,
    "data": {"name": f"{HERE}/tiny.py:tiny_data", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": f"{HERE}/tiny.py:tiny", "dropout": 0.2},
    "fleet": {
        "levels": [0.3, 0.55, 1.0], "tolerance": 0.25, "groups": [{"budget": 0.3}, {"budget": 0.55}, {"budget": 1.0}]
    },
    "method": {"name": "scalefl"},
    "local": {"epochs": 1, "batch_size": 8, "lr": 0.05},
    "cohort": {"count": 3},
    "evaluate": {"every": 1, "statistics_samples": 60, "batch_size": 32},
    "engine": {"name": "local"},
}  # fmt: skip
DEEP = {"levels": [{"depth": 1, "budget": 0.5}, {"depth": 2, "budget": 0.8}, {"budget": 1.0}],
        "groups": [{"budget": 0.5}, {"budget": 0.8}, {"budget": 1.0}]}  # fmt: skip
VIT = {"data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
       "model": {"name": "vit", "hidden": 32, "depth": 3, "attention_heads": 4, "patch": 2}}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "scalefl, directions": {"cohort": {"count": 3, "selection": "diversity"}},
    "decoupled": {"method": {"name": "decoupled"}},
    "decoupled with fedadam": {"method": {"name": "decoupled", "options": {"fedadam": {}}}},
    "inclusivefl with fedadam": {"method": {"name": "inclusivefl", "options": {"fedadam": {}}}, "fleet": DEEP},
    "feddyn, lost by compression, losses": {
        "method": {"name": "heterofl", "options": {"feddyn": {}}},
        "local": {**TINY["local"], "compress": "int8"},
        "cohort": {"count": 3, "selection": "loss"},
    },
    "fedavgm, learned choice": {
        "method": {"name": "fedrolex", "options": {"fedavgm": {}}}, "cohort": {"count": 3, "selection": "rl"}
    },
    "adaptivefl": {"method": {"name": "adaptivefl"}},
    "reefl": {"method": {"name": "reefl", "estimate": "kept"}, "fleet": DEEP, **VIT},
    "lora": {"method": {"name": "depthfl"}, "peft": {"name": "lora"}, "fleet": DEEP, **VIT},
}  # fmt: skip


def settings(name: str = "scalefl, directions") -> dict[str, Any]:
    """Return the tables of one of these runs."""
    return {**TINY, **METHODS[name]}


class Stopped(Exception):
    """Ends a run in the middle, as a crash would."""


def stopped_run(tables: Mapping[str, Any], folder: Path, after: int) -> None:
    """Run until a round is written, and no further."""

    def enough(report: Mapping[str, Any]) -> None:
        if report["round"] == after:
            raise Stopped

    try:
        ff.run(dict(tables), out=folder, on_round=enough)
    except Stopped:
        return
    raise AssertionError("it was to be stopped")


def stop_before_round(tables: Mapping[str, Any], folder: Path, number: int) -> None:
    """Run until a round, counted from 0, is to begin, and no further."""
    broken, run_round = prepare(load_experiment(tables), folder), rounds.run_round

    def stop(federation: Any, engine: Any, settings: Any, server: Any, *more: Any) -> Any:
        if server.round == number:
            raise Stopped
        return run_round(federation, engine, settings, server, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "run_round", stop)
        with pytest.raises(Stopped):
            run_remaining_rounds(broken)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


Parts = tuple[dict[str, torch.Tensor], Any]


def read_parts(file: Path) -> Parts:
    """Return a checkpoint's tensors by their places, and its structure with these names where the tensors stand.

    Read with the library of the format: flat tensors by type, and marks that say how each is cut up.
    """
    with safe_open(file, framework="pt") as archive:
        flat = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
        structure = json.loads(archive.metadata()["nest"])
    named: dict[str, torch.Tensor] = {}

    def taken(dtype: str, shape: list[int], where: str) -> dict[str, str]:
        while where in named:
            where += "'"
        count = math.prod(shape)
        none = torch.zeros(0, dtype=getattr(torch, dtype))
        named[where] = flat.get(dtype, none)[:count].view(shape)
        flat[dtype] = flat.get(dtype, none)[count:]
        return {"$tensor": where}

    def walk(inner: Any, where: str) -> Any:
        if isinstance(inner, list):
            return [walk(value, f"{where}/{place}") for place, value in enumerate(inner)]
        if not isinstance(inner, dict):
            return inner
        if "$t" in inner:
            return taken(*inner["$t"], where)
        if "$s" in inner:
            dtype, shapes = inner["$s"]
            return {name: taken(dtype, shape, f"{where}/{name}" if where else name) for name, shape in shapes.items()}
        if "$d" in inner:
            return {"$d": [[key, walk(value, f"{where}/{key}")] for key, value in inner["$d"]]}
        return {key: walk(value, f"{where}/{key}" if where else key) for key, value in inner.items()}

    return named, walk(structure, "")


def write_parts(file: Path, tensors: Mapping[str, torch.Tensor], structure: Any) -> None:
    """Write a checkpoint without a checksum; each tensor has its own mark, and no state is made of them."""
    parts: dict[str, list[torch.Tensor]] = {}
    used: set[str] = set()

    def put(tensor: torch.Tensor) -> list[Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts.setdefault(dtype, []).append(tensor.reshape(-1))
        return [dtype, list(tensor.shape)]

    def walk(inner: Any) -> Any:
        if isinstance(inner, list):
            return list(map(walk, inner))
        if not isinstance(inner, dict):
            return inner
        name = inner.get("$tensor")
        if isinstance(name, str) and name in tensors:
            used.add(name)
            return {"$t": put(tensors[name])}
        return {key: walk(value) for key, value in inner.items()}

    text = structure if isinstance(structure, str) else json.dumps(walk(structure))
    for name in tensors.keys() - used:  # that nothing names
        put(tensors[name])
    flat = {name: torch.cat(pieces).clone() for name, pieces in parts.items()}
    save_file(flat, file, {"fleetfit": "checkpoint", "format": "2", "nest": text})


def change_parts(file: Path, change: Callable[[dict[str, torch.Tensor], Any], None]) -> None:
    """Change the tensors or the structure of a checkpoint in place."""
    tensors, structure = read_parts(file)
    change(tensors, structure)
    write_parts(file, tensors, structure)
