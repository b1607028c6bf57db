"""NeFL, its width variant NeFL-W: widths of one model, each with norms of its own (Kang et al., IEEE TMC 2025).

The levels are HeteroFL's: each keeps the first channels of every layer, at full depth with one classifier. The tensors
of norm layers, scale and shift, are "inconsistent": each level has its own, which are averaged over the clients that
trained this level in the round, and stay as they are if no client did. All other tensors are "consistent": each
element is averaged over the clients whose level has it. The server keeps the norms of level l under `level{l}/`
(`fleetfit.hooks.level_tensors`).

Differs from the paper: no blocks are skipped in the middle of the model (its variants D and WD), since a level here has
the first blocks, up to an exit. The paper learns a step size s for each residual block and level,
y + s F(y); here there is none of its own. Where F ends in an affine norm of the level, as batch norm ends the residual
branches of ResNets and MobileNets, F(y) = g n(y) + b, and g' = s g, b' = s b give the same functions; only their
training differs. Pre-norm transformers have their norm before the branch, and their levels no step size at all. In the
authors' code a client trains a level drawn from its own and up to two above and below it; here it never gets more than
it affords: its own, or with `tiers` one drawn from its own and as many below. Means weigh by samples, where the
authors' code counts clients. Running statistics are none of these tensors: they are measured for each level after
training (`fleetfit.evaluation`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from fleetfit.core import Federation, Level, Local, Problem, Server
from fleetfit.errors import check_range
from fleetfit.hooks import Method, Slot, assign_own_levels, get_round_submodel
from fleetfit.hooks.level_tensors import keep_per_level
from fleetfit.hooks.levels import split_levels


def nefl(tiers: int = 0) -> Method:
    """Make the method.

    Args:
        tiers: A client trains in each round a level drawn uniformly from its own and this many below it, at least 0.
    """
    check_range("tiers", tiers, 0, closed=True)
    return Method(
        make_levels=partial(split_levels, scaling="width"),
        assign=partial(assign_drawn_levels, tiers=tiers) if tiers else assign_own_levels,
        describe=describe_missing_norms,
        **keep_per_level("norms"),
    )


def assign_drawn_levels(federation: Federation, server: Server, rng: np.random.Generator, tiers: int) -> list[Slot]:
    """Give each chosen client a level drawn from its own and up to `tiers` below it."""
    slots = []
    for client in federation.method.choose_clients(federation, server, rng):
        own = int(federation.level_of[client])
        level = int(rng.integers(max(0, own - tiers), own + 1))
        slots.append(Slot(client, level, get_round_submodel(federation, server.round, client, level)))
    return slots


def describe_missing_norms(problem: Problem, levels: Sequence[Level], local: Local) -> Iterator[str]:
    """Say what is left of the method in a model whose norms are not trained, or which has none."""
    if not problem.norms:
        yield "The model trains no norm layers, so levels share all tensors: nefl is then heterofl, weighed by samples."
