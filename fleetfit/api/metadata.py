"""Records of a run folder besides its results: the nodes of a fleet, the facts and a fingerprint of the data.

`environment.json` has a fingerprint of the data: counts, the shape of a sample, and a checksum of the labels. If the
data have changed when a run or a comparison is resumed, it gets a note. Private runs, secure runs and runs of a fleet
have no fingerprint.
"""

import contextlib
import inspect
import json
import tomllib
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch

from fleetfit import names
from fleetfit.config import Assembly, Experiment
from fleetfit.config.dump import dump_section, find_object_sections
from fleetfit.data import AbsentData, Data
from fleetfit.data.splits import SPLITS
from fleetfit.errors import ConfigError, DataError, RunError, did_you_mean, one_line
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import DataRecord
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


def format_resume(folder: Path, is_script: bool = False) -> str:
    """Return the command that continues a run, or the call: in a script, and for a run on objects.

    Args:
        folder: The run folder.
        is_script: Whether the user works in Python.
    """
    return _format_call(folder, "resume", "resume", is_script)


def format_open(folder: Path, is_script: bool = False) -> str:
    """Return the command that writes the page of a run again, or the call that opens it, as `format_resume`."""
    return _format_call(folder, "report", "load", is_script)


def _format_call(folder: Path, verb: str, function: str, is_script: bool) -> str:
    table: dict[str, Any] = {}
    with contextlib.suppress(RunError, ValueError):  # opening the run raises it
        table = tomllib.loads(RunFolder(folder).text("config.toml"))
    objects = [f"{section}=..." for section in find_object_sections(table)]
    if not objects and not is_script:
        return f"fleetfit {verb} {folder}"
    arguments = ", ".join([json.dumps(folder.as_posix(), ensure_ascii=False), *objects])
    return f"ff.{function}({arguments})"


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


# ---- the data without their samples --------------------------------------------------------------------------------

FACTS = "data.json"
"""What other samples are prepared by, in the folder of a simulated run; without samples."""
TOKENISER = "tokenizer.json"
"""The tokeniser of a run on texts."""


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


def read_environment(files: RunFolder) -> Mapping[str, Any]:
    """Return the content of `environment.json`; empty if it is missing or damaged."""
    try:
        recorded = files.json("environment.json") if files.has("environment.json") else None
    except RunError:
        return {}
    return recorded if isinstance(recorded, Mapping) else {}


def read_fingerprint(files: RunFolder) -> Fingerprint | None:
    """Return the fingerprint in a run folder; None if it is missing or its file is damaged."""
    fingerprint = read_environment(files).get(DATA)
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


# ---- the user's code -----------------------------------------------------------------------------------------------

CODE = "code"
"""Key of the digests of a user's code in `environment.json`."""


def compute_code_digests(experiment: Experiment) -> dict[str, str]:
    """Return the SHA-256 of the files of plug-ins and of the model's classes, by path.

    A class of the running script has the digest of its own text: the rest of a script changes for other reasons.
    """
    digests: dict[str, str] = {}
    stack: list[Any] = [dump_section(experiment, only_set=True)]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, str) and (file := names.find_code(value)) is not None:
            digests |= names.compute_code_digests(file)
    model = experiment.model.name
    if not isinstance(model, str):
        modules = model.modules() if isinstance(model, torch.nn.Module) else [model]
        for owner in {one if inspect.isroutine(one) or inspect.isclass(one) else type(one) for one in modules}:
            with contextlib.suppress(OSError, TypeError):  # built in, or typed into a session
                if owner.__module__ == "__main__":
                    text = inspect.getsource(owner)
                    digests[f"__main__:{owner.__qualname__}"] = sha256(text.encode()).hexdigest()
                else:
                    digests |= names.compute_code_digests(Path(inspect.getfile(owner)))
    return digests


def find_code_changes(files: RunFolder, experiment: Experiment) -> str:
    """Return a sentence if code of a run has changed since its start; "" otherwise."""
    recorded = read_environment(files).get(CODE)
    if not isinstance(recorded, Mapping):
        return ""
    now = compute_code_digests(experiment)
    for path in recorded.keys() - now.keys():
        now |= names.compute_code_digests(Path(path))
    changed = sorted(path for path, digest in recorded.items() if now.get(path, digest) != digest)
    if not changed:
        return ""
    return (
        f"{', '.join(one_line(path) for path in changed)}: this code has changed since {files.path} began. The new "
        "version is used, but the model may have been trained with the old one. Restore the code, or start a new run."
    )
