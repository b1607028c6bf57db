"""Tensors that belong to one level: each level sends, trains and averages its own; all others are shared.

The server keeps those of level l under `level{l}/`, from the round on in which a client of the level first trained it;
until then they are parts of the initial model.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, cast

from fleetfit.aggregate import Aggregate, Mean
from fleetfit.core import Federation, Problem, Server, Update
from fleetfit.layout import State
from fleetfit.submodel import Submodel, extract, find_positions, narrow_layout

_PREFIX = re.compile(r"level(\d+)/")
Select = Callable[[str], bool]
"""From the name of a tensor to whether each level has its own."""
Selection = Select | Literal["norms"]


def keep_per_level(select: Selection) -> dict[str, Any]:
    """Return the hooks of a method in which each level has some tensors of its own.

    Args:
        select: From the name of a tensor to whether each level has its own; "norms": the tensors of norm layers
            (`Problem.norms`).
    """
    return {"dispatch": partial(dispatch_own, select=select), "make_aggregator": partial(TensorMeans, select=select)}


def select_all(name: str) -> bool:
    """Give each level a model of its own."""
    return True


def has_level_tensors(federation: Federation) -> bool:
    """Return whether its method is one of `keep_per_level`."""
    dispatch = federation.method.dispatch
    return isinstance(dispatch, partial) and dispatch.func is dispatch_own


def get_select(federation: Federation) -> Select:
    """Return which tensors each level has for itself, of a method of `keep_per_level`; of another one, all."""
    if has_level_tensors(federation):
        dispatch = cast(partial[State], federation.method.dispatch)
        return _resolve(dispatch.keywords["select"], federation.problem)
    return select_all


def get_shared_state(state: State) -> State:
    """Return the tensors of a server's state that are not a level's own: the shared ones, and the initial model's."""
    return {name: tensor for name, tensor in state.items() if not _PREFIX.match(name)}


def get_largest_state(state: State) -> State:
    """Return the model of the largest level that has own tensors in a server's state; without any, the state."""
    levels = {int(match[1]) for name in state if (match := _PREFIX.match(name))}
    if not levels:
        return state
    prefix, owned = _make_prefix(max(levels) - 1), {_PREFIX.sub("", name) for name in state if _PREFIX.match(name)}
    shared = {name: tensor for name, tensor in get_shared_state(state).items() if name not in owned}
    return shared | {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}


def dispatch_own(
    federation: Federation, server: Server, client: int | None, submodel: Submodel, select: Selection
) -> State:
    """Send the sub-model with its level's own tensors, without their prefix."""
    prefix, select = _make_prefix(federation.level_index(submodel)), _resolve(select, federation.problem)
    state = extract(federation.problem.layout, get_shared_state(server.state), submodel)
    return {name: server.state.get(prefix + name, tensor) if select(name) else tensor for name, tensor in state.items()}


class TensorMeans:
    """The mean of shared tensors, and of each level's own; an update of a part of its level counts for that part."""

    def __init__(self, federation: Federation, server: Server, select: Selection) -> None:
        self._federation, self._server, self._select = federation, server, _resolve(select, federation.problem)
        self._layout = federation.problem.layout
        self._shared = [name for name in self._layout.tensors if not self._select(name)]
        self._mean = Mean(self._layout)
        self._means: dict[int, Mean] = {}
        self._submodels: dict[int, Submodel] = {}

    def add(self, update: Update, weight: float) -> None:
        """Add an update to the mean of all, and to that of its level."""
        if update.level not in self._means:
            self._means[update.level] = Mean(narrow_layout(self._layout, update.dispatched))
        self._submodels[update.level] = update.dispatched
        shared = tuple(name for name in update.state if name in self._shared)
        part, untrained = find_positions(update.submodel, update.dispatched), update.untrained
        self._means[update.level].add(part, update.state, weight, tuple(dict.fromkeys((*untrained, *shared))))
        if self._shared:
            own = (name for name in update.state if name not in self._shared)
            self._mean.add(update.submodel, update.state, weight, tuple(dict.fromkeys((*untrained, *own))))

    def result(self) -> Aggregate:
        """Return all means, a level's own tensors under its prefix."""
        means: list[tuple[str, Iterable[str], Aggregate, State]] = []
        if self._shared and self._means:
            means.append(("", self._shared, self._mean.result(), self._server.state))
        for level, level_mean in self._means.items():
            before = dispatch_own(self._federation, self._server, None, self._submodels[level], self._select)
            own = [name for name in before if self._select(name)]
            means.append((_make_prefix(level), own, level_mean.result(), before))
        return Aggregate(
            {prefix + name: result.mean[name] for prefix, names, result, _ in means for name in names},
            {prefix + name: result.coverage[name] for prefix, names, result, _ in means for name in names},
            base_state={prefix + name: before[name] for prefix, names, _, before in means for name in names},
        )


def _resolve(select: Selection, problem: Problem) -> Select:
    return problem.norms.__contains__ if select == "norms" else select


def _make_prefix(level: int) -> str:
    return f"level{level + 1}/"
