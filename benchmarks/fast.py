"""A fast round, and a fast one in fp32, against a bare loop that computes in fp32 with the default memory format.

What a round adds to the steps (building jobs, checking updates, averaging) is in ours and not in the loop, so these are
the figures of a run. `exact` against the same loop is in `round`. Without bf16 instructions the first of the two says
what fast gains without.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.loops import Bare
from benchmarks.measuring import Figure, Options, ratio
from benchmarks.random_fleet import KINDS, LOCAL, fleet
from fleetfit.config.assemble.engine import choose_computing
from fleetfit.config.schema import EngineSection, RecordedSection
from fleetfit.engines.local import local
from fleetfit.rounds import Settings, run_round, start
from fleetfit.training.runtime import has_bf16

CLIENTS = 8
HOST = torch.device("cpu")
WANTED = {"cnn": 0.60, "resnet20": 0.55, "mobilenetv2": 0.55, "small ViT": 0.75, "small BERT": 0.75}
WANTED_FP32 = {"resnet20": 0.80}


def figures(options: Options) -> Iterator[Figure]:
    """Alternate each with the loop, model by model; batch 16, four levels, ScaleFL."""
    speeds = {"fast": EngineSection(speed="fast"), "fast in fp32": EngineSection(speed="fast", precision="fp32")}
    for name, kind in KINDS.items():
        federation, simulation = fleet(kind, CLIENTS, cohort=CLIENTS)
        slots = [(client, int(federation.level_of[client])) for client in range(CLIENTS)]
        bare, server, before = Bare(federation, simulation), start(federation), None
        for words, section in speeds.items():
            how = choose_computing(section, RecordedSection(), federation.problem, federation.levels, HOST)
            if how.computed == before:  # there is nothing to take back
                continue
            before = how.computed
            problem = federation.problem.replace_arithmetic(how.computed)
            ours = partial(run_round, replace(federation, problem=problem), local(replace(simulation, problem=problem)),
                           Settings(1, LOCAL), server)  # fmt: skip
            wanted = (WANTED if words == "fast" and has_bf16(HOST) else WANTED_FP32).get(name)
            yield ratio(f"{name}, {words}, against a bare loop", ours, partial(bare.round, slots), options.repetitions,
                        wanted=wanted, detail="; ".join(f"{n}: {how.chosen[n]}" for n in how.chosen))  # fmt: skip
