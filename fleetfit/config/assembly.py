"""The assembled run: all objects that a run needs, and the keys of its experiment that have no effect."""

from dataclasses import dataclass, field

from fleetfit.attacks.base import Attackers
from fleetfit.config.assemble.fleet import DeviceBudgets
from fleetfit.config.components import build_component
from fleetfit.config.keys import format_key
from fleetfit.config.schema import Experiment
from fleetfit.core import DataDescription, Federation, Simulation
from fleetfit.data import AbsentData, Data
from fleetfit.engines.base import Engine
from fleetfit.engines.secure import SecureEngine
from fleetfit.errors import ConfigError
from fleetfit.hooks import Method, build
from fleetfit.planner import Plan
from fleetfit.rounds import Settings


@dataclass(frozen=True)
class UnusedKey:
    """A key that a run does not use.

    Attributes:
        key: Dotted, such as "cohort.on_deadline".
        reason: Why the run does not use it.
    """

    key: str
    reason: str

    def __str__(self) -> str:
        """Return the sentence: `[cohort] late is not used here: deadline_s is not set.`."""
        return f"{format_key(self.key)} is not used here: {self.reason}."


@dataclass(frozen=True, eq=False)
class Assembly:
    """Everything that a run needs.

    Attributes:
        experiment: The run's description, with measured and chosen values.
        data: The whole data set. On a real fleet, the description that most nodes report.
        fleet: Budgets of the clients.
        federation: The server's view.
        simulation: The simulated devices; None on a real fleet.
        settings: Settings of the rounds.
        plan: The method's levels, counted, and the clients of each.
        attackers: The hostile clients and their attack, or None.
        notes: Notes for the user, such as on clients that do not take part.
        unused: Keys of the experiment that have no effect; the notes list them.
    """

    experiment: Experiment
    data: Data | DataDescription
    fleet: DeviceBudgets
    federation: Federation
    simulation: Simulation | None
    settings: Settings
    plan: Plan
    attackers: Attackers | None = None
    notes: tuple[str, ...] = field(default=())
    unused: tuple[UnusedKey, ...] = field(default=())

    @property
    def method(self) -> Method:
        """The method as its spec builds it; the federation's may have hooks of `[privacy]`."""
        return build(self.federation.method_spec)

    def engine(self) -> Engine:
        """Start the engine that the experiment names.

        Raises:
            ConfigError: The engine cannot be started, or the run is on a real fleet.
            DataError: The data are absent.
        """
        section = self.experiment.engine
        if isinstance(self.data, AbsentData):
            raise self.data.make_error()
        if self.simulation is None:
            raise ConfigError(
                "this run's data are on the nodes of a fleet, which training and evaluation need. Continue it with "
                "`fleetfit flower resume`.",
                key="engine.name",
            )
        engine: Engine = build_component(
            "engines", section.name, "[engine]", section.settings, simulation=self.simulation
        )
        layout = self.federation.problem.layout
        if self.attackers is not None:
            engine = self.attackers.wrap_engine(engine, layout)
        return engine if self.settings.secure is None else SecureEngine(engine, layout, self.settings.secure)
