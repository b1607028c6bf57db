"""ScaleFL with two levels in plain PyTorch: what FleetFit computes, to the last bit.

    python examples/scalefl_plain.py

Ilhan et al., CVPR 2023, on scikit-learn's digits: sub-models that are narrower and shallower, early exits that learn
from the last one, and an average over those who trained an element. A run of FleetFit with the same data, clients,
levels and settings gives the same bits (tests/test_plain_examples.py). FleetFit finds the levels (Eq. 1) where this
file takes them as given, and does the same for any model, any number of levels and other methods.
"""

import hashlib

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

BLOCKS, HIDDEN, CLASSES = 4, 32, 10


def seed_of(*key):
    """A seed for each random choice, so that none depends on what was drawn before it."""
    text = "\x1f".join(f"{type(part).__name__[0]}{part}" for part in key)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


# ---- the model and its pieces --------------------------------------------------------------------------------------


class Network(nn.Module):
    """Fully connected blocks, with a classifier (an exit) after some of them.

    A sub-model keeps the first `hidden` units of every block, the blocks up to its last exit, and its exits. Its
    parameters have the names that they have in the full model.
    """

    def __init__(self, hidden, exits):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64 if i == 0 else hidden, hidden) for i in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(hidden, CLASSES) for e in exits})
        for layer in (*self.blocks, *self.heads.values()):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        """Return the logits of every exit, shallow to deep (Eqs. 3 and 4)."""
        x, found = x.flatten(1), []
        for i, block in enumerate(self.blocks, 1):
            x = F.relu(block(x))
            if str(i) in self.heads:
                found.append(self.heads[str(i)](x))
        return found


def corner(tensor, shape):
    """The upper left corner of a tensor of the full model: a view, so that it can be read and added to."""
    return tensor[tuple(slice(n) for n in shape)]


def load(model, state):
    """Cut the model's piece out of the full state (the split)."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(corner(state[name], p.shape))


# ---- a client ------------------------------------------------------------------------------------------------------


def exits_loss(logits, y, beta=0.1, temperature=3.0):
    """Cross-entropy of every exit, and self-distillation from the last one into the others (Eq. 5).

    Exit i of l weighs 2 i / (l (l + 1)), so that the weights sum to one.
    """
    weights = [i * 2 / (len(logits) * (len(logits) + 1)) for i in range(1, len(logits) + 1)]
    loss = weights[-1] * F.cross_entropy(logits[-1], y)
    teacher = F.log_softmax(logits[-1].detach() / temperature, dim=-1)
    for weight, student in zip(weights[:-1], logits[:-1], strict=True):
        guess = F.log_softmax(student / temperature, dim=-1)
        divergence = F.kl_div(guess, teacher, reduction="batchmean", log_target=True) * temperature**2
        loss = loss + weight * (F.cross_entropy(student, y) + beta * divergence)
    return loss


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
            gradients = torch.autograd.grad(exits_loss(model(x[batch]), y[batch]), list(model.parameters()))
            flat.grad = torch.cat([gradient.flatten() for gradient in gradients])
            optimizer.step()


# ---- the server ----------------------------------------------------------------------------------------------------


def average(state, sums, counts):
    """Average each element over those who trained it; what nobody trained stays as it is (Eq. 2, Algorithm 3).

    Args:
        state: The full model before the round.
        sums: For each level, the sum of its clients' parameters.
        counts: How many clients that were.
    """
    after = {}
    for name, old in state.items():
        total, coverage = torch.zeros_like(old), torch.zeros_like(old)
        for summed, count in zip(sums, counts, strict=True):
            if name in summed:
                corner(total, summed[name].shape).add_(summed[name])
                corner(coverage, summed[name].shape).add_(count)
        after[name] = torch.where(coverage > 0, total / coverage, old)
    return after


def scalefl(x, y, clients, level_of, levels, seed=0, rounds=3, cohort=4):
    """Train; return the full model's parameters by name.

    Args:
        x: Images of all clients.
        y: Their labels.
        clients: For each client the indices of its samples.
        level_of: For each client which level it affords, 0 or 1.
        levels: Hidden units and exits of each level; the last is the full model, with the exits of both.
        seed: Of the run.
        rounds: How many.
        cohort: Clients in each.
    """
    torch.manual_seed(seed_of(seed, "initial"))
    models = {1: Network(*levels[1])}
    models[0] = Network(*levels[0])
    state = {name: p.detach().clone() for name, p in models[1].named_parameters()}
    for round in range(rounds):
        rng = np.random.default_rng(seed_of(seed, round, "choose"))
        chosen = [int(c) for c in rng.choice(len(clients), cohort, replace=False)]
        chosen.sort(key=lambda c: (-level_of[c], c))  # the largest sub-models first, so that sums have one order
        sums, counts = [{}, {}], [0, 0]
        for index, client in enumerate(chosen):
            level, mine = level_of[client], clients[client]
            model = models[level]
            load(model, state)
            local_training(model, x[mine], y[mine], seed_of(seed, round, "train", index, client))
            for name, p in model.named_parameters():
                sums[level][name] = p.detach() + sums[level].get(name, 0)
            counts[level] += 1
        state = average(state, sums[::-1], counts[::-1])
    return state


# ---- digits --------------------------------------------------------------------------------------------------------


def digits():
    """Gray values 0 to 16 as bytes, then brought to mean 0 and variance 1."""
    gray, label = load_digits(return_X_y=True)
    x = torch.from_numpy(np.rint(gray * (255 / 16))).float().view(-1, 1, 8, 8)
    return x * (1 / (255 * 0.376)) + (-0.305 / 0.376), torch.from_numpy(label)


if __name__ == "__main__":
    x, y = digits()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400].tensor_split(10), order[1400:]
    levels = [(20, (2,)), (HIDDEN, (2, BLOCKS))]
    state = scalefl(x, y, train, [client % 2 for client in range(10)], levels, rounds=20)
    for number, level in enumerate(levels, 1):
        model = Network(*level)
        load(model, state)
        with torch.no_grad():
            found = [float((logits.argmax(1) == y[test]).float().mean()) for logits in model(x[test])]
        print(f"level {number}: accuracy of its exits {', '.join(f'{one:.3f}' for one in found)}")
