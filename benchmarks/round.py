"""A round of ours against two loops on the same clients, levels and samples: a bare one and a naive one."""

from collections.abc import Iterator
from functools import partial

from benchmarks.loops import Bare
from benchmarks.measuring import Figure, Options, ratio
from benchmarks.naive import NaiveProcess
from benchmarks.random_fleet import COHORT, KINDS, LOCAL, fleet
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, run_round, start

WANTED = {"cnn": 0.78, "resnet20": 0.85, "mobilenetv2": 0.72, "efficientnet_b0": 0.83, "small ViT": 1.01}


def figures(options: Options) -> Iterator[Figure]:
    """Alternate our round with each loop, model by model; batch 16, four levels, ScaleFL."""
    for name, kind in KINDS.items():
        federation, simulation = fleet(kind, COHORT, COHORT)
        slots = [(client, int(federation.level_of[client])) for client in range(COHORT)]
        ours = partial(run_round, federation, local(simulation), Settings(1, LOCAL), start(federation))
        bare = partial(Bare(federation, simulation).round, slots)
        yield ratio(f"{name}, exact, against a bare loop", ours, bare, options.repetitions, wanted=WANTED.get(name))
        with NaiveProcess(name) as naive:
            yield ratio(f"{name}, a naive loop against exact", naive.round, ours, max(3, options.repetitions // 2),
                        better="higher")  # fmt: skip
