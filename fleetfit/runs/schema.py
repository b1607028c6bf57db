"""Pydantic models of the files of run folders and comparisons, with types and units.

A file may be untrusted. Types are strict, and numbers are finite and small enough for sums. Unknown keys are allowed,
because later versions and methods write more. A key with a default was added after the first version, or only some runs
have it. Accuracies are fractions from 0 to 1, sizes are in bytes, times in seconds.
"""

import statistics
from collections.abc import Mapping, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from fleetfit import files
from fleetfit.errors import RunError, truncate
from fleetfit.runs import InvalidRecord


class Record(pydantic.BaseModel):
    """A table of a stored file.

    Attributes:
        FORMAT: The newest version of the file that this version of FleetFit reads.
    """

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True, defer_build=True, populate_by_name=True
    )
    FORMAT: ClassVar[int] = 1

    @classmethod
    def load(cls, value: Any, separator: str = ".") -> Self:
        """Return the value of a file, or of a line, as a record.

        Args:
            value: The value.
            separator: Separator of keys in the reason.

        Raises:
            InvalidRecord: The value does not fit. The reason has the first wrong key.
        """
        try:
            return cls.model_validate(value)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
        keys = [truncate(part) for part in first["loc"] if part not in _TAGS]
        name, wrong = separator.join(keys) or "the whole", first["input"]
        if first["type"] == "missing":
            reason = f"{name} is missing"
        elif first["type"] == "record":
            reason = f"{name} {first['msg']}"
        else:
            expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should "))
            is_scalar = wrong is None or isinstance(wrong, str | int | float)
            got = truncate(repr(wrong)) if is_scalar else f"a {type(wrong).__name__}"
            reason = f"{name} should {expected}, got {got}"
        raise InvalidRecord(reason, ".".join(keys) or None)

    @classmethod
    def read(cls, path: Path, remedy: str = "") -> Self:
        """Return a JSON file as a record.

        Args:
            path: The file.
            remedy: Remedy for a damaged file, as a sentence.

        Raises:
            RunError: The file is missing or damaged, or a later version of FleetFit wrote it.
        """
        try:
            value = files.parse_json(files.read_text(path, RunError))
            version = value.get("format") if isinstance(value, dict) else None
            if type(version) is int and version > cls.FORMAT:
                raise RunError(
                    f"{path} has format {version}; this version of FleetFit reads format {cls.FORMAT}.", path=path
                )
            return cls.load(value)
        except InvalidRecord as error:
            raise RunError(f"{path} is damaged: {error}.{remedy and ' '}{remedy}", key=error.key, path=path) from None
        except ValueError as error:
            reason = f"it is not JSON: {error}" if isinstance(error, JSONDecodeError) else str(error)
            raise RunError(f"{path} is damaged: {reason}.{remedy and ' '}{remedy}", path=path) from None

    def dump(self) -> dict[str, Any]:
        """Return the table in the form of the file."""
        return self.model_dump(by_alias=True, exclude_unset=True, warnings=False)

    def number(self, key: str) -> float | None:
        """Return the number of a key of the file; None if the record has none."""
        value = getattr(self, "global_" if key == "global" else key, None)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None


_TAGS = ("[key]", "is:table", "is:versions")
_EXPECTED = {
    "model_type": "be a table", "dict_type": "be a table", "list_type": "be a list", "is_instance_of": "be a tensor",
    "less_than": "be smaller", "greater_than": "be larger", "string_pattern_mismatch": "be a whole number",
    "invalid_key": "be text", "too_short": "have more elements",
}  # fmt: skip


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("record", "should not be null")
    return value


def _validate_unchanged(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Validate a number. An int stays an int, so that it is written as it was read."""
    validate(value)
    return value


E = TypeVar("E")
IfPresent = Annotated[E | None, BeforeValidator(_refuse_null)]
"""An optional value; null is refused."""
List = Annotated[list[E], Field(fail_fast=True)]
"""A list; its first wrong element ends the validation."""
Full = Annotated[list[E], Field(fail_fast=True, min_length=1)]
"""A list of at least one element."""
Finite = Annotated[float, Field(gt=-1e300, lt=1e300, allow_inf_nan=False)]
"""A number; an int becomes a float."""
Number = Annotated[Finite, WrapValidator(_validate_unchanged)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Digits = Annotated[str, Field(pattern=r"^[0-9]{1,11}$")]
"""A whole number as a key of JSON."""


# ---- run folders: a round, metrics.jsonl -----------------------------------------------------------------------------


class LevelAccuracy(Record):
    """The accuracy of a level.

    Attributes:
        local: Mean over the clients of the level, each on its own data; None if none was evaluated.
        clients: Number of these clients.
        exits: The same for each exit, shallow to deep.
    """

    local: Number | None
    clients: Count
    exits: List[Number] = []


class ClientAccuracies(Record):
    """Accuracies of single clients by number: of the largest level, and of each client's own level."""

    global_: dict[str, Finite] = Field({}, alias="global")
    local: dict[str, Finite] = {}


class AccuracyRecord(Record):
    """Accuracies with one batch-norm policy, from 0 to 1; None if not measured.

    Attributes:
        global_: The largest level on each client's data, mean over clients.
        local: Each client's own level on its own data, mean over clients.
        levels: `local` by name of the level.
        global_worst_tenth: Mean over the tenth of the clients with the lowest accuracy; likewise `local_worst_tenth`.
        ensemble: All exits of the largest level together.
        mean_over_exits: Mean over the exits of the largest level.
        exits: Each exit of the largest level, shallow to deep.
        avg: Mean of the levels on the server's test set.
        full: The largest level on the server's test set.
        test_exits: Its exits there.
        test_levels: The levels there, by their number: their name, or their position from 1 where it is no number.
        best_exit: Each client at its best exit.
        backdoor: Success of a backdoor in the largest level; likewise `backdoor_levels` by number of the level.
        personal: As `local`, with the log class frequencies of each client added to its logits.
        global_samples: Samples behind `global_`; likewise `local_samples` and `test_samples`.
        batch_size: Samples in a batch, of batch statistics.
        order: Order of the samples, of batch statistics.
        per_client: Accuracies of single clients.
    """

    global_: Number | None = Field(alias="global")
    local: Number | None
    levels: dict[str, LevelAccuracy]
    global_worst_tenth: Number | None = None
    local_worst_tenth: Number | None = None
    ensemble: Number | None = None
    avg: Number | None = None
    full: Number | None = None
    mean_over_exits: Number | None = None
    best_exit: Number | None = None
    personal: Number | None = None
    exits: List[Number] = []
    test_exits: List[Number] = []
    test_levels: dict[str, Number | None] = {}
    batch_size: IfPresent[Count] = None
    global_samples: IfPresent[Count] = None
    local_samples: IfPresent[Count] = None
    test_samples: IfPresent[Count] = None
    order: str = ""
    backdoor: Number | None = None
    backdoor_levels: dict[str, Number] = {}
    per_client: ClientAccuracies = ClientAccuracies()


class FailureRecord(Record):
    """A job without a result.

    Attributes:
        client: Number of the client; None for a job of the server.
        level: Number of the level, from 1.
        reason: The reason of the failure.
        absent: Whether the client sent nothing.
    """

    client: int | None = None
    level: Count | None = None
    reason: str = ""
    absent: bool = False


class PartialRecord(Record):
    """The clients of an evaluation that measured a part, and their samples; without clients, the server's samples."""

    clients: Count
    samples: Count


class EvaluationRecord(Record):
    """An evaluation, by batch-norm policy.

    Attributes:
        split: "test", "validation" or "train".
        static: With statistics that were estimated before.
        batch: With the statistics of each batch.
        partial: Of an evaluation before the last one that measured a part.
        failures: The jobs that failed.
    """

    split: str = ""
    partial: IfPresent[PartialRecord] = None
    static: IfPresent[AccuracyRecord] = None
    batch: IfPresent[AccuracyRecord] = None
    failures: List[FailureRecord] = []

    def accuracies(self, norm: str) -> AccuracyRecord | None:
        """Return the accuracies with a batch-norm policy, "static" or "batch"; None if not measured."""
        return {"static": self.static, "batch": self.batch}.get(norm)


class TrainingRecord(Record):
    """The training of one round; None for withheld numbers.

    Attributes:
        loss: Mean over the samples.
        clients: Updates that count.
        samples: Training samples of these clients.
        by_level: Updates by number of the level, from 1.
    """

    loss: Number | None
    clients: Count | None
    samples: Count | None = None
    by_level: dict[str, Count] = {}


class HonestyRecord(Record):
    """Clients of one round: hostile ones, and honest ones by level."""

    hostile: Count
    honest: dict[Digits, Count]


class ReceivedRecord(Record):
    """Updates that clients sent, and those that a defense excluded."""

    sent: HonestyRecord
    left_out: HonestyRecord


class CountersRecord(Record):
    """What clients counted in one round: teachers by exit, for each level."""

    teachers: dict[Digits, dict[Digits, Count]] = {}


class PrivacyRecord(Record):
    """Differential privacy after a round."""

    epsilon: Number
    delta: Number
    noise_multiplier: Number
    clipping_norm: Number
    rate: Number


class DeadlineRecord(Record):
    """Clients under a deadline.

    Attributes:
        shallower: Updates of a shallower exit.
        stopped: Updates whose training was cut off.
        late: Clients that missed the deadline.
    """

    shallower: Count = 0
    stopped: Count = 0
    late: Count = 0


class LinksRecord(Record):
    """Simulated messages that were lost to a client, lost from a client, and received twice."""

    lost_down: Count = 0
    lost_up: Count = 0
    repeated: Count = 0


class SecureRecord(Record):
    """Secure sums: updates clipped to the range."""

    clipped: Count | None = None


class PriorRecord(Record):
    """The clients that the server asked for their class frequencies, before the first round.

    Attributes:
        clients: Those whose frequencies are in the mean; without any it is uniform.
        failures: The jobs that failed.
    """

    clients: Count
    failures: List[FailureRecord] = []


class UndoneRecord(Record):
    """Why a round was rolled back."""

    reason: str = ""


class RoundRecord(Record):
    """The report of one round, a line of `metrics.jsonl`.

    Attributes:
        round: Its number, from 1.
        train: The training.
        failures: The jobs that failed.
        bytes_down: Bytes to the clients; None if withheld. `bytes_up`: bytes from the clients.
        seconds: Wall time; `seconds_of`: wall time by activity.
        evaluate: The evaluation after the round.
        waste: 1 - elements returned / elements sent.
        multiply_adds: Of all clients.
        simulated_s: Simulated seconds of the round.
        counts: What clients counted.
        received: Updates of hostile and of honest clients.
        privacy: The privacy spent so far.
        deadline: Clients under a deadline.
        links: Lost messages.
        secure: Secure sums.
        prior: The clients whose class frequencies the first round's prior has.
        undone: Why the round was rolled back.
    """

    round: Count
    train: TrainingRecord
    failures: List[FailureRecord]
    bytes_down: Count | None
    bytes_up: Count | None
    seconds: Number
    evaluate: IfPresent[EvaluationRecord] = None
    waste: Number = 0.0
    multiply_adds: Number | None = None
    seconds_of: dict[str, Number] = {}
    simulated_s: Number | None = None
    counts: CountersRecord = CountersRecord()
    received: IfPresent[ReceivedRecord] = None
    privacy: IfPresent[PrivacyRecord] = None
    deadline: IfPresent[DeadlineRecord] = None
    links: IfPresent[LinksRecord] = None
    secure: IfPresent[SecureRecord] = None
    prior: IfPresent[PriorRecord] = None
    undone: IfPresent[UndoneRecord] = None

    def list_failures(self) -> list[FailureRecord]:
        """Return the failed jobs of training and of evaluation."""
        return [*self.failures, *(self.evaluate.failures if self.evaluate is not None else ())]


# ---- run folders: summary.json ---------------------------------------------------------------------------------------


class LevelRecord(Record):
    """A level of a run.

    Attributes:
        level: Its name, "1" for the smallest.
        width: Fraction of the channels that it keeps.
        depth: Blocks that it keeps.
        blocks: Blocks of the full model.
        exits: Blocks before each of its exits.
        parameters: Numbers that it has.
        multiply_adds: Multiply-adds of one sample.
        clients: Clients that train it.
        local: Accuracy of these clients, from 0 to 1.
    """

    level: str
    width: Number
    depth: Count
    blocks: Annotated[Count, Field(ge=1)]
    exits: List[Count]
    parameters: Count
    multiply_adds: Number
    clients: Count
    local: Number | None


class BestRecord(Record):
    """A round, and its `local` accuracy on validation data."""

    round: Count
    local: Number


class SummaryRecord(Record):
    """The final numbers of a run, `summary.json`. Sums are over all rounds; None for withheld numbers.

    Attributes:
        method: Name of the method; likewise `model` and `data`.
        norm: Main batch-norm policy: "static" or "batch".
        rounds: Number of rounds.
        levels: Smallest first.
        global_: Accuracy of the largest level; `local` of each client's own level; both of the headline.
        evaluate: The last evaluation.
        bytes_down: Bytes to the clients; `bytes_up` from them.
        waste: 1 - elements returned / elements sent, mean over the rounds.
        failures: Jobs without a result; `failure_reasons`: how many by each of the most frequent reasons.
        seconds: Wall time; `seconds_of`: wall time by activity.
        notes: Notes for the user.
        simulated_s: Simulated seconds.
        privacy: The privacy that was spent.
        score: Name of the task's accuracy.
        empty_rounds: Rounds without a usable update.
        multiply_adds: Of all clients.
        name: Name of the run.
        seed: Its seed.
        hostile_excluded: Share of the hostile clients' updates that a defense left out; likewise `honest_excluded`.
        best: The best round on validation data; None without evaluations on them.
    """

    method: str
    model: str
    data: str
    norm: str
    rounds: Count
    levels: List[LevelRecord]
    global_: Number | None = Field(alias="global")
    local: Number | None
    evaluate: EvaluationRecord
    bytes_down: Count | None
    bytes_up: Count | None
    waste: Number | None
    failures: Count | None
    seconds: Number
    notes: List[str]
    simulated_s: Number | None = None
    seconds_of: dict[str, Number] = {}
    privacy: IfPresent[PrivacyRecord] = None
    score: str = "accuracy"
    empty_rounds: Count | None = None
    failure_reasons: dict[str, Count] = {}
    multiply_adds: Number | None = None
    name: str = ""
    seed: int | None = None
    hostile_excluded: Number | None = None
    honest_excluded: Number | None = None
    best: IfPresent[BestRecord] = None

    @model_validator(mode="after")
    def _check_norm(self) -> Self:
        keys = {*self.evaluate.model_fields_set, *(self.evaluate.model_extra or ())}
        if keys and self.norm not in keys:
            raise PydanticCustomError("record", "has no evaluate.{norm}", {"norm": truncate(self.norm)})
        return self

    @property
    def headline(self) -> AccuracyRecord:
        """The accuracies with the main batch-norm policy; empty without an evaluation."""
        return self.evaluate.accuracies(self.norm) or NO_ACCURACIES


NO_ACCURACIES = AccuracyRecord.model_construct(global_=None, local=None, levels={})
"""Stands for an evaluation that did not take place."""


# ---- run folders: environment.json, fleet.json, nodes.json, callbacks.json -------------------------------------------


class ResumedRecord(Record):
    """After which round a run was resumed, and when."""

    round: Count | None = None
    time: str = ""


class ChangedRecord(Record):
    """After which round a run continued with other values of which keys.

    Attributes:
        round: The round.
        keys: The keys.
        before: The checksum of `config.toml` until then. While the file has it, the change has not happened.
        after: The checksum that it got; "" if it was edited before.
    """

    round: Count
    keys: List[str]
    before: str = ""
    after: str = ""


class FingerprintRecord(Record):
    """A run's data: number of samples, shape of one, samples by split, checksum of the labels."""

    samples: Count
    shape: List[Count]
    splits: dict[str, Count]
    labels: str


class EnvironmentRecord(Record):
    """The environment of a run's start, `environment.json`: machine, versions, commits.

    Attributes:
        time: When it began, ISO 8601 in UTC.
        command: The words of the command.
        processors: Number of cores; `threads` of these that PyTorch used.
        cuda: Name of the GPU.
        fleetfit_commit: Commit of FleetFit, "-dirty" if the package was changed.
        git_commit: Commit of the working folder; `git_changes` if it was changed.
        resumed: The times at which the run was resumed.
        changed: The keys with whose other values it continued.
        sha256: The checksum of `config.toml`, by its name.
        score: Name of the task's accuracy.
        data: The fingerprint of the data; None for private and secure runs and for data on nodes.
        code: The SHA-256 of the user's code, by path.
    """

    time: str = ""
    fleetfit: str = ""
    fleetfit_commit: str | None = None
    python: str = ""
    torch: str = ""
    numpy: str = ""
    platform: str = ""
    processor: str = ""
    processors: Count | None = None
    threads: Count | None = None
    cuda: str | None = None
    command: List[str] = []
    git_commit: str | None = None
    git_changes: bool = False
    resumed: List[ResumedRecord] = []
    changed: List[ChangedRecord] = []
    sha256: dict[str, str] = {}
    score: str = "accuracy"
    data: FingerprintRecord | None = None
    code: dict[str, str] = {}


class ClientsRecord(Record):
    """The first clients of a run: group and level of each, samples [clients, classes] for training, and class names."""

    group: List[str] = []
    level: List[Count] = []
    class_counts: List[Full[Count]] | None
    class_names: List[str] = []

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if len({len(row) for row in self.class_counts or ()}) > 1:
            raise PydanticCustomError("record", "has class_counts with rows of different lengths")
        return self


class FleetRecord(Record):
    """The clients of a run, `fleet.json`: their number, and how many each group of devices has."""

    first: ClientsRecord
    clients: Count | None = None
    groups: dict[str, Count] = {}


class MemberRecord(Record):
    """A node of a real fleet: its name, its budget, its samples by split."""

    name: str = ""
    budget: Any = None
    examples: dict[str, Count] = {}


class NodesRecord(Record):
    """The nodes of a real fleet, `nodes.json`."""

    members: List[MemberRecord] = []


class CallbacksRecord(Record):
    """The last round that each callback has received, `callbacks.json`."""

    told: dict[str, Count]


# ---- comparisons: runs.json, results.json ----------------------------------------------------------------------------


class PlannedRunRecord(Record):
    """A run of a comparison, which may not have started.

    Attributes:
        place: Its folder in the comparison's.
        title: Row, setting and seed, or the tried values.
    """

    place: str
    title: str

    @property
    def subfolder(self) -> Path:
        """Its folder, relative to the comparison's."""
        return Path(self.place)

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.subfolder.is_absolute() or ".." in self.subfolder.parts:
            raise PydanticCustomError("record", "has a place outside of the folder")
        return self


class PlannedRunsRecord(Record):
    """The runs of a comparison in the order in which they start, `runs.json`."""

    runs: List[PlannedRunRecord]


Series = List[Number | None]


class CurvesRecord(Record):
    """The evaluated rounds of a run and their measurements, as series of the same length.

    Attributes:
        round: The rounds.
        local: Accuracy in percent; likewise `global_`, and `per_exit` by number of the exit, from 1.
        loss: Training loss of the round.
    """

    round: List[Count]
    local: Series = []
    global_: Series = Field([], alias="global")
    loss: Series = []
    per_exit: dict[str, Series] = {}

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for key in self.model_fields_set - {"round"}:
            value = getattr(self, key)
            lists = value.values() if isinstance(value, Mapping) else [value]
            if any(len(one) != len(self.round) for one in lists if isinstance(one, list)):
                raise PydanticCustomError(
                    "record", "has another length for {key} than for round", {"key": truncate(key.rstrip("_"))}
                )
        return self


class RunResult(Record):
    """A finished run of a comparison: one row in one setting with one seed.

    Attributes:
        row: Label of its row.
        setting: Label of its setting; empty if the file has none.
        seed: Its seed.
        overrides: The keys that its row and setting set, by dotted key of a run file.
        tuned: The values chosen for its row and setting on validation data, by dotted key.
        rounds: Number of rounds.
        seconds: Wall time of all rounds.
        training_seconds: The part spent on training; None if not measured.
        speed: `engine.speed`, "exact" or "fast".
        digest: SHA-256 of its resolved configuration, `config.toml`.
        final: Its final numbers by name (`fleetfit.report.columns.make_final_numbers`): percent, rounds, costs.
        per_level: Local accuracy in percent of each level's own clients.
        per_exit: Accuracy in percent of each exit of the largest model, counted from 1.
        curves: The evaluated rounds.
    """

    row: str
    setting: str
    seed: Count
    overrides: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    rounds: Count
    seconds: Number
    training_seconds: Number | None = None
    speed: str
    digest: str
    final: dict[str, Number]
    per_level: dict[str, Number] = {}
    per_exit: dict[str, Number] = {}
    curves: CurvesRecord


class TuningCandidate(Record):
    """Tried values of a row in a setting.

    Attributes:
        values: The values by dotted key.
        score: The accuracy on validation data in percent, the criterion; None if there is none.
        seed: The seed of the tuning run.
        rounds: Rounds to the target on validation data, if these decide; None if not reached.
    """

    values: dict[str, Any]
    score: Number | None = None
    seed: Count
    rounds: Number | None = None


class TuningResult(Record):
    """The chosen values of a row in a setting, and the tried ones.

    Attributes:
        row: Label of the row.
        setting: Label of the setting.
        chosen: The chosen values, by dotted key.
        candidates: The tried values, once per seed.
    """

    row: str
    setting: str
    chosen: dict[str, Any]
    candidates: List[TuningCandidate]

    @property
    def groups(self) -> list[list[TuningCandidate]]:
        """The candidates in groups of equal values, in order of first occurrence."""
        groups: list[list[TuningCandidate]] = []
        for candidate in self.candidates:
            for group in groups:
                if group[0].values == candidate.values:
                    group.append(candidate)
                    break
            else:
                groups.append([candidate])
        return groups

    @property
    def is_tied(self) -> bool:
        """Whether all tried values are equally good."""
        groups = self.groups
        return len(groups) > 1 and len(set(map(rank_candidates, groups))) == 1


def rank_candidates(candidates: Sequence[TuningCandidate]) -> tuple[float, float]:
    """Return (-mean rounds to the target, mean score) over the seeds of one group; -inf where a seed has none.

    If scores decide, no candidate has rounds.
    """
    scores = [one.score for one in candidates if one.score is not None]
    rounds = [one.rounds for one in candidates if one.rounds is not None]
    score = statistics.fmean(scores) if len(scores) == len(candidates) else float("-inf")
    return (-statistics.fmean(rounds) if len(rounds) == len(candidates) else float("-inf")), score


class LevelResult(Record):
    """The size of a level of a row in one setting, the same for all seeds.

    Attributes:
        row: Label of the row.
        setting: Label of the setting.
        level: Name of the level, as in `RunResult.per_level`.
        width: Fraction of the channels that it keeps.
        depth: Blocks that it keeps.
        blocks: Blocks of the full model.
        parameters: Its parameters.
        multiply_adds: Multiply-adds of one sample.
    """

    row: str
    setting: str
    level: str
    width: Number
    depth: Count
    blocks: Count
    parameters: Count
    multiply_adds: Count


class PaperNumbers(Record):
    """A paper's numbers of a row in a setting, by the table's columns: percent, or rounds."""

    row: str
    setting: str
    numbers: dict[str, Number]


class ComparisonResults(Record):
    """The results of a comparison, `results.json`, finished or not: all that its tables and its page show.

    Attributes:
        name: Name of the run file.
        file: Path of the run file, relative to the working folder.
        versions: Of `fleetfit`, `torch` and `python`.
        commit: Commit of the checkout of FleetFit, "-dirty" if its package was changed; None outside of one.
        machine: `processor` and `cores`.
        against: Label of the baseline row.
        title: Title of the table; by default the name.
        smallest: Label of the row that `compare.smallest_baseline` added, or "".
        columns: The columns of the table (`fleetfit.report.columns`).
        targets: The accuracies to which rounds are counted, and which accuracy that is.
        tune_on: The criterion of the tuning.
        tune_rounds: The rounds of its runs; None for those of the table's runs.
        settings: The file's tables with every default.
        runs: The finished runs, row by row.
        levels: The levels of each row and setting.
        tuning: The tuning of each row and setting; empty without tuning.
        printed: A paper's numbers.
        rows: The labels of all rows; empty until all runs have ended.
        failures: Titles of the runs without a usable update.
        notes: Sentences below the table; empty until all runs have ended.
    """

    format: Count = 1
    name: str
    file: str
    versions: dict[str, str]
    commit: str | None = None
    machine: dict[str, Any]
    against: str
    title: str = ""
    smallest: str = ""
    columns: List[str] = ["local", "global"]
    targets: List[Number] = []
    target_on: str = "global"
    tune_on: str = "local"
    tune_rounds: Count | None = None
    settings: dict[str, Any] = Field(alias="settings_of_file")
    runs: List[RunResult]
    levels: List[LevelResult] = []
    tuning: List[TuningResult] = []
    printed: List[PaperNumbers] = []
    rows: List[str] = []
    failures: List[str] = []
    notes: List[str] = []

    @property
    def paper_numbers(self) -> dict[tuple[str, str, str], float]:
        """A paper's numbers by (row, setting, column)."""
        return {(one.row, one.setting, column): n for one in self.printed for column, n in one.numbers.items()}
