"""Records of a run folder besides its results: the nodes of a fleet, and a fingerprint of the data.

`environment.json` has a fingerprint of the data: counts, the shape of a sample, and a checksum of the labels. If the
data have changed when a run or a comparison is resumed, it gets a note. Private runs, secure runs and runs of a fleet
have no fingerprint.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from fleetfit.config import Assembly
from fleetfit.data import Data
from fleetfit.data.splits import SPLITS
from fleetfit.errors import ConfigError, RunError, did_you_mean
from fleetfit.records import RunFolder
from fleetfit.values import NodeDescription
from fleetfit.values.nodes import parse_node_description

COLUMNS = "columns.json"
"""The encoding of a table's columns, in the folder of a run on one."""
DERIVED = "derived.json"
"""What was derived from a plain module, in the folder of a run of one."""
NODES = "nodes.json"
"""The nodes of a fleet's run."""


def load_planned_nodes(files: RunFolder) -> list[NodeDescription]:
    """Return the descriptions of the nodes that the levels of a fleet's run were planned for.

    Raises:
        RunError: The file is damaged.
    """
    try:
        return [parse_node_description(node) for node in files.json(NODES)["planned"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{files.path / NODES} is damaged: {error}.", path=files.path / NODES) from None


def open_fleet_run(folder: str | Path) -> RunFolder:
    """Return the folder of a fleet's run, which may be continued.

    Raises:
        FleetFitError: It is not one.
    """
    files = RunFolder.open(folder)
    if not files.has(NODES):
        raise RunError(
            f"{files.path} is not a fleet's run; continue it with: fleetfit resume {files.path}.", path=files.path
        )
    return files


def find_accuracy(columns: Mapping[str, Any], kind: str, level: int | None, norm: str) -> float:
    """Return one accuracy of an evaluation's columns (see `Run.accuracy`).

    Raises:
        ConfigError: The columns do not have the number.
    """
    if norm not in columns:
        norms = ", ".join(name for name in ("static", "batch") if name in columns)
        raise ConfigError(f'this run has no "{norm}" columns. Its evaluate.norms are {norms}.', key="norm")
    values = columns[norm]
    if level is not None:
        if kind != "local" or str(level) not in values["levels"]:
            raise ConfigError(
                f'accuracy by level needs kind "local" and a level of {", ".join(values["levels"])}; got kind '
                f'"{kind}" and level {level}.',
                key="level",
            )
        values = values["levels"][str(level)]
    if kind in values and values[kind] is None:
        failed = len(columns.get("failures", ()))
        cause = f": {failed} jobs of the evaluation failed" if failed else ""
        raise ConfigError(f'the "{kind}" accuracy has no number{cause}. The page of the run says why.', key="kind")
    if not isinstance(values.get(kind), int | float):
        numbers = [key for key, value in values.items() if isinstance(value, int | float)]
        raise ConfigError(
            f'no such accuracy: "{kind}". The accuracies are {", ".join(numbers)}.{did_you_mean(kind, numbers)}',
            key="kind",
        )
    return float(values[kind])


def short_name(name: Any) -> str:
    """Return a name of a run file without the path of its function, or the type of an object."""
    text = name if isinstance(name, str) else type(name).__name__
    return text.rpartition(":")[2]


# ---- the data's fingerprint ----------------------------------------------------------------------------------------

Fingerprint = Mapping[str, Any]
"""Number of samples, shape of a sample, samples by split, and a checksum of the labels."""
DATA = "data"
"""Key of the fingerprint in `environment.json`."""
CHANGED = "The data have changed since"
"""The beginning of each sentence about changed data."""


def make_fingerprint(assembly: Assembly) -> Fingerprint | None:
    """Return the fingerprint of a run's data; None for private and secure runs and for data on nodes."""
    data, settings = assembly.data, assembly.settings
    if not isinstance(data, Data) or settings.privacy is not None or settings.secure is not None:
        return None
    labels = data.y.detach().cpu().contiguous().numpy()
    return {
        "samples": len(data.x),
        "shape": list(data.sample_shape),
        "splits": {split: len(data.split(split)) for split in SPLITS},
        "labels": sha256(labels.data).hexdigest(),
    }


def read_fingerprint(files: RunFolder) -> Fingerprint | None:
    """Return the fingerprint in a run folder; None if it is missing or its file is damaged."""
    try:
        recorded = files.json("environment.json") if files.has("environment.json") else None
    except RunError:
        return None
    fingerprint = recorded.get(DATA) if isinstance(recorded, Mapping) else None
    return fingerprint if isinstance(fingerprint, Mapping) else None


def read_sample_shape(files: RunFolder) -> tuple[int, ...]:
    """Return the shape of a sample in the run's data; () if the folder does not record it."""
    shape = (read_fingerprint(files) or {}).get("shape")
    return tuple(shape) if isinstance(shape, list) else ()


def find_data_changes(files: RunFolder, assembly: Assembly) -> tuple[str, ...]:
    """Return a sentence if the data of a resumed run have changed since its start."""
    before = read_fingerprint(files)
    now = None if before is None else make_fingerprint(assembly)
    if before is None or now is None or not (changes := format_difference(before, now)):
        return ()
    return (
        f"{CHANGED} this run began: {changes}. Earlier and later rounds train on different data, and accuracy is "
        "measured on the new data. Restore the data, or start a new run.",
    )


def format_difference(before: Fingerprint, now: Fingerprint) -> str:
    """Describe the difference of two fingerprints; "" if they are equal."""
    changes = [
        f"{words} {_format_value(before.get(key))} then, {_format_value(now.get(key))} now"
        for key, words in (("samples", "samples"), ("shape", "the shape of a sample"), ("splits", "the splits"))
        if before.get(key) != now.get(key)
    ]
    if not changes and before.get("labels") != now.get("labels"):
        changes = ["other labels, or the same labels in another order"]
    return "; ".join(changes)


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {split}" for split, count in value.items())[:80]
    return str(value)[:80]
