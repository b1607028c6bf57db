"""Pictures that are drawn when they are asked for."""

from pathlib import Path

from fleetfit.api import load
from fleetfit.errors import ConfigError
from fleetfit.report.attention import attention_of_samples
from fleetfit.values import Facts


def attention(folder: Path, samples: int, out: Path | None) -> Path:
    """Draw the attention maps of a run's model on test images, and return the file.

    Args:
        folder: The run folder.
        samples: How many images.
        out: The file, or None for `plots/attention.png` in the run folder.

    Raises:
        ConfigError: The file cannot be written, or there are not so many test images.
        FleetFitError: It is no run folder, its model has no attention maps, or matplotlib is not installed.
    """
    found = load(folder)
    path = found.folder / "plots" / "attention.png" if out is None else out
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"--out must end in .png, .pdf or .svg, got {path}.")
    data = found.assembly.data
    if isinstance(data, Facts):
        raise ConfigError("the test images of a fleet's run are on its nodes; there are none here to draw.")
    figure = attention_of_samples(found.model(), data, samples, f"{data.name}, after round {found.server.round}")
    try:
        if out is None:
            path.parent.mkdir(exist_ok=True)
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror}.") from None
    return path
