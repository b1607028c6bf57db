"""The data of a run without their samples: the facts that prepare other samples, and a fingerprint.

If the data have changed when a run or a comparison is resumed, it gets a note. Private runs, secure runs and runs of a
fleet have no fingerprint.
"""

import contextlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from fleetfit.data import AbsentData, Data
from fleetfit.data.splits import SPLITS
from fleetfit.errors import DataError, RunError
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import DataRecord, FingerprintRecord

FACTS = "data.json"
"""What other samples are prepared by, in the folder of a simulated run; without samples."""
TOKENISER = "tokenizer.json"
"""The tokeniser of a run on texts."""
COLUMNS = "columns.json"
"""The encoding of a table's columns, in the folder of a run on one."""
CHANGED = "The data have changed since"
"""The beginning of each sentence about changed data."""


def describe_facts(data: Data) -> dict[str, str]:
    """Return the texts of the files from which `restore_facts` makes the facts of data."""
    record = DataRecord(
        name=data.name,
        task=data.task,
        shape=list(data.x.shape[1:]),
        dtype=cast(Any, str(data.x.dtype).removeprefix("torch.")),
        classes=data.classes,
        class_names=list(data.class_names),
        mean=list(data.mean),
        std=list(data.std),
        channels_last=data.channels_last,
        vocabulary=data.vocabulary,
        padding=data.padding,
        resize=None if data.resize is None else list(data.resize),
        targets=[moment.tolist() for moment in data.target_scale] if data.task == "regression" else [],
    )
    texts = {FACTS: json.dumps(record.model_dump(exclude_defaults=True)) + "\n"}  # ASCII
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if data.tokenizer:
            texts[TOKENISER] = Path(data.tokenizer).read_text(encoding="utf-8")
    return texts


def restore_facts(files: RunFolder, reason: str) -> AbsentData:
    """Return the facts of a run's data from its folder.

    Args:
        files: The folder.
        reason: Why the data cannot be read, as a sentence.

    Raises:
        RunError: A file is damaged.
    """
    record = files.read(FACTS, DataRecord)
    shape, dtype = tuple(record.shape), getattr(torch, record.dtype)
    labels = {"next_token": (0, *shape), "classification": (0,)}.get(record.task, (0, record.classes))
    try:
        return AbsentData(
            name=record.name,
            x=torch.empty(0, *shape, dtype=dtype),
            y=torch.empty(labels, dtype=torch.float32 if record.task == "regression" else torch.int64),
            splits={},
            classes=record.classes,
            class_names=tuple(record.class_names),
            mean=tuple(record.mean),
            std=tuple(record.std),
            channels_last=record.channels_last,
            task=record.task,
            vocabulary=record.vocabulary,
            padding=record.padding,
            resize=None if record.resize is None else (record.resize[0], record.resize[1]),
            tokenizer=str(files.path / TOKENISER) if files.has(TOKENISER) else "",
            columns=files.text(COLUMNS) if files.has(COLUMNS) else "",
            targets=tuple(map(tuple, record.targets)),
            reason=reason,
        )
    except (DataError, IndexError, RuntimeError) as error:
        raise RunError(f"{files.path / FACTS} is damaged: {error}", path=files.path / FACTS) from None


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
