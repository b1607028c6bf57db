"""Execute a run from start to end: `run`, `resume`, and their steps.

`run` writes a run folder (see `fleetfit.runs`), and `resume` continues one. After a kill at any moment, `resume`
continues from the newest checkpoint, and the final state has the same bits as after an uninterrupted run.

An override or keyword (`--set`, `local={...}`) is refused if its key has no effect, because the user meant to change
this run. An unused key of a run file gets a note, because a file serves many runs. A hook or option that the method
never calls is a contradiction, and refused.
"""

import contextlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, TypedDict, Unpack

from torch import nn

from fleetfit import files, names, rounds
from fleetfit.anatomy import Architecture
from fleetfit.anatomy.derive import DerivedArchitecture
from fleetfit.anatomy.proof import check_layout
from fleetfit.api.callbacks import CallbackRunner, make_callbacks, split_callbacks
from fleetfit.api.change import prepare_change
from fleetfit.api.code import compute_code_digests
from fleetfit.api.commands import format_open, format_resume
from fleetfit.api.outcome import describe_outcome
from fleetfit.api.progress import ProgressOption, RunDisplay, open_display
from fleetfit.api.results import (
    DERIVED,
    Objects,
    Run,
    find_data_changes,
    find_fingerprint,
    load_ledger,
    load_usable_checkpoint,
)
from fleetfit.config import Assembly, Experiment, load_experiment, to_toml
from fleetfit.config.assemble.data import build_data
from fleetfit.config.assemble.local import describe_training
from fleetfit.config.assemble.model import build_problem, find_derived
from fleetfit.config.assemble.run import assemble
from fleetfit.config.assemble.trust import SECURE_FILE, format_secure_file, resume_secure_run
from fleetfit.config.assembly import UnusedKey
from fleetfit.config.load import add_callbacks, check_source
from fleetfit.config.merge import drop_absent
from fleetfit.core import Server
from fleetfit.data import AbsentData, Data, class_counts
from fleetfit.data.transform import Transform
from fleetfit.engines.base import Engine
from fleetfit.errors import ConfigError, MissingExtra, RunError
from fleetfit.hooks import Method
from fleetfit.machine import isolate_torch_state
from fleetfit.planner import Plan
from fleetfit.privacy import check_key_place, load_or_create_key
from fleetfit.privacy.ledger import FILE as LEDGER
from fleetfit.rounds.timekeeper import Timekeeper
from fleetfit.runs import RUNS
from fleetfit.runs.comparison import find_comparison
from fleetfit.runs.environment import describe_environment
from fleetfit.runs.folder import RunFolder, choose_path, compute_checksum, to_json_value
from fleetfit.runs.schema import RoundRecord, SummaryRecord
from fleetfit.runs.summary import add_seconds, find_best, make_summary

Section = Mapping[str, Any]
"""Keys of a section of a run file."""
Model = str | nn.Module | Callable[..., Any] | Architecture | Section
"""What `run` takes as a model."""
NamedMethod = str | Callable[..., Method] | Section
"""What `run` takes as a method."""


class Sections(TypedDict, total=False):
    """The sections and keys of a run file that `run` takes as keywords; a comparison also takes `compare`."""

    model: Model
    data: Any
    method: NamedMethod
    fleet: Section
    local: Section
    cohort: Section
    peft: Section | str
    attack: Section
    secure: Section
    privacy: Section
    engine: Section | str
    evaluate: Section
    checkpoint: Section
    rounds: int
    seed: int
    name: str
    init_from: str | Path
    callbacks: Sequence[Any]
    compare: Section


OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the report of each round, as in `metrics.jsonl`."""


@isolate_torch_state()
def run(
    file: str | Path | Mapping[str, Any] | Experiment | None = None,
    *further: Never,
    model: Model | None = None,
    data: Any = None,
    method: NamedMethod | None = None,
    fleet: Section | None = None,
    local: Section | None = None,
    cohort: Section | None = None,
    peft: Section | str | None = None,
    attack: Section | None = None,
    secure: Section | None = None,
    privacy: Section | None = None,
    engine: Section | str | None = None,
    evaluate: Section | None = None,
    checkpoint: Section | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    name: str | None = None,
    init_from: str | Path | None = None,
    callbacks: Sequence[Any] = (),
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    progress: ProgressOption | RunDisplay = "auto",
    **unknown: Never,
) -> Run:
    """Run an experiment from start to end.

    Args:
        file: A run file, its tables, or an `Experiment`; the defaults if left out. The sections below win over it.
        *further: Nothing. Data are passed as `data=(x, y)`.
        model: A name, an instance of a PyTorch module, a function that makes one, an `Architecture`, or a table with
            `name` and keys of `[model]`.
        data: A name, a path, arrays, a data frame, texts, a PyTorch data set, a `Data`, or a table with `name` and keys
            of `[data]`.
        method: A name, a function that returns a `Method`, or a table with `name` and keys of `[method]`.
        fleet: Keys of `[fleet]`, such as `{"groups": [{"budget": 0.25}, {"budget": 1.0}]}`.
        local: Keys of `[local]`, such as `{"lr": 0.05, "epochs": 2}`.
        cohort: Keys of `[cohort]`: the clients of a round.
        peft: A name, or keys of `[peft]`: which part of the model is trained.
        attack: Keys of `[attack]`: simulated hostile clients.
        secure: Keys of `[secure]`; `{}` is secure aggregation with its defaults.
        privacy: Keys of `[privacy]`; `{}` is differential privacy with its defaults.
        engine: A name, or keys of `[engine]`: where jobs run.
        evaluate: Keys of `[evaluate]`.
        checkpoint: Keys of `[checkpoint]`.
        rounds: Rounds of training.
        seed: Seed of all random choices.
        name: Part of the run folder's name.
        init_from: Folder of another run, whose last state is the initial state.
        callbacks: Further callbacks besides the run file's: objects with methods of `fleetfit.Callback`, functions of a
            round's report, and names and tables as in a run file.
        out: The run folder; `runs/<time>-<name>-<hash>` by default.
        on_round: Called with each round's report. An exception stops the run, which can be resumed.
        progress: Whether to show notes, slow steps and rounds: a bar or lines on stderr, in a notebook the cell; False
            shows nothing. Or a display (see `fleetfit.api.progress.RunDisplay`).
        **unknown: Nothing. Another keyword is refused, with the key that it may mean.

    Returns:
        The finished run.

    Raises:
        FleetFitError: The experiment is wrong or the run fails. No files are written before the first round.
    """
    names.check_not_importing()
    check_source(file, *further)
    with open_display(progress) as display:
        display.say("Preparing the data, the model and its levels.")
        experiment = load_experiment(
            file, model=model, data=data, method=method, fleet=fleet, local=local, cohort=cohort, peft=peft,
            attack=attack, secure=secure, privacy=privacy, engine=engine, evaluate=evaluate, checkpoint=checkpoint,
            rounds=rounds, seed=seed, name=name, init_from=init_from, **unknown,
        )  # fmt: skip
        if out is not None and not experiment.compare.set_keys:
            path = files.parse_path(out)
            is_script = isinstance(progress, bool | str)
            with contextlib.suppress(OSError):  # making the folder raises it
                RunFolder.check_unused(path, format_resume(path, is_script), format_open(path, is_script))
        new_run = prepare(experiment, out, display.say, callbacks)
        _run_with_display(
            new_run, display, on_round, (*dropped_key_notes(experiment), *describe_training(new_run.experiment))
        )
    return new_run


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    fleet: Section | None = None,
    evaluate: Section | None = None,
    checkpoint: Section | None = None,
    on_round: OnRound | None = None,
    callbacks: Sequence[Any] = (),
    progress: ProgressOption | RunDisplay = "auto",
    **objects: Unpack[Objects],
) -> Run:
    """Continue a run after its newest checkpoint. A finished run is returned unchanged, unless it gets more rounds.

    Args:
        folder: The run folder.
        rounds: Rounds of training, those before included. A schedule is then that of all rounds.
        fleet: Other `groups` or `levels`. Levels that stay keep their shapes and numbers; with others, the run has
            other bits from there on than one that continues unchanged.
        evaluate: Another `patience`.
        checkpoint: Another `every` or `keep`.
        on_round: Called with each round's report.
        callbacks: Further callbacks besides those of the run's `config.toml` (see `run`). They first receive the missed
            rounds.
        progress: Whether to show rounds (see `run`).
        **objects: The objects in place of names, as `run` got them.

    Raises:
        RunError: The folder is not a run folder, another process is writing to it, or its format is unknown.
        ConfigError: A callback or the key file of `[privacy]` is wrong, or a key may not change.
        PlanError: No level fits a new budget.
    """
    change = drop_absent({"rounds": rounds, "fleet": fleet, "evaluate": evaluate, "checkpoint": checkpoint})
    return resume_run(folder, change, objects, on_round, callbacks, progress)


@isolate_torch_state()
def resume_run(
    folder: str | Path,
    change: Mapping[str, Any],
    objects: Mapping[str, Any],
    on_round: OnRound | None = None,
    callbacks: Sequence[Any] = (),
    progress: ProgressOption | RunDisplay = "auto",
) -> Run:
    """Continue a run, with other values of some keys (see `resume`)."""
    names.check_not_importing()
    files = RunFolder.open(folder, " The command that started it continues it.")
    old_run, write = prepare_change(files, change, objects)
    entries, callables = split_callbacks(callbacks)
    if old_run._is_over:
        return old_run
    if isinstance(old_run.assembly.data, AbsentData):
        raise old_run.assembly.data.make_error()
    old_run._callbacks = make_callbacks(add_callbacks(old_run.experiment, entries).callbacks, callables)
    write()  # once all checks are passed
    with open_display(progress, old_run.folder) as display:
        display.say("Preparing the data, the model and its levels.")
        if progress is False and not old_run.finished:  # a display shows all notes
            for sentence in find_data_changes(old_run.files, old_run.assembly):
                logging.getLogger("fleetfit").warning("%s", sentence)
        _run_with_display(old_run, display, on_round)
    return old_run


@isolate_torch_state()
@names.explain_plug_ins()
def plan(file: str | Path | Mapping[str, Any] | Experiment | None = None, **sections: Unpack[Sections]) -> Plan:
    """Plan the fleet of an experiment: the levels, their sizes and costs, and the level of each client.

    Args:
        file: A run file, its tables, or an `Experiment`; the defaults if left out.
        **sections: Sections of a run file, as `fleetfit.run` takes them. They win over `file`.

    Returns:
        The plan of a run of the experiment. Save it with `Plan.to_toml()`, and use the saved plan as `fleet.levels`.

    Raises:
        FleetFitError: Something does not fit.
    """
    experiment = load_experiment(file, **sections)
    check_single_run(experiment, "plan")
    assembly = assemble(experiment)
    check_requested_keys(assembly.unused, experiment)
    return assembly.plan


@isolate_torch_state()
@names.explain_plug_ins()
def derive(
    module: nn.Module | Callable[..., nn.Module] | str,
    data: Any,
    *,
    exits: str | Sequence[str] = "auto",
    heads: str = "auto",
    head: str = "keep",
    weights: str = "instance",
    axes: Mapping[str, str] | None = None,
    progress: ProgressOption = "auto",
) -> DerivedArchitecture:
    """Derive the levels of a plain PyTorch module: its axes of width, early exits, and a proof. Print it for the axes.

    `run(model=module, data=data)` does the same; this is to look at it, or to choose. The module stays as it is.

    Args:
        module: An instance, a class or function that makes one, or its name, such as "net.py:MyNet".
        data: As `run` takes it; its samples' shape, tokens and classes must fit the module.
        exits: "auto" finds a chain of blocks; "none"; or names of modules after which early classifiers sit.
        heads: Their classifiers: "own" new ones, or the module's last norm and head, "shared" by all exits. By "auto" a
            language model shares them if they have more parameters than a block.
        head: "new" replaces the module's classifier by one with the data's classes; "keep" keeps it.
        weights: Where training starts: the "instance"'s own weights, or "new" ones drawn by PyTorch's rules.
        axes: By pattern of axis names another name, or "whole" for axes that are not cut.
        progress: Whether to name the steps where they take long (see `run`).

    Raises:
        FleetFitError: The module does not fit the data, cannot be followed, or a level would compute something else.
    """
    positions = exits if isinstance(exits, str) else list(exits)
    section = {"exits": positions, "heads": heads, "head": head, "weights": weights, "axes": dict(axes or {})}
    with open_display(progress) as display:
        experiment = load_experiment(data=data, model={"name": module, "derive": section})
        problem = build_problem(experiment, build_data(experiment.data), display.say)
    derived = find_derived(problem.architecture)
    assert derived is not None
    return derived


# ---- the experiment ------------------------------------------------------------------------------------------------


def check_single_run(experiment: Experiment, verb: str) -> None:
    """Refuse a comparison if a single run is expected.

    Raises:
        ConfigError: The experiment has a section `[compare]`.
    """
    parts = experiment.compare.set_keys
    if parts:
        section = f"[[compare.{parts[0]}]]" if parts[0] in ("row", "setting") else f"[compare] {parts[0]}"
        raise ConfigError(
            f"{section}: {verb} takes a single run, but this file is a comparison. Use `fleetfit compare`. For one of "
            "its runs, pass the config.toml of that run's folder, or a file without [compare].",
            key=f"compare.{parts[0]}",
        )


_CONTRADICTIONS = ("method.hooks.", "method.options.", "cohort.selection")


def check_requested_keys(unused: Iterable[UnusedKey], experiment: Experiment) -> None:
    """Refuse unused keys that an override or a keyword sets, or that contradict the method.

    Args:
        unused: The keys that the run does not use.
        experiment: The experiment.

    Raises:
        ConfigError: There is such a key.
    """
    overrides = experiment.request.overrides
    for one in unused:
        if one.key.startswith(_CONTRADICTIONS) or any(is_related_key(one.key, key) for key in overrides):
            raise ConfigError(f"{one} Leave it out.", key=one.key)


def is_related_key(key: str, other: str) -> bool:
    """Return whether two dotted keys are equal, or one is inside the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def dropped_key_notes(experiment: Experiment) -> list[str]:
    """Return notes on a default model, and on keys that were dropped because an override replaced their component."""
    by_section: dict[str, list[str]] = {}
    for key in experiment.request.dropped:
        section, _, inner = key.partition(".")
        by_section.setdefault(section, []).append(inner)
    model = experiment.request.model
    notes = [f'The model is "{model}", chosen for the data. Set [model] name for another.'] if model else []
    return notes + [
        f"[{section}] {', '.join(keys)} of the run file: dropped, because an override names another component."
        for section, keys in by_section.items()
    ]


# ---- before the first round ----------------------------------------------------------------------------------------


@names.explain_plug_ins()
def prepare(
    experiment: Experiment,
    out: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Check the experiment and create the run folder, without running a round.

    Args:
        experiment: The experiment.
        out: The run folder; in `runs` by default.
        say: Called with a sentence before a slow step.
        callbacks: See `run`.
    """
    check_single_run(experiment, "run")
    entries, objects = split_callbacks(callbacks)
    experiment = add_callbacks(experiment, entries)
    if experiment.init_from:
        RunFolder.open(experiment.init_from)
    assembly = assemble(experiment, say=say)
    check_requested_keys(assembly.unused, experiment)
    named_callbacks = make_callbacks(experiment.callbacks, objects)
    engine = assembly.engine()  # before the folder, so that a missing device leaves no files
    try:
        assembly = verify_layout(assembly, say)  # while the engine's workers start
        folder = create_run_folder(assembly, _describe_first_clients(assembly), out)
        new_run = Run(folder, assembly.experiment, assembly, engine)
        new_run._callbacks = named_callbacks
        return new_run
    except BaseException:
        engine.close()
        raise


_verified: "weakref.WeakSet[Assembly]" = weakref.WeakSet()


def verify_layout(assembly: Assembly, say: Callable[[str], None] | None = None) -> Assembly:
    """Prove the layout of the model, once per assembly.

    Args:
        assembly: The assembly of the run.
        say: Called with a sentence before a slow proof.

    Returns:
        The assembly, with a further note if the architecture declares a part that cannot be proved.

    Raises:
        ModelError: The layout is wrong, or cannot be proved.
    """
    if assembly in _verified:
        return assembly
    problem, levels = assembly.federation.problem, [level.submodel for level in assembly.federation.levels]
    proved = getattr(problem.architecture, "report", None)  # of a derived one, with all its exits
    report = check_layout(
        problem.architecture, problem.layout, levels, input_shape=problem.input_shape, say=say, proved=proved
    )
    if report.warning:
        assembly = replace(assembly, notes=(*assembly.notes, report.warning))
    _verified.add(assembly)
    return assembly


def create_run_folder(
    assembly: Assembly,
    clients: Mapping[str, Any],
    out: str | Path | None,
    further: Mapping[str, str] | None = None,
    heading: str = "",
) -> RunFolder:
    """Create the run folder of an assembly.

    Args:
        assembly: The assembly of the run.
        clients: The content of `fleet.json`.
        out: The folder; in `runs` by default.
        further: Texts of further files, by name.
        heading: Comment lines at the top of `config.toml`.
    """
    experiment = assembly.experiment
    config = to_toml(experiment)
    name = experiment.name or f"{assembly.data.name}-{names.get_short_name(experiment.method.name)}"
    path = choose_path(RUNS, name, config) if out is None else Path(out)
    privacy = assembly.settings.privacy
    if privacy is not None:  # before the folder exists
        check_key_place(privacy.key_file, path)
        privacy.ledger.make_randomness(load_or_create_key(privacy.key_file))
    files: dict[str, str] = {
        "config.toml": heading + config,
        "plan.toml": assembly.plan.to_toml(),
        "fleet.json": json.dumps(clients) + "\n",
    }
    if isinstance(assembly.data, Data):
        section = experiment.data
        kind = section.name if isinstance(section.name, str) else ""
        files |= Transform.fit(assembly.data, kind, section.settings).to_files()
    derived = find_derived(assembly.federation.problem.architecture)
    if derived is not None:
        files[DERIVED] = json.dumps(derived.plan.to_payload()) + "\n"
    facts = {**describe_environment(), "score": assembly.federation.problem.task.score}
    if (fingerprint := find_fingerprint(assembly)) is not None:
        facts["data"] = fingerprint.dump()
    if code := compute_code_digests(experiment):
        facts["code"] = code
    facts["sha256"] = {"config.toml": compute_checksum(files["config.toml"])}
    files["environment.json"] = json.dumps(facts, indent=2) + "\n"
    if assembly.settings.secure is not None:
        files[SECURE_FILE] = format_secure_file(assembly.settings.secure)
    if privacy is not None:
        files[LEDGER] = privacy.to_text()
    return RunFolder.create(path, files | dict(further or {}), assembly.federation.problem.base)


def _describe_first_clients(assembly: Assembly, count: int = 20) -> dict[str, Any]:
    """Return the content of `fleet.json`: group sizes, and class counts, group and level of the first clients."""
    simulation, fleet = assembly.simulation, assembly.fleet
    assert simulation is not None
    parts = [dict(part) for part in simulation.parts[:count]]
    is_classification = simulation.data.task == "classification"
    is_public = assembly.settings.privacy is None
    attackers, numbers = assembly.attackers, assembly.federation.numbers
    return {
        "clients": len(fleet.group),
        "groups": {name: int((fleet.group == i).sum()) for i, name in enumerate(fleet.names)},
        "first": {
            "group": [fleet.names[g] for g in fleet.group[:count]],
            "level": [numbers[level] if level >= 0 else 0 for level in assembly.federation.level_of[:count].tolist()],
            "samples": [len(part["train"]) for part in parts] if is_public else None,
            "class_counts": class_counts(simulation.data, parts).tolist() if is_classification and is_public else None,
            "class_names": list(simulation.data.class_names) if is_classification and is_public else [],
        },
        **({} if attackers is None else {"hostile": list(attackers.clients)}),
    }


# ---- the rounds ----------------------------------------------------------------------------------------------------


def _run_with_display(target: Run, display: RunDisplay, on_round: OnRound | None, notes: Sequence[str] = ()) -> None:
    def after_round(report: Mapping[str, Any]) -> None:
        display.show_round(report)
        if on_round is not None:
            on_round(report)

    def after_result(summary: Mapping[str, Any]) -> None:
        display.show_result(summary)
        display.say("Drawing the plots and the page.")

    with contextlib.closing(display):
        display.start(target.folder, target.experiment, (*notes, *target.assembly.notes))
        run_remaining_rounds(target, after_round, on_result=after_result)


def run_remaining_rounds(
    target: Run,
    on_round: OnRound | None = None,
    renew: rounds.Renew = lambda federation: federation,
    on_result: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Run the remaining rounds, draw the plots, and write the page and the summary.

    Args:
        target: The run.
        on_round: Called with each round's report.
        renew: See `rounds.run`.
        on_result: Called with the content of `summary.json` before the plots are drawn.

    Raises:
        RunError: A file of the folder is damaged or cannot be written. This is checked before training.
    """
    files, callbacks = target.files, target._take_callbacks()
    target.__dict__["assembly"] = verify_layout(target.assembly)  # the layout of a resumed run is not verified yet
    with contextlib.closing(target._take_engine()) as engine, files.hold():
        checkpoint = _load_start(target)
        server: Server = checkpoint["server"]
        for problem in files.find_problems("fleet.json"):  # only the page needs it
            logging.getLogger("fleetfit").warning("%s: %s", target.folder, problem)
        engine.load_memories(checkpoint["clients"])
        if target.assembly.settings.secure is not None:
            resume_secure_run(target.assembly.settings.secure, files)
        load_ledger(target)
        (target.folder / "summary.json").unlink(missing_ok=True)  # of a finished run that trains further rounds
        if files.has_rounds():
            files.rewind(server.round)
            files.record_resumption(server.round)
        if target.assembly.plan != RunFolder(files.path).plan:
            _write_plan(target)
        saving = Timekeeper()
        with CallbackRunner(files, callbacks, *find_comparison(files.path)) as runner:
            runner.start(target.experiment.rounds, server.round)
            for report in _write_rounds(target, engine, server, renew, saving):
                runner.round(report)
                if on_round is not None:
                    on_round(report)
            runner.end(_write_results(target, saving, on_result))
    target.__dict__.pop("checkpoint", None)


def _write_plan(target: Run) -> None:
    """Write the files of the levels and clients of a run that continues with others."""
    assembly = target.assembly
    target.files.write("plan.toml", assembly.plan.to_toml())
    if assembly.simulation is not None:
        target.files.write("fleet.json", json.dumps(_describe_first_clients(assembly)) + "\n")


def _load_start(target: Run) -> dict[str, Any]:
    """Return the newest checkpoint, or a new server's if none is due yet.

    Raises:
        RunError: Checkpoints, or the reports of earlier rounds, are damaged or missing.
    """
    trained = target.files.count_reports()
    checkpoint = load_usable_checkpoint(target, trained)
    if checkpoint is not None:
        return checkpoint
    if trained > target.experiment.checkpoint.every:
        raise RunError(
            f"{target.folder} has trained {trained} rounds, but their checkpoints are missing. Restore the folder "
            "checkpoints, or start a new run.",
            path=target.folder / "checkpoints",
        )
    return {"server": rounds.start(target.assembly.federation), "clients": {}, "statistics": None}


def _load_validated(reports: Sequence[Mapping[str, Any]]) -> Iterator[RoundRecord]:
    """Yield the rounds that were evaluated on validation data; others are not parsed."""
    return (RoundRecord.load(r) for r in reports if r.get("evaluate", {}).get("split") == "validation")


def _write_rounds(
    target: Run, engine: Engine, server: Server, renew: rounds.Renew, saving: Timekeeper
) -> Iterator[dict[str, Any]]:
    """Yield the reports of the remaining rounds. Each is written before its checkpoint; the next has its seconds."""
    files, assembly, often = target.files, target.assembly, target.experiment.checkpoint
    levels = assembly.federation.levels
    settings = assembly.settings
    if settings.privacy is not None:
        remaining = settings.privacy.remaining_rounds(server.round, settings.rounds - server.round)
        settings = replace(settings, rounds=server.round + remaining)
    before, norm = files.metrics()[: server.round], target.experiment.evaluate.batch_norm[0]
    best = find_best(_load_validated(before), norm)
    for outcome in rounds.run(assembly.federation, engine, settings, server, renew, before):
        report = to_json_value(add_seconds(outcome.report, saving.read()))
        files.append(report)
        after = outcome.server
        best = find_best(_load_validated([report]), norm, best)
        best_round = 0 if best is None else best.round
        if after.round % often.every == 0 or after.round == best_round or outcome.is_last:
            checkpoint = {
                "server": {"state": after.state, "round": after.round, "memory": after.memory}
                | ({"trained": after.trained} if after.trained else {})
                | ({"prior": list(after.prior)} if after.prior else {}),
                "clients": engine.dump_memories(),
                "statistics": outcome.statistics,
                **({"levels": [level.name for level in levels]} if assembly.plan.changes else {}),
            }
            with saving.on("checkpoints"):
                files.save_checkpoint(after.round, checkpoint, often.keep, best_round)
        yield report


def _write_results(
    target: Run, saving: Timekeeper, on_result: Callable[[Mapping[str, Any]], None] | None
) -> dict[str, Any]:
    """Draw the plots if matplotlib is installed, write the page, and write and return the summary.

    The summary marks a run as finished, so it is written last: a run that is stopped while drawing draws again.
    """
    from fleetfit.report import figures, page  # needed only here, after the last round
    from fleetfit.report.drawing import make_plots_folder, save_figures

    experiment, assembly, metrics = target.experiment, target.assembly, target.metrics
    description = {
        "name": experiment.name,
        "method": names.get_short_name(experiment.method.name),
        "model": names.get_short_name(experiment.model.name),
        "data": assembly.data.name,
        "seed": experiment.seed,
        "norm": next(norm for norm in experiment.evaluate.batch_norm if norm in target.columns),
        "score": assembly.federation.problem.task.score,
    }
    results = make_summary(description, assembly.plan, metrics, assembly.notes)
    results["notes"] += describe_outcome(assembly, results)
    summary: dict[str, Any] = to_json_value(add_seconds(results, saving.read()))
    if on_result is not None:
        on_result(summary)
    title, _ = find_comparison(target.folder)
    if not title:  # a comparison draws all its runs together; `fleetfit pictures` draws a single one
        record = RunFolder(target.folder).replace_contents(stored_summary=SummaryRecord.load(summary))
        with contextlib.suppress(MissingExtra):  # the command line reports missing plots
            save_figures(figures.draw_run(record), make_plots_folder(target.folder))
        page.write_run_page(record)
    target.files.write("summary.json", json.dumps(summary, indent=2) + "\n")
    return summary
