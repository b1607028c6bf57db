"""Build the data set, its partition among the clients, and the server's own data from `[data]`."""

import contextlib
import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import Tensor

from fleetfit import files
from fleetfit.config.components import build_component, find_function
from fleetfit.config.detect import OWN_FILES, describe_data, sets_client_count
from fleetfit.config.schema import CLIENTS, MIN_COHORT, MIN_SAMPLES, DataSection, Experiment, ServerDataSection
from fleetfit.core import DataDescription
from fleetfit.data import AbsentData, Data, DataInMemory, drop_labels, partition
from fleetfit.data.transform import Transform
from fleetfit.errors import ConfigError, DataError, FleetFitError, format_cause, truncate

_MAX_SHARED = 2  # the data of a run and of its server
_SHARED: ContextVar[dict[str, Data] | None] = ContextVar("shared", default=None)
"""Loaded data sets by name and settings; the newest is last."""


@contextlib.contextmanager
def share_data() -> Iterator[None]:
    """Cache the last two data sets, so that consecutive runs load them once."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


def build_data(section: DataSection | ServerDataSection, where: str = "[data]", **settings: Any) -> Data:
    """Load the data set of a section.

    Args:
        section: The section.
        where: The section, for messages.
        **settings: Further settings of the data set.

    Raises:
        FleetFitError: The data set cannot be loaded.
    """
    shared = _SHARED.get()
    transform = getattr(section, "transform", None)
    try:
        key = json.dumps([section.name, section.settings | settings, transform], sort_keys=True)
    except TypeError:  # an object
        key = None
    if shared is None or key is None:
        return load_data(section.name, section.settings | settings, transform, where)
    data = shared.pop(key) if key in shared else load_data(section.name, section.settings | settings, transform, where)
    shared[key] = data
    while len(shared) > _MAX_SHARED:
        shared.pop(next(iter(shared)))
    return data


def load_data(name: Any, settings: Mapping[str, Any], transform: str | None = None, where: str = "[data]") -> Data:
    """Load a data set.

    Args:
        name: Its name, a function that returns it, data in memory, or the data set itself.
        settings: Its keys.
        transform: The folder whose transform prepares the samples; None: it is fitted to the training samples.
        where: The section, for messages.

    Raises:
        FleetFitError: The data set cannot be loaded, or does not fit the transform.
    """
    key = "data.name" if where == "[data]" else "data.server.name"
    stored = None if transform is None else Transform.load(transform)
    if isinstance(name, Data):
        data: Any = name
    elif isinstance(name, DataInMemory):
        data = name.load(settings, where)
    elif not isinstance(name, str) and not callable(name):
        raise ConfigError(f"data must be a name, a function or a fleetfit.Data, got {type(name).__name__}.", key=key)
    else:
        is_table = isinstance(name, str) and name == "table"
        try:
            if stored is not None:  # columns and tokens are chosen while the samples are read
                settings = {**_find_tokenizer(name, where, stored.tokenizer), **settings}
            data = build_component("data", name, where, settings, **({"transform": transform} if is_table else {}))
        except FleetFitError:
            raise
        except (OSError, ImportError) as error:
            raise ConfigError(f"{where} {name} failed: {format_cause(error)}", key=key) from error
    if not isinstance(data, Data):
        raise ConfigError(f"{where} {name} must return a fleetfit.Data, got {type(data).__name__}.", key=key)
    return data if stored is None else stored.convert(data)


def _find_tokenizer(name: Any, where: str, tokenizer: str) -> dict[str, str]:
    """Return the key of a tokenizer if there is one and the data set takes it."""
    takes = tokenizer and "tokenizer" in inspect.signature(find_function("data", name, where)[0]).parameters
    return {"tokenizer": tokenizer} if takes else {}


def build_partition(experiment: Experiment, data: Data) -> Sequence[Mapping[str, Tensor]]:
    """Return the splits of each client: by default 40 clients, fewer if a client would have under 30 samples."""
    _check_classes(data)
    section = experiment.data.partition
    clients = section.clients
    if clients is None and section.kind != "natural":
        clients = CLIENTS
        if has_data_sized_clients(experiment):
            samples = len(data.split("train"))
            enough = samples >= MIN_COHORT * MIN_SAMPLES
            clients = max(1, min(CLIENTS, samples // MIN_SAMPLES if enough else min(MIN_COHORT, samples)))
    seed = experiment.seed if section.seed is None else section.seed
    try:
        return partition(data, section.kind, clients, seed, **section.settings)
    except FleetFitError as error:
        if error.key in ("kind", "clients"):
            error.key = f"data.partition.{error.key}"
        raise


def _check_classes(data: Data) -> None:
    """Refuse training samples of a single class."""
    labels = data.y[data.split("train").to(data.y.device)]
    if data.task != "classification" or not len(labels) or bool((labels != labels[0]).any()):
        return
    name = data.class_names[int(labels[0])] if data.class_names else str(int(labels[0]))
    raise DataError(
        f'{data.name}: all {len(labels):,} training samples have one class, "{truncate(name)}", so there is nothing to '
        "learn. Expected at least two: a folder for the samples of each class, or a column with their labels "
        '(data.label = "...").',
        key="data",
    )


def has_data_sized_clients(experiment: Experiment) -> bool:
    """Return whether the number of clients follows from the size of the data."""
    section = experiment.data.partition
    return section.clients is None and section.kind != "natural" and sets_client_count(experiment.data.name)


def describe_data_files(experiment: Experiment, data: Data | DataDescription, clients: int) -> list[str]:
    """Describe data from the user's files, and the number of clients if it is below the default."""
    if not isinstance(data, Data) or isinstance(data, AbsentData):
        return []
    name = experiment.data.name
    is_own = isinstance(name, DataInMemory) or name in OWN_FILES
    own_notes = not is_own or data.columns  # a table's notes describe it
    notes = [
        *([] if own_notes else [describe_data(data, name, name == "images" and "size" in experiment.data.settings)]),
        *data.notes,
        *_describe_joined_labels(data.class_names),
    ]
    if clients < CLIENTS and has_data_sized_clients(experiment):
        notes.append(
            f"The data are small, so they are divided among {clients} clients. Set [data] partition.clients for "
            "another number."
        )
    return notes


def _describe_joined_labels(class_names: Sequence[str]) -> list[str]:
    """Describe classes such as "wind;rain", a part of which is in another class, too."""
    for mark in ";|,":
        parts = [{part.strip() for part in name.split(mark)} for name in class_names]
        counts = Counter(part for some in parts for part in some)
        joined = [name for name, some in zip(class_names, parts, strict=True) if mark in name]
        if any(counts[part.strip()] > 1 for name in joined for part in name.split(mark)):
            return [
                f'{len(joined)} of {len(class_names)} classes join labels with "{mark}", such as '
                f'"{truncate(joined[0])}". Each is learned as a class of its own. For several labels per sample, save '
                'the samples and a matrix of 0 and 1 as arrays (.npz) with task = "multi_label".'
            ]
    return []


# ---- the server's own data -----------------------------------------------------------------------------------------


def build_server_data(experiment: Experiment, data: Data | DataDescription) -> Data:
    """Load the server's own data, without labels.

    Texts use the clients' tokenizer, unless the section names another.

    Args:
        experiment: The run.
        data: The clients' data.

    Raises:
        FleetFitError: The data cannot be loaded, or do not fit a model for the clients' data.
    """
    section = experiment.data.server
    assert section is not None
    settings: dict[str, str] = {}
    if "tokenizer" not in section.settings and not isinstance(section.name, Data):
        tokenizer = experiment.data.settings.get("tokenizer") or data.tokenizer
        settings = _find_tokenizer(section.name, "[data] server", tokenizer)
    server_data = build_data(section, "[data] server", **settings)
    _check_server_data(data, server_data)
    return drop_labels(server_data, experiment.seed)


def _check_server_data(data: Data | DataDescription, server: Data) -> None:
    if server.sample_shape != data.sample_shape:
        raise ConfigError(
            f"[data] server: a sample of {server.name} is {list(server.sample_shape)} and one of the clients' "
            f"{data.name} is {list(data.sample_shape)}; they must be equal. Set resize for images, length for texts.",
            key="data.server",
        )
    if data.tokenizer and server.tokenizer:
        texts = [files.read_text(Path(file), ConfigError) for file in (data.tokenizer, server.tokenizer)]
        if texts[0] != texts[1]:
            raise ConfigError(
                f"[data] server: {server.name} and the clients' {data.name} have different tokenizers. Set the same "
                "tokenizer for both, or none for the server.",
                key="data.server.tokenizer",
            )
    ours, theirs = (data.vocabulary, data.padding), (server.vocabulary, server.padding)
    if ours != theirs:
        raise ConfigError(
            f"[data] server: {server.name} has {theirs[0]} tokens and padding {theirs[1]}, the clients' {data.name} "
            f"{ours[0]} and {ours[1]}. Token ids must agree: set the same tokenizer for both.",
            key="data.server",
        )
