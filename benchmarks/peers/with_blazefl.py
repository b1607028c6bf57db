"""The task on BlazeFL, with its own FedAvg and its trainer for one thread. `with_blazefl.py FOLDER`."""

import sys
from pathlib import Path

import torch
from blazefl.contrib import FedAvgBaseClientTrainer, FedAvgBaseServerHandler
from task import Loaded, loaded, round_done, save
from torch.utils.data import DataLoader, TensorDataset


class Samples:
    """Each client's samples, ready in memory."""

    def __init__(self, found: Loaded) -> None:
        self._datasets = [TensorDataset(*found.client(i)) for i in range(found.task.clients)]

    def get_dataloader(self, type_, cid, batch_size, generator):
        return DataLoader(self._datasets[cid], batch_size=batch_size, shuffle=True, generator=generator)


class Models:
    """The model to begin with."""

    def __init__(self, found: Loaded) -> None:
        self._found = found

    def select_model(self, model_name):
        return self._found.model()


def main(folder: str) -> None:
    """Run the task and save the model."""
    found = loaded(folder)
    task, models, samples = found.task, Models(found), Samples(found)
    server = FedAvgBaseServerHandler(
        models, task.model, samples, task.rounds, task.clients, task.cohort / task.clients, "cpu", 250, task.seed
    )
    trainer = FedAvgBaseClientTrainer(
        models, task.model, samples, "cpu", task.clients, task.epochs, task.batch_size, task.lr, task.seed
    )
    while not server.if_stop():
        # The library's optimizer has no momentum, and one would carry it from client to client.
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=task.lr, momentum=task.momentum)
        for client in server.sample_clients():
            trainer.optimizer.state.clear()
            trainer.local_process(server.downlink_package(), [client])
        for package in trainer.uplink_package():
            server.load(package)
        round_done()
    save(server.model, Path(folder) / "last.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
