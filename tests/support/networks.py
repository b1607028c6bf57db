"""What comes of the networks of other people's packages; `make zoo-table` writes tests/bed/networks.json anew."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bed.networks import NETWORKS, Network

import fleetfit as ff
from fleetfit.anatomy.derive import DerivedArchitecture
from fleetfit.errors import ModelError

RECORD = Path(__file__).parents[1] / "bed" / "networks.json"
SAMPLES, BUDGETS = 64, (0.125, 0.25, 0.5, 1.0)


def find_outcome(network: Network, folder: Path) -> dict[str, Any]:
    """Return what comes of a network: its axes and exits, what stays whole and why, and four trained levels.

    Or the key of the error that refuses it. CPU seconds are of this process.
    """
    torch.manual_seed(0)
    net, x = network.make(), network.draw(SAMPLES)
    data = {"name": "arrays", "file": str(folder / "data.npz"), "vocabulary": network.tokens,
            "partition": {"kind": "iid", "clients": len(BUDGETS)}}  # fmt: skip
    if network.next_tokens:
        y, data["task"] = torch.roll(x, -1, 1), "next_token"
    else:
        with torch.no_grad():
            out = net.eval()(x[:2])
        logits = getattr(out, "logits", out)
        y = torch.arange(SAMPLES) % logits.shape[1]
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    begin = time.process_time()
    try:
        derived = ff.derive(net.train(), data, progress="off")
    except ModelError as error:
        return {"refused": error.key, "derived in s": round(time.process_time() - begin, 1)}
    middle = time.process_time()
    run = ff.run(
        model=derived, data=data, rounds=1, cohort={"count": len(BUDGETS)}, local={"max_steps": 1}, progress="off",
        fleet={"groups": [{"budget": budget} for budget in BUDGETS], "tolerance": 0.4}, out=folder / "run",
    )  # fmt: skip
    assert run.summary["failures"] == 0, run.notes
    levels = [level["parameters"] for level in run.summary["levels"]]
    return {
        **describe(derived),
        "levels": [round(n / levels[-1], 3) for n in levels],
        "derived in s": round(middle - begin, 1),
        "trained in s": round(time.process_time() - middle, 1),
    }


def describe(derived: DerivedArchitecture) -> dict[str, Any]:
    """Return the number of axes and of exits, and what stays whole at every level."""
    return {
        "parameters": sum(p.numel() for p in derived.net.parameters()),
        "axes": sum(axis.scaled for axis in derived.axes.values()),
        "exits": derived.blocks,
        "whole": [line.removeprefix("Whole at every level: ") for line in derived.describe_whole()],
    }


def read_record() -> dict[str, dict[str, Any]]:
    """Return the recorded outcome of each network, by package and name."""
    record: dict[str, dict[str, Any]] = json.loads(RECORD.read_text())
    return record


def main(words: list[str]) -> None:
    """Measure the networks that have one of the words in their names, or all."""
    torch.set_num_threads(1)
    record = read_record() if RECORD.exists() else {}
    for network in NETWORKS:
        if network.is_installed and (not words or any(word in str(network) for word in words)):
            with tempfile.TemporaryDirectory() as folder:
                record[str(network)] = find_outcome(network, Path(folder))
            print(network, record[str(network)], flush=True)
            ordered = {str(one): record[str(one)] for one in NETWORKS if str(one) in record}
            lines = [f"{json.dumps(name)}: {json.dumps(outcome)}" for name, outcome in ordered.items()]
            RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
