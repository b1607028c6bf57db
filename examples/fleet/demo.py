"""Four unequal devices train one model over the network, on this machine: `make fleet-demo`.

A SuperLink with TLS, four nodes with registered keys and budgets of their own, ScaleFL on the handwritten digits. What
the server says appears as it says it; keys, certificates, logs and the run folder stay in the folder that is named.
With `--secure` the server sees sums only, and what it has is searched for the nodes' updates.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from deployment import Deployment
from open_updates import WITHOUT_MASKS, Search, needles

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.errors import FleetFitError
from fleetfit.fleet.certificates import make_member

BUDGETS = {"phone": 0.125, "pi": 0.25, "jetson": 0.5, "server": 1.0}
RUN = {
    "name": "fleet-demo", "rounds": 8, "model": {"name": "cnn"}, "method": {"name": "scalefl"},
    "local": {"epochs": 2, "lr": 0.05}, "cohort": {"fraction": 1.0}, "evaluate": {"every": 2},
    "engine": {"name": "flower", "nodes": len(BUDGETS), "deadline_s": 300.0},
}  # fmt: skip


SECURE = {
    **RUN, "name": "secure-fleet-demo", "rounds": 2, "model": {"name": "cnn", "norm": "group"},
    "secure": {"min_clients": 2, "reconstruction_threshold": 0.6},
}  # fmt: skip
DIVISION = {"kind": "dirichlet", "alpha": 1.0, "clients": len(BUDGETS)}


def nodes() -> dict[str, dict[str, Any]]:
    """Return what each node's configuration says: its budget, and its part of the digits."""
    return {
        name: {"budget": budget, "data": {"name": "digits", "partition": DIVISION, "client": client}}
        for client, (name, budget) in enumerate(BUDGETS.items())
    }


def simulated() -> dict[str, Any]:
    """Return the run file of a simulation that trains as the fleet with `[secure]` does."""
    groups = [{"budget": budget} for budget in BUDGETS.values()]
    return {**SECURE, "data": {"name": "digits", "partition": DIVISION}, "engine": {"name": "local"},
            "fleet": {"groups": groups}}  # fmt: skip


def secure_nodes() -> dict[str, dict[str, Any]]:
    """Return the same nodes with keys of members, in the order of the simulation's clients, by name."""
    kinds = {budget: name for name, budget in BUDGETS.items()}
    budgets = [float(budget) for budget in assemble(load_experiment(simulated())).fleet.budgets]
    return {
        f"{client}-{kinds[budget]}": {
            "budget": budget, "data": {"name": "digits", "partition": DIVISION, "client": client},
            "secure": {"member": "own.member", "min_clients": 2},
        }
        for client, budget in enumerate(budgets)
    }  # fmt: skip


def run_to_its_end(fleet: Deployment, names: Iterable[str], table: dict[str, Any], look: Callable[[], None]) -> None:
    """Start the nodes and a run, and print what the server says until it has ended; `look` is called meanwhile."""
    fleet.register(*names)
    for name in names:
        fleet.start_node(name)
    print(f"{len(BUDGETS)} keys are registered, the nodes are starting: {', '.join(names)}.", flush=True)
    run = fleet.start_run("app", table, out=str((fleet.folder / "run").resolve()))
    said = 0
    while True:
        over = run.poll() is not None
        lines = fleet.log("run-app").splitlines()
        for line in lines[said:]:
            print(f"  {line}", flush=True)
        said = len(lines)
        look()
        if over:
            return
        time.sleep(0.5)


def secure(folder: Path, masks: bool, further: Mapping[str, Any] | None = None) -> Search:
    """Run with `[secure]`, and look for single updates in what the server has.

    Args:
        folder: Where everything is written.
        masks: False: secure rounds without masks, to see that the search would find updates.
        further: Sections of the run file beside `SECURE`'s.
    """
    search, members = Search(needles({**simulated(), **(further or {})}), folder), secure_nodes()
    if not masks:
        (folder / "unmasked").mkdir()
        (folder / "unmasked" / "sitecustomize.py").write_text(WITHOUT_MASKS)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder / "unmasked"), os.environ.get("PYTHONPATH", "")])
    with Deployment(folder, members) as fleet:
        for name in members:
            make_member(folder / name / "own.member", folder / "authority")
        run_to_its_end(fleet, list(members), {**SECURE, **(further or {})}, search.look)
    search.look()
    return search


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs") / f"fleet-demo-{datetime.now():%Y%m%d-%H%M%S}")
    parser.add_argument("--secure", action="store_true", help="with [secure]: the server sees sums only")
    parser.add_argument("--no-masks", action="store_true", help="with --secure: what the search finds without masks")
    asked = parser.parse_args()
    folder = asked.out.resolve()
    folder.mkdir(parents=True)
    print(f"Everything is in {folder}. Starting the SuperLink; Ctrl-C ends it all.", flush=True)
    if asked.secure:
        search = secure(folder, masks=not asked.no_masks)
    else:
        with Deployment(folder, nodes()) as fleet:
            run_to_its_end(fleet, list(BUDGETS), RUN, lambda: None)
    if not (folder / "run" / "summary.json").exists():
        print(f"The run did not finish; see the logs in {folder}.", file=sys.stderr)
        return 1
    if asked.secure:
        where = "; ".join(f"of client {c} in {', '.join(sorted(p))}" for c, p in sorted(search.found.items()))
        print(f"Looked for the updates of {len(search.wanted)} clients in {search.bytes / 1e6:.1f} MB of the server's "
              f"database, logs and run folder: {where or 'none is there'}.")  # fmt: skip
    print(f"The run folder is {folder / 'run'}; each node's own log is {folder}/NAME.log.")
    return bool(asked.secure and search.found) is not bool(asked.no_masks)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FleetFitError, RuntimeError) as error:
        sys.exit(f"fleet-demo: {error}")
    except KeyboardInterrupt:
        sys.exit("fleet-demo: stopped.")
