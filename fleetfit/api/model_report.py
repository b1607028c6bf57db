"""The report of `check-model`: the model, the proof of its layout, and a training step at each level."""

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fleetfit import names
from fleetfit.anatomy import Architecture, State, build_module, explain_errors, outputs
from fleetfit.anatomy.derive import DerivedArchitecture
from fleetfit.anatomy.derived import AXIS_COLUMNS
from fleetfit.anatomy.meta import on_meta
from fleetfit.anatomy.proof import WIDTHS, check_layout, format_architecture, make_sample_levels, select_exits
from fleetfit.anatomy.proof.explain import (
    describe_axes,
    describe_exits,
    describe_layout,
    describe_orders,
    describe_proof,
)
from fleetfit.config.assemble.levels import count_early_heads, find_counted_submodel
from fleetfit.config.assemble.model import build_architecture
from fleetfit.core import Device, Failure, Job, Level, Local, Problem
from fleetfit.core.tasks import get_task
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.errors import ConfigError, ModelError, PlanError, join_some
from fleetfit.hooks.levels import split_levels
from fleetfit.machine import use_threads
from fleetfit.planner import Targets
from fleetfit.report.tables import describe_early_heads
from fleetfit.report.text import EXITS, Table, exit_names, format_count
from fleetfit.seeds import make_torch_rng
from fleetfit.submodel import extract
from fleetfit.training import initial_state, run_job
from fleetfit.training.profiling.steps import make_random_data

_BUDGETS = (0.125, 0.25, 0.5, 1.0)
_BATCH = 8  # samples per training step
_LR = 0.01
_TOLERANCE = 0.1
_TIMED_STEPS, _TIMED_S = 5, 2.0  # per level; slow steps stop at the time limit
_CLASSES = 10


def check_model_report(
    name: str,
    settings: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int | None = None,
    task: str = "classification",
    say: Callable[[str], None] | None = None,
) -> Iterator[str | Table]:
    """Yield the parts of the report in order, so that an error follows the parts that led to it.

    Args:
        name: The model: built in, `package.module:function` or `file.py:function`.
        settings: Its keys.
        shape: Shape of a sample.
        classes: Number of classes; 10 by default, the vocabulary for next_token.
        task: "classification", "next_token", "regression" or "multi_label".
        say: Called with a sentence from time to time, where a step takes long.

    Raises:
        FleetFitError: The model cannot be built, scaled or trained.
    """
    scores = get_task(task)
    architecture, classes = _make_architecture(name, settings, shape, classes, task, say)
    derived = architecture if isinstance(architecture, DerivedArchitecture) else None
    yield f"{format_architecture(architecture)}: {_describe_samples(architecture, shape, scores.name, classes)}"
    if derived:
        yield Table(AXIS_COLUMNS, tuple(derived.list_axes()), notes=tuple(derived.describe_whole()))
    else:
        yield _format_section("What scales", describe_axes(architecture))
    problem, levels, note = _find_levels(Problem(architecture, shape, scores, (architecture.blocks,)))
    if not derived:
        yield _format_section("Inferred by building the model larger", describe_layout(problem.layout))
        yield _format_section("Read from a forward pass", describe_orders(problem.layout))
    with torch.device("meta"):
        module = build_module(architecture, problem.layout.full_sizes, problem.exits)
    exits = iter(derived.describe_exits()) if derived else describe_exits(architecture, module)
    yield _format_section("Exits", exits)
    submodels = [level.submodel for level in levels]
    proved = derived.report if derived else None
    proof = check_layout(architecture, problem.layout, submodels, input_shape=shape, say=say, proved=proved)
    yield _format_section("Proof", describe_proof(proof))
    data = make_random_data(problem, classes, _BATCH, make_torch_rng("check-model"))
    _check_outputs(problem, data)
    yield note
    yield _train_levels(problem, levels, data)
    unused = _find_unused_parameters(problem, data)
    if unused:
        yield (
            f"No exit uses {join_some(unused, 6)}. They would be sent and averaged without effect: "
            "remove them from the module."
        )
    yield "No files were written."


def _format_section(title: str, lines: Iterator[str]) -> str:
    return "\n  ".join([title, *lines])


# ---- the model -----------------------------------------------------------------------------------------------------


def _make_architecture(
    name: str,
    settings: Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int | None,
    task: str,
    say: Callable[[str], None] | None,
) -> tuple[Architecture, int]:
    """Return the architecture and the number of classes."""
    required = {
        key
        for key, parameter in inspect.signature(names.resolve("models", name)).parameters.items()
        if parameter.default is inspect.Parameter.empty
    }
    if "vocabulary" in required and "vocabulary" not in settings:
        raise ConfigError(
            f'{name} needs "vocabulary". Set the number of tokens with --set model.vocabulary=1000, and the tokens '
            "per sample with --input-shape 32.",
            key="model.vocabulary",
        )
    facts = {"channels": shape[0], "input_shape": shape}
    if "padding" in required and "padding" not in settings:
        facts["padding"] = -1
    count = _CLASSES if classes is None else classes
    architecture = build_architecture(name, settings, say, classes=count, **facts)
    tokens = getattr(architecture, "tokens", 0)
    if isinstance(architecture, DerivedArchitecture):
        found = architecture.plan.classes
        if classes not in (None, found):
            raise ConfigError(f"{name} has {found} logits, not --classes {classes}: leave it out.", key="classes")
        return architecture, found
    if task == "next_token" and not tokens:
        raise ConfigError(
            f"--task next_token needs a token model, but {name} takes real numbers (tokens = 0). Choose another task.",
            key="task",
        )
    if task == "next_token" and classes is None:
        return build_architecture(name, settings, say, classes=tokens, **facts), tokens
    return architecture, count


def _describe_samples(architecture: Architecture, shape: Sequence[int], task: str, classes: int) -> str:
    tokens = getattr(architecture, "tokens", 0)
    sizes = " x ".join(map(str, shape))
    samples = f"samples of {sizes} tokens below {tokens}" if tokens else f"samples of {sizes}"
    noun = {"next_token": "tokens to predict", "regression": "targets", "multi_label": "labels"}.get(task, "classes")
    return f"{samples}, {classes} {noun}"


# ---- its levels ----------------------------------------------------------------------------------------------------


def _find_levels(problem: Problem) -> tuple[Problem, list[Level], str]:
    """Return the problem with the levels' exits, the levels, and a sentence on their choice."""
    parts = "1/8, 1/4, 1/2 and all of the parameters"
    targets = Targets(_BUDGETS, (_TOLERANCE,) * len(_BUDGETS))
    try:
        levels = split_levels(problem, targets, default="auto")
    except PlanError as error:
        problem = problem.replace_exits(select_exits(problem.architecture))
        submodels = make_sample_levels(problem.architecture, problem.layout)
        levels = [
            Level(str(i + 1), one, width, 0.0) for i, (one, width) in enumerate(zip(submodels, WIDTHS, strict=True))
        ]
        widths = ", ".join(map(str, WIDTHS))
        return problem, levels, f"Levels of fixed widths {widths}: the planner finds none for {parts}: {error}"
    problem = problem.replace_exits({e for level in levels for e in level.submodel.exits})
    return problem, levels, f'Levels for devices that afford {parts}, as fleet.scaling = "auto" makes them.'


def _train_levels(problem: Problem, levels: Sequence[Level], data: Data) -> Table:
    """Train each level for one step, and return a table of the results."""
    state = initial_state(problem, seed=0)
    rows = []
    for level in levels:
        cost = submodel_cost(problem.architecture, find_counted_submodel(problem, level), problem.input_shape)
        with use_threads(1):  # as in a run's jobs; small steps on many threads are slow on a busy machine
            before, after, seconds = _time_step(problem, level, state, data)
        rows.append(
            (
                level.name,
                f"{level.width:.2f}",
                f"{level.submodel.depth}/{problem.architecture.blocks}",
                ", ".join(exit_names(level.submodel.exits, problem.exits)),
                format_count(cost.parameters),
                format_count(cost.multiply_adds),
                f"{before:.4f} -> {after:.4f}",
                f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s",
            )
        )
    columns = ("level", "width", "depth", EXITS, "parameters", "multiply-adds", "loss of a step", "time of a step")
    note = (
        f"Each level was trained for one step on {_BATCH} random samples (task {problem.task.name}). The loss before "
        "and after covers all exits, weighted as in ScaleFL. The time is the median with 1 thread, as in a run's "
        "jobs."
    )
    heads, last = count_early_heads(problem), levels[-1]
    has_uncounted_heads = heads.parameters and find_counted_submodel(problem, last) != last.submodel
    return Table(
        columns, tuple(rows), notes=(note, *([describe_early_heads(last.name, heads)] if has_uncounted_heads else []))
    )


def _time_step(problem: Problem, level: Level, state: State, data: Data) -> tuple[float, float, float]:
    """Return the loss before and after one step of a level, and the time of a step in seconds."""
    first = extract(problem.layout, state, level.submodel)
    before, second, _ = _run_step(problem, level, first, data)
    after, _, seconds = _run_step(problem, level, second, data)
    times, end = [seconds], time.perf_counter() + _TIMED_S
    while len(times) < _TIMED_STEPS and time.perf_counter() < end:
        times.append(_run_step(problem, level, second, data)[2])
    return before, after, statistics.median(times)


def _run_step(problem: Problem, level: Level, state: State, data: Data) -> tuple[float, State, float]:
    """Run one training step as a client does; return its loss, the state after it, and the time in seconds."""
    job = Job("train", 0, 1, 0, 0, level.submodel, state, {"name": "scalefl"}, seed=0,
              local=Local(lr=_LR, epochs=1, batch_size="all", momentum=0.0, weight_decay=0.0))  # fmt: skip
    start = time.perf_counter()
    try:
        reply, _ = run_job(job, Device(problem, data))
    except Exception as error:
        raise ModelError(f"level {level.name} cannot be trained: {type(error).__name__}: {error}") from error
    if isinstance(reply, Failure):
        raise ModelError(f"level {level.name} cannot be trained: {reply.reason}")
    return float(reply.metrics["loss"]), reply.state, time.perf_counter() - start


def _find_unused_parameters(problem: Problem, data: Data) -> list[str]:
    """Return the parameters of the full model that no exit depends on."""
    module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    x, _ = data.batch(data.split("train"))
    parameters = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    with explain_errors(problem.architecture, problem.input_shape):
        total = torch.stack([logits.float().sum() for logits in outputs(module, x)]).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None]


def _check_outputs(problem: Problem, data: Data) -> None:
    """Check the shape of every exit's outputs against the task.

    Raises:
        ModelError: An exit's outputs have the wrong shape.
    """
    shape = (_BATCH, *problem.input_shape) if problem.task.name == "next_token" else (_BATCH,)
    expected = (*shape, data.classes)
    x = data.x.to("meta")
    with on_meta():
        module = build_module(problem.architecture, problem.layout.full_sizes, problem.exits)
    with explain_errors(problem.architecture, problem.input_shape), on_meta():
        logits_of_exits = outputs(module, x)
    for block, logits in zip(problem.exits, logits_of_exits, strict=True):
        if tuple(logits.shape) != expected:
            at_each_place = tuple(logits.shape) == (_BATCH, *problem.input_shape, data.classes)
            hint = " It predicts at each token: set --task next_token." if at_each_place else ""
            raise ModelError(
                f"the exit after block {block} gives outputs of shape {tuple(logits.shape)} for {_BATCH} samples; task "
                f"{problem.task.name} with {data.classes} classes needs {expected}.{hint}"
            )
