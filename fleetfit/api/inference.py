"""What the methods of a `Run` do with its trained models: predict, evaluate, calibrate, prepare an export."""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fleetfit import evaluate, inference, names
from fleetfit.api.metadata import COLUMNS, short_name
from fleetfit.api.progress import RunLike
from fleetfit.config import Assembly, Experiment, assemble, load_experiment
from fleetfit.config.build.data import build_data
from fleetfit.config.build.levels import find_counted_submodel
from fleetfit.config.build.rounds import build_settings
from fleetfit.config.defaults import detect_data_source
from fleetfit.config.dump import dump_with_defaults
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.data.files.arrays import prepare_arrays
from fleetfit.data.files.folders import resolve_folder
from fleetfit.data.files.memory import Samples, TableSplits, read_memory
from fleetfit.data.files.table import encode_rows, encode_table
from fleetfit.data.splits import SPLITS
from fleetfit.errors import ConfigError, ModelError, PlanError, RunError, did_you_mean
from fleetfit.factories import call_factory
from fleetfit.inference import Calibration, Measure, Mode, Scores
from fleetfit.inference.export import LevelModel
from fleetfit.layout import some_input
from fleetfit.planner import Amount, absolute
from fleetfit.records import RunFolder
from fleetfit.report.text import exit_names
from fleetfit.training.runtime import prepare_model
from fleetfit.values import DataDescription, Device, Level, Server

LevelName = int | str | None
"""1..L or a level's name; None for the largest."""
ON_NODES = "this run's data are on the nodes of a fleet. Name data of the same shape that are on this machine"
_PLAIN_TEXT = "plain_text"  # the only kind of files without a test set of its own: the end of each file is one


class TrainedRun(RunLike, Protocol):
    """The part of `fleetfit.Run` that inference needs; `fleetfit.api.results` imports this module."""

    files: RunFolder
    _models: dict[str, nn.Module]  # of levels, for predictions

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
        """The server after the last round that has a checkpoint."""
        ...


# ---- levels and their models -----------------------------------------------------------------------------------------


def find_level(run: TrainedRun, level: LevelName) -> Level:
    """Return a level of the run.

    Raises:
        ConfigError: There is no such level.
    """
    levels = {entry.name: entry for entry in run.assembly.federation.levels}
    known = list(levels)
    name = known[-1] if level is None else str(level)
    if name not in levels and name.isdecimal() and 1 <= int(name) <= len(known):
        name = known[int(name) - 1]
    if name not in levels:
        raise ConfigError(f"this run has levels {', '.join(known)}; there is no level {level}.", key="level")
    return levels[name]


def build_level_module(run: TrainedRun, level: LevelName) -> nn.Module:
    """Return a level's model in eval mode, with the statistics of its last evaluation, or new ones if it has none."""
    assembly, name = run.assembly, find_level(run, level).name
    index = [entry.name for entry in assembly.federation.levels].index(name)
    statistics = run.checkpoint["statistics"] or {}
    if index not in statistics and evaluate.has_batch_norm(assembly.federation):
        with contextlib.closing(assembly.engine()) as engine:
            wanted = assembly.settings.wanted
            statistics, _ = evaluate.statistics(assembly.federation, engine, run.server, wanted, [index])
        if index not in statistics:
            raise RunError(f"there are no batch-norm statistics for level {name}: no client could measure them.")
    return evaluate.level_module(assembly.federation, run.server, index, statistics)


def load_model(run: TrainedRun, level: LevelName) -> nn.Module:
    """Return a level's model for predictions, the same object each time; it computes as the run's evaluations do."""
    entry = find_level(run, level)
    if entry.name not in run._models:
        arithmetic = run.assembly.federation.problem.arithmetic_of(entry.submodel)
        run._models[entry.name] = prepare_model(build_level_module(run, entry.name), arithmetic, torch.device("cpu"))
    return run._models[entry.name]


def check_samples(run: TrainedRun, x: Any) -> Tensor:
    """Return samples as a model of the run takes them.

    Raises:
        ConfigError: They are not a tensor, or of another shape or type than the run's samples.
    """
    data = run.assembly.data
    shape, are_tokens = tuple(data.sample_shape), data.vocabulary > 0
    if not isinstance(x, Tensor):
        raise ConfigError(f"x must be a torch.Tensor of samples {list(shape)}, got {type(x).__name__}.", key="x")
    fits = x.ndim == len(shape) + 1 if are_tokens else tuple(x.shape[1:]) == shape
    if not fits or x.is_floating_point() is are_tokens:
        kind = "token ids, int64" if are_tokens else "floats, as Data.batch returns them"
        raise ConfigError(
            f"x must be samples [B, {', '.join(map(str, shape))}] of {kind}; got {list(x.shape)} of "
            f"{str(x.dtype).removeprefix('torch.')}.",
            key="x",
        )
    return x if are_tokens else x.float()


# ---- data: the run's, and others -------------------------------------------------------------------------------------


def select_data(run: TrainedRun, client: int | None, data: Data | None = None, labels: bool = True) -> Data:
    """Return the run's data, one client's share of it, or other data of the same shape.

    Args:
        run: The run.
        client: Whose share; all by default.
        data: Other data, in place of the run's.
        labels: Whether these need labels.

    Raises:
        ConfigError: There is no such client, the other data do not fit, or the data are on the nodes of a fleet.
    """
    assembly = run.assembly
    if data is not None:
        if client is not None:
            raise ConfigError(
                "a client has a share of the run's own data only; leave the client or the data out.", key="client"
            )
        return check_other_data(run, data, labels)
    if isinstance(assembly.data, DataDescription) or assembly.simulation is None:
        raise ConfigError(f"{ON_NODES}: --data NAME, or data=... in Python.", key="data")
    if client is None:
        return assembly.data
    count = len(assembly.simulation.parts)
    if not 0 <= client < count:
        raise ConfigError(f"this run has clients 0 to {count - 1}; there is no client {client}.", key="client")
    return assembly.data.share(assembly.simulation.parts[client])


def check_other_data(run: TrainedRun, data: Any, labels: bool = True) -> Data:
    """Return data with the run's kind of samples and classes, its targets in the unit of the run's.

    Args:
        run: The run.
        data: The data.
        labels: Whether they need labels.

    Raises:
        ConfigError: Samples or classes are different, or there are no labels.
    """
    own = run.assembly.data
    if not isinstance(data, Data):
        raise ConfigError(f"data must be a fleetfit.Data, got {type(data).__name__}.", key="data")
    kind, expected = ((d.task, d.sample_shape, d.classes, d.vocabulary) for d in (data, own))
    if kind != expected:
        raise ConfigError(
            f"{data!r} does not fit a model for {own.task} of samples {list(own.sample_shape)}, {own.classes} "
            f"classes{f' and {own.vocabulary} tokens' if own.vocabulary else ''}.",
            key="data",
        )
    if labels and not data.labelled:
        raise ConfigError(
            f"{data.name} has no labels, so nothing can be measured on it; predict does without them.", key="data"
        )
    return _rescale_targets(own, data)


def _rescale_targets(own: Any, data: Data) -> Data:
    """Return data whose targets are scaled like those of a run's data, which its model was trained on."""
    if data.task != "regression" or not isinstance(own, Data) or own is data:
        return data
    return replace(data, targets=tuple(tuple(moment.tolist()) for moment in own.target_scale))


def load_other_data(run: TrainedRun, name: str, halves: bool = False) -> Data:
    """Return the data that `--data` names: a data set, or a file or folder of the kind that the run was trained on.

    Files are prepared like the run's data: a table by its `columns.json`, arrays and images with its means. All samples
    are for testing, unless there is a test set.

    Args:
        run: The run.
        name: A data set's name, or a path.
        halves: Whether one half is for validation instead, if there are no splits: for calibration.

    Raises:
        FleetFitError: There is no such data set, or the files are of another kind than the run's data.
    """
    settings = {} if isinstance(run.assembly.data, DataDescription) else run.experiment.data.settings
    label = {"label": settings["label"]} if "label" in settings else {}  # tells texts from a table
    section = detect_data_source({"name": name, **label}, Path.cwd(), "--data")
    if section.get("name") == name:
        data = call_factory(names.resolve("data", name), name, "--data", {})
        if not isinstance(data, Data):
            raise ConfigError(f"{name} must return a fleetfit.Data, got {type(data).__name__}.", key="data")
        return data
    place = resolve_folder(name)
    if run.files.has(COLUMNS):
        return encode_table(place, run.files.text(COLUMNS), halves)
    return _read_prepared(run, section, place, halves)


def _read_prepared(run: TrainedRun, section: Mapping[str, Any], place: Path, halves: bool) -> Data:
    """Return the samples of a file or folder, prepared like the run's data."""
    own, own_section = run.assembly.data, run.experiment.data
    kind = str(section["name"])
    if isinstance(own, DataDescription):
        if kind == "table":
            raise ConfigError(
                f"{run.folder} does not have the encoding of the nodes' tables. Put their {COLUMNS} there, then again.",
                path=run.folder / COLUMNS,
            )
        settings = dict(section)
    else:
        if own_section.name != kind:
            raise ConfigError(
                f"{place} is taken to be {kind}, and this run was trained on {short_name(own_section.name)}; "
                "they must be of one kind.",
                key="data",
                path=place,
            )
        if kind == _PLAIN_TEXT:
            raise ConfigError(
                "the tokens of a plain text are its own characters, so another text has other tokens.",
                key="data",
                path=place,
            )
        settings = {**own_section.settings, **{key: section[key] for key in ("folder", "file") if key in section}}
        settings |= {"tokenizer": own.tokenizer} if own.tokenizer else {}
        if settings.pop("standardise", False):
            settings |= {"mean": list(own.mean), "std": list(own.std)}
    settings = {key: value for key, value in settings.items() if key not in ("name", "partition", "samples", "augment")}
    if kind != _PLAIN_TEXT:
        settings["test"] = 0.0  # so that the reader gives test samples only if there is a test set
    data: Data = call_factory(names.resolve("data", kind), kind, "--data", settings)
    classes = getattr(own, "class_names", ())
    if classes and data.class_names and classes != data.class_names:
        raise ConfigError(
            f"{place} has classes {', '.join(data.class_names[:10])}, and the run was trained on "
            f"{', '.join(classes[:10])}; they must be the same.",
            key="data",
            path=place,
        )
    if kind != _PLAIN_TEXT and len(data.split("test")):
        return data
    rows = torch.cat([data.split(split) for split in SPLITS]).sort().values
    return data.share({"validation": rows[::2], "test": rows[1::2]} if halves else {"test": rows})


# ---- evaluation ------------------------------------------------------------------------------------------------------


def evaluate_run(run: TrainedRun, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an evaluation of the newest checkpoint, with some sections of the run file changed.

    Raises:
        ConfigError: The data are on the nodes of a fleet and no other data are named, or these do not fit.
        DataError: The split has no samples.
        ModelError: The state does not fit the model that these data need.
    """
    assembly = run.assembly
    data = _load_evaluation_data(run, sections.get("data"))
    if data is not None:
        others = {key: value for key, value in sections.items() if key != "data"}
        return _evaluate_on(run, _change_experiment(run, others), data)
    if assembly.simulation is None:
        if "data" not in sections:
            raise ConfigError(
                f"{ON_NODES}: fleetfit eval {run.folder} --data NAME, or run.evaluate(data=...).", key="data"
            )
        experiment = _change_experiment(run, sections)
        return _evaluate_on(run, experiment, build_data(experiment.data))
    if isinstance(sections.get("data"), Data):
        sections = {**sections, "data": _rescale_targets(assembly.data, sections["data"])}
    if sections:
        assembly = assemble(_change_experiment(run, sections), run.files.load_base() or None)
        if isinstance(assembly.data, Data):
            evaluate.check_samples(assembly.data, assembly.settings.wanted.evaluation.split)
    own, other = (one.federation.problem.layout for one in (run.assembly, assembly))
    if own.shapes({}, own.exits) != other.shapes({}, other.exits):
        raise ModelError(
            f"the model was trained on {run.assembly.data!r} and does not fit {assembly.data!r}: shapes of its tensors "
            "differ."
        )
    with contextlib.closing(assembly.engine()) as engine:
        engine.load(run.checkpoint["clients"])
        columns, _ = evaluate.evaluate(assembly.federation, engine, run.server, assembly.settings.wanted)
    return columns


def _load_evaluation_data(run: TrainedRun, section: Any) -> Data | None:
    """Return data at a path or in memory, prepared like the run's; None for a data set or `Data`."""
    own = run.assembly.data
    memory = read_memory(section)
    if isinstance(memory, Samples) and isinstance(own, Data):
        return prepare_arrays(*(memory.test or memory.train), own)
    if isinstance(memory, TableSplits):
        if not run.files.has(COLUMNS):
            raise ConfigError(f"data=frame: {run.folder} has no {COLUMNS}, so it was not trained on a table.",
                              key="data", path=run.folder)  # fmt: skip
        return encode_rows(memory.splits.get("test", memory.splits["train"]), run.files.text(COLUMNS))
    name = section.get("path", section.get("name")) if isinstance(section, Mapping) else section
    if isinstance(name, Path):
        return load_other_data(run, str(name))
    if not isinstance(name, str) or detect_data_source({"name": name}, Path.cwd()).get("name") == name:
        return None
    return load_other_data(run, name)


def _change_experiment(run: TrainedRun, sections: Mapping[str, Any]) -> Experiment:
    return load_experiment(dump_with_defaults(run.experiment), is_complete=True, **sections)


def _evaluate_on(run: TrainedRun, experiment: Experiment, data: Any) -> dict[str, Any]:
    """Return the columns of all levels on data that do not belong to clients."""
    federation = run.assembly.federation
    device = Device(federation.problem, check_other_data(run, data), accelerator=torch.device("cpu"))
    statistics = run.checkpoint["statistics"] or {}
    return evaluate.on_data(federation, run.server, build_settings(experiment).wanted, device, statistics)


def compute_scores(
    run: TrainedRun, level: LevelName, split: str, client: int | None, data: Data | None = None
) -> Scores:
    """Return the logits of a level's exits for a split of the run's data, of one client's, or of other data."""
    return inference.compute_scores(load_model(run, level), select_data(run, client, data), split)


def best_exit(run: TrainedRun, level: LevelName, client: int | None) -> int:
    """Return the exit, from 1, with the highest accuracy on validation data; of equal ones the shallowest."""
    accuracies = compute_scores(run, level, "validation", client).accuracies
    return 1 + accuracies.index(max(accuracies))


# ---- early stopping --------------------------------------------------------------------------------------------------


def calibrate(
    run: TrainedRun, level: LevelName, budget: Amount, cost: str, mode: Mode, measure: Measure, temperature: bool,
    client: int | None, data: Data | None = None,
) -> Calibration:  # fmt: skip
    """Choose when samples leave, evaluate it on the test samples, and write it into the run folder."""
    data, entry = select_data(run, client, data), find_level(run, level)
    if len(entry.submodel.exits) < 2:
        raise ConfigError(
            f"level {entry.name} has one exit, so samples cannot leave before it: calibrate a level with more.",
            key="level",
        )
    validation, test = (
        inference.compute_scores(load_model(run, level), data, split) for split in ("validation", "test")
    )
    costs = compute_exit_costs(run, level, cost, data)
    limit = parse_budget(budget, cost, costs)
    calibration = inference.calibrate(entry.name, validation, test, costs, limit, cost, mode, measure, temperature)
    problem = run.assembly.federation.problem
    counted = submodel_cost(problem.architecture, find_counted_submodel(problem, entry), problem.input_shape)
    calibration = replace(
        calibration,
        exits=tuple(exit_names(entry.submodel.exits, problem.exits)),
        level_cost=float(counted.multiply_adds) if cost == "multiply_adds" else None,
    )
    if client is None:
        numbers = {"round": run.server.round, "data": data.name, **calibration.numbers()}
        run.files.write(calibration_file(entry.name), json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    return calibration


def calibration_file(level: str) -> str:
    """Return the name of the file with a level's calibration in a run folder."""
    return f"inference/level-{level}.json"


def load_calibration(run: TrainedRun, level: LevelName) -> Mapping[str, Any] | None:
    """Return what `calibrate` wrote for a level, or None.

    Raises:
        ConfigError: It is damaged, or of another round's model.
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
            f"{path} was calibrated after round {numbers['round']}, and the model is that of round {run.server.round} "
            "now. Calibrate again, or remove the file.",
            path=path,
        )
    return cast(Mapping[str, Any], numbers)


def compute_exit_costs(run: TrainedRun, level: LevelName, cost: str, data: Data) -> list[float]:
    """Return the cost of a sample that leaves at each exit of a level [E].

    Raises:
        ConfigError: There is no such cost.
    """
    if cost not in inference.COSTS:
        raise ConfigError(
            f'there is no cost "{cost}" of a prediction; there are {" and ".join(inference.COSTS)}.'
            f"{did_you_mean(cost, inference.COSTS)}",
            key="cost",
        )
    problem = run.assembly.federation.problem
    if cost == "latency_s":
        rng = torch.Generator().manual_seed(0)
        x = some_input(problem.architecture, data.sample_shape, 1, rng)  # texts at full length
        return inference.measure_exit_latencies(load_model(run, level), x)
    submodel = find_level(run, level).submodel
    sizes = {**problem.layout.full_sizes, **submodel.sizes}
    return inference.exit_costs(problem.architecture, sizes, submodel.exits, problem.input_shape)


def find_budget_cost(budget: float | str | None) -> str:
    """Return the cost that the unit of a budget belongs to: "35 ms" is a latency."""
    return "latency_s" if isinstance(budget, str) and budget.strip().endswith("s") else "multiply_adds"


def parse_budget(budget: Amount, cost: str, costs: list[float]) -> float:
    """Return a budget in the unit of the costs: a number up to 1 is a share of the last exit's cost.

    Raises:
        ConfigError: It is not an amount above 0.
    """
    try:
        amount = absolute(budget, cost) if isinstance(budget, str) else float(budget)
    except PlanError as error:
        raise ConfigError(str(error), key="budget", path=error.path) from None
    except (TypeError, ValueError):
        raise ConfigError(
            f'a budget is a number, or text with a unit such as "35 ms", got {budget!r}.', key="budget"
        ) from None
    if not amount > 0:
        raise ConfigError(f"a budget must be above 0, got {budget}.", key="budget")
    if amount == math.inf:
        raise ConfigError(
            f"a budget must be finite, got {budget}; a number up to 1 is a share of the full model.", key="budget"
        )
    return amount * costs[-1] if not isinstance(budget, str) and amount <= 1 else amount


# ---- export ----------------------------------------------------------------------------------------------------------


def prepare_export(run: TrainedRun, level: LevelName, data: Data | None) -> LevelModel:
    """Return a level's model with the facts that an export needs.

    Args:
        run: The run.
        level: 1..L, or its name.
        data: The data whose preprocessing, validation and test samples are used; the run's by default.
    """
    experiment, federation, entry = run.experiment, run.assembly.federation, find_level(run, level)
    architecture, exits = federation.problem.architecture, entry.submodel.exits
    sizes = {**federation.problem.layout.full_sizes, **entry.submodel.sizes}
    calibration = load_calibration(run, level)
    facts = {
        "model": short_name(experiment.model.name),
        "method": short_name(experiment.method.name),
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
        run.assembly.data if data is None else _rescale_targets(run.assembly.data, data),
        None if calibration is None else inference.read_policy(calibration),
        facts,
    )
