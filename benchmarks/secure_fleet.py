"""A round on a fleet of four real nodes: plain, with `[secure]`, and with `[privacy]` beside it. Seconds and bytes.

A SuperLink with TLS and four nodes on this machine, ScaleFL on the digits with the small CNN, a level each: what
`make fleet-demo` starts. All of a run's rounds are the same work, so what differs is the protocol.
"""

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring import Figure, Options

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "fleet"))
from demo import SECURE, secure_nodes
from deployment import Deployment

import fleetfit as ff
from fleetfit.fleet.certificates import make_member

ROUNDS = 8
_PLAIN: Mapping[str, Any] = {**SECURE, "rounds": ROUNDS, "evaluate": {"every": 0}}
_WAYS = ("plain", "[secure]", "[privacy] and [secure]")
_WAIT_S = 600.0


def figures(options: Options) -> Iterator[Figure]:
    """Run a fleet of each kind, once; seconds are the median of the rounds after the first."""
    for way in _WAYS:
        with tempfile.TemporaryDirectory(prefix="secure-fleet-") as place:
            reports = _reports(Path(place), way)
        seconds = [report["seconds"] for report in reports[1:-1]]  # the last one ends with an evaluation
        yield Figure(f"a round of four nodes, {way}", statistics.median(seconds), min(seconds), max(seconds),
                     len(seconds), unit="s")  # fmt: skip
        for key, what in (("bytes_down", "down"), ("bytes_up", "up")):
            if reports[0][key] is not None:  # a private run withholds them; they are those of [secure]
                sent = [report[key] / 1e3 for report in reports]
                yield Figure(f"a round of four nodes, {way}: {what}, all nodes", statistics.median(sent), min(sent),
                             max(sent), len(sent), unit="KB")  # fmt: skip


def _reports(place: Path, way: str) -> list[dict[str, Any]]:
    """Return the reports of a fleet's rounds."""
    secure = way != "plain"
    members = {
        name: settings if secure else {key: value for key, value in settings.items() if key != "secure"}
        for name, settings in secure_nodes().items()
    }
    table = dict(_PLAIN)
    if not secure:
        del table["secure"]
    elif "privacy" in way:
        table |= {
            "privacy": {
                "clipping_norm": 1.0,
                "noise_multiplier": 1.0,
                "delta": 0.01,
                "key_file": str(place / "run.key"),
            }
        }
    with Deployment(place / "lab", members) as fleet:
        if secure:
            for name in members:
                make_member(fleet.folder / name / "own.member", fleet.folder / "authority")
        fleet.register(*members)
        for name in members:
            fleet.start_node(name)
        run, began = fleet.start_run("app", table, out=str(place / "run")), time.monotonic()
        while run.poll() is None and time.monotonic() - began < _WAIT_S:
            time.sleep(0.2)
        with contextlib.suppress(ff.FleetFitError):
            found = ff.load(place / "run").metrics
            if len(found) == ROUNDS:
                return found
        raise RuntimeError(f"the run ended too early: {fleet.log('run-app')}")
