"""DepthFL against plain loops: whole rounds with the ramp, and the settings of ReeFL's appendix A.

The network and the optimizer on the plain side are those of `test_train`: no module, no optimizer, float64.
"""

import inspect
import math
from dataclasses import replace

import pytest
import torch
from support.training import Losses, assert_close, plain_sgd
from tiny import tiny_federation
from torch import Tensor

from fleetfit import names
from fleetfit.core import Local
from fleetfit.engines.local import local as local_engine
from fleetfit.hooks import weigh_equally
from fleetfit.layout import State
from fleetfit.rounds import Settings, run_round, start

LOCAL = Local(lr=0.1, momentum=0.9, weight_decay=1e-3, epochs=2, batch_size="all")


def written_out(weight: float, temperature: float) -> Losses:
    """sum_i CE_i + weight / (l - 1) * sum_i sum_{j != i} tau^2 sum_c p_j log(p_j / p_i), the p_j detached."""

    def loss(logits: list[Tensor], y: Tensor) -> Tensor:
        total = torch.zeros(())
        for i, z in enumerate(logits):
            total = total - torch.log_softmax(z, 1)[torch.arange(len(y)), y].mean()
            for j, other in enumerate(logits):
                if i != j:
                    p_j, p_i = (torch.softmax(t / temperature, 1) for t in (other.detach(), z))
                    kl = (p_j * (p_j / p_i).log()).sum(1).mean() * temperature**2
                    total = total + weight / (len(logits) - 1) * kl
        return total

    return loss


CHOSEN = {0: [0, 1, 2, 5], 1: [0, 4], 2: [1, 2, 3]}
DEPTHS = [(1,), (1, 2), (1, 2, 3)]  # clients 0 and 3 train one block, 1 and 4 two, 2 and 5 three


def contents(x: dict[str, Tensor], exits: tuple[int, ...]) -> dict[str, Tensor]:
    """What a sub-model with these exits has: blocks up to the last one, and their classifiers."""
    there = ("stem", *(f"blocks.{b}." for b in range(exits[-1])), *(f"heads.{e}." for e in exits))
    return {name: tensor for name, tensor in x.items() if name.startswith(there)}


@pytest.mark.parametrize(
    ("share", "temperature", "alpha"), [(1.0, 1.0, 0.0), (0.6, 2.0, 0.0), (0.0, 1.0, 0.0), (1.0, 1.0, 0.1)]
)
def test_rounds_equal_a_plain_loop(share: float, temperature: float, alpha: float) -> None:
    """Three rounds with a ramp of two: weights exp(-5), exp(-5/4) and 1, times the share; clients are counted.

    FedDyn (Acar et al., Algorithm 1): a client's loss has -<g_k, w> + alpha/2 ||w - x||^2 too, with g_k <- g_k - alpha
    (w_k - x) after it; h <- h - alpha/6 sum_k (w_k - x) over those of the round's clients that have the tensor, of six
    in all; x <- mean - h / alpha.
    """
    spec = {"name": "depthfl", "alpha": alpha, "ramp": 2, "weight": share, "temperature": temperature}
    hooks = {"choose_clients": lambda federation, server, rng: CHOSEN[server.round]}
    federation, simulation = tiny_federation({**spec, "hooks": hooks}, norm=False)
    pieces = [federation.problem.submodel(1.0, exits) for exits in DEPTHS]
    levels = tuple(replace(level, submodel=p) for level, p in zip(federation.levels, pieces, strict=True))
    federation = replace(federation, levels=levels)
    engine, server = local_engine(simulation), start(federation)
    x = {n: t.double() for n, t in server.state.items()}
    zero = {n: torch.zeros_like(t) for n, t in x.items()}
    h, g = dict(zero), {client: dict(zero) for client in range(6)}
    for weight in (math.exp(-5), math.exp(-1.25), 1.0):
        chosen, trained = CHOSEN[server.round], []
        server, report = run_round(federation, engine, Settings(3, LOCAL), server)
        assert not report["failures"]
        for client in chosen:

            def penalty(weights: State, mine: State = g[client], x: State = x) -> Tensor:
                drift = [alpha / 2 * ((w - x[n]) ** 2).sum() - (mine[n] * w).sum() for n, w in weights.items()]
                return torch.stack(drift).sum()

            exits = DEPTHS[client % 3]
            data = simulation.device(client).data
            batches = [data.batch(data.split("train"))] * LOCAL.epochs
            loss = written_out(share * weight, temperature)
            w = plain_sgd(contents(x, exits), exits, batches, loss, LOCAL, penalty if alpha else None)
            g[client] = g[client] | {n: g[client][n] - alpha * (w[n] - x[n]) for n in w}
            trained.append(w)
        for n in x:
            those = [w[n] for w in trained if n in w]
            if those:
                h[n] = h[n] - alpha / 6 * torch.stack([t - x[n] for t in those]).sum(0)
                x[n] = torch.stack(those).mean(0) - (h[n] / alpha if alpha else 0)
        assert_close(server.state, x, atol=2e-5)
    assert federation.method.weigh is weigh_equally


REEFL_APPENDIX_A = {
    "depthfl": {"alpha": 0.1, "ramp": 300, "weight": 1.0, "temperature": 1.0},
    "inclusivefl": {"beta": 0.2},
}


@pytest.mark.parametrize("name", REEFL_APPENDIX_A)
def test_defaults_are_those_of_reefl_s_appendix_a(name: str) -> None:
    """FedDyn's alpha 0.1; the KL's weight ramped up over 300 rounds to 1.0 and tau 1.0 for DepthFL; beta 0.2."""
    parameters = inspect.signature(names.resolve("methods", name)).parameters
    assert {key: parameters[key].default for key in REEFL_APPENDIX_A[name]} == REEFL_APPENDIX_A[name]
