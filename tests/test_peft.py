"""Fine-tuning modes: what is trained and travels, what is put in, that it begins as nothing, and cuts like the rest."""

import importlib
import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from foreign_models import FOREIGN
from sampling import one_of_each, some_quick
from support import Expected, raises
from tiny import spec_of
from torch import Tensor, nn
from zoo import CLASSES, Made

import fleetfit as ff
from fleetfit import names
from fleetfit.anatomy import Architecture, State, build_module, infer_layout, named_tensors, outputs
from fleetfit.anatomy.derive import derive_architecture
from fleetfit.anatomy.proof import check_layout
from fleetfit.architecture import Axis
from fleetfit.core import apply_peft
from fleetfit.errors import ConfigError, FleetFitError, ModelError
from fleetfit.models.bert import bert
from fleetfit.models.ree import recurrent
from fleetfit.models.vim import vim
from fleetfit.models.vit import deit_s, vit
from fleetfit.peft.frozen import frozen
from fleetfit.peft.lora import lora
from fleetfit.peft.parallel_adapter import parallel_adapter
from fleetfit.peft.serial_adapter import serial_adapter
from fleetfit.peft.ssf import Ssf, ssf
from fleetfit.submodel import extract

MODES = [name for name in names.list_names("peft") if name != "full"]
SMALL = {"hidden": 24, "attention_heads": 3, "patch": 4}


def small(heads: Any = "whole", depth: int = 3) -> Architecture:
    return vit(5, (1, 8, 8), depth=depth, heads=heads, **SMALL)


def texts() -> Architecture:
    return bert(3, (7,), vocabulary=11, hidden=24, layers=3, attention_heads=3, max_positions=8, dropout=0.0)


def mamba() -> Architecture:
    return vim(3, (1, 8, 8), depth=2, hidden=16, patch=4, state=4)


def mode(name: str, architecture: Architecture, **settings: Any) -> Architecture:
    if name in ("lora", "serial_adapter", "parallel_adapter"):
        settings = {"rank": 4, **settings}
    return apply_peft(architecture, {"name": name, **settings})


def built(architecture: Architecture, exits: tuple[int, ...] | None = None, width: float = 1.0) -> nn.Module:
    torch.manual_seed(3)
    return build_module(architecture, architecture.sizes(width), exits or tuple(architecture.positions)).eval()


def filled(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    for name, tensor, _ in named_tensors(module):
        if name in state:
            tensor.data.copy_(state[name])
    return module


def redrawn(module: nn.Module) -> dict[str, Tensor]:
    """Draw every tensor anew, so that nothing is zero, one or a multiple of what it was."""
    rng = torch.Generator().manual_seed(4)
    for _, tensor, _ in named_tensors(module):
        tensor.data = 0.4 * torch.randn(tensor.shape, generator=rng) + 0.1
    return {name: tensor.detach() for name, tensor, _ in named_tensors(module)}


def proven(architecture: Architecture, shape: tuple[int, ...], exits: tuple[int, ...]) -> None:
    """The proof of a layout."""
    report = check_layout(architecture, infer_layout(architecture, exits, input_shape=shape), input_shape=shape)
    assert max(report.permutation.values()) < 1e-9
    assert not report.not_proved
    assert report.cuts and all(error < 1e-9 for error in report.cuts.values())


# ---- what is put in, and how much of it -------------------------------------------------


@pytest.mark.parametrize(
    ("put", "each", "rest"),
    [(lora, 49_152, 0), (serial_adapter, 49_984, 0), (parallel_adapter, 49_984, 0), (ssf, 8_448, 768), (frozen, 0, 0)],
)
def test_numbers_per_block_of_deit_s(put: Any, each: int, rest: int) -> None:
    """ReeFL (ICML 2024): rank 32; SSF scales what the patches become too. The classifiers stay as they are."""
    architecture = put(deit_s(classes=100))
    with torch.device("meta"):
        module = build_module(architecture, architecture.sizes(1.0), (3, 12))
    trained = {n: p.numel() for n, p in module.named_parameters() if architecture.trains(n)}
    counts = [sum(n for name, n in trained.items() if name.startswith(f"blocks.{i}.")) for i in range(12)]
    assert counts == [each] * 12
    heads = sum(n for name, n in trained.items() if name.startswith("heads."))
    assert heads == 2 * 39_268
    assert sum(trained.values()) == 12 * each + heads + rest
    assert {n for n, p in module.named_parameters() if p.requires_grad} == set(trained)


@pytest.mark.parametrize("name", ["lora", "parallel_adapter"])
def test_tuned_modules_are_known_below_ree(name: str) -> None:
    """A checkpoint lacks Ree, its classifier and what is put in, and nothing else."""
    plain = recurrent(small(), (1, 8, 8))
    wrapped = recurrent(mode(name, small()), (1, 8, 8))
    theirs, ours = infer_layout(plain).tensors, infer_layout(wrapped).tensors
    new = {n for n in ours if wrapped.is_new(n)}
    assert {n for n in new if not n.startswith("backbone.")} == {n for n in theirs if not n.startswith("backbone.")}
    put_in = {n for n in new if n.startswith("backbone.")}
    assert len(put_in) > 3 and put_in.isdisjoint(theirs)


@pytest.mark.parametrize("name", MODES)
def test_equal_models_around_equal_ones_have_one_layout(name: str) -> None:
    """It is read once, however often a run makes the model anew."""
    assert infer_layout(mode(name, small())) is infer_layout(mode(name, small()))
    assert infer_layout(mode(name, small())) is not infer_layout(mode(name, small(depth=2)))


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("make", [small, texts, mamba], ids=lambda f: f.__name__)
def test_a_tuned_model_begins_as_the_plain_one(name: str, make: Any) -> None:
    """With the plain model's tensors under their new names, outputs are the plain model's."""
    if name == "lora" and make is mamba:
        pytest.skip("Vision Mamba has no query and value; its targets have to be said")
    plain = make()
    tuned_one = mode(name, plain)
    theirs = built(plain)
    state = {n: t.detach() for n, t, _ in named_tensors(theirs)}
    ours = filled(built(tuned_one), tuned_one.rename_tensors(state))
    adopted = tuned_one.rename_tensors(state)
    own = {n for n, _, _ in named_tensors(ours)}
    assert set(adopted) <= own and {n for n in own - set(adopted) if not tuned_one.is_new(n)} == set()
    x = torch.randint(11, (4, 7)) if make is texts else torch.randn(4, 1, 8, 8)
    for a, b in zip(outputs(ours, x), outputs(theirs, x), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_lora_is_its_formula() -> None:
    """W x + b + (alpha / rank) B A x in query and value, and nothing in key (Hu et al., 2022)."""
    module = built(lora(small(), rank=4, alpha=6.0))
    state = redrawn(module)
    x = torch.randn(2, 5, 24)
    attention = module.get_submodule("blocks.1.attention")
    for layer in ("query", "value"):
        at = f"blocks.1.attention.{layer}."
        w, b = state[f"{at}base_layer.weight"], state[f"{at}base_layer.bias"]
        a_, b_ = state[f"{at}lora_A.default.weight"], state[f"{at}lora_B.default.weight"]
        expected = x @ w.T + b + (6.0 / 4) * (x @ a_.T) @ b_.T
        torch.testing.assert_close(attention.get_submodule(layer)(x), expected, atol=1e-5, rtol=0)
    assert "blocks.1.attention.key.weight" in state


@pytest.mark.parametrize(("put", "serial"), [(serial_adapter, True), (parallel_adapter, False)])
def test_an_adapter_is_its_formula(put: Any, serial: bool) -> None:
    """f(x) + up(gelu(down(z))) with z the sub-layer's output (serial) or input (parallel), at both sub-layers."""
    module = built(put(small(), rank=4))
    plain = built(small())
    filled(plain, redrawn(module))
    x = torch.randn(2, 5, 24)
    for name in ("blocks.1.attention", "blocks.2.mlp"):
        part, other = module.get_submodule(name), plain.get_submodule(name)
        down, up = part.get_submodule("tuning.down"), part.get_submodule("tuning.up")
        y = other(x)
        z = down(y if serial else x)
        gelu = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        torch.testing.assert_close(part(x), y + up(gelu), atol=1e-5, rtol=1e-5)


def test_ssf_is_its_formula() -> None:
    """scale * f(x) + shift per channel, after linear layers, norms and the patches' convolution."""
    module = built(ssf(small()))
    plain = built(small())
    state = redrawn(module)
    filled(plain, state)
    x = torch.randn(2, 5, 24)
    for name in ("blocks.0.norm1", "blocks.1.attention.key", "blocks.2.mlp.fc1"):
        expected = plain.get_submodule(name)(x) * state[f"{name}.tuning.scale"] + state[f"{name}.tuning.shift"]
        torch.testing.assert_close(module.get_submodule(name)(x), expected)
    images, name = torch.randn(2, 1, 8, 8), "embeddings.patches"
    expected_pixels = plain.get_submodule(name)(images).permute(0, 2, 3, 1)
    expected_pixels = (expected_pixels * state[f"{name}.tuning.scale"] + state[f"{name}.tuning.shift"]).permute(
        0, 3, 1, 2
    )
    torch.testing.assert_close(module.get_submodule(name)(images), expected_pixels)


def test_ssf_leaves_out_layers_without_a_weight() -> None:
    tuned = Ssf(small(), ("*",))
    assert tuned.accepts(nn.LayerNorm(4)) and not tuned.accepts(nn.LayerNorm(4, elementwise_affine=False))


class Normalized(nn.Module):
    """A classifier of one exit that normalizes its samples by buffers of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(6, hidden), nn.Linear(hidden, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("std", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.body((x - self.mean) / self.std)))


def test_a_classifier_before_buffers_is_trained() -> None:
    architecture = frozen(Made({"hidden": Axis(8), "classes": CLASSES}, lambda s: Normalized(s["hidden"]), (6,)))
    names_ = ("body.weight", "fc.weight", "fc.bias", "mean", "std")
    assert [name for name in names_ if architecture.trains(name)] == ["fc.weight", "fc.bias"]


# ---- cut by width and depth -------------------------------------------------


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("heads", ["whole", "fixed"])
def test_the_layout_of_a_tuned_vit_is_proven(name: str, heads: str) -> None:
    proven(mode(name, small(heads)), (1, 8, 8), (1, 2, 3))


@pytest.mark.parametrize("name", [m for m in MODES if m != "lora"])
def test_the_layout_of_a_tuned_mamba_is_proven(name: str) -> None:
    proven(mode(name, mamba()), (1, 8, 8), (1, 2))


@pytest.mark.parametrize("name", MODES)
def test_the_layout_of_a_tuned_bert_is_proven(name: str) -> None:
    proven(mode(name, texts()), (7,), (1, 3))


def test_lora_follows_orders_that_a_pass_shows() -> None:
    """With fixed heads the output projection is stacked along its input: A's columns are."""
    architecture = lora(small("fixed"), rank=2, targets=("*.out", "*.in_proj", "*.fc2"))
    proven(architecture, (1, 8, 8), (1, 3))
    proven(lora(mamba(), rank=2, targets=("*.in_proj",)), (1, 8, 8), (2,))


@pytest.mark.parametrize("name", MODES)
def test_the_layout_has_trained_tensors_only(name: str) -> None:
    architecture = mode(name, small())
    layout = infer_layout(architecture)
    assert all(architecture.trains(n) for n in layout.tensors) and not any(architecture.trains(n) for n in layout.base)
    plain = infer_layout(small())
    assert set(architecture.rename_tensors(dict.fromkeys(plain.tensors))) == set(layout.base) | {  # type: ignore[arg-type]
        n for n in layout.tensors if n.startswith("heads.")
    }


# ---- in a run -------------------------------------------------

RUN: dict[str, Any] = {
    "rounds": 2,
    "data": {"name": "digits", "partition": {"kind": "iid", "clients": 6}},
    "model": {"name": "vit", "hidden": 16, "depth": 4, "attention_heads": 2, "patch": 4},
    "fleet": {
        "levels": [{"depth": 1, "budget": 0.25}, {"depth": 2, "budget": 0.5}, {"budget": 1.0}],
        "groups": [{"budget": 0.25}, {"budget": 0.5}, {"budget": 1.0}],
        "tolerance": 0.3,
    },
    "local": {"epochs": 1, "max_steps": 3, "lr": 0.1, "clip_value": 1.0},
    "cohort": {"count": 4},
    "evaluate": {"batch_norm": ["static"], "every": 0, "statistics_samples": 100},
}
METHODS = ("depthfl", "inclusivefl", "exclusivefl", "scalefl", "reefl", "fedavg", "heterofl", "decoupled", "fedrolex")
OTHERS = [name for name in names.list_names("methods") if name not in METHODS]
CASES = [*((name, mode) for name in METHODS for mode in ("full", *MODES)), *((name, "lora") for name in OTHERS)]


def settings(name: str, tuning: str) -> dict[str, Any]:
    rank = {"rank": 4} if tuning in ("lora", "serial_adapter", "parallel_adapter") else {}
    fleet = RUN["fleet"]
    if name not in ("depthfl", "inclusivefl", "exclusivefl", "reefl"):  # they cut width
        fleet = {"groups": RUN["fleet"]["groups"], "tolerance": 0.5}
    data = {**RUN["data"], "server": {"name": "digits", "seed": 1}} if name == "feddf" else RUN["data"]
    return {**RUN, "data": data, "fleet": fleet, "method": spec_of(name), "peft": {"name": tuning, **rank}}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the plain model to start from."""
    return ff.run(
        {**RUN, "rounds": 1, "method": {"name": "all_large"}}, out=tmp_path_factory.mktemp("runs") / "all"
    ).folder


@pytest.mark.parametrize(("name", "tuning"), some_quick(CASES, one_of_each(CASES)))
def test_every_method_trains_in_every_mode(name: str, tuning: str, pretrained: Path, tmp_path: Path) -> None:
    """Two rounds; what is frozen stays as it began, and only the rest travels and is in the checkpoint."""
    run = ff.run({**settings(name, tuning), "init_from": str(pretrained)}, out=tmp_path / "run")
    assert not [f for m in run.metrics for f in m["failures"]]
    assert all(m["train"]["clients"] for m in run.metrics)
    layout, base = run.assembly.federation.problem.layout, run.assembly.federation.problem.base
    assert set(base) == set(layout.base) and (tuning == "full") == (not base)
    names = {n.rpartition("/")[2] for n in run.server.state}
    assert names == set(layout.tensors)
    began = ff.load(pretrained).server.state
    adopted = run.assembly.federation.problem.architecture.rename_tensors(began)
    for key, tensor in base.items():
        assert torch.equal(tensor, adopted[key]), key
    for level in run.assembly.federation.levels:
        module = run.model(level.name)  # type: ignore[arg-type]  # AdaptiveFL's are called S1, M1 and so on
        here: State = extract(layout.frozen, base, level.submodel) if base else {}
        own = {n: t for n, t, _ in named_tensors(module)}
        assert all(torch.equal(own[n], t) for n, t in here.items())


@pytest.mark.parametrize(
    ("name", "tuning"),
    [
        ("reefl", "lora"),
        pytest.param("scalefl", "frozen", marks=pytest.mark.slow),
        pytest.param("scalefl", "lora", marks=pytest.mark.slow),
        pytest.param("depthfl", "ssf", marks=pytest.mark.slow),
    ],
)
def test_engines_agree_on_tuned_models(name: str, tuning: str, pretrained: Path, tmp_path: Path) -> None:
    described = {**settings(name, tuning), "init_from": str(pretrained)}
    here = ff.run(described, out=tmp_path / "local")
    there = ff.run({**described, "engine": {"name": "processes", "workers": 2}}, out=tmp_path / "processes")
    assert here.server.state.keys() == there.server.state.keys()
    assert all(torch.equal(t, there.server.state[n]) for n, t in here.server.state.items())


def test_resume_does_not_need_the_start(pretrained: Path, tmp_path: Path) -> None:
    """What is frozen is in the run folder, once."""
    start = tmp_path / "start"
    start.mkdir()
    for part in ("config.toml", "checkpoints", "summary.json", "metrics.jsonl", "plan.toml", "environment.json"):
        source = pretrained / part
        (start / part).symlink_to(source)
    described = {**settings("reefl", "lora"), "init_from": str(start)}
    whole = ff.run(described, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(report: Any) -> None:
        raise Stop

    with pytest.raises(Stop):
        ff.run(described, out=tmp_path / "half", on_round=stop)
    for part in start.iterdir():
        part.unlink()
    start.rmdir()
    resumed = ff.resume(tmp_path / "half")
    assert all(torch.equal(t, whole.server.state[n]) for n, t in resumed.server.state.items())
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(resumed.model(2)(x)[-1], whole.model(2)(x)[-1])


def test_a_tuned_run_can_be_started_from(pretrained: Path, tmp_path: Path) -> None:
    """Another run takes both what was frozen and what was trained."""
    first = ff.run({**settings("depthfl", "ssf"), "init_from": str(pretrained)}, out=tmp_path / "first")
    second = ff.run({**settings("depthfl", "ssf"), "init_from": str(first.folder),
                     "local": {"lr": 1e-12, "momentum": 0.0}}, out=tmp_path / "second")  # fmt: skip
    assert all(torch.allclose(t, first.server.state[n], atol=1e-6) for n, t in second.server.state.items())
    problem = second.assembly.federation.problem
    assert all(torch.equal(t, first.assembly.federation.problem.base[n]) for n, t in problem.base.items())


def test_random_frozen_backbones_are_noted(tmp_path: Path) -> None:
    run = ff.run({**settings("depthfl", "frozen"), "rounds": 1}, out=tmp_path / "run")
    assert any("checkpoint" in note for note in run.notes)


def test_a_frozen_backbone_has_no_gradients() -> None:
    """Below the first thing that is trained, nothing is kept for a backward pass."""
    module = built(frozen(small())).train()
    for logits in outputs(module, torch.randn(2, 1, 8, 8)):
        logits.sum().backward()
    assert {n for n, p in module.named_parameters() if p.grad is not None} == {
        n for n, _ in module.named_parameters() if n.startswith("heads.")
    }
    seen = []
    module.get_submodule("blocks.1").register_forward_hook(lambda part, inputs, output: seen.append(output))
    module(torch.randn(2, 1, 8, 8))
    assert not seen[0].requires_grad
    adapted = built(serial_adapter(small(), rank=2, targets=("blocks.2.*",))).train()
    adapted.get_submodule("blocks.1").register_forward_hook(lambda part, inputs, output: seen.append(output))
    adapted.get_submodule("blocks.2").register_forward_hook(lambda part, inputs, output: seen.append(output))
    adapted(torch.randn(2, 1, 8, 8))
    assert [output.requires_grad for output in seen[1:]] == [False, True]


# ---- what does not fit -------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "lorra"}, Expected('"lorra"', '"lora"', kind=ConfigError)),
        ({"name": "lora", "rank": 0}, Expected(1, key="peft.rank", kind=ModelError)),
        ({"name": "serial_adapter", "rank": 0}, Expected(1, key="peft.rank", kind=ModelError)),
        ({"name": "lora", "targets": ["*.qery"]}, Expected("attention.query", key="peft.targets", kind=ModelError)),
        ({"name": "lora", "alpha": -1.0}, Expected(0, key="peft.alpha", kind=ModelError)),
        ({"name": "frozen", "rank": 3}, Expected('"rank"', kind=ConfigError)),
    ],
)
def test_unfit_targets_are_refused(spec: Any, expected: Expected) -> None:
    with raises(FleetFitError, expected):
        apply_peft(small(), spec)


def test_lora_without_a_target_lists_layers() -> None:
    with raises(ModelError, "mixer.in_proj", key="peft.targets"):
        lora(mamba())


def test_lora_silences_unrelated_warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real = importlib.import_module("peft")
    taken = []

    class Talkative(ModuleType):
        def __getattr__(self, name: str) -> Any:
            taken.append(name)
            logging.getLogger("torchao").warning("Failed to load kernels.")
            return getattr(real, name)

    monkeypatch.setitem(sys.modules, "peft", Talkative("peft"))
    caplog.clear()  # of what the import of the real one said
    architecture = lora(small(), rank=2)
    build_module(architecture, architecture.sizes(1.0), tuple(architecture.positions))
    assert "LoraConfig" in taken
    assert caplog.text == ""
    logging.getLogger("torchao").warning("Another use.")
    assert "Another use." in caplog.text


LANGUAGE = {"vocab_size": 30, "attn_implementation": "eager"}


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    net: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LANGUAGE, **shape, **heads))
    return net.eval()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    net: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**LANGUAGE, **shape))
    return net.eval()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("make", "targets"), [(llama, ["q_proj", "v_proj"]), (gpt2, ["c_attn"])])
def test_lora_of_a_language_model_is_peft_s(make: Any, targets: list[str]) -> None:
    """The default targets are peft's for the family; logits equal peft's own model, merged ones its merged model."""
    peft, net, tokens = importlib.import_module("peft"), make(), torch.randint(1, 30, (2, 7))
    family = derive_architecture(net, tokens)
    tuned = lora(family, rank=2, alpha=6.0)
    ours = build_module(tuned, tuned.sizes(1.0), (2,)).eval()
    state = redrawn(ours)
    merged = build_module(family, family.sizes(1.0), (2,)).eval()
    merged.load_state_dict(tuned.merge(state))
    config = peft.LoraConfig(r=2, lora_alpha=6.0, target_modules=targets, fan_in_fan_out=make is gpt2)
    theirs = peft.get_peft_model(net, config)
    own = {name.replace("net.", "base_model.model.", 1): tensor for name, tensor in state.items()}
    assert not theirs.load_state_dict(own, strict=False).unexpected_keys
    assert torch.equal(outputs(ours, tokens)[-1], theirs(tokens).logits)
    expected = theirs.merge_and_unload()(tokens).logits
    torch.testing.assert_close(outputs(merged, tokens)[-1], expected, atol=1e-5, rtol=0)
    check_layout(tuned, input_shape=(7,))


def test_recurrent_exits_and_tuning_go_together() -> None:
    proven(recurrent(mode("lora", small("fixed")), (1, 8, 8)), (1, 8, 8), (1, 3))


# ---- models of other people --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ViT", "Text", "Mixer"])
def test_only_classifiers_of_other_names_are_trained(name: str) -> None:
    plain = FOREIGN[name].build_architecture()
    architecture = built(mode("frozen", plain))
    by_exit = infer_layout(plain, tuple(plain.positions), input_shape=FOREIGN[name].input_shape).tensors
    classifiers = {tensor for tensor, layout in by_exit.items() if layout.exit is not None and layout.trainable}
    assert {tensor for tensor, p in architecture.named_parameters() if p.requires_grad} == classifiers
    assert 2 * len(plain.positions) <= len(classifiers) < len(list(architecture.parameters())) // 2


class Plain(Architecture):
    """One block, and a classifier whose name says nothing."""

    blocks = 1

    def __init__(self, widens: bool = False) -> None:
        self.axes = {"hidden": Axis(6), "classes": Axis(3, scaled=False)}
        self.widens = widens

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        hidden = axes["hidden"]
        parts = [("body", nn.Linear(5, hidden)), ("act", nn.ReLU()), ("fc", nn.Linear(hidden, 3))]
        parts += [("more", nn.Linear(3, hidden))] if self.widens else []
        return nn.Sequential(OrderedDict(parts))


def test_the_last_part_of_a_model_with_one_exit_is_its_classifier() -> None:
    architecture = built(mode("frozen", Plain()))
    assert {name for name, p in architecture.named_parameters() if p.requires_grad} == {"fc.weight", "fc.bias"}
    with raises(ModelError, "heads.1"):
        built(mode("frozen", Plain(widens=True)))
