"""The verbs about a trained model: `predict`, `calibrate`, `export`, `pictures`, `attention`."""

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fleetfit.cli.arguments import Folder, parse_folder, parse_output_file
from fleetfit.cli.output import redirect_stdout

app = typer.Typer()

LevelName = Annotated[str | None, typer.Option(help="Level, 1 for the smallest; the largest by default.")]
Client = Annotated[int | None, typer.Option(help="On one client's data.")]
Other = Annotated[str | None, typer.Option("--data", help="Another data set of the same shape and classes.")]


class BudgetCost(StrEnum):
    """What an average budget is meant in."""

    multiply_adds = "multiply_adds"
    latency_s = "latency_s"


class Measure(StrEnum):
    """How confidence is measured."""

    max = "max"
    entropy = "entropy"
    margin = "margin"


class SplitName(StrEnum):
    """Which samples."""

    test = "test"
    validation = "validation"
    train = "train"


@app.command()
def predict(
    folder: Folder,
    level: LevelName = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="A prediction at each exit, as it is computed.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Leave early, as `fleetfit calibrate` found.")] = False,
    best: Annotated[
        bool, typer.Option("--best-exit", help="Use the exit that is best on validation data (with --client: its own).")
    ] = False,
    client: Client = None,
    data: Other = None,
    split: Annotated[SplitName, typer.Option(help="Which samples.")] = SplitName.test,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per forward pass.")] = 256,
    out: Annotated[
        Path | None,
        typer.Option(
            help="CSV file to write, a line for each sample.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Classify a data set with a level's model (ScaleFL, Algorithm 4).

    By default the level's last exit answers. With --adaptive every exit answers, nothing is computed twice. With --stop
    a sample leaves at the first exit that is sure enough.
    """
    from fleetfit.cli import output, predicting

    asked = predicting.PredictOptions(folder, level, adaptive, stop, best, client, data, split.value, batch_size, out)
    output.print_table(predicting.predicted(asked))
    if out is not None:
        output.print_line(f"Written: {out}")


@app.command()
def calibrate(
    folder: Folder,
    level: LevelName = None,
    budget: Annotated[
        str, typer.Option(help="Average cost of a sample: up to 1, a share of the last exit's; or 35 ms, 20 M.")
    ] = "0.75",
    cost: Annotated[
        BudgetCost | None, typer.Option(help="What the budget is meant in; by default as its unit says.")
    ] = None,
    anytime: Annotated[
        bool, typer.Option("--anytime", help="Each sample has the budget, not the average one.")
    ] = False,
    measure: Annotated[Measure, typer.Option(help="How confidence is measured.")] = Measure.max,
    temperature: Annotated[
        bool, typer.Option("--temperature", help="Scale each exit's logits by a temperature fitted to validation data.")
    ] = False,
    client: Client = None,
    data: Other = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Choose on validation data when samples leave early for an average budget, and try it on test data.

    Written into the run folder (inference/level-N.json), where `predict --stop`, `export` and `pictures` find it.
    """
    from fleetfit.cli import output, predicting

    mode = "anytime" if anytime else "budgeted"
    with redirect_stdout() if as_json else contextlib.nullcontext():
        found = predicting.calibrated(
            folder, level, budget, cost and cost.value, mode, measure.value, temperature, client, data
        )
    if as_json:
        output.print_json(found.numbers())
        return
    for table in predicting.calibration_tables(found):
        output.print_table(table)


@app.command()
def export(
    folder: Folder,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="Folder to write; it must be new or empty.",
            parser=parse_folder,
            metavar="FOLDER",
        ),
    ],
    level: LevelName = None,
    onnx: Annotated[bool, typer.Option(help="Write ONNX: one graph with all exits, and one for each segment.")] = True,
    int8: Annotated[bool, typer.Option("--int8", help="ONNX in dynamic int8 as well.")] = False,
    static_int8: Annotated[
        bool, typer.Option("--static-int8", help="ONNX in static int8 as well, calibrated on validation samples.")
    ] = False,
    transformers: Annotated[
        bool, typer.Option("--transformers", help="A transformers folder of the last exit (BERT, ViT, DeiT).")
    ] = False,
    executorch: Annotated[bool, typer.Option("--executorch", help="One .pte file lowered to XNNPACK.")] = False,
    data: Annotated[
        str | None, typer.Option("--data", help="Data set for preprocessing and checks, such as for a fleet's run.")
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="REPO",
            help="Upload to this repository of the Hugging Face hub, which is made, private, if it is new.",
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: a repository that is new is public, not private.")
    ] = False,
) -> None:
    """Write a level's model for devices: tensors, torch.export program, ONNX graphs, model card.

    Every form is checked against the model on test samples before anything is left behind.
    """
    from fleetfit.cli import output, predicting

    asked = {"onnx": onnx, "int8": int8, "static-int8": static_int8, "transformers": transformers,
             "executorch": executorch}  # fmt: skip
    forms = [form for form, wanted in asked.items() if wanted]
    found = predicting.exported(folder, level, out, data, forms, output.print_line)
    output.print_table(predicting.export_table(found))
    output.print_line(f"Written: {out}")
    if push is not None:
        from fleetfit.inference.export.hub import push as upload

        output.print_line(f"Uploaded: {upload(out, push, private=not public)}")


@app.command()
def attention(
    folder: Folder,
    samples: Annotated[int, typer.Option(help="How many test images.")] = 4,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Picture to write (.png, .pdf, .svg); FOLDER/plots/attention.png by default.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
    data: Other = None,
) -> None:
    """Draw where a vision transformer trained by ReeFL looks, before and after Ree's modulation.

    Takes the newest checkpoint. Three maps for each block: the class token's, the modulated one's, the classified
    one's (ReeFL, appendix E).
    """
    from fleetfit.cli import output, picturing

    output.print_line(f"Drawn: {picturing.attention(folder, samples, out, data)}")


@app.command()
def pictures(
    folder: Folder,
    level: Annotated[str | None, typer.Option(help="Level, 1 to L, or its name; the largest by default.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help='Average cost of a sample: up to 1 a share of the last exit\'s, else absolute, such as "35 ms"; by '
            "default that of the level's saved calibration, else 0.75."
        ),
    ] = None,
    cost: Annotated[
        str | None, typer.Option(help="multiply_adds or latency_s (on this machine); by default as the budget's unit.")
    ] = None,
    measure: Annotated[str | None, typer.Option(help="Confidence: max (the default), entropy or margin.")] = None,
    temperature: Annotated[bool, typer.Option("--temperature", help="Scale each exit's logits first.")] = False,
    classes: Annotated[
        list[str] | None, typer.Option("--class", help="Whose samples are drawn; five by default. Repeatable.")
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="How many samples of a class are drawn; 0.1 by default, more if they are few.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder to write; FOLDER/plots by default.",
            parser=parse_folder,
            metavar="FOLDER",
        ),
    ] = None,
    ending: Annotated[str, typer.Option("--format", help="png, pdf or svg.")] = "png",
    data: Other = None,
) -> None:
    """Draw a run's plots and early stopping: Figures 2, 3 and 5 to 9 of ScaleFL, and accuracy over budget.

    The plots are those that a run has at its end; of one of a comparison they are drawn here alone. Takes the newest
    checkpoint. Samples by the exit where they left have a blue border if they are right there, an orange one if only
    the last exit is. Nothing but pictures is written.
    """
    from fleetfit.cli import output, picturing

    output.print_figure_paths(
        *picturing.pictures(
            folder, picturing.asked(level, budget, cost, measure, temperature, classes, share), out, ending, data
        )
    )
