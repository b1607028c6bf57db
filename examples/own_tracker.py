"""A tracker of your own in ten lines: every number of every round as a line of a CSV file.

    fleetfit run --set 'callbacks=[{name = "examples/own_tracker.py:CsvTracker", file = "numbers.csv"}]'

A callback is any object with some of the methods of `fleetfit.Callback`; its class's parameters are its keys in a run
file. A run that goes on after an interruption adds the rounds that are new.
"""

import csv
from pathlib import Path

from fleetfit.callbacks import scalars


class CsvTracker:
    def __init__(self, file="numbers.csv"):
        self.file = file

    def on_start(self, start):
        self.path = start.folder / self.file

    def on_round(self, report):
        with Path(self.path).open("a", newline="") as file:
            csv.writer(file).writerows([report["round"], name, value] for name, value in scalars(report).items())
