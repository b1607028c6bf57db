"""Implement the methods of `Run` on trained models: predict, evaluate, calibrate, prepare an export."""

import contextlib
import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, cast

import torch
from torch import nn

from fleetfit import evaluation, inference, names
from fleetfit.anatomy import make_input
from fleetfit.anatomy.exits import ModuleWithExits
from fleetfit.config import Assembly, Experiment
from fleetfit.config.assemble.data import load_data
from fleetfit.config.assemble.levels import find_counted_submodel
from fleetfit.config.assemble.rounds import build_settings
from fleetfit.config.assemble.run import assemble
from fleetfit.config.dump import dump_experiment
from fleetfit.config.load import restore_experiment
from fleetfit.config.schema import DataSection
from fleetfit.core import DataDescription, Device, Level, Server
from fleetfit.cost import submodel_cost
from fleetfit.data import AbsentData, Data
from fleetfit.data.files.folders import resolve_folder
from fleetfit.data.files.memory import ACCEPTED, read_memory
from fleetfit.data.splits import SPLITS
from fleetfit.data.transform import FILE, KINDS, Transform
from fleetfit.errors import ConfigError, ModelError, PlanError, RunError, did_you_mean, quote_some, truncate
from fleetfit.inference import Calibration, Measure, Mode, Scores
from fleetfit.inference.export import LevelModel
from fleetfit.inference.export.prior import Counts, make_offset
from fleetfit.planner import Amount, parse_amount
from fleetfit.report.text import exit_names
from fleetfit.runs.data import load_transform
from fleetfit.runs.folder import RunFolder
from fleetfit.training.runtime import prepare_model

LevelName = int | str | None
"""1..L or a level's name; None for the largest that a client trains."""
_OF_OTHER_DATA = ("split", "batch_size", "batch_norm", "samples", "metrics")
ON_NODES = "this run's data are on the nodes of a fleet. Name data of the same shape on this machine"


class TrainedRun(Protocol):
    """The part of `fleetfit.Run` that inference needs: `fleetfit.api.results` imports this module."""

    files: RunFolder
    experiment: Experiment
    _models: dict[str, nn.Module]  # of levels, for predictions

    @property
    def folder(self) -> Path:
        """The run folder."""
        ...

    @property
    def assembly(self) -> Assembly:
        """The objects of the run."""
        ...

    @property
    def checkpoint(self) -> Mapping[str, Any]:
        """The newest checkpoint."""
        ...

    @property
    def server(self) -> Server:
        """The server after the last round with a checkpoint."""
        ...


# ---- levels and their models -----------------------------------------------------------------------------------------


def find_level(run: TrainedRun, level: LevelName) -> Level:
    """Return a level of the run.

    Raises:
        ConfigError: The level is unknown.
    """
    federation = run.assembly.federation
    levels = {entry.name: entry for entry in federation.levels}
    level_names = list(levels)
    name = level_names[evaluation.find_top_level(federation)] if level is None else str(level)
    is_named = any(map(str.isdecimal, level_names))  # by numbers, of which a run that dropped a level lacks some
    if not is_named and name.isdecimal() and 1 <= int(name) <= len(level_names):
        name = level_names[int(name) - 1]
    if name not in levels:
        raise ConfigError(f"no such level: {level}. The levels of this run are {', '.join(level_names)}.", key="level")
    return levels[name]


def check_early_exits(run: TrainedRun, level: Level) -> None:
    """Check that samples can leave a level's model early.

    Raises:
        ConfigError: The level has one exit.
    """
    if len(level.submodel.exits) < 2:
        others = [one.name for one in run.assembly.federation.levels if len(one.submodel.exits) > 1]
        advice = f"Levels that can: {', '.join(others)}" if others else "No level of this run can"
        raise ConfigError(f"level {level.name} has one exit and cannot stop early. {advice}.", key="level")


def build_level_module(run: TrainedRun, level: LevelName) -> nn.Module:
    """Return a level's model in eval mode, with the statistics of its last evaluation or new ones.

    In a run with one exit, the levels of a plain module return what it returns: logits, not a list of them.
    """
    assembly, name = run.assembly, find_level(run, level).name
    index = [entry.name for entry in assembly.federation.levels].index(name)
    if index > evaluation.find_top_level(assembly.federation):
        logging.getLogger("fleetfit").warning("No client trained all of level %s: it is above their budgets.", name)
    statistics = _find_statistics(run, [index]) if evaluation.has_batch_norm(assembly.federation) else None
    module = evaluation.build_level_module(assembly.federation, run.server, index, statistics)
    if isinstance(module, ModuleWithExits):
        module.returns_list = len(assembly.federation.problem.exits) > 1
    return module


def _find_statistics(run: TrainedRun, levels: Sequence[int]) -> evaluation.Statistics:
    """Return the batch-norm statistics of levels: those of the last evaluation, or new ones.

    Raises:
        RunError: A level has none, and no client could measure them.
    """
    assembly, statistics = run.assembly, run.checkpoint["statistics"] or {}
    if missing := [index for index in levels if index not in statistics]:
        with contextlib.closing(assembly.engine()) as engine:
            scope = assembly.settings.scope
            new, _ = evaluation.estimate_statistics(assembly.federation, engine, run.server, scope, missing)
        statistics = {**statistics, **new}
    for index in levels:
        if index not in statistics:
            name = assembly.federation.levels[index].name
            raise RunError(f"level {name} has no batch-norm statistics: no client could measure them.")
    return statistics


def load_model(run: TrainedRun, level: LevelName) -> nn.Module:
    """Return a level's model for predictions. It is cached, and computes as the run's evaluations do."""
    entry = find_level(run, level)
    if entry.name not in run._models:
        arithmetic = run.assembly.federation.problem.get_arithmetic(entry.submodel)
        run._models[entry.name] = prepare_model(build_level_module(run, entry.name), arithmetic, torch.device("cpu"))
    return run._models[entry.name]


# ---- data: the run's, and others -------------------------------------------------------------------------------------


def select_data(
    run: TrainedRun, client: int | None, data: Any = None, labels: bool = True, halves: bool = False
) -> Data:
    """Return the run's data, one client's share of it, or other data like them.

    Args:
        run: The run.
        client: The client; all by default.
        data: Other data in place of the run's, in a form of `load_samples`.
        labels: Whether the other data need labels.
        halves: As of `load_samples`.

    Raises:
        ConfigError: The client is unknown, the other data do not fit, or the data are on the nodes of a fleet.
    """
    assembly = run.assembly
    if data is not None:
        if client is not None:
            raise ConfigError("a client only has a part of the run's own data. Leave out client or data.", key="client")
        return check_other_data(run, load_samples(run, data, halves), labels)
    if isinstance(assembly.data, AbsentData):
        raise assembly.data.make_error()
    if isinstance(assembly.data, DataDescription) or assembly.simulation is None:
        raise ConfigError(f"{ON_NODES}: --data NAME, or data=... in Python.", key="data")
    if client is None:
        return assembly.data
    count = len(assembly.simulation.parts)
    if not isinstance(client, SupportsIndex) or not 0 <= client < count:
        raise ConfigError(f"no such client: {client!r}. The clients of this run are 0 to {count - 1}.", key="client")
    return assembly.data.share(assembly.simulation.parts[client])


def check_other_data(run: TrainedRun, data: Data, labels: bool = True) -> Data:
    """Check data against the run's samples and classes, and return them with labels as the run has them.

    Args:
        run: The run.
        data: The data.
        labels: Whether the data need labels.

    Raises:
        ConfigError: Samples or classes differ, or labels are missing.
        DataError: A class has another name.
    """
    run_data = run.assembly.data
    kind, expected = ((d.task, d.sample_shape, d.classes, d.vocabulary) for d in (data, run_data))
    if kind != expected:
        raise ConfigError(
            f"{data.name} has {_describe_shape(data)}, but the run was trained on {_describe_shape(run_data)}.",
            key="data",
        )
    if labels and data.labeled_rows is not None:
        rows = data.labeled_rows
        logging.getLogger("fleetfit").warning(
            "%s: %d of %d samples have no label and are left out.", data.name, len(data.y) - len(rows), len(data.y)
        )
        splits = {name: data.split(name)[torch.isin(data.split(name), rows)] for name in SPLITS}
        data = replace(data, splits=splits, labeled=True, labeled_rows=None)
    if labels and not data.labeled:
        raise ConfigError(
            f"{data.name} lacks labels of some or all samples, so accuracy cannot be measured. Use predict, which "
            "needs none.",
            key="data",
        )
    return _convert_labels(run, data)


def _describe_shape(data: Data | DataDescription) -> str:
    tokens = f", {data.vocabulary} tokens" if data.vocabulary else ""
    return f"samples {list(data.sample_shape)}, {data.classes} classes{tokens} ({data.task.replace('_', ' ')})"


def _convert_labels(run: TrainedRun, data: Data) -> Data:
    """Return data with the order of the run's classes, or the scale of its targets; warn of another normalization."""
    is_regression, is_known = data.task == "regression", run.files.has(FILE)
    if run.assembly.data is data or not (is_known or is_regression):
        return data
    transform = find_transform(run)
    ours, theirs = ((one.mean, one.std) for one in (transform, data))
    if is_known and ours != theirs and f"torch.{transform.dtype}" == str(data.x.dtype):
        logging.getLogger("fleetfit").warning(
            "%s is normalized with mean %s and std %s, but the training data with mean %s and std %s. Predictions may "
            "be wrong.",
            data.name, *theirs, *ours,
        )  # fmt: skip
    if is_regression:
        return replace(data, targets=transform.targets)
    is_comparable = data.task == "classification" and len(data.class_names) == len(transform.class_names)
    if not data.class_names or not is_comparable:
        return data
    return replace(data, y=transform.convert_classes(data), class_names=transform.class_names)


def load_samples(run: TrainedRun, data: Any, halves: bool = False) -> Data:
    """Return data in any form that a run takes, as its model takes them; labels may be missing.

    All samples are test samples, unless the data have a test set.

    Args:
        run: The run.
        data: A path in the format of the training data, a data set's name, a function that returns one, a
            `fleetfit.Data`, a table, texts, arrays or tensors without labels or in a pair with them, a torch Dataset or
            DataLoader.
        halves: Whether to use one half for validation if there are no splits, as calibration needs.

    Raises:
        FleetFitError: The data set is unknown, or the data have another format than the run's.
    """
    if _is_data_set(data):
        section = _make_section(run, data)
        keys = {key: value for key, value in section.items() if key not in DataSection.model_fields}
        return load_data(section["name"], keys, section.get("transform"))
    _check_reader_keys(run, data)
    data = _get_name(data)
    if isinstance(data, Data):
        return data
    if isinstance(data, str | Path):
        path = resolve_folder(str(data))
        if path.exists():
            return find_transform(run).apply(path, halves)
        texts = f" In Python, texts are a list: [{json.dumps(truncate(data), ensure_ascii=False)}]."
        raise ConfigError(
            f"data: no such file or folder: {path}; nor is there such a data set."
            f"{did_you_mean(str(data), names.list_names('data'))}{texts * (find_transform(run).kind == 'text')}",
            key="data",
        )
    memory = read_memory(data, labeled=False)
    if memory is None:
        raise ConfigError(f"data: got a {type(data).__name__}. Accepted are {ACCEPTED}.", key="data")
    facts = run.assembly.data
    if isinstance(facts, DataDescription) and facts.stored.endswith("standardized") and not run.files.has(FILE):
        raise ConfigError(
            "each node of this run standardized its samples by its own means, and the server has none: pass a path or "
            "the name of a data set, whose means are taken, or train with [data] transform.",
            key="data",
        )
    return find_transform(run).apply(memory, halves)


def _check_reader_keys(run: TrainedRun, data: Any) -> None:
    """Refuse keys beside data that would read them otherwise than the run's own."""
    if not isinstance(data, Mapping) or _get_name(data) is data:
        return
    own = {**DataSection.model_fields, "path": 0, "folder": 0, "file": 0}
    used = run.experiment.data.settings
    for key, value in data.items():
        if key not in own and (key not in used or str(used[key]) != str(value)):  # arrays have no one truth
            raise ConfigError(
                f"data.{key} has no effect: other data are read as the run's own were. Leave it out.",
                key=f"data.{key}",
            )


def _is_data_set(data: Any) -> bool:
    """Return whether data are a name of a data set, a function that returns one, or keys with either."""
    name = _get_name(data)
    if isinstance(name, str):
        return ":" in name or names.match_name("data", name) in names.list_names("data")
    return inspect.isroutine(name)


def _get_name(data: Any) -> Any:
    """Return what keys of `[data]` name: a path, also beside its reader, else the name; other data as they are."""
    if not isinstance(data, Mapping) or data.keys().isdisjoint(("path", "name")):
        return data
    places = ("path", "folder", "file") if _reads_files(data.get("name")) else ("path",)
    return next((data[key] for key in places if key in data), data.get("name"))


def _reads_files(name: Any) -> bool:
    """Return whether a name is that of a reader of the user's files."""
    return isinstance(name, str) and names.match_name("data", name) in KINDS


def _make_section(run: TrainedRun, data: Any) -> dict[str, Any]:
    """Return the keys of `[data]` for a data set; the run's transform prepares its own set and a user's files."""
    section = dict(data) if isinstance(data, Mapping) else {"name": data}
    is_own = names.match_name("data", section["name"]) == run.experiment.data.name
    has_transform = (is_own or _reads_files(section["name"])) and run.files.has(FILE)
    return {"transform": str(run.folder), **section} if has_transform else section


def find_transform(run: TrainedRun) -> Transform:
    """Return how other samples become those of the run; of a fleet without a transform only their shape and task."""
    data = run.assembly.data
    if run.files.has(FILE) or not isinstance(data, DataDescription):
        return load_transform(run.files)
    return Transform(
        name=data.name,
        task=data.task,
        shape=data.sample_shape,
        dtype=data.stored.partition(" ")[0] or ("int64" if data.vocabulary else "float32"),
        classes=data.classes,
        vocabulary=data.vocabulary,
        padding=data.padding,
    )


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate_run(run: TrainedRun, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an evaluation of the newest checkpoint, with changed sections of the run file.

    Raises:
        ConfigError: The data are on the nodes of a fleet and no other data are named, or the named data do not fit.
        DataError: The split has no samples.
        ModelError: The state does not fit the model that the data need.
    """
    assembly, section, data = run.assembly, sections.get("data"), None
    is_divided = isinstance(section, Mapping) and "partition" in section and _is_data_set(section.get("name"))
    is_set = is_divided or _is_data_set(section)
    has_clients = assembly.simulation is not None and (is_set or isinstance(_get_name(section), Data))
    if section is not None and not has_clients:
        data = load_samples(run, section)
    elif assembly.simulation is None:
        if isinstance(assembly.data, AbsentData):
            raise assembly.data.make_error()
        raise ConfigError(f"{ON_NODES}: fleetfit eval {run.folder} --data NAME, or run.evaluate(data=...).", key="data")
    if data is not None:
        return _evaluate_other_data(run, data, {key: value for key, value in sections.items() if key != "data"})
    if isinstance(sections.get("data"), Data):
        sections = {**sections, "data": _convert_labels(run, sections["data"])}
    elif is_set:
        sections = {**sections, "data": _make_section(run, section)}
    if sections:
        assembly = assemble(_change_experiment(run, sections), run.files.load_base() or None)
        if isinstance(assembly.data, Data):
            evaluation.check_samples(assembly.data, assembly.settings.scope.evaluation.split)
    layout, other_layout = (one.federation.problem.layout for one in (run.assembly, assembly))
    if layout.shapes({}, layout.exits) != other_layout.shapes({}, other_layout.exits):
        raise ModelError(
            f"the model was trained on {run.assembly.data.name}, {_describe_shape(run.assembly.data)}, and does not "
            f"fit {assembly.data.name}, {_describe_shape(assembly.data)}: shapes of its tensors differ."
        )
    with contextlib.closing(assembly.engine()) as engine:
        engine.load_memories(run.checkpoint["clients"])
        columns, _ = evaluation.evaluate(assembly.federation, engine, run.server, assembly.settings.scope)
    return columns


def _evaluate_other_data(run: TrainedRun, data: Data, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of each trained level on data that are not divided among clients."""
    scope, federation = build_settings(_change_experiment(run, sections)).scope, run.assembly.federation
    changes = sections.get("evaluate", {})
    unused = [key for key in sections if key != "evaluate"]
    unused += [f"evaluate.{key}" for key in changes if key not in _OF_OTHER_DATA]
    if unused:
        raise ConfigError(
            f"{quote_some(unused)}: no effect on other data, which are not divided among clients. Keys of [evaluate] "
            f"that have one are {', '.join(_OF_OTHER_DATA)}.",
            key=unused[0],
        )
    device = Device(federation.problem, check_other_data(run, data), accelerator=torch.device("cpu"))
    statistics = run.checkpoint["statistics"] or {}
    is_complete = statistics and run.assembly.simulation is None  # nodes measure no more
    if "static" in scope.norms and evaluation.has_batch_norm(federation) and not is_complete:
        statistics = _find_statistics(run, range(evaluation.find_top_level(federation) + 1))
    scope = replace(scope, samples=changes.get("samples"))  # the run's own number is of its own test set
    return evaluation.evaluate_on_device(federation, run.server, scope, device, statistics)


def _change_experiment(run: TrainedRun, sections: Mapping[str, Any]) -> Experiment:
    table = dump_experiment(run.experiment)
    if "evaluate" in table:  # nothing trains, so nothing stops early
        table["evaluate"] = {key: value for key, value in table["evaluate"].items() if key != "patience"}
    return restore_experiment(table, **sections)


def compute_scores(run: TrainedRun, level: LevelName, split: str, client: int | None, data: Any = None) -> Scores:
    """Return the logits of a level's exits for a split of the run's data, of a client's data, or of other data."""
    return inference.compute_scores(load_model(run, level), select_data(run, client, data), split)


def best_exit(run: TrainedRun, level: LevelName, client: int | None) -> int:
    """Return the exit (from 1) with the highest validation accuracy; the shallowest on a tie."""
    accuracies = compute_scores(run, level, "validation", client).accuracies
    return 1 + accuracies.index(max(accuracies))


# ---- early stopping --------------------------------------------------------------------------------------------------


def calibrate(
    run: TrainedRun, level: LevelName, budget: Amount, cost: str, mode: Mode, measure: Measure, temperature: bool,
    client: int | None, data: Any = None,
) -> Calibration:  # fmt: skip
    """Choose thresholds of early stopping, evaluate them on test samples, and save those of all clients."""
    data, entry = select_data(run, client, data, halves=True), find_level(run, level)
    check_early_exits(run, entry)
    validation, test = (
        inference.compute_scores(load_model(run, level), data, split) for split in ("validation", "test")
    )
    costs = compute_exit_costs(run, level, cost, data)
    limit = parse_budget(budget, cost, costs)
    calibration = inference.calibrate(entry.name, validation, test, costs, limit, cost, mode, measure, temperature)
    problem = run.assembly.federation.problem
    model_cost = submodel_cost(problem.architecture, find_counted_submodel(problem, entry), problem.input_shape)
    calibration = replace(
        calibration,
        exits=tuple(exit_names(entry.submodel.exits, problem.exits)),
        level_cost=float(model_cost.multiply_adds) if cost == "multiply_adds" else None,
    )
    if client is None:
        numbers = {"round": run.server.round, "data": data.name, **calibration.numbers()}
        run.files.write(calibration_file(entry.name), json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        calibration = replace(calibration, file=run.folder / calibration_file(entry.name))
    return calibration


def calibration_file(level: str) -> str:
    """Return the file name of a level's calibration in a run folder."""
    return f"inference/level-{level}.json"


def load_calibration(run: TrainedRun, level: LevelName) -> Mapping[str, Any] | None:
    """Read the calibration of a level; None if there is none.

    Raises:
        ConfigError: It is damaged, or of the model of another round.
    """
    entry = find_level(run, level)
    name = calibration_file(entry.name)
    path = run.folder / name
    if not run.files.has(name):
        return None
    numbers = run.files.json(name)
    try:
        inference.check_calibration(numbers, len(entry.submodel.exits))
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged: {error}. Calibrate again.", key=getattr(error, "key", None), path=path
        ) from None
    if numbers["round"] != run.server.round:
        raise ConfigError(
            f"{path} was calibrated after round {numbers['round']}, but the model is of round {run.server.round}. "
            "Calibrate again, or remove the file.",
            path=path,
        )
    return cast(Mapping[str, Any], numbers)


def compute_exit_costs(run: TrainedRun, level: LevelName, cost: str, data: Data) -> list[float]:
    """Return the cost of a sample that stops at each exit of a level [E].

    Raises:
        ConfigError: The cost is unknown.
    """
    if cost not in inference.COSTS:
        raise ConfigError(
            f'no such cost of a prediction: "{cost}". The costs are '
            f"{' and '.join(inference.COSTS)}.{did_you_mean(cost, inference.COSTS)}",
            key="cost",
        )
    problem = run.assembly.federation.problem
    if cost == "latency_s":
        rng = torch.Generator().manual_seed(0)
        x = make_input(problem.architecture, data.sample_shape, 1, rng)  # texts have their full length
        return inference.measure_exit_latencies(load_model(run, level), x)
    submodel = find_level(run, level).submodel
    sizes = {**problem.layout.full_sizes, **submodel.sizes}
    return inference.exit_costs(problem.architecture, sizes, submodel.exits, problem.input_shape)


def compute_last_cost(run: TrainedRun, level: Level) -> float:
    """Return the multiply-adds of a sample at a level's last exit, without the classifiers of earlier ones."""
    problem, submodel = run.assembly.federation.problem, level.submodel
    sizes = {**problem.layout.full_sizes, **submodel.sizes}
    return float(submodel_cost(problem.architecture, (sizes, submodel.exits[-1:]), problem.input_shape).multiply_adds)


def find_budget_cost(budget: float | str | None) -> str:
    """Return the cost for the unit of a budget: "35 ms" is a latency."""
    is_time = isinstance(budget, str) and re.search(r"[\d.\s][mu]?s\s*$", budget)
    return "latency_s" if is_time else "multiply_adds"


def parse_budget(budget: Amount, cost: str, costs: list[float]) -> float:
    """Return a budget in the unit of the costs. A number up to 1 is a fraction of the last exit's cost.

    Raises:
        ConfigError: It is not an amount, or not between the costs of the first and the last exit.
    """
    if isinstance(budget, str) and cost == "multiply_adds" and budget.strip().endswith("multiply-adds"):
        budget = budget.strip().removesuffix("multiply-adds")
        with contextlib.suppress(ValueError):
            budget = float(budget)
    try:
        amount = parse_amount(budget, cost) if isinstance(budget, str) else float(budget)
    except PlanError as error:
        raise ConfigError(
            f"{error} A fraction of the last exit's cost is a number up to 1: 0.75 is 75%.",
            key="budget",
            path=error.path,
        ) from None
    except (TypeError, ValueError):
        raise ConfigError(
            f'a budget must be a number, or text with a unit such as "35 ms"; got {budget!r}.', key="budget"
        ) from None
    if not amount > 0:
        raise ConfigError(f"a budget must be above 0, got {budget}.", key="budget")
    is_fraction = not isinstance(budget, str) and amount <= 1
    limit = amount * costs[-1] if is_fraction else amount
    if costs[0] * (1 - 1e-9) <= limit <= costs[-1] * (1 + 1e-9):
        return limit
    fraction = f"{_round(costs[0] / costs[-1], math.ceil)} to 1, a fraction of the last exit's cost"
    if isinstance(budget, str):
        unit = budget.lstrip(" 0123456789.eE+-").strip()
        scale = parse_amount(f"1 {unit}", cost)
    else:
        unit, scale = ("s" if cost == "latency_s" else "multiply-adds"), 1.0
    bounds = f", or {_round(costs[0] / scale, math.ceil)} to {_round(costs[-1] / scale, math.floor)} {unit}"
    is_percentage = not isinstance(budget, str) and 1 < amount <= 100
    raise ConfigError(
        f"a budget of {budget} is {'below the first' if limit < costs[0] else 'above the last'} exit's cost. Set "
        f"{fraction}{'' if is_fraction else bounds}."
        f"{f' For {amount:g}% write {amount / 100:g}.' if is_percentage else ''}",
        key="budget",
    )


def _round(value: float, whole: Callable[[float], int]) -> str:
    """Return a number with at least three digits, rounded up by `math.ceil` or down by `math.floor`."""
    decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{whole(value * 10**decimals) / 10**decimals:.{decimals}f}"


# ---- export ----------------------------------------------------------------------------------------------------------


def prepare_export(
    run: TrainedRun, level: LevelName, data: Any, prior: Counts | str | Path | None = None
) -> LevelModel:
    """Return a level's model with the facts for an export.

    Args:
        run: The run.
        level: 1..L, or its name.
        data: Source of validation and test samples, as of `select_data`; the run's data by default. Preprocessing is
            the run's, unless these samples have another one.
        prior: Counts of a client's labels, a JSON file with them, or "own" for those of `data`.
    """
    experiment, federation, entry = run.experiment, run.assembly.federation, find_level(run, level)
    architecture, exits = federation.problem.architecture, entry.submodel.exits
    sizes = {**federation.problem.layout.full_sizes, **entry.submodel.sizes}
    calibration, transform = load_calibration(run, level), find_transform(run) if run.files.has(FILE) else None
    if data is not None:
        data = check_other_data(run, load_samples(run, data, halves=True))
    if data is not None and (transform is None or not transform.has_prepared(data)):
        transform = Transform.fit(data, "", {})
    known = run.assembly.data if transform is None else transform.describe("")
    facts = {
        "model": names.get_short_name(experiment.model.name),
        "method": names.get_short_name(experiment.method.name),
        "trained": f"{run.server.round} rounds, {len(federation.clients)} clients, seed {experiment.seed}",
        "costs": inference.exit_costs(architecture, sizes, exits, federation.problem.input_shape),
        "calibration": calibration,
    }
    return LevelModel(
        entry.name,
        architecture,
        sizes,
        exits,
        build_level_module(run, level),
        run.assembly.data if data is None else data,
        None if calibration is None else inference.read_policy(calibration),
        facts,
        None if prior is None else make_offset(prior, run.server.prior, known, data),
        transform,
    )
