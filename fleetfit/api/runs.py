"""One run from beginning to end: `run`, `resume`, and the steps that they are made of.

`run` writes a run folder (see `fleetfit.records`), `resume` goes on with one. After a kill at any moment, `resume`
continues from the newest checkpoint, and the final state equals that of an unbroken run bit for bit.

What is given for one run (`--set`, keywords) is refused where the run does not use it, for it was given to change that
run. A run file serves many runs, so a key of it that this one does not use is a note; a hook or an option that its
method never calls is a contradiction, and refused.
"""

import contextlib
import functools
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetfit import rounds
from fleetfit.api.described import COLUMNS, settled, short_name
from fleetfit.api.fingerprint import DATA, fingerprint, notes_on_change
from fleetfit.api.listening import Telling, listeners, split, telling
from fleetfit.api.progress import Rounds, Wanted, progress_of
from fleetfit.api.results import Run, load, usable_checkpoint
from fleetfit.check import check_layout
from fleetfit.config import Assembly, Experiment, assemble, experiment_of, read_experiment, to_toml
from fleetfit.config import secure as secure_file
from fleetfit.config.assembly import UnusedKey
from fleetfit.config.build.run import with_callbacks
from fleetfit.config.writing import dumped
from fleetfit.data import Data, class_counts
from fleetfit.errors import ConfigError, MissingExtra, RunError
from fleetfit.planner import Plan
from fleetfit.privacy import key_in, made_key, outside
from fleetfit.privacy.ledger import FILE as LEDGER
from fleetfit.records import RunFolder, choose_path, compute_checksums, describe_environment, to_json_value
from fleetfit.report import page, plots
from fleetfit.report.recorded import check_report, class_counts_in, summary_of, with_seconds
from fleetfit.stored import RUNS
from fleetfit.tensor_defaults import own_mode
from fleetfit.timekeeper import Timekeeper
from fleetfit.values import Server

# ---- whether what a user asked for is used: keys that would be ignored are refused before a run begins, or said ----

_CONTRADICTIONS = ("method.hooks.", "method.plus.", "cohort.choose")


def check_single(experiment: Experiment, verb: str) -> None:
    """Refuse a comparison where one run is asked for.

    Raises:
        ConfigError: The experiment has a `[compare]`.
    """
    parts = experiment.compare.given
    if parts:
        said = f"[[compare.{parts[0]}]]" if parts[0] in ("row", "setting") else f"[compare] {parts[0]}"
        raise ConfigError(
            f"{said}: {verb} is for one run, and this file compares several: use `fleetfit compare`. For one of its "
            "runs, give `fleetfit run` the config.toml in that run's folder, or a file without [compare]."
        )


def check_asked(unused: Iterable[UnusedKey], experiment: Experiment) -> None:
    """Refuse keys that the run does not use, where they were asked for beside the file or contradict its method.

    Args:
        unused: The keys that the run does not use.
        experiment: The description, as it was asked for.

    Raises:
        ConfigError: There is such a key.
    """
    for one in unused:
        if one.key.startswith(_CONTRADICTIONS) or any(covers(one.key, key) for key in experiment.asked.keys):
            raise ConfigError(f"{one} Leave it out.")


def covers(unused: str, key: str) -> bool:
    """Tell whether a key is among those of which one is not used: the same, inside of it, or around it."""
    return f"{unused}.".startswith(f"{key}.") or f"{key}.".startswith(f"{unused}.")


def gone(experiment: Experiment) -> list[str]:
    """Return a note for the keys of a file that went with the name to which they belonged, and for what was chosen."""
    by_section: dict[str, list[str]] = {}
    for key in experiment.asked.gone:
        section, _, inner = key.partition(".")
        by_section.setdefault(section, []).append(inner)
    chosen = experiment.asked.model
    said = (
        [f'No model is named, so it is "{chosen}", which fits the data: [model] name says otherwise.'] if chosen else []
    )
    return said + [
        f"[{section}] {', '.join(keys)}, as the run file has it, went with the name to which it belonged."
        for section, keys in by_section.items()
    ]


# ---- the proof of a layout before anything is trained with it ------------------------------------------------------

_proven: "weakref.WeakSet[Assembly]" = weakref.WeakSet()


def proven(assembly: Assembly, say: Callable[[str], None] | None = None) -> Assembly:
    """Prove the layout of what is trained; once, however often it is asked for.

    Args:
        assembly: What is run.
        say: Called with what is being done where it takes more than a moment.

    Returns:
        The assembly, with a warning among its notes if its architecture says why something cannot be proved.

    Raises:
        ModelError: The layout is wrong, or could not be proved.
    """
    if assembly in _proven:
        return assembly
    problem, levels = assembly.federation.problem, assembly.federation.levels
    report = check_layout(
        problem.architecture,
        problem.layout,
        [level.submodel for level in levels],
        input_shape=problem.input_shape,
        say=say,
    )
    if report.warning:
        assembly = replace(assembly, notes=(*assembly.notes, report.warning))
    _proven.add(assembly)
    return assembly


# ---- running and resuming ------------------------------------------------------------------------------------------

OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the report of each round, as it stands in `metrics.jsonl`."""
OnResult = Callable[[Mapping[str, Any]], None]
"""Called with what will stand in `summary.json`."""


@own_mode()
def run(
    source: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    out: str | Path | None = None,
    overrides: Sequence[str] = (),
    on_round: OnRound | None = None,
    callbacks: Sequence[Any] = (),
    progress: Wanted = "auto",
    **sections: Any,
) -> Run:
    """Run an experiment from beginning to end.

    Args:
        source: A run file, its tables, or an `Experiment`; the defaults when it is left out.
        out: The run folder; `runs/<time>-<name>-<hash>` by default.
        overrides: `a.b=c`, as on the command line.
        on_round: Called with each round's report; what it raises stops the run, which can be resumed.
        callbacks: What is told of the run beside the run file's `callbacks`: objects with some of the methods of
            `fleetfit.Callback`, functions that take each round's report, and names and tables as in a run file.
        progress: Whether rounds are shown while they run: "auto" in a notebook only, True also in a terminal.
        **sections: Sections of a run file; objects may stand in for names: `model=MyArchitecture()`, `data=my_data`.

    Returns:
        The finished run.

    Raises:
        FleetFitError: Something does not fit; nothing has been written unless rounds had begun.
    """
    prepared = prepare(described(source, overrides, **sections), out, callbacks=callbacks)
    _proceed_shown(prepared, on_round, progress)
    return prepared


def _proceed_shown(target: Run, on_round: OnRound | None, wanted: Wanted) -> None:
    """Run the rounds that are left, and show them where that is wanted."""
    shown = progress_of(target.experiment, wanted)
    calls = [one for one in (shown, on_round) if one is not None]

    def after_round(report: Mapping[str, Any]) -> None:
        for one in calls:
            one(report)

    try:
        proceed(target, after_round)
    finally:
        if isinstance(shown, Rounds):
            shown.close()


@own_mode()
def plan(
    source: str | Path | Mapping[str, Any] | Experiment | None = None,
    *,
    overrides: Sequence[str] = (),
    **sections: Any,
) -> Plan:
    """Plan the fleet of an experiment: the levels, what each of them is and costs, and who gets which.

    Args:
        source: A run file, its tables, or an `Experiment`; the defaults when it is left out.
        overrides: `a.b=c`, as on the command line.
        **sections: Sections of a run file; objects may stand in for names: `model=MyArchitecture()`, `data=my_data`.

    Returns:
        The plan that a run of it would follow. `Plan.to_toml()` saves it, and `fleet.levels` takes the saved one.

    Raises:
        FleetFitError: Something does not fit.
    """
    experiment = described(source, overrides, **sections)
    check_single(experiment, "plan")
    assembly = assemble(experiment)
    check_asked(assembly.unused, experiment)
    return assembly.plan


def described(
    source: str | Path | Mapping[str, Any] | Experiment | None = None, overrides: Sequence[str] = (), **sections: Any
) -> Experiment:
    """Return the experiment that a source, overrides and sections describe."""
    if isinstance(source, str | Path):
        found = read_experiment(source, overrides, **sections)
        return found if found.name else found.model_copy(update={"name": Path(source).stem})
    if isinstance(source, Experiment):
        return experiment_of(dumped(source, only_set=True), overrides, **sections)
    return experiment_of(source, overrides, **sections)


def prepare(
    experiment: Experiment,
    out: str | Path | None = None,
    say: Callable[[str], None] | None = None,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Check everything and make the run folder, without running a round.

    Args:
        experiment: The description.
        out: The run folder; below `runs` by default.
        say: Called with what is being done where checking takes more than a moment.
        callbacks: See `run`.
    """
    check_single(experiment, "run")
    written, objects = split(callbacks)
    experiment = with_callbacks(experiment, [*experiment.callbacks, *_checked_callbacks(written)])
    asked, experiment = experiment, settled(experiment)
    if experiment.start:
        RunFolder.open(experiment.start)
    assembly = assemble(experiment)
    check_asked(assembly.unused, asked)
    heard = listeners(experiment.callbacks, objects)
    engine = assembly.engine()  # before the folder: a device that is not there leaves nothing behind
    try:
        assembly = proven(assembly, say)  # while the engine's workers start
        folder = new_folder(assembly, _first_clients(assembly), out)
        made = Run(folder, assembly.experiment, assembly, engine)
        made._listeners = heard
        return made
    except BaseException:
        engine.close()
        raise


def _checked_callbacks(written: Sequence[Any]) -> list[Any]:
    """Return names and tables as a run file's `callbacks` has them."""
    return experiment_of({"callbacks": list(written)}).callbacks


def new_folder(
    assembly: Assembly,
    who: Mapping[str, Any],
    out: str | Path | None,
    further: Mapping[str, str] | None = None,
    heading: str = "",
) -> RunFolder:
    """Make the run folder of an assembly.

    Args:
        assembly: What is run.
        who: What `fleet.json` says of the clients.
        out: The folder; below `runs` by default.
        further: Further files and their texts.
        heading: Comment lines at the top of `config.toml`.
    """
    experiment = assembly.experiment
    config = to_toml(experiment)
    name = experiment.name or f"{assembly.data.name}-{short_name(experiment.method.name)}"
    path = choose_path(RUNS, name, config) if out is None else Path(out)
    privacy = assembly.settings.privacy
    if privacy is not None:  # before there is a folder
        outside(privacy.key_file, path)
        privacy.ledger.randomness(made_key(privacy.key_file))
    files = {
        "config.toml": heading + config,
        "plan.toml": assembly.plan.to_toml(),
        "fleet.json": json.dumps(who) + "\n",
    }
    if isinstance(assembly.data, Data) and assembly.data.columns:
        files[COLUMNS] = assembly.data.columns
    data = fingerprint(assembly)
    where = describe_environment() | ({} if data is None else {DATA: data})
    files["environment.json"] = json.dumps({**where, "sha256": compute_checksums(files)}, indent=2) + "\n"
    if assembly.settings.secure is not None:
        files[secure_file.FILE] = secure_file.written(assembly.settings.secure)
    if privacy is not None:
        files[LEDGER] = privacy.text()
    return RunFolder.create(path, files | dict(further or {}), assembly.federation.problem.base)


@own_mode()
def resume(
    folder: str | Path,
    *,
    on_round: OnRound | None = None,
    callbacks: Sequence[Any] = (),
    progress: Wanted = "auto",
    **sections: Any,
) -> Run:
    """Go on with a run after its newest checkpoint; a finished one is returned as it is.

    Args:
        folder: The run folder.
        on_round: Called with each round's report.
        callbacks: Beside those of the run's `config.toml`; see `run`. They are told of what they have not heard yet.
        progress: Whether rounds are shown; see `run`.
        **sections: The objects that stood in for names, if the run was started from Python with some.

    Raises:
        RunError: It is no run folder, another process is writing into it, or its format is not known.
    """
    found = load(folder, **sections)
    written, objects = split(callbacks)
    if not found.finished:
        found._listeners = listeners([*found.experiment.callbacks, *_checked_callbacks(written)], objects)
        for sentence in notes_on_change(found.files, found.assembly):
            logging.getLogger("fleetfit").warning("%s", sentence)
        _proceed_shown(found, on_round, progress)
    return found


def proceed(
    target: Run,
    on_round: OnRound | None = None,
    renew: rounds.Renew = rounds.unchanged,
    on_result: OnResult | None = None,
) -> None:
    """Run the rounds that are left, draw the plots, write the page and the summary.

    Args:
        target: The run.
        on_round: Called with each round's report.
        renew: See `rounds.run`.
        on_result: Called with the summary before anything is drawn, for whoever waits for the numbers.

    Raises:
        RunError: A file of the folder is damaged or cannot be written; found before anything is trained.
    """
    files, heard = target.files, target._take_listeners()
    target.__dict__["assembly"] = proven(target.assembly)  # of a run that goes on, it is not yet
    with contextlib.closing(target._take_engine()) as engine, files.held():
        taken = _taken_up(target)
        class_counts_in(files)  # drawn at the end
        engine.load(taken["clients"])
        if target.assembly.settings.secure is not None:
            secure_file.opened(target.assembly.settings.secure, files)
        _open_ledger(target)
        if files.begun():
            files.tidy(taken["server"].round)
            files.note_resumption(taken["server"].round)
        saving = Timekeeper()
        with telling(Telling(files, heard, *target._compared)) as told:
            told.start(target.experiment.rounds, taken["server"].round)
            for done in _rounds(target, engine, taken["server"], renew, saving):
                told.round(done)
                if on_round is not None:
                    on_round(done)
            told.end(_finish(target, saving, on_result))
    target.__dict__.pop("checkpoint", None)


def _taken_up(target: Run) -> dict[str, Any]:
    """Return where the run goes on: its newest checkpoint, or the start where none was due yet.

    Raises:
        RunError: Checkpoints, or the reports of the rounds before them, are damaged or gone.
    """
    trained = target.files.reported(check_report)
    found = usable_checkpoint(target, trained)
    if found is not None:
        return found
    if trained > target.experiment.checkpoint.every:
        raise RunError(
            f"{target.folder} has trained {trained} rounds, and their checkpoints are gone. Put the folder "
            "checkpoints back, or begin a new run."
        )
    return {"server": rounds.start(target.assembly.federation), "clients": {}, "statistics": None}


def _open_ledger(target: Run) -> None:
    """Give a private run its key, and what it has spent.

    Raises:
        RunError: One of them is not there, or not as it was.
    """
    privacy, files = target.assembly.settings.privacy, target.files
    if privacy is None:
        return
    outside(privacy.key_file, target.folder)
    nest = files.json(LEDGER)
    try:
        privacy.kept_in(nest, key_in(privacy.key_file), functools.partial(files.write, LEDGER))
    except ValueError as error:
        raise RunError(
            f"{target.folder / LEDGER} is damaged: {error}. Nobody knows what the run has spent, so it cannot go on."
        ) from None


def _rounds(
    target: Run, engine: rounds.Engine, server: Server, renew: rounds.Renew, saving: Timekeeper
) -> Iterator[dict[str, Any]]:
    """Run round by round; a round's line is written before its checkpoint, whose seconds are in the next line."""
    files, assembly, often = target.files, target.assembly, target.experiment.checkpoint
    settings = assembly.settings
    if settings.privacy is not None:
        left = settings.privacy.left(server.round, settings.rounds - server.round)
        settings = replace(settings, rounds=server.round + left)
    before = files.metrics()[: server.round]
    for done in rounds.run(assembly.federation, engine, settings, server, renew, before):
        report = to_json_value(with_seconds(done.report, saving.read()))
        files.append(report)
        if done.server.round % often.every == 0 or done.server.round == settings.rounds:
            after = done.server
            nest = {
                "server": {"state": after.state, "round": after.round, "memory": after.memory}
                | ({"trained": after.trained} if after.trained else {}),
                "clients": engine.save(),
                "statistics": done.statistics,
            }
            with saving.on("checkpoints"):
                files.save_checkpoint(after.round, nest, often.keep)
        yield report


def _finish(target: Run, saving: Timekeeper, on_result: OnResult | None) -> dict[str, Any]:
    """Draw the plots, where matplotlib is there, write the page; write and return the summary with its seconds.

    The summary says that a run is finished, so it is written last: what was cut off while drawing draws again.
    """
    metrics = target.metrics
    found = summary_of(_description(target), target.assembly.plan, metrics, target.assembly.notes)
    summary: dict[str, Any] = to_json_value(with_seconds(found, saving.read()))
    if on_result is not None:
        on_result(summary)
    if not any(target._compared):  # a comparison draws all its runs, and `fleetfit pictures` one of them
        with contextlib.suppress(MissingExtra):  # the command line says that there are no plots
            plots.plots_of_run(target.folder, summary, metrics)
        page.after_run(target.folder, summary)
    target.files.write("summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _description(target: Run) -> dict[str, Any]:
    """Return what was run, in words."""
    experiment, data = target.experiment, target.assembly.data
    norms = [norm for norm in experiment.evaluate.norms if norm in target.columns]
    return {
        "name": experiment.name,
        "method": short_name(experiment.method.name),
        "model": short_name(experiment.model.name),
        "data": data.name,
        "seed": experiment.seed,
        "norm": norms[0],
        "score": target.assembly.federation.problem.task.score,
    }


def _first_clients(assembly: Assembly, count: int = 20) -> dict[str, Any]:
    """Return class counts, group and level of the first clients, and how many are in each group."""
    simulation, fleet = assembly.simulation, assembly.fleet
    assert simulation is not None
    parts = [dict(part) for part in simulation.parts[:count]]
    classification = simulation.data.task == "classification"
    told = assembly.settings.privacy is None
    attackers = assembly.attackers
    return {
        "clients": len(fleet.group),
        "groups": {name: int((fleet.group == i).sum()) for i, name in enumerate(fleet.names)},
        "first": {
            "group": [fleet.names[g] for g in fleet.group[:count]],
            "level": [int(level) + 1 for level in assembly.federation.level_of[:count]],
            "samples": [len(part["train"]) for part in parts] if told else None,
            "class_counts": class_counts(simulation.data, parts).tolist() if classification and told else None,
        },
        **({} if attackers is None else {"hostile": list(attackers.clients)}),
    }
