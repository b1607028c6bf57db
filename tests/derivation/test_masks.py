"""Padded tokens: forward gets its mask in the right sense, so that a text has the logits that it has alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_transformers import bert, distilbert
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import build_module
from fleetfit.anatomy.derive import restore_architecture
from fleetfit.anatomy.plan import DerivedPlan
from fleetfit.cost import full_cost
from fleetfit.data import Data

pytest.importorskip("transformers", reason="the extra transformers is not installed")

WORDS, PLACES, CLASSES, FILL = 30, 15, 3, 4
LENGTHS = (2, 7, PLACES)


class Texts(nn.Module):
    """A table of words, hidden values at each place, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.fc = nn.Embedding(WORDS, 12), nn.Linear(12, 16), nn.Linear(16, CLASSES)

    def read(self, x: Tensor) -> Tensor:
        return torch.relu(self.up(self.table(x)))


class OnesAreTokens(Texts):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Any:
        weights = torch.ones_like(x) if attention_mask is None else attention_mask
        hidden = (self.read(x) * weights.unsqueeze(-1)).sum(1) / weights.sum(1, keepdim=True)
        return {"logits": self.fc(hidden)}


class TrueIsPadding(Texts):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.fc(self.read(x).masked_fill(mask.unsqueeze(-1), float("-inf")).amax(1))
        return out


class NamedForTheOther(Texts):
    """Its name says padding, and ones are tokens; it takes a faster path where there is no padding."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        hidden = self.read(x)
        if padding_mask is not None and not padding_mask.bool().all():
            hidden = hidden.masked_fill(padding_mask.unsqueeze(-1) == 0, -9.0)
        out: Tensor = self.fc(hidden.amax(1))
        return out


class Inverting(Texts):
    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        share = self.read(x).softmax(-1)
        if pad_mask is not None:
            share = share * (1.0 - pad_mask).unsqueeze(-1)
        out: Tensor = self.fc(share.sum(1))
        return out


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(WORDS, 12), nn.GRU(12, 16, batch_first=True)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.cells(self.table(x))[0]
        ends = torch.full_like(x[:, 0], x.shape[1]) if lengths is None else lengths
        out: Tensor = self.fc(hidden[torch.arange(len(x), device=x.device), ends - 1])
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        hidden = self.layers(self.table(x), src_key_padding_mask=src_key_padding_mask)
        out: Tensor = self.fc(hidden[:, 0])
        return out


class MeanOfAll(Encoder):
    """The mask is for attention alone; the mean has padded places, too."""

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.fc(self.layers(self.table(x), src_key_padding_mask=src_key_padding_mask).mean(1))
        return out


class Longest(LastState):
    """Reads the greatest length as a number."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return super().forward(x)
        steps = torch.arange(int(lengths.max()), device=x.device)
        hidden = self.cells(self.table(x))[0][:, : len(steps)]
        out: Tensor = self.fc((hidden * (steps == lengths[:, None] - 1).unsqueeze(-1)).sum(1))
        return out


class Packed(LastState):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return super().forward(x)
        packed = nn.utils.rnn.pack_padded_sequence(self.table(x), lengths.cpu(), True, enforce_sorted=False)
        out: Tensor = self.fc(self.cells(packed)[1][-1])
        return out


class OwnMask(Texts):
    def forward(self, x: Tensor) -> Tensor:
        tokens = (x != FILL).unsqueeze(-1)
        out: Tensor = self.fc((self.read(x) * tokens).sum(1) / tokens.sum(1))
        return out


class NoMask(Texts):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.read(x).mean(1))
        return out


def make_gpt2() -> nn.Module:
    from transformers import AutoModelForSequenceClassification, GPT2Config

    config = GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=16, num_labels=CLASSES,
                        pad_token_id=FILL, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def make_texts() -> Data:
    rng = torch.Generator().manual_seed(7)
    x = torch.randint(FILL + 1, WORDS, (72, PLACES), generator=rng)
    for i in range(len(x)):
        x[i, LENGTHS[i % 3] :] = FILL
    y = torch.arange(72) % CLASSES
    splits = {"train": torch.arange(48), "test": torch.arange(48, 72)}
    return Data("texts", x, y, splits, CLASSES, vocabulary=WORDS, padding=FILL)


def find_logits(out: Any) -> Tensor:
    logits: Tensor = out if isinstance(out, Tensor) else out["logits"]
    return logits


def compare_with_alone(net: nn.Module, run: Callable[[Tensor], Tensor], **alone: Any) -> None:
    """Compare the logits of padded texts with those that the instance gives for each text alone."""
    data, net = make_texts(), net.eval()
    x = data.x[data.split("test")]
    with torch.no_grad():
        logits = run(x)
        for row, own in zip(x, logits, strict=True):
            text = row[row != FILL].unsqueeze(0)
            expected = find_logits(net(text, **{name: make(text) for name, make in alone.items()}))[0]
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "ones are tokens": (OnesAreTokens, {}),
    "true is padding, and required": (TrueIsPadding, {"mask": lambda text: torch.zeros_like(text, dtype=torch.bool)}),
    "a misleading name": (NamedForTheOther, {}),
    "one minus the mask": (Inverting, {}),
    "lengths": (LastState, {}),
    "the greatest length": (Longest, {}),
    "PyTorch's encoder": (Encoder, {}),
    "its own mask": (OwnMask, {}),
    "DistilBERT": (lambda: distilbert(CLASSES), {}),
    "BERT": (lambda: bert(CLASSES), {}),
    "GPT-2": (lambda: make_gpt2(), {}),
}


@pytest.mark.parametrize("name", MODULES)
def test_padding_does_not_count(name: str) -> None:
    """In the full model, in a restored one, and where costs are counted without numbers."""
    make, alone = MODULES[name]
    torch.manual_seed(5)
    net = make()
    derived = ff.derive(net, make_texts())
    module = derived.build(derived.plan.axes, derived.positions[-1:]).eval()
    compare_with_alone(net, lambda x: module(x)[-1], **alone)
    again = restore_architecture(net, derived.plan.to_payload())
    assert again.plan.mask == derived.plan.mask is not None
    assert full_cost(again, (PLACES,)).multiply_adds > 0
    assert not derived.padding_change


@pytest.mark.parametrize("make", [Encoder, lambda: bert(CLASSES)])
def test_early_exits_read_tokens_only(make: Callable[[], nn.Module]) -> None:
    """A text alone has no padding, so that its logits at each exit are right by themselves."""
    derived = ff.derive(make(), make_texts())
    module = build_module(derived, derived.plan.axes, derived.positions).eval()
    data = make_texts()
    with torch.no_grad():
        x = data.x[data.split("test")]
        among = module(x)
        assert len(among) > 1
        for i, row in enumerate(x):
            for logits, own in zip(among, module(row[row != FILL].unsqueeze(0)), strict=True):
                torch.testing.assert_close(logits[i], own[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ones are tokens", "true is padding, and required", "DistilBERT"])
def test_a_run_trains_and_predicts_with_the_mask(name: str, tmp_path: Path) -> None:
    make, alone = MODULES[name]
    net = make()
    run = ff.run(model=net, data=make_texts(), rounds=2, method={"name": "fedavg"}, local={"lr": 1e-9, "epochs": 1},
                 fleet={"groups": [{"budget": 1.0}]}, out=tmp_path / "run", progress=False)  # fmt: skip
    compare_with_alone(net, run.model(), **alone)
    again = ff.load(run.folder, model=net, data=make_texts())
    compare_with_alone(net, again.model(), **alone)


@pytest.mark.parametrize("make", [NoMask, lambda: nn.Sequential(nn.EmbeddingBag(WORDS, 12), nn.Linear(12, CLASSES))])
def test_a_module_that_changes_with_padding_is_named(make: Callable[[], nn.Module]) -> None:
    """Its change is that of a text of a third of the places beside one that fills them."""
    net = make()
    derived = ff.derive(net, make_texts())
    assert derived.plan.mask is None and derived.padding_change > 0.01
    assert any(type(net).__name__ in line and f"{derived.padding_change:.1%}" in line for line in derived.describe())


@pytest.mark.parametrize("seed", [0, 3, 24])  # a mask of the other sense, and none, leave less with some weights
def test_partial_masks_are_given_and_named(seed: int) -> None:
    torch.manual_seed(seed)
    derived = ff.derive(MeanOfAll(), make_texts())
    assert derived.plan.mask is not None and derived.plan.mask.kind == "padding" and derived.padding_change > 0.01


def test_untraceable_masks_are_left_out_and_named() -> None:
    derived = ff.derive(Packed(), make_texts())
    assert derived.plan.mask is None and derived.padding_change > 0.01


def test_a_bag_with_a_padding_index_needs_no_mask() -> None:
    bag = nn.EmbeddingBag(WORDS, 12, padding_idx=FILL)
    derived = ff.derive(nn.Sequential(bag, nn.Linear(12, CLASSES)), make_texts())
    assert derived.plan.mask is not None and not derived.plan.mask.argument and not derived.padding_change


@pytest.mark.parametrize("mask", [[1], ["0", "mask", "tokens", "bool"], [0, "mask", "places", "bool"], [0, 1, 2, 3], 7])
def test_a_damaged_mask_is_refused(mask: Any) -> None:
    payload = ff.derive(OnesAreTokens(), make_texts()).plan.to_payload()
    with pytest.raises(ff.ModelError):
        DerivedPlan.from_payload({**payload, "mask": mask})
