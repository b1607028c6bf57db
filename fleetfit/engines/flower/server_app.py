"""The Flower ServerApp: one run of FleetFit on the nodes that are connected (see `fleetfit.api.fleet`)."""

import functools
import importlib
import inspect
import sys
from pathlib import Path

from flwr.app import Context
from flwr.common.config import get_project_dir
from flwr.serverapp import Grid, ServerApp

from fleetfit.api.fleet import ServerAppConfig, serve
from fleetfit.engines.flower.last_words import spoken_for
from fleetfit.errors import FleetFitError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config asks for; a mistake of a person is told as a sentence, without a traceback."""
    _ask_often()
    try:
        with spoken_for(grid):
            serve(grid, ServerAppConfig.of(context.run_config, _folder(grid)), _say)
    except FleetFitError as error:
        _say(f"fleetfit: {error}")
        sys.tracebacklimit = 0
        raise


def _ask_often() -> None:
    """Have Flower ask often for a reply's content, which comes after the reply; where it can still be told to.

    It waits 1 s after the first time in vain, and longer each time, which is most of the time of a small model's round.
    """
    inside = importlib.import_module("flwr.superlink.grid.http_grid")
    found = getattr(inside, "pull_objects", None)
    if found is not None and "initial_backoff" in inspect.signature(found).parameters:
        inside.pull_objects = functools.partial(found, initial_backoff=0.05)  # type: ignore[attr-defined]


def _folder(grid: Grid) -> Path:
    """Return where Flower has put the app's files."""
    run = grid.run
    return Path(get_project_dir(run.fab_id, run.fab_version, run.fab_hash))


def _say(line: str) -> None:
    print(line, flush=True)
