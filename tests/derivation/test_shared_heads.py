"""Early exits that share the last norm and head of the module: what they compute, cost and send."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import build_module, outputs
from fleetfit.anatomy.derive import DerivedArchitecture, DerivedPlan, derive_architecture, restore_architecture
from fleetfit.core import apply_peft
from fleetfit.cost import cost_grid, submodel_cost
from fleetfit.data import Data
from fleetfit.errors import ModelError
from fleetfit.training import batches

WORDS, LENGTH, BLOCKS = 400, 6, 3
TOKENS = torch.randint(1, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Language(nn.Module):
    """Words, blocks of one place each, a norm and a head that may be the table of words; `more` scales the logits."""

    def __init__(self, words: int = WORDS, tied: bool = True, more: float = 1.0) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(words, 8), nn.ModuleList([Block(8) for _ in range(BLOCKS)])
        self.norm, self.head, self.more = nn.LayerNorm(8), nn.Linear(8, words, bias=False), more
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.more * self.head(self.norm(x))
        return logits


def derive(net: nn.Module, heads: str = "auto") -> DerivedArchitecture:
    return derive_architecture(net, TOKENS % net.words.num_embeddings, heads=heads)  # type: ignore[union-attr,operator]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("heads", "tied"), [("auto", True), ("shared", True), ("shared", False)])
def test_each_exit_is_the_module_s_own_norm_and_head(heads: str, tied: bool) -> None:
    net = Language(tied=tied) if tied else Language(30, tied=False)
    x, family = TOKENS % net.words.num_embeddings, derive(net, heads)
    assert family.plan.tail == ("norm", "head")
    full = build_module(family, family.plan.axes, (1, 2, 3))
    full.load_state_dict(family.pretrained((1, 2, 3)), strict=False)
    assert count(full) == count(net)
    hidden = net.words(x)
    for block, logits in zip(net.blocks, outputs(full.eval(), x), strict=True):
        hidden = block(hidden)
        assert torch.equal(logits, net.head(net.norm(hidden)))


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama, tied"])
def test_exits_of_transformers_are_its_hidden_states_norm_and_head(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    some = {"vocab_size": WORDS, "attn_implementation": "eager"}
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=3, n_head=4, n_positions=8, **some)
        net = transformers.GPT2LMHeadModel(config).eval()
        tail = [net.transformer.ln_f, net.lm_head]
    else:
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**shape, **some, tie_word_embeddings=name.endswith("tied"))
        net = transformers.LlamaForCausalLM(config).eval()
        tail = [net.model.norm, net.lm_head]
    blocks = "transformer.h" if name == "gpt2" else "model.layers"
    family = derive_architecture(net, TOKENS, exits=[f"{blocks}.0", f"{blocks}.1"], heads="shared")
    full = build_module(family, family.plan.axes, (1, 2, 3))
    full.load_state_dict(family.pretrained((1, 2, 3)), strict=False)
    states = net(TOKENS, output_hidden_states=True).hidden_states
    for logits, state in zip(outputs(full.eval(), TOKENS)[:2], states[1:3], strict=True):
        assert torch.equal(logits, tail[1](tail[0](state)))
    assert count(full) == count(net)


def test_only_a_large_head_is_shared_unasked() -> None:
    assert derive(Language(20)).plan.tail == () == derive(Language(), heads="own").plan.tail
    own = derive(Language(), heads="own")
    assert count(build_module(own, own.plan.axes, (1, 2, 3))) > count(Language()) + 2 * 8 * WORDS


def test_a_head_that_is_more_than_modules_is_not_shared() -> None:
    assert derive(Language(more=3.0)).plan.tail == ()
    with raises(ModelError, "norm, head", key="derive.heads"):
        derive(Language(more=3.0), heads="shared")


def test_the_plan_says_what_is_shared() -> None:
    net = Language()
    payload = derive(net).plan.to_payload()
    assert DerivedPlan.from_payload(payload).tail == ("norm", "head")
    assert DerivedPlan.from_payload({k: v for k, v in payload.items() if k != "tail"}).tail == ()
    with raises(ModelError, "no module", key="model.name"):
        restore_architecture(net, {**payload, "tail": ["norm", "tail"]})


@pytest.mark.parametrize("tied", [True, False])
def test_parts_add_up_to_what_is_counted(tied: bool) -> None:
    family = derive(Language(60, tied=tied), heads="shared")
    for cost in ("multiply_adds", "parameters"):
        grid = cost_grid(family, (LENGTH,), cost)
        for width in (0.5, 1.0):
            for exits in ((1,), (1, 2), (2, 3), (1, 2, 3)):
                counted = submodel_cost(family, (family.sizes(width), exits), (LENGTH,))
                assert grid.estimate(width, exits) == getattr(counted, cost)


def test_what_is_shared_is_frozen_with_the_rest() -> None:
    importlib.import_module("peft")
    family = derive(Language())
    tuned = apply_peft(family, {"name": "lora", "targets": ["*.up"], "rank": 2})
    module = build_module(tuned, tuned.sizes(1.0), (1, 2, 3))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * BLOCKS and all("lora_" in name for name in trained)
    with raises(ModelError, "model.derive.heads", key="peft"):
        apply_peft(family, {"name": "frozen"})


def make_data() -> Data:
    x = torch.randint(1, WORDS, (60, LENGTH), generator=torch.Generator().manual_seed(1))
    splits = {"train": torch.arange(40), "test": torch.arange(40, 60)}
    return Data("words", x, x.roll(-1, 1), splits, WORDS, task="next_token", vocabulary=WORDS)


def train(out: Path, clients: int = 4, **changes: Any) -> ff.Run:
    data = {"name": make_data(), "partition": {"kind": "iid", "clients": clients}}
    torch.manual_seed(0)
    return ff.run(data=data, model=Language(), rounds=1, local={"max_steps": 2}, out=out, **changes)


def test_levels_train_the_shared_head(tmp_path: Path) -> None:
    run = train(tmp_path / "run", method={"name": "scalefl"}, fleet={"groups": [{"budget": 0.8}, {"budget": 1.0}]})
    assert not run.metrics[0]["failures"] and not any(name.startswith("heads.") for name in run.server.state)
    levels = run.assembly.federation.levels
    assert {level.submodel.exits[-1] for level in levels} != {BLOCKS} and run.accuracy("global") >= 0


def test_logits_of_an_evaluation_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller batches have the same hits; a sample's logits are what its exits give at each place."""
    sizes: list[int] = []
    forward = Language.forward

    def note(self: Language, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and not x.is_meta:
            sizes.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(Language, "forward", note)
    whole = train(tmp_path / "whole", clients=2)
    assert max(sizes) == 20  # the test set
    sizes.clear()
    monkeypatch.setattr(batches, "_LOGITS_BYTES", 3 * 4 * LENGTH * WORDS * (3 * 1 + 2))
    bounded = train(tmp_path / "bounded", clients=2)
    assert max(sizes) == 4  # of three, as a last sample joins the batch before it
    assert bounded.accuracy("global") == whole.accuracy("global")
