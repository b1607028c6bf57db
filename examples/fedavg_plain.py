"""FedAvg in plain PyTorch: what FleetFit computes where all clients afford the full model, to the last bit.

    python examples/fedavg_plain.py

McMahan et al., AISTATS 2017, Algorithm 1, on scikit-learn's digits. A run of FleetFit with the same data, clients and
settings gives the same bits (tests/test_plain_examples.py); all else that it does is for unequal devices and for speed.
"""

import hashlib

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


def seed_of(*key):
    """A seed for each random choice, so that none depends on what was drawn before it."""
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def network(seed, hidden=32):
    torch.manual_seed(seed_of(seed, "initial"))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                          nn.Linear(hidden, 10))  # fmt: skip
    for layer in (model[1], model[3], model[5]):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return model


def local_training(model, x, y, seed, epochs=2, lr=0.1):
    flat = nn.Parameter(nn.utils.parameters_to_vector(model.parameters()).detach())
    nn.utils.vector_to_parameters(flat.detach(), model.parameters())  # parameters are parts of one vector from here on
    optimizer = torch.optim.SGD([flat], lr=lr, momentum=0.9, weight_decay=5e-4, fused=True)
    order = torch.Generator().manual_seed(seed_of(seed, "batches"))
    for _ in range(epochs):
        batches = list(torch.randperm(len(y), generator=order).split(16))
        if len(batches) > 1 and len(batches[-1]) == 1:  # one sample alone is no batch
            batches[-2:] = [torch.cat(batches[-2:])]
        for batch in batches:
            gradients = torch.autograd.grad(F.cross_entropy(model(x[batch]), y[batch]), list(model.parameters()))
            flat.grad = torch.cat([gradient.flatten() for gradient in gradients])
            optimizer.step()
    return flat.detach()


def fedavg(x, y, clients, seed=0, rounds=3, cohort=4):
    """Train on the samples of some clients (their indices); return the parameters of the last round by name."""
    model = network(seed)
    state = nn.utils.parameters_to_vector(model.parameters()).detach()
    for round in range(rounds):
        rng = np.random.default_rng(seed_of(seed, round, "choose"))
        chosen = sorted(int(c) for c in rng.choice(len(clients), cohort, replace=False))
        total, weights = torch.zeros_like(state), 0
        for index, client in enumerate(chosen):
            nn.utils.vector_to_parameters(state.clone(), model.parameters())
            mine = clients[client]
            trained = local_training(model, x[mine], y[mine], seed_of(seed, round, "train", index, client))
            total.add_(trained, alpha=len(mine))
            weights += len(mine)
        state = total / weights
    nn.utils.vector_to_parameters(state, model.parameters())
    return {name: p.detach() for name, p in model.named_parameters()}


def digits():
    """Gray values 0 to 16 as bytes, then brought to mean 0 and variance 1."""
    gray, label = load_digits(return_X_y=True)
    x = torch.from_numpy(np.rint(gray * (255 / 16))).float().view(-1, 1, 8, 8)
    return x * (1 / (255 * 0.376)) + (-0.305 / 0.376), torch.from_numpy(label)


if __name__ == "__main__":
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    state = fedavg(x, y, order[:1400].tensor_split(10), rounds=20)
    model = network(0)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(state.values()), model.parameters())
    with torch.no_grad():
        found = model(x[order[1400:]]).argmax(1)
    print(f"accuracy {float((found == y[order[1400:]]).float().mean()):.3f}")
