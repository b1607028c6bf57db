"""A level of BERT, ViT or DeiT as a folder that `transformers` opens without FleetFit: its Auto classes read all of it.

The folder has config.json, model.safetensors (fp32), and what turns raw inputs into the model's: tokenizer.json with
tokenizer_config.json, or preprocessor_config.json. It holds the last exit only, since a model of `transformers` has
one. LoRA and SSF are merged into the weights. `transformers` itself is not needed to write it.

A level is refused where no config can say what it computes: another model family, a BERT whose heads do not make up its
width, a recurrent exit, adapters, a next-token task.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor

from fleetfit.data import Data
from fleetfit.errors import DataError, ModelError, escape_controls
from fleetfit.inference.export.shipped import Shipped
from fleetfit.layout import Architecture, State, Wrapped
from fleetfit.models.pretrained import CLASSIFIER, Checkpoint

_PROBLEMS = {
    "classification": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}  # our tasks, and the problem_type of a config
_ROLES = {
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}  # special tokens, and what tokenisers call them
_BILINEAR = 2  # of Pillow


@runtime_checkable
class ToCheckpoint(Protocol):
    """A model family that `transformers` has too."""

    def to_checkpoint(self, sizes: Mapping[str, int], last: int, state: State) -> Checkpoint:
        """Return config and tensors of a sub-model with its last exit only."""
        ...


def write_transformers(shipped: Shipped, folder: Path) -> list[Path]:
    """Write a level's last exit as a plain `transformers` folder.

    `AutoModelForSequenceClassification` (BERT) or `AutoModelForImageClassification` (ViT, DeiT) opens it, and
    `AutoTokenizer` or `AutoImageProcessor` what comes along. The logits are those of the level's last exit; of a
    regression, the predictions are in the unit of the data's targets. `notes_on_transformers` says what is left out.

    Args:
        shipped: The level.
        folder: Where to write; made where it is not there, and files of the same names are written over.

    Returns:
        The files.

    Raises:
        ModelError: No config of `transformers` can say what the level computes; nothing is written then.
        DataError: The file of the tokeniser is gone or damaged.
    """
    try:
        checkpoint = _checkpoint(shipped)
        config = {**checkpoint.config, **_labels(shipped.own_data)}
    except ModelError as error:
        raise ModelError(
            f"level {shipped.level} cannot be written as a transformers folder: {error}", key=error.key, path=error.path
        ) from None
    texts = {"config.json": _json(config)} | _inputs(shipped.own_data)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_file(dict(checkpoint.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return [folder / name for name in ("config.json", "model.safetensors", *list(texts)[1:])]


def notes_on_transformers(shipped: Shipped) -> tuple[str, ...]:
    """Return sentences on what is not in the folder, or otherwise there than here; the level is one that is written."""
    data, notes = shipped.own_data, []
    if len(shipped.exits) > 1:
        early = ", ".join(map(str, shipped.exits[:-1]))
        notes.append(
            f"A transformers model has one exit: the folder holds that after block {shipped.exits[-1]}, and not those "
            f"after {early}."
        )
    if data.padding >= 0:
        notes.append("Padding has to be masked: give the model the attention_mask that the tokeniser returns.")
    if not _inputs(data):
        kind = "tokeniser" if data.x.dtype == torch.int64 else "image processor"
        notes.append(f"{data.name} has none of its own, so no {kind} is written: inputs are those of Data.batch.")
    elif data.resize is not None:
        notes.append("The image processor resizes whole pixels, the data floats: pixels differ by their rounding.")
    if data.task == "regression":
        notes.append("Predictions are in the unit of the targets; here they have mean 0 and variance 1.")
    return tuple(notes)


# ---- the model ---------------------------------------------------------------------------------------------------


def _checkpoint(shipped: Shipped) -> Checkpoint:
    """Return config and tensors of the last exit."""
    family, state = _plain(shipped)
    if not isinstance(family, ToCheckpoint):
        raise ModelError(
            f"it is a {type(family).__name__}, and only BERT, ViT and DeiT have a class there. Other formats take any "
            "model."
        )
    last = shipped.exits[-1]
    kept = {name: t for name, t in state.items() if not name.startswith("heads.") or name.startswith(f"heads.{last}.")}
    found = family.to_checkpoint(shipped.sizes, last, kept)
    tensors = {name: tensor.float().contiguous() for name, tensor in found.tensors.items()}
    if shipped.own_data.task == "regression":
        _in_their_unit(tensors, shipped.own_data)
    return Checkpoint(found.config, tensors)


def _plain(shipped: Shipped) -> tuple[Architecture, State]:
    """Return the innermost family, and the tensors with which its module computes what the level's does."""
    family, state = shipped.architecture, dict(shipped.module.state_dict())
    found: State = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    while isinstance(family, Wrapped):
        found = family.merged(found)
        family = family.inner
    return family, found


def _in_their_unit(tensors: dict[str, Tensor], data: Data) -> None:
    """Let the classifier predict y and not (y - mean) / std."""
    mean, std = (moment.cpu() for moment in data.target_scale)
    weight, bias = f"{CLASSIFIER}weight", f"{CLASSIFIER}bias"
    tensors[weight], tensors[bias] = tensors[weight] * std[:, None], tensors[bias] * std + mean


def _labels(data: Data) -> dict[str, Any]:
    """Return what a config says of the task."""
    if data.task not in _PROBLEMS:
        raise ModelError(f'its task is "{data.task}"; transformers has {", ".join(_PROBLEMS)}.', key="task")
    names = data.class_names or tuple(f"LABEL_{i}" for i in range(data.classes))
    return {
        "problem_type": _PROBLEMS[data.task],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


# ---- its inputs --------------------------------------------------------------------------------------------------


def _inputs(data: Data) -> dict[str, str]:
    """Return the files that turn raw inputs into the model's; none where the data cannot say how."""
    if data.tokenizer:
        return _tokeniser(data)
    if data.x.dtype == torch.uint8 and data.x.ndim == 4:
        return {"preprocessor_config.json": _json(_image_processor(data))}
    return {}


def _image_processor(data: Data) -> dict[str, Any]:
    """Return what brings images to the model's size, and pixels to (x / 255 - mean) / std."""
    channels, height, width = data.sample_shape
    many = channels if len(data.mean) == 1 else 1
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,  # changes nothing of images that have the size
        "size": {"height": height, "width": width},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(data.mean),
        "image_mean": list(data.mean) * many or [0.0] * channels,
        "image_std": list(data.std) * many or [1.0] * channels,
    }


def _tokeniser(data: Data) -> dict[str, str]:
    """Return the data's own tokenizer.json, and which of its tokens are special and how long a text may be."""
    try:
        text = Path(data.tokenizer).read_text(encoding="utf-8")
        tokens = _tokens(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{data.name}: its tokeniser {data.tokenizer} cannot be read: {error!r}. Load the data again to rebuild "
            "it.",
            path=data.tokenizer,
        ) from None
    known = {role: word for role, words in _ROLES.items() for word in words if word in tokens.values()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": data.sample_shape[0],
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        **known,
    }
    if data.padding in tokens:
        config["pad_token"] = tokens[data.padding]
    return {"tokenizer.json": text, "tokenizer_config.json": _json(config)}


def _tokens(tokeniser: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by their numbers."""
    listed = tokeniser["model"].get("vocab", {})
    if isinstance(listed, list):  # of pieces and their scores, in order
        found = {number: str(piece) for number, (piece, _) in enumerate(listed)}
    else:
        found = {int(number): str(piece) for piece, number in listed.items()}
    return found | {int(added["id"]): str(added["content"]) for added in tokeniser["added_tokens"]}


def _json(nest: Mapping[str, Any]) -> str:
    return escape_controls(json.dumps(nest, indent=2, ensure_ascii=False)) + "\n"
