"""A real fleet over the network, by Flower: nodes train on their own data. It needs the extra `flower`.

The function takes the keys of `[engine]`. What trains on nodes is `fleetfit.fleet`.
"""

from dataclasses import dataclass
from typing import Any

from fleetfit.errors import ConfigError, check_range


@dataclass(frozen=True)
class Rules:
    """When a fleet's run begins, with whom, and when its rounds end; `flower` and `[cohort]` explain the keys.

    Attributes:
        names: Names of the only nodes that take part; empty for any.
    """

    nodes: int = 1
    wait_s: float = 600.0
    deadline_s: float = 600.0
    quorum: float = 1.0
    over_selection: float = 0.0  # both are keys of [cohort]
    names: tuple[str, ...] = ()


def flower(
    nodes: int | list[str] = 1,
    wait_s: float = 600.0,
    deadline_s: float = 600.0,
    simulation: Any = None,
) -> Rules:
    """Return the rules of a fleet's run.

    Args:
        nodes: Nodes that must have enrolled before the first round. Levels are planned from their budgets; more may
            join later. Or the names of the only nodes that take part.
        wait_s: Seconds to wait for them.
        deadline_s: Seconds from sending a job until it counts as failed.
        simulation: Set by `fleetfit run`, which has no nodes.

    Raises:
        ConfigError: A setting is out of range, or the run has no fleet.
    """
    if simulation is not None:
        raise ConfigError(
            "engine flower trains on real nodes and is not started by `fleetfit run`: write an app with `fleetfit "
            "flower init DIR`, and start it with `flwr run DIR`.",
            key="engine.name",
        )
    names = tuple(nodes) if isinstance(nodes, list) else ()
    count = len(names) if isinstance(nodes, list) else nodes
    if count < 1 or len(set(names)) < len(names):
        raise ConfigError(
            f"engine.nodes must be at least 1, or a list of different names, got {nodes}.", key="engine.nodes"
        )
    check_range("engine.wait_s", wait_s, 0)
    check_range("engine.deadline_s", deadline_s, 0)
    return Rules(count, wait_s, deadline_s, names=names)
