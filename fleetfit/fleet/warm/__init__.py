"""The warm start: a node forks a process that has Flower imported for each message, instead of starting one.

The node's worker keeps FleetFit's own part (torch, data, models) with any client app. The remaining cost of a message
is Flower's: starting Python, importing Flower, and sleeping between two polls. Two processes stay, since neither can be
the other: the zygote has Flower and a single thread, since forking several is unsafe; the worker has torch's threads,
and models that a fork would build anew for each message. A fork of the zygote runs the client app, which asks the
worker. A message costs about 0.5 s this way, and 4 s or more where Flower starts a process.

- `zygote`: imports Flower, and forks for each message;
- `supernode`: Flower's SuperNode with shorter sleeps, and the SuperExec that hands its messages to the zygote;
- `turns`: gives each message of that SuperNode its own reply;
- `server_app`: polls for replies more often, and reports a server app that was killed;
- `private_names`: lists and checks the names inside Flower that the others use.

No other part of FleetFit uses such names, and everything works without this package: `fleetfit.fleet.warm_start` is the
only module that imports it. Where Flower has changed, with `--cold`, or where forking is not possible, nodes do without
the fork; with `flower-supernode` they do without all of it.
"""

import contextlib
from typing import Any

SUPERNODE, ZYGOTE = "fleetfit.fleet.warm.supernode", "fleetfit.fleet.warm.zygote"
"""Modules that a node runs as processes."""
PRELOAD = ("numpy", "flwr.supernode.runtime.run_clientapp", "fleetfit.fleet.client_app")
"""Modules that the zygote imports."""


def speed_up_server_app(grid: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the server app gets its replies sooner, and its death is reported.

    Args:
        grid: Flower's grid of the server app.
    """
    from fleetfit.fleet.warm.server_app import run_warm

    return run_warm(grid)
