"""`fleetfit profile`: from its options to a budget file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetfit.cli.arguments import RunFile, parse_output_file
from fleetfit.errors import ConfigError

if TYPE_CHECKING:
    from fleetfit.values import DataDescription


def profile(
    file: RunFile = None,
    model: Annotated[str | None, typer.Option(help="Levels of this model instead of a run file's.")] = None,
    budgets: Annotated[str, typer.Option(help="With --model: budgets of the devices, as for `plan`.")] = (
        "0.125,0.25,0.5,1"
    ),
    cost: Annotated[str, typer.Option(help="With --model: what budgets are meant in.")] = "parameters",
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample, such as 3,32,32; with --classes, no data are needed.")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Classes; with --input-shape, no data are needed.")] = None,
    task: Annotated[
        str, typer.Option(help="With --input-shape: classification, next_token, regression or multi_label.")
    ] = "classification",
    vocabulary: Annotated[int, typer.Option(min=0, help="With --input-shape: tokens are below it.")] = 0,
    step_s: Annotated[float | None, typer.Option(help="Seconds that a training step may take.")] = None,
    latency_s: Annotated[float | None, typer.Option(help="Seconds that inference of one sample may take.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help='Memory that a training step may take, "300 MB"; half of what is free by default.'),
    ] = None,
    energy_j: Annotated[float | None, typer.Option(help="Joules that a training step may take.")] = None,
    limit_s: Annotated[float, typer.Option(help="Seconds for everything.")] = 60.0,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads for a job, as in the node's configuration.")] = 1,
    out: Annotated[
        Path,
        typer.Option(help="Budget file to write.", parser=parse_output_file, metavar="FILE"),
    ] = Path("budget.toml"),
    force: Annotated[bool, typer.Option("--force", help="Write it although it is there.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key of the run file. Repeatable."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Measure a run that computes as is fastest: engine.speed=fast.")
    ] = False,
) -> None:
    """Measure what each level costs on this device, and write the budget file that it follows.

    Levels are those of `fleetfit plan` for the same run file. Each is trained on made-up samples in a process of its
    own: time, memory and, where the machine tells it, energy of a step; time of inference. The budget is that of the
    largest level that keeps within what you admit. A node names the file as its budget, and so does a group of a run
    file. Exit code 2, and no file, where no level fits.
    """
    from fleetfit.api.profiling import Machine, profile, wished
    from fleetfit.cli import output

    if model is not None and file is not None:
        raise ConfigError("profile takes a run file or --model, not both.")
    with output.explain_interrupt():
        found = profile(
            file if model is None else _tables(model, budgets, cost),
            wishes=wished(step_s, latency_s, memory, energy_j),
            machine=Machine(device, threads, limit_s),
            facts=_facts(model is not None, input_shape, classes, task, vocabulary),
            out=out, force=force, say=output.print_line,
            overrides=[*(overrides or ()), *(["engine.speed=fast"] if fast else [])],
        )  # fmt: skip
    output.print_table(found.table)
    output.print_line(f"Energy: {found.energy}. Within: {found.wishes}.")
    for note in found.affords.notes:
        output.print_line(note)
    output.print_line(f'Written: {out}. A node takes it with budget = "{out.name}".')


def _tables(model: str, budgets: str, cost: str) -> dict[str, Any]:
    """Return the tables of a run that plans as `plan --model` does."""
    from fleetfit.cli.planning import numbers

    groups = [{"budget": budget} for budget in numbers(budgets, "--budgets")]
    return {"model": {"name": model}, "fleet": {"cost": cost, "groups": groups}}


def _facts(
    made_up: bool, input_shape: str | None, classes: int | None, task: str, vocabulary: int
) -> "DataDescription | None":
    from fleetfit.cli.planning import shape_of
    from fleetfit.values import DataDescription

    if not made_up and (input_shape is None) != (classes is None):
        raise ConfigError("--input-shape and --classes go together: both of them say what a sample is.")
    if not made_up and input_shape is None:
        return None
    return DataDescription("made-up samples", task, shape_of(input_shape), classes or 10, vocabulary)
