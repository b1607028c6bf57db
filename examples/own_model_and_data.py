"""Your own module and your own tensors, trained on devices of four sizes: python examples/own_model_and_data.py"""

import torch
from torch import nn

import fleetfit as ff
from fleetfit.architecture import Architecture, Axis, ExitModel


class Net(ExitModel):  # blocks are named blocks.{i}, classifiers heads.{block count}; the rest is up to you
    def __init__(self, hidden, classes, exits):
        super().__init__()
        self.exits = exits
        self.stem = nn.Linear(20, hidden)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(hidden, classes) for e in exits})

    def start(self, x):
        return self.stem(x).relu()


class Family(Architecture):  # what can be scaled, and how to build any size of it
    def __init__(self, hidden=64, classes=5):
        self.axes = {"hidden": Axis(hidden), "classes": Axis(classes, scaled=False)}
        self.blocks = 5

    def build(self, axes, exits):
        return Net(axes["hidden"], axes["classes"], exits)


rng = torch.Generator().manual_seed(0)
y = torch.randint(5, (2000,), generator=rng)
x = torch.randn(5, 20, generator=rng)[y] + torch.randn(2000, 20, generator=rng)
train, test = torch.arange(2000).split([1600, 400])
clouds = ff.Data("clouds", x, y, splits={"train": train, "test": test}, classes=5)

if __name__ == "__main__":
    run = ff.run(model=Family(), data=clouds, rounds=20)
    print(f"{run.plan.levels[0].parameters} of {run.plan.levels[-1].parameters} parameters at level 1")
    print(f"accuracy: local {run.accuracy('local'):.2f}, global {run.accuracy('global'):.2f}")
    print(run.model(level=1))  # a plain nn.Module
