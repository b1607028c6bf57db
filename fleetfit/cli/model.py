"""The verb `check-model`: which parts of a model scale, and the proof."""

from typing import Annotated

import typer

from fleetfit.cli import output
from fleetfit.cli.arguments import Overrides
from fleetfit.cli.plan import get_default_shape, parse_model_settings, parse_shape


def check_model(
    name: Annotated[str, typer.Argument(help="Built-in name, package.module:function or file.py:function.")],
    classes: Annotated[int | None, typer.Option(help="Classes; 10 by default, all tokens for next_token.")] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of a sample; 3,32,32 by default, 32 for models of tokens.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="The task: classification, next_token, regression or multi_label.")
    ] = "classification",
    overrides: Overrides = None,
) -> None:
    """Explain which parts of a model scale, prove it, and train every level for one step; nothing is written.

    Lists the axes and their tensors, inferred and declared, the exits, and the cost of every level. Keys of the model
    are set with --set model.KEY=VALUE, such as --set model.vocabulary=1000 for tokens.
    """
    from fleetfit.api.model_report import check_model_report

    settings = parse_model_settings(overrides or ())
    shape = get_default_shape(name) if input_shape is None else parse_shape(input_shape)
    for block in check_model_report(name, settings, shape, classes, task):
        output.print_block(block)
