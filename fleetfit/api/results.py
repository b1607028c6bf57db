"""`Run`: a run and its folder. It is cheap to open, and reads files on first use."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict, Unpack, cast, get_args

from torch import Tensor, nn

from fleetfit.anatomy import predictions
from fleetfit.api.callbacks import NamedCallback, make_callbacks
from fleetfit.api.code import find_code_changes
from fleetfit.api.commands import format_resume
from fleetfit.api.progress import ProgressOption, RoundFacts, RunDisplay, format_html, open_display
from fleetfit.callbacks import scalars
from fleetfit.config import Assembly, Experiment
from fleetfit.config.assemble.data import build_data
from fleetfit.config.assemble.run import assemble, assemble_fleet, assemble_without_data
from fleetfit.config.detect import wrap_in_memory_data
from fleetfit.config.dump import dump_experiment, find_object_sections
from fleetfit.config.load import restore_experiment
from fleetfit.config.merge import Table, drop_absent
from fleetfit.core import NodeDescription, Server
from fleetfit.data import AbsentData, Data, DataInMemory
from fleetfit.data.files.folders import resolve_folder
from fleetfit.data.transform import FILE, TOKENIZER
from fleetfit.engines.base import Engine
from fleetfit.errors import (
    COMMAND,
    ConfigError,
    FleetFitError,
    RunError,
    did_you_mean,
    format_expected,
    import_optional,
)
from fleetfit.machine import isolate_torch_state
from fleetfit.markup import escape_html
from fleetfit.names import explain_plug_ins, find_attribute
from fleetfit.planner import Plan, add_change
from fleetfit.privacy import check_key_place, load_key
from fleetfit.privacy.ledger import FILE as LEDGER
from fleetfit.report.tables import make_level_table, make_total_table
from fleetfit.rounds import PlateauDetector
from fleetfit.rounds.restore import check_base, check_checkpoint
from fleetfit.runs.checkpoints import CheckpointError
from fleetfit.runs.data import CHANGED, format_difference, load_transform, make_fingerprint
from fleetfit.runs.folder import NODES, RunFolder, parse_round
from fleetfit.runs.schema import FingerprintRecord, RoundRecord

if TYPE_CHECKING:
    from fleetfit.api.predictions import Exit, Predictions
    from fleetfit.inference import Calibration, Measure, Mode
    from fleetfit.inference.export import Export
    from fleetfit.inference.export.prior import Counts


DERIVED = "derived.json"
"""What was derived from a plain module, in the folder of a run of one."""


CheckpointName = Literal["last", "best"]
"""The checkpoint of which a run has its trained model."""


class Objects(TypedDict, total=False):
    """The sections that may have an object in place of a name, which a run folder does not have."""

    model: Any
    data: Any
    method: Any
    cohort: Any
    attack: Any
    peft: Any
    engine: Any


class Run:
    """A run and its folder.

    Attributes:
        files: The run folder.
        experiment: The complete description of the run.
    """

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        assembly: Assembly | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.files, self.experiment, self._engine = folder, experiment, engine
        self._best: int | None = None  # the round whose checkpoint is used; None for the newest one
        self._models: dict[str, nn.Module] = {}  # of levels, for predictions
        self._notes: tuple[str, ...] | None = None  # while a comparison runs it
        self._callbacks: list[NamedCallback] | None = None
        self._change: tuple[int, Sequence[str]] | None = None  # keys that are about to change, and the round
        if assembly is not None:
            self.__dict__["assembly"] = assembly

    if not TYPE_CHECKING:  # a type checker refuses other names itself
        __getattr__ = find_attribute

    def __repr__(self) -> str:
        """Return the folder and the progress of the run."""
        failed = self.summary["failures"] if self.finished else 0
        progress = f"{len(self.metrics)} of {self.experiment.rounds} rounds{', finished' * self.finished}"
        if self._best is not None:
            progress += f", best after round {self._best}"
        return f"Run({str(self.folder)!r}, {progress}{f', {failed} failed jobs' if failed else ''})"

    def _repr_html_(self) -> str:
        """Return the tables of a finished run, or the progress of an unfinished one, for notebooks."""
        try:
            if self.finished:
                summary = self.files.read_summary()
                return (
                    make_level_table(summary).to_html()
                    + make_total_table(summary).to_html()
                    + f"<p>{escape_html(str(self.folder))}</p>"
                )
            facts = RoundFacts(self.experiment.rounds, self.experiment.evaluate.batch_norm[0])
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
        """Whether all rounds are finished and the summary is written."""
        return self.files.has("summary.json")

    @property
    def _is_over(self) -> bool:
        """Whether no round is left: all are finished, or early stopping or the privacy budget has ended the run."""
        if not self.finished:
            return False
        evaluate, rounds = self.experiment.evaluate, self.experiment.rounds
        if self.experiment.is_private:
            rounds = self.assembly.settings.rounds  # those within the budget
        stopping = PlateauDetector(evaluate.patience, evaluate.batch_norm[0], self.files.metrics())
        return stopping.is_due or self.files.read_summary().rounds >= rounds

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The reports of all rounds so far.

        Raises:
            RunError: Reports are damaged or missing.
        """
        reports = self.files.metrics()
        self._check_round_count(len(reports))
        return reports

    def to_frame(self) -> Any:
        """Return the numbers of all rounds so far as a `pandas.DataFrame`, a line for each round, such as for plots.

        The columns are those of `fleetfit.callbacks.scalars`, without `train/` and without `evaluate/` and the first
        batch-norm policy: `loss`, `local`, `global`, `levels/1/local`. Accuracies are between 0 and 1, and missing in
        rounds that were not evaluated.

        Raises:
            MissingExtra: pandas is not installed.
            RunError: Reports are damaged or missing.
        """
        pandas = import_optional("pandas", "tables", "A data frame")
        prefix = re.compile(rf"^(?:train|evaluate/{self.experiment.evaluate.batch_norm[0]})/")
        rows = [
            {"round": report["round"], **{prefix.sub("", name, 1): number for name, number in scalars(report).items()}}
            for report in self.metrics
        ]
        return pandas.DataFrame(rows, columns=None if rows else ["round"]).set_index("round")

    def _read_rounds(self) -> list[RoundRecord]:
        rounds = self.files.read_rounds()
        self._check_round_count(len(rounds))
        return rounds

    def _check_round_count(self, count: int) -> None:
        path = self.folder / "metrics.jsonl"
        if self.finished and count != (rounds := self.files.read_summary().rounds):
            raise RunError(
                f"{path} has reports of {count} rounds, but summary.json of {rounds}. Restore the files of the same "
                "run.",
                path=path,
            )

    @property
    def plan(self) -> Plan:
        """The levels with their sizes and costs."""
        return self.files.read_plan()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, such as on groups that cannot take part."""
        if self._notes is not None:
            return self._notes
        return tuple(self.files.read_summary().notes if self.finished else self.assembly.notes)

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers, as in `summary.json`.

        Raises:
            RunError: The run is not finished, or the file is damaged.
        """
        if not self.finished:
            raise RunError(
                f"{self.folder} is not finished. Continue it with:{COMMAND}{format_resume(self.folder)}",
                path=self.folder,
            )
        self.files.read_summary()
        return dict(self.files.json("summary.json"))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of the last evaluation (of the best one after `load(folder, "best")`).

        They are the split, and all accuracies per batch-norm policy.

        Raises:
            RunError: The run has no evaluation yet.
        """
        for report in reversed(self.metrics[: self._best]):
            if "evaluate" in report:
                return dict(report["evaluate"])
        raise RunError(f"{self.folder} has no evaluation yet.", path=self.folder)

    def accuracy(self, kind: str = "local", level: int | None = None, norm: str | None = None) -> float:
        """Return one accuracy of the last evaluation, between 0 and 1.

        Args:
            kind: "local" or "global", or any other number in the columns ("avg", "full", "ensemble", ...).
            level: For "local" only: accuracy on the level's clients. Levels are 1..L.
            norm: Batch-norm policy, "static" or "batch"; the first of `evaluate.batch_norm` by default.

        Raises:
            ConfigError: The columns do not have the number.
        """
        return find_accuracy(self.columns, kind, level, norm or self.experiment.evaluate.batch_norm[0])

    @property
    def server(self) -> Server:
        """The server after the last round with a checkpoint, or after the best one."""
        return cast(Server, self.checkpoint["server"])

    @isolate_torch_state()
    @explain_plug_ins()
    def model(self, level: int | str | None = None) -> nn.Module:
        """Return a level's model as a plain module in eval mode, with static batch-norm statistics.

        It returns the logits of each exit, shallow to deep. Where all levels of a plain `torch.nn.Module` have one
        exit, they return the logits alone, as the module does. Of a regression, they are standardized as in training:
        `predict` and exported files answer in the unit of the targets.

        Args:
            level: 1..L, or its name ("S1" of AdaptiveFL's pool); by default the largest trained.

        Raises:
            ConfigError: The level is unknown.
        """
        from fleetfit.api import inference

        return inference.build_level_module(self, level)

    @isolate_torch_state()
    @explain_plug_ins()
    def prepare(self, data: Any = None, *, split: str = "test", client: int | None = None) -> Tensor:
        """Return samples as the modules of `model` take them: normalized images, encoded rows, or tokens [N, ...].

        Padding that all texts have is cut.

        Args:
            data: As of `predict`.
            split: As of `predict`.
            client: As of `predict`.

        Raises:
            ConfigError: The client is unknown.
            DataError: The samples do not fit the run's.
        """
        from fleetfit.api import inference

        samples = inference.select_data(self, client, data, labels=False)
        return samples.batch(samples.split(split))[0]

    # -- inference: its modules are imported when they are first used

    @isolate_torch_state()
    @explain_plug_ins()
    def predict(
        self,
        data: Any = None,
        *,
        level: int | str | None = None,
        exit: "Exit" = "last",
        split: str = "test",
        client: int | None = None,
        batch_size: int = 256,
    ) -> "Predictions":
        """Return a level's predictions: classes by name, probabilities, the exit that answered and its cost.

        Samples are prepared as the training data were, so pass them as they were given for training. They need no
        labels. `run.model(level)` is the module for tensors of `run.prepare`.

        Args:
            data: A file or folder in the format of the training data, a built-in data set's name, a data frame or
                another table, a list of texts, arrays or tensors (without labels, or `(x, y)`), a torch Dataset or
                DataLoader, or a `fleetfit.Data`. None: the run's own data.
            level: 1..L, or its name; by default the largest trained, even if a smaller one is more accurate.
            exit: "last"; "best" on validation data; "early": the first that is as confident as `calibrate` wants; or
                "all": each one (`by_exit` has their predictions).
            split: The split that is predicted, of data with splits: "test", "validation" or "train".
            client: The client whose part of the run's own data is used; all by default.
            batch_size: Samples per forward pass.

        Raises:
            ConfigError: The level, exit or client is unknown, or the level is not calibrated.
            DataError: There are no samples, or they do not fit the run's.
        """
        from fleetfit.api.predictions import predict

        return predict(self, data, level, exit, split, client, batch_size)

    def predict_exits(
        self, data: Any = None, *, level: int | str | None = None, split: str = "test", client: int | None = None
    ) -> Iterator[Tensor]:
        """Yield the logits [N, classes] of all samples exit by exit, as they are computed (ScaleFL, Algorithm 4).

        Nothing is computed twice. If the caller stops early, later exits are not computed.

        Args:
            data: As of `predict`.
            level: 1..L, or its name; by default the largest trained, even if a smaller one is more accurate.
            split: As of `predict`.
            client: As of `predict`.

        Raises:
            ConfigError: The level is unknown.
            DataError: The samples do not fit the run's.
            ModelError: The model cannot be run segment by segment.
        """
        from fleetfit.api import inference

        x = self.prepare(data, split=split, client=client)
        with isolate_torch_state():
            parts = predictions(inference.load_model(self, level), x)

        def iterate() -> Iterator[Tensor]:
            while True:
                with isolate_torch_state():
                    logits = next(parts, None)
                if logits is None:
                    return
                yield logits

        return iterate()

    @isolate_torch_state()
    @explain_plug_ins()
    def best_exit(self, level: int | str | None = None, client: int | None = None) -> int:
        """Return the exit of a level (from 1) with the best validation accuracy; the shallowest on a tie.

        Args:
            level: 1..L, or its name; by default the largest trained, even if a smaller one is more accurate.
            client: The client whose validation data are used; all by default.

        Raises:
            ConfigError: The level or client is unknown, or the task is not a classification.
            DataError: There are no validation samples.
        """
        from fleetfit.api import inference

        return inference.best_exit(self, level, client)

    @isolate_torch_state()
    @explain_plug_ins()
    def calibrate(
        self,
        level: int | str | None = None,
        *,
        budget: float | str = 0.75,
        cost: str = "multiply_adds",
        mode: "Mode" = "budgeted",
        measure: "Measure" = "max",
        temperature: bool = False,
        client: int | None = None,
        data: Any = None,
    ) -> "Calibration":
        """Choose early-stopping thresholds for an average budget on validation data, and evaluate them on test data.

        The calibration is also written to the run folder (`inference/level-N.json`), unless it is for one client.

        Args:
            level: 1..L, or its name; by default the largest trained, even if a smaller one is more accurate.
            budget: Average cost of a sample: a fraction of the last exit's cost (up to 1), absolute above 1, or with a
                unit ("35 ms", "20 M").
            cost: "multiply_adds" or "latency_s" (measured on this machine, one sample at a time).
            mode: "budgeted": the budget is an average over samples. "anytime": it holds for each sample.
            measure: Confidence: "max" (highest probability), "entropy" or "margin".
            temperature: Scale each exit's logits by a temperature fitted to the validation data.
            client: The client whose data are used; all by default.
            data: Other data with labels, as of `predict`; without splits, one half is for validation. A fleet's run
                needs them.

        Raises:
            ConfigError: The budget is not between the costs of the first and the last exit, or a level, client, cost or
                measure is unknown.
            DataError: There are no validation or test samples.
        """
        from fleetfit.api import inference

        return inference.calibrate(self, level, budget, cost, mode, measure, temperature, client, data)

    @isolate_torch_state()
    @explain_plug_ins()
    def export(
        self,
        out: str | Path,
        level: int | str | None = None,
        forms: str | Sequence[str] = ("onnx",),
        *,
        data: Any = None,
        progress: ProgressOption | RunDisplay = "auto",
        prior: "Counts | str | Path | None" = None,
    ) -> "Export":
        """Export a level's model for devices: tensors, `torch.export` program, ONNX graphs, model card and more.

        Each form is checked against the model on test samples before the folder is written. If the level is calibrated,
        the files have its thresholds of early stopping.

        Args:
            out: A new or empty folder.
            level: 1..L, or its name; by default the largest trained, even if a smaller one is more accurate.
            forms: One or more forms besides safetensors and the `torch.export` program: "onnx", "int8", "static-int8"
                (ONNX both), "transformers", "executorch"; docs/ship.md describes them.
            data: Source of preprocessing and samples; the run's data by default.
            progress: Whether to name each form before it is written (see `fleetfit.run`).
            prior: A client's samples of each class, in order or by name; a JSON file with them; or "own": the labels of
                `data`. Its log frequencies, relative to the fleet's, become part of the logits: personal predictions.
                The files then reveal them.

        Raises:
            ConfigError: The level or a form is unknown.
            RunError: The folder is not empty or cannot be written.
            ModelError: The model cannot be traced, or a form computes other results.
            MissingExtra: A form needs an optional dependency.
        """
        from fleetfit.api import inference
        from fleetfit.inference.export import export

        with open_display(progress) as display:
            model = inference.prepare_export(self, level, data, prior)
            forms = [forms] if isinstance(forms, str) else forms
            return export(model, out, forms, lambda form: display.say(f"Writing {form}"))

    @isolate_torch_state()
    @explain_plug_ins()
    def evaluate(
        self,
        data: Any = None,
        *further: Never,
        split: str | None = None,
        batch_size: int | None = None,
        **sections: Any,
    ) -> dict[str, Any]:
        """Evaluate the run's checkpoint again and return the columns. Writes no files.

        Args:
            data: Other data with labels, as of `predict`, or keys of `[data]`. None: the run's own data. A fleet's run
                needs others, because its own data are on its nodes. Each level is evaluated on all of them; a data
                set by name is divided among the clients instead.
            *further: Nothing. Samples and labels are one pair, `(x, y)`.
            split: "test", "validation" or "train"; that of the run by default.
            batch_size: Samples per forward pass; that of the run by default.
            **sections: Other changed sections of a run file: `evaluate={"batch_norm": ["batch"]}`. Of data that are not
                divided among the clients only keys of `evaluate`.

        Raises:
            ConfigError: Labels are passed apart from the samples, or a key is wrong or has no effect on the data.
            DataError: The split has no samples.
            ModelError: The state does not fit the model that the data need.
        """
        from fleetfit.api import inference

        if further:
            raise ConfigError("evaluate takes samples and labels as one pair: run.evaluate((x, y)).", key="data")
        changes = {key: value for key, value in (("split", split), ("batch_size", batch_size)) if value is not None}
        if changes:
            sections["evaluate"] = {**sections.get("evaluate", {}), **changes}
        return inference.evaluate_run(self, {**({} if data is None else {"data": data}), **sections})

    def _release_memory(self) -> None:
        """Release the data, the checkpoint, the models and the notes. They are loaded again when needed."""
        for name in ("assembly", "checkpoint"):
            self.__dict__.pop(name, None)
        self._models.clear()
        self._notes = None

    def _take_callbacks(self) -> list[NamedCallback]:
        callbacks, self._callbacks = self._callbacks, None
        return make_callbacks(self.experiment.callbacks) if callbacks is None else callbacks

    def _take_engine(self) -> Engine:
        """Return an engine for this run. The caller closes it."""
        engine, self._engine = self._engine or self.assembly.engine(), None
        return engine

    @cached_property
    @isolate_torch_state()
    @explain_plug_ins()
    def assembly(self) -> Assembly:
        """The objects of the run: data, problem, federation, devices, settings.

        Raises:
            RunError: The run was started with an object that is missing.
        """
        if missing := find_object_sections(dump_experiment(self.experiment)):
            arguments = ", ".join(f"{section}=..." for section in missing)
            raise RunError(
                "this run was started from Python with objects. Open it there, to predict, evaluate, calibrate and "
                f'export, or continue it:{COMMAND}ff.load("{self.folder}", {arguments}){COMMAND}'
                f'ff.resume("{self.folder}", {arguments})',
                key=missing[0],
                path=self.folder,
            )
        if self.files.has(NODES):
            return self._plan_for(self.files.read_nodes())
        base, kept = self.files.load_base(), self._read_kept_plan()
        if (absent := self._find_absent_data()) is not None:
            fleet, batch_size = self.files.read_fleet(), self.plan.batch_size
            assembly = assemble_without_data(
                self.experiment, absent, fleet.clients or 1, batch_size, base or None, kept
            )
        else:
            assembly = assemble(self.experiment, base or None, kept=kept)
            changes = find_data_changes(self.files, assembly)
            assembly = replace(assembly, notes=(*assembly.notes, *changes))
            for sentence in changes if self.finished else ():  # whose notes are those of its end
                logging.getLogger("fleetfit").warning("%s", sentence)
        return self._describe_changes(assembly, base)

    def _plan_for(self, nodes: Sequence[NodeDescription]) -> Assembly:
        """Return the objects of a fleet's run with levels for some nodes; the run has them from then on."""
        base = self.files.load_base()
        assembly = assemble_fleet(self.experiment, nodes, base or None, self._read_kept_plan())
        self.__dict__["assembly"] = self._describe_changes(assembly, base)
        return self.assembly

    def _read_kept_plan(self) -> Plan | None:
        return self.files.read_plan() if self.files.has("plan.toml") else None

    def _describe_changes(self, assembly: Assembly, base: Mapping[str, Tensor]) -> Assembly:
        files = RunFolder(self.files.path)  # which were perhaps written since then
        kept, changed = self._read_kept_plan(), list[tuple[int, Sequence[str]]]()
        changed += [(one.round, one.keys) for one in files.environment.changed]
        changed += [self._change] if self._change is not None else []
        check_base(assembly.federation.problem, base)
        if kept is not None:
            plan = add_change(assembly.plan, kept, find_last_round(self.files))
            assembly = replace(assembly, plan=plan)
        return replace(assembly, notes=(*assembly.notes, *describe_changes(changed, assembly.plan)))

    def _find_absent_data(self) -> AbsentData | None:
        """Return the facts of the data if their files are gone; None if they are there."""
        section = self.experiment.data
        if isinstance(section.name, AbsentData):
            return section.name
        paths = [section.settings.get(key) for key in ("folder", "file")]
        if not self.files.has(FILE) or all(path is None or resolve_folder(path).exists() for path in paths):
            return None
        try:
            build_data(section)
        except FleetFitError as error:
            return load_transform(self.files).describe(str(error))
        return None

    @cached_property
    @isolate_torch_state()
    @explain_plug_ins()
    def checkpoint(self) -> dict[str, Any]:
        """The newest usable checkpoint, or the best one.

        Raises:
            RunError: There is no usable checkpoint: nothing is trained yet, or all are damaged or of another model.
        """
        if self._best is not None:
            best = load_usable_checkpoint(self, only=self._best)
            if best is None:
                raise RunError(
                    f"{self.folder}: the checkpoint of its best round, {self._best}, is missing.",
                    path=self.folder / "checkpoints",
                )
            return best
        try:
            reported = self.files.count_reports()
        except RunError:  # a trained model is usable without the reports
            reported = 0
        last = reported == self.experiment.rounds
        due = reported if last else reported - reported % self.experiment.checkpoint.every
        checkpoint = load_usable_checkpoint(self, due=due)
        if checkpoint is None:
            raise RunError(
                f"{self.folder} has no checkpoint, and so no trained model. Continue it with:{COMMAND}"
                f"{format_resume(self.folder)}",
                path=self.folder,
            )
        return checkpoint


def find_accuracy(columns: Mapping[str, Any], kind: str, level: int | None, norm: str) -> float:
    """Return one accuracy of an evaluation's columns (see `Run.accuracy`).

    Raises:
        ConfigError: The columns do not have the number.
    """
    if norm not in columns:
        norms = ", ".join(name for name in ("static", "batch") if name in columns)
        raise ConfigError(f'this run has no "{norm}" columns. Its evaluate.batch_norm has {norms}.', key="norm")
    values = columns[norm]
    if kind not in values and kind in values.get("metrics", {}):
        raise ConfigError(
            f'"{kind}" is a metric of the run, not an accuracy: run.columns["{norm}"]["metrics"]["{kind}"] has its '
            "numbers, global, local and those of levels and exits.",
            key="kind",
        )
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
    if not isinstance(values.get(kind), float):
        numbers = [key for key, value in values.items() if isinstance(value, float)]  # counts are whole numbers
        raise ConfigError(
            f'no such accuracy: "{kind}". The accuracies are {", ".join(numbers)}.{did_you_mean(kind, numbers)}',
            key="kind",
        )
    return float(values[kind])


def describe_changes(changed: Iterable[tuple[int, Sequence[str]]], plan: Plan) -> list[str]:
    """Return notes on what a run continued with that it did not begin with: keys after a round, and levels."""
    notes = [
        f"After round {round} the run continued with other values of {', '.join(keys)}." for round, keys in changed
    ]
    shares = {level.name: f" ({100 * level.share:.0f}% of the full model's {plan.cost})" for level in plan.levels}
    for change in plan.changes:
        parts = [f"level {name}{shares.get(name, '')} is new" for name in change.added]
        parts += [f"level {name} is gone" for name in change.dropped]
        notes.append(
            f"After round {change.round} the levels changed: {', '.join(parts)}. The others keep their shapes. From "
            "there on the run has other bits than one whose levels stayed."
        )
    return notes


def find_last_round(files: RunFolder) -> int:
    """Return the round after which a run is resumed."""
    newest = max(map(parse_round, files.checkpoints()), default=0)
    return min(newest, files.count_reports())


def find_fingerprint(assembly: Assembly) -> FingerprintRecord | None:
    """Return the fingerprint of a run's data; None for private and secure runs, and for data on nodes."""
    data, settings = assembly.data, assembly.settings
    has_one = isinstance(data, Data) and settings.privacy is None and settings.secure is None
    return make_fingerprint(data) if has_one else None  # type: ignore[arg-type]


def find_data_changes(files: RunFolder, assembly: Assembly) -> tuple[str, ...]:
    """Return a sentence if the data of a resumed run have changed since its start."""
    before, data = files.environment.data, assembly.data
    if before is None or not isinstance(data, Data):
        return ()
    changes = format_difference(before, make_fingerprint(data))
    return (
        (
            f"{CHANGED} this run began: {changes}. Earlier and later rounds train on different data, and accuracy is "
            "measured on the new data. Restore the data, or start a new run. To score other samples, use "
            "run.evaluate(data).",
        )
        if changes
        else ()
    )


@isolate_torch_state()
@explain_plug_ins()
def load(folder: str | Path, checkpoint: CheckpointName = "last", **objects: Unpack[Objects]) -> Run:
    """Open a run folder.

    A run that was started from Python with objects in place of names needs them for its model and data. Its numbers can
    be read without.

    Args:
        folder: The run folder.
        checkpoint: The trained model: of the "last" checkpoint, or of the "best" round, the one with the highest local
            accuracy on validation data. Runs with `evaluate.split = "validation"` keep it.
        **objects: The objects in place of names, as `run` got them.

    Raises:
        ConfigError: The name of a checkpoint is unknown.
        RunError: The folder is not a run folder, its configuration cannot be read, or it has no best checkpoint.
    """
    if checkpoint not in get_args(CheckpointName):
        expected = format_expected("'last' or 'best'", checkpoint)
        raise ConfigError(f"checkpoint {expected}", key="checkpoint")
    files = RunFolder.open(folder)
    run = open_run(files, objects, files.read_config())
    run._best = _find_best_round(files, run.experiment) if checkpoint == "best" else None
    return run


def open_run(files: RunFolder, objects: Mapping[str, Any], table: Table) -> Run:
    """Return the run of a folder.

    Args:
        files: The run folder.
        objects: The objects in place of names. Without them, the run's files can be read.
        table: The tables of its `config.toml`, or changed ones.

    Raises:
        ConfigError: A key is unknown, or a value has a wrong type or is out of range.
        RunError: The tables are damaged.
    """
    sections = drop_absent(objects)
    for key in sections.keys() - Objects.__annotations__.keys():
        raise ConfigError(f"{key}: a run keeps its settings. Change them in {files.path / 'config.toml'}.", key=key)
    table = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    if not isinstance(table.get("data"), dict):
        path = files.path / "config.toml"
        raise RunError(f"{path} is damaged: it has no [data].", key="data", path=path)
    if files.has(FILE) and ("transform" in table["data"] or table["data"].get("name") == "table"):
        table["data"]["transform"] = str(files.path)  # the table may have changed since then
    if files.has(DERIVED) and not hasattr(sections.get("model"), "build"):  # levels stay as they were derived
        sections["recorded"] = {"derived": str(files.path / DERIVED)}
    if "data" in sections:
        recorded = files.environment.data
        shape = (
            () if recorded is None or len(recorded.shape) == 2 else recorded.shape
        )  # the channels of series are found
        sections["data"] = wrap_in_memory_data(sections["data"], shape, table["data"])
    source = {**table["data"], **sections["data"]} if isinstance(sections.get("data"), dict) else table["data"]
    if files.has(TOKENIZER) and (source.get("name") == "text" or isinstance(source.get("name"), DataInMemory)):
        table["data"].setdefault("tokenizer", str(files.path / TOKENIZER))  # other texts would have other word pieces
    missing = [section for section in find_object_sections(table) if section not in sections]
    if missing == ["data"] and files.has(FILE):
        reason = "This run was started from Python with data in memory."
        sections["data"] = {**table["data"], "name": load_transform(files).describe(reason)}
        sections["data"] = {key: value for key, value in sections["data"].items() if key in ("name", "partition")}
    experiment = restore_experiment(table, **sections)
    _warn_of_edits(files, experiment)
    return Run(files, experiment)


def _find_best_round(files: RunFolder, experiment: Experiment) -> int:
    best = files.find_best()
    if best is not None:
        return best.round
    if experiment.evaluate.split != "validation":
        raise RunError(
            f"{files.path} has no best checkpoint: it was evaluated on {experiment.evaluate.split} data, and only "
            'validation data may choose. Set evaluate.split = "validation" and run it again.',
            key="evaluate.split",
            path=files.path,
        )
    raise RunError(
        f"{files.path} has no best checkpoint: no evaluation has measured its clients' validation data yet.",
        path=files.path,
    )


def _warn_of_edits(files: RunFolder, experiment: Experiment) -> None:
    if files.is_edited():
        logging.getLogger("fleetfit").warning(
            "%s has changed since this run started. The new version is used, but the model may have been trained "
            "with other values.",
            files.path / "config.toml",
        )
    if sentence := find_code_changes(files, experiment):
        logging.getLogger("fleetfit").warning("%s", sentence)


def load_usable_checkpoint(
    run: Run, most: int | None = None, due: int = 0, only: int | None = None
) -> dict[str, Any] | None:
    """Return the newest usable checkpoint, or None if the run has no checkpoints.

    Args:
        run: The run.
        most: The last round with a complete report. Later checkpoints are refused.
        due: The expected round of the newest checkpoint. An earlier one is logged.
        only: The round of the only checkpoint that is wanted.

    Raises:
        RunError: All checkpoints are damaged or of another model.
    """

    def check(checkpoint: Any, round: int) -> dict[str, Any]:
        checked = check_checkpoint(run.assembly.federation, checkpoint, round)
        if most is not None and round > most:
            raise CheckpointError(f"metrics.jsonl has complete reports of only {most} rounds; restore the file")
        return checked

    try:
        checkpoint = run.files.load_checkpoint(check, due, only)
    except RunError:
        before, data = run.files.environment.data, run.assembly.data
        if before is None or not isinstance(data, Data) or before.shape == list(data.sample_shape):
            raise
        raise RunError(
            f"{run.folder} was trained on samples of shape {before.shape}, and those at hand have "
            f"{list(data.sample_shape)}. Open it with data like its own; run.predict names what differs.",
            key="data",
            path=run.folder,
        ) from None
    if checkpoint is None:
        return None
    server = checkpoint["server"]
    trained, prior = server.get("trained", {}), tuple(server.get("prior", ()))
    return {**checkpoint, "server": Server(server["state"], server["round"], server["memory"], trained, prior)}


def load_ledger(target: Run) -> None:
    """Load the key and the spent privacy of a private run.

    Raises:
        RunError: Key or ledger is missing, or the ledger is damaged or of another run.
        ConfigError: The key file has no key, other users can read it, or it is in the run folder.
    """
    privacy, files = target.assembly.settings.privacy, target.files
    if privacy is None:
        return
    check_key_place(privacy.key_file, target.folder)
    ledger, key = files.json(LEDGER), load_key(privacy.key_file)
    try:
        privacy.load_ledger(ledger, key, partial(files.write, LEDGER))
    except ValueError as error:
        raise RunError(
            f"{target.folder / LEDGER} is damaged: {error}. The privacy that the run has spent is unknown, so it "
            "cannot be resumed.",
            path=target.folder / LEDGER,
        ) from None
