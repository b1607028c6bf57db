"""The verb `check-model`: report which parts of a model scale, and prove it."""

from typing import Annotated

import typer

from fleetfit.cli import output
from fleetfit.cli.arguments import Overrides
from fleetfit.cli.plan import get_default_shape, parse_model_settings, parse_shape


def check_model(
    name: Annotated[str, typer.Argument(help="Built-in name, package.module:function or file.py:function.")],
    classes: Annotated[
        int | None, typer.Option(help="Number of classes. Default: 10, or the vocabulary for next_token.")
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample. Default: 3,32,32, or 32 for token models.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="Task: classification, next_token, regression or multi_label.")
    ] = "classification",
    overrides: Overrides = None,
) -> None:
    """Report which parts of a model scale, prove it, and train each level for one step. Writes no files.

    The report lists the axes with their tensors (inferred), the exits, and the cost of each level. Set keys
    of the model with --set model.KEY=VALUE, such as --set model.vocabulary=1000.
    """
    from fleetfit.api.model_report import check_model_report

    settings = parse_model_settings(overrides or ())
    shape = get_default_shape(name) if input_shape is None else parse_shape(input_shape)
    for block in check_model_report(name, settings, shape, classes, task, output.print_sentence):
        output.print_block(block)
