"""HeteroFL: width only, nested prefixes, full depth (Diao et al., ICLR 2021).

`scaler` divides the inputs of each norm layer by the kept fraction of its channels, in training only; `masked` sets
the logits of classes that the client does not have to zero in its cross-entropy. Static batch norm is
`evaluate.batch_norm`, the default headline of every method here. ScaleFL's comparison uses HeteroFL with both off,
which is the default; the original has both.

Differs from the paper: a width keeps floor(width * size) channels, not the ceiling; the scaler uses the fraction that
a layer really keeps, not the level's nominal one; levels are fixed per client and not redrawn each round;
label-masked averaging of the output rows goes with `masked`, as in the authors' text.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy import Axis, State, outputs
from fleetfit.core import Device, Job, Level, LocalResult, Problem
from fleetfit.errors import ConfigError
from fleetfit.hooks import Loss, Method, send_all, weigh_equally
from fleetfit.hooks.levels import split_levels
from fleetfit.hooks.losses import masked_cross_entropy
from fleetfit.planner import Targets
from fleetfit.submodel import Submodel, narrow_state


def heterofl(scaler: bool = False, masked: bool = False) -> Method:
    """Make the method.

    Args:
        scaler: Divide activations by the kept fraction before each norm layer, in training.
        masked: Cross-entropy and average of the output layer over the client's own classes only.
    """
    return Method(
        make_levels=make_masked_levels if masked else partial(split_levels, scaling="width"),
        make_loss=partial(width_loss, scaler=scaler, masked=masked),
        reply=send_own_classes if masked else send_all,
        weigh=weigh_equally,
    )


def make_masked_levels(problem: Problem, targets: Targets) -> list[Level]:
    """Return the width-only levels of a task with classes; another task has none to mask."""
    if problem.task.name != "classification":
        raise ConfigError(
            f"heterofl's masked = true needs a classification; the task here is {problem.task.name}.", key="masked"
        )
    if find_class_axis(problem.layout.axes) is None:
        raise ConfigError(
            "heterofl's masked = true averages the output rows of a client's own classes, so the model needs an axis "
            'of its classes that is not scaled: call it "classes", as in {"classes": Axis(10, scaled=False)}; the '
            f"axes here are {', '.join(problem.layout.axes)}.",
            key="masked",
        )
    return split_levels(problem, targets, scaling="width")


def find_class_axis(axes: Mapping[str, Axis]) -> str | None:
    """Return the axis of the classes: by its name, or the only one that is neither scaled nor of places."""
    whole = [name for name, axis in axes.items() if not axis.scaled and not axis.ordered]
    return "classes" if "classes" in whole else whole[0] if len(whole) == 1 else None


def find_classes(device: Device) -> Tensor:
    """Return the classes that a client's training data have, bool [C]."""
    present = torch.zeros(device.data.classes, dtype=torch.bool)
    present[device.data.y[device.data.split("train")].cpu()] = True
    return present


def width_loss(job: Job, device: Device, scaler: bool, masked: bool) -> Loss:
    """Return the loss of the one exit, with the options switched on."""
    task = device.problem.task
    criterion = masked_cross_entropy(find_classes(device), task) if masked else task.loss
    fractions = compute_kept_fractions(job, device) if scaler else {}

    def loss(module: nn.Module, x: Any, y: Tensor) -> Tensor:
        layers = {name: module.get_submodule(name) for name in fractions}
        with contextlib.ExitStack() as hooks:
            for name, layer in layers.items():
                if not isinstance(layer, nn.PReLU):
                    divide = partial(_divide_input, fraction=fractions[name])
                    hooks.enter_context(layer.register_forward_pre_hook(divide))
            return criterion(outputs(module, x)[-1], y)

    return loss


def compute_kept_fractions(job: Job, device: Device) -> dict[str, float]:
    """Return the kept fraction of the channels of each norm layer that the sub-model narrows, trained or frozen."""
    layout = device.problem.layout.complete
    own, full = layout.shapes(job.submodel.sizes, job.submodel.exits), layout.shapes({}, layout.exits)
    fractions = {}
    for name, shape in own.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(shape) == 1 and shape != full[name]:  # one weight per channel: a norm layer
            fractions[layer] = shape[0] / full[name][0]
    return fractions


def _divide_input(norm: nn.Module, inputs: tuple[Tensor, ...], fraction: float) -> tuple[Tensor, ...]:
    return (inputs[0] / fraction, *inputs[1:])


def send_own_classes(job: Job, device: Device, result: LocalResult) -> tuple[Submodel, State]:
    """Send back only the output rows of the client's classes: the others learned nothing but to be zero."""
    axes = device.problem.layout.axes
    classes = tuple(torch.nonzero(find_classes(device)).flatten().tolist())
    axis = find_class_axis(axes)
    if axis is None or axes[axis].size != device.data.classes or len(classes) == device.data.classes:
        return job.submodel, result.state
    rows = narrow_state(device.problem.layout, result.state, job.submodel.sizes, {axis: classes})
    return Submodel({**job.submodel.channels, axis: classes}, job.submodel.exits), rows
