"""A round of ours against two loops on the same clients, levels and samples: a bare one and a naive one."""

from collections.abc import Iterator

from benchmarks.loops import Bare, Naive
from benchmarks.measuring import Figure, Options, ratio
from benchmarks.random_fleet import KINDS, LOCAL, fleet
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, one_round, start

CLIENTS = 8
BARE = {"cnn": 1.04, "resnet20": 1.02}


def figures(options: Options) -> Iterator[Figure]:
    """Alternate our round with each loop, model by model; batch 16, four levels, ScaleFL."""
    for name, kind in KINDS.items():
        federation, simulation = fleet(kind, CLIENTS, cohort=CLIENTS)
        engine, settings, server = local(simulation), Settings(1, LOCAL), start(federation)
        slots = [(client, int(federation.level_of[client])) for client in range(CLIENTS)]
        bare, naive = Bare(federation, simulation), Naive(federation, simulation)

        def ours(federation=federation, engine=engine, settings=settings, server=server) -> None:
            one_round(federation, engine, settings, server)

        yield ratio(f"{name}, exact, against a bare loop", ours, lambda bare=bare, slots=slots: bare.round(slots),
                    options.repetitions, wanted=BARE.get(name))  # fmt: skip
        yield ratio(f"{name}, a naive loop against exact", lambda naive=naive, slots=slots: naive.round(slots), ours,
                    max(3, options.repetitions // 2), better="higher")  # fmt: skip
