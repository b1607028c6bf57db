"""Checkpoint folders of the library itself, small and random: the full model computes what `transformers` computes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import data_of
from support import Expected, raises
from torch import Tensor

import fleetfit as ff
from fleetfit.anatomy import State, build_module
from fleetfit.core import Problem
from fleetfit.core.tasks import classification
from fleetfit.errors import ModelError
from fleetfit.factories import call_factory
from fleetfit.models.bert import Bert, bert
from fleetfit.models.vit import Vit, vit
from fleetfit.training import describe_start, initial_state

hf: Any = pytest.importorskip("transformers", reason="the library to compare with is not installed")

BERT = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 36,
        "max_position_embeddings": 20}  # fmt: skip
VIT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 36, "patch_size": 4}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No progress bars, and torch's global generator left as it was."""
    hf.utils.logging.disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


def saved(model: Any, folder: Path, **options: Any) -> str:
    """Redraw every parameter, so that none is zero or one, and save the model."""
    for parameter in model.parameters():
        parameter.data.uniform_(-0.3, 0.3)
    model.save_pretrained(folder, **options)
    return str(folder)


def begun(architecture: Bert | Vit, exits: tuple[int, ...], shape: tuple[int, ...]) -> tuple[torch.nn.Module, State]:
    """The full model as a run begins it."""
    state = initial_state(Problem(architecture, shape, classification, exits), 0)
    module = build_module(architecture, architecture.sizes(1.0), exits).eval()
    module.load_state_dict(dict(state))
    return module, state


def close(ours: Tensor, theirs: Tensor, least: float = 0.1) -> None:
    assert theirs.abs().max() > least, "nothing to compare"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def logits(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(x)[-1]


def sentences(length: int) -> Tensor:
    """Token ids with 0, 1, 2, ... of padding (id 3) at their ends, and the padding id nowhere else."""
    x = torch.randint(4, 40, (6, length))
    for i in range(6):
        x[i, max(1, length - i) :] = 3
    return x


# ---- BERT ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 20])
def test_bert_equals_the_library(tmp_path: Path, length: int) -> None:
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5)).eval()
    folder = saved(theirs, tmp_path / "bert")
    ours, _ = begun(bert(5, (length,), 40, 3, folder), (1, 3), (length,))
    x = sentences(length)
    with torch.no_grad():
        expected = theirs(input_ids=x, attention_mask=(x != 3).long()).logits
        seeing_padding = theirs(input_ids=x).logits
    close(logits(ours, x), expected)
    if length > 1:
        assert not torch.allclose(expected, seeing_padding, atol=1e-3), "padding makes no difference, so proves nothing"
        unmasked, _ = begun(bert(5, (length,), 40, -1, folder), (3,), (length,))
        close(logits(unmasked, x), seeing_padding)


def test_padding_does_not_change_logits(tmp_path: Path) -> None:
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5, hidden_act="gelu_new")).eval()
    ours, _ = begun(bert(5, (20,), 40, 3, saved(theirs, tmp_path / "bert")), (3,), (20,))
    x = sentences(6)
    padded = torch.cat([x, torch.full((6, 9), 3)], dim=1)
    close(logits(ours, padded), logits(ours, x))
    with torch.no_grad():
        close(logits(ours, x), theirs(input_ids=x, attention_mask=(x != 3).long()).logits)


def test_early_exits_begin_anew(tmp_path: Path) -> None:
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5)).eval()
    architecture = bert(5, (7,), 40, 3, saved(theirs, tmp_path / "bert"))
    ours, state = begun(architecture, (1, 2, 3), (7,))
    alone, _ = begun(architecture, (3,), (7,))
    x = sentences(7)
    assert torch.equal(logits(ours, x), logits(alone, x))
    assert float(state["heads.1.pooler.weight"].abs().max()) <= 0.04 < float(state["heads.3.pooler.weight"].abs().max())
    (note,) = describe_start(Problem(architecture, (7,), classification, (1, 2, 3)))
    assert str(tmp_path / "bert") in note and note.endswith(": heads.1, heads.2.")


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_other_classifiers_begin_anew(tmp_path: Path, kind: Any) -> None:
    """They would read something that the checkpoint's classifier never saw; and transformers has no name for them."""
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5)).eval()
    architecture = bert(5, (7,), 40, 3, saved(theirs, tmp_path / "bert"), head=kind)
    _, state = begun(architecture, (3,), (7,))
    assert float(state["heads.3.fc.weight"].abs().max()) <= 0.04 and "heads.3.pooler.weight" not in state
    assert torch.equal(state["blocks.0.mlp.fc1.weight"], theirs.bert.encoder.layer[0].intermediate.dense.weight)
    with raises(ModelError, f'"{kind}"', key="head"):
        architecture.to_checkpoint(architecture.sizes(1.0), 3, state)
    plain = vit(5, (3, 8, 8), hidden=12, depth=2, attention_heads=2, patch=4, head="pooler")
    with raises(ModelError, key="head"):
        plain.to_checkpoint(plain.sizes(1.0), 2, {})


def test_checkpoints_need_no_classifier(tmp_path: Path) -> None:
    """BertModel names its tensors without "bert."; its pooler is the last exit's."""
    theirs = hf.BertModel(hf.BertConfig(**BERT)).eval()
    ours, state = begun(bert(5, (9,), 40, 3, saved(theirs, tmp_path / "bert")), (3,), (9,))
    x = sentences(9)
    with torch.no_grad():
        pooled = theirs(input_ids=x, attention_mask=(x != 3).long()).pooler_output
    close(logits(ours, x), pooled @ state["heads.3.fc.weight"].T + state["heads.3.fc.bias"], least=0.01)


def test_other_heads_give_the_trunk(tmp_path: Path) -> None:
    masked = hf.BertForMaskedLM(hf.BertConfig(**BERT))
    architecture = bert(5, (9,), 40, 3, saved(masked, tmp_path / "masked"))
    trunk = architecture.pretrained((3,))
    assert torch.equal(trunk["embeddings.tokens.weight"], masked.bert.embeddings.word_embeddings.weight)
    assert not [name for name in trunk if name.startswith("heads.")]
    two = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=2))
    architecture = bert(5, (9,), 40, 3, saved(two, tmp_path / "two"))
    _, state = begun(architecture, (3,), (9,))
    assert torch.equal(state["heads.3.pooler.weight"], two.bert.pooler.dense.weight)
    assert tuple(state["heads.3.fc.weight"].shape) == (5, 24) and float(state["heads.3.fc.weight"].abs().max()) <= 0.04
    assert "heads.3" in describe_start(Problem(architecture, (9,), classification, (3,)))[0]


def test_shards_and_the_oldest_names_are_read(tmp_path: Path) -> None:
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5)).eval()
    one = bert(5, (9,), 40, 3, saved(theirs, tmp_path / "one"))
    theirs.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    assert not (tmp_path / "many" / "model.safetensors").exists()
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    old = {}
    for name, tensor in load_file(tmp_path / "one" / "model.safetensors").items():
        ending = ".".join(name.split(".")[-2:])
        old[name.removesuffix(ending) + older.get(ending, ending)] = tensor.half()
    assert len([name for name in old if name.endswith("gamma")]) == 7
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old" / "model.safetensors")
    (tmp_path / "old" / "config.json").write_text((tmp_path / "one" / "config.json").read_text())
    expected = one.pretrained((3,))
    many = bert(5, (9,), 40, 3, str(tmp_path / "many")).pretrained((3,))
    halves = bert(5, (9,), 40, 3, str(tmp_path / "old")).pretrained((3,))
    assert expected.keys() == many.keys() == halves.keys() and len(expected) == 5 + 16 * 3 + 4
    for name, tensor in expected.items():
        assert torch.equal(tensor, many[name]) and torch.equal(tensor.half().float(), halves[name]), name


def test_the_first_blocks_of_a_deeper_checkpoint(tmp_path: Path) -> None:
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=5))
    architecture = bert(5, (9,), 40, 3, saved(theirs, tmp_path / "bert"), layers=2)
    state = architecture.pretrained((2,))
    assert architecture.blocks == 2 and torch.equal(
        state["blocks.1.mlp.fc1.weight"], theirs.bert.encoder.layer[1].intermediate.dense.weight
    )
    assert not [name for name in state if name.startswith(("heads.", "blocks.2"))]


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_activations_are_the_library_s(name: str) -> None:
    block: Any = build_module(replace(bert(hidden=64), encoder=replace(bert(hidden=64).encoder, activation=name)), {
        "hidden": 64, "attention": 64, "mlp": 4, "classes": 2}, (1,)).get_submodule("blocks.0")  # fmt: skip
    x = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(block.mlp.activation(x), hf.activations.ACT2FN[name](x), atol=1e-6, rtol=0)


# ---- ViT -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 8, 8), {}),
        ((1, 12, 12), {}),
        ((3, 8, 8), {"qkv_bias": False, "hidden_act": "relu"}),
        ((3, 8, 8), {"head_dim": 5}),
    ],
)
def test_vit_equals_the_library(tmp_path: Path, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    config = hf.ViTConfig(**VIT, image_size=shape[1], num_channels=shape[0], num_labels=5, **options)
    theirs = hf.ViTForImageClassification(config).eval()
    ours, _ = begun(vit(5, shape, saved(theirs, tmp_path / "vit")), (2, 3), shape)
    x = torch.randn(4, *shape)
    with torch.no_grad():
        close(logits(ours, x), theirs(x).logits)


def test_both_generations_of_names_are_read(tmp_path: Path) -> None:
    """`save_pretrained` writes the names of transformers 4; the module itself has those of 5."""
    theirs = hf.ViTForImageClassification(hf.ViTConfig(**VIT, image_size=8, num_labels=5))
    folder = Path(saved(theirs, tmp_path / "four"))
    (tmp_path / "five").mkdir()
    save_file({n: t.contiguous() for n, t in theirs.state_dict().items()}, tmp_path / "five" / "model.safetensors")
    (tmp_path / "five" / "config.json").write_text((folder / "config.json").read_text())
    on_disk = [set(load_file(tmp_path / kind / "model.safetensors")) for kind in ("four", "five")]
    assert not on_disk[0] & {name for name in on_disk[1] if ".layers." in name}
    four, five = (vit(5, (3, 8, 8), str(tmp_path / kind)).pretrained((3,)) for kind in ("four", "five"))
    assert four.keys() == five.keys() and len(four) == 4 + 16 * 3 + 4
    assert all(torch.equal(four[name], five[name]) for name in four)


def test_deit_keeps_its_second_token(tmp_path: Path) -> None:
    theirs = hf.DeiTForImageClassification(hf.DeiTConfig(**VIT, image_size=8, num_labels=5)).eval()
    ours, _ = begun(vit(5, (3, 8, 8), saved(theirs, tmp_path / "deit")), (1, 3), (3, 8, 8))
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        close(logits(ours, x), theirs(x).logits)


def test_a_deit_with_two_classifiers_gives_its_trunk(tmp_path: Path) -> None:
    theirs = hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**VIT, image_size=8, num_labels=5)).eval()
    architecture = vit(5, (3, 8, 8), saved(theirs, tmp_path / "deit"))
    ours, state = begun(architecture, (3,), (3, 8, 8))
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        tokens = theirs.deit(x).last_hidden_state[:, 0]
    close(logits(ours, x), tokens @ state["heads.3.fc.weight"].T + state["heads.3.fc.bias"], least=0.01)
    assert "heads.3" in describe_start(Problem(architecture, (3, 8, 8), classification, (3,)))[0]


def test_the_first_blocks_of_a_deeper_vit(tmp_path: Path) -> None:
    theirs = hf.ViTForImageClassification(hf.ViTConfig(**VIT, image_size=8, num_labels=5))
    state = vit(5, (3, 8, 8), saved(theirs, tmp_path / "vit"), depth=2).pretrained((2,))
    assert {name.split(".")[1] for name in state if name.startswith("blocks")} == {"0", "1"}
    assert not [name for name in state if name.startswith("heads.")]


def test_positions_are_resized_as_the_library_does(tmp_path: Path) -> None:
    theirs = hf.ViTForImageClassification(hf.ViTConfig(**VIT, image_size=16, num_labels=5)).eval()
    folder = saved(theirs, tmp_path / "vit")
    for shape in ((3, 24, 24), (3, 8, 8), (3, 8, 20)):
        ours, _ = begun(vit(5, shape, folder), (3,), shape)
        x = torch.randn(4, *shape)
        with torch.no_grad():
            close(logits(ours, x), theirs(x, interpolate_pos_encoding=True).logits)


def test_grey_images_repeat_in_each_color(tmp_path: Path) -> None:
    theirs = hf.ViTForImageClassification(hf.ViTConfig(**VIT, image_size=8, num_labels=5)).eval()
    ours, _ = begun(vit(5, (1, 8, 8), saved(theirs, tmp_path / "vit")), (3,), (1, 8, 8))
    x = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        close(logits(ours, x), theirs(x.repeat(1, 3, 1, 1)).logits)


# ---- what does not fit ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(saved(hf.BertModel(hf.BertConfig(**BERT)), tmp_path / "bert"))


def test_a_pickle_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with raises(ModelError, "pytorch_model.bin", path="bert"):
        bert(5, (9,), 40, 3, str(folder)).pretrained((3,))


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in whole.items() if "layer.1.output.dense" not in n}, folder / "model.safetensors")
    with raises(ModelError, '"encoder.layer.1.output.dense"', path="bert"):
        bert(5, (9,), 40, 3, str(folder)).pretrained((3,))
    save_file(whole | {"encoder.layer.2.intermediate.dense.bias": torch.zeros(35)}, folder / "model.safetensors")
    problem = Problem(bert(5, (9,), 40, 3, str(folder)), (9,), classification, (3,))
    with raises(ModelError, '"blocks.2.mlp.fc1.bias"', "(35,)", "(36,)", key="init_from"):
        initial_state(problem, 0)
    save_file(whole | {"pooler.dense.bias": torch.full((24,), torch.nan)}, folder / "model.safetensors")
    with raises(ModelError, key="init_from"):
        initial_state(problem, 0)


def test_damaged_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with raises(ModelError, path="nowhere"):
        bert(checkpoint=str(tmp_path / "nowhere"))
    with raises(ModelError, path="config.json"):
        bert(checkpoint=str(tmp_path))
    (folder / "model.safetensors").write_bytes(b"12345678901234567890")
    with raises(ModelError, path="model.safetensors"):
        bert(5, (9,), 40, 3, str(folder)).pretrained((3,))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"encoder": "../elsewhere.safetensors"}}))
    with raises(ModelError, path="model.safetensors.index.json"):
        bert(5, (9,), 40, 3, str(folder)).pretrained((3,))
    (folder / "config.json").write_text("{")
    with raises(ModelError, path="config.json"):
        bert(5, (9,), 40, 3, str(folder))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"hidden": 32}, Expected("hidden = 32", "hidden_size", 24, key="hidden")),
        (
            {"layers": 4},
            Expected("layers = 4", "num_hidden_layers", 3, key="layers"),
        ),
        ({"attention_heads": 2}, Expected("attention_heads = 2", key="attention_heads")),
        ({"max_positions": 64}, Expected("max_positions = 64", 20, key="max_positions")),
        ({"vocabulary": 41}, Expected(40, 41, key="data.vocabulary")),
        ({"input_shape": (21,)}, Expected(20, key="data.length")),
    ],
)
def test_contradicting_keys_are_refused(folder: Path, keys: dict[str, Any], expected: Expected) -> None:
    with raises(ModelError, expected):
        bert(**{"classes": 5, "input_shape": (9,), "vocabulary": 40, "checkpoint": str(folder), **keys})


def test_other_models_are_refused(folder: Path) -> None:
    with raises(ModelError, path="bert"):
        vit(checkpoint=str(folder))
    config = json.loads((folder / "config.json").read_text())
    for change in ({"position_embedding_type": "relative_key"}, {"is_decoder": True}):
        (folder / "config.json").write_text(json.dumps(config | change))
        with raises(ModelError, path="bert"):
            bert(checkpoint=str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "swish"}))
    with raises(ModelError, '"swish"', key="activation"):
        bert(5, (9,), 40, checkpoint=str(folder))


def test_unfit_images_are_refused(tmp_path: Path) -> None:
    folder = saved(hf.ViTModel(hf.ViTConfig(**VIT, image_size=8)), tmp_path / "vit")
    with raises(ModelError, 3, 2, key="input_shape"):
        vit(5, (2, 8, 8), folder)
    with raises(ModelError, "patch = 2", "patch_size", 4, key="patch"):
        vit(5, (3, 8, 8), folder, patch=2)


def test_the_key_reaches_the_factory(folder: Path) -> None:
    arguments = {"classes": 5, "channels": 9, "input_shape": (9,), "vocabulary": 40, "padding": 3}
    architecture = call_factory(bert, "bert", "[model]", {"checkpoint": str(folder)}, **arguments)
    assert architecture == bert(5, (9,), 40, 3, str(folder)) and hash(architecture) == hash(
        bert(5, (9,), 40, 3, str(folder))
    )
    assert (
        architecture.encoder.hidden,
        architecture.encoder.layers,
        architecture.encoder.head_size,
        architecture.tokens,
    ) == (24, 3, 6, 40)


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_begins_as_the_checkpoint_on_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers rebuild the model from the folder's config.json; both engines end with the same bits."""
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**BERT, num_labels=4))
    folder = saved(theirs, tmp_path / "bert")
    runs = [
        ff.run(
            {"rounds": 1, "local": {"epochs": 1, "lr": 0.01}, "fleet": {"levels": [0.5, 1.0]}, "cohort": {"count": 2}},
            data={"name": data_of("bert", 60), "partition": {"kind": "iid", "clients": 4}},
            model={"name": "bert", "checkpoint": folder},
            engine=engine,
            out=tmp_path / str(i),
        )
        for i, engine in enumerate(({"name": "local"}, {"name": "processes", "workers": 1}))
    ]  # fmt: skip
    problem = runs[0].assembly.federation.problem
    first, early = initial_state(problem, 0), problem.exits[0]
    assert torch.equal(first["embeddings.tokens.weight"], theirs.bert.embeddings.word_embeddings.weight)
    assert early < 3 and any(f" {folder};" in note and note.endswith(f": heads.{early}.") for note in runs[0].notes)
    ours, others = (run.server.state for run in runs)
    assert all(torch.equal(ours[name], others[name]) for name in first)
    assert not torch.equal(ours["heads.3.fc.weight"], theirs.classifier.weight)
