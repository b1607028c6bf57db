"""The data of a run without their samples: how other samples are prepared, and a fingerprint.

If the data have changed when a run or a comparison is resumed, it gets a note. Private runs, secure runs and runs of a
fleet have no fingerprint.
"""

from hashlib import sha256
from typing import Any

from fleetfit.data import Data
from fleetfit.data.splits import SPLITS
from fleetfit.data.transform import Transform
from fleetfit.errors import DataError, RunError
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import FingerprintRecord

CHANGED = "The data have changed since"
"""The beginning of each sentence about changed data."""


def load_transform(files: RunFolder) -> Transform:
    """Return how other samples become those of a run, from its folder.

    Raises:
        RunError: A file is damaged.
    """
    try:
        return Transform.load(files.path)
    except DataError as error:
        raise RunError(str(error), path=error.path) from None


def make_fingerprint(data: Data) -> FingerprintRecord:
    """Return the fingerprint of data."""
    return FingerprintRecord(
        samples=len(data.x),
        shape=list(data.sample_shape),
        splits={split: len(data.split(split)) for split in SPLITS},
        labels=sha256(data.y.detach().cpu().contiguous().numpy().data).hexdigest(),
    )


def format_difference(before: FingerprintRecord, now: FingerprintRecord) -> str:
    """Describe the difference of two fingerprints; "" if they are equal."""
    changes = [
        f"{words} {_format_value(getattr(before, key))} then, {_format_value(getattr(now, key))} now"
        for key, words in (("samples", "samples"), ("shape", "the shape of a sample"), ("splits", "the splits"))
        if getattr(before, key) != getattr(now, key)
    ]
    if not changes and before.labels != now.labels:
        changes = ["other labels, or the same labels in another order"]
    return "; ".join(changes)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {split}" for split, count in value.items())[:80]
    return str(value)[:80]
