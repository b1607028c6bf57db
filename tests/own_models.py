"""A model of one's own as text, for tests that write it into a file, wrong in one place or as it is."""

HEAD = """
import torch
from torch import nn
from fleetfit.architecture import Architecture, Axis, ExitModel
"""
STACK = """
class Net(ExitModel):
    def __init__(self, hidden, classes, exits):
        super().__init__()
        self.exits = exits
        self.stem = nn.Linear(5, hidden)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()) for _ in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(hidden, classes) for e in exits})

    def start(self, x):
        return self.stem(x)

class Stack(Architecture):
    def __init__(self, classes, hidden=32, blocks=4):
        self.axes = {"hidden": Axis(hidden), "classes": Axis(classes, scaled=False)}
        self.blocks = blocks

    def build(self, axes, exits):
        return Net(axes["hidden"], axes["classes"], exits)
"""
