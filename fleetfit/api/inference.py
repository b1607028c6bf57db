"""What a trained run is asked: predictions, the best exit, early stopping for a budget."""

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
from fleetfit.config import Assembly, Experiment, assemble, load_experiment
from fleetfit.config.build.data import build_data
from fleetfit.config.build.levels import find_counted_submodel
from fleetfit.config.build.rounds import build_settings
from fleetfit.config.defaults import detect_data_source, is_frame
from fleetfit.config.dump import dump_with_defaults
from fleetfit.cost import submodel_cost
from fleetfit.data import Data
from fleetfit.data.files.alike import arrays_alike, frame_alike, like
from fleetfit.data.files.places import set_folder
from fleetfit.data.splits import SPLITS
from fleetfit.errors import ConfigError, ModelError, PlanError, RunError, did_you_mean
from fleetfit.factories import call_factory
from fleetfit.inference import Calibration, Measure, Mode, Scores
from fleetfit.inference.calibration import check_numbers
from fleetfit.inference.export import Shipped
from fleetfit.layout import some_input
from fleetfit.planner import Amount, absolute
from fleetfit.records import RunFolder
from fleetfit.report.text import exit_names
from fleetfit.submodel import Submodel
from fleetfit.training.speed import prepared
from fleetfit.values import DataDescription, Device, Server

LevelName = int | str | None
"""1..L or a level's name; None for the largest."""
_CUT_IN_TIME = "plain_text"
"""The only kind of files that have no test set of their own: the end of each file is one."""


class Trained(Protocol):
    """What is asked of a run here; `Run` has it."""

    files: RunFolder
    experiment: Experiment
    _models: dict[str, nn.Module]  # of levels, for predictions

    @property
    def folder(self) -> Path:
        """The run folder."""
        ...

    @property
    def assembly(self) -> Assembly:
        """What the run is made of."""
        ...

    @property
    def checkpoint(self) -> Mapping[str, Any]:
        """The newest checkpoint."""
        ...

    @property
    def server(self) -> Server:
        """The server after the last round that has a checkpoint."""
        ...


def level_named(run: Trained, level: LevelName) -> str:
    """Return the name of a level.

    Raises:
        ConfigError: There is no such level.
    """
    known = [entry.name for entry in run.assembly.federation.levels]
    wanted = known[-1] if level is None else str(level)
    if wanted not in known and wanted.isdecimal() and 1 <= int(wanted) <= len(known):
        wanted = known[int(wanted) - 1]
    if wanted not in known:
        raise ConfigError(f"this run has levels {', '.join(known)}; there is no level {level}.")
    return wanted


def checked_samples(run: Trained, x: Any) -> Tensor:
    """Return samples as a model of the run takes them.

    Raises:
        ConfigError: They are no tensor, or of another shape or type than the run's samples.
    """
    data = run.assembly.data
    wanted, tokens = data.sample_shape, data.vocabulary > 0
    if not isinstance(x, Tensor):
        raise ConfigError(f"x must be a torch.Tensor of samples {list(wanted)}, got {type(x).__name__}.")
    fits = x.ndim == len(wanted) + 1 if tokens else tuple(x.shape[1:]) == tuple(wanted)
    if not fits or x.is_floating_point() is tokens:
        kind = "token ids, int64" if tokens else "floats, as Data.batch returns them"
        raise ConfigError(
            f"x must be samples [B, {', '.join(map(str, wanted))}] of {kind}; got {list(x.shape)} of "
            f"{str(x.dtype).removeprefix('torch.')}."
        )
    return x if tokens else x.float()


def module_of(run: Trained, level: LevelName) -> nn.Module:
    """Return a level's model in eval mode, with the statistics of its last evaluation, or new ones if it has none."""
    assembly, name = run.assembly, level_named(run, level)
    index = [entry.name for entry in assembly.federation.levels].index(name)
    found = run.checkpoint["statistics"] or {}
    if index not in found and evaluate.has_batch_norm(assembly.federation):
        with contextlib.closing(assembly.engine()) as engine:
            found, _ = evaluate.statistics(assembly.federation, engine, run.server, assembly.settings.wanted, [index])
        if index not in found:
            raise RunError(f"there are no batch-norm statistics for level {name}: no client could measure them.")
    return evaluate.level_module(assembly.federation, run.server, index, found)


def served(run: Trained, level: LevelName) -> nn.Module:
    """Return a level's model for predictions, the same object each time; it computes as the run's evaluations do."""
    if (name := level_named(run, level)) not in run._models:
        problem, piece = run.assembly.federation.problem, submodel_of(run, name)
        run._models[name] = prepared(module_of(run, name), problem.arithmetic_of(piece), torch.device("cpu"))
    return run._models[name]


def evaluated(run: Trained, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of an evaluation of the newest checkpoint, with some sections of the run file changed.

    Raises:
        DataError: The split that is asked for has no samples.
        ModelError: The state does not fit the model that these data need.
    """
    assembly, path = run.assembly, _path_in(sections.get("data"))
    if path is not None:
        return _evaluated_on(run, other_data(run, path), sections)
    in_memory = _in_memory(run, sections.get("data"))
    if in_memory is not None:
        return _evaluated_on(run, in_memory, sections)
    if assembly.simulation is None:
        return _evaluated_here(run, sections)
    if isinstance(sections.get("data"), Data):
        sections = {**sections, "data": _in_unit_of(run.assembly.data, sections["data"])}
    if sections:
        assembly = assemble(
            load_experiment(dump_with_defaults(run.experiment), is_complete=True, **sections),
            run.files.load_base() or None,
        )
        if isinstance(assembly.data, Data):
            evaluate.check_samples(assembly.data, assembly.settings.wanted.evaluation.split)
    _check_same_model(run.assembly, assembly)
    with contextlib.closing(assembly.engine()) as engine:
        engine.load(run.checkpoint["clients"])
        columns, _ = evaluate.evaluate(assembly.federation, engine, run.server, assembly.settings.wanted)
    return columns


def other_data(run: Trained, name: str, halves: bool = False) -> Data:
    """Return the data that `--data` names: a data set, or a file or folder of what the run was trained on.

    What lies at a path is prepared as the run's data were: a table as its `columns.json` says, arrays and images with
    its means. All of it is for testing, unless it has a test set of its own.

    Args:
        run: The run.
        name: A data set's name, or a path.
        halves: Whether one half is for validation instead, where there are no splits: for calibration.

    Raises:
        FleetFitError: There is no such data set, or what lies there is other than the run's data.
    """
    asked = {} if isinstance(run.assembly.data, DataDescription) else run.experiment.data.settings
    label = {"label": asked["label"]} if "label" in asked else {}  # by which the run's texts were told from a table
    section = detect_data_source({"name": name, **label}, Path.cwd(), "--data")
    if section.get("name") == name:
        data = call_factory(names.resolve("data", name), name, "--data", {})
        if not isinstance(data, Data):
            raise ConfigError(f"{name} must return a fleetfit.Data, got {type(data).__name__}.")
        return data
    place = set_folder(name)
    if run.files.has(COLUMNS):
        return like(place, run.files.text(COLUMNS), halves)
    return _as_trained(run, section, place, halves)


def _as_trained(run: Trained, section: Mapping[str, Any], place: Path, halves: bool) -> Data:
    ours, theirs = run.assembly.data, run.experiment.data
    kind = str(section["name"])
    if isinstance(ours, DataDescription):
        if kind == "table":
            raise ConfigError(
                f"how the nodes' tables become numbers is not in {run.folder}. Put their {COLUMNS} there, then again."
            )
        settings = dict(section)
    else:
        if theirs.name != kind:
            raise ConfigError(
                f"{place} is taken to be {kind}, and this run was trained on {short_name(theirs.name)}; "
                "they must be of one kind."
            )
        if kind == _CUT_IN_TIME:
            raise ConfigError(
                "which character is which token is found in a text itself, so that another text has other tokens."
            )
        settings = {**theirs.settings, **{key: section[key] for key in ("folder", "file") if key in section}}
        settings |= {"tokenizer": ours.tokenizer} if ours.tokenizer else {}
        if settings.pop("standardise", False):
            settings |= {"mean": list(ours.mean), "std": list(ours.std)}
    settings = {key: value for key, value in settings.items() if key not in ("name", "partition", "samples", "augment")}
    if held_out := kind != _CUT_IN_TIME:
        settings["test"] = 0.0  # so that the reader gives test samples where there is a test set, and nowhere else
    data: Data = call_factory(names.resolve("data", kind), kind, "--data", settings)
    named = getattr(ours, "class_names", ())
    if named and data.class_names and named != data.class_names:
        raise ConfigError(
            f"{place} has classes {', '.join(data.class_names[:10])}, and the run was trained on "
            f"{', '.join(named[:10])}; they must be the same."
        )
    return data if held_out and len(data.split("test")) else _for_testing(data, halves)


def _in_unit_of(ours: Any, data: Data) -> Data:
    """Return data whose targets are scaled as those of a run's data, which its model was trained on."""
    if data.task != "regression" or not isinstance(ours, Data) or ours is data:
        return data
    return replace(data, targets=tuple(tuple(moment.tolist()) for moment in ours.target_scale))


def _for_testing(data: Data, halves: bool) -> Data:
    rows = torch.cat([data.split(name) for name in SPLITS]).sort().values
    splits = {"validation": rows[::2], "test": rows[1::2]} if halves else {"test": rows}
    return data.share(splits)


def _path_in(section: Any) -> str | None:
    """Return the path that a section `[data]` names, or None where it names a data set."""
    name = section.get("path", section.get("name")) if isinstance(section, Mapping) else section
    if isinstance(name, Path):
        return str(name)
    if not isinstance(name, str):
        return None
    found = detect_data_source({"name": name}, Path.cwd())
    return None if found.get("name") == name else name


def _in_memory(run: Trained, section: Any) -> Data | None:
    """Return samples and labels, or a DataFrame, as the run's data were prepared; None where it is something else."""
    ours = run.assembly.data
    if isinstance(section, tuple) and len(section) == 2 and isinstance(ours, Data):
        first, second = section
        if isinstance(first, tuple) and isinstance(second, tuple) and len(second) == 2:
            first, second = second  # of two pairs the second one is for testing
        return arrays_alike(first, second, ours)
    if is_frame(section):
        if not run.files.has(COLUMNS):
            raise ConfigError(f"data=frame: {run.folder} has no {COLUMNS}, so it was not trained on a table.")
        return frame_alike(section, run.files.text(COLUMNS))
    return None


def _evaluated_on(run: Trained, data: Data, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of all levels on data that are no clients'."""
    further = {key: value for key, value in sections.items() if key != "data"}
    experiment = load_experiment(dump_with_defaults(run.experiment), is_complete=True, **further)
    return _on_data(run, experiment, matching(run, data))


def _evaluated_here(run: Trained, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a fleet's levels on data that are here: what the clients have is on their nodes.

    Raises:
        ConfigError: No data set is named, or its samples are other than the nodes'.
    """
    if "data" not in sections:
        raise ConfigError(f"{ELSEWHERE}: fleetfit eval {run.folder} --data NAME, or run.evaluate(data=...).")
    experiment = load_experiment(dump_with_defaults(run.experiment), is_complete=True, **sections)
    return _on_data(run, experiment, matching(run, build_data(experiment.data)))


def _on_data(run: Trained, experiment: Experiment, data: Data) -> dict[str, Any]:
    federation = run.assembly.federation
    device = Device(federation.problem, data, accelerator=torch.device("cpu"))
    found = run.checkpoint["statistics"] or {}
    return evaluate.on_data(federation, run.server, build_settings(experiment).wanted, device, found)


ELSEWHERE = "this run's data are on the nodes of a fleet. Name data of the same shape that are here"


def matching(run: Trained, data: Any, labels: bool = True) -> Data:
    """Return data whose samples and classes are those of the run.

    Args:
        run: The run.
        data: The data.
        labels: Whether they need labels.

    Raises:
        ConfigError: They are not, or have no labels.
    """
    ours = run.assembly.data
    if not isinstance(data, Data):
        raise ConfigError(f"data must be a fleetfit.Data, got {type(data).__name__}.")
    theirs, wanted = ((d.task, d.sample_shape, d.classes, d.vocabulary) for d in (data, ours))
    if theirs != wanted:
        raise ConfigError(
            f"{data!r} does not fit a model for {ours.task} of samples {list(ours.sample_shape)}, {ours.classes} "
            f"classes{f' and {ours.vocabulary} tokens' if ours.vocabulary else ''}."
        )
    if labels and not data.labelled:
        raise ConfigError(f"{data.name} has no labels, so nothing can be measured on it; predict does without them.")
    return _in_unit_of(ours, data)


def _check_same_model(ours: Assembly, other: Assembly) -> None:
    a, b = ours.federation.problem.layout, other.federation.problem.layout
    if a.shapes({}, a.exits) != b.shapes({}, b.exits):
        raise ModelError(
            f"the model was trained on {ours.data!r} and does not fit {other.data!r}: shapes of its tensors differ."
        )


def scores_of(run: Trained, level: LevelName, split: str, client: int | None, data: Data | None = None) -> Scores:
    """Return the logits of a level's exits for a split of the data, of one client's, or of others."""
    return inference.scores(served(run, level), data_of(run, client, data), split)


def best_exit(run: Trained, level: LevelName, client: int | None) -> int:
    """Return the exit, from 1, with the highest accuracy on validation data; of equal ones the shallowest."""
    found = scores_of(run, level, "validation", client).accuracies
    return 1 + found.index(max(found))


def data_of(run: Trained, client: int | None, data: Data | None = None, labels: bool = True) -> Data:
    """Return the run's data, one client's share of it, or others of the same shape if some are given.

    Raises:
        ConfigError: There is no such client, the others do not fit, or the data are on the nodes of a fleet.
    """
    assembly = run.assembly
    if data is not None:
        if client is not None:
            raise ConfigError("a client has a share of the run's own data only; leave the client or the data out.")
        return matching(run, data, labels)
    if isinstance(assembly.data, DataDescription) or assembly.simulation is None:
        raise ConfigError(f"{ELSEWHERE}: --data NAME, or data=... in Python.")
    if client is None:
        return assembly.data
    count = len(assembly.simulation.parts)
    if not 0 <= client < count:
        raise ConfigError(f"this run has clients 0 to {count - 1}; there is no client {client}.")
    return assembly.data.share(assembly.simulation.parts[client])


def calibrate(
    run: Trained, level: LevelName, budget: Amount, cost: str, mode: Mode, measure: Measure, temperature: bool,
    client: int | None, data: Data | None = None,
) -> Calibration:  # fmt: skip
    """Choose when samples leave, try it on the test samples, and write it into the run folder."""
    data, name = data_of(run, client, data), level_named(run, level)
    if len(submodel_of(run, level).exits) < 2:
        raise ConfigError(f"level {name} has one exit, so nobody can leave before it: there is nothing to calibrate.")
    validation, test = (inference.scores(served(run, level), data, split) for split in ("validation", "test"))
    costs = costs_of(run, level, cost, data)
    limit = absolute_budget(budget, cost, costs)
    found = inference.calibrate(name, validation, test, costs, limit, cost, mode, measure, temperature)
    problem = run.assembly.federation.problem
    entry = next(one for one in run.assembly.federation.levels if one.name == name)
    counted = submodel_cost(
        problem.architecture, find_counted_submodel(problem, entry), problem.input_shape
    ).multiply_adds
    found = replace(
        found,
        exits=tuple(exit_names(entry.submodel.exits, problem.exits)),
        level_cost=float(counted) if cost == "multiply_adds" else None,
    )
    if client is None:
        numbers = {"round": run.server.round, "data": data.name, **found.numbers()}
        run.files.write(calibration_file(name), json.dumps(numbers, indent=1, allow_nan=False) + "\n")
    return found


def calibration_file(level: str) -> str:
    """Return where a level's calibration lies in a run folder."""
    return f"inference/level-{level}.json"


def saved_calibration(run: Trained, level: LevelName) -> Mapping[str, Any] | None:
    """Return what `calibrate` wrote for a level, or None.

    Raises:
        ConfigError: It is damaged, or of another round's model.
    """
    name = calibration_file(level_named(run, level))
    path = run.folder / name
    if not run.files.has(name):
        return None
    found = run.files.json(name)
    try:
        check_numbers(found, len(submodel_of(run, level).exits))
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged: {error}. Calibrate again.", key=getattr(error, "key", None), path=path
        ) from None
    then = found["round"]
    if then != run.server.round:
        raise ConfigError(
            f"{path} was found after round {then}, and the model is that of round {run.server.round} now. Calibrate "
            "again, or remove the file."
        )
    return cast(Mapping[str, Any], found)


def costs_of(run: Trained, level: LevelName, cost: str, data: Data) -> list[float]:
    """Return what a sample that leaves at each exit of a level costs [E].

    Raises:
        ConfigError: Costs are not counted like that.
    """
    if cost not in inference.COSTS:
        known = inference.COSTS
        raise ConfigError(f'there is no cost "{cost}" of a prediction; there are {" and ".join(known)}.'
                          f"{did_you_mean(cost, known)}")  # fmt: skip
    if cost == "latency_s":
        architecture = run.assembly.federation.problem.architecture
        x = some_input(architecture, data.sample_shape, 1, torch.Generator().manual_seed(0))  # texts at full length
        return inference.exit_latencies(served(run, level), x)
    problem, piece = run.assembly.federation.problem, submodel_of(run, level)
    sizes = {**problem.layout.full_sizes, **piece.sizes}
    return inference.exit_costs(problem.architecture, sizes, piece.exits, problem.input_shape)


def shipped(run: Trained, level: LevelName, data: Data | None) -> Shipped:
    """Return a level's model with all that an export needs to know of it.

    Args:
        run: The run.
        level: 1..L, or its name.
        data: The data whose preprocessing, validation and test samples are used; the run's by default.
    """
    experiment, problem, piece = run.experiment, run.assembly.federation.problem, submodel_of(run, level)
    name, sizes = level_named(run, level), {**problem.layout.full_sizes, **piece.sizes}
    calibration = saved_calibration(run, level)
    facts = {
        "model": short_name(experiment.model.name),
        "method": short_name(experiment.method.name),
        "trained": f"{run.server.round} rounds, {len(run.assembly.federation.clients)} clients, seed {experiment.seed}",
        "costs": inference.exit_costs(problem.architecture, sizes, piece.exits, problem.input_shape),
        "calibration": calibration,
    }
    policy = None if calibration is None else inference.read_policy(calibration)
    return Shipped(
        name,
        problem.architecture,
        sizes,
        piece.exits,
        module_of(run, level),
        run.assembly.data if data is None else _in_unit_of(run.assembly.data, data),
        policy,
        facts,
    )


def submodel_of(run: Trained, level: LevelName) -> Submodel:
    """Return a level's sub-model."""
    name = level_named(run, level)
    return next(entry.submodel for entry in run.assembly.federation.levels if entry.name == name)


def cost_of_unit(budget: float | str | None) -> str:
    """Return what a budget is meant in by its unit: "35 ms" is a latency."""
    return "latency_s" if isinstance(budget, str) and budget.strip().endswith("s") else "multiply_adds"


def absolute_budget(budget: Amount, cost: str, costs: list[float]) -> float:
    """Return a budget in the unit of the costs: a number up to 1 is a share of what the last exit costs.

    Raises:
        ConfigError: It is no amount above 0.
    """
    try:
        found = absolute(budget, cost) if isinstance(budget, str) else float(budget)
    except PlanError as error:
        raise ConfigError(str(error)) from None
    except (TypeError, ValueError):
        raise ConfigError(f'a budget is a number, or text with a unit such as "35 ms", got {budget!r}.') from None
    if not found > 0:
        raise ConfigError(f"a budget must be above 0, got {budget}.")
    if found == math.inf:
        raise ConfigError(f"a budget must be finite, got {budget}; a number up to 1 is a share of the full model.")
    return found * costs[-1] if not isinstance(budget, str) and found <= 1 else found
