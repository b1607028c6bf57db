"""The description of a run: TOML to `Experiment` and back, and from it everything that a run needs."""

from fleetfit.config.assembly import Assembly
from fleetfit.config.build.run import assemble
from fleetfit.config.dump import to_table, to_toml
from fleetfit.config.load import load_experiment
from fleetfit.config.schema import Experiment

__all__ = ["Assembly", "Experiment", "assemble", "load_experiment", "to_table", "to_toml"]
