"""Build the problem from `[model]` and `[peft]`: the architecture that the method and the data need."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit import names
from fleetfit.anatomy import Architecture, unwrap, validate_architecture
from fleetfit.anatomy.derive import (
    DerivedArchitecture,
    DerivedPlan,
    InputMask,
    SampleFacts,
    copy_instance,
    derive_architecture,
    find_facts,
    find_replaced_linear,
    fit_instance,
    list_masks,
    prepare_instance,
    restore_architecture,
)
from fleetfit.config.components import build_component, find_function, is_factory
from fleetfit.config.parse import parse_section
from fleetfit.config.schema import DeriveSection, Experiment
from fleetfit.core import DataDescription, Level, Problem, apply_peft
from fleetfit.core.tasks import get_task
from fleetfit.data import Data, choose_samples
from fleetfit.errors import ConfigError, ModelError, format_cause
from fleetfit.factories import list_parameters
from fleetfit.hooks import is_portable
from fleetfit.seeds import isolate_rng

_REQUIRED = inspect.Parameter.empty


def build_problem(
    experiment: Experiment, data: Data | DataDescription, say: Callable[[str], None] | None = None
) -> Problem:
    """Return the problem with the full model's last exit only; the method's levels determine the exits.

    Args:
        experiment: The run.
        data: Its data.
        say: Called with a sentence from time to time, where levels are derived for long.
    """
    section = experiment.model
    shape = data.sample_shape
    spec: dict[str, Any] | None = None
    if is_factory(section.name) and (inspect.isclass(section.name) or not hasattr(section.name, "build")):
        _check_sample_shape(section.name, data)
        context = _list_facts(section.name, data)
        with isolate_rng(torch.device("cpu"), experiment.seed):  # what the constructor of a module draws
            architecture = build_component("models", section.name, "[model]", section.settings, **context)
        model = {"name": section.name, **section.settings}
        spec = {"model": model, "given": {**context, "input_shape": list(shape)}, "task": data.task, "exits": []}
    else:
        architecture = section.name
    label = str(section.name) if spec else type(architecture).__name__
    peft = {"name": experiment.peft.name, **experiment.peft.settings}
    if isinstance(architecture, nn.Module):
        samples = choose_samples(data) if isinstance(data, Data) else None  # the server of a fleet has a description
        facts = SampleFacts(shape, data.vocabulary, data.classes, data.task, data.padding, samples=samples)
        plan, net = experiment.recorded.derived, architecture
        architecture = derive_model(architecture, facts, section.derive or DeriveSection(), experiment.seed, say, plan)
        if plan is None:  # a plan says which norms keep their statistics
            architecture = architecture.keep_norms(apply_peft(architecture, peft))
        head = find_replaced_linear(net, architecture.net)
        spec = None if spec is None else {**spec, "derived": {**architecture.plan.to_payload(), "whole": []}}
        spec = {**spec, "head": head} if spec and head else spec
    elif isinstance(architecture, DerivedArchitecture) and section.derive is None:
        architecture = architecture.keep_norms(apply_peft(architecture, peft))
    elif section.derive is not None:
        raise ConfigError(
            f"[model] derive is for PyTorch modules; {label} is an Architecture, which has axes and exits already. "
            "Leave it out.",
            key="model.derive",
        )
    check_architecture(architecture, label)
    architecture = apply_peft(architecture, peft)
    spec = None if spec is None else {**spec, "peft": peft}
    return Problem(
        architecture,
        shape,
        get_task(data.task),
        (architecture.blocks,),
        init_from=experiment.init_from,
        spec=spec if is_portable(spec) else None,
    )


def _list_facts(name: Any, data: Data | DataDescription) -> dict[str, Any]:
    """Return what the data give to a model's parameters of these names.

    Data without tokens leave the defaults of a constructor of one's own: `padding` may be that of its convolutions.
    """
    facts = {"classes": data.classes, "channels": data.channels, "input_shape": data.sample_shape}
    tokens = {"vocabulary": data.vocabulary, "padding": data.padding}
    if not data.vocabulary and (not isinstance(name, str) or ":" in name):
        parameters = list_parameters(find_function("models", name)[0])
        tokens = {key: x for key, x in tokens.items() if key in parameters and parameters[key].default is _REQUIRED}
    return facts | tokens


def _describe_facts(problem: Problem) -> list[str]:
    """Name channels that the data gave to a constructor of one's own in place of its default."""
    if problem.spec is None or "channels" not in problem.spec["given"]:
        return []
    name, channels = problem.spec["model"]["name"], problem.spec["given"]["channels"]
    parameter = list_parameters(find_function("models", name)[0]).get("channels")
    if parameter is None or parameter.default in (_REQUIRED, None, channels):
        return []
    return [
        f"{name} gets channels = {channels} from the data, in place of its default {parameter.default}; a parameter "
        "that means other channels needs another name."
    ]


def derive_model(
    net: nn.Module,
    facts: SampleFacts,
    section: DeriveSection,
    seed: int,
    say: Callable[[str], None] | None = None,
    plan: str | None = None,
) -> DerivedArchitecture:
    """Derive the levels of a module for some data, or take them from a plan.

    Args:
        net: The module; it is left as it is.
        facts: The data's shape, vocabulary and classes.
        section: `[model] derive`.
        seed: Of what is drawn.
        say: Called with a sentence from time to time, where it takes long.
        plan: The file of an earlier run, `derived.json`; None to derive.

    Raises:
        ModelError: It does not fit the data, or cannot be derived.
        ConfigError: The plan cannot be read.
    """
    net = prepare_instance(net, facts.make_example(), seed)
    texts, facts = facts.samples, facts.add_noise(net)
    if plan is None:
        return _derive_for_padding(net, facts, texts, section, seed, say)
    try:
        payload = json.loads(Path(plan).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"[recorded] derived: {plan} cannot be read: {format_cause(error)}.", key="recorded.derived", path=plan
        ) from None
    facts = replace(facts, mask=DerivedPlan.from_payload(payload).mask)
    is_own = (section.head, section.weights) == ("keep", "instance")
    if is_own and facts.samples is None:  # noise may not be such as the module takes
        return restore_architecture(copy_instance(net), payload)
    fitted = fit_instance(net, facts, section.head, section.weights, seed)
    architecture = restore_architecture(copy_instance(fitted), payload)
    architecture.samples = facts.samples
    return architecture


def _derive_for_padding(
    net: nn.Module,
    facts: SampleFacts,
    texts: Tensor | None,
    section: DeriveSection,
    seed: int,
    say: Callable[[str], None] | None,
) -> DerivedArchitecture:
    """Derive the levels of a module that gets a mask for padding if it takes one that can be followed."""
    masks: list[tuple[InputMask | None, float]] = [(None, 0.0)]
    if facts.vocabulary and len(facts.shape) == 1:
        masks = list_masks(net, facts.shape[0], facts.vocabulary, facts.padding, texts)
    errors: list[ModelError] = []
    for mask, change in masks:
        own = replace(facts, mask=mask)
        try:
            fitted = fit_instance(net, own, section.head, section.weights, seed)
            derived = derive_architecture(
                fitted,
                own.make_example(),
                section.exits,
                section.axes,
                section.heads,
                say,
                mask,
                own.samples,
            )
        except ModelError as error:  # packed sequences, for one, depend on the lengths
            errors.append(error)
        else:
            derived.padding_change = change
            return derived
    raise errors[0]


def find_derived(architecture: Architecture) -> DerivedArchitecture | None:
    """Return the derived architecture that an architecture is, or has inside; None for others."""
    inner = unwrap(architecture)
    return inner if isinstance(inner, DerivedArchitecture) else None


def describe_derivation(problem: Problem, levels: Sequence[Level], split: str | None) -> list[str]:
    """Return what was derived from a module, for the first lines of a run.

    Args:
        problem: The problem.
        levels: Its levels.
        split: How the planner was to split them; None: they are not the planner's.
    """
    derived = find_derived(problem.architecture)
    if derived is None:
        return []
    sentences = [*_describe_facts(problem), *derived.describe()]
    is_cut_in_width = len(levels) > 1 and all(x.submodel.depth == derived.blocks for x in levels)
    is_said = split == "auto" and derived.blocks == 1  # that it has one exit
    if split not in (None, "width") and is_cut_in_width and not is_said:
        sentences.append(
            f'The levels differ in width alone: no exits of this model fit the budgets, as the split "{split}" wants.'
        )
    return sentences


def _check_sample_shape(name: Any, data: Data | DataDescription) -> None:
    """Refuse a built-in image model for samples that are not images, before it is built."""
    if not isinstance(name, str) or ":" in name or data.vocabulary:
        return
    parameters = list_parameters(names.resolve("models", name))
    takes_images = "channels" in parameters or (name not in ("mlp", "mlp_2nn") and "input_shape" in parameters)
    if takes_images and len(data.sample_shape) != 3:
        raise ConfigError(
            f"[model] {name} takes images [channels, height, width], but a sample of {data.name} is "
            f'{list(data.sample_shape)}. For rows of numbers, set name = "mlp".',
            key="model.name",
        )


def build_architecture(
    name: Any, settings: Mapping[str, Any], say: Callable[[str], None] | None = None, **context: Any
) -> Architecture:
    """Return the architecture of a name, for `plan` and `check-model`.

    Args:
        name: The model's.
        settings: Keys of `[model]`.
        say: Called with a sentence from time to time, where levels are derived for long.
        **context: What a factory may take: classes, channels, input_shape and others. A module's own number of classes
            wins, where its constructor does not take `classes`.
    """
    settings = dict(settings)
    derive = settings.pop("derive", None)
    architecture: Any = build_component("models", name, "[model]", settings, **context)
    if isinstance(architecture, nn.Module):
        section = parse_section(DeriveSection, derive or {})
        facts = find_facts(architecture, context["input_shape"], context["classes"] if section.head == "new" else None)
        return derive_model(architecture, facts, section, 0, say)
    check_architecture(architecture, name)
    family: Architecture = architecture
    return family


def check_architecture(architecture: Any, label: Any) -> None:
    """Refuse an object that lacks a part of the protocol `Architecture`."""
    members = ("axes", "blocks", "build", "sizes", "positions")
    for name in members:
        if inspect.getattr_static(architecture, name, None) is None and not hasattr(architecture, name):
            raise ConfigError(
                f'[model] {label} must return an Architecture, but {type(architecture).__name__} lacks "{name}". '
                "Inherit from fleetfit.architecture.Architecture, set axes and blocks, and write "
                "build(self, axes, exits).",
                key="model.name",
            )
    try:
        validate_architecture(architecture)
    except ModelError as error:
        raise ConfigError(f"[model] {label}: {error}", key=error.key or "model.name") from error


def describe_task(problem: Problem) -> list[str]:
    """Name the measure that replaces accuracy in this task, if any."""
    measure = problem.task.measure
    return [] if measure == "accuracy" else [f"Accuracy here is {measure}."]
