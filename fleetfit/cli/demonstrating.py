"""A first run that needs no file: `fleetfit demo`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fleetfit.cli.arguments import GoesOn, Jobs, Quiet, parse_output_file
from fleetfit.cli.comparing import compared
from fleetfit.errors import ConfigError

RUN_FILE = Path(__file__).with_name("demo.toml")


def demo(
    out: GoesOn = None,
    jobs: Jobs = 1,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Train nothing: write the run file, to be changed and run with `fleetfit compare FILE`.",
            parser=parse_output_file,
            metavar="FILE",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set one key of all its runs, such as rounds=5. Repeatable."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Compare ScaleFL, HeteroFL and FedAvg on handwritten digits: a first run that needs no file.

    Forty clients, four budgets; one to three minutes. The same command goes on where it was cut off.
    """
    from fleetfit.cli import output

    if write is not None:
        written(write)
        output.print_line(f"Change it, then: {shlex.join(['fleetfit', 'compare', str(write)])}")
        return
    compared(RUN_FILE, ["demo"], out=out, jobs=jobs, overrides=overrides, quiet=quiet)
    if not quiet:
        output.print_line("Its run file, to change and run as your own: fleetfit demo --write mine.toml")


def written(path: Path) -> None:
    """Write the demonstration's run file.

    Args:
        path: Where; nothing that is there is overwritten.

    Raises:
        ConfigError: There is something already, or it cannot be written.
    """
    from fleetfit import files

    if path.is_file():
        raise ConfigError(f"{path} is there already, and is left as it is: name a new file after --write.")
    try:
        files.write_user_file(path, RUN_FILE.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the run file cannot be written to {path}: {error.strerror}.") from None
