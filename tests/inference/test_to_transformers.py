"""Levels as folders of `transformers`: no key missing, unexpected or mismatched, equal logits, equal inputs."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import Architecture, build_module, named_tensors
from fleetfit.data import Data
from fleetfit.data.files.text import text
from fleetfit.errors import DataError, ModelError
from fleetfit.inference.export import LevelModel
from fleetfit.inference.export.folder import Variant, make_card
from fleetfit.inference.export.to_transformers import notes_on_transformers, write_transformers
from fleetfit.models.bert import Bert, bert
from fleetfit.models.ree import recurrent
from fleetfit.models.resnet import resnet
from fleetfit.models.vit import Vit, vit
from fleetfit.peft.frozen import frozen
from fleetfit.peft.lora import lora
from fleetfit.peft.parallel_adapter import parallel_adapter
from fleetfit.peft.serial_adapter import serial_adapter
from fleetfit.peft.ssf import ssf

hf: Any = pytest.importorskip("transformers", reason="the library that opens the folders is not installed")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["a lovely film", "a dull film", "Lovely, lovely acting!", "dull, dull acting", "films that love and bore",
         "what a dull day at the films, and what a lovely evening after all of it", "Ça va? Très lovely",
         "bore me"]  # fmt: skip
LABELS = ["good", "bad"] * 4
CLASSES = 3
NAMES = ("ant", "bee", "cow")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, no progress bars, and torch's global generator left as it was."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FLEETFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLEETFIT_DATA", raising=False)
    hf.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


# ---- small levels --------------------------------------------------------------------------------------------------


def texts(folder: Path, **keys: Any) -> Data:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "label"], *zip(TEXTS, LABELS, strict=True)])
    return text(str(folder), **{"vocabulary": 60, "length": 12, "validation": 0.0, "test": 0.25} | keys)


def tokens(task: str = "classification", padding: int = 3) -> Data:
    """Token ids with 0, 1, 2, ... of padding at their ends, and the padding id nowhere else."""
    x = torch.randint(4, 40, (6, 7))
    for i in range(6):
        x[i, 7 - i :] = 3
    y = {
        "classification": torch.arange(6) % CLASSES,
        "multi_label": torch.randint(0, 2, (6, CLASSES)),
        "regression": 5 + 3 * torch.randn(6, CLASSES),
        "next_token": torch.randint(4, 40, (6, 7)),
    }[task]
    classes = 40 if task == "next_token" else CLASSES
    return Data("t", x, y, {"train": torch.arange(6)}, classes, task=task, vocabulary=40, padding=padding)


def images(channels: int = 3, side: tuple[int, int] = (8, 12), **keys: Any) -> Data:
    x = torch.randint(0, 256, (4, channels, *side), dtype=torch.uint8)
    settled = {"mean": (0.5, 0.4, 0.3)[:channels], "std": (0.2, 0.25, 0.3)[:channels], "class_names": NAMES} | keys
    return Data("i", x, torch.arange(4) % CLASSES, {"train": torch.arange(4)}, CLASSES, **settled)


def small_bert(data: Data, heads: Any = "whole", **keys: Any) -> Bert:
    sizes = {"hidden": 24, "layers": 3, "attention_heads": 4, "intermediate": 36, "max_positions": 20} | keys
    return bert(data.classes, data.sample_shape, data.vocabulary, data.padding, heads=heads, **sizes)


def small_vit(data: Data, heads: Any = "whole", distilled: bool = False, **keys: Any) -> Vit:
    sizes = {"hidden": 24, "depth": 3, "attention_heads": 4, "intermediate": 36, "patch": 4} | keys
    architecture = vit(data.classes, data.sample_shape, heads=heads, **sizes)
    return replace(architecture, distilled=distilled)


def level(family: Architecture, data: Data, width: float = 1.0, exits: tuple[int, ...] = (1, 3)) -> LevelModel:
    """A level whose every parameter is drawn, none zero or one, and large enough for samples to differ."""
    sizes = family.sizes(width)
    module = build_module(family, sizes, exits).eval()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            noise = torch.randn(tensor.shape, generator=rng)
            factors = tensor.dim() == 1 and name.endswith(("weight", "scale"))
            tensor.copy_(1 + 0.3 * noise if factors else 0.4 * noise)
    return LevelModel("2", family, sizes, exits, module, data)


def open_model(folder: Path, kind: str) -> Any:
    """The model by the library's Auto class, which found every tensor, each of the right shape, and no other."""
    model, report = getattr(hf, f"AutoModelFor{kind}").from_pretrained(
        folder, output_loading_info=True, local_files_only=True
    )
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert {key: set(report[key]) for key in keys} == {key: set() for key in keys} and not report.get("error_msgs")
    assert model.dtype == torch.float32 and not model.training
    return model


@torch.no_grad()
def last(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)[-1]


@torch.no_grad()
def theirs_on(folder: Path, x: Tensor, padding: int = -1) -> Tensor:
    if x.dtype == torch.int64:
        model = open_model(folder, "SequenceClassification")
        return model(input_ids=x, attention_mask=(x != padding).long()).logits
    return open_model(folder, "ImageClassification")(x).logits


def close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.std(0).min() > 0.01, "the samples' logits are too much alike to compare"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def agrees(level_model: LevelModel, folder: Path) -> dict[str, Any]:
    """Write, open, compare the logits; return the config."""
    files = write_transformers(level_model, folder)
    assert {file.name for file in files} == {file.name for file in folder.iterdir()}
    x, _ = level_model.data.batch(torch.arange(4))
    close(last(level_model.module, x), theirs_on(folder, x, level_model.data.padding))
    return json.loads((folder / "config.json").read_text())


# ---- the model -----------------------------------------------------------------------------------------------------

CUTS = [("whole", 1.0, (1, 2, 3)), ("whole", 0.5, (1, 3)), ("whole", 0.75, (2,)), ("fixed", 0.5, (3,)),
        ("fixed", 0.4, (1, 2))]  # fmt: skip


@pytest.mark.parametrize(("heads", "width", "exits"), CUTS)
def test_bert(tmp_path: Path, heads: str, width: float, exits: tuple[int, ...]) -> None:
    """Sizes by hand: 4 heads of 6 make 24; whole heads leave one by one, fixed ones lose channels together."""
    level_model = level(small_bert(tokens(), heads), tokens(), width, exits)
    config = agrees(level_model, tmp_path)
    expected = {1.0: (24, 4, 36), 0.5: (12, 2, 18), 0.75: (18, 3, 27), 0.4: (8, 4, 12)}[width]
    if heads == "fixed" and width == 0.5:
        expected = (12, 4, 16)  # the MLP leaves in fours too
    assert tuple(config[k] for k in ("hidden_size", "num_attention_heads", "intermediate_size")) == expected
    assert config["num_hidden_layers"] == exits[-1] and config["pad_token_id"] == 3


@pytest.mark.parametrize("distilled", [False, True], ids=["vit", "deit"])
@pytest.mark.parametrize(("heads", "width", "exits"), [*CUTS, ("whole", 0.3, (1,)), ("fixed", 0.3, (3,))])
def test_vit_and_deit(tmp_path: Path, heads: str, width: float, exits: tuple[int, ...], distilled: bool) -> None:
    """At 0.3, 7 channels and 1 or 4 heads of 6 or 2: neither is 7 together, so head_dim says it."""
    level_model = level(small_vit(images(), heads, distilled), images(), width, exits)
    config = agrees(level_model, tmp_path)
    assert config["model_type"] == ("deit" if distilled else "vit") and config["num_hidden_layers"] == exits[-1]
    assert config["image_size"] == [8, 12] and config["num_channels"] == 3
    assert config.get("head_dim") == (None if width > 0.4 else {"whole": 6, "fixed": 2 if width == 0.3 else 3}[heads])


def test_other_arithmetic_and_tables(tmp_path: Path) -> None:
    """What is not usual goes through the config: activation, eps, biases, dropouts, square and gray images."""
    data = tokens()
    family = small_bert(data, dropout=0.25)
    family = replace(family, encoder=replace(family.encoder, activation="gelu_new", eps=1e-3), head_dropout=0.5)
    config = agrees(level(family, data), tmp_path / "bert")
    assert (config["hidden_dropout_prob"], config["classifier_dropout"], config["layer_norm_eps"]) == (0.25, 0.5, 1e-3)
    gray = images(1, (8, 8))
    model = small_vit(gray)
    model = replace(model, encoder=replace(model.encoder, activation="relu", bias=False, eps=1e-2))
    config = agrees(level(model, gray), tmp_path / "vit")
    assert (config["image_size"], config["num_channels"], config["qkv_bias"]) == (8, 1, False)


def test_the_folder_is_fp32_and_a_checkpoint_of_ours(tmp_path: Path) -> None:
    """Read back as [model] checkpoint, all tensors have their bits; a half-precision module is written in fp32."""
    level_model = level(small_bert(tokens()), tokens(), exits=(2, 3))
    level_model.module.half()
    write_transformers(level_model, tmp_path / "bert")
    with safe_open(tmp_path / "bert" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
    state = level_model.module.state_dict()
    again = bert(CLASSES, (7,), 40, 3, str(tmp_path / "bert")).pretrained((3,))
    assert set(again) == {name for name in state if not name.startswith("heads.2")}
    assert all(torch.equal(tensor, state[name].float()) for name, tensor in again.items())
    images_ = images(3, (8, 8))
    model = level(small_vit(images_, "fixed", distilled=True), images_, 0.3)
    write_transformers(model, tmp_path / "vit")
    read = vit(CLASSES, (3, 8, 8), str(tmp_path / "vit"))
    again, state = read.pretrained((3,)), model.module.state_dict()
    assert read.encoder.head_size == 2 and read.distilled and len(again) == len(state) - 4  # but for the first exit's
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())


@pytest.mark.parametrize("kind", ["bert", "vit"])
@pytest.mark.parametrize("tuned", [frozen, lora, ssf])
def test_fine_tuned_levels_are_merged(tmp_path: Path, kind: str, tuned: Any) -> None:
    if tuned is lora:
        pytest.importorskip("peft", reason="the extra `peft` is not installed")
    data = tokens() if kind == "bert" else images()
    keys = {"rank": 2, "alpha": 6.0, "targets": ("*.query", "*.mlp.fc1")} if tuned is lora else {}
    family = tuned(small_bert(data) if kind == "bert" else small_vit(data), **keys)
    level_model = level(family, data, 0.5, (1, 2))
    before = {name: tensor.clone() for name, tensor in level_model.module.state_dict().items()}
    agrees(level_model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in level_model.module.state_dict().items())


# ---- tasks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["classification", "multi_label"])
def test_the_task_is_in_the_config(tmp_path: Path, task: str) -> None:
    level_model = level(small_bert(tokens(task)), tokens(task))
    config = agrees(level_model, tmp_path)
    card = make_card(level_model, [Variant("pytorch", 1, (), (1.0,), 0.0, 6, 2)], (), "")
    assert ("logits of 3 labels" in card) == (task == "multi_label")
    assert config["problem_type"] == {"classification": "single_label"}.get(task, task) + "_classification"
    assert config["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}


def test_a_regression_predicts_in_the_targets_unit(tmp_path: Path) -> None:
    data = tokens("regression")
    level_model = level(small_bert(data), data)
    write_transformers(level_model, tmp_path)
    x, y = data.batch(torch.arange(6))
    mean, std = data.target_scale
    theirs = theirs_on(tmp_path, x, 3)
    close(last(level_model.module, x) * std + mean, theirs)
    torch.testing.assert_close(
        ((theirs - mean) / std - y).square().mean(), (last(level_model.module, x) - y).square().mean()
    )
    assert hf.AutoConfig.from_pretrained(tmp_path).problem_type == "regression"
    assert any("variance 1" in note for note in notes_on_transformers(level_model))


def test_an_offset_is_in_the_bias_of_the_classifier(tmp_path: Path) -> None:
    data = tokens()
    level_model = level(small_bert(data), data)
    offset = torch.linspace(-1.0, 2.0, data.classes)
    write_transformers(replace(level_model, offset=offset), tmp_path)
    x, _ = data.batch(torch.arange(6))
    close(last(level_model.module, x) + offset, theirs_on(tmp_path, x, data.padding))


def test_class_names_become_labels(tmp_path: Path) -> None:
    write_transformers(level(small_vit(images()), images()), tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    assert config.id2label == dict(enumerate(NAMES)) and config.label2id == {"ant": 0, "bee": 1, "cow": 2}


# ---- inputs --------------------------------------------------------------------------------------------------------


def checkpoint_with(folder: Path, **special: Any) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "lovely", "film", "##s", "a", ",", "dull", "Love", "that"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **special}))
    return folder


@pytest.mark.parametrize("whose", ["learned", "lower", "cased", "other"])
@pytest.mark.parametrize("length", [6, 30])
def test_the_tokenizer_gives_our_tokens(tmp_path: Path, whose: str, length: int) -> None:
    """Texts that are cut and texts that are filled, accents and capitals, and what the model makes of them."""
    keys: dict[str, Any] = {"length": length}
    if whose in ("lower", "cased"):
        keys["tokenizer"] = str(checkpoint_with(tmp_path / "theirs", do_lower_case=whose == "lower"))
    elif whose == "other":
        model = tokenizers.models.WordLevel({"<unk>": 0, "lovely": 1, "film": 2, "<fill>": 3}, unk_token="<unk>")
        other = tokenizers.Tokenizer(model)
        other.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        other.enable_padding(pad_id=3, pad_token="<fill>", length=20)
        other.save(str(tmp_path / "alone.json"))
        keys["tokenizer"] = str(tmp_path / "alone.json")
    data = texts(tmp_path / "set", **keys)
    level_model = level(small_bert(data, max_positions=30), data)
    write_transformers(level_model, tmp_path / "out")
    reader = hf.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    read = reader(TEXTS, truncation=True, padding="max_length", return_tensors="pt")
    assert torch.equal(read["input_ids"], data.x) and reader.model_max_length == length
    assert torch.equal(read["attention_mask"], (data.x != data.padding).long()) and not read["token_type_ids"].any()
    assert reader.pad_token_id == data.padding and (data.x != data.padding).any(1).all()
    if whose != "other":
        assert (reader.unk_token, reader.cls_token, reader.sep_token) == ("[UNK]", "[CLS]", "[SEP]")
    one = reader(TEXTS[0])["input_ids"]
    assert one == data.x[0][data.x[0] != data.padding].tolist()
    x, _ = data.batch(torch.arange(len(TEXTS)))
    longest = reader(TEXTS, truncation=True, padding=True, return_tensors="pt")
    assert torch.equal(longest["input_ids"], x)
    model = open_model(tmp_path / "out", "SequenceClassification")
    with torch.no_grad():
        close(last(level_model.module, x), model(**longest).logits)
    assert model.config.id2label == {0: "bad", 1: "good"}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("normal", ["each", "one", "none"])
def test_the_image_processor_gives_our_pixels(tmp_path: Path, channels: int, normal: str) -> None:
    """Arrays in both layouts and Pillow's images; of another size, they are brought to the model's."""
    pillow = pytest.importorskip("PIL.Image")
    keys = {"each": {}, "one": {"mean": (0.3,), "std": (0.7,)}, "none": {"mean": (), "std": ()}}[normal]
    data = images(channels, **keys)
    write_transformers(level(small_vit(data), data), tmp_path)
    processor = hf.AutoImageProcessor.from_pretrained(tmp_path, local_files_only=True)
    expected, _ = data.batch(torch.arange(4))
    arrays = [x.permute(1, 2, 0).numpy() for x in data.x]
    pictures = [pillow.fromarray(a if channels == 3 else a[..., 0]) for a in arrays]
    inputs: Sequence[Any] = (list(data.x.numpy()), arrays, pictures)
    for picture in inputs:
        pixels = processor(picture, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(pixels, expected, atol=2e-6, rtol=0)
    larger = processor(pictures[0].resize((30, 20)), return_tensors="pt")["pixel_values"]
    assert larger.shape == (1, channels, 8, 12)


def test_pictures_with_an_alpha_channel_become_colored(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    data = images()
    write_transformers(level(small_vit(data), data), tmp_path)
    picture = pillow.fromarray(data.x[0].permute(1, 2, 0).numpy()).convert("RGBA")
    pixels = hf.AutoImageProcessor.from_pretrained(tmp_path)(picture, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, data.batch(torch.tensor([0]))[0], atol=2e-6, rtol=0)


def test_images_that_are_enlarged(tmp_path: Path) -> None:
    """Ours are enlarged as floats, theirs as whole pixels: at most one half of 1/255 apart, over the deviation."""
    pytest.importorskip("PIL.Image")
    data = images(resize=(16, 24))
    level_model = level(small_vit(data), data)
    write_transformers(level_model, tmp_path)
    pixels = hf.AutoImageProcessor.from_pretrained(tmp_path)(list(data.x.numpy()), return_tensors="pt")["pixel_values"]
    expected, _ = data.batch(torch.arange(4))
    assert pixels.shape == (4, 3, 16, 24) and any(
        "resizes whole pixels" in note for note in notes_on_transformers(level_model)
    )
    torch.testing.assert_close(pixels, expected, atol=1.01 / 255 / 0.2, rtol=0)


def test_data_that_cannot_say_how_they_were_made(tmp_path: Path) -> None:
    floats = replace(images(), x=torch.randn(4, 3, 8, 12))
    for level_model, kind in ((level(small_vit(floats), floats), "image processor"),
                          (level(small_bert(tokens()), tokens()), "tokenizer")):  # fmt: skip
        files = write_transformers(level_model, tmp_path / kind)
        assert [file.name for file in files] == ["config.json", "model.safetensors"]
        assert any(f"so no {kind} is written" in note for note in notes_on_transformers(level_model))


def test_notes_name_omissions(tmp_path: Path) -> None:
    data = texts(tmp_path / "set")
    notes = notes_on_transformers(level(small_bert(data), data, exits=(1, 2, 3)))
    assert len(notes) == 2 and "attention_mask" in notes[1]
    assert re.findall(r"\d+", notes[0]) == ["3", "1", "2"]
    assert notes_on_transformers(level(small_vit(images()), images(), exits=(2,))) == ()


# ---- without FleetFit, and from a run --------------------------------------------------------------------------------

ALONE = """
import sys, torch, warnings
sys.modules["fleetfit"] = None
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, given = sys.argv[1:]
model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
known = load_file(given)
tokens = AutoTokenizer.from_pretrained(folder)(open(given + ".txt", encoding="utf-8").read().split("\\n"),
                                               truncation=True, padding=True, return_tensors="pt")
with torch.no_grad():
    print(float((model(**tokens).logits - known["logits"]).abs().max()))
"""


@pytest.mark.slow
def test_another_process_opens_it_without_fleetfit(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    data = texts(tmp_path / "set")
    level_model = level(small_bert(data), data, 0.5, (1, 2))
    write_transformers(level_model, tmp_path / "out")
    x, _ = data.batch(torch.arange(len(TEXTS)))
    save_file({"logits": last(level_model.module, x)}, tmp_path / "given")
    (tmp_path / "given.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    command = [sys.executable, "-c", ALONE, str(tmp_path / "out"), str(tmp_path / "given")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5


def test_a_level_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts(tmp_path / "set")
    run = ff.run(
        {"rounds": 1, "local": {"epochs": 1, "lr": 0.1}, "fleet": {"levels": [0.5, 1.0]}, "cohort": {"count": 2}},
        data={"name": "text", "folder": str(tmp_path / "set"), "vocabulary": 60, "length": 12, "validation": 0.0,
              "test": 0.25, "partition": {"kind": "iid", "clients": 3}},
        model={"name": "bert", "hidden": 24, "layers": 2, "attention_heads": 4, "heads": "fixed"},
        out=tmp_path / "runs",
    )  # fmt: skip
    federation, data = run.assembly.federation, run.assembly.data
    for number, entry in enumerate(federation.levels, 1):
        sizes = {**federation.problem.layout.full_sizes, **entry.submodel.sizes}
        module = run.model(number)
        level_model = LevelModel(entry.name, federation.problem.architecture, sizes, entry.submodel.exits, module, data)
        folder = tmp_path / f"level{number}"
        write_transformers(level_model, folder)
        x, _ = data.batch(data.split("test"))
        torch.testing.assert_close(last(module, x), theirs_on(folder, x, data.padding), atol=1e-6, rtol=1e-5)
        again = bert(2, (12,), data.vocabulary, data.padding, str(folder)).pretrained((level_model.exits[-1],))
        assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in again.items())


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(level_model: LevelModel, folder: Path, *mentions: object, **attributes: Any) -> None:
    with raises(ModelError, "level 2", *mentions, **attributes):
        write_transformers(level_model, folder / "out")
    assert not (folder / "out").exists()


def test_heads_that_do_not_make_up_the_width(tmp_path: Path) -> None:
    data = tokens()
    refused(level(small_bert(data), data, 0.4), tmp_path, 1, 6, 9, 'heads = "fixed"', key="heads")


def test_divisible_but_not_the_same_heads(tmp_path: Path) -> None:
    """A BERT's width of 12 with 1 head of 6: hidden is divisible by heads, but the head would have 12 channels."""
    data = tokens()
    family = small_bert(data)
    level_model = level(family, data)
    sizes = {**family.sizes(1.0), "hidden": 12, "attention": 6}
    module = build_module(family, sizes, (3,)).eval()
    refused(replace(level_model, sizes=sizes, exits=(3,), module=module), tmp_path, 1, 6, 12, key="heads")


def test_a_bert_without_biases(tmp_path: Path) -> None:
    data = tokens()
    family = small_bert(data)
    family = replace(family, encoder=replace(family.encoder, bias=False))
    refused(level(family, data), tmp_path, "query, key and value", key="bias")


def test_recurrent_exits(tmp_path: Path) -> None:
    for ree in (True, False):
        family = recurrent(small_vit(images()), (3, 8, 12), ree=ree)
        refused(level(family, images()), tmp_path, "Ree", "Vit")


@pytest.mark.parametrize("adapter", [serial_adapter, parallel_adapter])
def test_adapters(tmp_path: Path, adapter: Any) -> None:
    refused(level(adapter(small_vit(images()), rank=2), images()), tmp_path, "adapter", "Vit")


def test_ssf_without_biases(tmp_path: Path) -> None:
    family = small_vit(images())
    family = replace(family, encoder=replace(family.encoder, bias=False))
    refused(level(ssf(family), images()), tmp_path, "SSF", "blocks.0.attention.query")


def test_other_families(tmp_path: Path) -> None:
    data = images(3, (8, 8))
    refused(level(resnet(CLASSES, 3, depth=8), data), tmp_path, "ResNet", "BERT, ViT and DeiT")


def test_next_tokens(tmp_path: Path) -> None:
    data = tokens("next_token")
    refused(
        level(small_bert(data), data), tmp_path, '"next_token"', "classification, multi_label, regression", key="task"
    )


def test_a_module_with_more_in_it(tmp_path: Path) -> None:
    level_model = level(small_vit(images()), images())
    level_model.module.add_module("extra", nn.Linear(2, 2))
    refused(level_model, tmp_path, '"extra.weight"')


def test_a_tokenizer_that_is_gone_or_damaged(tmp_path: Path) -> None:
    data = texts(tmp_path / "set")
    level_model = level(small_bert(data), data)
    for damage in ("{", "[]", '{"model": {"vocab": {"a": "b"}}, "added_tokens": []}', None):
        if damage is None:
            Path(data.tokenizer).unlink()
        else:
            Path(data.tokenizer).write_text(damage)
        with raises(DataError, path=data.tokenizer):
            write_transformers(level_model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
