"""Modules are derived and proved with samples of the training data: with noise alone these would be refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import raises
from torch import Tensor, nn

import fleetfit as ff
from fleetfit.anatomy import make_input
from fleetfit.anatomy.derive import DerivedArchitecture
from fleetfit.anatomy.padding import list_masks
from fleetfit.config import load_experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.config.assemble.model import build_problem
from fleetfit.core import DataDescription
from fleetfit.cost import training_memory
from fleetfit.errors import ModelError

ROWS, SIZES = 120, (3, 40, 12)
Y = np.arange(ROWS) % 3
FLEET = {"groups": [{"budget": 0.4}, {"budget": 1.0}], "tolerance": 0.6}


def make_codes() -> Any:
    codes = np.random.default_rng(0).integers(0, SIZES, (ROWS, 3))
    codes[:, 0] = Y
    return codes


def make_positive() -> Any:
    return np.exp(np.random.default_rng(0).normal(size=(ROWS, 6)) + Y[:, None]).astype("float32")


class Tail(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(features, 24), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.up(x.flatten(1)).relu())
        return out


class Offsets(nn.Module):
    """One table for the codes of all columns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 3, 43]))
        self.table, self.tail = nn.Embedding(sum(SIZES), 8), Tail(24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.table(x + self.offsets))
        return out


class Tables(nn.Module):
    """A table for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.tail = nn.ModuleList(nn.Embedding(n, 8) for n in SIZES), Tail(24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(torch.cat([table(x[:, i].long()) for i, table in enumerate(self.tables)], 1))
        return out


class Logarithm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tail = Tail(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(x.log())
        return out


class Positive(Logarithm):
    def forward(self, x: Tensor) -> Tensor:
        assert (x > 0).all()
        return super().forward(x)


class Marked(nn.Module):
    """A text classifier that reads the place of an end mark, 1; padding is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tail = nn.Embedding(20, 16), Tail(16)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        if torch.unique_consecutive((x == 1).sum(1)).numel() > 1:
            raise ValueError("each text needs the same number of end marks")
        h = self.table(x) * attention_mask[..., None]
        out: Tensor = self.tail(h[x == 1].view(len(x), -1, h.shape[-1])[:, -1] + h.sum(1))
        return out


def make_texts() -> Any:
    rng = np.random.default_rng(0)
    x = rng.integers(2, 20, (ROWS, 9))
    for row, end in enumerate(rng.integers(3, 9, ROWS)):
        x[row, end], x[row, end + 1 :] = 1, 0
    return x


DATA: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "offsets": (Offsets, {"name": (make_codes(), Y), "vocabulary": 40}),
    "tables": (Tables, {"name": (make_codes(), Y), "vocabulary": 40}),
    "codes in floats": (Tables, {"name": (make_codes().astype("float32"), Y), "standardize": False}),
    "logarithm": (Logarithm, {"name": (make_positive(), Y), "standardize": False}),
    "checked": (Positive, {"name": (make_positive(), Y), "standardize": False}),
    "end mark": (Marked, {"name": (make_texts(), Y), "vocabulary": 20, "padding": 0}),
}


@pytest.mark.parametrize("kind", DATA)
def test_a_module_that_takes_no_noise_is_trained(kind: str, tmp_path: Path) -> None:
    make, data = DATA[kind]
    run = ff.run(model=make(), data=data, rounds=1, fleet=FLEET, progress=False, out=tmp_path)
    assert run.summary["failures"] == 0


def build(net: nn.Module, data: Any) -> DerivedArchitecture:
    experiment = load_experiment(data=data, model={"name": net})
    architecture = build_problem(experiment, build_data(experiment.data)).architecture
    assert isinstance(architecture, DerivedArchitecture)
    return architecture


def test_the_same_data_give_the_same_plan_and_samples_that_no_plan_has() -> None:
    torch.manual_seed(0)
    net, data = Tables(), DATA["tables"][1]
    first, second = build(net, data), build(net, data)
    assert first.plan == second.plan
    assert first.samples is not None and torch.equal(first.samples, second.samples)
    rows = set(map(tuple, make_codes().tolist()))
    assert {*map(tuple, make_input(first, (3,), 8, torch.Generator()).tolist())} <= rows
    assert "samples" not in first.plan.to_payload()


def test_memory_is_counted_where_forward_reads_places_of_the_samples() -> None:
    make, data = DATA["end mark"]
    derived = build(make(), data)
    exits, sizes = (derived.blocks,), derived.plan.axes
    small, large = (training_memory(derived, sizes, exits, (9,), batch) for batch in (4, 40))
    assert small < large
    assert not [value for value in vars(derived.build(sizes, exits)).values() if isinstance(value, np.ndarray)]


def test_noise_is_added_where_a_module_takes_it() -> None:
    """Data may be all alike: here they have one number."""
    constant = {"name": (np.ones((ROWS, 6), "float32"), Y), "standardize": False}
    derived = build(Tail(6), constant)
    assert derived.samples is not None
    assert len(derived.samples[::2].unique()) == 1 and len(derived.samples[1::2].unique()) == 12


def test_without_data_noise_is_drawn() -> None:
    experiment = load_experiment(data={"name": (make_positive(), Y)}, model={"name": Tail(6)})
    description = DataDescription("rows", "classification", (6,), 3)
    architecture = build_problem(experiment, description).architecture
    assert isinstance(architecture, DerivedArchitecture) and architecture.samples is None


def test_logits_that_are_no_numbers_are_refused() -> None:
    with raises(ModelError, "NaN", "standardize", key="model.name"):
        ff.derive(Logarithm(), {"name": (make_positive(), Y)}, progress=False)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_probabilities_are_no_logits(task: str) -> None:
    """The loss takes a softmax itself; as numbers of a regression they may be meant."""
    x = torch.randn(60, 6)
    y = torch.arange(60) % 3 if task == "classification" else torch.rand(60, 3)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(1))
    if task == "classification":
        with raises(ModelError, "softmax", key="model.name"):
            ff.derive(net, (x, y), progress=False)
    else:
        assert ff.derive(net, {"name": (x, y), "task": task}, progress=False)


@pytest.mark.parametrize("task", ["multi_label", "classification", "regression"])
@pytest.mark.parametrize(
    "last", [(nn.Sigmoid(),), (nn.Sigmoid(), nn.Unflatten(1, (3, 1)), nn.Flatten())], ids=["plain", "view"]
)
def test_a_sigmoid_at_the_end_is_refused_where_the_loss_has_one(last: tuple[nn.Module, ...], task: str) -> None:
    x, y = torch.randn(60, 6), torch.arange(60) % 3 if task == "classification" else (torch.rand(60, 3) > 0.5).float()
    net = nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 3), *last)
    if task == "regression":
        assert ff.derive(net, {"name": (x, y), "task": task}, progress=False)
    else:
        with raises(ModelError, "sigmoid", key="model.name"):
            ff.derive(net, {"name": (x, y), "task": task}, progress=False)
    assert ff.derive(net[:3], {"name": (x, y), "task": task}, progress=False)


class Embedded(nn.Sequential):
    """A network that returns its features before the logits while it trains."""

    def forward(self, x: Tensor) -> Any:
        features = self[0](x).relu()
        return (features, self[1](features)) if self.training else self[1](features)


def test_a_module_that_trains_with_other_outputs_is_refused() -> None:
    net, data = Embedded(nn.Linear(6, 16), nn.Linear(16, 3)), (torch.randn(60, 6), torch.arange(60) % 3)
    with raises(ModelError, "Embedded", (2, 16), (2, 3), key="model.name"):
        ff.derive(net, data, progress=False)


def test_masks_are_tried_with_whole_texts() -> None:
    x = torch.from_numpy(make_texts())
    assert list_masks(Marked(), 9, 20, 0)[0][0] is None
    mask = list_masks(Marked(), 9, 20, 0, x[:4])[0][0]
    assert mask is not None and mask.argument == "attention_mask"


def test_workers_count_with_samples_too(tmp_path: Path) -> None:
    data = {"name": (make_texts(), Y), "vocabulary": 20, "padding": 0}
    model = f"{Path(__file__)}:Marked"
    run = ff.run(model=model, data=data, rounds=1, fleet=FLEET, engine="processes", progress=False, out=tmp_path)
    assert run.summary["failures"] == 0
