"""What a run's data were when it began, in `environment.json`: counts, the shape, and a checksum of the labels.

What lies at a path may be something else when a run, or a comparison, goes on. Then it is said, and nothing is refused.
Runs whose data are withheld, and those of a fleet, write nothing of them.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from fleetfit.config import Assembly
from fleetfit.data import Data
from fleetfit.data.splits import SPLITS
from fleetfit.errors import RunError
from fleetfit.records import RunFolder

Fingerprint = Mapping[str, Any]
"""Samples, shape of one, samples by split, and the checksum of the labels."""
DATA = "data"
"""Where it stands in `environment.json`."""
CHANGED = "The data have changed since"
"""How each sentence about it begins."""


def fingerprint(assembly: Assembly) -> Fingerprint | None:
    """Return what tells a run's data from others; None where nothing of them may be written, or they are elsewhere."""
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


def recorded(files: RunFolder) -> Fingerprint | None:
    """Return what a run folder says of its data; None where it says nothing, or is damaged, which others say."""
    try:
        found = files.json("environment.json") if files.has("environment.json") else None
    except RunError:
        return None
    there = found.get(DATA) if isinstance(found, Mapping) else None
    return there if isinstance(there, Mapping) else None


def recorded_shape(files: RunFolder) -> tuple[int, ...]:
    """Return the shape of a sample in the run's data; () where its folder does not tell."""
    shape = (recorded(files) or {}).get("shape")
    return tuple(shape) if isinstance(shape, list) else ()


def notes_on_change(files: RunFolder, assembly: Assembly) -> tuple[str, ...]:
    """Return a sentence where a run goes on with other data than it began with."""
    there = recorded(files)
    here = None if there is None else fingerprint(assembly)
    if there is None or here is None or not (found := difference(there, here)):
        return ()
    return (
        f"{CHANGED} this run began: {found}. Its rounds before and after learn from different data, and accuracies are "
        "measured on those of now. Put the data back as they were, or begin a new run.",
    )


def difference(there: Fingerprint, here: Fingerprint) -> str:
    """Return in words what differs; "" where nothing does.

    Args:
        there: The data of before.
        here: Those of now.
    """
    said = []
    for key, words in (("samples", "samples"), ("shape", "the shape of a sample"), ("splits", "the splits")):
        if there.get(key) != here.get(key):
            said.append(f"{words} {_shown(there.get(key))} then, {_shown(here.get(key))} now")
    if not said and there.get("labels") != here.get("labels"):
        said.append("other labels, or the same in another order")
    return "; ".join(said)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{count} {split}" for split, count in value.items())[:80]
    return str(value)[:80]
