"""Damage to a run folder as plain values: what one example of the fuzzing suite, or a file of its corpus, does to it.

A folder's damage is a list of steps `[what, file, ...]`, applied one after the other to a copy.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run_folders import change_parts, read_parts, write_parts

Step = list[Any]


def damage(folder: Path, elsewhere: Path, steps: list[Step]) -> None:
    """Apply steps to a folder; links lead to copies below `elsewhere`. What is not there any more is passed over."""
    for what, name, *rest in steps:
        path = folder / name
        if what in _MAKES or path.is_file():
            _STEPS[what](path, elsewhere, *rest)


def _flip(path: Path, elsewhere: Path, where: float, bit: int) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[min(int(where * len(content)), len(content) - 1)] ^= 1 << bit
    path.write_bytes(content)


def _cut(path: Path, elsewhere: Path, where: float) -> None:
    path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])


def _fill(path: Path, elsewhere: Path, text: str, times: int = 1, start: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _removed(path)
    path.write_text(start + text * times)


def _swap(path: Path, elsewhere: Path, other: str) -> None:
    """Exchange a file with one beside it, or elsewhere in the folder."""
    second = _root(path) / other
    if second.is_file():
        ours, theirs = path.read_bytes(), second.read_bytes()
        path.write_bytes(theirs)
        second.write_bytes(ours)


def _remove(path: Path, elsewhere: Path) -> None:
    _removed(path)


def _link(path: Path, elsewhere: Path) -> None:
    """Move a file or folder elsewhere and leave a link to it."""
    if path.is_symlink():
        return
    target = elsewhere / path.name
    if path.exists():
        path.rename(target)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(target)


def _loop(path: Path, elsewhere: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    _removed(path)
    path.symlink_to(path.name)


def _pipe(path: Path, elsewhere: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    _removed(path)
    os.mkfifo(path)


def _device(path: Path, elsewhere: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    _removed(path)
    path.symlink_to("/dev/zero")


def _folder(path: Path, elsewhere: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    _removed(path)
    path.mkdir()


def _value(path: Path, elsewhere: Path, place: int, value: Any) -> None:
    """Put a value in the place of the n-th one of a JSON file, or of a line of it."""
    try:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        rows = [json.loads(line) for line in lines]
    except ValueError:
        return
    holder = {"lines": rows}
    _put(holder["lines"], place, value)
    path.write_text("".join(json.dumps(line) + "\n" for line in holder["lines"]))


def _change_payload(path: Path, elsewhere: Path, place: int, value: Any) -> None:
    """The same in the structure of a checkpoint."""
    try:
        tensors, payload = read_parts(path)
    except Exception:  # damaged before
        return
    _put(payload, place, value)
    write_parts(path, tensors, payload)


def _tensor(path: Path, elsewhere: Path, place: int, how: str) -> None:
    def change(tensors: dict[str, torch.Tensor], payload: Any) -> None:
        name = sorted(tensors)[place % len(tensors)]
        tensor = tensors[name]
        if how == "nan" and tensor.is_floating_point() and tensor.numel():
            tensors[name] = torch.full_like(tensor, float("nan"))
        elif how == "short" and tensor.dim():
            tensors[name] = tensor[:-1]
        elif how == "turn":
            tensors[name] = tensor.permute(*reversed(range(tensor.dim())))
        elif how == "double":
            tensors[name] = tensor.double()
        elif how == "drop":
            del tensors[name]
        elif how == "more":
            tensors[f"{name}.more"] = tensor
        elif how == "scalar":
            tensors[name] = torch.zeros(())

    try:
        change_parts(path, change)
    except Exception:  # damaged before
        return


def _put(payload: Any, place: int, value: Any) -> None:
    """Replace the n-th value in a nest, counted in order and around."""
    parts: list[tuple[Any, Any]] = []

    def walk(inner: Any) -> None:
        for key, child in inner.items() if isinstance(inner, dict) else enumerate(inner):
            parts.append((inner, key))
            if isinstance(child, dict | list):
                walk(child)

    walk(payload)
    if parts:
        holder, key = parts[place % len(parts)]
        holder[key] = value


def _removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _root(path: Path) -> Path:
    """Return the run folder of a file."""
    return path.parent if path.parent.name not in ("checkpoints", "inference", "plots") else path.parent.parent


_STEPS: dict[str, Callable[..., None]] = {
    "flip": _flip, "cut": _cut, "fill": _fill, "swap": _swap, "remove": _remove, "link": _link, "loop": _loop,
    "pipe": _pipe, "device": _device, "folder": _folder, "value": _value, "nest": _change_payload, "tensor": _tensor,
}  # fmt: skip
_MAKES = {"fill", "link", "loop", "pipe", "device", "folder", "remove"}
