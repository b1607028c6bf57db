"""Pydantic models of the JSON in run folders and comparisons, and of the structure of a checkpoint.

A file may come from a stranger. Types are strict, and numbers are finite and small enough to be added up. Keys that a
model lacks are allowed: later versions and methods write more. A key with a default was added after the first version.
"""

from typing import Annotated, Any, Self, TypeVar

import pydantic
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from fleetfit.errors import truncate


class InvalidRecord(ValueError):
    """A stored value does not fit its model.

    Attributes:
        key: Keys and positions that lead to the value, dotted; None for the whole value.
    """

    def __init__(self, reason: str, key: str | None) -> None:
        super().__init__(reason)
        self.key = key


class Record(pydantic.BaseModel):
    """A table of a stored file."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True, defer_build=True)

    @classmethod
    def load(cls, value: Any, separator: str = ".") -> Self:
        """Return the value of a file, or of a line, as a record.

        Args:
            value: The value.
            separator: Stands between keys in the reason.

        Raises:
            InvalidRecord: The value does not fit; the reason names the first key that is wrong.
        """
        try:
            return cls.model_validate(value)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
        path = [truncate(part) for part in first["loc"] if part not in _TAGS]
        place, found = separator.join(path) or "the whole", first["input"]
        if first["type"] == "missing":
            reason = f"{place} is missing"
        elif first["type"] == "record":
            reason = f"{place} {first['msg']}"
        else:
            expected = _EXPECTED.get(first["type"], first["msg"].removeprefix("Input should "))
            is_scalar = found is None or isinstance(found, str | int | float)
            got = truncate(repr(found)) if is_scalar else f"a {type(found).__name__}"
            reason = f"{place} should {expected}, got {got}"
        raise InvalidRecord(reason, ".".join(path) or None)


_TAGS = ("[key]", "is:table", "is:list", "is:versions")
_EXPECTED = {
    "model_type": "be a table", "dict_type": "be a table", "list_type": "be a list", "is_instance_of": "be a tensor",
    "less_than": "be smaller", "greater_than": "be larger", "string_pattern_mismatch": "be a whole number",
}  # fmt: skip


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("record", "should not be null")
    return value


E = TypeVar("E")
IfPresent = Annotated[E | None, BeforeValidator(_refuse_null)]
"""A value that a file may lack; null is refused."""
List = Annotated[list[E], Field(fail_fast=True)]
"""A list; its first wrong element ends the validation."""
Full = Annotated[list[E], Field(fail_fast=True, min_length=1)]
"""A list of at least one element."""
Number = Annotated[float, Field(gt=-1e300, lt=1e300, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Digits = Annotated[str, Field(pattern=r"^[0-9]{1,11}$")]
"""A whole number as a key of JSON."""


# ---- run folders: metrics.jsonl, summary.json, fleet.json, callbacks.json ------------------------------------------


class LevelAccuracy(Record):
    """Accuracy of the clients of one level."""

    local: Number | None
    clients: Count
    exits: List[Number] = []


class AccuracyRecord(Record):
    """Accuracies with one batch-norm policy."""

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


class EvaluationRecord(Record):
    """An evaluation, by batch-norm policy."""

    split: str = ""
    static: IfPresent[AccuracyRecord] = None
    batch: IfPresent[AccuracyRecord] = None
    failures: list[Any] = []


class TrainingRecord(Record):
    """The training of one round; null where the run withholds a number."""

    loss: Number | None
    clients: Count | None


class HonestyRecord(Record):
    """Clients of one round, hostile ones and honest ones by level."""

    hostile: Count
    honest: dict[Digits, Count]


class ReceivedRecord(Record):
    """Updates that clients sent, and those that a defence left out."""

    sent: HonestyRecord
    left_out: HonestyRecord


class CountersRecord(Record):
    """What clients counted in one round: teachers by exit, for each exit."""

    teachers: dict[Digits, dict[Digits, Count]] = {}


class PrivacyRecord(Record):
    """Differential privacy after a round."""

    epsilon: Number
    delta: Number
    noise: Number
    clip: Number
    rate: Number


class RoundRecord(Record):
    """The report of one round, a line of `metrics.jsonl`."""

    round: Count
    train: TrainingRecord
    failures: list[Any]
    bytes_down: Count | None
    bytes_up: Count | None
    seconds: Number
    evaluate: IfPresent[EvaluationRecord] = None
    waste: Number = 0.0
    multiply_adds: Number = 0.0
    seconds_of: dict[str, Number] = {}
    simulated_s: Number | None = None
    counts: CountersRecord = CountersRecord()
    received: IfPresent[ReceivedRecord] = None
    privacy: IfPresent[PrivacyRecord] = None


class LevelRecord(Record):
    """A level of a finished run."""

    level: str
    width: Number
    depth: Count
    blocks: Annotated[Count, Field(ge=1)]
    exits: List[Count]
    parameters: Count
    multiply_adds: Number
    clients: Count
    local: Number | None


class SummaryRecord(Record):
    """The final numbers of a run, `summary.json`."""

    method: str
    model: str
    data: str
    norm: str
    rounds: Count
    levels: Full[LevelRecord]
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
    score: str = ""
    empty_rounds: Count | None = None

    @model_validator(mode="after")
    def _check_norm(self) -> Self:
        keys = {*self.evaluate.model_fields_set, *(self.evaluate.model_extra or ())}
        if keys and self.norm not in keys:
            raise PydanticCustomError("record", "has no evaluate.{norm}", {"norm": truncate(self.norm)})
        return self


class ClientsRecord(Record):
    """The first clients of a run."""

    class_counts: List[Full[Count]] | None

    @model_validator(mode="after")
    def _check_classes(self) -> Self:
        if len({len(row) for row in self.class_counts or ()}) > 1:
            raise PydanticCustomError("record", "has class_counts with rows of different lengths")
        return self


class FleetRecord(Record):
    """The clients of a run, `fleet.json`."""

    first: ClientsRecord


class CallbacksRecord(Record):
    """The last round of which each callback was notified, `callbacks.json`."""

    told: dict[str, Count]


# ---- calibrations: inference/level-<level>.json --------------------------------------------------------------------


class OutcomeRecord(Record):
    """What a policy does to samples: shares by exit, accuracy, cost of a sample."""

    shares: Full[Share]
    accuracy: Share
    cost: Number


class TestOutcomeRecord(OutcomeRecord):
    """The outcome on test samples, beside the accuracy of the last exit."""

    full: Share


class CurveRecord(OutcomeRecord):
    """A point of the curve over budgets."""

    budget: Number


class PolicyRecord(Record):
    """When a sample leaves."""

    thresholds: Full[Number]
    measure: str
    temperatures: List[Annotated[Number, Field(gt=0)]]


class CalibrationRecord(Record):
    """A calibration of one level; see `fleetfit.inference.calibration`."""

    round: Count
    level: str
    cost: str
    costs: Full[Annotated[Number, Field(gt=0)]]
    budget: Number
    mode: str
    accuracies: Full[Share]
    calibration_errors: Full[Annotated[list[Number | None], Field(min_length=2)]]
    curve: List[CurveRecord]
    test: TestOutcomeRecord
    policy: PolicyRecord


# ---- comparisons: runs.json and results.json -----------------------------------------------------------------------


class PlannedRunRecord(Record):
    """A run of a comparison, perhaps one that has not started."""

    place: str
    title: str


class PlannedRunsRecord(Record):
    """The runs of a comparison in the order in which they start, `runs.json`."""

    runs: List[PlannedRunRecord]


Series = List[Number | None]


class CurvesRecord(Record):
    """The evaluated rounds of a run, and what was measured after each: series of one length, or tables of them."""

    round: List[Count]
    __pydantic_extra__: dict[
        str,
        Annotated[
            Annotated[dict[str, Series], Tag("is:table")] | Annotated[Series, Tag("is:list")],
            Discriminator(lambda value: "is:table" if isinstance(value, dict) else "is:list"),
        ],
    ]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for key, value in (self.model_extra or {}).items():
            if any(len(one) != len(self.round) for one in (value.values() if isinstance(value, dict) else [value])):
                raise PydanticCustomError(
                    "record", "has another length for {key} than for round", {"key": truncate(key)}
                )
        return self


class RowRecord(Record):
    """A run of a comparison: one row in one setting with one seed."""

    row: str
    setting: str
    seed: Count
    rounds: Count
    seconds: Number
    speed: str
    digest: str
    final: dict[str, Number]
    curves: CurvesRecord
    overrides: dict[str, Any] = {}
    tuned: dict[str, Any] = {}
    training_seconds: IfPresent[Number] = None
    per_level: dict[str, Number] = {}
    per_exit: dict[str, Number] = {}


class CandidateRecord(Record):
    """Values that the tuning of a row has tried."""

    values: dict[str, Any]
    seed: Count
    score: Number | None = None
    rounds: Number | None = None


class TuningRecord(Record):
    """The tuning of a row in one setting."""

    row: str
    setting: str
    chosen: dict[str, Any]
    candidates: List[CandidateRecord]


class RowLevelRecord(Record):
    """The size of a level of a row in one setting."""

    row: str
    setting: str
    level: str
    width: Number
    depth: Count
    blocks: Count
    parameters: Count
    multiply_adds: Count


class ResultsRecord(Record):
    """The results of a comparison, `results.json`."""

    format: Count
    name: str
    file: str
    versions: dict[str, str]
    machine: dict[str, Any]
    against: str
    settings_of_file: dict[str, Any]
    runs: List[RowRecord]
    commit: str | None = None
    tuning: List[TuningRecord] = []
    levels: List[RowLevelRecord] = []


# ---- checkpoints ---------------------------------------------------------------------------------------------------

State = dict[str, Tensor]
Version = Annotated[int, Field(ge=-1, lt=2**63 - 1)]
Index = Annotated[int, Field(ge=0)]


class ServerRecord(Record):
    """The server after a round, with the largest level that each client has trained."""

    state: State
    round: Count
    memory: Any
    trained: dict[Index, Index] = {}


class ClientRecord(Record):
    """What a client remembers."""

    version: Version
    memory: Any


class VersionsRecord(Record):
    """The versions of memories that the clients of a real fleet keep themselves."""

    versions: dict[Digits, Version]


class CheckpointRecord(Record):
    """A checkpoint; its tensors are not compared with the model here."""

    server: ServerRecord
    clients: Annotated[
        Annotated[dict[Digits, ClientRecord], Tag("is:table")] | Annotated[VersionsRecord, Tag("is:versions")],
        Discriminator(lambda value: "is:versions" if isinstance(value, dict) and "versions" in value else "is:table"),
    ]
    statistics: dict[Index, State] | None
