"""How many steps of distillation FedDF needs after a round, in the setting of ScaleFL's Table 3 for two cores.

    FLEETFIT_DATA=... python -m experiments.feddf_steps --seed 0
    FLEETFIT_DATA=... python -m experiments.feddf_steps --seed 0 --rounds 75 --lr 0.001

HeteroFL, whose mean FedDF's student starts from, is trained for `--rounds`; then each number of steps distills the same
next round of it. `before` and `after` are the student's divergence from its teachers on the held-out tenth of the
server's images: `after` is that of the state that is kept, the mean itself included, and that it falls no further with
more steps is what "converged" means. `local` and `global` are what the clients then get, in percent. A run folder is
kept for each below `--out`; what is finished there is not run again. About a sixth of a second of a core for a step.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

import fleetfit as ff
from fleetfit.config.toml import read_toml

FILE = Path(__file__).parent / "small" / "scalefl-table3.toml"
STEPS = (0, 10, 40, 160, 640, 2560)
LOOKS = 10  # steps between two looks at the held-out data


def main(given: list[str] | None = None) -> None:
    """Train, distill, and print a line for each number of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=FILE, help="the comparison whose first setting it is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rounds", type=int, default=37, help="of HeteroFL before it; by default those at its first rate"
    )
    parser.add_argument("--lr", type=float, help="the clients' learning rate in the round that is distilled")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--out", type=Path, default=Path("runs/feddf-steps"), help="where the run folders go")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    table = {**setting_of(options.file), "seed": options.seed}
    place = options.out / options.file.stem / f"seed-{options.seed}-after-{options.rounds}"
    rate = "" if options.lr is None else f"-lr-{options.lr:g}"
    start = finished({**table, "rounds": options.rounds, "method": {"name": "heterofl"}}, place / "heterofl")
    print(f"{'steps':>6} {'before':>8} {'after':>8} {'local':>6} {'global':>6}")
    local = {**table["local"], "lr": options.lr or table["local"]["lr"], "schedule": {"kind": "constant"}}
    one = {**table, "rounds": 1, "init_from": str(start.folder.resolve()), "local": local}
    for steps in options.steps:
        run = finished({**one, "method": distilling(steps)}, place / f"steps-{steps}{rate}")
        told = run.metrics[-1].get("server", {})
        told = [f"{told[key]:8.4f}" if told else f"{'-':>8}" for key in ("before", "after")]
        print(f"{steps:>6}", *told, *(f"{100 * run.accuracy(kind):6.2f}" for kind in ("local", "global")), flush=True)


def setting_of(file: Path) -> dict[str, Any]:
    """Return a comparison's tables in its first setting, without the rows."""
    table = read_toml(file)
    first = {key: value for key, value in table.pop("compare")["setting"][0].items() if key != "label"}
    return {**table, **first}


def distilling(steps: int) -> dict[str, Any]:
    """Return FedDF with so many steps, all of which are done; without any it is HeteroFL."""
    if not steps:
        return {"name": "feddf", "steps": 0}
    return {"name": "feddf", "steps": steps, "batch_size": 64, "check_every": LOOKS, "patience": steps + 1}


def finished(table: dict[str, Any], folder: Path) -> ff.Run:
    """Return the run of a folder, finished, computed in the way that is fastest here."""
    table = {**table, "evaluate": {**table["evaluate"], "every": 0}, "engine": {"speed": "fast"}}
    return ff.resume(folder) if folder.exists() else ff.run(table, out=folder, progress=True)


if __name__ == "__main__":
    main()
