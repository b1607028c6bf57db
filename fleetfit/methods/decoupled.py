"""Decoupled: one separate model per level, each averaged among its own level only (baseline of ScaleFL and AdaptiveFL).

The levels are the width-only ones by default, as in ScaleFL's comparison. The server keeps the state of level l under
`level{l}/`, from the round on in which a client of that level first trained it; until then it is a piece of the
initial model.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.layout import Layout, State
from fleetfit.levels import split_levels
from fleetfit.method import Method, Weight
from fleetfit.submodel import Submodel, extract
from fleetfit.values import Federation, Server, Update


def decoupled(split: Literal["width", "both", "depth"] = "width") -> Method:
    """Make the method.

    Args:
        split: How the levels' models are cut out of the full one.
    """
    return Method(levels=partial(split_levels, mode=split, exits="last"), dispatch=own, merge=apart)


def own(federation: Federation, server: Server, client: int | None, piece: Submodel) -> State:
    """Send the level's own model, without its prefix."""
    prefix = _prefix(federation.level_index(piece))
    found = {name.removeprefix(prefix): t for name, t in server.state.items() if name.startswith(prefix)}
    return found or extract(federation.problem.layout, shared(server.state), piece)


def apart(federation: Federation, server: Server, updates: Iterator[Update], weight: Weight) -> Aggregate:
    """Average each level's updates among themselves; who sent back a part of its level counts for that part."""
    means: dict[int, Mean] = {}
    pieces: dict[int, Submodel] = {}
    for update in updates:
        mean = means.setdefault(update.level, Mean(_cut_layout(federation.problem.layout, update.dispatched)))
        pieces[update.level] = update.dispatched
        mean.add(_within(update.submodel, update.dispatched), update.state, weight(update))
    found = {level: mean.result() for level, mean in means.items()}
    mean_state = {_prefix(level) + name: t for level, a in found.items() for name, t in a.mean.items()}
    coverage = {_prefix(level) + name: t for level, a in found.items() for name, t in a.coverage.items()}
    before = {
        _prefix(level) + name: tensor
        for level, piece in pieces.items()
        for name, tensor in own(federation, server, None, piece).items()
    }
    return Aggregate(mean_state, coverage, before=before)


def shared(state: State) -> State:
    """Return the initial model, from which a level that nobody trained yet is cut."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("level")}


def _prefix(level: int) -> str:
    return f"level{level + 1}/"


def _within(part: Submodel, whole: Submodel) -> Submodel:
    """Return where the channels of a part stand among those of a sub-model that contains it."""
    if part.channels == whole.channels:
        return Submodel({}, part.exits)
    places = {axis: {channel: i for i, channel in enumerate(kept)} for axis, kept in whole.channels.items()}
    named = {a: tuple(places[a][c] for c in kept) if a in places else kept for a, kept in part.channels.items()}
    return Submodel(named, part.exits)


def _cut_layout(layout: Layout, piece: Submodel) -> Layout:
    """Return the layout in which a sub-model is the full model."""
    axes = {
        name: replace(axis, size=len(piece.channels.get(name, range(axis.size)))) for name, axis in layout.axes.items()
    }
    tensors = {name: t for name, t in layout.tensors.items() if t.present(piece.exits)}
    return Layout(axes, piece.exits, tensors)
