"""The Flower ServerApp: one run of FleetFit on the nodes that are connected (see `fleetfit.api.fleet`)."""

import sys
from pathlib import Path

from flwr.app import Context
from flwr.common.config import get_project_dir
from flwr.serverapp import Grid, ServerApp

from fleetfit.api.fleet import ServerAppConfig, serve
from fleetfit.errors import FleetFitError, make_printable
from fleetfit.fleet import logs
from fleetfit.fleet.warm.server_app import warmed

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config asks for; a mistake of a person is told as a sentence, without a traceback."""
    logs.hear()
    try:
        with warmed(grid):
            serve(grid, ServerAppConfig.from_run_config(context.run_config, _folder(grid)), _say)
    except FleetFitError as error:
        _say(f"fleetfit: {error}")
        sys.tracebacklimit = 0
        raise


def _folder(grid: Grid) -> Path:
    """Return where Flower has put the app's files."""
    run = grid.run
    return Path(get_project_dir(run.fab_id, run.fab_version, run.fab_hash))


def _say(line: str) -> None:
    """Print a line of the run's own report, which `flwr run --stream` shows."""
    print(make_printable(line), flush=True)
