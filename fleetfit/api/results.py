"""A run and its folder: cheap to open; the rest is read on first use."""

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
from fleetfit.records.schema import RoundRecord
from fleetfit.report.tables import make_level_table, make_total_table
from fleetfit.state_checks import check_base, check_checkpoint
from fleetfit.tensor_defaults import isolate_torch_state
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
        self.files, self.experiment, self._engine = folder, experiment, engine
        self._models: dict[str, nn.Module] = {}  # of levels, for predictions
        self._notes: tuple[str, ...] | None = None  # if another process assembled it
        self._callbacks: list[NamedCallback] | None = None
        self._comparison = ("", "")  # its title in a comparison, and the comparison's name
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
                summary = self.files.read_summary()
                return (
                    make_level_table(summary).to_html()
                    + make_total_table(summary).to_html()
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
            RunError: They are damaged, or some are missing.
        """
        reports = self.files.metrics()
        self._check_round_count(len(reports))
        return reports

    def _read_rounds(self) -> list[RoundRecord]:
        rounds = self.files.read_rounds()
        self._check_round_count(len(rounds))
        return rounds

    def _check_round_count(self, count: int) -> None:
        path = self.folder / "metrics.jsonl"
        if self.finished and count != (rounds := self.files.read_summary().rounds):
            raise RunError(
                f"{path} has the reports of {count} rounds, and summary.json those of {rounds}. Put the files back "
                "that belong together.",
                path=path,
            )

    @property
    def plan(self) -> Plan:
        """The levels with their sizes and costs."""
        return Plan.from_toml(self.files.text("plan.toml"))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that the user must see, such as which groups cannot take part."""
        if self.finished:
            return tuple(self.files.read_summary().notes)
        return tuple(self.assembly.notes) if self._notes is None else self._notes

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers, as in `summary.json`.

        Raises:
            RunError: The run is not finished, or the file is damaged.
        """
        if not self.finished:
            raise RunError(
                f'{self.folder} is not finished; continue it: "fleetfit resume {self.folder}".', path=self.folder
            )
        self.files.read_summary()
        return dict(self.files.json("summary.json"))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of the last evaluation: split, then per batch-norm policy all accuracies.

        Raises:
            RunError: Nothing has been evaluated yet.
        """
        for report in reversed(self.metrics):
            if "evaluate" in report:
                return dict(report["evaluate"])
        raise RunError(f"{self.folder} has no evaluation yet.", path=self.folder)

    def accuracy(self, kind: str = "local", level: int | None = None, norm: str | None = None) -> float:
        """Return one accuracy of the last evaluation, between 0 and 1.

        Args:
            kind: "local" or "global", or any other number in the columns ("avg", "full", "ensemble", ...).
            level: For "local" only: that level's clients alone; levels are 1..L.
            norm: Batch-norm policy, "static" or "batch"; the first of `evaluate.norms` by default.

        Raises:
            ConfigError: The columns do not have that number.
        """
        return find_accuracy(self.columns, kind, level, norm or self.experiment.evaluate.norms[0])

    @property
    def server(self) -> Server:
        """The server after the last round that has a checkpoint."""
        return cast(Server, self.checkpoint["server"])

    @isolate_torch_state()
    def model(self, level: int | str | None = None) -> nn.Module:
        """Return a level's model as a plain module in eval mode, with static batch-norm statistics.

        Args:
            level: 1..L, or its name ("S1" of AdaptiveFL's pool); the largest by default.

        Raises:
            ConfigError: There is no such level.
        """
        return inference.build_level_module(self, level)

    # -- inference

    @isolate_torch_state()
    def predict(self, x: Tensor, level: int | str | None = None) -> Tensor:
        """Return a level's last logits [B, classes].

        Args:
            x: Samples [B, ...], as `Data.batch` returns them.
            level: 1..L, or its name; the largest by default.

        Raises:
            ConfigError: There is no such level, or x holds other samples than the run's.
        """
        return next(predictions(inference.load_model(self, level), inference.check_samples(self, x), every=False))

    def predict_exits(self, x: Tensor, level: int | str | None = None) -> Iterator[Tensor]:
        """Yield a level's logits [B, classes] exit by exit, as soon as they are computed (ScaleFL, Algorithm 4).

        Nothing is computed twice; a caller that stops early saves the rest.

        Args:
            x: Samples [B, ...], as `Data.batch` returns them.
            level: 1..L, or its name; the largest by default.

        Raises:
            ConfigError: There is no such level, or x holds other samples than the run's.
            ModelError: The model cannot be run segment by segment.
        """
        with isolate_torch_state():
            parts = predictions(inference.load_model(self, level), inference.check_samples(self, x))

        def iterate() -> Iterator[Tensor]:
            while True:
                with isolate_torch_state():
                    logits = next(parts, None)
                if logits is None:
                    return
                yield logits

        return iterate()

    @isolate_torch_state()
    def best_exit(self, level: int | str | None = None, client: int | None = None) -> int:
        """Return the exit of a level, from 1, that is best on validation data; of equal ones the shallowest.

        Args:
            level: 1..L, or its name; the largest by default.
            client: Whose validation data; all by default.

        Raises:
            ConfigError: There is no such level or client, or the task is not a classification.
            DataError: There are no validation samples.
        """
        return inference.best_exit(self, level, client)

    @isolate_torch_state()
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
        """Choose on validation data when samples leave early for an average budget, and evaluate it on test data.

        The calibration is also written into the run folder, `inference/level-N.json`, unless it is for one client.

        Args:
            level: 1..L, or its name; the largest by default.
            budget: Average cost of a sample: up to 1 a share of what the last exit costs, above absolute, or with a
                unit ("35 ms", "20 M").
            cost: "multiply_adds", or "latency_s", which is measured on this machine, one sample at a time.
            mode: "budgeted": all samples share the budget. "anytime": each sample has it.
            measure: Confidence: "max" (highest probability), "entropy" or "margin".
            temperature: Scale each exit's logits by a temperature fitted to the validation data.
            client: On whose data; all by default.
            data: Other data of the same shape, with validation and test samples; needed for the run of a fleet.

        Raises:
            ConfigError: The budget does not reach the first exit, or there is no such level, client, cost or measure.
            DataError: There are no validation or test samples.
        """
        return inference.calibrate(self, level, budget, cost, mode, measure, temperature, client, data)

    @isolate_torch_state()
    def export(
        self,
        level: int | str | None,
        out: str | Path,
        forms: Sequence[str] = ("onnx",),
        data: Data | None = None,
        say: Callable[[str], None] = lambda what: None,
    ) -> Export:
        """Write a level's model for devices: tensors, `torch.export` program, ONNX graphs, model card and more.

        Every form is checked against the model on test samples before the folder appears. If the level was calibrated,
        the files have the thresholds at which samples leave early.

        Args:
            level: 1..L, or its name; None for the largest.
            out: A folder that is new or empty.
            forms: Beside safetensors and the `torch.export` program: "onnx", "int8", "static-int8" (ONNX both),
                "transformers", "executorch"; `fleetfit.inference.export.FORMS` describes them.
            data: Whose preprocessing and samples are used; the run's by default.
            say: Called with each form before it is written.

        Raises:
            ConfigError: There is no such level or form.
            RunError: The folder is not empty or cannot be written.
            ModelError: The model cannot be traced, or a form does not compute what the model does.
            MissingExtra: A form needs an optional dependency.
        """
        return export(inference.prepare_export(self, level, data), out, forms, say)

    @isolate_torch_state()
    def evaluate(self, **sections: Any) -> dict[str, Any]:
        """Evaluate the newest checkpoint again and return the columns; nothing is written.

        Args:
            **sections: Changed sections of a run file: `evaluate={"split": "validation"}`, `data="mnist"`. The run of a
                fleet, whose data are on its nodes, needs `data`; every level is evaluated on all of them.

        Raises:
            DataError: The split has no samples.
            ModelError: The state does not fit the model that these data need.
        """
        return inference.evaluate_run(self, sections)

    def _release_memory(self) -> None:
        """Drop the data, the checkpoint and the models, which can be loaded again."""
        for name in ("assembly", "checkpoint"):
            self.__dict__.pop(name, None)
        self._models.clear()

    def _take_callbacks(self) -> list[NamedCallback]:
        callbacks, self._callbacks = self._callbacks, None
        return make_callbacks(self.experiment.callbacks) if callbacks is None else callbacks

    def _take_engine(self) -> rounds.Engine:
        """Return an engine, started for this run; the caller closes it."""
        engine, self._engine = self._engine or self.assembly.engine(), None
        return engine

    @cached_property
    @isolate_torch_state()
    def assembly(self) -> Assembly:
        """The objects of the run: data, problem, federation, devices, settings."""
        base = self.files.load_base()
        if self.files.has(NODES):
            assembly = assemble_fleet(self.experiment, load_planned_nodes(self.files), base or None)
        else:
            assembly = assemble(self.experiment, base or None)
            assembly = replace(assembly, notes=(*assembly.notes, *find_data_changes(self.files, assembly)))
        check_base(assembly.federation.problem, base)
        return assembly

    @cached_property
    @isolate_torch_state()
    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint that can be used.

        Raises:
            RunError: There is none: nothing has been trained yet, or all are damaged or of another model.
        """
        try:
            reported = self.files.count_reports()
        except RunError:  # a trained model can be used without the reports
            reported = 0
        last = reported == self.experiment.rounds
        due = reported if last else reported - reported % self.experiment.checkpoint.every
        checkpoint = load_usable_checkpoint(self, due=due)
        if checkpoint is None:
            raise RunError(
                f'{self.folder} has no checkpoint, so it has no trained model. Continue it first: "fleetfit resume '
                f'{self.folder}".',
                path=self.folder,
            )
        return checkpoint


@isolate_torch_state()
def load(folder: str | Path, **sections: Any) -> Run:
    """Open a run folder.

    Args:
        folder: The run folder.
        **sections: The objects that stood in for names, if the run was started from Python with some.

    Raises:
        RunError: It is not a run folder, or its configuration cannot be read.
    """
    files = RunFolder.open(folder)
    path = files.path / "config.toml"
    try:
        table = tomllib.loads(files.text("config.toml"))
    except ValueError as error:  # a number that is too long raises one that is not a TOMLDecodeError
        raise RunError(f"{path} is damaged: {error}.", path=path) from None
    except RecursionError:
        raise RunError(f"{path} is damaged: it is nested too deeply.", path=path) from None
    if not isinstance(table.get("data"), dict):
        raise RunError(f"{path} is damaged: it has no [data].", key="data", path=path)
    for name in files.find_edited_files():
        logging.getLogger("fleetfit").warning(
            "%s was changed after this run began. It is used as it is now; the model may have been trained with other "
            "values.",
            files.path / name,
        )
    if files.has(COLUMNS) and table["data"].get("name") == "table":
        table["data"]["columns"] = str(files.path / COLUMNS)  # the table itself may have changed since
    for section in (table["data"], table["data"].get("server")):
        if isinstance(section, dict) and section.get("name") in ("images", "imagenet"):
            section.setdefault("exif_orientation", False)  # the run began before images were turned by their EXIF
    if "data" in sections:
        sections["data"] = wrap_in_memory_data(sections["data"], read_sample_shape(files))
    missing = [section for section in find_object_sections(table) if section not in sections]
    if missing:
        arguments = ", ".join(f"{section}=..." for section in missing)
        raise RunError(
            f"this run was started from Python with objects of its own; open it there and pass them again: {arguments}",
            key=missing[0],
            path=files.path,
        )
    return Run(files, load_experiment(table, is_complete=True, **sections))


def load_usable_checkpoint(run: Run, most: int | None = None, due: int = 0) -> dict[str, Any] | None:
    """Return the newest checkpoint that can be used, or None if there is none at all.

    Args:
        run: The run.
        most: The last round with a whole report; a later checkpoint is refused.
        due: The round that the newest must be of; if it is of an earlier one, a line says so.

    Raises:
        RunError: There are some, and all are damaged or of another model.
    """

    def check(checkpoint: Any, round: int) -> None:
        check_checkpoint(run.assembly.federation, checkpoint, round)
        if most is not None and round > most:
            raise CheckpointError(f"metrics.jsonl has whole reports of {most} rounds only; put the whole file back")

    checkpoint = run.files.load_checkpoint(check, due)
    if checkpoint is None:
        return None
    server = checkpoint["server"]
    return {
        **checkpoint,
        "server": Server(server["state"], server["round"], server["memory"], server.get("trained", {})),
    }
