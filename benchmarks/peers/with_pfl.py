"""The task on pfl-research, as its benchmarks do it: a simulated backend in one process. `with_pfl.py FOLDER`."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset, get_user_sampler
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from task import loaded, round_done, save
from torch import Tensor, nn
from torch.nn import functional as F


class WithLoss(nn.Module):
    """The model with what pfl asks of one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.model(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        with torch.no_grad():
            return {"accuracy": Weighted(int((self.model(x).argmax(1) == y).sum()), len(y))}


class Rounds(TrainingProcessCallback):
    """Tells when a round has ended."""

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        round_done()
        return False, Metrics()


def main(folder: str) -> None:
    """Run the task and save the model."""
    found = loaded(folder)
    task, module = found.task, WithLoss(found.model())
    np.random.seed(task.seed)  # noqa: NPY002 (pfl's samplers know no other)
    torch.manual_seed(task.seed)
    clients = {i: found.client(i) for i in range(task.clients)}
    dataset = FederatedDataset(
        lambda i: PyTorchTensorDataset(clients[i], user_id=str(i)), get_user_sampler("minimize_reuse", list(clients))
    )
    model = PyTorchModel(
        module,
        local_optimizer_create=partial(torch.optim.SGD, momentum=task.momentum),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds,  # of the first round only, which is not counted
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=dataset, val_data=dataset),
        model,
        NNTrainHyperParams(local_batch_size=task.batch_size, local_num_epochs=task.epochs, local_learning_rate=task.lr),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Rounds()],
    )
    save(module.model, Path(folder) / "last.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
