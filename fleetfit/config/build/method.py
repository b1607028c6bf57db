"""`[method]` and `[cohort] choose` become the spec from which jobs rebuild the method."""

from collections.abc import Mapping
from typing import Any

from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError


def build_method_spec(experiment: Experiment) -> dict[str, Any]:
    """Return the spec of a run's method; see `fleetfit.method.build`.

    Raises:
        ConfigError: `[cohort] choose` has no name, or the same hook is set twice.
    """
    section, choose = experiment.method, experiment.cohort.choose
    choice = dict(choose) if isinstance(choose, Mapping) else {"name": choose}
    if "name" not in choice:
        raise ConfigError(
            '[cohort] choose: a table needs the name of a way of client selection, such as { name = "loss" }.',
            key="cohort.choose.name",
        )
    spec = {"name": section.name, **section.settings}
    if choice != {"name": "uniform"}:
        if "choose" in section.hooks:
            raise ConfigError(
                "cohort.choose and method.hooks.choose name the same hook; set one of them.", key="cohort.choose"
            )
        spec["cohort"] = choice
    plus = section.plus
    if experiment.cohort.deadline_s is not None and experiment.cohort.late == "shallower":
        plus = {**plus, "in_time": {}}
    return spec | ({"plus": plus} if plus else {}) | ({"hooks": section.hooks} if section.hooks else {})
