"""The verbs on trained models: `predict`, `eval`, `calibrate` and `export`."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetfit.cli import output
from fleetfit.cli.arguments import Folder, OtherData, parse_folder, parse_output_file, path_option
from fleetfit.errors import COMMAND
from fleetfit.report.text import Table, format_percent

if TYPE_CHECKING:
    from fleetfit.inference import Calibration, Mode
    from fleetfit.inference.export import Export

_ACCURACIES = ("global", "local", "global_worst_tenth", "local_worst_tenth", "ensemble", "mean_over_exits", "best_exit",
               "personal", "avg", "full")  # fmt: skip

LevelName = Annotated[str | None, typer.Option(help="Level; 1 is the smallest. Default: the largest trained.")]
Client = Annotated[int | None, typer.Option(help="Use the data of one client.")]


class CheckpointName(StrEnum):
    """Checkpoints of a run."""

    last = "last"
    best = "best"


Checkpoint = Annotated[
    CheckpointName, typer.Option(help="Checkpoint of the run: the last one, or the best on validation data.")
]


class BudgetCost(StrEnum):
    """Units of an average budget."""

    multiply_adds = "multiply_adds"
    latency_s = "latency_s"


class Measure(StrEnum):
    """Measures of confidence."""

    max = "max"
    entropy = "entropy"
    margin = "margin"


class SplitName(StrEnum):
    """Splits of a data set."""

    test = "test"
    validation = "validation"
    train = "train"


def predict(
    folder: Folder,
    level: LevelName = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Print a prediction at each exit.")] = False,
    stop: Annotated[
        bool,
        typer.Option("--stop", help="Stop early, at the thresholds that `fleetfit calibrate` saved."),
    ] = False,
    best: Annotated[
        bool,
        typer.Option(
            "--best-exit", help="Use the exit with the best validation accuracy (with --client: on the client's data)."
        ),
    ] = False,
    client: Client = None,
    data: OtherData = None,
    split: Annotated[SplitName, typer.Option(help="Split of the data.")] = SplitName.test,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per forward pass.")] = 256,
    checkpoint: Checkpoint = CheckpointName.last,
    out: Annotated[Path | None, path_option(parse_output_file, "CSV file to write, one line per sample.")] = None,
) -> None:
    """Classify a data set with a level's model (ScaleFL, Algorithm 4).

    By default the last exit predicts. With --adaptive every exit predicts, and nothing is computed twice. With --stop
    each sample stops at the first exit that is confident enough.
    """
    from fleetfit.api.predictions import Exit, make_prediction_table
    from fleetfit.api.results import load
    from fleetfit.errors import ConfigError

    flags: dict[Exit, bool] = {"all": adaptive, "early": stop, "best": best}
    exits = [exit for exit, is_set in flags.items() if is_set]
    if len(exits) > 1:
        raise ConfigError("--adaptive, --stop and --best-exit exclude each other. Choose one.", key="exit")
    run = load(folder, checkpoint.value)
    result = run.predict(
        data, level=level, exit=[*exits, "last"][0], split=split.value, client=client, batch_size=batch_size
    )
    if out is not None:
        result.to_csv(out)
    output.print_table(make_prediction_table(run, result, level is not None, data is None, out is not None))
    if out is not None:
        output.print_line(f"Written: {out}")


def evaluate(
    folder: Folder,
    data: Annotated[str | None, typer.Option(help="Another data set of the same shape and classes.")] = None,
    split: Annotated[str, typer.Option(help="test, validation or train.")] = "test",
    batch_size: Annotated[int | None, typer.Option(help="Samples per forward pass.")] = None,
    checkpoint: Checkpoint = CheckpointName.last,
    as_json: Annotated[bool, typer.Option("--json", help="Print all columns as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint of a run again, by default the last one. Writes no files."""
    from fleetfit.api.results import load
    from fleetfit.runs.folder import to_json_value

    with output.redirect_stdout() if as_json else contextlib.nullcontext():
        run = load(folder, checkpoint.value)
        columns = run.evaluate(data, split=split, batch_size=batch_size)
    if as_json:
        output.print_json(to_json_value(columns))
        return
    for table in make_evaluation_tables(columns, run.assembly.federation.problem.task.score):
        output.print_table(table)


def make_evaluation_tables(columns: Mapping[str, Any], score: str) -> Iterator[Table]:
    """Yield a table of the evaluation for each batch-norm policy.

    Args:
        columns: Result of `Run.evaluate`.
        score: Name of the task's accuracy.
    """
    from fleetfit.report.tables import format_sample_counts
    from fleetfit.runs.schema import NO_ACCURACIES

    for norm in ("static", "batch"):
        if norm not in columns:
            continue
        values = columns[norm]
        accuracies = NO_ACCURACIES.model_copy(update=values)
        rows = [
            (
                f"{kind.replace('_', ' ')} {score} %",
                f"{format_percent(values[kind])}{format_sample_counts(accuracies, kind)}",
            )
            for kind in _ACCURACIES
            if values.get(kind) is not None
        ]
        for name, level in values["levels"].items():
            if "accuracy" in level:
                rows.append((f"level {name}, {score} %", format_percent(level["accuracy"])))
            else:
                rows.append(
                    (f"level {name}, {level['clients']} clients, local {score} %", format_percent(level["local"]))
                )
        data = f" of {columns['data']}, {values['samples']} samples" if "data" in columns else ""
        yield Table((f"{columns['split']} data{data}", f"{norm} batch-norm statistics"), tuple(rows))


def calibrate(
    folder: Folder,
    level: LevelName = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Average cost of a sample: a fraction of the last exit's cost (up to 1), or absolute, such as '35 ms'."
        ),
    ] = "0.75",
    cost: Annotated[
        BudgetCost | None, typer.Option(help="Cost that the budget limits. Default: by the budget's unit.")
    ] = None,
    anytime: Annotated[
        bool, typer.Option("--anytime", help="Apply the budget to each sample, not to the average.")
    ] = False,
    measure: Annotated[Measure, typer.Option(help="Measure of confidence.")] = Measure.max,
    temperature: Annotated[
        bool, typer.Option("--temperature", help="Scale each exit's logits by a temperature fitted to validation data.")
    ] = False,
    client: Client = None,
    data: OtherData = None,
    checkpoint: Checkpoint = CheckpointName.last,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Choose early-stopping thresholds for an average budget on validation data, and evaluate them on test data.

    The result is written to the run folder (inference/level-N.json). `predict --stop` and `export` read it. With
    --client it is printed and not written.
    """
    from fleetfit.api.inference import find_budget_cost
    from fleetfit.api.results import load

    amount: float | str = budget
    with contextlib.suppress(ValueError):
        amount = float(budget)
    unit = find_budget_cost(amount) if cost is None else cost.value
    mode: Mode = "anytime" if anytime else "budgeted"
    with output.redirect_stdout() if as_json else contextlib.nullcontext():
        run = load(folder, checkpoint.value)
        calibration = run.calibrate(
            level, budget=amount, cost=unit, mode=mode, measure=measure.value, temperature=temperature, client=client,
            data=data,
        )  # fmt: skip
    if as_json:
        output.print_json({**calibration.numbers(), "file": calibration.file and str(calibration.file)})
        return
    for table in make_calibration_tables(calibration):
        output.print_table(table)
    if calibration.file is None:
        output.print_line(
            "Not saved: thresholds of one client are only printed. predict --stop and export use those of all clients "
            "(fleetfit calibrate without --client)."
        )
        return
    words = ["fleetfit", "predict", str(folder), "--level", calibration.level, "--stop"]
    words += [] if checkpoint is CheckpointName.last else ["--checkpoint", checkpoint.value]
    command = shlex.join([*words, *([] if data is None else ["--data", data])])
    output.print_line(f"Saved: {calibration.file}. To stop early at these thresholds:{COMMAND}{command}")


def make_calibration_tables(calibration: "Calibration") -> Iterator[Table]:
    """Yield a table of thresholds by exit, and the curve over budgets."""
    policy, test, cost, count = calibration.policy, calibration.test, calibration.cost, len(calibration.costs)
    unit = "ms" if cost == "latency_s" else "multiply-adds"

    def format_cost(value: float) -> str:
        return f"{1000 * value:.3g}" if cost == "latency_s" else f"{value:,.0f}"

    rows = []
    for i in range(count):
        before, after = calibration.calibration_errors[i]
        threshold = "-" if i == count - 1 else "never" if policy.thresholds[i] > 1 else f"{policy.thresholds[i]:.4f}"
        rows.append((
            calibration.exits[i] if calibration.exits else str(i + 1), format_cost(calibration.costs[i]), threshold,
            format_percent(test.shares[i]), format_percent(calibration.accuracies[i]), format_percent(before),
            *([] if after is None else [f"{policy.temperatures[i]:.2f}", format_percent(after)]),
        ))  # fmt: skip
    temperatures = ("temperature", "error after it %") if policy.temperatures else ()
    columns = ("exit (after block)", unit, "threshold", "test samples that leave %", "accuracy of all %",
               "calibration error %", *temperatures)  # fmt: skip
    last = calibration.costs[-1]
    without = last if calibration.level_cost is None else calibration.level_cost
    saved = 1 - test.cost / without
    notes = [
        f"Test samples: accuracy {format_percent(test.accuracy)}% at {format_cost(test.cost)} {unit} on average "
        f"(budget {format_cost(calibration.budget)}); all at the last exit: {format_percent(test.full)}% at "
        f"{format_cost(without)}: {100 * abs(saved):.0f}% {'less' if saved >= 0 else 'more'}.",
    ]
    if without != last:
        notes.append(
            f"A sample also passes the classifiers of earlier exits: {format_cost(last - without)} {unit} up to the "
            "last exit. Plans count the full model without them."
        )
    budget = "all samples share the budget" if calibration.mode == "budgeted" else "each sample has the budget"
    title = f"level {calibration.level}: early stopping by {policy.measure}, {budget}"
    yield Table(columns, tuple(rows), title, tuple(notes))
    full = calibration.curve[-1]
    points = [*calibration.curve[: -1 : max(1, len(calibration.curve) // 10)], full]
    curve = tuple(
        (format_cost(point["budget"]), format_cost(point["cost"]), format_percent(point["accuracy"]),
         " ".join(f"{100 * share:.0f}" for share in point["shares"])) for point in points
    )  # fmt: skip
    yield Table(("budget", f"average {unit}", "accuracy %", "leave at exits %"), curve, "test samples over budgets")


def export(
    folder: Folder,
    out: Annotated[Path, path_option(parse_folder, "Folder to write; it must be new or empty.", "--out")],
    level: LevelName = None,
    onnx: Annotated[bool, typer.Option(help="Write ONNX: one graph with all exits, and one for each segment.")] = True,
    int8: Annotated[bool, typer.Option("--int8", help="Also write ONNX in dynamic int8.")] = False,
    static_int8: Annotated[
        bool, typer.Option("--static-int8", help="Also write ONNX in static int8, calibrated on validation samples.")
    ] = False,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="Write a transformers folder of the last exit (BERT, ViT, DeiT).")
    ] = False,
    executorch: Annotated[
        bool, typer.Option("--executorch", help="Write an ExecuTorch .pte file, lowered to XNNPACK.")
    ] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="Data set for preprocessing and checks; a fleet's run needs it.")
    ] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Build in a client's class frequencies: a JSON file with its samples of each class (a list, or a "
            'table by class), or "own" for the labels of --data. The files then reveal them.',
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="REPO",
            help="Upload to this repository of the Hugging Face hub. A new repository is private.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make a new repository public.")] = False,
    checkpoint: Checkpoint = CheckpointName.last,
) -> None:
    """Export a level's model for devices: tensors, torch.export program, ONNX graphs, model card.

    Each form is checked against the model on test samples before the folder is written.
    """
    from fleetfit.api.results import load
    from fleetfit.cli.run import make_display

    options = {"onnx": onnx, "int8": int8, "static-int8": static_int8, "transformers": transformers,
               "executorch": executorch}  # fmt: skip
    forms = [form for form, is_requested in options.items() if is_requested]
    run = load(folder, checkpoint.value)
    exported = run.export(out, level, forms, data=data, progress=make_display(quiet=False), prior=prior)
    output.print_table(make_export_table(exported))
    output.print_line(f"Written: {out}")
    if push is not None:
        from fleetfit.inference.export.hub import push as upload

        output.print_line(f"Uploaded: {upload(out, push, private=not public)}")


def make_export_table(exported: "Export") -> Table:
    """Return the size of each form, and its agreement with the PyTorch model."""
    exits = exported.variants[0].exits
    score = "error" if exported.variants[0].errors else "accuracy %"
    numbers = [f"exit {i + 1}: {score}" for i in range(exits)]
    rows = []
    for form in exported.variants:
        same = format_percent(min(form.agreement)) if form.agreement else "-"
        rows.append((form.name, f"{form.size_bytes / 1000:.0f}", *form.format_scores(), same, f"{form.difference:.1e}"))
    columns = ("form", "kB", *numbers, "same answer %", "largest difference")
    title = f"level {exported.level} on {exported.variants[0].samples} {exported.samples} samples"
    return Table(columns, tuple(rows), title, exported.notes)
