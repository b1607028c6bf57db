"""The task on Flower's simulation, as its PyTorch quickstart does it: Ray, two actors. `with_flower.py FOLDER`."""

import os
import sys
from pathlib import Path

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from task import loaded, model_of, round_done, save
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def client_app(folder: str) -> ClientApp:
    """Return the app of a client."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        mine = loaded(folder)
        task, model = mine.task, model_of(mine.task)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = mine.client(int(context.node_config["partition-id"]))
        batches = DataLoader(TensorDataset(x, y), batch_size=task.batch_size, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"], momentum=task.momentum)
        model.train()
        total = 0.0
        for _ in range(task.epochs):
            for images, labels in batches:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                total += loss.item()
        metrics = MetricRecord({"train_loss": total / (task.epochs * len(batches)), "num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


def server_app(folder: str) -> ServerApp:
    """Return the app of the server, which saves the model."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        mine = loaded(folder)
        task = mine.task

        def after(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            if server_round:
                round_done()
            return MetricRecord()

        strategy = FedAvg(
            fraction_train=task.cohort / task.clients,
            fraction_evaluate=0.0,
            min_train_nodes=task.cohort,
            min_available_nodes=task.clients,
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(mine.model().state_dict()),
            num_rounds=task.rounds,
            train_config=ConfigRecord({"lr": task.lr}),
            evaluate_fn=after,
        )
        model = model_of(task)
        model.load_state_dict(result.arrays.to_torch_state_dict())
        save(model, Path(folder) / "last.npz")

    return app


if __name__ == "__main__":
    run_simulation(
        server_app(sys.argv[1]),
        client_app(sys.argv[1]),
        num_supernodes=loaded(sys.argv[1]).task.clients,
        backend_config={
            "init_args": {
                "num_cpus": 2,
                "include_dashboard": False,
                "log_to_driver": False,
                "_temp_dir": f"{sys.argv[1]}/ray",
            },
            "client_resources": {"num_cpus": 1},
        },
    )
