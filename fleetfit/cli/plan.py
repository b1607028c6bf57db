"""The verbs on levels: `plan` (the sub-model for each budget) and `profile` (the cost of each level on this device)."""

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from fleetfit.cli import output
from fleetfit.cli.arguments import Overrides, RunFile, add_speed, parse_output_file, path_option
from fleetfit.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from fleetfit.anatomy import Architecture
    from fleetfit.config import Assembly
    from fleetfit.core import DataDescription
    from fleetfit.cost import Latency, TimedModel
    from fleetfit.planner import Plan, Scaling, SplitLevel

IMAGE = (3, 32, 32)
"""The shape of a sample of an image model, by default."""
TOKENS = (32,)
"""The shape of a sample of a token model, by default."""
_PASSES = 1000  # as in ScaleFL's tables


@dataclass(frozen=True)
class PlanOptions:
    """The options of `plan --model`, as typed."""

    model: str | None = None
    budgets: str = "0.125,0.25,0.5,1"
    cost: str = "parameters"
    tolerance: float = 0.1
    scaling: str | None = None
    levels: str = "cluster"
    exits: str | None = None
    widths: str | None = None
    classes: int = 10
    input_shape: str | None = None
    strict: bool = False
    also: str | None = None
    batch_size: int = 16

    def list_changed(self) -> list[str]:
        """Return the options, as typed, whose values are not the defaults."""
        return [f"--{f.name.replace('_', '-')}" for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class PlanView:
    """A plan and the information to print with it.

    Attributes:
        plan: The plan.
        title: Its title: the method and its clients, or the model.
        models: The counted sub-model of each level, and last the full model.
        notes: Sentences printed before the plan.
        latencies: Measured latencies of the models; may be empty.
        latency_notes: Sentences on the latencies.
        splits: The same budgets, split in each way; empty if the method's levels follow no budgets.
    """

    plan: "Plan"
    title: str
    models: tuple["TimedModel", ...] = ()
    notes: Sequence[str] = ()
    latencies: tuple["Latency", ...] = ()
    latency_notes: tuple[str, ...] = ()
    splits: "Mapping[Scaling, Sequence[SplitLevel]]" = field(default_factory=dict)


def plan(
    file: RunFile = None,
    model: Annotated[str | None, typer.Option(help="Plan for this model instead of a run file.")] = None,
    budgets: Annotated[
        str, typer.Option(help="Device budgets: fractions of the full model's cost, or absolute numbers above 1.")
    ] = "0.125,0.25,0.5,1",
    cost: Annotated[
        str,
        typer.Option(
            help="Cost that budgets limit: parameters, non_embedding_parameters, multiply_adds (MACs), size_bytes, "
            "memory_bytes or latency_s."
        ),
    ] = "parameters",
    tolerance: Annotated[float, typer.Option(help="Fraction by which a level may exceed its budget.")] = 0.1,
    scaling: Annotated[
        str | None,
        typer.Option(
            help="How levels differ: auto, both, width, depth, depth_first. Default: auto; both with --exits, --widths."
        ),
    ] = None,
    levels: Annotated[str, typer.Option(help='"cluster", "halving", or cost ratios such as 0.25,0.5,1.')] = "cluster",
    exits: Annotated[str | None, typer.Option(help="Exits of the smaller levels, such as 36,42,48.")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths of the smaller levels, such as 0.7,0.7,0.75.")] = None,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 10,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample. Default: 3,32,32, or 32 for token models.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Admit only levels within every budget.")] = False,
    also: Annotated[str | None, typer.Option(help="Further costs to show, such as memory_bytes,latency_s.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per training step, for memory_bytes.")] = 16,
    latency: Annotated[
        bool, typer.Option("--latency", help="Measure the latency of one sample at each level on this machine.")
    ] = False,
    passes: Annotated[int, typer.Option(min=1, help="With --latency: number of passes; the median counts.")] = _PASSES,
    threads: Annotated[int, typer.Option(min=1, help="With --latency: number of threads.")] = 1,
    save: Annotated[
        Path | None, path_option(parse_output_file, "Write the plan as TOML, for fleet.levels of a run file.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show the sub-model for each budget, and its cost.

    With a run file, it plans the levels of the file's method on its data, for each row if the file compares. With
    --model, it plans for the given budgets, by default as a run of the default method. The options from --budgets to
    --batch-size apply only with --model. Set keys of the model with --set model.KEY=VALUE.
    """
    from fleetfit import files
    from fleetfit.report.tables import make_plan_table, make_split_table

    options = PlanOptions(
        model, budgets, cost, tolerance, scaling, levels, exits, widths, classes, input_shape, strict, also, batch_size
    )
    changed = options.list_changed()
    if not latency and (passes != _PASSES or threads != 1):
        unused = [*["--passes"] * (passes != _PASSES), *["--threads"] * (threads != 1)]
        raise ConfigError(f"{', '.join(unused)}: only with --latency. Add --latency, or leave them out.", key="latency")
    meter = LatencyMeter(passes, threads) if latency else None
    if model is not None:
        if file is not None:
            raise ConfigError("plan takes a run file or --model, not both. Leave one out.", key="model")
        plans = [plan_model(options, overrides or ())]
    else:
        if changed:
            raise ConfigError(
                f"{', '.join(changed)}: only with --model. For a run file, set keys of [fleet] and [method], such as "
                "--set fleet.tolerance=0.2.",
                key="model",
            )
        plans = plan_run_file(file, overrides or ())
    for view in plans:
        with output.explain_interrupt():
            result = view if meter is None else meter.measure_plan(view)
            output.print_notes(result.notes)
            output.print_table(make_plan_table(result.plan, result.title, result.latencies, result.latency_notes))
            if result.splits:
                output.print_table(make_split_table(result.splits, result.plan))
    if save is not None:
        if len(plans) > 1:
            raise ConfigError(
                f"--save writes one plan, but {file} has rows with {len(plans)} plans. Save the plan of a file "
                "with one row.",
                key="save",
            )
        try:
            files.write_user_file(save, plans[0].plan.to_toml())
        except OSError as error:
            raise ConfigError(f"cannot write the plan to {save}: {error.strerror}.", path=save) from None
        output.print_line(f'Saved. Use it in a run file: [fleet] levels = "{save}".')


def plan_run_file(file: Path | None, overrides: Sequence[str]) -> list[PlanView]:
    """Return the plan of a run file, or the distinct plans of its rows if it compares."""
    from fleetfit.api.comparison import list_plans
    from fleetfit.api.run import check_requested_keys, dropped_key_notes
    from fleetfit.config import load_experiment
    from fleetfit.config.assemble.run import assemble
    from fleetfit.config.assemble.splits import compare_splits
    from fleetfit.config.requirements import takes_levels

    experiment = load_experiment(file, overrides)
    if file is not None and experiment.compare.is_set:
        return [
            PlanView(
                assembly.plan,
                _make_title(assembly, rows),
                _list_models(assembly),
                [note for note in assembly.notes if note not in set(map(str, assembly.unused))],  # another row's keys
            )
            for rows, assembly in list_plans(file, overrides)
        ]
    assembly = assemble(experiment, say=output.print_sentence)
    check_requested_keys(assembly.unused, experiment)
    notes = (*dropped_key_notes(experiment), *assembly.notes)
    splits = compare_splits(assembly) if takes_levels(assembly) and len(assembly.plan.levels) > 1 else {}
    return [PlanView(assembly.plan, _make_title(assembly), _list_models(assembly), notes, splits=splits)]


def _make_title(assembly: "Assembly", rows: Sequence[str] = ()) -> str:
    name, data = assembly.experiment.method.name, assembly.data.name
    prefix = f"{', '.join(rows)}: " if rows else ""
    return f"{prefix}{name} on {data}, {len(assembly.fleet.group)} clients"


def _list_models(assembly: "Assembly") -> tuple["TimedModel", ...]:
    from fleetfit.config.assemble.levels import find_counted_submodel

    problem = assembly.federation.problem
    submodels = [find_counted_submodel(problem, level) for level in assembly.federation.levels]
    return _make_timed(
        problem.architecture, [(submodel.sizes, submodel.exits) for submodel in submodels], problem.input_shape
    )


def _make_timed(
    architecture: "Architecture",
    submodels: Sequence[tuple[Mapping[str, int], tuple[int, ...]]],
    shape: tuple[int, ...],
) -> tuple["TimedModel", ...]:
    """Return sub-models by sizes and exits, and last the full model without early classifiers."""
    from fleetfit.cost import TimedModel

    full = architecture.sizes(1.0)
    models = [*submodels, (full, (architecture.blocks,))]
    return tuple(TimedModel(architecture, {**full, **sizes}, exits, shape) for sizes, exits in models)


def plan_model(options: PlanOptions, overrides: Sequence[str]) -> PlanView:
    """Return the plan for a model and budgets."""
    from fleetfit.config.assemble.model import build_architecture
    from fleetfit.config.assemble.splits import describe_levels
    from fleetfit.cost import Conditions, get_cost_kind
    from fleetfit.planner import Scaling, get_sizes, make_plan

    assert options.model is not None
    shape = parse_shape(options.input_shape) if options.input_shape else get_default_shape(options.model)
    settings = parse_model_settings(overrides)
    architecture = build_architecture(
        options.model, settings, classes=options.classes, channels=shape[0], input_shape=shape
    )
    if options.scaling not in (None, *get_args(Scaling)):
        raise ConfigError(
            f'--scaling must be one of {", ".join(get_args(Scaling))}, got "{options.scaling}".', key="scaling"
        )
    also = () if options.also is None else tuple(part.strip() for part in options.also.split(","))
    for cost in also:
        get_cost_kind(cost)

    def plan_scaling(scaling: "Scaling") -> "Plan":
        return make_plan(
            architecture,
            shape,
            parse_numbers(options.budgets, "--budgets"),
            options.tolerance,
            options.levels if options.levels in ("cluster", "halving") else parse_numbers(options.levels, "--levels"),
            options.cost,
            scaling,
            options.strict,
            None if options.exits is None else [int(e) for e in parse_numbers(options.exits, "--exits")],
            None if options.widths is None else parse_numbers(options.widths, "--widths"),
            also,
            Conditions(options.batch_size),
        )

    notes: tuple[str, ...] = ()
    try:
        default = "auto" if options.exits is None and options.widths is None else "both"
        plan = plan_scaling(cast("Scaling", options.scaling or default))
    except PlanError as error:
        scaling = error.scaling or ("width" if getattr(architecture, "falls_back_to_width", False) else None)
        if options.scaling is not None or scaling is None:
            raise
        notes = (f"No levels that differ in both depth and width fit within {options.tolerance:g}, so levels differ in "
            f"{scaling} only. Run with --scaling both for the reason.",)  # fmt: skip
        plan = plan_scaling(cast("Scaling", scaling))
    title = f"{options.model}, samples of {' x '.join(map(str, shape))}, {options.classes} classes"
    submodels = [(get_sizes(architecture, level.shape), level.exits) for level in plan.levels[:-1]]
    submodels.append((architecture.sizes(1.0), (architecture.blocks,)))  # the last level is counted as this
    return PlanView(plan, title, _make_timed(architecture, submodels, shape), (*notes, *describe_levels(plan)))


def get_default_shape(model: str) -> tuple[int, ...]:
    """Return the shape of a sample: tokens for a model with a vocabulary, else an image."""
    import inspect

    from fleetfit import names

    return TOKENS if "vocabulary" in inspect.signature(names.resolve("models", model)).parameters else IMAGE


def parse_model_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys of the model that --set sets.

    Raises:
        ConfigError: One of them is not a key of the model.
    """
    from fleetfit.config.load import parse_override

    settings: dict[str, Any] = {}
    for text in overrides:
        change = parse_override(text)
        if set(change) != {"model"} or not isinstance(change["model"], dict):
            raise ConfigError(
                f'with --model, --set takes keys of the model, such as --set model.depth=20; got "{text}".', key="set"
            )
        settings |= change["model"]
    return settings


def parse_shape(text: str | None) -> tuple[int, ...]:
    """Return the shape "3,32,32"; by default that of an image.

    Raises:
        ConfigError: It is not a shape.
    """
    shape = IMAGE if text is None else tuple(int(n) for n in parse_numbers(text, "--input-shape"))
    if min(shape) < 1:
        raise ConfigError(f'--input-shape takes sizes of at least 1, got "{text}".', key="input_shape")
    return shape


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Return numbers separated by commas.

    Raises:
        ConfigError: One of them is not a number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f'{option} takes numbers separated by commas, got "{text}".', key=option[2:].replace("-", "_")
        ) from None


# ---- plan --latency ------------------------------------------------------------------------------------------------

_LINE_S = 15.0  # between two progress lines
_BUSY = 0.95  # below this share of processor time, other processes disturbed the passes


@dataclass(frozen=True)
class LatencyMeter:
    """Measures latencies, with progress on stderr.

    Attributes:
        passes: Number of passes of one sample; the median counts.
        threads: Number of threads.
    """

    passes: int
    threads: int

    def __post_init__(self) -> None:
        """Check the number of threads: with far too many, the OpenMP library aborts the process.

        Raises:
            ConfigError: There are more threads than processors.
        """
        processors = os.cpu_count() or 1
        if self.threads > processors:
            count = _format_count(processors, "processor", "processors")
            raise ConfigError(
                f"--threads must be at most the number of processors, {count}; got {self.threads}.", key="threads"
            )

    def measure_plan(self, view: PlanView) -> PlanView:
        """Return a plan with the latencies of its levels and of the full model."""
        latencies = self.measure(view.models)
        names = [level.name for level in view.plan.levels]
        notes = self.make_notes(names, latencies[:-1], latencies[-1])
        return replace(view, latencies=tuple(latencies), latency_notes=notes)

    def measure(self, models: Sequence["TimedModel"]) -> list["Latency"]:
        """Return the latency of each model; equal models are measured once."""
        from fleetfit.api.progress import TaskProgress
        from fleetfit.cost import measure_latencies

        distinct: list[TimedModel] = []
        for model in models:
            if model not in distinct:
                distinct.append(model)
        passes, count = self.passes, len(distinct)
        work = f"{_format_count(passes, 'pass', 'passes')} of {_format_count(count, 'model', 'models')}"
        if not sys.stderr.isatty():
            output.print_sentence(f"measuring {work}.")
        with TaskProgress(f"Measuring {work}", passes * count, output.print_sentence, _LINE_S) as progress:

            def show(done: int) -> None:
                progress.update(done, lambda: f"measured {done // count:,} of {passes:,} passes; {progress.time_left}.")

            latencies = measure_latencies(distinct, passes, self.threads, show)
        return [latencies[distinct.index(model)] for model in models]

    def make_notes(self, names: Sequence[str], latencies: Sequence["Latency"], full: "Latency") -> tuple[str, ...]:
        """Describe the measurement of latencies. If the machine was busy, add the ratios in processor time."""
        import torch

        from fleetfit.runs.environment import get_processor_name

        passes = _format_count(self.passes, "pass", "passes")
        threads = _format_count(self.threads, "thread", "threads")
        note = (
            f"Measured here: median of {passes} of one sample, ± the range between the quartiles. The models took "
            f"turns, on {threads} of {get_processor_name()}, PyTorch {torch.__version__}, fp32, random weights."
        )
        shares = [one.processor_share for one in latencies if one.processor_share is not None]
        if not shares or full.processor_s is None or statistics.mean(shares) >= _BUSY:
            return (note,)
        fractions = [
            f"{name}: {one.processor_s / full.processor_s:.3f}"
            for name, one in zip(names, latencies, strict=True)
            if one.processor_s is not None
        ]
        return (
            note,
            f"The machine was busy: the passes ran for {100 * statistics.mean(shares):.0f}% of the time. In processor "
            f"time, which is less disturbed, measured / full is {'; '.join(fractions)}.",
        )


def _format_count(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


# ---- profile -------------------------------------------------------------------------------------------------------


def profile(
    file: RunFile = None,
    model: Annotated[str | None, typer.Option(help="Profile the levels of this model instead of a run file's.")] = None,
    budgets: Annotated[str, typer.Option(help="With --model: device budgets, as for `plan`.")] = ("0.125,0.25,0.5,1"),
    cost: Annotated[str, typer.Option(help="With --model: cost that budgets limit.")] = "parameters",
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample, such as 3,32,32. With --classes, no data are loaded.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Number of classes. With --input-shape, no data are loaded.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="With --input-shape: classification, next_token, regression or multi_label.")
    ] = "classification",
    vocabulary: Annotated[int, typer.Option(min=0, help="With --input-shape: number of tokens in the vocabulary.")] = 0,
    step_s: Annotated[float | None, typer.Option(help="Limit in seconds of a training step.")] = None,
    latency_s: Annotated[float | None, typer.Option(help="Limit in seconds of inference on one sample.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help='Memory limit of a training step, such as "300 MB". Default: half of the free memory.'),
    ] = None,
    energy_j: Annotated[float | None, typer.Option(help="Limit in joules of a training step.")] = None,
    limit_s: Annotated[float, typer.Option(help="Limit in seconds of the whole profile.")] = 60.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads per job, as in the node's configuration.")] = 1,
    out: Annotated[Path, path_option(parse_output_file, "Budget file to write.")] = Path("budget.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the run file. Repeatable."),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Measure a run with engine.speed=fast.")] = False,
) -> None:
    """Measure the cost of each level on this device, and write a budget file.

    It trains each level of `fleetfit plan` on random samples, each in its own process. It measures the time, memory and
    (if the machine supports it) energy of a training step, and the time of inference. The budget is that of the largest
    level within your limits. Name the file as the budget of a node or of a group in a run file. If no level fits, it
    writes no file and exits with code 2.
    """
    from fleetfit.api.profiling import profile as measure_levels
    from fleetfit.config import load_experiment

    source: Path | dict[str, Any] | None = file
    if model is not None:
        if file is not None:
            raise ConfigError("profile takes a run file or --model, not both. Leave one out.", key="model")
        groups = [{"budget": budget} for budget in parse_numbers(budgets, "--budgets")]
        source = {"model": {"name": model}, "fleet": {"cost": cost, "groups": groups}}
    with output.explain_interrupt():
        result = measure_levels(
            load_experiment(source, add_speed(overrides, fast)),
            step_s=step_s, latency_s=latency_s, memory=memory, energy_j=energy_j,
            device=device, threads=threads, limit_s=limit_s,
            facts=_describe_samples(model is not None, input_shape, classes, task, vocabulary),
            out=out, force=force, say=output.print_line,
        )  # fmt: skip
    output.print_table(result.table)
    output.print_line(f"Energy: {result.energy}. Within: {result.limits}.")
    for note in result.affords.notes:
        output.print_line(note)
    output.print_line(f'Written: {out}. Use it in the configuration of a node: budget = "{out.name}".')


def _describe_samples(
    is_model: bool, input_shape: str | None, classes: int | None, task: str, vocabulary: int
) -> "DataDescription | None":
    from fleetfit.core import DataDescription

    if not is_model and (input_shape is None) != (classes is None):
        raise ConfigError("--input-shape and --classes need each other. Set both.", key="input_shape")
    if not is_model and input_shape is None:
        return None
    return DataDescription("made-up samples", task, parse_shape(input_shape), classes or 10, vocabulary)
