"""A run as a value that knows its folder; cheap to open, the rest is read when it is asked for."""

import logging
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fleetfit import rounds
from fleetfit.api import inference
from fleetfit.api.callbacks import NamedCallback, make_callbacks
from fleetfit.api.metadata import (
    COLUMNS,
    NODES,
    find_accuracy,
    find_data_changes,
    load_planned_nodes,
    read_sample_shape,
)
from fleetfit.api.progress import RoundFacts, format_html
from fleetfit.config import Assembly, Experiment, assemble, load_experiment
from fleetfit.config.build.run import assemble_fleet
from fleetfit.config.defaults import wrap_in_memory_data
from fleetfit.config.dump import find_object_sections
from fleetfit.data import Data
from fleetfit.errors import RunError
from fleetfit.inference import Calibration, Measure, Mode
from fleetfit.inference.export import Export, export
from fleetfit.layout import predictions
from fleetfit.markup import escape_html
from fleetfit.planner import Plan
from fleetfit.records import RunFolder
from fleetfit.records.checkpoints import CheckpointError
from fleetfit.report import recorded
from fleetfit.report.tables import level_table, total_table
from fleetfit.soundness import check_base, fitting
from fleetfit.tensor_defaults import own_mode
from fleetfit.values import Server


class Run:
    """A run and its folder.

    Attributes:
        files: The run folder.
        experiment: The resolved description.
    """

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        assembly: Assembly | None = None,
        engine: rounds.Engine | None = None,
    ) -> None:
        """Take what is known; `run`, `resume` and `load` make runs."""
        self.files, self.experiment, self._engine = folder, experiment, engine
        self._models: dict[str, nn.Module] = {}
        self._known_notes: tuple[str, ...] | None = None  # where it is assembled in another process
        self._listeners: list[NamedCallback] | None = None
        self._compared = ("", "")  # its title in a comparison, and the name of that
        if assembly is not None:
            self.__dict__["assembly"] = assembly

    def __repr__(self) -> str:
        """Return the folder and how far the run has come."""
        done = f"{len(self.metrics)} of {self.experiment.rounds} rounds"
        return f"Run({str(self.folder)!r}, {done}{', finished' if self.finished else ''})"

    def _repr_html_(self) -> str:
        """Return the tables of a finished run, or how far it has come, for notebooks."""
        try:
            if self.finished:
                summary = self.summary
                return (
                    level_table(summary).to_html()
                    + total_table(summary).to_html()
                    + f"<p>{escape_html(str(self.folder))}</p>"
                )
            facts = RoundFacts(self.experiment.rounds, self.experiment.evaluate.norms[0])
            for report in self.metrics:
                facts.add(report)
            return format_html(str(self.folder), facts)
        except RunError as error:
            return f"<p>{escape_html(str(error))}</p>"

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.files.path

    @property
    def finished(self) -> bool:
        """Whether all rounds are done and the summary is written."""
        return self.files.has("summary.json")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The reports of all rounds so far.

        Raises:
            RunError: They are damaged, or some are gone.
        """
        found = self.files.metrics()
        if self.finished and len(found) != (rounds := self.summary["rounds"]):
            raise RunError(
                f"{self.folder / 'metrics.jsonl'} has the reports of {len(found)} rounds, and summary.json those of "
                f"{rounds}. Put the files back that belong together."
            )
        return found

    @property
    def plan(self) -> Plan:
        """The levels with their sizes and costs."""
        return Plan.from_toml(self.files.text("plan.toml"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that the user must see, such as who cannot take part."""
        if self.finished:
            return tuple(self.summary["notes"])
        return tuple(self.assembly.notes) if self._known_notes is None else self._known_notes

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers, as in `summary.json`.

        Raises:
            RunError: The run is not finished, or the file is damaged.
        """
        if not self.finished:
            raise RunError(f'{self.folder} is not finished; go on with it: "fleetfit resume {self.folder}".')
        return recorded.summary_in(self.files)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of the last evaluation: split, then per batch-norm policy all accuracies.

        Raises:
            RunError: Nothing has been evaluated yet.
        """
        for report in reversed(self.metrics):
            if "evaluate" in report:
                return dict(report["evaluate"])
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
        return find_accuracy(self.columns, kind, level, norm or self.experiment.evaluate.norms[0])

    @property
    def server(self) -> Server:
        """The server after the last round that has a checkpoint."""
        return cast(Server, self.checkpoint["server"])

    @own_mode()
    def model(self, level: int | str | None = None) -> nn.Module:
        """Return a level's model as a plain module in eval mode, with static batch-norm statistics.

        Args:
            level: 1..L, or its name ("S1" of AdaptiveFL's pool); the largest by default.

        Raises:
            ConfigError: There is no such level.
        """
        return inference.module_of(self, level)

    # -- inference

    @own_mode()
    def predict(self, x: Tensor, level: int | str | None = None) -> Tensor:
        """Return a level's last logits [B, classes].

        Args:
            x: Samples [B, ...], as `Data.batch` returns them.
            level: 1..L, or its name; the largest by default.

        Raises:
            ConfigError: There is no such level, or x holds other samples than the run's.
        """
        return next(predictions(inference.served(self, level), inference.checked_samples(self, x), every=False))

    def predict_exits(self, x: Tensor, level: int | str | None = None) -> Iterator[Tensor]:
        """Yield a level's logits [B, classes] exit by exit, as soon as they are computed (ScaleFL, Algorithm 4).

        Nothing is computed twice; whoever stops early saves the rest.

        Args:
            x: Samples [B, ...], as `Data.batch` returns them.
            level: 1..L, or its name; the largest by default.

        Raises:
            ConfigError: There is no such level, or x holds other samples than the run's.
            ModelError: The model cannot be run segment by segment.
        """
        with own_mode():
            parts = predictions(inference.served(self, level), inference.checked_samples(self, x))
        return _in_own_mode(parts)

    @own_mode()
    def best_exit(self, level: int | str | None = None, client: int | None = None) -> int:
        """Return the exit of a level, from 1, that is best on validation data; of equal ones the shallowest.

        Args:
            level: 1..L, or its name; the largest by default.
            client: Whose validation data; all by default.

        Raises:
            ConfigError: There is no such level or client, or the task is no classification.
            DataError: There are no validation samples.
        """
        return inference.best_exit(self, level, client)

    @own_mode()
    def calibrate(
        self,
        level: int | str | None = None,
        budget: float | str = 0.75,
        cost: str = "multiply_adds",
        mode: Mode = "budgeted",
        measure: Measure = "max",
        temperature: bool = False,
        client: int | None = None,
        data: Data | None = None,
    ) -> Calibration:
        """Choose on validation data when samples leave early for an average budget, and try it on test data.

        What is found is also written into the run folder, `inference/level-N.json`, unless it is for one client.

        Args:
            level: 1..L, or its name; the largest by default.
            budget: Average cost of a sample: up to 1 a share of what the last exit costs, above absolute, or with a
                unit ("35 ms", "20 M").
            cost: "multiply_adds", or "latency_s", which is measured on this machine, one sample at a time.
            mode: "budgeted": all samples share the budget. "anytime": each sample has it.
            measure: Confidence: "max" (highest probability), "entropy" or "margin".
            temperature: Scale each exit's logits by a temperature fitted to the validation data.
            client: On whose data; all by default.
            data: Other data of the same shape, with validation and test samples; needed where the run is a fleet's.

        Raises:
            ConfigError: The budget does not reach the first exit, or there is no such level, client, cost or measure.
            DataError: There are no validation or test samples.
        """
        return inference.calibrate(self, level, budget, cost, mode, measure, temperature, client, data)

    @own_mode()
    def export(
        self,
        level: int | str | None,
        out: str | Path,
        forms: Sequence[str] = ("onnx",),
        data: Data | None = None,
        say: Callable[[str], None] = lambda what: None,
    ) -> Export:
        """Write a level's model for devices: tensors, `torch.export` program, ONNX graphs, model card and more.

        Every form is checked against the model on test samples before anything is left behind. If the level was
        calibrated, what is written says when samples leave early.

        Args:
            level: 1..L, or its name; None for the largest.
            out: A folder that is new or empty.
            forms: Beside safetensors and the `torch.export` program: "onnx", "int8", "static-int8" (ONNX both),
                "transformers", "executorch"; `fleetfit.inference.export.FORMS` says what they are.
            data: Whose preprocessing and samples are used; the run's by default.
            say: Told what is done.

        Raises:
            ConfigError: There is no such level or form.
            RunError: The folder is not empty or cannot be written.
            ModelError: The model cannot be traced, or a form does not compute what the model does.
            MissingExtra: A form needs an optional dependency.
        """
        return export(inference.shipped(self, level, data), out, forms, say)

    @own_mode()
    def evaluate(self, **sections: Any) -> dict[str, Any]:
        """Evaluate the newest checkpoint again and return the columns; nothing is written.

        Args:
            **sections: What differs, as sections of a run file: `evaluate={"split": "validation"}`, `data="mnist"`. The
                run of a fleet, whose data are on its nodes, needs `data`, on all of which every level is evaluated.

        Raises:
            DataError: The split that is asked for has no samples.
            ModelError: The state does not fit the model that these data need.
        """
        return inference.evaluated(self, sections)

    def _let_go(self) -> None:
        """Forget what can be read again: the data, the checkpoint."""
        for name in ("assembly", "checkpoint"):
            self.__dict__.pop(name, None)
        self._models.clear()

    def _take_listeners(self) -> list[NamedCallback]:
        """Return the callbacks, made for this run."""
        made, self._listeners = self._listeners, None
        return make_callbacks(self.experiment.callbacks) if made is None else made

    def _take_engine(self) -> rounds.Engine:
        """Return an engine, started for this run; whoever takes it closes it."""
        engine, self._engine = self._engine or self.assembly.engine(), None
        return engine

    @cached_property
    @own_mode()
    def assembly(self) -> Assembly:
        """What the run is made of: data, problem, federation, devices, settings."""
        base = self.files.load_base()
        if self.files.has(NODES):
            made = assemble_fleet(self.experiment, load_planned_nodes(self.files), base or None)
        else:
            made = assemble(self.experiment, base or None)
            made = replace(made, notes=(*made.notes, *find_data_changes(self.files, made)))
        check_base(made.federation.problem, base)
        return made

    @cached_property
    @own_mode()
    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint that can be used.

        Raises:
            RunError: There is none: nothing has been trained yet, or all are damaged or of another model.
        """
        found = usable_checkpoint(self, due=_due(self))
        if found is None:
            raise RunError(
                f'{self.folder} has no checkpoint, so there is no trained model. Go on with it first: "fleetfit resume '
                f'{self.folder}".'
            )
        return found


def _in_own_mode(parts: Iterator[Tensor]) -> Iterator[Tensor]:
    while True:
        with own_mode():
            part = next(parts, None)
        if part is None:
            return
        yield part


@own_mode()
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
    except ValueError as error:  # a number that is too long is one that is no TOMLDecodeError
        raise RunError(f"{files.path / 'config.toml'} is damaged: {error}.") from None
    except RecursionError:
        raise RunError(f"{files.path / 'config.toml'} is damaged: it is nested too deeply.") from None
    if not isinstance(table.get("data"), dict):
        raise RunError(f"{files.path / 'config.toml'} is damaged: it has no [data].")
    for name in files.edited():
        logging.getLogger("fleetfit").warning(
            "%s was changed after this run was begun. It is used as it is now; what it says may not be what "
            "was trained.", files.path / name,
        )  # fmt: skip
    if files.has(COLUMNS) and table["data"].get("name") == "table":
        table["data"]["columns"] = str(files.path / COLUMNS)  # whatever has become of the table since
    _keep_stored_pixels(table)
    if "data" in sections:
        sections["data"] = wrap_in_memory_data(sections["data"], read_sample_shape(files))
    missing = [section for section in find_object_sections(table) if section not in sections]
    if missing:
        again = ", ".join(f"{section}=..." for section in missing)
        raise RunError(
            f"this run was started from Python with objects of its own; open it there and hand them over again: {again}"
        )
    return Run(files, load_experiment(table, is_complete=True, **sections))


def _keep_stored_pixels(table: dict[str, Any]) -> None:
    """Keep the pixels of a run that began before images were turned by their EXIF orientation."""
    for section in (table["data"], table["data"].get("server")):
        if isinstance(section, dict) and section.get("name") in ("images", "imagenet"):
            section.setdefault("exif_orientation", False)


def _due(run: Run) -> int:
    """Return the round of which the newest checkpoint must be, by the reports; 0 where they do not tell."""
    try:
        reported = run.files.count_reports()
    except RunError:  # a trained model can be asked without them
        return 0
    return reported if reported == run.experiment.rounds else reported - reported % run.experiment.checkpoint.every


def usable_checkpoint(run: Run, most: int | None = None, due: int = 0) -> dict[str, Any] | None:
    """Return the newest checkpoint that can be used, or None if there is none at all.

    Args:
        run: Whose.
        most: Of at most this round, after which reports of the rounds are lost.
        due: The round of which the newest must be; where it is of an earlier one, a line says so.

    Raises:
        RunError: There are some, and all are damaged or of another model.
    """

    def fits(nest: Any, round: int) -> None:
        fitting(run.assembly.federation, nest, round)
        if most is not None and round > most:
            raise CheckpointError(f"metrics.jsonl has whole reports of {most} rounds only; put the whole file back")

    found = run.files.load_checkpoint(fits, due)
    if found is None:
        return None
    server = found["server"]
    return {
        **found,
        "server": Server(server["state"], server["round"], server["memory"], server.get("trained", {})),
    }
