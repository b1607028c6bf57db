"""What a run folder says of its run: the description with every default visible, a fleet's nodes, accuracies."""

from collections.abc import Mapping
from typing import Any

from fleetfit.config import Experiment, experiment_of
from fleetfit.config.writing import dumped, objects_in, to_table
from fleetfit.engines.flower.protocol import hello_of
from fleetfit.errors import ConfigError, RunError, did_you_mean
from fleetfit.records import RunFolder
from fleetfit.values import NodeDescription

COLUMNS = "columns.json"
"""How the columns of a table became numbers, in the folder of a run on one."""
NODES = "nodes.json"
"""Who takes part, in the folder of a real fleet's run."""


def planned_for(files: RunFolder) -> list[NodeDescription]:
    """Return what the nodes told for whom the levels of a fleet's run were planned.

    Raises:
        RunError: The file is damaged.
    """
    try:
        return [hello_of(nest) for nest in files.json(NODES)["planned"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{files.path / NODES} is damaged: {error}.") from None


def settled(experiment: Experiment) -> Experiment:
    """Return the experiment as `config.toml` will describe it, so that a resumed run is the same to the last byte."""
    return experiment_of(visible(experiment), is_complete=True)


def visible(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's tables with every default visible, and the objects that stand in for names."""
    table = to_table(experiment)
    return table | {section: dumped(getattr(experiment, section)) for section in objects_in(table)}


def accuracy_among(columns: Mapping[str, Any], kind: str, level: int | None, norm: str) -> float:
    """Return one accuracy of an evaluation's columns; see `Run.accuracy`.

    Raises:
        ConfigError: There is no such number.
    """
    if norm not in columns:
        known = ", ".join(name for name in ("static", "batch") if name in columns)
        raise ConfigError(f'this run has no "{norm}" columns; its evaluate.norms are {known}.')
    found = columns[norm]
    if level is not None:
        if kind != "local" or str(level) not in found["levels"]:
            raise ConfigError(
                f'accuracy by level is that of kind "local" and levels {", ".join(found["levels"])}; got kind '
                f'"{kind}" and level {level}.'
            )
        found = found["levels"][str(level)]
    if not isinstance(found.get(kind), int | float):
        numbers = [key for key, value in found.items() if isinstance(value, int | float)]
        raise ConfigError(
            f'there is no accuracy "{kind}"; there are {", ".join(numbers)}.{did_you_mean(kind, numbers)}'
        )
    return float(found[kind])


def short_name(name: Any) -> str:
    """Return what people call a name of a run file: without the place of its function; of an object, its type."""
    text = name if isinstance(name, str) else type(name).__name__
    return text.rpartition(":")[2]
