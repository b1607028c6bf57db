"""Norms of weights in federated rounds: each level has the norm of its own weight, by NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import have_same_state
from tiny import tiny_data
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fleetfit as ff
from fleetfit.config.assemble.run import assemble
from fleetfit.submodel import extract
from fleetfit.training.local_model import get_local_model, initial_state

Norm = Callable[[nn.Module], nn.Module]
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.*norm` is deprecated:FutureWarning")
TABLE = {
    "seed": 1,
    "rounds": 2,
    "data": {"name": "tiny:tiny_data", "partition": {"kind": "dirichlet", "alpha": 1.0, "clients": 4}},
    "local": {"lr": 0.3},
    "fleet": {"tolerance": 0.5, "groups": [{"budget": 0.5}, {"budget": 1.0}]},
}


class Normed(nn.Module):
    """Two layers under a norm of their weights, and two of another width between them."""

    def __init__(self, kind: str = "spectral") -> None:
        super().__init__()
        norm = {**SPECTRAL, **WEIGHT, **ORTHOGONAL}[kind]
        torch.manual_seed(0)
        self.first, self.up, self.down = norm(nn.Linear(16, 12)), nn.Linear(12, 40), nn.Linear(40, 20)
        self.last, self.fc = norm(nn.Linear(20, 12)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flatten(1)).relu()
        logits: Tensor = self.fc(self.last(self.down(self.up(h).relu()).relu()).relu())
        return logits


def orthogonal(**settings: Any) -> Norm:
    return lambda layer: parametrizations.orthogonal(layer, **settings)


SPECTRAL: dict[str, Norm] = {"spectral": parametrizations.spectral_norm, "old spectral": nn.utils.spectral_norm}
WEIGHT: dict[str, Norm] = {"weight": parametrizations.weight_norm, "old weight": nn.utils.weight_norm}
ORTHOGONAL = {
    "orthogonal": orthogonal(),
    "cayley": orthogonal(orthogonal_map="cayley"),
    "without trivialization": orthogonal(use_trivialization=False),
}
VECTORS = ("_u", "_v")


def list_layers(run: ff.Run) -> list[tuple[nn.Module, np.ndarray]]:
    """Return the normed layers of all levels, each with the weight that it multiplies by."""
    layers = []
    for level in run.assembly.federation.levels:
        module: Any = run.model(level=level.name)
        with torch.no_grad():
            module(torch.zeros(2, 1, 4, 4))
        parts = [module.net.first, module.net.last]
        layers += [(part, part.weight) for part in parts if hasattr(part, "weight")]  # others are behind the last exit
    return [(layer, weight.detach().double().numpy()) for layer, weight in layers]


def read_whole_weight(layer: Any) -> np.ndarray:
    """Return the trained matrix under a spectral norm."""
    whole = layer.weight_orig if hasattr(layer, "weight_orig") else layer.parametrizations.weight.original
    return whole.detach().double().numpy()


@pytest.mark.parametrize("kind", SPECTRAL)
def test_levels_have_their_own_spectral_norm(kind: str, tmp_path: Path) -> None:
    run = ff.run(TABLE, model=Normed(kind), out=tmp_path / "run")
    layout = run.assembly.federation.problem.layout
    assert not [name for name in layout.complete.tensors if name.endswith(VECTORS)]
    layers = list_layers(run)
    assert len({weight.shape for _, weight in layers}) > 2
    for layer, weight in layers:
        whole = read_whole_weight(layer)
        np.testing.assert_allclose(weight, whole / np.linalg.svd(whole)[1][0], rtol=1e-4, atol=1e-6)
        assert any(name.endswith(VECTORS) for name in layer.state_dict())


@pytest.mark.parametrize("kind", SPECTRAL)
def test_a_client_that_loads_a_state_has_its_norm(kind: str) -> None:
    problem = ff.derive(Normed(kind), tiny_data())
    assembly = assemble(ff.config.load_experiment(TABLE, model=problem))
    problem, cpu = assembly.federation.problem, torch.device("cpu")
    state = {name: tensor.roll(1, 0) ** 3 for name, tensor in initial_state(problem, 0).items()}
    submodel = assembly.federation.levels[0].submodel
    model = get_local_model(problem, submodel, cpu)
    for _ in range(2):
        model.load(extract(problem.layout, state, submodel))
        model.module.eval()(torch.zeros(2, 1, 4, 4))
        layer: Any = model.module.get_submodule("net.first")
        assert abs(np.linalg.svd(layer.weight.detach().numpy())[1][0] - 1) < 1e-5
        model.module.train()(torch.ones(2, 1, 4, 4))


def test_workers_have_the_same_vectors(tmp_path: Path) -> None:
    runs = [
        ff.run(TABLE, model={"name": "derivation.test_weight_norms:Normed"}, engine=engine, out=tmp_path / str(i))
        for i, engine in enumerate(({"name": "local"}, {"name": "processes", "workers": 2}))
    ]
    assert have_same_state(*runs)


@pytest.mark.parametrize("kind", WEIGHT)
def test_rows_have_the_norm_that_was_trained(kind: str, tmp_path: Path) -> None:
    layers: list[tuple[Any, np.ndarray]] = list_layers(ff.run(TABLE, model=Normed(kind), out=tmp_path / "run"))
    assert layers
    for layer, weight in layers:
        g = layer.weight_g if hasattr(layer, "weight_g") else layer.parametrizations.weight.original0
        norms = np.linalg.norm(weight, axis=1)
        np.testing.assert_allclose(norms, g.detach().double().numpy()[:, 0], rtol=1e-5)


@pytest.mark.parametrize("kind", ORTHOGONAL)
def test_orthogonal_weights_stay_whole_and_orthogonal(kind: str, tmp_path: Path) -> None:
    run = ff.run(TABLE, model=Normed(kind), out=tmp_path / "run")
    for _, weight in list_layers(run):
        assert weight.shape in ((12, 16), (12, 20))
        np.testing.assert_allclose(weight @ weight.T, np.eye(12), atol=1e-5)
