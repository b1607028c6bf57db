"""One forward pass of an instance, observed: its units, its modules' outputs and what they were made of."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _Orthogonal
from torch.nn.utils.parametrize import ParametrizationList

from fleetfit.anatomy.copies import copy_instance
from fleetfit.anatomy.guided import run_labeled
from fleetfit.anatomy.infer import check_real
from fleetfit.anatomy.kernels import plain_kernels
from fleetfit.anatomy.labels import LabeledPass, Labels, Reason, keep_along, list_tensors, vary
from fleetfit.anatomy.logits import get_logits
from fleetfit.anatomy.masks import InputMask
from fleetfit.anatomy.questions import find_answers
from fleetfit.anatomy.units import Units
from fleetfit.errors import ModelError, format_cause, join_some
from fleetfit.layout import Segments
from fleetfit.seeds import isolate_rng

_CHANNELS = {2: 1, 3: 2, 4: 1, 5: 1}
"""The usual dimension of channels, by the number of dimensions."""


@dataclass
class Output:
    """What a module gave at its first call.

    Attributes:
        step: The number of operations until then.
        channels: The dimensions that may be those of channels, each with the labels along it, if there are any.
        made_of: The marks of what its input was made of.
        mark: The mark of its output.
        tensor: The output.
        calls: How often it ran.
    """

    step: int
    channels: Sequence[tuple[int, Labels | None]]
    made_of: int
    mark: int
    tensor: Tensor
    calls: int = 1


@dataclass(frozen=True)
class Observation:
    """What one forward pass says of an instance.

    Attributes:
        net: The instance.
        example: The samples.
        logits: What it computed, [batch, classes] or [batch, places, classes].
        early: The modules whose outputs are the logits of its own early exits, if it returns a list of logits.
        units: Units, axes and segments.
        outputs: The outputs of its modules, in the order in which they ended.
        inputs: The labels along each dimension of the inputs of its modules.
        vocabulary: Tokens that it knows; 0 for real numbers.
        mask: Its mask for padding.
        answers: What forward reads from the samples for messages and checks.
        unused: Parameters of modules that ran which the samples do not use, such as the token of a mask.
    """

    net: nn.Module
    example: Tensor
    logits: Tensor
    early: tuple[str, ...]
    units: Units
    outputs: Mapping[str, Output]
    inputs: Mapping[str, list[Labels]]
    vocabulary: int
    mask: InputMask | None = None
    answers: tuple[bool, ...] = ()
    unused: frozenset[str] = frozenset()

    @property
    def first_use(self) -> Mapping[str, int]:
        """By tensor the number of the first operation that used it."""
        return self.units.labeled.first_use

    def find_channels(self, module: str) -> tuple[int, Segments | None]:
        """Return the dimension of channels of a module's output, with an axis if there is one, and its segments."""
        if module not in self.outputs:
            return 0, None
        output, parse = self.outputs[module], self.units.parse
        parsed = [(d, None if labels is None else parse(labels)) for d, labels in output.channels]
        usual = _CHANNELS.get(output.tensor.dim(), 1)  # places may have labels, too
        return max(parsed, key=lambda one: (has_axis(one[1]), one[0] == usual))


def check_types(net: nn.Module) -> None:
    """Refuse parameters that are complex, or of another precision than float32.

    Raises:
        ModelError: There is one.
    """
    check_real(net)
    for name, parameter in net.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ModelError(
                f'the parameter "{name}" is {parameter.dtype}, and FleetFit trains float32. Call model.float() before '
                "you pass it.",
                key="model",
            )


def observe(net: nn.Module, example: Tensor, mask: InputMask | None = None) -> Observation:
    """Run an instance once in evaluation mode, and find its units.

    Args:
        net: The instance; it is left as it is.
        example: Samples [batch, ...], as its forward takes them.
        mask: Its mask for padding.

    Raises:
        ModelError: It cannot be run, a branch depends on the samples, or parameters are not used.
    """
    _check_instance(net)
    first = _ObservedPass(net, example, mask, None)
    if first.labeled.flattened:  # of places that were flattened together, those can be cut that have more parameters
        first = _ObservedPass(net, example, mask, _choose_by_parameters(net, first.labeled))
    labeled, out = first.labeled, first.out
    logits = get_logits(out)
    branches = [*labeled.branches, *labeled.questions]
    answers = None if labeled.branches else find_answers(net, example, mask) if branches else ()
    if answers is None:
        raise ModelError(
            f"{branches[0]} reads a number that depends on the samples, so other samples may take a path that this "
            "pass did not see. Keep it a tensor, without .item(), in messages too; compute both paths and choose with "
            "torch.where; or take the choice out of forward.",
            key="model",
        )
    unused = [name for name, p in net.named_parameters() if p.requires_grad and name not in labeled.first_use]
    if asleep := [name for name in unused if name.rpartition(".")[0] not in first.outputs]:
        raise ModelError(
            f"the samples did not use {join_some(asleep, 4)}: nothing is known of these parameters. "
            "Remove them from the module, use them in forward, or set requires_grad = False for them.",
            key="model",
        )
    every = out if isinstance(out, list) else [logits]
    along_logits = _find_classes(labeled, every)
    _tie_attention(net, labeled)
    _fix_orthogonal(net, labeled)
    early = [next((name for name, output in first.outputs.items() if output.tensor is one), "") for one in every[:-1]]
    parameters = frozenset(name for name, _ in net.named_parameters(remove_duplicate=False))
    units = Units(labeled, parameters, along_logits)
    labeled.release()
    return Observation(
        net,
        example,
        logits,
        tuple(early) if all(early) else (),
        units,
        first.outputs,
        first.inputs,
        labeled.vocabulary,
        mask,
        answers,
        frozenset(unused),
    )


def _find_classes(labeled: LabeledPass, logits: list[Tensor]) -> Labels | None:
    """Return the labels along the last dimension of logits, which are the same at all exits; fix all others."""
    classes: Labels | None = None
    for exit_logits in logits:
        for labels in labeled.labels(exit_logits):
            if vary(labels) != {exit_logits.dim() - 1}:
                labeled.fix(labels, Reason("it is a dimension of the logits"))
            elif classes is None:
                classes = labels.reshape(-1)
            else:
                labeled.unite(classes, labels.reshape(-1))
    return classes


class _ObservedPass:
    """A labeled pass of a copy: what a forward keeps, such as a table, must not stay in the instance."""

    def __init__(self, net: nn.Module, example: Tensor, mask: InputMask | None, choices: list[int] | None) -> None:
        copied = copy_instance(net)
        self.labeled = LabeledPass(copied, example, choices)
        self.outputs: dict[str, Output] = {}
        self.inputs: dict[str, list[Labels]] = {}
        self._made_of: dict[str, int] = {}
        for name, part in copied.named_modules():
            part.register_forward_pre_hook(functools.partial(self._enter, name))
            part.register_forward_hook(functools.partial(self._leave, name), always_call=True)
        arguments = {} if mask is None else mask.make_arguments(example)  # outside: a path may depend on them
        with isolate_rng(torch.device("cpu")), plain_kernels():
            try:
                self.out = run_labeled(copied, example, self.labeled, **arguments)
            except ModelError:
                raise
            except Exception as error:  # it runs, or `fit_instance` would have refused it
                cause = format_cause(error, typed=True).rstrip(".")
                raise ModelError(
                    f"{type(net).__name__} cannot be followed: {self.labeled.make_reason()} fails with {cause}. "
                    "Change this line, or write an Architecture.",
                    key="model",
                ) from error

    def _enter(self, name: str, part: nn.Module, args: Any) -> None:
        x = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
        if x is not None and name not in self.inputs:
            self.inputs[name] = list(self.labeled.labels(x))
            self._made_of[name] = self.labeled.sources(x)

    def _leave(self, name: str, part: nn.Module, args: Any, out: Any) -> None:
        x = get_first(out)
        if name in self.outputs:
            self.outputs[name].calls += 1
        elif x is not None and x.is_floating_point():
            channels, mark = _find_channels(self.labeled, x), self.labeled.mark(x)
            self.outputs[name] = Output(self.labeled.step, channels, self._made_of.get(name, 0), mark, x)


def _choose_by_parameters(net: nn.Module, labeled: LabeledPass) -> list[int]:
    """Return which of the labels that were flattened together have more parameters, each time."""
    units, fixed = labeled.find_units()
    weights = np.zeros(int(units.max()) + 1)
    tensors = dict(list_tensors(net))
    for (name, d), labels in labeled.ranges.items():
        np.add.at(weights, units[labels.start : labels.stop], tensors[name].numel() / tensors[name].shape[d])
    for unit in fixed:
        weights[unit] = 0
    return [
        int(np.argmax([weights[np.unique(units[labels])].sum() for labels in along])) for along in labeled.flattened
    ]


def _check_instance(net: nn.Module) -> None:
    """Refuse modules in which no operation is seen, or without sizes."""
    for name, part in net.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            label = f'"{name}"' if name else f"the {type(net).__name__}"
            raise ModelError(
                f"{label} is a scripted module (torch.jit), whose operations cannot be followed. Use the module that "
                "was scripted instead, and script the exported level.",
                key="model",
            )
    if not any(p.requires_grad for p in net.parameters()):
        raise ModelError(f"{type(net).__name__} has no parameter that is trained.", key="model")


def get_first(out: Any) -> Tensor | None:
    """Return the first tensor of what a module gave: hidden states come first in records and tuples."""
    if isinstance(out, Mapping):
        out = tuple(out.values())
    while isinstance(out, tuple | list) and out:
        out = out[0]
    return out if isinstance(out, Tensor) else None


def _find_channels(labeled: LabeledPass, x: Tensor) -> Sequence[tuple[int, Labels | None]]:
    """Return the dimensions of a tensor that may be those of channels, each with the labels along it."""
    labels = [one for one in labeled.labels(x) if vary(one) and 0 not in vary(one)]
    if not labels:
        return [(_CHANNELS.get(x.dim(), 1), None)]
    along = [(d, one.reshape(-1)) for one in labels if len(vary(one)) == 1 for d in vary(one)]
    d = min(vary(labels[0]))  # rows that became channels and places
    return along or [(d, keep_along(labels[0], d))]


def _tie_attention(net: nn.Module, labeled: LabeledPass) -> None:
    """PyTorch's attention has as many channels inside as outside."""
    for name, part in net.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            rows, columns = (labeled.ranges.get((f"{name}.out_proj.weight", d)) for d in (0, 1))
            if rows is not None and columns is not None:
                labeled.unite(torch.tensor(rows), torch.tensor(columns))


def _fix_orthogonal(net: nn.Module, labeled: LabeledPass) -> None:
    """Keep orthogonal weights whole: a part of one is not orthogonal."""
    for name, part in net.named_modules():
        if isinstance(part, ParametrizationList) and any(isinstance(one, _Orthogonal) for one in part):
            reason = Reason("a part of an orthogonal weight is not orthogonal", name.partition(".parametrizations")[0])
            for (tensor, _), labels in labeled.ranges.items():
                if tensor.startswith(f"{name}."):
                    labeled.reasons.insert(0, (np.array(labels), reason))  # before those of its operations


def has_axis(segments: Segments | None) -> bool:
    """Return whether a dimension is cut."""
    return any(segment.axis is not None for segment in segments or ())


def list_aliases(net: nn.Module) -> dict[str, str]:
    """Return the second names of tensors, with the first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in list_tensors(net)}
    return {name: other for name, other in names.items() if other != name}
