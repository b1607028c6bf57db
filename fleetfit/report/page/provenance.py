"""The section on provenance: settings, machine, versions, commit, command, and links to files."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleetfit.errors import join_some, truncate
from fleetfit.report.page.blocks import Block, Fact, FactList, Fold, Link, Listing, PageSection, Sheet
from fleetfit.report.text import Table
from fleetfit.runs import RUN_FILES
from fleetfit.runs.comparison import ComparisonRecord, RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import EnvironmentRecord, FleetRecord

_COMPARISON_FILES = ("results.json", "table.csv", "table.md", "plots")
_LONGEST = 500  # characters
_MAX_MACHINES = 4
_MAX_RUNS = 300


def list_links(folder: Path, page: Path, names: Sequence[str] = (*RUN_FILES, "plots")) -> list[Link]:
    """Return links to the existing files of a folder, relative to the page."""
    try:
        path = os.path.relpath(folder.resolve(), page.resolve().parent)
    except ValueError:  # on another drive
        return []
    existing = [name for name in names if (folder / name).exists()]
    # "./" first, so that a browser does not read a part of the path as a scheme
    addresses = ["./" + quote(Path(path, name).as_posix()) for name in existing]
    labels = [f"{name}/" if (folder / name).is_dir() else name for name in existing]
    return [Link(label, address) for label, address in zip(labels, addresses, strict=True)]


def make_run_provenance_section(run: RunFolder, page: Path) -> PageSection:
    """Return the provenance of a run."""
    model, data = (run.summary.model, run.summary.data) if run.is_finished else ("", "")
    facts: list[Fact] = [
        ("method", _format_section(run, "method", run.method)),
        ("model", _format_section(run, "model", model)),
        ("data", _format_section(run, "data", data)),
        ("clients", _format_clients(run.fleet) if run.fleet is not None else ""),
        ("each round", truncate(", ".join([*_list_keys(run, "cohort"), *_list_keys(run, "local")]), _LONGEST)),
        ("seed", str(run.seed)),
        *describe_machine(run.environment).items(),
        ("files", list_links(run.path, page)),
    ]
    blocks: list[Block] = [FactList([(name, value) for name, value in facts if value])]
    if run.config:
        blocks.append(Listing("config.toml, with every default", run.text("config.toml")))
    return PageSection("what", "Configuration and machine", blocks)


def make_comparison_provenance_section(record: ComparisonRecord, page: Path) -> PageSection:
    """Return the provenance of a comparison."""
    results = record.results
    environment = record.rows[0].records[0].environment if record.rows else EnvironmentRecord()
    command = format_command(environment.command)
    facts: list[Fact] = [
        ("run file", results.file),
        ("rows", ", ".join(dict.fromkeys(run.row for run in results.runs))),
        ("settings", ", ".join(filter(None, dict.fromkeys(run.setting for run in results.runs)))),
        ("seeds", ", ".join(str(seed) for seed in dict.fromkeys(run.seed for run in results.runs))),
        ("command", command if " compare " in command else ""),
        ("begun", format_time(environment.time)),
        ("machine", ", ".join(f"{v} cores" if k == "cores" else str(v) for k, v in results.machine.items() if v)),
        ("versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
        ("commit of FleetFit", results.commit or ""),
        ("files", list_links(record.folder, page, _COMPARISON_FILES)),
    ]
    facts = [(name, truncate(value, 2 * _LONGEST) if isinstance(value, str) else value) for name, value in facts]
    blocks: list[Block] = [FactList([(name, value) for name, value in facts if value])]
    settings = "\n".join(f"{name} = {_format_value(value)}" for name, value in results.settings.items())
    if settings:
        blocks.append(Listing("settings of all runs, with every default", settings))
    overrides: list[Fact] = [
        (", ".join(filter(None, [run.row, run.setting])), truncate(_format_value(run.overrides), _LONGEST))
        for run in results.runs
        if run.overrides
    ]
    if overrides:
        blocks.append(Fold("changes of each row and setting", [FactList(list(dict.fromkeys(overrides)))]))
    return PageSection("what", "Configuration and machine", blocks)


def make_runs_provenance_section(rows: Sequence[RowRecord]) -> PageSection:
    """Return the provenance of several runs: machines, and folder, time and command of each."""
    labels = [f"{row.row}, seed {seed}" for row in rows for seed, _ in row.runs]
    runs = [run for row in rows for run in row.records]
    machines = [describe_machine(run.environment) for run in runs]
    facts: list[Fact] = []
    for key in ("machine", "versions", "commit of FleetFit", "commit of the working folder"):
        values = list(dict.fromkeys(machine[key] for machine in machines if key in machine))
        if values:
            facts.append((key, join_some(values, _MAX_MACHINES, "; ")))
    cells = [
        (label, str(run.path), machine.get("begun", ""), machine.get("command", ""))
        for label, run, machine in zip(labels, runs, machines, strict=True)
    ]
    rest = len(cells) - _MAX_RUNS
    notes = (f"{rest} more runs are left out.",) if rest > 0 else ()
    table = Table(("run", "folder", "begun", "command"), tuple(cells[:_MAX_RUNS]), notes=notes)
    fold = Fold("folder, time and command of each run", [Sheet(table)])
    return PageSection("what", "Configuration and machine", [FactList(facts), fold])


def describe_machine(environment: EnvironmentRecord) -> dict[str, str]:
    """Return the facts of `environment.json` by label."""
    cores, threads, commit = environment.processors, environment.threads, environment.git_commit
    machine = [
        environment.processor,
        f"{cores} cores" if cores else "",
        f"{threads} thread{'s' if threads != 1 else ''}" if threads else "",
        environment.cuda,
        environment.platform,
    ]
    versions = {name: getattr(environment, name) for name in ("fleetfit", "torch", "numpy", "python")}
    facts = {
        "command": format_command(environment.command),
        "begun": format_time(environment.time),
        "resumed": ", ".join(f"after round {one.round} ({format_time(one.time)})" for one in environment.resumed),
        "machine": ", ".join(part for part in machine if part),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit of FleetFit": environment.fleetfit_commit or "",
        "commit of the working folder": f"{commit}{', with changes' * environment.git_changes}" if commit else "",
    }
    return {name: truncate(value, _LONGEST) for name, value in facts.items() if value}


def format_command(words: Sequence[str]) -> str:
    """Return a command as typed; "" if unknown."""
    if not words:
        return ""
    program = Path(words[0])
    start = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*start, *words[1:]])


def format_time(time: str) -> str:
    """Return a time of `environment.json` with spaces: "2026-11-26 09:15:02 UTC"."""
    return time.replace("T", " ").replace("+00:00", " UTC")


def _format_section(run: RunFolder, section: str, name: str) -> str:
    """Return a name with the keys of its section."""
    table = run.get_setting(section, default={})
    if not isinstance(table, Mapping):
        return truncate(name or table, _LONGEST)
    keys = ", ".join(f"{key} = {_format_value(value)}" for key, value in table.items() if key != "name")
    return truncate(": ".join(filter(None, [name or str(table.get("name", "")), keys])), _LONGEST)


def _list_keys(run: RunFolder, section: str) -> list[str]:
    table, prefix = run.get_setting(section, default={}), "" if section == "local" else f"{section}."
    items = table.items() if isinstance(table, Mapping) else ()
    return [f"{prefix}{key} = {_format_value(value)}" for key, value in items]


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_format_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _format_clients(fleet: FleetRecord) -> str:
    sizes = [f"{name} ({count:,})" for name, count in fleet.groups.items()]
    groups = f", in groups {', '.join(sizes)}" if 1 < len(sizes) <= 12 else ""
    return truncate(f"{fleet.clients:,}{groups}", _LONGEST) if fleet.clients else ""
