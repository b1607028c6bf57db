"""Configuration: run files become an `Experiment`, and an `Experiment` becomes the objects of a run."""

from fleetfit.config.assembly import Assembly
from fleetfit.config.dump import to_table, to_toml
from fleetfit.config.load import load_experiment
from fleetfit.config.schema import Experiment

__all__ = ["Assembly", "Experiment", "load_experiment", "to_table", "to_toml"]
