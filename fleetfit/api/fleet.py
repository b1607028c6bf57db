"""A run on a real fleet: who takes part and how long the run waits for it, and its rounds to the summary.

The run folder is that of any run, with `nodes.json` beside: which node is which client. A checkpoint is written after
each round, so that a run whose server was killed goes on where it was.
"""

import functools
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetfit.api.callbacks import make_callbacks
from fleetfit.api.metadata import NODES, load_planned_nodes
from fleetfit.api.results import Run, load
from fleetfit.api.run import (
    check_requested_keys,
    check_single_run,
    create_run_folder,
    run_remaining_rounds,
    verify_layout,
)
from fleetfit.config import Assembly, Experiment, load_experiment
from fleetfit.config.build.clients import build_node_clients, find_common_data, find_node_budgets
from fleetfit.config.build.method import build_method_spec
from fleetfit.config.build.rounds import compute_cohort_size, count_asked_clients
from fleetfit.config.build.run import assemble_fleet
from fleetfit.config.components import build_component
from fleetfit.config.dump import fill_in_defaults
from fleetfit.config.schema import EngineSection, GroupSection
from fleetfit.engines.flower import Rules
from fleetfit.engines.flower.protocol import digest_of, key_of
from fleetfit.errors import ConfigError, RunError
from fleetfit.messages import pack
from fleetfit.method import build
from fleetfit.planner import budget_problem
from fleetfit.records import RunFolder
from fleetfit.report.text import percent, spent
from fleetfit.rounds import Engine
from fleetfit.secured import Secured
from fleetfit.soundness import in_words
from fleetfit.values import DataDescription, Federation, NodeDescription

# ---- how nodes come to take part in a fleet's run: who fits, how long the run waits, and what is written of them ---

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fleetfit.engines.flower.client_manager import ClientManager
    from fleetfit.engines.flower.engine import FlowerEngine
    from fleetfit.engines.flower.transport import Transport

LOOK_S = 0.2
"""Between two looks at who is connected, when the run begins to wait."""
LATER = 0.05
"""Part of the time that it has waited, which is added."""
SETTLE_S = 10.0
"""That a round waits for nodes that are just enrolling."""
SAY_S = 30.0
"""Between two lines that say so."""


_ANYWHERE = EngineSection.model_fields.keys() - {"name"}  # keys of [engine] that say how, and not where


def for_fleet(experiment: Experiment) -> Experiment:
    """Return the experiment with engine flower, and a checkpoint after each round."""
    changes: dict[str, Any] = {}
    if experiment.engine.name != "flower":
        stays = {key: getattr(experiment.engine, key) for key in experiment.engine.model_fields_set & _ANYWHERE}
        changes["engine"] = EngineSection(**{**stays, "name": "flower"})
    if experiment.checkpoint.every != 1:
        changes["checkpoint"] = experiment.checkpoint.model_copy(update={"every": 1})
    return experiment.model_copy(update=changes)


def changed_for_fleet(experiment: Experiment) -> list[str]:
    """Return what a fleet's run does otherwise than its file says, beyond what its nodes have of their own."""
    found, engine = [], experiment.engine
    if (engine.model_fields_set - _ANYWHERE or engine.settings) and engine.name != "flower":
        found.append(f'[engine] is not used here: on a fleet the engine is "flower", and not "{engine.name}".')
    if experiment.checkpoint.every != 1:
        found.append("[checkpoint] every is not used here: a fleet's run writes a checkpoint after each round.")
    return found


def rules_of(experiment: Experiment) -> Rules:
    """Return when the run begins and when its rounds end."""
    rules: Rules = build_component("engines", "flower", "[engine]", experiment.engine.settings)
    return replace(rules, quorum=experiment.cohort.quorum, over_selection=experiment.cohort.over_selection)


def with_enrolled(experiment: Experiment, told: Sequence[NodeDescription]) -> Experiment:
    """Return the experiment with the enrolled nodes as its groups, where they told what they afford."""
    if not build(build_method_spec(experiment)).needs_budgets:
        return experiment
    groups = [
        GroupSection(
            name=t.name, budget=dict(t.budget) if isinstance(t.budget, Mapping) else t.budget, tolerance=t.tolerance
        )
        for t in told
        if t.budget is not None
    ]
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"groups": groups})})


# ---- enrolment ---------------------------------------------------------------------------------------------------


def new_manager(transport: "Transport", experiment: Experiment, say: Callable[[str], None]) -> "ClientManager":
    """Return who looks after the clients of a run; nobody has enrolled yet."""
    from fleetfit.engines.flower.client_manager import ClientManager

    method = build(build_method_spec(experiment))
    asks = {"asks_budget": method.needs_budgets, "asks_labels": experiment.fleet.reports_labels}
    return ClientManager(transport, asks, fits(experiment), say)


def fits(experiment: Experiment, facts: DataDescription | None = None) -> Callable[[NodeDescription], str]:
    """Return what says why a node does not fit the run, or ""."""
    method = build(build_method_spec(experiment))

    def wrong(told: NodeDescription) -> str:
        if facts is not None and told.facts.shape != facts.shape:
            return f"its data are {told.facts}, and the others' {facts}."
        if told.facts.task == "regression":
            return "its task is a regression, whose targets each node would scale by its own mean."
        if not told.num_examples:
            return "it has no training data."
        if method.needs_budgets and told.budget is None:
            return (
                f"it does not tell a budget, and {experiment.method.name} chooses a level for each client. Set budget "
                "and reports_budget in its configuration, or run adaptivefl."
            )
        if told.budget is not None and (found := budget_problem(told.budget, experiment.fleet.cost)):
            return f"its budget does not fit this run: {found}"
        if experiment.fleet.reports_labels and told.labels is None:
            return "it does not report its samples by class, and the run asks for them: set reports_labels there."
        return ""

    return wrong


def enrolled(manager: "ClientManager", rules: Rules, say: Callable[[str], None]) -> None:
    """Wait until enough nodes have enrolled, and number them; those whose data are unlike most others' are left out.

    Raises:
        RunError: Too few came in time.
    """
    began = said = time.monotonic()
    enough: float | None = None
    say(f"Waiting for {rules.nodes} node{'s' if rules.nodes > 1 else ''}.")
    while True:
        manager.advance()
        now = time.monotonic()
        enough = None if manager.arrived < rules.nodes else enough or now
        if enough is not None and (not manager.pending or now - enough > SETTLE_S):
            manager.settle()
            manager.keep_only(find_common_data([member.told for member in manager.members]))
            if manager.arrived >= rules.nodes:
                return
        if time.monotonic() - began > rules.wait_s:
            raise RunError(
                f"{manager.arrived} of {rules.nodes} nodes enrolled within {rules.wait_s:g} s. Start more, or lower "
                "engine.nodes."
            )
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(
                f"Waiting: {manager.arrived} of {rules.nodes} nodes have enrolled, {len(manager.online)} are connected."
            )
        look_again(began)


def look_again(began: float) -> None:
    """Let a moment pass until the next look; looks cost the SuperLink something, and after a while none is urgent."""
    time.sleep(min(LOOK_S + LATER * (time.monotonic() - began), 1.0))


def nodes_text(key: str, planned: Sequence[NodeDescription], manager: "ClientManager") -> str:
    """Return what `nodes.json` says: the run, for whom its levels were planned, and who takes part."""
    facts = find_common_data(planned)
    data = {**vars(facts), "sample_shape": list(facts.sample_shape)}
    nest = {
        "run": key,
        "data": data,
        "planned": [told.nest for told in planned],
        "members": manager.saved(manager.members),
    }
    return json.dumps(nest, indent=2) + "\n"


# ---- the run -------------------------------------------------------------------------------------------------------

HEADING = (
    f"# The run of a fleet: the clients' data are on its nodes ({NODES} says what they are), and [data] below says\n"
    "# nothing of them; [fleet] groups are the enrolled nodes, where they told what they afford.\n\n"
)
"""The first lines of `config.toml`."""


@dataclass(frozen=True)
class ServerAppConfig:
    """What `flwr run --run-config` asks for.

    Attributes:
        run_file: The run file, or "" for the defaults.
        out: The run folder; below `runs` by default.
        resume: A run folder to go on with, or "".
        overrides: `a.b=c`, as on the command line.
    """

    run_file: str = ""
    out: str = ""
    resume: str = ""
    overrides: Sequence[str] = ()

    @staticmethod
    def of(config: Mapping[str, Any], app: Path) -> "ServerAppConfig":
        """Read a Flower run config; the run file is looked for in the app's folder.

        Raises:
            ConfigError: An unknown key, or a value that is no text.
        """
        known = ("run-file", "out", "resume", "set")
        for key, value in config.items():
            if key not in known or not isinstance(value, str):
                raise ConfigError(f"run config: {key} = {value!r}; it takes the texts {', '.join(known)}.")
        file = str(config.get("run-file", ""))
        place = str(app / file) if file and (app / file).is_file() else file
        return ServerAppConfig(
            place, str(config.get("out", "")), str(config.get("resume", "")), str(config.get("set", "")).split()
        )


def serve(grid: "Grid", wanted: ServerAppConfig, say: Callable[[str], None] = print) -> Run:
    """Train on the nodes of a Flower grid.

    Returns:
        The finished run.

    Raises:
        FleetFitError: Something does not fit, or too few nodes came.
    """
    from fleetfit.engines.flower.transport import Transport

    transport = Transport(grid)
    try:
        served = _Served.resumed(transport, wanted, say) if wanted.resume else _Served.begun(transport, wanted, say)
        if served.run.finished:
            say(f"{served.run.folder} is finished already.")
            return served.run
        say(f"Run folder: {served.run.folder.resolve()}")
        for note in served.assembly.notes:
            say(f"Note: {note}")
        _say_levels(served.assembly, served.manager, say)
        run_remaining_rounds(served.run, served.on_round, served.renew)
        _say_result(served.run, say)
        return served.run
    finally:
        transport.close()


@dataclass
class _Served:
    """One run of a fleet while it lasts."""

    run: Run
    assembly: Assembly
    manager: "ClientManager"
    engine: "FlowerEngine"
    rules: Rules
    key: str
    planned: list[NodeDescription]
    say: Callable[[str], None]
    _begun: bool = False

    @staticmethod
    def begun(transport: "Transport", wanted: ServerAppConfig, say: Callable[[str], None]) -> "_Served":
        """Begin a run: wait for nodes, plan, make the folder."""
        asked = load_experiment(wanted.run_file or None, wanted.overrides)
        check_single_run(asked, "a fleet")
        for note in changed_for_fleet(asked):
            say(f"Note: {note}")
        experiment = for_fleet(fill_in_defaults(asked))
        heard = make_callbacks(experiment.callbacks)  # before nodes are waited for
        out = Path(wanted.out) if wanted.out else None
        if out is not None and out.exists() and any(out.iterdir()):
            raise RunError(
                f"{out} is not empty. Choose another folder, or go on with it: fleetfit flower resume {out}."
            )
        rules = rules_of(experiment)
        manager = new_manager(transport, experiment, say)
        enrolled(manager, rules, say)
        manager.fits = fits(experiment, find_common_data([member.told for member in manager.members]))
        told = [member.told for member in manager.members]
        experiment = with_enrolled(experiment, told)
        assembly = assemble_fleet(experiment, told)
        check_requested_keys(assembly.unused, asked)
        assembly = verify_layout(assembly, say)
        key = secrets.token_hex(8)
        folder = create_run_folder(assembly, _who(assembly), out, {NODES: nodes_text(key, told, manager)}, HEADING)
        run = Run(folder, assembly.experiment, assembly)
        served = _Served._made(run, assembly, manager, rules, key, told, say)
        served.run._listeners = heard
        return served

    @staticmethod
    def resumed(transport: "Transport", wanted: ServerAppConfig, say: Callable[[str], None]) -> "_Served":
        """Go on with a run: the nodes that it knows keep their numbers, the levels stay."""
        run = load(wanted.resume)
        if not (run.folder / NODES).is_file():
            raise RunError(f"{run.folder} is no run of a fleet; go on with it: fleetfit resume {run.folder}.")
        rules, planned = rules_of(run.experiment), load_planned_nodes(run.files)
        manager = new_manager(transport, run.experiment, say)
        try:
            saved = run.files.json(NODES)
            manager.restore(saved["members"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{run.folder / NODES} is damaged: {error}.") from None
        manager.fits = fits(run.experiment, find_common_data(planned))
        return _Served._made(run, verify_layout(run.assembly, say), manager, rules, str(saved["run"]), planned, say)

    @staticmethod
    def _made(
        run: Run, assembly: Assembly, manager: "ClientManager", rules: Rules, key: str, planned: list[NodeDescription],
        say: Callable[[str], None],
    ) -> "_Served":  # fmt: skip
        from fleetfit.engines.flower.client_manager import Setup
        from fleetfit.engines.flower.engine import FlowerEngine
        from fleetfit.engines.flower.parties import NodeParties

        problem, federation = assembly.federation.problem, assembly.federation
        if problem.spec is None:
            raise ConfigError(
                "nodes rebuild the model from its name, so it needs an import path: "
                '"package.module:function" or "file.py:function".'
            )
        base = pack(dict(problem.base)) if problem.base else b""
        header = {"run": key, "problem": problem.spec, "method": dict(federation.method_spec),
                  "base": digest_of(base) if base else "", "cost": run.experiment.fleet.cost}  # fmt: skip
        manager.setup = Setup(header, base)
        engine = FlowerEngine(manager.transport, manager, rules, federation.cohort, problem.layout)
        secure = assembly.settings.secure
        used: Engine = engine
        if secure is not None:
            used = Secured(engine, problem.layout, secure, NodeParties(engine, secure), key_of(header))
        run = Run(run.files, run.experiment, assembly, used)
        return _Served(run, assembly, manager, engine, rules, key, planned, say)

    # -- while it runs

    def renew(self, federation: Federation) -> Federation:
        """Return the federation as it is now; wait until somebody who can train is there.

        Before the first round, wait for everybody who has enrolled; later only a moment for whoever is being asked.
        """
        said = began = time.monotonic()
        while True:
            self.manager.advance()
            self.manager.settle()
            federation = self._with_members(federation)
            if self.manager.changed:
                self.run.files.write(NODES, nodes_text(self.key, self.planned, self.manager))
                self.manager.changed = False
            able = np.zeros(len(federation.clients), dtype=bool)
            able[federation.able] = True
            free = np.array(self.engine.free(), dtype=bool)
            patience = SETTLE_S if self._begun else self.rules.wait_s
            missing = not self._begun and int(free.sum()) < min(self.rules.nodes, self.manager.willing)
            settling = missing or self.manager.unsettled or self.manager.pending
            settling = settling and time.monotonic() - began < patience
            if (free & able).any() and not settling:
                self._begun = True
                return replace(federation, connected=functools.partial(_in_any_round, free))
            if time.monotonic() - said > SAY_S:
                said = time.monotonic()
                self.say("Waiting: no node that can train is connected and free.")
            look_again(began)

    def _with_members(self, federation: Federation) -> Federation:
        experiment, told = self.run.experiment, [member.told for member in self.manager.members]
        fleet = find_node_budgets(experiment, federation.problem, told)
        private = self.run.assembly.settings.privacy is not None  # then all who were drawn are waited for, however many
        self.engine.cohort = len(told) if private else compute_cohort_size(experiment, len(told))
        more = count_asked_clients(experiment.cohort, self.engine.cohort)
        return replace(federation, clients=build_node_clients(experiment, federation.method, fleet, told), cohort=more)

    def on_round(self, report: Mapping[str, Any]) -> None:
        """Print what a round brought, and who brought nothing."""
        train, names = report["train"], [member.told.name for member in self.manager.members]
        if "privacy" in report:
            self.say(f"Round {report['round']}/{self.run.experiment.rounds}: {spent(report['privacy'])}")
            if "undone" in report:
                self.say(f"  Round {report['round']} was {in_words(report['undone'], names)}")
            return
        loss = "-" if train["loss"] is None else f"{train['loss']:.3f}"
        levels = ", ".join(f"{n} at level {level}" for level, n in sorted(train["by_level"].items()))
        evaluated = report.get("evaluate", {}).get(self.run.experiment.evaluate.norms[0])
        local = f"  local {percent(evaluated['local'])}%" if evaluated and evaluated["local"] is not None else ""
        self.say(
            f"Round {report['round']}/{self.run.experiment.rounds}: loss {loss}, {train['clients']} updates"
            f"{f' ({levels})' if levels else ''}{local}, {report['seconds']:.1f} s"
        )
        if "undone" in report:
            self.say(f"  Round {report['round']} was {in_words(report['undone'], names)}")
        for failure in (*report["failures"], *report.get("evaluate", {}).get("failures", ())):
            self.say(f"  Node {names[failure['client']]}: {failure['reason']}")


def _in_any_round(who: np.ndarray, round: int) -> np.ndarray:
    return who


# ---- what is written and said ------------------------------------------------------------------------------------


def _who(assembly: Assembly) -> dict[str, Any]:
    federation, names = assembly.federation, assembly.fleet.names
    labels, told = federation.clients.labels, assembly.settings.privacy is None
    first = {
        "group": list(names),
        "level": [int(level) + 1 for level in federation.level_of],
        "samples": federation.clients.num_examples.tolist() if told else None,
        "class_counts": labels.tolist() if labels is not None and told else None,
    }
    return {"clients": len(names), "groups": dict(Counter(names)), "first": first}


def _say_levels(assembly: Assembly, manager: "ClientManager", say: Callable[[str], None]) -> None:
    for level in assembly.plan.levels:
        say(
            f"Level {level.name}: depth {level.depth}, width {level.width:.2f}, {level.parameters:,} parameters, "
            f"{100 * level.share:.0f}% of the full model's {assembly.plan.cost}"
        )
    if assembly.federation.method.needs_budgets and len(manager.members) == len(assembly.federation.level_of):
        levels = assembly.federation.level_of
        for member, level in zip(manager.members, levels, strict=False):
            say(f"Node {member.told.name} trains {f'level {level + 1}' if level >= 0 else 'nothing: too small'}.")


def _say_result(run: Run, say: Callable[[str], None]) -> None:
    columns = run.columns[run.experiment.evaluate.norms[0]]
    for name, level in columns["levels"].items():
        if level["clients"]:
            say(f"Level {name}: {percent(level['local'])}% on the data of {level['clients']} nodes.")
    say(f"Finished. The models: fleetfit.load({str(run.folder)!r}).model(level=1).")


def check_run(folder: str | Path) -> RunFolder:
    """Return the folder of a fleet's run that can go on.

    Raises:
        FleetFitError: It is none.
    """
    files = RunFolder.open(folder)
    if not (files.path / NODES).is_file():
        raise RunError(f"{files.path} is no run of a fleet; go on with it: fleetfit resume {files.path}.")
    return files
