"""The levels' models as they are evaluated, and the level of each client as far as the server knows it."""

import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from fleetfit.anatomy import State, batch_norms, build_module, named_tensors, settle_norms
from fleetfit.anatomy.meta import on_meta
from fleetfit.core import Failure, Federation, Server, Update
from fleetfit.errors import ModelError
from fleetfit.evaluation.scope import EvaluationScope
from fleetfit.training import set_statistics

Statistics = dict[int, State]
"""Batch-norm statistics by level index: `layer.mean` and `layer.var`."""


def has_batch_norm(federation: Federation) -> bool:
    """Return whether the model has batch-norm layers, and so a policy for their statistics."""
    problem = federation.problem
    with on_meta():
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    return bool(batch_norms(module))


def find_known_levels(federation: Federation, server: Server, scope: EvaluationScope) -> np.ndarray:
    """Return each client's own level as far as the server knows it, int [K]; -1 where it does not, or there is none.

    Simulated devices that report no budget choose their level themselves (see `OWN`). A real device would reveal its
    budget by that choice: for such a device the largest level that it has trained is taken.
    """
    if federation.method.needs_budgets:
        return federation.level_of
    levels = np.full(len(federation.clients), -1)
    if not scope.beyond:
        for client, level in server.trained.items():
            levels[client] = level
    return levels


def find_trained_levels(
    federation: Federation, server: Server, reports: Sequence[Update | Failure]
) -> Mapping[int, int]:
    """Return `Server.trained` after a round: the largest level that each client without a budget has trained."""
    if federation.method.needs_budgets:
        return server.trained
    trained = dict(server.trained)
    for report in reports:
        if isinstance(report, Update) and report.client is not None:
            with contextlib.suppress(ModelError):  # the sub-model is not a level's
                level = federation.level_index(report.submodel)
                trained[report.client] = max(level, trained.get(report.client, -1))
    return dict(sorted(trained.items()))


def find_top_level(federation: Federation) -> int:
    """Return the largest level that a client trains."""
    return max(0, int(federation.level_of.max()))


def get_level_state(federation: Federation, server: Server, level: int) -> State:
    """Return the state of a level's model."""
    return federation.method.dispatch(federation, server, None, federation.levels[level].submodel)


def build_level_module(federation: Federation, server: Server, level: int, statistics: Statistics | None) -> nn.Module:
    """Return a level's model as a plain module in eval mode, with its static statistics where it has batch norm.

    The module owns all its tensors: training it changes neither the server's state nor the statistics.
    """
    problem, submodel = federation.problem, federation.levels[level].submodel
    module = build_module(problem.architecture, {**problem.layout.full_sizes, **submodel.sizes}, submodel.exits)
    state = {**get_level_state(federation, server, level), **problem.get_base(submodel)}
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            if name in state:
                tensor.copy_(state[name])
    settle_norms(module, is_saved=True)
    if statistics and level in statistics:
        set_statistics(module, {name: tensor.clone() for name, tensor in statistics[level].items()})
    return module.eval()
