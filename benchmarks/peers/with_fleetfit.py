"""The task on FleetFit: every client affords the whole model, FedAvg. `with_fleetfit.py FOLDER ENGINE [EVERY]`."""

import sys
from pathlib import Path

import torch
from task import CLASSES, loaded, round_done, save

import fleetfit as ff


def data(folder: str) -> ff.Data:
    """Return the data set, with a natural group for each client."""
    found = loaded(folder)
    train, test = torch.arange(found.trained), torch.arange(found.trained, len(found.y))
    groups = torch.cat([train // found.task.samples, test % found.task.clients])
    splits = {"train": train, "validation": train[:0], "test": test}
    gray = (0.5,) * found.task.channels
    return ff.Data("peers", found.x, found.y, splits, CLASSES, groups=groups, mean=gray, std=tuple(v / 2 for v in gray))


def main(folder: str, engine: str, every: str = "0") -> None:
    """Run the task and save the model; `every`: rounds between evaluations, or "auto"."""
    found = loaded(folder)
    task = found.task
    run = ff.run(
        {
            "rounds": task.rounds,
            "seed": task.seed,
            "data": {"name": f"{__file__}:data", "folder": folder, "partition": {"kind": "natural"}},
            "model": {"name": task.model},
            "method": {"name": "fedavg"},
            "fleet": {"groups": [{"budget": 1.0}]},
            "local": {"epochs": task.epochs, "batch_size": task.batch_size, "lr": task.lr, "momentum": task.momentum,
                      "weight_decay": 0.0},
            "cohort": {"count": task.cohort},
            "evaluate": {"every": every if every == "auto" else int(every)},
            "engine": {"name": engine, **({"workers": 2} if engine == "processes" else {})},
        },
        out=Path(folder) / "run",
        on_round=lambda report: round_done(),
    )  # fmt: skip
    model = found.model()
    with torch.no_grad():
        for mine, trained in zip(model.parameters(), run.model().parameters(), strict=True):
            mine.copy_(trained)
    save(model, Path(folder) / "last.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
