"""Configuration: run files become an `Experiment`, and an `Experiment` becomes the objects of a run."""

from fleetfit.config.assembly import Assembly as Assembly
from fleetfit.config.dump import to_table as to_table, to_toml as to_toml
from fleetfit.config.load import load_experiment as load_experiment
from fleetfit.config.schema import Experiment as Experiment
