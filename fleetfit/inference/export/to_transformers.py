"""Write a level of BERT, ViT or DeiT as a folder for the Auto classes of `transformers`, without FleetFit.

The folder has config.json, model.safetensors (fp32), and the preprocessing of raw inputs: tokenizer.json with
tokenizer_config.json, or preprocessor_config.json. It has only the last exit, because a model of `transformers` has one
exit. LoRA and SSF are merged into the weights. Writing does not need `transformers`.

A level is refused if no config can express its computation: another model family, a BERT whose heads do not add up to
its width, a recurrent exit, adapters, a next-token task.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file

from fleetfit.anatomy import ArchitectureWrapper, State
from fleetfit.data import Data
from fleetfit.errors import DataError, ModelError, escape_controls
from fleetfit.inference.export.level import LevelModel
from fleetfit.models.pretrained import CLASSIFIER, Checkpoint

_PROBLEMS = {
    "classification": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}  # task -> problem_type of a config
_ROLES = {
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}  # special tokens and their names in tokenizers
_BILINEAR = 2  # of Pillow


@runtime_checkable
class ToCheckpoint(Protocol):
    """A model family that `transformers` has, too."""

    def to_checkpoint(self, sizes: Mapping[str, int], last: int, state: State) -> Checkpoint:
        """Return config and tensors of a sub-model with its last exit only."""
        ...


def write_transformers(model: LevelModel, folder: Path) -> list[Path]:
    """Write a level's last exit as a plain `transformers` folder.

    `AutoModelForSequenceClassification` (BERT) or `AutoModelForImageClassification` (ViT, DeiT) opens the model, and
    `AutoTokenizer` or `AutoImageProcessor` the other files. The logits are those of the level's last exit. Predictions
    of a regression are in the unit of the data's targets. `notes_on_transformers` lists differences.

    Args:
        model: The level's model.
        folder: The folder. It is created if it is missing, and files of the same names are overwritten.

    Returns:
        The files.

    Raises:
        ModelError: No config of `transformers` can express the level. No files are written.
        DataError: The file of the tokenizer is missing or damaged.
    """
    try:
        checkpoint = _make_checkpoint(model)
        config = {**checkpoint.config, **_make_label_config(model.prepared_data)}
    except ModelError as error:
        raise ModelError(
            f"level {model.level} cannot be written as a transformers folder: {error}", key=error.key, path=error.path
        ) from None
    texts = {"config.json": _format_json(config)} | _make_input_files(model.prepared_data)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_file(dict(checkpoint.tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return [folder / name for name in ("config.json", "model.safetensors", *list(texts)[1:])]


def notes_on_transformers(model: LevelModel) -> tuple[str, ...]:
    """Return sentences on the differences between a level and its folder."""
    data, notes = model.prepared_data, []
    if len(model.exits) > 1:
        early = ", ".join(map(str, model.exits[:-1]))
        notes.append(
            f"A transformers model has one exit: the folder has the exit after block {model.exits[-1]}, not those "
            f"after {early}."
        )
    if data.padding >= 0:
        notes.append("Padding has to be masked: pass the tokenizer's attention_mask to the model.")
    if not _make_input_files(data):
        kind = "tokenizer" if data.x.dtype == torch.int64 else "image processor"
        notes.append(f"{data.name} has none, so no {kind} is written: inputs are those of Data.batch.")
    elif data.resize is not None:
        notes.append("The image processor resizes whole pixels, but the data set floats: pixels differ by rounding.")
    if data.task == "regression":
        notes.append("Predictions are in the unit of the targets; in FleetFit they have mean 0 and variance 1.")
    return tuple(notes)


# ---- the model ---------------------------------------------------------------------------------------------------


def _make_checkpoint(model: LevelModel) -> Checkpoint:
    """Return config and tensors of the last exit."""
    family, data, last = model.architecture, model.prepared_data, model.exits[-1]
    state: State = {name: tensor.detach().cpu().clone() for name, tensor in model.module.state_dict().items()}
    while isinstance(family, ArchitectureWrapper):
        state = family.merge(state)
        family = family.inner
    if not isinstance(family, ToCheckpoint):
        raise ModelError(
            f"it is a {type(family).__name__}, but only BERT, ViT and DeiT have a class in transformers. Choose "
            "another form."
        )
    state = {name: t for name, t in state.items() if not name.startswith("heads.") or name.startswith(f"heads.{last}.")}
    checkpoint = family.to_checkpoint(model.sizes, last, state)
    tensors = {name: tensor.float().contiguous() for name, tensor in checkpoint.tensors.items()}
    if data.task == "regression":  # the classifier predicts y instead of (y - mean) / std
        mean, std = (moment.cpu() for moment in data.target_scale)
        weight, bias = f"{CLASSIFIER}weight", f"{CLASSIFIER}bias"
        tensors[weight], tensors[bias] = tensors[weight] * std[:, None], tensors[bias] * std + mean
    if model.offset is not None:
        tensors[f"{CLASSIFIER}bias"] = tensors[f"{CLASSIFIER}bias"] + model.offset
    return Checkpoint(checkpoint.config, tensors)


def _make_label_config(data: Data) -> dict[str, Any]:
    """Return the entries of a config for the task."""
    if data.task not in _PROBLEMS:
        raise ModelError(f'its task is "{data.task}", but transformers has {", ".join(_PROBLEMS)}.', key="task")
    names = data.class_names or tuple(f"LABEL_{i}" for i in range(data.classes))
    return {
        "problem_type": _PROBLEMS[data.task],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


# ---- its inputs ------------------------------------------------------------------------------------------------------


def _make_input_files(data: Data) -> dict[str, str]:
    """Return the files for preprocessing raw inputs; none if the data do not define it."""
    if data.tokenizer:
        return _make_tokenizer_files(data)
    if data.x.dtype == torch.uint8 and data.x.ndim == 4:
        return {"preprocessor_config.json": _format_json(_make_image_processor(data))}
    return {}


def _make_image_processor(data: Data) -> dict[str, Any]:
    """Return the config of an image processor: resize to the model's size, and pixels as (x / 255 - mean) / std."""
    channels, height, width = data.sample_shape
    repeats = channels if len(data.mean) == 1 else 1
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": channels == 3,
        "do_resize": True,  # does not change images of this size
        "size": {"height": height, "width": width},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(data.mean),
        "image_mean": list(data.mean) * repeats or [0.0] * channels,
        "image_std": list(data.std) * repeats or [1.0] * channels,
    }


def _make_tokenizer_files(data: Data) -> dict[str, str]:
    """Return the data's tokenizer.json, and a config with its special tokens and the length of texts."""
    text, tokens = read_tokenizer(data)
    special = {role: word for role, words in _ROLES.items() for word in words if word in tokens.values()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": data.sample_shape[0],
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    if data.padding in tokens:
        config["pad_token"] = tokens[data.padding]
    return {"tokenizer.json": text, "tokenizer_config.json": _format_json(config)}


def write_tokenizer(data: Data, path: Path) -> None:
    """Write a tokenizer.json that cuts and pads each text as the data's are."""
    text, tokens = read_tokenizer(data)
    tokenizer, length = json.loads(text), data.sample_shape[0]
    tokenizer["padding"] = {
        "strategy": {"Fixed": length},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": data.padding,
        "pad_type_id": 0,
        "pad_token": tokens.get(data.padding, ""),
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n", encoding="utf-8")


def read_tokenizer(data: Data) -> tuple[str, dict[int, str]]:
    """Return the text of the data's tokenizer.json, and its tokens by their numbers.

    Raises:
        DataError: The file is missing or damaged.
    """
    try:
        text = Path(data.tokenizer).read_text(encoding="utf-8")
        return text, _list_tokens(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{data.name}: its tokenizer {data.tokenizer} cannot be read: {error!r}. Load the data again to rebuild "
            "it.",
            path=data.tokenizer,
        ) from None


def _list_tokens(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer.json by their numbers."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # pieces and their scores, in order
        tokens = {number: str(piece) for number, (piece, _) in enumerate(vocabulary)}
    else:
        tokens = {int(number): str(piece) for piece, number in vocabulary.items()}
    return tokens | {int(added["id"]): str(added["content"]) for added in tokenizer["added_tokens"]}


def _format_json(content: Mapping[str, Any]) -> str:
    return escape_controls(json.dumps(content, indent=2, ensure_ascii=False)) + "\n"
