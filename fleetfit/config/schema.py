"""The typed description of a run: each key of a run file with its type, range and default.

`load` merges and completes the tables, `parse` validates them; `assemble` makes the objects of a run.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, PrivateAttr

from fleetfit.config.keys import dump_section
from fleetfit.core.arithmetic import MemoryFormat, Precision
from fleetfit.core.local import Late, LocalSection
from fleetfit.core.section import (
    Count,
    Fraction,
    Norm,
    NotNegative,
    OpenSection,
    Positive,
    Probability,
    Section,
    Unit,
)

# ---- `[compare]` ---------------------------------------------------------------------------------------------------


class CompareSection(Section):
    """`[compare]`: rows, settings and columns of `fleetfit compare`.

    Attributes:
        row: One table per row: keys of a run file that differ in it, an optional `label`, and `paper`, a paper's
            numbers in the order of the table's columns.
        setting: One table per setting: keys of a run file that differ in it, and its `label`.
        grid: Keys of a run file, each with the list of its values; all combinations are run for every row.
        tune: The same, but the best value of each row is chosen on validation data.
        tune_on: The criterion: "local", "global", or the fewest "rounds" to the first target.
        tune_seeds: The seeds of the runs that tune; by default one that no run of the table has.
        tune_rounds: The rounds of the runs that tune; by default those of the table's runs.
        columns: Columns of each setting; by default local, global and, with a target, rounds.
        target: An accuracy, or several, to which rounds are counted.
        target_on: Which accuracy that is.
        against: Label of the baseline row, compared seed by seed; the first row by default.
        note: How the file's setting differs from the paper's; a line below the table.
        smallest_baseline: Whether the table has the row "smallest model", FedAvg at the smallest budget. By default a
            new comparison of rows with the same data and model has it, unless a row of the file trains the same.
        same_recipe: Whether all rows have the schedule and the server's momentum of the first, unless they set their
            own. A method whose server takes another step keeps it.
    """

    row: list[dict[str, Any]] = Field(default_factory=list)
    setting: list[dict[str, Any]] = Field(default_factory=list)
    grid: dict[str, Any] = Field(default_factory=dict)
    tune: dict[str, Any] = Field(default_factory=dict)
    tune_on: Literal["local", "global", "rounds"] = "local"
    tune_seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    tune_rounds: Count | None = None
    columns: Annotated[list[str], Field(min_length=1)] | None = None
    target: Fraction | list[Fraction] | None = None
    target_on: str = "global"
    against: str | None = None
    note: str = ""
    smallest_baseline: bool | None = None
    same_recipe: bool = False

    @property
    def set_keys(self) -> list[str]:
        """The keys that are set."""
        return [key for key in type(self).model_fields if key in self.model_fields_set and getattr(self, key)]

    @property
    def is_set(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.row or self.setting or self.grid or self.tune or self.smallest_baseline)

    @property
    def targets(self) -> tuple[float, ...]:
        """The accuracies to reach, ascending."""
        targets = self.target if isinstance(self.target, list) else [self.target]
        return tuple(sorted({target for target in targets if target is not None}))


# ---- the sections of a run -----------------------------------------------------------------------------------------

CLIENTS = 40
"""Default number of clients."""
MIN_SAMPLES = 30
"""Training samples per client, at least; small data have fewer clients by default."""
MIN_COHORT = 4
"""Clients in the default cohort, at least, if there are as many."""
FRACTION = 0.1
"""Default p, the fraction of the clients in a cohort."""


class PartitionSection(OpenSection):
    """`[data] partition`: how the data are divided among clients. Further keys are the kind's own.

    Attributes:
        kind: "iid", "dirichlet", "shards" or "natural"; or "package.module:name" or "file.py:name", also of a
            partitioner of flwr-datasets.
        clients: Number of clients; 40 by default, fewer where data are small, and with "natural" one per natural group.
        seed: Seed of the partition; the run's by default.
    """

    kind: str = "dirichlet"
    clients: Count | None = None
    seed: Annotated[int, Field(ge=0)] | None = None


class ServerDataSection(OpenSection):
    """`[data] server`: a data set whose samples the server trains on, without labels. Further keys are its own.

    Attributes:
        name: Of the data set, as in `[data]`.
    """

    name: Any


class DataSection(OpenSection):
    """`[data]`: the data set and its partition. Further keys (folder, validation, ...) are the data set's own.

    Attributes:
        name: A built-in set or kind of file (`fleetfit list data`), or `package.module:function`, `file.py:function`.
        partition: How the data are divided among clients.
        server: A data set for the server itself, for methods that train there (feddf).
        transform: The folder of a run or an export whose preparation of samples is used: classes, normalization, sizes,
            vocabulary. On a fleet the nodes get it from the server. By default it is fitted to the training samples.
    """

    name: Any = "digits"
    partition: PartitionSection = Field(default_factory=PartitionSection)
    server: ServerDataSection | None = None
    transform: str | None = None


class DeriveSection(Section):
    """`[model] derive`: how levels are derived from a plain PyTorch module. Models with an `Architecture` refuse it.

    Attributes:
        exits: Where early exits sit: "auto" finds a chain of blocks; "none"; or names of modules.
        heads: The classifiers of early exits: "own" new ones, or the module's last norm and head, "shared" by all. By
            "auto" a language model shares them if they have more parameters than a block.
        head: "new" replaces the module's classifier by one with the data's classes; "keep" keeps it.
        weights: Where training starts: the module's own weights, or "new" ones drawn by PyTorch's rules.
        axes: By pattern of axis names another name, or "whole" for axes that are not cut.
    """

    exits: Literal["auto", "none"] | list[str] = "auto"
    heads: Literal["auto", "own", "shared"] = "auto"
    head: Literal["keep", "new"] = "keep"
    weights: Literal["instance", "new"] = "instance"
    axes: dict[str, str] = Field(default_factory=dict)


class ModelSection(OpenSection):
    """`[model]`: the architecture. Further keys are its own.

    Attributes:
        name: A built-in model (`fleetfit list models`), or `package.module:function`, `file.py:function`: a function
            that returns an architecture or a PyTorch module, or a class of modules.
        derive: How levels are derived from a PyTorch module.
    """

    name: Any = "cnn"
    derive: DeriveSection | None = None


class PeftSection(OpenSection):
    """`[peft]`: the trained part of the model, and added layers. Further keys are the mode's own.

    Attributes:
        name: Mode of fine-tuning (`fleetfit list peft`); "full" trains everything.
    """

    name: Any = "full"


class ProfileSection(Section):
    """`profile` of a group as a table of figures; see `fleetfit.profiles.DeviceProfile`.

    Attributes:
        multiply_adds_per_s: Speed of a device in training.
        down_bytes_per_s: Speed of its link from the server.
        up_bytes_per_s: Speed of its link to the server.
        latency_s: Latency of its link, once a round.
        memory_bytes: Memory of the device; informative only, a budget of memory is set with `budget`.
    """

    multiply_adds_per_s: Positive
    down_bytes_per_s: Positive
    up_bytes_per_s: Positive
    latency_s: NotNegative = 0.0
    memory_bytes: Positive | None = None


class GroupSection(Section):
    """One budget class of the fleet.

    Attributes:
        budget: Limit of the fleet's cost on a device, or a table of several limits that all hold. A number up to 1
            is a fraction of the full model's cost, a larger one and text with a unit ("20 ms", "200 MB") are absolute.
            A name that ends in .toml is a budget file, whose `tolerance` counts too (`fleetfit.config.load`).
        fraction: Its fraction of the clients; by default groups divide the rest equally.
        tolerance: epsilon_k of its clients; `fleet.tolerance` by default.
        name: Name in reports; "1/8" for a budget of 0.125 by default.
        profile: Speed of its devices and their links: a name (`fleetfit list profiles`) or a table of figures.
    """

    budget: Positive | Unit | dict[str, Positive | Unit]
    fraction: Fraction | None = None
    tolerance: NotNegative | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    profile: str | ProfileSection | None = None


class LevelSection(Section):
    """One of `[fleet] levels`, if they are listed.

    Attributes:
        budget: Budget that a client needs for it, as a fraction of the full model's cost; 1 for the last one.
        depth: Blocks kept; all by default.
        width: Fraction of the channels kept; a table of fractions by axis where they differ.
    """

    budget: Fraction
    depth: Count | None = None
    width: Fraction | dict[str, Fraction] = 1.0


class DriftSection(Section):
    """`[fleet] drift`: how budgets move during the run (see `fleetfit.core.Drift`).

    Attributes:
        sd: Standard deviation of the slow movement, of the budget's logarithm.
        jump: Probability that a budget jumps in a round.
        low: Smallest fraction that a jump leaves.
    """

    sd: NotNegative = 0.1
    jump: Probability = 0.05
    low: Fraction = 0.25


class SlowSection(Section):
    """`[fleet] slow`: a fraction of each group's clients that is slower than its profile.

    Attributes:
        fraction: Fraction of the clients.
        factor: Factor by which they compute slower.
        link: Factor by which they send and receive slower.
    """

    fraction: Fraction = 0.3
    factor: Positive = 5.0
    link: Positive = 1.0


class LinksSection(Section):
    """`[fleet] links`: faults of simulated links, drawn for each message of training (see `fleetfit.rounds.links`).

    Attributes:
        lost_down: Probability that a client's job does not arrive, so that it trains nothing.
        lost_up: Probability that a client's update does not arrive.
        repeated: Probability that an update that arrives does so twice.
    """

    lost_down: Probability = 0.0
    lost_up: Probability = 0.0
    repeated: Probability = 0.0


class AvailabilitySection(Section):
    """`[fleet] availability`: when clients are connected (see `fleetfit.core.Availability`).

    Attributes:
        online: Fraction of the time that a client is online, on average; 1 by default.
        spread: Spread of that fraction over the clients, from 0 to 1.
        rounds: Mean length of an online spell; by default rounds are independent.
        day: Rounds of a day, if there are days.
        leave: Probability that a chosen client drops out during the round, after it received its model.
        trace: A file instead of chance.
    """

    online: Fraction | None = None
    spread: Probability = 0.0
    rounds: Positive | None = None
    day: Positive | None = None
    leave: Probability = 0.0
    trace: str | None = None


class FleetSection(Section):
    """`[fleet]`: the budgets of the devices, and the levels.

    Attributes:
        cost: Cost in which levels are planned and which budgets limit: "parameters", "non_embedding_parameters",
            "multiply_adds", "size_bytes", "memory_bytes" (of a training step) or "latency_s" (measured here).
        tolerance: How far a level may exceed a budget, as a fraction of it.
        levels: "cluster", "halving", target cost ratios, a list of levels, or a saved plan (its path, or the plan
            itself). Levels or a plan that cut depth only, or width only, are for methods that do so; others search.
        scaling: How levels differ: "both" (ScaleFL Eq. 1), "width", "depth", "depth_first" (whole early blocks, and
            only then width), or "auto" (a rule by cost and model). By default as the method says.
        reports_budget: Whether clients report their budgets to the server; by default as the method needs.
        drift: How budgets move during the run; by default they stay.
        slow: Clients that are slower than their profile; none by default.
        jitter: Standard deviation, of the logarithm, by which speed and link differ from round to round.
        availability: When clients are connected; always by default.
        links: Faults of links; none by default.
        reports_labels: Whether clients report to the server how many samples of each class they have.
        groups: The budget classes. Default budgets below every sub-model of a plain module are dropped.
    """

    cost: str = "parameters"
    tolerance: NotNegative = 0.1
    levels: (
        str
        | Annotated[list[Fraction], Field(min_length=1)]
        | Annotated[list[LevelSection], Field(min_length=1)]
        | dict[str, Any]
    ) = "cluster"
    scaling: Literal["auto", "both", "width", "depth", "depth_first"] | None = None
    reports_budget: bool | None = None
    drift: DriftSection | None = None
    slow: SlowSection | None = None
    jitter: NotNegative = 0.0
    availability: AvailabilitySection | None = None
    links: LinksSection | None = None
    reports_labels: bool = False
    groups: Annotated[list[GroupSection], Field(min_length=1)] = Field(
        default_factory=lambda: [GroupSection(budget=b) for b in (0.125, 0.25, 0.5, 1.0)]
    )


class MethodSection(OpenSection):
    """`[method]`: the algorithm. Further keys are its hyperparameters.

    Attributes:
        name: A built-in method (`fleetfit list methods`), or `package.module:function`, `file.py:function`.
        options: Options for any method, each a table of its keys: `options.fedprox.mu = 0.01`.
        hooks: Single hooks by name: `hooks.choose_channels = "rolling"`.
    """

    name: Any = "fleetfit"
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    hooks: dict[str, Any] = Field(default_factory=dict)


class AttackSection(OpenSection):
    """`[attack]`: hostile clients, in a simulation. Further keys (scale, z, target, trigger, ...) are the attack's own.

    Attributes:
        kind: The attack, such as "sign_flip" (`fleetfit list attacks`); by default all clients are honest.
        fraction: Fraction of hostile clients; they are drawn from the run's seed.
        among: "all": drawn from all clients; "each": the same fraction of each level; or the levels, counted from 1,
            from whose clients they are drawn.
    """

    kind: Any = None
    fraction: Fraction = 0.2
    among: Literal["all", "each"] | Annotated[list[Count], Field(min_length=1)] = "all"


class SecureSection(Section):
    """`[secure]`: secure aggregation (see `fleetfit.secure`). Without this section rounds are plain.

    Attributes:
        min_clients: Smallest number of clients in a sum: in a cohort, and in each part of the model.
        reconstruction_threshold: Fraction of the cohort that must stay to the end, above one half.
        clipping_range: Largest movement of an element in a round; a client clips larger ones. With `[privacy]` it is at
            least `clipping_norm`, and best the same.
        bits: Bits of a movement; modulus 2^32, so that 20 bits are enough for 4,096 clients.
    """

    min_clients: Annotated[int, Field(ge=2)] = 3
    reconstruction_threshold: Annotated[float, Field(gt=0.5, le=1)] = 0.67
    clipping_range: Positive = 1.0
    bits: Annotated[int, Field(ge=8, le=24)] = 20


class PrivacySection(Section):
    """`[privacy]`: differential privacy of clients (see `fleetfit.privacy`). Without this section there is none.

    Attributes:
        clipping_norm: Largest Euclidean norm of a client's update; the section needs it.
        noise_multiplier: Standard deviation of the noise, as a multiple of `clipping_norm`.
        epsilon: The privacy to spend. With `noise_multiplier` the run ends when it is spent; without, the noise is
            chosen so that all rounds spend it.
        delta: The delta of (epsilon, delta); by default 1 / (10 * clients).
        key_file: A file outside of the run folder with the key of the noise. FleetFit creates it if it is missing.
    """

    clipping_norm: Positive | None = None
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    key_file: str = ""


class CohortSection(Section):
    """`[cohort]`: the clients that take part in a round.

    Attributes:
        selection: Client selection: "uniform" leaves it to the method, and most methods choose uniformly; or a name, or
            a table with a name and its own keys.
        fraction: p: max(1, round(p * clients)) clients take part; by default a tenth, but at least four.
        count: Number of clients, instead of a fraction.
        deadline_s: Seconds after which a round ends; none by default.
        on_deadline: What a client does that cannot train everything in time. "shallower": it trains the deepest exit of
            its sub-model that it can finish, and stops at the last finished step where it finishes none; "stop": it
            stops at the last finished step; "drop": its work is lost.
        quorum: Fraction of the cohort whose updates end a round; below 1 the server does not wait for the slowest.
        over_selection: Fraction of additional clients that are asked, so that the cohort fills up although some fail.
    """

    selection: Any | dict[str, Any] = "uniform"
    fraction: Fraction | None = None
    count: Count | None = None
    deadline_s: Positive | None = None
    on_deadline: Late = "shallower"
    quorum: Fraction = 1.0
    over_selection: NotNegative = 0.0


class EngineSection(OpenSection):
    """`[engine]`: where jobs run, and how they are computed. Further keys (device, workers, ...) are the engine's own.

    Attributes:
        name: The engine.
        speed: "exact" computes in fp32, with the same bits on every machine of one kind; "fast" chooses for each
            level's shape the precision and memory format that pay on this machine (`fleetfit.training.runtime`).
        precision: For all levels, with any speed: "fp32", or "bf16" for products of matrices; weights stay fp32.
            By default as `speed` chooses.
        memory_format: For all levels, of images; by default each level's shape chooses.
        compile: For all levels: whether `torch.compile` compiles them; false by default.
        feature_cache_bytes: Memory of each process for cached features of a frozen backbone; features that exceed it go
            into a file; 0 computes them each time. By default 0 if the speed is exact, else as much as is free.
    """

    name: Any = "local"
    speed: Literal["exact", "fast"] = "exact"
    precision: Precision | None = None
    memory_format: Literal["contiguous", "channels_last"] | None = None
    compile: bool | None = None
    feature_cache_bytes: NotNegative | None = None


class EvaluationPartSection(Section):
    """`[evaluate] between`: the part that evaluations before the last one measure, the same each time.

    Attributes:
        clients: Largest number of clients; all by default.
        client_samples: Largest number of samples of each client; all by default.
        samples: Largest number of samples of the whole test set; all by default.
        statistics_samples: Largest number of training samples for static statistics, over all clients; all by default.
    """

    clients: Annotated[int, Field(ge=0)] | None = None
    client_samples: Count | None = None
    samples: Count | None = None
    statistics_samples: Count | None = None


class EvaluateSection(Section):
    """`[evaluate]`: when and how accuracy is measured.

    Attributes:
        every: Rounds between evaluations; 0 for none before the last round, which is always evaluated. "auto" chooses
            them: at least ten, evenly spread, at about a tenth of the run's multiply-adds; the run records its choice.
        between: The part that evaluations before the last one measure; "auto" chooses it where ten complete ones cost
            more than a tenth. The last one is complete.
        batch_size: Samples per forward pass, which batch statistics depend on.
        split: The split of each client that is evaluated. With "validation" the run keeps its best checkpoint.
        patience: Early stopping of the run: end it after this many evaluations in a row without a better validation
            accuracy (`local`). Needs `split = "validation"`.
        batch_norm: Batch-norm policies, "static" and "batch" (statistics of each batch); the first is the headline.
        statistics_samples: Training samples, over all clients, from which static statistics are re-estimated.
        clients: Largest number of clients, drawn once; all by default.
        samples: Largest number of samples of the whole test set, drawn once; all by default.
        whole_test_set: Whether each evaluation also covers the whole test set, not only the last one.
        metrics: Further metrics, by "file.py:function" or "package.module:function": functions of outputs and labels.
        personal: Whether to measure personal predictions as well, `personal`: `local` with the client's log class
            frequencies, relative to the fleet's, added to the logits. The server asks for class frequencies as for
            `class_prior`.
    """

    every: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    between: EvaluationPartSection | None = None
    batch_size: Count = 128
    split: Literal["test", "validation", "train"] = "test"
    patience: Count | None = None
    batch_norm: Annotated[list[Norm], Field(min_length=1)] = Field(default_factory=lambda: list[Norm](("static",)))
    statistics_samples: Count = 5000
    clients: Count | None = None
    samples: Count | None = None
    whole_test_set: bool = False
    metrics: list[str] = Field(default_factory=list)
    personal: bool = False


class CheckpointSection(Section):
    """`[checkpoint]`: checkpoints, from which a run resumes.

    Attributes:
        every: Rounds between checkpoints.
        keep: Number of the newest that are kept; with `evaluate.split = "validation"` the best one is kept, too.
    """

    every: Count = 1
    keep: Count = 2


class RecordedSection(Section):
    """`[recorded]`: what a run measured or chose when it was prepared. Runs write it; leave it out of your files.

    A run resumes from it with the same bits, and a run of its `config.toml` measures nothing.

    Attributes:
        latencies: Measured latencies, for levels that are planned by latency.
        computing: How each level is computed, with `engine.speed = "fast"`.
        memory_format: The rule by which each level's shape chooses the memory format of images.
        derived: File with the levels that were derived from a PyTorch module.
    """

    latencies: dict[str, list[float]] = Field(default_factory=dict)
    computing: dict[str, str] = Field(default_factory=dict)
    memory_format: MemoryFormat | None = None
    derived: str | None = None


class Request(NamedTuple):
    """What a user asked for.

    Attributes:
        tables: What the user wrote: file, overrides and keywords merged, without defaults.
        overrides: The dotted keys of `--set` and keywords.
        dropped: The file's keys that belonged to a name which an override replaced.
        model: The model that was chosen for the data; empty if the user names one.
        decided: The dotted keys of `[local]` and `[method]` that the user or the method's own defaults set.
    """

    tables: Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    model: str = ""
    decided: frozenset[str] = frozenset()


class Experiment(Section):
    """The description of a run. The default one trains handwritten digits by the method `fleetfit`.

    Attributes:
        name: Part of the run folder's name; by default the file's.
        seed: Seed of all random choices: the same file and seed give the same bits.
        rounds: Rounds of training.
        init_from: Folder of another run, whose last state is the initial state of this run.
        callbacks: Functions that follow the run: names, such as "tensorboard" or "file.py:function", and tables with a
            name and keys.
    """

    name: str = ""
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Count = 30
    init_from: str = ""
    callbacks: Annotated[
        list[Any], BeforeValidator(lambda value: [value] if isinstance(value, str | dict) else value)
    ] = Field(default_factory=list)
    data: DataSection = Field(default_factory=DataSection)
    model: ModelSection = Field(default_factory=ModelSection)
    peft: PeftSection = Field(default_factory=PeftSection)
    fleet: FleetSection = Field(default_factory=FleetSection)
    method: MethodSection = Field(default_factory=MethodSection)
    local: LocalSection = Field(default_factory=LocalSection)
    cohort: CohortSection = Field(default_factory=CohortSection)
    attack: AttackSection = Field(default_factory=AttackSection)
    secure: SecureSection = Field(default_factory=SecureSection)
    privacy: PrivacySection = Field(default_factory=PrivacySection)
    engine: EngineSection = Field(default_factory=EngineSection)
    evaluate: EvaluateSection = Field(default_factory=EvaluateSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    compare: CompareSection = Field(default_factory=CompareSection)
    recorded: RecordedSection = Field(default_factory=RecordedSection)
    _request: Request | None = PrivateAttr(default=None)

    @property
    def is_secure(self) -> bool:
        """Whether the file has a section `[secure]`, even an empty one."""
        return "secure" in self.model_fields_set

    @property
    def is_private(self) -> bool:
        """Whether the file has a section `[privacy]`, even an empty one."""
        return "privacy" in self.model_fields_set

    @property
    def request(self) -> Request:
        """What the user asked for. An experiment that is made from sections has their set keys as its tables."""
        return self._request or Request(dump_section(self, only_set=True))

    def __eq__(self, other: object) -> bool:
        """Compare the runs, ignoring what their users asked for."""
        return isinstance(other, Experiment) and self.__dict__ == other.__dict__
