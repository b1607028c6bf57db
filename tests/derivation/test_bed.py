"""The bed's modules are derived and proved, but for those in the table; what stays whole or is refused has a reason."""

import inspect
import re

import pytest
import torch
from bed import ENTRIES
from bed.convolution import GoogLeNet
from bed.language import GatedConvLM
from bed.mixed import DataBranch
from support.derivation import derive_or_refuse, make_instance
from torch import Tensor, nn
from torch.nn import functional as F

from fleetfit.anatomy.derive import DerivedArchitecture, derive_architecture
from fleetfit.errors import ModelError

REFUSED, UNCUT, WHOLE = "refused", "nothing can be cut", "some axes stay whole"

FAILURES = {
    "auxiliary_classifier": (REFUSED, "a classifier runs in training mode alone"),
    "gated_conv_lm": (REFUSED, "forward compares two sizes that are equal at some widths"),
    "data_branch": (REFUSED, "a branch depends on the samples"),
    "scripted_part": (REFUSED, "operations of a scripted module are not seen"),
    "eca": (WHOLE, "a convolution runs along channels, of whatever number"),
    "literal_view": (WHOLE, "view(-1, 800) is a number in the code"),
    "alexnet": (WHOLE, "a local response norm averages neighbors"),
    "shufflenet": (WHOLE, "channels are shuffled, and halved by a number in the code"),
    "autoencoder": (WHOLE, "view(-1, 16, 4, 4) is a number in the code"),
    "vit_chunked_qkv": (WHOLE, "a table of sines is as wide as the stream"),
    "fourier_over_channels": (WHOLE, "a Fourier transform mixes channels"),
    "gated_experts": (WHOLE, "nn.Bilinear is an operation without a rule"),
    "pointnet": (WHOLE, "an identity matrix is added"),
    "skeleton_graph": (WHOLE, "the channels of its first graph convolution go together; why was not looked at"),
    "multi_query": (WHOLE, "queries, keys and values go together, since all heads read one key"),
    "capsules": (WHOLE, "the numbers of all capsules go together, since each capsule is squashed to a length"),
    "parametrized_positive": (WHOLE, "softplus of a weight that is cut is not 0"),
}
"""What is not wholly derived, with the reason. A module that is leaves this table."""

LEAST_PROVED, LEAST_SCALING = 0.95, 0.85
SLOW_TO_DERIVE = ("swin", "hf_mobilenet_v2", "hf_gpt2_lm", "res2net")
QUICK = {*FAILURES, "gpt_list_of_heads", *[name for name in ENTRIES if name not in SLOW_TO_DERIVE][::4]}
CAUSES = (
    "its places are in another order elsewhere",
    "a narrower model computes something else",
    "its channels come and go together, as where a shuffle or a product mixes them",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENTRIES]
)
def test_modules_are_derived_or_listed(name: str) -> None:
    outcome = find_outcome(name)
    assert outcome == FAILURES.get(name, ("", ""))[0], derive_or_refuse(name)
    derived = derive_or_refuse(name)
    if isinstance(derived, ModelError):
        assert derived.key == "model"
        return
    for axis, (size, reason) in derived.plan.whole.items():
        assert axis not in derived.plan.axes
        assert size > 1
        assert reason in CAUSES or re.search(r"\(\w+\.py:\d+\)$", reason), f"{axis}: {reason}"


def find_outcome(name: str) -> str:
    """Return REFUSED, UNCUT, WHOLE, or nothing where all axes are scaled."""
    derived = derive_or_refuse(name)
    if isinstance(derived, ModelError):
        return REFUSED
    if derived.plan.whole:
        return WHOLE if derived.plan.axes.keys() - {"classes"} else UNCUT
    return ""


@pytest.mark.slow
def test_most_modules_are_derived() -> None:
    outcomes = [find_outcome(name) for name in ENTRIES]
    assert sum(outcome not in (REFUSED, UNCUT) for outcome in outcomes) >= LEAST_PROVED * len(outcomes)
    assert sum(outcome == "" for outcome in outcomes) >= LEAST_SCALING * len(outcomes)


# ---- who follows the advice of an error succeeds -------------------------------------------------------------------


class WithoutBranch(DataBranch):
    """Both paths are computed."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        return self.head(torch.where(x.mean() > 0, self.bright(h), self.dark(h)))


class WithoutComparison(GatedConvLM):
    """The number of the layer decides."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).transpose(1, 2)
        for i, (conv, gate) in enumerate(zip(self.conv, self.conv_gate, strict=True)):
            padded = F.pad(h, (self.k - 1, 0))
            new = conv(padded) * torch.sigmoid(gate(padded))
            h = new + h if i > 0 else new
        return self.fc(h.transpose(1, 2))


class WithAuxiliary(GoogLeNet):
    """The auxiliary classifier is used in evaluation mode, too: it is an exit."""

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.maxpool3(self.inception3b(self.inception3a(self.conv1(x))))
        early = self.aux1(x)
        return [early, self.fc(torch.flatten(self.avgpool(self.inception4a(x)), 1))]


def use_the_module_that_was_scripted() -> nn.Module:
    net = make_instance("scripted_part")
    encoder = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
    encoder.load_state_dict(net.encoder.state_dict())
    net.encoder = encoder
    return net


def freeze_the_unused_classifier() -> nn.Module:
    net = make_instance("auxiliary_classifier")
    net.aux1.requires_grad_(False)
    return net


def remove_the_unused_classifier() -> nn.Module:
    net = make_instance("auxiliary_classifier")
    net.aux1, net.aux_logits = None, False
    return net


ADVICE = {
    "take the module that was scripted": ("scripted_part", use_the_module_that_was_scripted),
    "choose with torch.where": ("data_branch", WithoutBranch),
    "decide by the number of the block": ("gated_conv_lm", WithoutComparison),
    "requires_grad = False": ("auxiliary_classifier", freeze_the_unused_classifier),
    "remove the parameters": ("auxiliary_classifier", remove_the_unused_classifier),
    "use the parameters": ("auxiliary_classifier", lambda: WithAuxiliary(aux_logits=True)),
}


@pytest.mark.parametrize("advice", ADVICE)
def test_following_the_advice_derives_a_module(advice: str) -> None:
    name, make = ADVICE[advice]
    assert isinstance(derive_or_refuse(name), ModelError)
    torch.manual_seed(0)
    derived = derive_architecture(make(), ENTRIES[name].example())
    assert isinstance(derived, DerivedArchitecture)
    assert not derived.plan.whole


def test_the_advice_for_each_refused_module_is_followed() -> None:
    assert {name for name, _ in ADVICE.values()} == {name for name, (kind, _) in FAILURES.items() if kind == REFUSED}


LINES, FIRST = inspect.getsourcelines(DataBranch)
BRANCH = FIRST + next(number for number, line in enumerate(LINES) if "x.mean() > 0" in line)


@pytest.mark.parametrize(
    ("name", "mentions"),
    [
        ("scripted_part", ("encoder",)),
        ("auxiliary_classifier", ("aux1.2.weight", "requires_grad")),
        ("data_branch", (f"mixed.py:{BRANCH}", "torch.where")),
        ("gated_conv_lm", ("embedding", "conv.0")),
    ],
)
def test_an_error_names_the_place(name: str, mentions: tuple[str, ...]) -> None:
    error = derive_or_refuse(name)
    assert [mention for mention in mentions if mention not in str(error)] == [], error
