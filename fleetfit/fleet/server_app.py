"""The Flower ServerApp: a run on a real fleet, from the wait for its nodes to the summary.

The run folder is that of any run, with `nodes.json`, which numbers the nodes as clients. A checkpoint is written after
each round, so a run whose server was killed continues there.
"""

import contextlib
import json
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.common.config import get_project_dir
from flwr.serverapp import Grid, ServerApp

from fleetfit.api.callbacks import make_callbacks
from fleetfit.api.progress import TaskProgress
from fleetfit.api.results import Run, load
from fleetfit.api.run import (
    check_requested_keys,
    check_single_run,
    create_run_folder,
    run_remaining_rounds,
    verify_layout,
)
from fleetfit.config import Assembly, Experiment, load_experiment
from fleetfit.config.assemble.clients import build_node_clients, find_common_data, find_node_budgets
from fleetfit.config.assemble.fleet import DeviceBudgets
from fleetfit.config.assemble.levels import add_further_costs, find_failed_costs
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.assemble.rounds import compute_cohort_size, count_asked_clients
from fleetfit.config.assemble.run import assemble_fleet
from fleetfit.config.components import build_component
from fleetfit.config.schema import EngineSection, GroupSection
from fleetfit.core import DataDescription, Federation, NodeDescription, check_rebuildable
from fleetfit.data.transform import FILE as TRANSFORM, Transform
from fleetfit.engines.base import Engine
from fleetfit.engines.flower import Rules
from fleetfit.engines.secure import SecureEngine
from fleetfit.errors import ConfigError, FleetFitError, RunError, join_some, make_printable
from fleetfit.files import append_line
from fleetfit.fleet import logs
from fleetfit.fleet.client_manager import ClientManager, Setup
from fleetfit.fleet.engine import FleetEngine
from fleetfit.fleet.failover import use_superlinks
from fleetfit.fleet.node_log import HEADS
from fleetfit.fleet.protocol import compute_digest, make_model_key, make_needs, pack_transform
from fleetfit.fleet.secure_aggregation import NodeParties
from fleetfit.fleet.server_watch import report_server_death
from fleetfit.fleet.terms import Terms, check_terms, compute_fingerprint, make_terms, parse_terms
from fleetfit.fleet.transport import Transport
from fleetfit.hooks import build, dump_problem
from fleetfit.messages import pack
from fleetfit.planner import find_budget_error
from fleetfit.report.text import format_percent, format_privacy
from fleetfit.rounds.report import format_rollback
from fleetfit.runs.data import load_transform
from fleetfit.runs.folder import NODES, RunFolder
from fleetfit.secure import Quantizer

app = ServerApp()

HEADING = (
    f"# The run of a fleet. The clients' data are on its nodes ({NODES} describes them), not in [data] below;\n"
    "# [fleet] groups are the enrolled nodes, if they reported their budgets.\n\n"
)
"""The first lines of `config.toml`."""
_POLL_S = 0.2  # between two looks at the connected nodes, when the run begins to wait
_POLL_GROWTH = 0.05  # part of the time waited that is added
_SETTLE_S = 10.0  # for which a round waits for nodes that are enrolling
_LINE_S = 30.0  # between two lines of progress
_PORTABLE_KEYS = EngineSection.model_fields.keys() - {"name"}  # keys of [engine] that hold on a fleet too
_FLEET_KEYS = ("nodes", "wait_s", "deadline_s")  # of the engine "flower", also where a file names another one


# ---- the experiment --------------------------------------------------------------------------------------------------


def adapt_experiment(experiment: Experiment) -> Experiment:
    """Return the experiment with engine flower, and a checkpoint after each round."""
    changes: dict[str, Any] = {}
    if experiment.engine.name != "flower":
        portable = {key: getattr(experiment.engine, key) for key in experiment.engine.model_fields_set & _PORTABLE_KEYS}
        own = {key: value for key, value in experiment.engine.settings.items() if key in _FLEET_KEYS}
        changes["engine"] = EngineSection(**{**portable, **own, "name": "flower"})
    if experiment.checkpoint.every != 1:
        changes["checkpoint"] = experiment.checkpoint.model_copy(update={"every": 1})
    return experiment.model_copy(update=changes)


def list_changes(experiment: Experiment) -> list[str]:
    """Return notes on the keys of a run file that a fleet does not follow, the nodes' own keys aside."""
    notes, engine = [], experiment.engine
    dropped = [] if engine.name in ("flower", "local") else ["name", *sorted(engine.settings.keys() - {*_FLEET_KEYS})]
    if dropped:
        notes.append(
            f'[engine] {", ".join(dropped)}: not used here. On a fleet the engine is "flower", and not "{engine.name}".'
        )
    if experiment.checkpoint.every != 1:
        notes.append("[checkpoint] every is not used here: a fleet's run writes a checkpoint after each round.")
    return notes


def make_rules(experiment: Experiment) -> Rules:
    """Return the rules by which the run begins and its rounds end."""
    rules: Rules = build_component("engines", "flower", "[engine]", experiment.engine.settings)
    return replace(rules, quorum=experiment.cohort.quorum, over_selection=experiment.cohort.over_selection)


def replace_groups(experiment: Experiment, nodes: Sequence[NodeDescription]) -> Experiment:
    """Return the experiment with the nodes that reported budgets as its groups, if its method needs budgets."""
    if not build(build_method_spec(experiment)).needs_budgets:
        return experiment
    groups = [
        GroupSection(
            name=node.name,
            budget=dict(node.budget) if isinstance(node.budget, Mapping) else node.budget,
            tolerance=node.tolerance,
        )
        for node in nodes
        if node.budget is not None
    ]
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"groups": groups})})


# ---- enrolment -------------------------------------------------------------------------------------------------------


def make_manager(
    transport: Transport, experiment: Experiment, rules: Rules, transform: Transform | None, key: str,
    terms: Terms | None, say: Callable[[str], None],
) -> ClientManager:  # fmt: skip
    """Return the manager of a run's clients, none of whom has enrolled yet.

    Args:
        transport: Messages out, replies in.
        experiment: The run.
        rules: Its rules.
        transform: That of the nodes.
        key: The run's.
        terms: Those that the run began with; None for a new run, or one whose file was edited.
        say: Prints a line of the server's log.
    """
    packed = b"" if transform is None else pack_transform(transform)
    terms = terms or make_terms(experiment, compute_digest(packed) if packed else "")
    say(f"Fingerprint of the run: {compute_fingerprint(terms)}.")
    check_node = make_node_check(experiment)
    needs = make_needs(experiment)
    return ClientManager(transport, key, terms, needs, check_node, say, transform=packed, names=rules.names)


def make_node_check(experiment: Experiment, facts: DataDescription | None = None) -> Callable[[NodeDescription], str]:
    """Return a function that returns the reason why a node does not fit the run, or "".

    Args:
        experiment: The experiment.
        facts: The data of most nodes, once they are known.
    """
    method = build(build_method_spec(experiment))

    def check_node(node: NodeDescription) -> str:
        if facts is not None and node.facts.shape != facts.shape:
            return f"its data are {node.facts}, and the others' {facts}. One [data] transform makes them alike."
        if node.facts.task == "regression" and experiment.data.transform is None:
            return (
                "its task is a regression, whose targets each node would scale by its own mean. Set transform under "
                "[data] in the run file."
            )
        if not node.num_examples:
            return "it has no training data."
        if method.needs_budgets and node.budget is None:
            return (
                f"it does not report a budget, and {experiment.method.name} chooses a level for each client. Set "
                "budget and reports_budget in its configuration, or run adaptivefl."
            )
        if node.budget is not None and (problem := find_budget_error(node.budget, experiment.fleet.cost)):
            return f"its budget does not fit this run: {problem}"
        if experiment.fleet.reports_labels and node.labels is None:
            return "it does not report its samples by class, and the run asks for them: set reports_labels there."
        return ""

    return check_node


def wait_for_nodes(manager: ClientManager, rules: Rules, say: Callable[[str], None]) -> None:
    """Wait until enough nodes have enrolled, and number them; those whose data differ from most others' are left out.

    Raises:
        RunError: Too few enrolled in time.
    """
    start = time.monotonic()
    complete: float | None = None  # when enough had enrolled
    say(f"Waiting for {', '.join(rules.names) or f'{rules.nodes} node' + 's' * (rules.nodes > 1)}.")

    def format_line() -> str:
        return f"Waiting: {manager.enrolled} of {rules.nodes} nodes have enrolled, {len(manager.online)} are connected."

    with TaskProgress("Waiting for nodes", rules.nodes, say, _LINE_S) as progress:
        while True:
            manager.advance()
            now = time.monotonic()
            complete = None if manager.enrolled < rules.nodes else complete or now
            if complete is not None and (not manager.is_waiting or now - complete > _SETTLE_S):
                manager.number_new_nodes()
                manager.keep_only(find_common_data([member.description for member in manager.members]))
                if manager.enrolled >= rules.nodes:
                    return
            if time.monotonic() - start > rules.wait_s:
                raise RunError(
                    f"{manager.enrolled} of {rules.nodes} nodes enrolled within {rules.wait_s:g} s. Start more, or "
                    "lower engine.nodes.",
                    key="engine.nodes",
                )
            progress.update(manager.enrolled, format_line)
            wait_a_moment(start)


def wait_a_moment(start: float) -> None:
    """Sleep until the next look at the nodes: a look costs the SuperLink something, and becomes less urgent."""
    time.sleep(min(_POLL_S + _POLL_GROWTH * (time.monotonic() - start), 1.0))


def format_nodes(planned: Sequence[NodeDescription], manager: ClientManager) -> str:
    """Return the text of `nodes.json`: the run, its terms, the nodes that its levels were planned for, its members."""
    facts = find_common_data(planned)
    table = {
        "run": manager.run,
        "terms": manager.terms,
        "data": {**vars(facts), "sample_shape": list(facts.sample_shape)},
        "planned": [node.payload for node in planned],
        "members": manager.dump_members(),
    }
    return json.dumps(table, indent=2) + "\n"


# ---- the run ---------------------------------------------------------------------------------------------------------


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the app; a mistake of the user is reported as a sentence, without a traceback."""
    logs.log_to_stderr()
    folder = Path(get_project_dir(grid.run.fab_id, grid.run.fab_version, grid.run.fab_hash))
    try:
        use_superlinks(grid)
        with report_server_death(grid):
            serve(grid, ServerAppConfig.from_run_config(context.run_config, folder), _print_line)
    except FleetFitError as error:
        _print_line(f"fleetfit: {error}")
        sys.tracebacklimit = 0
        raise


def _print_line(line: str) -> None:
    """Print a line of the server's log, which `flwr run --stream` shows."""
    print(make_printable(line), flush=True)


@dataclass(frozen=True)
class ServerAppConfig:
    """The keys of `flwr run --run-config`.

    Attributes:
        run_file: The run file, or "" for the defaults.
        out: The run folder; below `runs` by default.
        resume: A run folder to continue, or "".
        overrides: `a.b=c`, as on the command line.
    """

    run_file: str = ""
    out: str = ""
    resume: str = ""
    overrides: Sequence[str] = ()

    @staticmethod
    def from_run_config(config: Mapping[str, Any], app: Path) -> "ServerAppConfig":
        """Read a Flower run config; the run file may be in the app's folder.

        Raises:
            ConfigError: An unknown key, or a value that is not a text.
        """
        keys = ("run-file", "out", "resume", "set")
        for key, value in config.items():
            if key not in keys or not isinstance(value, str):
                raise ConfigError(f"run config: {key} = {value!r}; it takes the texts {', '.join(keys)}.", key=key)
        run_file, out, resume, overrides = (str(config.get(key, "")) for key in keys)
        if run_file and (app / run_file).is_file():
            run_file = str(app / run_file)
        return ServerAppConfig(run_file, out, resume, overrides.split())


def serve(grid: Grid, config: ServerAppConfig, say: Callable[[str], None] = print) -> Run:
    """Train on the nodes of a Flower grid.

    Returns:
        The finished run.

    Raises:
        FleetFitError: Something does not fit, or too few nodes enrolled.
    """
    transport = Transport(grid)
    try:
        make = _FleetRun.resume if config.resume else _FleetRun.start
        fleet_run = make(transport, config, say)
        run = fleet_run.run
        if run._is_over:
            say(f"{run.folder} is finished already.")
            return run
        say(f"Run folder: {run.folder.resolve()}")
        for note in fleet_run.assembly.notes:
            say(f"Note: {note}")
        fleet_run.print_unevaluated_nodes()
        fleet_run.print_levels()
        try:
            run_remaining_rounds(run, fleet_run.print_round, fleet_run.renew)
        except BaseException:
            with contextlib.suppress(OSError):  # of a folder that is gone
                fleet_run.store_heads()
            raise
        fleet_run.store_heads()
        fleet_run.print_missed_levels()
        for name, level in run.columns[run.experiment.evaluate.batch_norm[0]]["levels"].items():
            if level["clients"]:
                say(f"Level {name}: {format_percent(level['local'])}% on the data of {level['clients']} nodes.")
        first = run.plan.levels[0].name
        level = first if first.isdecimal() else repr(first)
        say(f"Finished. The models: fleetfit.load({str(run.folder)!r}).model(level={level}).")
        return run
    finally:
        transport.close()


@dataclass
class _FleetRun:
    run: Run
    assembly: Assembly
    manager: ClientManager
    engine: FleetEngine
    rules: Rules
    planned: list[NodeDescription]
    say: Callable[[str], None]
    _has_begun: bool = False
    _levels: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def start(transport: Transport, config: ServerAppConfig, say: Callable[[str], None]) -> "_FleetRun":
        """Start a run: wait for nodes, plan, create the folder."""
        requested = load_experiment(config.run_file or None, config.overrides)
        check_single_run(requested, "a fleet")
        for note in list_changes(requested):
            say(f"Note: {note}")
        experiment = adapt_experiment(requested)
        callbacks = make_callbacks(experiment.callbacks)  # before the wait for nodes
        out = Path(config.out) if config.out else None
        if out is not None and out.exists() and any(out.iterdir()):
            raise RunError(
                f"{out} is not empty. Choose another folder, or continue it: fleetfit flower resume {out}.", path=out
            )
        rules = make_rules(experiment)
        transform = None if experiment.data.transform is None else Transform.load(experiment.data.transform)
        manager = make_manager(transport, experiment, rules, transform, secrets.token_hex(8), None, say)
        wait_for_nodes(manager, rules, say)
        nodes = [member.description for member in manager.members]
        manager.check_node = make_node_check(experiment, find_common_data(nodes))
        assembly = assemble_fleet(replace_groups(experiment, nodes), nodes)
        check_requested_keys(assembly.unused, requested)
        assembly = verify_layout(assembly, say)
        files = {NODES: format_nodes(nodes, manager), **({} if transform is None else transform.to_files())}
        folder = create_run_folder(assembly, _describe_clients(assembly), out, files, HEADING)
        run = Run(folder, assembly.experiment, assembly)
        fleet_run = _FleetRun._make(run, assembly, manager, rules, nodes, say)
        fleet_run.run._callbacks = callbacks
        return fleet_run

    @staticmethod
    def resume(transport: Transport, config: ServerAppConfig, say: Callable[[str], None]) -> "_FleetRun":
        """Continue a run: its nodes keep their numbers, the levels stay."""
        if config.overrides:
            raise ConfigError(
                "the run config has resume and set, and a resumed run keeps its settings. Leave set out. To change "
                f"some: fleetfit flower resume {config.resume} --set {' --set '.join(config.overrides)}",
                key="set",
            )
        run = load(RunFolder.open_fleet(config.resume).path)
        rules, planned = make_rules(run.experiment), run.files.read_nodes()
        transform = load_transform(run.files) if run.files.has(TRANSFORM) else None
        try:
            table = run.files.json(NODES)
            terms = None  # another file has other terms
            if not run.files.is_edited():
                now = make_terms(run.experiment, str(table["terms"]["transform"]))
                terms = parse_terms({**table["terms"], "rounds": now["rounds"], "code": now["code"]})
            manager = make_manager(transport, run.experiment, rules, transform, str(table["run"]), terms, say)
            manager.restore(table["members"])
        except (ValueError, KeyError, TypeError, RunError) as error:
            raise RunError(f"{run.folder / NODES} is damaged: {error}.", path=run.folder / NODES) from None
        manager.check_node = make_node_check(run.experiment, find_common_data(planned))
        if run.assembly.plan != run.files.plan:  # other levels; plan.toml is written with the first round
            run.files.write("fleet.json", json.dumps(_describe_clients(run.assembly)) + "\n")
        return _FleetRun._make(run, verify_layout(run.assembly, say), manager, rules, planned, say)

    @staticmethod
    def _make(
        run: Run, assembly: Assembly, manager: ClientManager, rules: Rules, planned: list[NodeDescription],
        say: Callable[[str], None],
    ) -> "_FleetRun":  # fmt: skip
        federation = assembly.federation
        problem = federation.problem
        check_rebuildable(problem, "the nodes of a fleet")
        base = pack(dict(problem.base)) if problem.base else b""
        privacy = assembly.settings.privacy
        noise = {} if privacy is None else {"noise_multiplier": float(privacy.noise_multiplier),
                                            "rate": float(privacy.rate)}  # fmt: skip
        header = {"run": manager.run, "terms": dict(manager.terms), "needs": dict(manager.needs),
                  "problem": dump_problem(problem),
                  "method": dict(federation.method_spec), "base": compute_digest(base) if base else "",
                  "cost": run.experiment.fleet.cost, "transform": manager.digest, "privacy": noise}  # fmt: skip
        check_terms({"what": "setup", **header})
        manager.setup = Setup(header, base)
        flower_engine = FleetEngine(manager.transport, manager, rules, federation.cohort, problem.layout)
        secure = assembly.settings.secure
        engine: Engine = flower_engine
        if secure is not None:
            make_parties = partial(NodeParties, flower_engine)
            engine = SecureEngine(flower_engine, problem.layout, secure, make_parties, make_model_key(header))
        run = Run(run.files, run.experiment, assembly, engine)
        return _FleetRun(run, assembly, manager, flower_engine, rules, planned, say)

    # -- rounds

    def renew(self, federation: Federation) -> Federation:
        """Return the federation with its present members; wait until one that can train is connected.

        Before the first round, wait for all that have enrolled; later a moment for those that are enrolling.
        """
        start = time.monotonic()
        with TaskProgress("Waiting for a node that can train", 1, self.say, _LINE_S) as progress:
            while True:
                self.manager.advance()
                self.manager.number_new_nodes()
                federation = self._update_members(federation)
                if self.manager.changed:
                    self.run.files.write(NODES, format_nodes(self.planned, self.manager))
                    self.manager.changed = False
                self.store_heads()
                able = np.zeros(len(federation.clients), dtype=bool)
                able[federation.able] = True
                free = np.array(self.engine.find_free_clients(), dtype=bool)
                patience = _SETTLE_S if self._has_begun else self.rules.wait_s
                missing = not self._has_begun and int(free.sum()) < min(self.rules.nodes, self.manager.willing)
                settling = missing or self.manager.is_unsettled or self.manager.is_waiting
                settling = settling and time.monotonic() - start < patience
                if (free & able).any() and not settling:
                    break
                progress.update(0, lambda: "Waiting: no node that can train is connected and free.")
                wait_a_moment(start)
        self._has_begun = True
        return replace(federation, connected=lambda _: free)

    def print_unevaluated_nodes(self) -> None:
        """Print which nodes have no samples to evaluate."""
        evaluate, members = self.run.experiment.evaluate, [member.description for member in self.manager.members]
        without = [m.name for m in members if not {"train": m.num_examples, **m.held_out}.get(evaluate.split)]
        if without and evaluate.every:
            some = f"These nodes have no {evaluate.split} samples, and are not evaluated: {join_some(without, 10)}."
            none = f"No node has {evaluate.split} samples, so nothing is evaluated."
            self.say(f"Note: [evaluate] split: {none if len(without) == len(members) else some}")

    def store_heads(self) -> None:
        """Append the heads of the nodes' logs that have come to a file of the run folder.

        Of a private run the file is beside the key: it shows who took part in which round.
        """
        if self.manager.heads:
            privacy, line = self.assembly.settings.privacy, json.dumps({"heads": self.manager.heads}).encode()
            path = self.run.folder / HEADS if privacy is None else Path(f"{privacy.key_file}.{HEADS}").expanduser()
            append_line(path, line + b"\n")
            self.manager.heads = {}

    def _update_members(self, federation: Federation) -> Federation:
        experiment, nodes = self.run.experiment, [member.description for member in self.manager.members]
        fleet = find_node_budgets(experiment, federation.problem, nodes)
        is_private = self.run.assembly.settings.privacy is not None  # then the round waits for its whole random cohort
        self.engine.cohort = len(nodes) if is_private else compute_cohort_size(experiment, len(nodes))
        clients = build_node_clients(experiment, federation.method, fleet, nodes)
        cohort = count_asked_clients(experiment.cohort, self.engine.cohort)
        if secure := self.run.assembly.settings.secure:
            cohort = self._limit_cohort(secure.grid, federation.cohort, cohort, len(nodes) if is_private else 0)
        federation = replace(federation, clients=clients, cohort=cohort)
        if federation.method.needs_budgets:
            levels = add_further_costs(federation.levels, federation.problem, fleet)  # a new node may name another cost
            federation = replace(federation, levels=levels)
            self._print_members(federation, fleet)
        return federation

    def _limit_cohort(self, grid: Quantizer, before: int, cohort: int, drawn: int) -> int:
        """Return a cohort whose sums the grid holds.

        Args:
            grid: Of a secure run.
            before: Clients of the round before.
            cohort: Clients of a round.
            drawn: Clients that a private round may draw; 0 without privacy.

        Raises:
            RunError: They are more than the grid holds.
        """
        if drawn > grid.clients:
            raise RunError(
                f"sums of {grid.bits} bits hold {grid.clients} clients, and {drawn} nodes have enrolled. Name those "
                "that take part, engine.nodes, or begin a new run with fewer secure.bits.",
                key="secure.bits",
            )
        if cohort > grid.clients > before:
            self.say(f"Note: a round takes {grid.clients} nodes at most: sums of {grid.bits} bits hold no more.")
        return min(cohort, grid.clients)

    # -- lines for the server's log

    def print_levels(self) -> None:
        """Print the levels."""
        assembly = self.assembly
        for level in assembly.plan.levels:
            self.say(
                f"Level {level.name}: depth {level.depth}, width {level.width:.2f}, {level.parameters:,} parameters, "
                f"{100 * level.share:.0f}% of the full model's {assembly.plan.cost}"
            )

    def _print_members(self, federation: Federation, budgets: DeviceBudgets) -> None:
        """Print the level of each node that is new or has another one, and why a node has none."""
        for client, (member, index) in enumerate(zip(self.manager.members, federation.level_of.tolist(), strict=True)):
            level = federation.levels[index].name if index >= 0 else ""
            if self._levels.get(member.node) == level:
                continue
            self._levels[member.node] = level
            reasons = [
                f"it affords {budget:.3g} of the full model's {cost}, and the smallest level costs {needs:.3g}"
                for cost, budget, needs in (() if level else find_failed_costs(federation, budgets, client))
            ]
            work = f"level {level}" if level else f"nothing: {', '.join(reasons)}"
            self.say(f"Node {member.description.name} trains {work}.")

    def print_missed_levels(self) -> None:
        """Print the levels whose nodes answered too late in all rounds, since a quorum ended them."""
        if self.rules.quorum < 1 or self.rules.over_selection:
            counted = {level for report in self.run.metrics for level in report["train"].get("by_level", ())}
            for level in sorted(set(self._levels.values()) - counted - {""}) if counted else ():
                self.say(
                    f"Note: level {level} has nodes, and no update of theirs has counted: other nodes have ended each "
                    "round. Raise cohort.quorum, or lower cohort.over_selection."
                )

    def print_round(self, report: Mapping[str, Any]) -> None:
        """Print the results of a round, and the nodes that failed."""
        train, names = report["train"], [member.description.name for member in self.manager.members]
        title = f"Round {report['round']}/{self.run.experiment.rounds}"
        if "privacy" in report:
            self.say(f"{title}: {format_privacy(report['privacy']['epsilon'], report['privacy']['delta'])}")
        else:
            loss = "-" if train["loss"] is None else f"{train['loss']:.3f}"
            levels = ", ".join(f"{count} at level {level}" for level, count in sorted(train["by_level"].items()))
            columns = report.get("evaluate", {}).get(self.run.experiment.evaluate.batch_norm[0])
            local = f"  local {format_percent(columns['local'])}%" if columns and columns["local"] is not None else ""
            self.say(
                f"{title}: loss {loss}, {train['clients']} updates{f' ({levels})' if levels else ''}{local}, "
                f"{report['seconds']:.1f} s"
            )
        if "undone" in report:
            self.say(f"  Round {report['round']} was {format_rollback(report['undone'], names)}")
        if "privacy" not in report:
            for failure in (*report["failures"], *report.get("evaluate", {}).get("failures", ())):
                self.say(f"  Node {names[failure['client']]}: {failure['reason']}")


def _describe_clients(assembly: Assembly) -> dict[str, Any]:
    """Return the entry "clients" of a run folder; without counts of samples in a private run."""
    clients, groups, numbers = assembly.federation.clients, assembly.fleet.names, assembly.federation.numbers
    is_private = assembly.settings.privacy is not None
    labels = None if is_private or clients.labels is None else clients.labels.tolist()
    first = {
        "group": list(groups),
        "level": [numbers[level] if level >= 0 else 0 for level in assembly.federation.level_of.tolist()],
        "samples": None if is_private else clients.num_examples.tolist(),
        "class_counts": labels,
    }
    return {"clients": len(groups), "groups": dict(Counter(groups)), "first": first}
