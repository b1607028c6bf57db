"""A node's own configuration file: the device, its budget, what it reports, and its data."""

from collections.abc import Mapping
from datetime import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fleetfit import files, names
from fleetfit.config.assemble import data as data_sets
from fleetfit.config.detect import detect_data
from fleetfit.config.load import is_budget_file, read_budget_file, resolve_tables
from fleetfit.config.parse import parse_section
from fleetfit.config.toml import read_toml
from fleetfit.core.nodes import NODE_NAME
from fleetfit.core.section import Count, NotNegative, OpenSection, Positive, Section, Unit
from fleetfit.cost import COSTS
from fleetfit.data import Data
from fleetfit.data.partition import partition
from fleetfit.errors import ConfigError, FleetFitError
from fleetfit.planner import Budget, find_budget_error, parse_amount

_NOT_OF_READER = ("name", "partition", "transform")


class NodePartition(OpenSection):
    """`[data] partition`: for trials, one client's part of a data set. Further keys are those of the kind.

    Attributes:
        kind: By default what the data are divided by in a simulation.
        clients: Number of parts.
        seed: Seed of the division.
    """

    kind: str | None = None
    clients: Count
    seed: Annotated[int, Field(ge=0)] = 0


class NodeData(OpenSection):
    """`[data]`: the node's own data. Further keys are the data set's own.

    Attributes:
        name: A built-in data set, or a function that returns a `fleetfit.Data`: "package.module:function" or
            "file.py:function".
        partition: Take one part of it only, divided as in a simulation.
        client: Which part.
    """

    name: str
    partition: NodePartition | None = None
    client: Annotated[int, Field(ge=0)] | None = None


class NodeSecure(Section):
    """`[secure]`: the node trains in secure rounds only (docs/trust.md).

    Attributes:
        member: The file that `fleetfit flower member` wrote for this node.
        min_clients: Members, at least, of a sum with this node's numbers; the server cannot lower it.
    """

    member: str
    min_clients: Annotated[int, Field(ge=2)] = 3


class NodePrivacy(Section):
    """`[policy] privacy`: the node takes part in runs with `[privacy]` only.

    Attributes:
        epsilon: That a run may spend, at most.
        delta: At which it is computed.
        clipping_norm: Of a run, at most.
    """

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    clipping_norm: Positive


class NodePolicy(Section):
    """`[policy]`: what the node's owner allows. A message outside of it is refused before the data are read.

    Attributes:
        approval: Whether each run must have been approved by `fleetfit flower approve`.
        methods: Names of methods that a run may have; any by default.
        models: Names of models that a run may have; any by default.
        privacy: Bounds of `[privacy]`; none by default.
        hours: When the node works, in the device's local time, such as "22:00-06:00".
        jobs_a_day: Jobs that it does in a day, at most.
        bytes_a_day: Bytes of all messages in a day, both ways, at most, such as "2 GB".
    """

    approval: bool = False
    methods: list[str] | None = None
    models: list[str] | None = None
    privacy: NodePrivacy | None = None
    hours: str | None = None
    jobs_a_day: Count | None = None
    bytes_a_day: str | None = None


class NodeSettings(Section):
    """A node's configuration.

    Attributes:
        name: Its name in reports and logs; letters, digits, dots, dashes.
        data: Its own data.
        budget: What it affords, as in `[fleet] groups`, or the .toml file that has it under `budget`; no limit by
            default.
        tolerance: How far a model may exceed the budget, as a fraction of it.
        reports_budget: Whether the server may know the budget; methods that choose a level for each client need it.
        reports_labels: Whether the server may know how many samples of each class there are.
        allow: Methods, models and single hooks of your own that the server may name:
            "package.module:function" or "file.py:function".
        device: "cpu", "cuda" or "cuda:N".
        threads: Threads for a job.
        memory_limit: Memory that a job may take, such as "300 MB": beyond it the job fails, and not the device.
        folder: Has the node's memory; "fleetfit-node/NAME" beside this file by default.
        model: Keys of the run's `[model]` that are different here, such as where a checkpoint lies.
        secure: Its key for secure rounds.
        policy: What the owner allows.
    """

    name: str
    data: NodeData
    budget: Positive | str | dict[str, Positive | Unit] | None = None
    tolerance: NotNegative = 0.1
    reports_budget: bool = True
    reports_labels: bool = False
    allow: list[str] = Field(default_factory=list)
    device: str = "cpu"
    threads: Count = 1
    memory_limit: Unit | None = None
    folder: str = "fleetfit-node"
    model: dict[str, Any] = Field(default_factory=dict)
    secure: NodeSecure | None = None
    policy: NodePolicy | None = None

    @property
    def limit_bytes(self) -> float | None:
        """The memory limit in bytes."""
        return None if self.memory_limit is None else parse_amount(self.memory_limit, "memory_bytes")


def read_settings(path: str | Path) -> NodeSettings:
    """Read a node's configuration file; relative paths in it are relative to its folder.

    Raises:
        ConfigError: An entry is wrong.
    """
    path = files.parse_path(path).resolve()
    folder = path.parent
    table = resolve_tables(read_toml(path), folder)
    if isinstance(table.get("data"), dict):  # a wrong path is an error before the fleet's transform is there
        detect_data({key: value for key, value in table["data"].items() if key != "transform"})
    try:
        settings = parse_section(NodeSettings, table)
        if "transform" in settings.data.settings:
            raise ConfigError(
                "[data] transform: a node gets it from the server. Set it in the run file.", key="data.transform"
            )
        if not NODE_NAME.fullmatch(settings.name):
            raise ConfigError(f'name: at most 60 letters, digits, dots and dashes, got "{settings.name}".', key="name")
        if (settings.data.partition is None) != (settings.data.client is None):
            raise ConfigError(
                "[data] partition and client go together: which part of which division is this node's?",
                key="data.client",
            )
        _ = settings.limit_bytes
        if settings.policy is not None:
            _check_policy(settings.policy)
        own_folder = settings.folder if "folder" in settings.model_fields_set else f"{settings.folder}/{settings.name}"
        changes: dict[str, Any] = {
            "allow": [names.make_absolute(name, folder) for name in settings.allow],
            "folder": str((folder / files.parse_path(own_folder)).resolve()),
        }
        if isinstance(settings.budget, str) and is_budget_file(settings.budget):
            changes |= read_budget_file(folder / files.parse_path(settings.budget))
        if settings.secure is not None:
            member = str((folder / files.parse_path(settings.secure.member)).resolve())
            changes["secure"] = settings.secure.model_copy(update={"member": member})
        settings = settings.model_copy(update=changes)
        _check_budget(settings.budget)
        return settings
    except FleetFitError as error:
        raise ConfigError(f"{path}: {error}", key=error.key, path=path) from None


def _check_policy(policy: NodePolicy) -> None:
    if policy.hours is not None:
        parse_hours(policy.hours)
    if policy.bytes_a_day is not None:
        try:
            parse_amount(policy.bytes_a_day, "memory_bytes")
        except FleetFitError:
            raise ConfigError(
                f'policy.bytes_a_day must be an amount such as "2 GB", got "{policy.bytes_a_day}".',
                key="policy.bytes_a_day",
            ) from None


def parse_hours(text: str) -> tuple[time, time]:
    """Return begin and end of "22:00-06:00".

    Raises:
        ConfigError: The text is of another form.
    """
    try:
        begin, end = (time.fromisoformat(part.strip()) for part in text.split("-"))
        if begin != end and not (begin.tzinfo or end.tzinfo):
            return begin, end
    except ValueError:
        pass
    raise ConfigError(
        f'policy.hours must be two different times such as "22:00-06:00", got "{text}".', key="policy.hours"
    )


def _check_budget(budget: Budget | None) -> None:
    if budget is None:
        return
    cost = next(iter(budget), "parameters") if isinstance(budget, Mapping) else "parameters"
    if isinstance(budget, str) and any(not find_budget_error(budget, name) for name in COSTS):
        return  # an amount with a unit, of the cost that the run chooses
    if problem := find_budget_error(budget, cost):
        raise ConfigError(f"budget: {problem}")


def load_data(settings: NodeSettings, transform: Path | None = None) -> Data:
    """Load the node's own data.

    Args:
        settings: The node's configuration.
        transform: The folder of the fleet's transform, which prepares the samples; None: the fleet has none.

    Raises:
        FleetFitError: They cannot be loaded, or do not fit the transform.
    """
    section, place = settings.data, None if transform is None else str(transform)
    division, client = section.partition, section.client
    table = {"name": section.name, **section.settings, **({} if place is None else {"transform": place})}
    keys = detect_data(
        table if division is None else {**table, "partition": {"clients": division.clients, **division.settings}}
    )
    own = {key: value for key, value in keys.items() if key not in _NOT_OF_READER}
    data = data_sets.load_data(keys["name"], own, place)
    if division is None or client is None:
        if keys["name"] == "plain_text":
            raise ConfigError(
                "[data] the tokens of a plain text are its own, so they differ from node to node. Use labeled texts.",
                key="data.name",
            )
        return data
    usual = "iid" if data.task in ("multi_label", "next_token") else "dirichlet"
    kind = division.kind or keys["partition"].get("kind", usual)
    parts = partition(data, kind, division.clients, division.seed, **division.settings)
    if client >= len(parts):
        raise ConfigError(
            f"[data] client: the division has clients 0 to {len(parts) - 1}, got {client}.", key="data.client"
        )
    return data.share(parts[client])
