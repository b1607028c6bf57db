"""An instance for some data: a new classifier, new weights, and numbers that must agree."""

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy.copies import copy_instance
from fleetfit.anatomy.logits import check_outputs, get_logits
from fleetfit.anatomy.masks import InputMask, call_instance
from fleetfit.anatomy.observe import check_types, observe
from fleetfit.anatomy.units import CLASSES
from fleetfit.errors import ModelError, format_cause
from fleetfit.seeds import isolate_rng, make_torch_rng

_SAMPLES = 2
_VIEWS = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute")


@dataclass(frozen=True)
class SampleFacts:
    """What a module must fit.

    Attributes:
        shape: The shape of one sample.
        vocabulary: Tokens; 0 for real numbers.
        classes: Logits per sample, or per place.
        task: Of the data; of "next_token" there are logits at each place.
        padding: The token that fills short texts; -1: none.
        mask: The mask of the module for padding.
        samples: At least two samples [N, ...], such as training samples; None: noise is drawn.
    """

    shape: Sequence[int]
    vocabulary: int
    classes: int
    task: str = "classification"
    padding: int = -1
    mask: InputMask | None = None
    samples: Tensor | None = field(default=None, compare=False)

    def make_example(self) -> Tensor:
        """Return two samples, the same in every process: of the training data, or noise without any."""
        example = self._draw() if self.samples is None else self.samples[:_SAMPLES].clone()
        is_masked = self.mask is not None and self.mask.argument and self.vocabulary
        if is_masked and not bool((example == self.padding).any()):  # a module may take another path without padding
            example[-1, -(example.shape[1] // 3) :] = self.padding
        return example

    def add_noise(self, net: nn.Module) -> "SampleFacts":
        """Return these facts with noise beside the samples, if the module takes it: data may be all alike."""
        if self.samples is None:
            return self
        rows = [each for pair in zip(self.samples, self._draw().to(self.samples.dtype), strict=False) for each in pair]
        both = replace(self, samples=torch.stack(rows))
        try:
            is_taken = not bool(_run(net, torch.stack(rows), self.mask).isnan().any())
        except ModelError:
            return self
        return both if is_taken else self

    def _draw(self) -> Tensor:
        rng, shape = make_torch_rng("derive"), (_SAMPLES, *self.shape)
        if self.vocabulary:
            return torch.randint(self.vocabulary, shape, generator=rng)
        return torch.randn(shape, generator=rng)


def find_facts(net: nn.Module, shape: Sequence[int], classes: int | None = None) -> SampleFacts:
    """Return what a module computes for samples of a shape: tokens where it looks them up first.

    Args:
        net: The module.
        shape: The shape of one sample.
        classes: The number of classes; its own by default.

    Raises:
        ModelError: It does not accept samples of this shape.
    """
    tables = [part.num_embeddings for part in net.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    for vocabulary in (*tables[:1], 0):
        facts = SampleFacts(shape, vocabulary, 0)
        try:
            logits = _run(prepare_instance(net, facts.make_example()), facts.make_example())
        except ModelError:
            if not vocabulary:
                raise
        else:
            break
    return SampleFacts(
        shape, vocabulary, classes or logits.shape[-1], "next_token" if logits.dim() == 3 else "classification"
    )


def prepare_instance(net: nn.Module, example: Tensor, seed: int = 0) -> nn.Module:
    """Return a module whose lazy layers have sizes, as a batch gives them; for a compiled module the one inside.

    Args:
        net: The module, whose lazy layers are made.
        example: Samples [batch, ...].
        seed: Of the weights that lazy layers draw.

    Raises:
        ModelError: It does not accept the samples, or a part of it is compiled.
    """
    net = getattr(net, "_orig_mod", net)
    for name, part in net.named_modules():
        if hasattr(part, "_orig_mod"):
            raise ModelError(
                f'"{name}" is compiled, and its operations cannot be followed. Pass the module without torch.compile; '
                "FleetFit compiles levels where it pays.",
                key="model",
            )
    if any(nn.parameter.is_lazy(x) for x in (*net.parameters(), *net.buffers())):
        modes = [(part, part.training) for part in net.modules()]
        with isolate_rng(torch.device("cpu"), seed), torch.no_grad():
            _call(net.eval(), example)
        for part, mode in modes:
            part.training = mode
    return net


def fit_instance(net: nn.Module, facts: SampleFacts, head: str, weights: str, seed: int) -> nn.Module:
    """Return an instance that fits the data: the given one, or a copy where something is new.

    Args:
        net: The instance.
        facts: The data's shape, vocabulary and classes.
        head: "new" for a new classifier, "keep" for its own.
        weights: "new" for weights drawn anew, "instance" for its own.
        seed: Of what is drawn.

    Raises:
        ModelError: It does not accept the samples, or has other logits than the data have classes.
    """
    example = facts.make_example()
    if "new" in (head, weights):
        net = copy_instance(net)
    with isolate_rng(torch.device("cpu"), seed):
        if weights == "new":
            _redraw(net)
        logits = _run(net, example, facts.mask)
        if head == "new":
            _replace_classifier(net, example, facts.classes, facts.mask)
            logits = _run(net, example, facts.mask)
        _check_training(net, example, facts.mask, logits)
    if bool(logits.isnan().any()):
        what = "noise, since there are no data here" if facts.samples is None else "samples of the training data"
        raise ModelError(
            f"{type(net).__name__} gives logits that are no numbers (NaN) for {what}. A logarithm or a root may get "
            "negative numbers: numbers in memory are standardized unless [data] has standardize = false.",
            key="model.name",
        )
    expected = (_SAMPLES, *([facts.shape[0]] if facts.task == "next_token" else []), facts.classes)
    if tuple(logits.shape) != expected:
        classes = logits.shape[-1]
        if logits.dim() == len(expected) and tuple(logits.shape[:-1]) == expected[:-1]:
            raise ModelError(
                f"{type(net).__name__} has {classes} logits, and the data have {facts.classes} classes. Make a module "
                f'with {facts.classes}, or set head = "new" in [model] derive for a new classifier.',
                key="model.derive.head",
            )
        raise ModelError(
            f"{type(net).__name__} gives outputs of shape {tuple(logits.shape)} for {_SAMPLES} samples of shape "
            f"{tuple(facts.shape)}; the task needs {expected}. Let forward return such logits.",
            key="model.name",
        )
    is_share = facts.classes > 1 and bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-3).all())
    if is_share and facts.task in ("classification", "next_token"):
        raise ModelError(
            f"{type(net).__name__} returns probabilities: its outputs for a sample are at least 0 and sum to 1. The "
            "loss takes logits. Leave out the softmax in forward; predictions have probabilities anyway.",
            key="model.name",
        )
    if facts.task != "regression" and _is_of_sigmoid(logits):
        raise ModelError(
            f"{type(net).__name__} ends in a sigmoid, and the loss takes logits. Leave it out in forward; predictions "
            "have probabilities anyway.",
            key="model.name",
        )
    return net


def _check_training(net: nn.Module, example: Tensor, mask: InputMask | None, logits: Tensor) -> None:
    """Refuse a module whose outputs are others while it trains; one that fails then fails in its jobs."""
    try:
        with torch.no_grad():
            out = call_instance(copy_instance(net).train(), example, mask)
    except Exception:
        return
    check_outputs(out)
    if get_logits(out).shape != logits.shape:
        raise ModelError(
            f"{type(net).__name__} gives outputs of shape {tuple(get_logits(out).shape)} while it trains and "
            f"{tuple(logits.shape)} afterwards. Let forward return the same logits in both modes.",
            key="model.name",
        )


def _is_of_sigmoid(logits: Tensor) -> bool:
    node: Any = logits.grad_fn
    while node is not None and node.name().startswith(_VIEWS):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "SigmoidBackward0"


def _run(net: nn.Module, example: Tensor, mask: InputMask | None = None) -> Tensor:
    """Return the logits of a copy, so that the module stays as it is."""
    check_types(net)
    with torch.enable_grad():  # its nodes say what the logits come from
        return _call(copy_instance(net).eval(), example, mask)


def _call(net: nn.Module, example: Tensor, mask: InputMask | None = None) -> Tensor:
    try:
        out = call_instance(net, example, mask)
        check_outputs(out)
        return get_logits(out)
    except ModelError:
        raise
    except Exception as error:
        known = next((part for part in net.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)), None)
        hint = ""
        if isinstance(error, TypeError) and "positional argument" in str(error):
            hint = " A model has one input: join several in one tensor, and take them apart in forward."
        elif known is not None and not example.is_floating_point() and int(example.max()) >= known.num_embeddings:
            hint = f" Its table has {known.num_embeddings} rows, and the data have tokens up to {int(example.max())}."
        elif known is not None and example.is_floating_point():
            hint = (
                ' It takes tokens, and these data are numbers. Set [data] vocabulary, as in data={"name": (x, y), '
                f'"vocabulary": {known.num_embeddings}}}.'
            )
        elif example.dim() == 3 and any(isinstance(part, nn.Conv2d) for part in net.modules()):
            hint = " Its images have channels: add their axis to the data, such as x[:, None]."
        elif example.dim() == 2 and example.is_floating_point():
            n = example.shape[1]
            hint = f" A sample has {n} features: let the first layer take {n}, or any number with nn.LazyLinear."
        raise ModelError(
            f"{type(net).__name__} does not accept samples of shape {tuple(example.shape[1:])} ({example.dtype}): "
            f"{format_cause(error)}.{hint} Give it samples of its own shape (`--input-shape` of plan and "
            "check-model), or change the module.",
            key="model.name",
        ) from error


def _replace_classifier(net: nn.Module, example: Tensor, classes: int, mask: InputMask | None) -> None:
    """Replace the linear layer that gives the logits."""
    units = observe(net, example, mask).units
    owners = {name.rpartition(".")[0] for name, _ in units.homes.get(CLASSES, ())}
    owner = owners.pop() if len(owners) == 1 else ""
    part = net.get_submodule(owner) if owner else None
    if not isinstance(part, nn.Linear):
        raise ModelError(
            f"the logits of {type(net).__name__} do not come from a single nn.Linear, so there is no "
            "classifier to replace. Replace it before you pass the module, and leave head out.",
            key="model.derive.head",
        )
    replace_linear(net, owner, classes)


def replace_linear(net: nn.Module, name: str, outputs: int) -> None:
    """Replace a linear layer by a new one with other outputs, under all its names; leave a module without it."""
    old = dict(net.named_modules(remove_duplicate=False)).get(name)
    if not isinstance(old, nn.Linear):
        return
    new = nn.Linear(old.in_features, outputs, old.bias is not None, old.weight.device, old.weight.dtype)
    for path, part in list(net.named_modules(remove_duplicate=False)):
        if part is old:
            parent, _, leaf = path.rpartition(".")
            setattr(net.get_submodule(parent), leaf, new)


def find_replaced_linear(net: nn.Module, fitted: nn.Module) -> str:
    """Return the name of the linear layer whose outputs are others than before, or ""."""
    before = {name: part.out_features for name, part in net.named_modules() if isinstance(part, nn.Linear)}
    after = ((name, part.out_features) for name, part in fitted.named_modules() if isinstance(part, nn.Linear))
    return next((name for name, outputs in after if outputs != before.get(name, outputs)), "")


def _redraw(net: nn.Module) -> None:
    """Draw all weights anew, by each module's own rule, and then by that of the whole model."""
    rule = getattr(net, "_init_weights", None)  # of transformers' models; others may cover some kinds of parts alone
    is_of_parts, without = False, []
    with contextlib.suppress(TypeError, ValueError):
        is_of_parts = callable(rule) and inspect.signature(rule).bind(net) is not None
    for name, part in net.named_modules():
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if callable(reset):
            reset()
        elif not callable(rule) and any(True for _ in part.parameters(recurse=False)):
            without.append(name or type(net).__name__)
        if callable(rule) and is_of_parts:
            rule(part)
    if callable(rule) and not is_of_parts:
        rule()
    if without:
        raise ModelError(
            f'weights = "new": {", ".join(without[:3])} has parameters and no reset_parameters(). Write one, or name a '
            "class or function in [model] name, which draws them for each run.",
            key="model.derive.weights",
        )
