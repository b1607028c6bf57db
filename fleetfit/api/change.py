"""Continue a run with other values of a few keys: `fleetfit resume FOLDER --set rounds=20`."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from fleetfit.api.results import Run, find_last_round, load_ledger, load_usable_checkpoint, open_run
from fleetfit.config.dump import make_plain
from fleetfit.config.keys import format_key, get_value, replace_key
from fleetfit.config.load import resolve_tables
from fleetfit.config.merge import Table, flatten
from fleetfit.config.toml import check_values
from fleetfit.errors import ConfigError, escape_controls
from fleetfit.runs.folder import NODES, RunFolder, compute_checksum

_KEYS = ("rounds", "evaluate.patience", "checkpoint.every", "checkpoint.keep", "fleet.groups", "fleet.levels")
_KEYS_OF_FLEETS = ("rounds", "evaluate.patience", "fleet.levels", "engine.nodes", "engine.wait_s", "engine.deadline_s")


def change_run(files: RunFolder, sections: Mapping[str, Any], objects: Mapping[str, Any]) -> Run:
    """Return a run with other values of the keys that may change, after writing them (see `prepare_change`)."""
    run, write = prepare_change(files, sections, objects)
    write()
    return run


def prepare_change(
    files: RunFolder, sections: Mapping[str, Any], objects: Mapping[str, Any]
) -> tuple[Run, Callable[[], None]]:
    """Return a run with other values of the keys that may change, and what writes them into its folder.

    Args:
        files: The run folder.
        sections: Tables with the keys.
        objects: The objects in place of names, as `fleetfit.run` got them.

    Raises:
        ConfigError: A key may not change, or its value is wrong.
        PlanError: No level fits a new budget.
        RunError: The folder is damaged, or its checkpoints or its privacy do not fit the new values.
    """
    check_values(sections)
    change = _list_changes(files, resolve_tables(sections, Path.cwd()))
    before = table = files.read_config()
    for key, value in change.items():
        table = replace_key(table, key, value)
    table = make_plain(table)
    is_rule = change.get("fleet.levels") in ("cluster", "halving") and files.has(NODES)
    is_rule = is_rule and files.read_nodes("members") != files.read_nodes()  # it plans for those of now
    changed = [
        key for key in change if get_value(table, key) != get_value(before, key) or (is_rule and key == "fleet.levels")
    ]
    run = open_run(files, objects, table)
    if not changed:
        return run, lambda: None
    trained = find_last_round(files)
    if run.experiment.rounds <= trained:
        raise ConfigError(
            f"{files.path} has trained {trained} rounds. Set more to continue: rounds = {trained + 10}.", key="rounds"
        )
    run._change = trained, changed
    privacy = run.assembly.settings.privacy
    if privacy is not None and privacy.noise_from_budget and "rounds" in changed:
        raise ConfigError(
            "rounds: the noise of this run follows from privacy.epsilon and its rounds, and stays for the whole run. "
            "Begin a new run; its epsilon adds to that of this one.",
            key="rounds",
        )
    if run._is_over:
        cause, key = "early stopping", "evaluate.patience"
        if privacy is not None and run.assembly.settings.rounds <= trained:
            cause, key = "the privacy budget", "privacy.epsilon"
        raise ConfigError(f"{cause} has ended {files.path} after {trained} rounds. Raise {key}.", key=key)
    nodes = files.json(NODES) if files.has(NODES) and "fleet.levels" in changed else None
    if nodes is not None:
        nodes |= {"planned": nodes["members"]}
        run._plan_for(files.read_nodes("members"))
    load_usable_checkpoint(run, files.count_reports())  # raises what does not fit, before a file is changed
    load_ledger(run)
    chosen = run.assembly.experiment.recorded.computing
    if chosen != run.experiment.recorded.computing:
        table = replace_key(table, "recorded.computing", dict(chosen))
    return run, partial(_write_change, run, table, nodes)


def _list_changes(files: RunFolder, sections: Table) -> dict[str, Any]:
    """Return the values of the keys that change, by dotted key.

    Raises:
        ConfigError: One of them may not change.
    """
    keys = _KEYS_OF_FLEETS if files.has(NODES) else _KEYS
    for key in flatten(sections):
        if not any(f"{key}.".startswith(f"{one}.") for one in keys):
            reason = "The budgets are those of the nodes. " if key.startswith("fleet.groups") else ""
            raise ConfigError(
                f"{format_key(key)}: a run continues with its settings, but for {', '.join(keys)}. {reason}For another "
                f'value, start a new run; with init_from = "{files.path}" it begins with this model.',
                key=key,
            )
    return {key: value for key in keys if (value := get_value(sections, key)) is not None}


def _write_change(run: Run, table: Table, nodes: Any) -> None:
    """Write the tables into `config.toml`, with its first comment, and what changed into `environment.json`."""
    assert run._change is not None
    (trained, changed), files = run._change, RunFolder(run.files.path)
    with files.hold():
        before = files.text("config.toml")
        lines = before.splitlines(keepends=True)
        heading = "".join(lines[: next((i for i, line in enumerate(lines) if not line.startswith(("#", "\n"))), 0)])
        text = heading + escape_controls(tomli_w.dumps(table))
        environment, after = files.environment.dump(), "" if files.is_edited() else compute_checksum(text)
        entry = {"round": trained, "keys": list(changed), "before": compute_checksum(before), "after": after}
        if text == before:  # levels by the same rule, for other nodes
            del entry["before"]
        environment["changed"] = [*environment.get("changed", ()), entry]
        files.write("environment.json", json.dumps(environment, indent=2) + "\n")
        files.write("config.toml", text)  # from here on the change has happened
        if nodes is not None:
            files.write(NODES, json.dumps(nodes, indent=2) + "\n")
    run._change, run.files = None, RunFolder(files.path)  # what was read of it is old
