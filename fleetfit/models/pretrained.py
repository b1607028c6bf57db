"""Read Hugging Face checkpoint folders: config.json and safetensors, optionally sharded. No pickle, no `transformers`.

Models are also written with the names and the config of `transformers`.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fleetfit.errors import ModelError

CLASSIFIER = "classifier."
"""The prefix of a classifier's tensors in a checkpoint."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OLD_SUFFIXES = {".gamma": ".weight", ".beta": ".bias"}  # layer norms in the oldest BERT checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A model in the form of `transformers`.

    Attributes:
        config: The contents of config.json.
        tensors: Its tensors by their names there.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class TensorNames:
    """Our names of modules and parameters, and their names in a checkpoint; {} there is the number of a block.

    Attributes:
        stem: Names before the blocks.
        block: Names in a block.
        head: Names in a classifier.
    """

    stem: Mapping[str, tuple[str, ...]]
    block: Mapping[str, tuple[str, ...]]
    head: Mapping[str, tuple[str, ...]]

    def map_trunk(self, blocks: int) -> dict[str, tuple[str, ...]]:
        """Return the names of everything but classifiers."""
        numbered = {
            f"blocks.{i}.{ours}": tuple(name.format(i) for name in theirs)
            for i in range(blocks)
            for ours, theirs in self.block.items()
        }
        return {**self.stem, **numbered}

    def map_head(self, last: int) -> dict[str, tuple[str, ...]]:
        """Return the names of the classifier after the last block."""
        return {f"heads.{last}.{ours}": theirs for ours, theirs in self.head.items()}

    def rename(self, state: Mapping[str, Tensor], last: int, prefix: str) -> dict[str, Tensor]:
        """Return tensors by the names of a checkpoint, the reverse of `read_tensors`.

        Args:
            state: Tensors by our names, with the classifier after the last block only.
            last: The number of blocks.
            prefix: The prefix of all names there but those of the classifier.

        Raises:
            ModelError: A tensor is not among the names.
        """
        names, renamed = self.map_trunk(last) | self.map_head(last), {}
        for ours, tensor in state.items():
            module, _, parameter = ours.rpartition(".")
            if ours in names:
                theirs = names[ours][0]
            elif module in names:
                theirs = f"{names[module][0]}.{parameter}"
            else:
                raise ModelError(f'a model of this type does not have "{ours}".')
            renamed[theirs if theirs.startswith(CLASSIFIER) else prefix + theirs] = tensor
        return renamed


def read_config(folder: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the config.json of a checkpoint folder.

    Args:
        folder: The folder.
        kinds: The values of `model_type` that fit.

    Raises:
        ModelError: The folder or its config.json is missing or damaged, or it is another kind of model.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"no such checkpoint folder: {path}. Name a folder with config.json and model.safetensors.", path=path
        )
    config = _read_json(path / "config.json")
    kind = config.get("model_type")
    if kind not in kinds:
        raise ModelError(
            f"{path} holds a model of type {kind!r}, but this architecture reads {' and '.join(kinds)}.", path=path
        )
    return config


def read_tensors(
    folder: str, names: Mapping[str, Sequence[str]], prefixes: Sequence[str], optional: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return a checkpoint's tensors under our names, in fp32.

    Args:
        folder: The checkpoint folder.
        names: Our modules and parameters, and their alternative names in the folder (transformers 4, 5).
        prefixes: Possible prefixes of names in the folder ("bert.").
        optional: Names that the checkpoint may lack.

    Raises:
        ModelError: A tensor is missing, or the files cannot be read.
    """
    files = _map_files(Path(folder).expanduser())
    stored_names = {_simplify(name, prefixes): name for name in files}
    by_file: dict[Path, dict[str, str]] = {}  # our names, and those in the file
    for ours, alternatives in names.items():
        matches = _match(ours, alternatives, stored_names)
        if not matches and ours not in optional:
            raise ModelError(
                f'the checkpoint {folder} has no "{alternatives[0]}". Name the folder of a complete model.', path=folder
            )
        for name, theirs in matches.items():
            by_file.setdefault(files[theirs], {})[name] = theirs
    tensors: dict[str, Tensor] = {}
    for path, file_names in by_file.items():
        with _open_tensors(path) as file:
            tensors |= {ours: file.get_tensor(theirs).float() for ours, theirs in file_names.items()}
    return tensors


def _match(ours: str, alternatives: Sequence[str], stored_names: Mapping[str, str]) -> dict[str, str]:
    """Return the tensors of one of our modules or parameters, with their names in the folder."""
    for theirs in alternatives:
        if theirs in stored_names:
            return {ours: stored_names[theirs]}
        parameters = [kind for kind in ("weight", "bias") if f"{theirs}.{kind}" in stored_names]
        if parameters:
            return {f"{ours}.{kind}": stored_names[f"{theirs}.{kind}"] for kind in parameters}
    return {}


def _simplify(name: str, prefixes: Sequence[str]) -> str:
    """Return a tensor's name without prefixes, and with the current suffix."""
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    for old, new in _OLD_SUFFIXES.items():
        name = name.removesuffix(old) + new if name.endswith(old) else name
    return name


@contextlib.contextmanager
def _open_tensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", path=path) from None


def _map_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(Path(str(file)).name == file for file in files.values()):
            raise ModelError(f"{index} is damaged: it has no weight_map of tensors to files in its folder.", path=index)
        return {name: folder / file for name, file in files.items()}
    if single.is_file():
        with _open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} has {pickles[0]}, a pickle, which could execute code and is not read. Save it as safetensors "
            "with AutoModel.from_pretrained(...).save_pretrained(...) of `transformers`.",
            path=folder,
        )
    raise ModelError(f"{folder} has no model.safetensors.", path=folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"no such file: {path}. A checkpoint folder has config.json and model.safetensors.", path=path
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", path=path) from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must have a JSON object, got {type(content).__name__}.", path=path)
    return content
