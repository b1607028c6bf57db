"""Run, resume, load: a run as a value that knows its folder; and one run from beginning to end.

`run` writes a run folder (see `fleetfit.records`), `load` opens one, `resume` goes on with one. After a kill at any moment,
`resume` continues from the newest checkpoint, and the final state equals that of an unbroken run bit for bit.
"""

import contextlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from fleetfit import evaluate, rounds
from fleetfit.config import Assembly, Experiment, assemble, experiment_of, read_experiment, to_toml
from fleetfit.config.writing import dumped, objects_in, to_table
from fleetfit.data import class_counts
from fleetfit.errors import ConfigError, MissingExtra, ModelError, RunError, did_you_mean
from fleetfit.planner import Plan
from fleetfit.records import RunFolder, environment, jsonable, new_path
from fleetfit.report import plots
from fleetfit.report.tables import summary_of
from fleetfit.values import Server

OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the report of each round, as it stands in `metrics.jsonl`."""
RUNS = Path("runs")
"""Where run folders go by default."""


class Run:
    """A run and its folder; cheap to open, the rest is read when it is asked for."""

    def __init__(self, folder: RunFolder, experiment: Experiment, assembly: Assembly | None = None) -> None:
        """Take what is known; `run`, `resume` and `load` make runs."""
        self._files, self._experiment = folder, experiment
        if assembly is not None:
            self.__dict__["_assembly"] = assembly

    def __repr__(self) -> str:
        """Return the folder and how far the run has come."""
        done = f"{len(self.metrics)} of {self._experiment.rounds} rounds"
        return f"Run({str(self.folder)!r}, {done}{', finished' if self.finished else ''})"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._files.path

    @property
    def experiment(self) -> Experiment:
        """The resolved description."""
        return self._experiment

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the summary is written."""
        return (self.folder / "summary.json").is_file()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The reports of all rounds so far."""
        return self._files.metrics()

    @property
    def plan(self) -> Plan:
        """The levels with their sizes and costs."""
        return Plan.from_toml(self._files.text("plan.toml"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that the user must see, such as who cannot take part."""
        return self._assembly.notes

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers, as in `summary.json`.

        Raises:
            RunError: The run is not finished.
        """
        if not self.finished:
            raise RunError(f'{self.folder} is not finished; go on with it: "fleetfit resume {self.folder}".')
        found: dict[str, Any] = json.loads(self._files.text("summary.json"))
        return found

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of the last evaluation: split, then per batch-norm policy all accuracies.

        Raises:
            RunError: Nothing has been evaluated yet.
        """
        for report in reversed(self.metrics):
            if "evaluate" in report:
                columns: dict[str, Any] = report["evaluate"]
                return columns
        raise RunError(f"nothing has been evaluated yet in {self.folder}.")

    def accuracy(self, kind: str = "local", level: int | None = None, norm: str | None = None) -> float:
        """Return one accuracy of the last evaluation, between 0 and 1.

        Args:
            kind: "local" or "global", or any other number among the columns ("avg", "full", "ensemble", ...).
            level: For "local" only: that level's clients alone; levels are 1..L.
            norm: Batch-norm policy, "static" or "batch"; the first of `evaluate.norms` by default.

        Raises:
            ConfigError: There is no such number.
        """
        columns = self.columns
        norm = norm or self._experiment.evaluate.norms[0]
        if norm not in columns:
            raise ConfigError(
                f'this run has no "{norm}" columns; its evaluate.norms are {self._experiment.evaluate.norms}.'
            )
        found = columns[norm]
        if level is not None:
            if kind != "local" or str(level) not in found["levels"]:
                raise ConfigError(f'accuracy by level is that of kind "local" and levels {", ".join(found["levels"])}; got kind '
                                  f'"{kind}" and level {level}.')  # fmt: skip
            found = found["levels"][str(level)]
        if not isinstance(found.get(kind), int | float):
            known = [key for key, value in found.items() if isinstance(value, int | float)]
            raise ConfigError(
                f'there is no accuracy "{kind}"; there are {", ".join(known)}.{did_you_mean(kind, known)}'
            )
        return float(found[kind])

    @property
    def server(self) -> Server:
        """The server after the last round that has a checkpoint."""
        server: Server = self._taken_up["server"]
        return server

    def model(self, level: int | None = None) -> nn.Module:
        """Return a level's model as a plain module in eval mode, with static batch-norm statistics.

        Args:
            level: 1..L; the largest by default.

        Raises:
            ConfigError: There is no such level.
        """
        assembly = self._assembly
        known = [entry.name for entry in assembly.federation.levels]
        wanted = known[-1] if level is None else str(level)
        if wanted not in known:
            raise ConfigError(f"this run has levels {', '.join(known)}; there is no level {level}.")
        found = self._taken_up["statistics"]
        if found is None and evaluate.has_batch_norm(assembly.federation):
            with contextlib.closing(assembly.engine()) as engine:
                found = evaluate.statistics(assembly.federation, engine, self.server, assembly.settings.wanted)
        return evaluate.level_module(assembly.federation, self.server, known.index(wanted), found)

    def evaluate(self, **sections: Any) -> dict[str, Any]:
        """Evaluate the newest checkpoint again and return the columns; nothing is written.

        Args:
            **sections: What differs, as sections of a run file: `evaluate={"split": "validation"}`, `data="mnist"`.

        Raises:
            ModelError: The state does not fit the model that these data need.
        """
        assembly = self._assembly
        if sections:
            assembly = assemble(experiment_of(_visible(self._experiment), **sections))
        _check_same_model(self._assembly, assembly)
        with contextlib.closing(assembly.engine()) as engine:
            engine.load(self._taken_up["clients"])
            columns, _ = evaluate.evaluate(assembly.federation, engine, self.server, assembly.settings.wanted)
        return columns

    @cached_property
    def _assembly(self) -> Assembly:
        return assemble(self._experiment)

    @cached_property
    def _taken_up(self) -> dict[str, Any]:
        """The newest checkpoint, or the start."""
        found = self._files.load_checkpoint()
        if found is None:
            return {"server": rounds.start(self._assembly.federation), "clients": {}, "statistics": None}
        server = found["server"]
        return {**found, "server": Server(server["state"], server["round"], server["memory"])}


def _visible(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's tables with every default visible, and the objects that stand in for names."""
    table = to_table(experiment)
    return table | {section: dumped(getattr(experiment, section)) for section in objects_in(table)}


def _check_same_model(ours: Assembly, other: Assembly) -> None:
    a, b = ours.federation.problem.layout, other.federation.problem.layout
    if a.shapes({}, a.exits) != b.shapes({}, b.exits):
        raise ModelError(
            f"the model was trained on {ours.data!r} and does not fit {other.data!r}: shapes of its tensors differ."
        )


# ---- the verbs ---------------------------------------------------------------------------------------------------


def run(
    source: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    on_round: OnRound | None = None,
    **sections: Any,
) -> Run:
    """Run an experiment from beginning to end.

    Args:
        source: A run file, its tables, or an `Experiment`; the defaults when it is left out.
        out: The run folder; `runs/<time>-<name>-<hash>` by default.
        overrides: `a.b=c`, as on the command line.
        on_round: Called with each round's report.
        **sections: Sections of a run file; objects may stand in for names: `model=MyArchitecture()`, `data=my_data`.

    Returns:
        The finished run.

    Raises:
        FleetFitError: Something does not fit; nothing has been written unless rounds had begun.
    """
    prepared = prepare(described(source, overrides, **sections), out)
    proceed(prepared, on_round)
    return prepared


def described(
    source: str | Path | Mapping[str, Any] | Experiment | None = None, overrides: Sequence[str] = (), **sections: Any
) -> Experiment:
    """Return the experiment that a source, overrides and sections describe."""
    if isinstance(source, str | Path):
        found = read_experiment(source, overrides, **sections)
        return found if found.name else found.model_copy(update={"name": Path(source).stem})
    if isinstance(source, Experiment):
        return experiment_of(dumped(source, only_set=True), overrides, **sections)
    return experiment_of(source, overrides, **sections)


def prepare(experiment: Experiment, out: str | Path | None = None) -> Run:
    """Check everything and make the run folder, without running a round."""
    experiment = experiment_of(_visible(experiment))  # as a resumed run will read it: its messages have the same size
    assembly = assemble(experiment)
    config = to_toml(experiment)
    name = experiment.name or f"{assembly.data.name}-{_label(experiment.method.name)}"
    path = new_path(RUNS, name, config) if out is None else Path(out)
    files = {
        "config.toml": config,
        "environment.json": json.dumps(environment(), indent=2) + "\n",
        "plan.toml": assembly.plan.to_toml(),
        "fleet.json": json.dumps(_first_clients(assembly)) + "\n",
    }
    return Run(RunFolder.create(path, files), experiment, assembly)


def _label(name: Any) -> str:
    text = name if isinstance(name, str) else type(name).__name__
    return text.rpartition(":")[2]


def load(folder: str | Path, **sections: Any) -> Run:
    """Open a run folder.

    Args:
        folder: The run folder.
        **sections: The objects that stood in for names, if the run was started from Python with some.

    Raises:
        RunError: It is no run folder, or its configuration cannot be read.
    """
    files = RunFolder.open(folder)
    try:
        table = tomllib.loads(files.text("config.toml"))
    except tomllib.TOMLDecodeError as error:
        raise RunError(f"{files.path / 'config.toml'} is damaged: {error}.") from None
    missing = [section for section in objects_in(table) if section not in sections]
    if missing:
        raise RunError(f"this run was started from Python with objects of its own; open it there and hand them over again: "
                       f"{', '.join(f'{section}=...' for section in missing)}.")  # fmt: skip
    return Run(files, experiment_of(table, **sections))


def resume(folder: str | Path, *, on_round: OnRound | None = None, **sections: Any) -> Run:
    """Go on with a run after its newest checkpoint; a finished one is returned as it is.

    Args:
        folder: The run folder.
        on_round: Called with each round's report.
        **sections: The objects that stood in for names, if the run was started from Python with some.

    Raises:
        RunError: It is no run folder, another process is writing into it, or its format is not known.
    """
    found = load(folder, **sections)
    if not found.finished:
        proceed(found, on_round)
    return found


def proceed(target: Run, on_round: OnRound | None = None) -> None:
    """Run the rounds that are left, write the summary and the plots."""
    files, assembly = target._files, target._assembly
    with files.held(), contextlib.closing(assembly.engine()) as engine:
        taken = target._taken_up
        engine.load(taken["clients"])
        if files.begun():
            files.tidy(taken["server"].round)
            files.note_resumption(taken["server"].round)
        for done in _rounds(target, engine, taken["server"]):
            if on_round is not None:
                on_round(done)
        _finish(target)
    target.__dict__.pop("_taken_up", None)


def _rounds(target: Run, engine: rounds.Engine, server: Server) -> Iterator[dict[str, Any]]:
    """Run round by round; a round's line is written before its checkpoint."""
    files, assembly, checkpoint = target._files, target._assembly, target.experiment.checkpoint
    for done in rounds.run(assembly.federation, engine, assembly.settings, server):
        report = jsonable(done.report)
        files.append(report)
        if done.server.round % checkpoint.every == 0 or done.server.round == assembly.settings.rounds:
            after = done.server
            nest = {
                "server": {"state": after.state, "round": after.round, "memory": after.memory},
                "clients": engine.save(),
                "statistics": done.statistics,
            }
            files.save_checkpoint(after.round, nest, checkpoint.keep)
        yield report


def _finish(target: Run) -> None:
    """Write the plots, where matplotlib is there, and then the summary."""
    metrics = target.metrics
    summary = jsonable(summary_of(_description(target), target._assembly.plan, metrics, target._assembly.notes))
    with contextlib.suppress(MissingExtra):  # the command line says that there are no plots
        plots.plots_of_run(target.folder, summary, metrics)
    target._files.write("summary.json", json.dumps(summary, indent=2) + "\n")


def _description(target: Run) -> dict[str, Any]:
    """Return what was run, in words."""
    experiment, data = target.experiment, target._assembly.data
    norms = [norm for norm in experiment.evaluate.norms if norm in target.columns]
    return {
        "name": experiment.name,
        "method": _label(experiment.method.name),
        "model": _label(experiment.model.name),
        "data": data.name,
        "seed": experiment.seed,
        "norm": norms[0],
    }


def _first_clients(assembly: Assembly, count: int = 20) -> dict[str, Any]:
    """Return class counts, group and level of the first clients, and how many are in each group."""
    parts, fleet = list(assembly.simulation.parts[:count]), assembly.fleet
    classification = assembly.data.task == "classification"
    return {
        "clients": len(fleet.group),
        "groups": {name: int((fleet.group == i).sum()) for i, name in enumerate(fleet.names)},
        "first": {
            "group": [fleet.names[g] for g in fleet.group[:count]],
            "level": [int(level) + 1 for level in assembly.federation.level_of[:count]],
            "samples": [len(part["train"]) for part in parts],
            "class_counts": class_counts(assembly.data, parts).tolist() if classification else None,
        },
    }
