"""Numbers that forward reads from the samples: for messages and checks they are no dependence, else they are."""

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy.derive import DerivedArchitecture, DerivedPlan, derive_architecture
from fleetfit.errors import ModelError


class Asking(nn.Module):
    """A network that looks at its samples and at what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.mid(self.up(self.look(x)).relu()))
        return out

    def look(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Warns(Asking):
    def look(self, x: Tensor) -> Tensor:
        if x.max() > 1000:
            warnings.warn(f"large: {x.max():.2f} in {x[0]}", stacklevel=2)
        return x


class WarningOnce(Asking):
    def look(self, x: Tensor) -> Tensor:
        if not self.seen and 0.0 in x[:, [0, -1]]:
            self.seen = True
            logging.getLogger("net").warning("zeros: %s", x)
        return x


class Logging(Asking):
    def look(self, x: Tensor) -> Tensor:
        logging.getLogger("net").debug(f"{x.mean()}")
        return x


class Checking(Asking):
    def look(self, x: Tensor) -> Tensor:
        assert x.isfinite().all()
        if (x < -1000).any():
            raise ValueError(f"{x.min()} is too small")
        return x


HARMLESS = {"warn": Warns, "warn once": WarningOnce, "log": Logging, "check": Checking}


class Clamping(Asking):
    """The other path gives the same logits for these samples."""

    def look(self, x: Tensor) -> Tensor:
        return x.clamp(max=1000) if x.max() > 1000 else x


class ClampingForTwo(Asking):
    """No answer alone leads to the other path."""

    def look(self, x: Tensor) -> Tensor:
        low, high = bool(x.min() < -1000), bool(x.max() > 1000)
        return x.clamp(-1000, 1000) if low and high else x


class Remembering(Asking):
    """The answer matters at the next batch."""

    def look(self, x: Tensor) -> Tensor:
        clamped = x.clamp(max=1000) if self.seen else x
        self.seen = self.seen or bool(x.max() > 1000)
        return clamped


class Constants(Asking):
    """Both paths have the same operations, with other constants."""

    def look(self, x: Tensor) -> Tensor:
        return x.minimum(torch.tensor(1000.0 if x.max() > 1000 else 2000.0))


class Halves(Asking):
    """Both paths have the same operations, of other places."""

    def look(self, x: Tensor) -> Tensor:
        half = x[:, :3] if x.max() > 1000 else x[:, 3:]
        return torch.cat([half, half], 1)


class Failing(Asking):
    """An error of the other path is no check of the samples."""

    def look(self, x: Tensor) -> Tensor:
        if x.max() > 1000:
            raise ValueError(self.up(x).mean(1))
        return x


class Waiting(Asking):
    def look(self, x: Tensor) -> Tensor:
        while x.max() > 1000:
            x = x / 2
        return x


class Number(Asking):
    def look(self, x: Tensor) -> Tensor:
        return x / float(x.max())


class Comparing(Asking):
    def look(self, x: Tensor) -> Tensor:
        return x.clamp(max=1000) if torch.equal(x[0], x[1]) else x


DEPENDENT = [Clamping, ClampingForTwo, Remembering, Constants, Halves, Failing, Waiting, Number, Comparing]


def make_rows() -> tuple[Any, Any]:
    y = np.arange(90) % 3
    return (np.random.default_rng(0).normal(size=(90, 6)) + y[:, None]).astype("float32"), y


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_only_warns_logs_or_checks_is_trained(kind: str, tmp_path: Path) -> None:
    """Costs are counted without numbers, where forward asks too."""
    run = ff.run(
        model=HARMLESS[kind](),
        data=make_rows(),
        rounds=1,
        fleet={"groups": [{"budget": 0.3}, {"budget": 1.0}], "tolerance": 0.3},
        progress=False,
        out=tmp_path,
    )
    assert run.finished and run.summary["failures"] == 0


@pytest.mark.parametrize("kind", DEPENDENT)
def test_what_changes_the_computation_is_refused(kind: type[Asking]) -> None:
    torch.manual_seed(0)
    with raises(ModelError, Path(__file__).name, key="model"):
        derive_architecture(kind(), torch.randn(2, 6))


def test_messages_of_answers_that_nobody_gave_are_not_shown(capsys: Any, caplog: Any) -> None:
    derived = derive_architecture(WarningOnce(), torch.randn(2, 6))
    assert isinstance(derived, DerivedArchitecture)
    assert caplog.records == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        derive_architecture(Warns(), torch.zeros(2, 6))


def test_a_plan_keeps_the_answers() -> None:
    plan = derive_architecture(Checking(), torch.randn(2, 6)).plan
    assert plan.answers == (True, False)
    assert DerivedPlan.from_payload(plan.to_payload()) == plan


def test_the_padding_warning_of_transformers_is_no_dependence() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.DebertaConfig(**size, vocab_size=20, max_position_embeddings=12, num_labels=3)
    derived = derive_architecture(transformers.DebertaForSequenceClassification(config), torch.randint(1, 20, (2, 8)))
    assert derived.plan.answers == (False,)
    assert len(derived.axes) > 5
