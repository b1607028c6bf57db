"""The verbs and their options. Heavy modules are imported inside, so that `--help` answers at once."""

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetfit.cli.arguments import (
    Fast,
    Folder,
    GoesOn,
    Jobs,
    Out,
    Overrides,
    Quiet,
    RunFile,
    parse_folder,
    parse_input_file,
    parse_output_file,
    with_speed,
)
from fleetfit.cli.comparing import compared
from fleetfit.cli.demonstrating import demo
from fleetfit.cli.fleet import app as flower
from fleetfit.cli.keeping import runs as kept_runs
from fleetfit.cli.output import redirect_stdout, setup_logging
from fleetfit.cli.profiling import profile
from fleetfit.cli.reporting import report
from fleetfit.cli.shipping import app as shipping
from fleetfit.errors import ConfigError, did_you_mean, truncate

if TYPE_CHECKING:
    from fleetfit.cli.measuring import Measuring
    from fleetfit.planner import Plan

_PASSES = 1000  # as in ScaleFL's tables

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Federated learning across unequal devices: every device trains the piece of the model that fits it.",
)

app.add_typer(flower, name="flower")
app.add_typer(shipping)


class LogLevel(StrEnum):
    """The levels of the package's logger."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and stop.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print tracebacks; with every verb.")] = False,
    log: Annotated[
        LogLevel, typer.Option("--log", help="From which level on what is logged is printed.")
    ] = LogLevel.warning,
) -> None:
    setup_logging(log.value)
    if version:
        from fleetfit import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    file: RunFile = None, out: Out = None, overrides: Overrides = None, fast: Fast = False, quiet: Quiet = False
) -> None:
    """Train as a run file says; every key has a default.

    Writes a run folder (below `runs/`, or --out): resolved configuration, metrics, checkpoints, plan, summary, plots
    and page. A run that was cut off goes on with `fleetfit resume FOLDER`.
    """
    from fleetfit.api import runs
    from fleetfit.cli import display, output

    asked = runs.described(file, with_speed(overrides, fast))
    prepared = runs.prepare(asked, out, None if quiet else output.print_line)
    output.print_notes(runs.gone(asked))
    display.trained(prepared, quiet)


@app.command()
def resume(folder: Folder, quiet: Quiet = False) -> None:
    """Go on with a run that was cut off; the result equals that of an unbroken run bit for bit."""
    from fleetfit.api import load
    from fleetfit.cli import display, output

    found = load(folder)
    if found.finished:
        output.print_line(f"{folder} is finished already.")
        display.result(found)
    else:
        display.trained(found, quiet)


@app.command()
def watch(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run or a comparison.", parser=parse_folder, metavar="FOLDER"),
    ],
    once: Annotated[bool, typer.Option("--once", help="Only say how far it is.")] = False,
) -> None:
    """Follow a run or a comparison that another terminal or machine computes; Ctrl-C leaves it alone.

    Works on a fleet's run, too, and says where a run is finished or was stopped. Nothing is written.
    """
    from fleetfit.cli.watching import watch

    watch(folder, once)


@app.command()
def compare(
    file: Annotated[
        Path,
        typer.Argument(
            help="Run file with [[compare.row]], [compare.grid], [compare.tune].",
            parser=parse_input_file,
            metavar="FILE",
        ),
    ],
    out: GoesOn = None,
    jobs: Jobs = 1,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="LABEL", help="The row that the others are measured against; compare.against, or the first one."
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Also keep the results, once all is finished, in this folder as NAME.json, to be committed.",
            parser=parse_folder,
            metavar="FOLDER",
        ),
    ] = None,
    overrides: Overrides = None,
    fast: Fast = False,
    quiet: Quiet = False,
) -> None:
    """Run every row of a file in every setting with every seed, and print one table.

    The same command goes on where it was cut off: finished runs are not run again, and where all are, only the tables
    are written anew. They are also written as Markdown and CSV, and all results as one small `results.json`.
    """
    compared(file, ["compare", str(file)], out=out, jobs=jobs, overrides=overrides, fast=fast, quiet=quiet,
             against=against, record=record)  # fmt: skip


app.command()(demo)


@app.command()
def plan(
    file: RunFile = None,
    model: Annotated[str | None, typer.Option(help="Plan for this model instead of a run file.")] = None,
    budgets: Annotated[
        str, typer.Option(help="Budgets of the devices: fractions of the full model's cost, or absolute above 1.")
    ] = "0.125,0.25,0.5,1",
    cost: Annotated[
        str,
        typer.Option(
            help="What budgets are meant in: parameters, multiply_adds (MACs), size_bytes, memory_bytes, latency_s."
        ),
    ] = "parameters",
    tolerance: Annotated[float, typer.Option(help="How far a level may exceed a budget.")] = 0.1,
    mode: Annotated[
        str | None, typer.Option(help="What is cut: both, width or depth; both where levels fit, else width.")
    ] = None,
    levels: Annotated[str, typer.Option(help='"cluster", "halving" or ratios such as 0.25,0.5,1.')] = "cluster",
    exits: Annotated[str | None, typer.Option(help="Exits of the smaller levels, such as 36,42,48.")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths of the smaller levels, such as 0.7,0.7,0.75.")] = None,
    classes: Annotated[int, typer.Option(help="Classes.")] = 10,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample; 3,32,32 by default, 32 tokens for a model of tokens.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Admit only levels at or under every budget.")] = False,
    also: Annotated[str | None, typer.Option(help="Costs to show as well, such as memory_bytes,latency_s.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a training step, for memory_bytes.")] = 16,
    paper: Annotated[
        str | None,
        typer.Option(
            help="Reproduce a table of sizes of the papers: table-1, table-6 to table-9, adaptivefl-table-1, "
            "reefl-table-1, reefl-table-2."
        ),
    ] = None,
    latency: Annotated[
        bool,
        typer.Option("--latency", help="Measure how long one sample takes in each level here; also with --paper."),
    ] = False,
    passes: Annotated[int, typer.Option(min=1, help="With --latency: passes that the median is of.")] = _PASSES,
    threads: Annotated[int, typer.Option(min=1, help="With --latency: threads that compute.")] = 1,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write the plan as TOML, to be used as fleet.levels.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Show which sub-model each budget gets, and what it costs.

    For a run file: the levels of its method on its data, and of each row if it compares. With --model: the grid search
    of ScaleFL Eq. 1 for any budgets; the options from --budgets to --batch-size belong to it, and keys of the model are
    set with --set model.KEY=VALUE.
    """
    from fleetfit.cli import display, output, planning

    asked = planning.PlanOptions(
        model, budgets, cost, tolerance, mode, levels, exits, widths, classes, input_shape, strict, also, batch_size
    )
    measuring = _measuring(latency, passes, threads)
    if paper is not None:
        further = [*asked.changed(), *(["a run file"] if file else []), *(["--save"] if save else []),
                   *(["--set"] if overrides else [])]  # fmt: skip
        if further:
            raise ConfigError(f"{', '.join(further)}: not with --paper, which prints a table of a paper as it is.")
        _show_paper(paper, measuring)
        return
    if model is not None:
        if file is not None:
            raise ConfigError("plan takes a run file or --model, not both.")
        plans = [planning.of_model(asked, overrides or ())]
    else:
        if asked.changed():
            raise ConfigError(
                f"{', '.join(asked.changed())}: only with --model. What a run file plans for stands in its [fleet] and "
                "[method]; change it with --set, such as --set fleet.tolerance=0.2."
            )
        plans = planning.of_run_file(file, overrides or ())
    for one in plans:
        with output.explain_interrupt():
            display.plan(one if measuring is None else measuring.of_plan(one))
    if save is not None:
        if len(plans) > 1:
            raise ConfigError(f"--save writes one plan, and the rows of {file} have {len(plans)}: save that of one.")
        _save(plans[0].plan, save)


def _measuring(latency: bool, passes: int, threads: int) -> "Measuring | None":
    """Return how latencies are to be measured; None: not at all."""
    if not latency:
        given = [*(["--passes"] if passes != _PASSES else []), *(["--threads"] if threads != 1 else [])]
        if given:
            raise ConfigError(f"{', '.join(given)}: only with --latency, which measures.")
        return None
    from fleetfit.cli.measuring import Measuring

    return Measuring(passes, threads)


def _show_paper(name: str, measuring: "Measuring | None") -> None:
    from fleetfit.cli import output
    from fleetfit.papers import paper_table

    found = paper_table(name)
    if measuring is not None:
        with output.explain_interrupt():
            found = measuring.of_table(found)
    for table in found.as_text():
        output.print_table(table)


app.command()(profile)
app.command("runs")(kept_runs)
app.command()(report)


def _save(found: "Plan", path: Path) -> None:
    from fleetfit import files
    from fleetfit.cli import output

    try:
        files.write_user_file(path, found.to_toml())
    except OSError as error:
        raise ConfigError(f"the plan cannot be written to {path}: {error.strerror}.") from None
    output.print_line(f'Saved. Use it in a run file: [fleet] levels = "{path}".')


@app.command("eval")
def evaluate(
    folder: Folder,
    data: Annotated[str | None, typer.Option(help="Another data set of the same shape and classes.")] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    batch_size: Annotated[int | None, typer.Option(help="Samples per forward pass.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns as JSON.")] = False,
) -> None:
    """Evaluate the newest checkpoint of a run again. Nothing is written."""
    from fleetfit.api import load
    from fleetfit.cli import display, output
    from fleetfit.records import to_json_value

    section: dict[str, Any] = {"split": split} | ({} if batch_size is None else {"batch_size": batch_size})
    sections = {"evaluate": section} | ({} if data is None else {"data": {"name": data}})
    with redirect_stdout() if as_json else contextlib.nullcontext():
        run = load(folder)
        columns = run.evaluate(**sections)
    if as_json:
        output.print_json(to_json_value(columns))
    else:
        display.columns(columns, run.assembly.federation.problem.task.score)


class ListKind(StrEnum):
    """What can be listed."""

    methods = "methods"
    options = "options"
    models = "models"
    data = "data"
    selection = "selection"
    peft = "peft"
    attacks = "attacks"
    engines = "engines"
    callbacks = "callbacks"
    profiles = "profiles"


def listed_kind(text: str) -> ListKind:
    """Return the kind of a name."""
    if text not in list(ListKind):
        known = ", ".join(ListKind)
        raise typer.BadParameter(
            f'"{truncate(text)}" cannot be listed; there are {known}.{did_you_mean(text, ListKind)}'
        )
    return ListKind(text)


def _kinds() -> list[str]:
    return list(ListKind)


@app.command("list")
def listing(
    kind: Annotated[
        ListKind,
        typer.Argument(
            help="What to list.", parser=listed_kind, metavar=f"{{{'|'.join(ListKind)}}}", autocompletion=_kinds
        ),
    ],
    name: Annotated[str | None, typer.Argument(help="One of them: its keys, their defaults and meaning.")] = None,
) -> None:
    """List what is built in, one line each; data sets with sizes, profiles with figures. With a name, its keys."""
    from fleetfit.cli import listing, output

    output.print_table(listing.listed(kind.value) if name is None else listing.keys_of(kind.value, name))


@app.command("check-model")
def check_model(
    name: Annotated[str, typer.Argument(help="Built-in name, package.module:function or file.py:function.")],
    classes: Annotated[int | None, typer.Option(help="Classes; 10 by default, all tokens for next_token.")] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample; 3,32,32 by default, 32 for models of tokens.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="What is trained: classification, next_token, regression or multi_label.")
    ] = "classification",
    overrides: Overrides = None,
) -> None:
    """Explain what scales in a model, prove it, and train every level for one step; nothing is written.

    Says what belongs to which axis, what was inferred and what is declared, which exits there are, and what every level
    costs. Keys of the model are set with --set model.KEY=VALUE, such as --set model.vocabulary=1000 for tokens.
    """
    from fleetfit.cli import checking, output

    for part in checking.checked(checking.CheckOptions(name, classes, input_shape, task, overrides or ())):
        output.print_block(part)
