"""The description of a run: TOML to `Experiment` and back, and what a run needs made from it."""

from fleetfit.config.assembly import Assembly
from fleetfit.config.build.run import assemble
from fleetfit.config.reading import experiment_of, read_experiment
from fleetfit.config.schema import Experiment
from fleetfit.config.writing import to_table, to_toml

__all__ = ["Assembly", "Experiment", "assemble", "experiment_of", "read_experiment", "to_table", "to_toml"]
