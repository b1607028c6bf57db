"""A client's class frequencies in an exported model.

    offset(c) = log p_k(c) - log p(c),    p_k(c) = (n_c + 1) / (n + C)

n_c are counts of labels of the client, n their sum, and p the fleet's class frequencies, if the run has asked for them;
otherwise uniform. The offset is added to the logits of every exit, as `evaluate.personal = true` does for `personal`.
Who has the files can compute p_k.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleetfit import files
from fleetfit.core import DataDescription
from fleetfit.core.tasks import get_task
from fleetfit.data import Data
from fleetfit.errors import ConfigError, did_you_mean, truncate
from fleetfit.training.labels import compute_offset, count_labels, smooth_counts

Counts = Sequence[float] | Mapping[str, float]
"""Samples of each class, in order or by its name or number; a class that a table leaves out has none."""
OWN = "own"
"""In place of counts: those of the client's data."""
_MOST = 1e15


def make_offset(
    counts: Counts | str | Path, fleet: tuple[float, ...], data: Data | DataDescription, own: Data | None
) -> Tensor:
    """Return what a client adds to logits, float32 [C].

    Args:
        counts: Its counts, a JSON file with them, or `OWN`.
        fleet: The fleet's class frequencies; empty: uniform.
        data: The run's data.
        own: The client's data, for `OWN`: its training samples count, or all samples if it has none.

    Raises:
        ConfigError: The task has no classes, or the counts do not fit them.
    """
    if not get_task(data.task).has_classes:
        raise ConfigError(
            f"prior: log class frequencies are added to logits, but a task of the kind {data.task} has no classes. "
            "Leave it out.",
            key="prior",
        )
    if isinstance(counts, str) and counts == OWN:
        if own is None:
            raise ConfigError(
                "--prior own counts the labels of --data, which is missing. Add --data with the device's own data.",
                key="prior",
            )
        number = count_labels(own, "train" if len(own.split("train")) else None)
    elif isinstance(counts, str | Path):
        path = files.parse_path(counts, "the file of counts")
        try:
            values = files.parse_json(files.read_text(path, ConfigError))
        except ConfigError as error:
            error.key = "prior"
            raise
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}.", key="prior", path=path) from None
        try:
            number = _parse_counts(values, data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}", key="prior", path=path) from None
    else:
        number = _parse_counts(counts, data)
    return compute_offset(smooth_counts(number), fleet)


def _parse_counts(counts: Any, data: Data | DataDescription) -> Tensor:
    """Return counts as float64 [C]; arrays and tensors are taken, too."""
    counts = counts.tolist() if hasattr(counts, "tolist") else counts
    if isinstance(counts, Mapping):
        counts = _order_counts(counts, data)
    if not isinstance(counts, Sequence) or isinstance(counts, str) or len(counts) != data.classes:
        got = f"{len(counts)} values" if isinstance(counts, Sequence) else truncate(repr(counts))
        raise ConfigError(
            f"counts must be a list of {data.classes} numbers, one for each class, or a table by class; got {got}.",
            key="prior",
        )
    for number in counts:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 <= number < _MOST:  # False of NaN
            raise ConfigError(f"a count must be a finite number from 0 on, got {truncate(repr(number))}.", key="prior")
    return torch.tensor([float(number) for number in counts], dtype=torch.float64)


def _order_counts(counts: Mapping[str, Any], data: Data | DataDescription) -> list[Any]:
    """Return the counts of a table in the order of the classes."""
    numbers = [str(number) for number in range(data.classes)]
    names = list(getattr(data, "class_names", ())) or numbers
    place = {name: number for number, name in enumerate(numbers)} | {name: i for i, name in enumerate(names)}
    ordered: list[Any] = [0] * data.classes
    for name, count in counts.items():
        if name not in place:
            raise ConfigError(
                f'there is no class "{truncate(name)}". The classes are {truncate(", ".join(names))}.'
                f"{did_you_mean(name, names)}",
                key="prior",
            )
        ordered[place[name]] = count
    return ordered
