"""Parameters that the samples do not use: those of modules that ran stay as they are; whole modules are refused."""

from pathlib import Path

import pytest
import torch
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import build_module
from fleetfit.anatomy.derive import derive_architecture, restore_architecture
from fleetfit.data import Data
from fleetfit.errors import ModelError

X = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))


class Embedding(nn.Module):
    """Patches, and the token that stands for a masked one, as pretrained transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token, self.fc = nn.Parameter(torch.ones(8)), nn.Linear(16, 8)
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, masked: bool = False) -> Tensor:
        return self.mask_token.expand(len(x), 8) if masked else self.fc(x.flatten(1)) + self.shift


class Masked(nn.Module):
    def __init__(self, further: bool = False) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = Embedding(), nn.Linear(8, 8), nn.Linear(8, 3)
        if further:
            self.auxiliary = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.embedding(x).relu()).relu()
        if self.training and hasattr(self, "auxiliary"):
            x = x + self.auxiliary(x).mean()
        logits: Tensor = self.head(x)
        return logits


def make_data() -> Data:
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(60, 1, 4, 4, generator=rng), torch.randint(3, (60,), generator=rng)
    return Data("noise", x, y, {"train": torch.arange(40), "test": torch.arange(40, 60)}, 3)


def test_they_are_frozen_and_named() -> None:
    derived = derive_architecture(Masked(), X)
    assert derived.plan.unused == {"embedding.mask_token"} and not derived.trains("net.embedding.mask_token")
    assert any("embedding.mask_token" in sentence for sentence in derived.describe())
    level = build_module(derived, derived.sizes(0.5), (1,))
    assert {name for name, p in level.named_parameters() if not p.requires_grad} == {"net.embedding.mask_token"}
    again = restore_architecture(Masked(), derived.plan.to_payload())
    assert not again.trains("net.embedding.mask_token") and again.trains("net.embedding.fc.weight")


def test_a_run_sends_and_changes_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = {"name": make_data(), "partition": {"kind": "iid", "clients": 4}}
    run = ff.run(model=Masked(), data=data, rounds=2, method="heterofl", out=tmp_path / "run")
    assert not run.metrics[0]["failures"] and "net.embedding.mask_token" not in run.server.state
    assert torch.equal(run.model().net.embedding.mask_token, torch.ones(8))


def test_a_level_without_the_block_that_has_one() -> None:
    """The token is behind the first exit, so that the smallest level lacks it."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)])
            self.last, self.head = Embedding(), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            for block in self.blocks:
                x = block(x)
            logits: Tensor = self.head(self.last(x))
            return logits

    derived = derive_architecture(Late(), X, exits=["blocks.0"])
    assert derived.plan.unused == {"last.mask_token"}
    shallow, full = (build_module(derived, derived.sizes(1.0), exits) for exits in ((1,), (1, 2)))
    assert "net.last.mask_token" not in dict(shallow.named_parameters())
    assert not dict(full.named_parameters())["net.last.mask_token"].requires_grad


def test_a_module_that_did_not_run_is_refused() -> None:
    with raises(ModelError, "auxiliary.weight", key="model"):
        derive_architecture(Masked(further=True), X)


def test_an_image_classifier_of_transformers_with_a_mask_token() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Dinov2Config(**sizes, num_channels=1, num_labels=3, attn_implementation="eager")
    net = transformers.Dinov2ForImageClassification(config).eval()
    derived = derive_architecture(net, torch.randn(2, 1, 16, 16))
    assert derived.plan.unused == {"dinov2.embeddings.mask_token"} and len(derived.axes) > 2


class MaskedInTraining(Masked):
    """The token of a mask takes a sample's place in training, as in models of speech."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        if self.training:
            hidden = hidden.clone()
            hidden[0] = self.embedding.mask_token
        logits: Tensor = self.head(self.inner(hidden.relu()).relu())
        return logits


def test_those_that_training_alone_uses_are_refused_before_it() -> None:
    with raises(ModelError, "embedding.mask_token", key="model"):
        derive_architecture(MaskedInTraining(), X)
