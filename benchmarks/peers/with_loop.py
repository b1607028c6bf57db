"""The task in a loop as papers' repositories write it: no framework. `with_loop.py FOLDER`.

Each client has a DataLoader over samples that are made ready one by one, and a deep copy of the model; updates are kept
and averaged key by key. After each round the model is evaluated on every client's test samples, as ScaleFL's code does.
"""

import copy
import sys
from pathlib import Path

import torch
from task import Loaded, loaded, normalized, round_done, save
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Some samples, made ready one by one."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return normalized(self.x[i]), self.y[i]


def make_loaders(
    found: Loaded,
) -> tuple[list[DataLoader[tuple[Tensor, Tensor]]], list[DataLoader[tuple[Tensor, Tensor]]]]:
    """Return each client's training and test samples; test samples go round the clients, as with FleetFit."""
    task, train, test = found.task, [], []
    for client in range(task.clients):
        here = slice(client * task.samples, (client + 1) * task.samples)
        own = torch.arange(found.trained, len(found.y))
        own = own[own % task.clients == client]
        train.append(DataLoader(Samples(found.x[here], found.y[here]), batch_size=task.batch_size, shuffle=True))
        test.append(DataLoader(Samples(found.x[own], found.y[own]), batch_size=512))
    return train, test


def train_client(model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], found: Loaded) -> dict[str, Tensor]:
    """Return the state of a copy of the model after a client's epochs."""
    task = found.task
    model = copy.deepcopy(model)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=task.momentum)
    for _ in range(task.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return copy.deepcopy(model.state_dict())


@torch.no_grad()
def evaluate(model: nn.Module, loaders: list[DataLoader[tuple[Tensor, Tensor]]]) -> float:
    """Return the mean of the clients' accuracies."""
    model.eval()
    accuracies = []
    for loader in loaders:
        hits = [(model(x).argmax(1) == y).float() for x, y in loader]
        if hits:
            accuracies.append(torch.cat(hits).mean().item())
    return sum(accuracies) / len(accuracies)


def main(folder: str) -> None:
    """Run the task and save the model."""
    found = loaded(folder)
    task, model = found.task, found.model()
    torch.manual_seed(task.seed)
    train, test = make_loaders(found)
    for number in range(task.rounds):
        cohort = torch.randperm(task.clients)[: task.cohort].tolist()
        states = [train_client(model, train[client], found) for client in cohort]
        mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
        model.load_state_dict(mean)
        print(f"round {number + 1}: {evaluate(model, test):.3f}", flush=True)
        round_done()
    save(model, Path(folder) / "last.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
