"""Hugging Face checkpoint folders: config.json and safetensors, whole or in shards; no pickle, no `transformers`.

Read, and the other way: a model by the names and the config that `transformers` has for it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetfit.errors import ModelError

CLASSIFIER = "classifier."
"""What the names of a classifier's tensors begin with in a checkpoint."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}  # layer norms in the oldest BERT checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A model as `transformers` keeps it.

    Attributes:
        config: What config.json says of it.
        tensors: Its tensors by their names there.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def renamed(state: Mapping[str, Tensor], names: Mapping[str, Sequence[str]], prefix: str) -> dict[str, Tensor]:
    """Return tensors by the names of a checkpoint, the reverse of `read_tensors`.

    Args:
        state: Tensors by our names.
        names: Our modules and parameters, and what each may be called there; the first one is taken.
        prefix: What the names there begin with, but that of the classifier.

    Raises:
        ModelError: A tensor is not among the names.
    """
    found = {}
    for ours, tensor in state.items():
        part, _, kind = ours.rpartition(".")
        if ours in names:
            theirs = names[ours][0]
        elif part in names:
            theirs = f"{names[part][0]}.{kind}"
        else:
            raise ModelError(f'a model of that type does not have "{ours}".')
        found[theirs if theirs.startswith(CLASSIFIER) else prefix + theirs] = tensor
    return found


def read_config(folder: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the config.json of a checkpoint folder.

    Args:
        folder: The folder.
        kinds: The values of `model_type` that fit.

    Raises:
        ModelError: The folder or its config.json is not there or damaged, or it is another kind of model.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"there is no checkpoint folder {path}. Give a folder with config.json and model.safetensors.", path=path
        )
    config = _json(path / "config.json")
    kind = config.get("model_type")
    if kind not in kinds:
        raise ModelError(
            f"{path} holds a model of type {kind!r}; this architecture reads {' and '.join(kinds)}.", path=path
        )
    return config


def read_tensors(
    folder: str, names: Mapping[str, Sequence[str]], prefixes: Sequence[str], may_lack: Iterable[str] = ()
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under our names, in fp32.

    Args:
        folder: The checkpoint folder.
        names: Our modules and parameters, and what each may be called in the folder (transformers 4, 5).
        prefixes: What a name in the folder may begin with ("bert.").
        may_lack: Those of our names that the checkpoint may be without.

    Raises:
        ModelError: A tensor is missing, or the files cannot be read.
    """
    there = {_plain(name, prefixes): (name, file) for name, file in _files(Path(folder).expanduser()).items()}
    wanted: dict[Path, dict[str, str]] = {}  # file -> our name -> its name there
    for ours, alternatives in names.items():
        taken = _taken(ours, alternatives, there)
        if not taken and ours not in set(may_lack):
            raise ModelError(
                f'the checkpoint {folder} has no "{alternatives[0]}", so it is no whole model.', path=folder
            )
        for name, (stored, file) in taken.items():
            wanted.setdefault(file, {})[name] = stored
    found: dict[str, Tensor] = {}
    for file, stored_names in wanted.items():
        found |= _read(file, stored_names)
    return found


Place = tuple[str, Path]  # a tensor's name in its file, and the file


def _taken(ours: str, alternatives: Sequence[str], there: Mapping[str, Place]) -> dict[str, Place]:
    for theirs in alternatives:
        if theirs in there:
            return {ours: there[theirs]}
        parts = {f"{ours}.{p}": there[f"{theirs}.{p}"] for p in ("weight", "bias") if f"{theirs}.{p}" in there}
        if parts:
            return parts
    return {}


def _plain(name: str, prefixes: Sequence[str]) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    for old, new in _OLD_NAMES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


def _read(file: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {ours: opened.get_tensor(stored).float() for ours, stored in names.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}.", path=file) from None


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        listed = _json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(Path(str(f)).name == f for f in listed.values()):
            raise ModelError(
                f"{index} is damaged: it has no weight_map of tensors to files of its own folder.", path=index
            )
        return {name: folder / file for name, file in listed.items()}
    if not single.is_file():
        old = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if old:
            raise ModelError(
                f"{folder} holds {old[0]}, a pickle, which could run any code and is not read. Save it as "
                "safetensors: AutoModel.from_pretrained(...).save_pretrained(...) of `transformers` does.",
                path=folder,
            )
        raise ModelError(f"{folder} has no model.safetensors.", path=folder)
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{single} cannot be read: {error}.", path=single) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"there is no {path}; a checkpoint folder has config.json and model.safetensors.", path=path
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", path=path) from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(found).__name__}.", path=path)
    return found
