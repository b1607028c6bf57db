"""Four unequal devices train one model over the network, on this machine: `make fleet-demo`.

A SuperLink with TLS, four nodes with registered keys and budgets of their own, ScaleFL on the handwritten digits. What
the server says appears as it says it; keys, certificates, logs and the run folder stay in the folder that is named.
"""

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from deployment import Deployment

from fleetfit.errors import FleetFitError

BUDGETS = {"phone": 0.125, "pi": 0.25, "jetson": 0.5, "server": 1.0}
RUN = {
    "name": "fleet-demo", "rounds": 8, "model": {"name": "cnn"}, "method": {"name": "scalefl"},
    "local": {"epochs": 2, "lr": 0.05}, "cohort": {"fraction": 1.0}, "evaluate": {"every": 2},
    "engine": {"name": "flower", "nodes": len(BUDGETS), "deadline_s": 300.0},
}  # fmt: skip


def nodes() -> dict[str, dict[str, Any]]:
    """Return what each node's configuration says: its budget, and its part of the digits."""
    division = {"kind": "dirichlet", "alpha": 1.0, "clients": len(BUDGETS)}
    return {
        name: {"budget": budget, "data": {"name": "digits", "partition": division, "client": client}}
        for client, (name, budget) in enumerate(BUDGETS.items())
    }


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"fleet-demo-{datetime.now():%Y%m%d-%H%M%S}")
    folder = parser.parse_args().out
    folder.mkdir(parents=True)
    print(f"Everything is in {folder}. Starting the SuperLink; Ctrl-C ends it all.", flush=True)
    with Deployment(folder, nodes()) as fleet:
        fleet.register(*BUDGETS)
        for name in BUDGETS:
            fleet.start_node(name)
        print(f"{len(BUDGETS)} keys are registered, the nodes are starting: {', '.join(BUDGETS)}.", flush=True)
        run = fleet.start_run("app", RUN, out=str((folder / "run").resolve()))
        said = 0
        while True:
            over = run.poll() is not None
            lines = fleet.log("run-app").splitlines()
            for line in lines[said:]:
                print(f"  {line}", flush=True)
            said = len(lines)
            if over:
                break
            time.sleep(0.5)
    if not (folder / "run" / "summary.json").exists():
        print(f"The run did not finish; see the logs in {folder}.", file=sys.stderr)
        return 1
    print(f"The run folder is {folder / 'run'}; each node's own log is {folder}/NAME.log.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FleetFitError, RuntimeError) as error:
        sys.exit(f"fleet-demo: {error}")
    except KeyboardInterrupt:
        sys.exit("fleet-demo: stopped.")
